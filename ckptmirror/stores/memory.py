"""``memory://name``: objects in this process, as strict as the strictest store. For tests, ours and users'.

Rules:
* Stores of the same name in one process see the same objects; :func:`drop` forgets a name.
* It has every capability: create-only, compare and swap, crc32c, metadata, sessions.
* Generations always rise, also after a deletion.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptmirror.core.errors import IntegrityError, ObjectNotFound, PreconditionFailed, StorePermanent, StoreTemporary
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores.base import Capabilities, ObjectInfo, Store, Upload
from ckptmirror.stores.locations import BucketLocation, parse_location

__all__ = ["SCHEMES", "MemoryStore", "drop", "normalise", "open"]

SCHEMES = ("memory",)
_CHUNK_BYTES = 4 * 1024 * 1024
_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}"


def normalise(url: str) -> str:
    """Return the normalised URL."""
    return parse_location(url, _NAME_PATTERN).url


def open(url: str) -> MemoryStore:
    """Open ``memory://name`` or ``memory://name/prefix``."""
    return MemoryStore(parse_location(url, _NAME_PATTERN))


def drop(name: str) -> None:
    """Forget every object of ``memory://name``."""
    with _buckets_lock:
        _buckets.pop(name, None)


@dataclass(slots=True)
class _Session:
    object_name: str
    received: bytearray = field(default_factory=bytearray)
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: ObjectInfo | None = None


@dataclass(slots=True)
class _Bucket:
    objects: dict[str, tuple[bytes, ObjectInfo]] = field(default_factory=dict)
    sessions: dict[str, _Session] = field(default_factory=dict)
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)


_buckets: dict[str, _Bucket] = {}
_buckets_lock = threading.Lock()


class MemoryStore(Store):
    """A mirror in this process's memory."""

    def __init__(self, location: BucketLocation) -> None:
        self._location = location
        with _buckets_lock:
            self._bucket = _buckets.setdefault(location.bucket, _Bucket())

    @property
    def url(self) -> str:
        """The mirror's URL."""
        return self._location.url

    @property
    def capabilities(self) -> Capabilities:
        """All of them."""
        return Capabilities(True, True, True, True, True)

    def stat(self, name: str) -> ObjectInfo | None:
        found = self._find(name)
        return None if found is None else found[1]

    def _find(self, name: str) -> tuple[bytes, ObjectInfo] | None:
        with self._bucket.lock:
            found = self._bucket.objects.get(self._location.object_name(name))
        return None if found is None else (found[0], replace(found[1], name=name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = self._location.under(prefix)
        with self._bucket.lock:
            found = {name: info for name, (_, info) in self._bucket.objects.items() if name.startswith(start)}
        return iter([replace(found[name], name=self._location.relative(name)) for name in sorted(found)])

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = self._at(name, generation)
        if info.size_bytes > limit_bytes:
            raise StorePermanent(f"{self.url}/{name} has {info.size_bytes} bytes, more than {limit_bytes}.")
        return data, info

    def _at(self, name: str, generation: int | None) -> tuple[bytes, ObjectInfo]:
        found = self._find(name)
        if found is None or generation not in (None, found[1].generation):
            raise ObjectNotFound(f"There is no object {name} on {self.url}" + (" any more." if generation else "."))
        return found

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        return self._put(name, bytes(data), if_generation, metadata or {})

    def _put(self, name: str, data: bytes, if_generation: int, metadata: Mapping[str, str]) -> ObjectInfo:
        object_name = self._location.object_name(name)
        with self._bucket.lock:
            there = self._bucket.objects.get(object_name)
            if (there[1].generation if there else 0) != if_generation:
                raise PreconditionFailed(f"{self.url}/{name} is not at generation {if_generation}.")
            info = ObjectInfo(name, len(data), next(self._bucket.generations), crc32c(data), dict(metadata))
            self._bucket.objects[object_name] = (data, info)
            return info

    def upload(self, upload: Upload) -> ObjectInfo:
        key, session = self._session(upload)
        with session.lock:
            if session.done is None:
                self._receive(session.received, upload)
                try:
                    self._check(session.received, upload)
                    session.done = self._put(upload.name, bytes(session.received), 0, upload.metadata)
                except (IntegrityError, PreconditionFailed):
                    self._bucket.sessions.pop(key, None)
                    raise
                session.received = bytearray()
            info = session.done
        if (info.size_bytes, info.crc32c) != (upload.digest.size_bytes, upload.digest.crc32c):
            raise IntegrityError(f"The session of {upload.name} created an object with other bytes.")
        upload.on_progress(info.size_bytes)
        return info

    def _session(self, upload: Upload) -> tuple[str, _Session]:
        object_name = self._location.object_name(upload.name)
        session = self._bucket.sessions.get(upload.session or "")
        if upload.session is not None and session is not None and session.object_name == object_name:
            return upload.session, session
        key, session = f"memory-session-{secrets.token_hex(8)}", _Session(object_name)
        with self._bucket.lock:
            self._bucket.sessions[key] = session
        upload.on_session(key)
        return key, session

    def _receive(self, received: bytearray, upload: Upload) -> None:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, upload.source.size_bytes))))
        while len(received) < upload.source.size_bytes:
            count = upload.source.read_into(len(received), buffer[: upload.source.size_bytes - len(received)])
            if count == 0:
                raise IntegrityError(f"The source of {upload.name} is shorter than it was.")
            received += buffer[:count]
            upload.on_progress(len(received))

    def _check(self, received: bytearray, upload: Upload) -> None:
        if (len(received), crc32c(received)) != (upload.digest.size_bytes, upload.digest.crc32c):
            raise IntegrityError(f"The bytes of {upload.name} are not those that were committed; nothing was stored.")

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        data, _ = self._at(name, generation)
        piece = memoryview(data)[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        if len(piece) < len(buffer):
            raise StoreTemporary(f"{self.url}/{name} ends before byte {offset + len(buffer)}.")

    def delete(self, name: str, *, generation: int) -> None:
        object_name = self._location.object_name(name)
        with self._bucket.lock:
            there = self._bucket.objects.get(object_name)
            if there is None:
                return
            if there[1].generation != generation:
                raise PreconditionFailed(f"{self.url}/{name} is not at generation {generation}.")
            del self._bucket.objects[object_name]

    def close(self) -> None:
        """Nothing to free; the objects stay."""
