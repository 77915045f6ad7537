"""A store with rate limits: the decorator that keeps a mirror from using the whole network, or a bucket's whole quota.

Rules:
* A budget is a rate. What one second leaves unused can be used in the next second only, so no burst builds up.
* Calls are served in the order in which they come, across all threads: each reserves its time and waits for it.
* An upload pays for bytes as they are read, a download before it requests them. Control objects are small, and count
  only as requests.
* A wait ends at once, with a temporary error, when the store is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ckptmirror.core.errors import ConfigError, StoreTemporary
from ckptmirror.stores.base import ObjectInfo, Source, Store, Upload
from ckptmirror.stores.decorator import StoreDecorator

__all__ = ["Budget", "ThrottledStore"]

_BURST_S = 1.0
_LARGEST_PIECE_BYTES = 1024 * 1024
_SMALLEST_PIECE_BYTES = 4096
_Result = TypeVar("_Result")


class Budget:
    """So many units a second, shared by all threads (the generic cell rate algorithm: a time line, no timer).

    Args:
        per_s: The rate; more than 0.
        clock: Seconds, monotonic.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not per_s > 0:
            raise ConfigError(f"A limit is a number of units per second above 0, not {per_s}.")
        self._per_s = per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until_s = clock() - _BURST_S

    @property
    def piece_bytes(self) -> int:
        """How many bytes to take at once: about a second's worth at most, within sensible bounds."""
        return min(max(int(self._per_s), _SMALLEST_PIECE_BYTES), _LARGEST_PIECE_BYTES)

    def take(self, units: float) -> float:
        """Take ``units`` and return for how many seconds the caller must wait before it uses them."""
        with self._lock:
            now_s = self._clock()
            begins_s = max(self._paid_until_s, now_s - _BURST_S)
            self._paid_until_s = begins_s + units / self._per_s
            return max(0.0, self._paid_until_s - now_s)


class ThrottledStore(StoreDecorator):
    """``store``, within limits.

    Args:
        store: The store behind.
        bytes_per_s: Of uploads and downloads together; None for no limit.
        requests_per_s: Calls of any kind, a listing counted as one; None for no limit.
        clock: Seconds, monotonic.
        wait: Waits so many seconds, or until the store is closed, and returns whether it was; tests pass their own.
    """

    def __init__(
        self,
        store: Store,
        *,
        bytes_per_s: float | None = None,
        requests_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(store)
        self._bytes = None if bytes_per_s is None else Budget(bytes_per_s, clock)
        self._requests = None if requests_per_s is None else Budget(requests_per_s, clock)
        self._closed = threading.Event()
        self._wait = wait if wait is not None else self._closed.wait

    def upload(self, upload: Upload) -> ObjectInfo:
        if self._bytes is None:
            return super().upload(upload)
        source = _PaidSource(upload.source, self._pay_bytes, self._bytes.piece_bytes)
        return super().upload(replace(upload, source=source))

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        self._pay_bytes(len(buffer))
        super().download(name, generation=generation, offset=offset, buffer=buffer)

    def close(self) -> None:
        """End all waits, and close the store behind."""
        self._closed.set()
        self._store.close()

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        del operation, name, size_bytes
        self._pay(self._requests, 1)
        return run()

    def _pay_bytes(self, size_bytes: int) -> None:
        self._pay(self._bytes, size_bytes)

    def _pay(self, budget: Budget | None, units: int) -> None:
        delay_s = budget.take(units) if budget is not None else 0.0
        if delay_s > 0 and self._wait(delay_s):
            raise StoreTemporary(f"{self.url} was closed while a call waited for its turn.")


class _PaidSource:
    """A source that pays for its bytes as they are read, in pieces, so that no thread waits for a whole chunk."""

    def __init__(self, source: Source, pay: Callable[[int], None], piece_bytes: int) -> None:
        self._source = source
        self._pay = pay
        self._piece_bytes = piece_bytes

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return self._source.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Pay, and fill ``buffer`` from ``offset``."""
        done = 0
        while done < len(buffer):
            piece = buffer[done : done + self._piece_bytes]
            self._pay(min(len(piece), max(0, self.size_bytes - offset - done)))
            count = self._source.read_into(offset + done, piece)
            done += count
            if count < len(piece):
                break
        return done
