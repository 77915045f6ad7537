"""A store that fails as a script says.

Rules:
* A fault names an operation and which of its calls suffers; the first armed fault that meets a call is the only one.
* ``before``: the store behind never sees the call. ``after``: it took effect, and the answer is lost.
* ``identity`` suffers no faults. Without any it is the store behind, and the contract suite holds it to that.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ckptmirror.core.errors import CkptMirrorError, StoreTemporary
from ckptmirror.stores.base import ObjectInfo, Source, Store, Upload
from ckptmirror.stores.decorator import StoreDecorator

__all__ = ["OPERATIONS", "FaultyStore", "StoreFault"]

OPERATIONS = ("stat", "list", "read", "write", "upload", "download", "delete")
_Result = TypeVar("_Result")


def _not_answering() -> CkptMirrorError:
    return StoreTemporary("The mirror does not answer (a scripted fault).")


@dataclass(frozen=True, slots=True)
class StoreFault:
    """One thing that goes wrong.

    Attributes:
        operation: One of ``OPERATIONS``; "" meets all.
        name: A regular expression searched in the object's name (a listing's prefix).
        nth: The first matching call that suffers, from 1.
        times: How many suffer from there on; 0 means all: down for ever.
        when: Whether the call fails before or after it took effect; "" if it does not fail.
        error: Makes the error.
        corrupt_byte_at: Invert the byte at this offset of the object: of the answer for ``read`` and ``download``, of
            what is sent for ``write`` and ``upload``.
        short_by_bytes: So many bytes are missing at the end of the answer (``read``), or of what was asked
            (``download``).
        hold: The call waits for this event, at most ``hold_limit_s``, before anything else.
    """

    operation: str = ""
    name: str = ""
    nth: int = 1
    times: int = 1
    when: Literal["", "before", "after"] = ""
    error: Callable[[], CkptMirrorError] = _not_answering
    corrupt_byte_at: int | None = None
    short_by_bytes: int = 0
    hold: threading.Event | None = None
    hold_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.operation and self.operation not in OPERATIONS:
            raise ValueError(f"there is no operation {self.operation!r}; there are {', '.join(OPERATIONS)}")


_NO_FAULT = StoreFault()


class FaultyStore(StoreDecorator):
    """``store``, with faults.

    Attributes:
        calls: Every call so far: (operation, name).
    """

    def __init__(self, store: Store, faults: Sequence[StoreFault] = ()) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._faults: list[StoreFault] = []
        self._seen: list[int] = []
        self.calls: list[tuple[str, str]] = []
        self.script(*faults)

    def script(self, *faults: StoreFault) -> None:
        """Replace the script and restart the count."""
        with self._lock:
            self._faults = list(faults)
            self._seen = [0] * len(faults)

    def go_down(self) -> None:
        """From now on nothing is answered."""
        self.script(StoreFault(times=0, when="before"))

    def stat(self, name: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`."""
        return self._suffer(self._choose("stat", name), lambda: self._store.stat(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`Store.list`. A fault ``after`` strikes when the last object was yielded."""
        fault = self._choose("list", prefix)
        before = replace(fault, when="" if fault.when == "after" else fault.when)
        yield from self._suffer(before, lambda: self._store.list(prefix))
        if fault.when == "after":
            raise fault.error()

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """See :meth:`Store.read`."""
        fault = self._choose("read", name)
        data, info = self._suffer(fault, lambda: self._store.read(name, generation=generation, limit_bytes=limit_bytes))
        return _inverted(data, fault.corrupt_byte_at)[: len(data) - fault.short_by_bytes], info

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See :meth:`Store.write`."""
        fault = self._choose("write", name)
        sent = _inverted(data, fault.corrupt_byte_at)
        return self._suffer(
            fault, lambda: self._store.write(name, sent, if_generation=if_generation, metadata=metadata)
        )

    def upload(self, upload: Upload) -> ObjectInfo:
        """See :meth:`Store.upload`."""
        fault = self._choose("upload", upload.name)
        if fault.corrupt_byte_at is not None:
            upload = replace(upload, source=_RottenSource(upload.source, fault.corrupt_byte_at))
        return self._suffer(fault, lambda: self._store.upload(upload))

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        """See :meth:`Store.download`."""
        fault = self._choose("download", name)
        asked = buffer[: max(0, len(buffer) - fault.short_by_bytes)]
        self._suffer(fault, lambda: self._store.download(name, generation=generation, offset=offset, buffer=asked))
        if fault.corrupt_byte_at is not None and 0 <= fault.corrupt_byte_at - offset < len(asked):
            asked[fault.corrupt_byte_at - offset] ^= 0xFF
        if fault.short_by_bytes:
            raise StoreTemporary(f"The answer for {name} was {fault.short_by_bytes} bytes short (a scripted fault).")

    def delete(self, name: str, *, generation: int) -> None:
        """See :meth:`Store.delete`."""
        self._suffer(self._choose("delete", name), lambda: self._store.delete(name, generation=generation))

    def _choose(self, operation: str, name: str) -> StoreFault:
        with self._lock:
            self.calls.append((operation, name))
            for index, fault in enumerate(self._faults):
                if fault.operation not in ("", operation) or not re.search(fault.name, name):
                    continue
                self._seen[index] += 1
                if self._seen[index] >= fault.nth and (fault.times == 0 or self._seen[index] < fault.nth + fault.times):
                    return fault
        return _NO_FAULT

    def _suffer(self, fault: StoreFault, call: Callable[[], _Result]) -> _Result:
        if fault.hold is not None:
            fault.hold.wait(fault.hold_limit_s)
        if fault.when == "before":
            raise fault.error()
        result = call()
        if fault.when == "after":
            raise fault.error()
        return result


def _inverted(data: bytes, offset: int | None) -> bytes:
    if offset is None or offset >= len(data):
        return data
    return data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]


class _RottenSource:
    """A source in which one byte is not what was committed."""

    def __init__(self, source: Source, offset: int) -> None:
        self._source = source
        self._offset = offset

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        count = self._source.read_into(offset, buffer)
        if 0 <= self._offset - offset < count:
            buffer[self._offset - offset] ^= 0xFF
        return count
