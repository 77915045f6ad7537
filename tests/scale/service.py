"""An object service in memory, and clients that count what they ask of it, by the classes in which Cloud Storage does.

Rules:
* A client asks as ``stores/gs.py`` does: a read is a question for the object's description and one for its bytes; an
  object above the size that one request takes is a session and a request; a listing comes in pages of 1,000 names, and
  only as many as its reader takes.
* Bytes are those of objects and descriptions, without HTTP's headers.
* Artifacts are holes. Their bytes are not moved when they are sent: the service believes the digest, and counts the
  size. Everything else (metas, parts, lists) is stored and read back.
* A request takes ``REQUEST_S`` of its client's time, an eighth of that where a pool of eight threads asks, and an
  artifact as long as its bytes take. An object is seen from the time at which the request that creates it ends.
"""

from __future__ import annotations

import base64
import json
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from ckptmirror.core.errors import ObjectNotFound, PreconditionFailed, StorePermanent
from ckptmirror.core.model import Digest
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload

PAGE_NAMES = 1000
REQUEST_S = 0.05
_POOL_THREADS = 8
ONE_REQUEST_BYTES = 1 << 20  # of an artifact; for more, a session is opened
ONE_WRITE_BYTES = 8 << 20  # the same for a meta or a list


@dataclass
class Asked:
    """What was asked of the service.

    Attributes:
        writes: Requests that create or replace an object (class A), refused ones included.
        pages: Pages of listings (class A).
        reads: Requests for an object's description or its bytes (class B).
        refused: Writes that came too late: the object was there.
        sent_bytes: Of metas, parts and lists.
        received_bytes: The same, and descriptions and pages.
        artifact_bytes: Of artifacts, sent or received.
    """

    writes: int = 0
    pages: int = 0
    reads: int = 0
    refused: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    artifact_bytes: int = 0

    @property
    def requests(self) -> int:
        """All of them."""
        return self.writes + self.pages + self.reads

    def __add__(self, other: Asked) -> Asked:
        return Asked(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, factor: float) -> Asked:
        """So many times as much."""
        return Asked(*(round(getattr(self, one.name) * factor) for one in fields(self)))

    def __sub__(self, other: Asked) -> Asked:
        return Asked(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class _Stored:
    info: ObjectInfo
    data: bytes
    described_bytes: int
    from_s: float


@dataclass
class Service:
    """One bucket.

    Attributes:
        now_s: The time of the simulation.
        changes: How often each object was created or replaced, by name and second.
        at_second: How many requests came, by class ("write", "read") and second.
    """

    now_s: Callable[[], float]
    changes: Counter[tuple[str, int]] = field(default_factory=Counter)
    at_second: Counter[tuple[str, int]] = field(default_factory=Counter)
    _objects: dict[str, _Stored] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _generation: int = 0

    def find(self, name: str, at_s: float) -> _Stored | None:
        """An object as it is seen at a time."""
        found = self._objects.get(name)
        return found if found is not None and found.from_s <= at_s else None

    def below(self, prefix: str, at_s: float) -> list[_Stored]:
        """The objects below a prefix, in name order, as they are seen at a time."""
        names = self._names
        among = names[bisect_left(names, prefix) : bisect_left(names, prefix + "\U0010ffff")]
        return [found for name in among if (found := self._objects[name]).from_s <= at_s]

    def put(
        self,
        name: str,
        data: bytes,
        digest: Digest | None,
        metadata: Mapping[str, str],
        *,
        generation: int,
        at_s: float,
    ) -> _Stored:
        """Create or replace an object at a time."""
        there = self._objects.get(name)
        if (there.info.generation if there is not None else 0) != generation:
            raise PreconditionFailed(f"{name} is not at generation {generation}.")
        self._generation += 1
        size_bytes, crc = (len(data), crc32c(data)) if digest is None else (digest.size_bytes, digest.crc32c)
        info = ObjectInfo(name, size_bytes, self._generation, crc, dict(metadata))
        self._objects[name] = _Stored(info, data, len(_described(info)), at_s)
        if there is None:
            insort(self._names, name)
        self.changes[name, int(at_s)] += 1
        return self._objects[name]

    def fastest_change(self) -> tuple[str, int]:
        """The object that was changed most often within a second, and how often."""
        if not self.changes:
            return "", 0
        (name, _), times = self.changes.most_common(1)[0]
        return name, times

    def most_at_second(self, kind: str) -> int:
        """The most requests of a class within a second."""
        return max((times for (of, _), times in self.at_second.items() if of == kind), default=0)

    def forget_times(self) -> None:
        """Begin to count anew, when something else is measured."""
        self.changes.clear()
        self.at_second.clear()


def _described(info: ObjectInfo) -> str:
    """The answer that describes an object, with the fields that ``stores/gs.py`` asks for."""
    return json.dumps(
        {
            "name": f"a-prefix/{info.name}",
            "size": str(info.size_bytes),
            "generation": str(1_790_000_000_000_000 + info.generation),
            "crc32c": base64.b64encode((info.crc32c or 0).to_bytes(4, "big")).decode(),
            "metadata": dict(info.metadata),
        },
        indent=1,
    )


class Client(Store):
    """The service, as one node asks it.

    Attributes:
        asked: What this node asked so far.
        busy_s: How long its requests of this turn have taken so far.
    """

    def __init__(self, service: Service, url: str, bytes_per_s: float) -> None:
        self._service = service
        self._url = url
        self._bytes_per_s = bytes_per_s
        self.asked = Asked()
        self.busy_s = 0.0

    @property
    def _at_s(self) -> float:
        return self._service.now_s() + self.busy_s

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(True, True, True, True, True)

    def _request(self, kind: str) -> None:
        in_pool = threading.current_thread().name.startswith("ckptmirror-")
        self.busy_s += REQUEST_S / (_POOL_THREADS if in_pool else 1)
        self._service.at_second[kind, int(self._at_s)] += 1

    def _read_request(self, size_bytes: int) -> None:
        self._request("read")
        self.asked.reads += 1
        self.asked.received_bytes += size_bytes

    def stat(self, name: str) -> ObjectInfo | None:
        found = self._service.find(name, self._at_s)
        self._read_request(found.described_bytes if found is not None else 0)
        return found.info if found is not None else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._service.below(prefix, self._at_s)
        for start in range(0, max(len(found), 1), PAGE_NAMES):
            page = found[start : start + PAGE_NAMES]
            self._request("write")  # a listing counts as class A
            self.asked.pages += 1
            self.asked.received_bytes += sum(one.described_bytes for one in page)
            for one in page:
                yield one.info

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        info = self.stat(name)
        found = self._service.find(name, self._at_s)
        if info is None or found is None or generation not in (None, info.generation):
            raise ObjectNotFound(f"There is no object {name}.")
        if info.size_bytes > limit_bytes:
            raise StorePermanent(f"{name} has {info.size_bytes} bytes, more than {limit_bytes}.")
        self._read_request(info.size_bytes)
        return found.data, info

    def _written(self, size_bytes: int, one_request_bytes: int, write: Callable[[], _Stored]) -> ObjectInfo:
        for _ in range(1 if size_bytes <= one_request_bytes else 2):
            self._request("write")
            self.asked.writes += 1
        try:
            stored = write()
        except PreconditionFailed:
            self.asked.refused += 1
            raise
        self.asked.received_bytes += stored.described_bytes
        return stored.info

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        self.asked.sent_bytes += len(data)

        def put() -> _Stored:
            return self._service.put(name, data, None, metadata or {}, generation=if_generation, at_s=self._at_s)

        return self._written(len(data), ONE_WRITE_BYTES, put)

    def upload(self, upload: Upload) -> ObjectInfo:
        self.asked.artifact_bytes += upload.digest.size_bytes
        self.busy_s += upload.digest.size_bytes / self._bytes_per_s

        def put() -> _Stored:
            return self._service.put(upload.name, b"", upload.digest, upload.metadata, generation=0, at_s=self._at_s)

        return self._written(upload.digest.size_bytes, ONE_REQUEST_BYTES, put)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:  # noqa: ARG002  as in Store
        found = self._service.find(name, self._at_s)
        if found is None or found.info.generation != generation:
            raise ObjectNotFound(f"There is no object {name}.")
        self._request("read")
        self.asked.reads += 1
        self.asked.artifact_bytes += len(buffer)
        buffer[:] = bytes(len(buffer))

    def delete(self, name: str, *, generation: int) -> None:
        raise NotImplementedError("nothing is deleted from a mirror")

    def close(self) -> None:
        """Nothing to free."""
