"""A store whose calls always end: the decorator of every store in a directory, whose file system may hang.

Rules:
* The directory's guard (``local/hang_guard``) makes each call, and gives it up when it shows no progress.
* A call that was given up may still take effect, like a request whose answer was lost; its precondition makes that
  safe. It must no longer touch the caller's memory, so a download is handed over in pieces while the caller waits.
* It wraps the store itself, so the retrying store around it retries the calls that it gives up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckptmirror.local.direct_io import kept_buffer
from ckptmirror.local.hang_guard import GuardedCall, guarded_call, hang_guard
from ckptmirror.stores.base import ObjectInfo, Source, Store, Upload
from ckptmirror.stores.decorator import StoreDecorator

__all__ = ["HangGuardedStore"]

_Result = TypeVar("_Result")


class HangGuardedStore(StoreDecorator):
    """``store``, as long as its directory answers.

    Args:
        store: The store behind.
        directory: The directory of its objects.
        limit_s: How long a call may show no progress; None for the guard's own limit.
    """

    def __init__(self, store: Store, directory: Path, limit_s: float | None = None) -> None:
        super().__init__(store)
        self._guard = hang_guard(directory)
        self._limit_s = limit_s
        self._ending = threading.Event()

    def identity(self, expected: str | None = None) -> str | None:
        return self._bounded(lambda: self._store.identity(expected))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List all objects at once."""
        return iter(self._bounded(lambda: [*self._store.list(prefix)]))

    def upload(self, upload: Upload) -> ObjectInfo:

        def run() -> ObjectInfo:
            call = guarded_call()
            assert call is not None

            def progress(size_bytes: int) -> None:
                call.beat()
                upload.on_progress(size_bytes)

            return self._store.upload(replace(upload, source=_Awaited(upload.source, call), on_progress=progress))

        return self._bounded(run, upload.digest.size_bytes)

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:

        def run() -> None:
            call = guarded_call()
            assert call is not None
            with kept_buffer() as own:
                for start in range(0, len(buffer) or 1, len(own)):
                    piece = own[: len(buffer) - start]
                    self._store.download(name, generation=generation, offset=offset + start, buffer=piece)
                    place = buffer[start : start + len(piece)]
                    call.deliver(partial(place.__setitem__, slice(None), piece))

        self._bounded(run)

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        del operation, name, size_bytes
        return self._bounded(run)

    def _bounded(self, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        return self._guard.call(run, limit_s=self._limit_s, size_bytes=size_bytes, ending=self._ending)

    def stop_retrying(self) -> None:
        """Also give up at once every call that hangs."""
        self._ending.set()
        super().stop_retrying()

    def ask_patiently(self) -> None:
        """The opposite."""
        self._ending.clear()
        super().ask_patiently()


class _Awaited:
    """A source whose waits do not count as a hang: a slow local disk or a byte limit is not the mirror's fault."""

    def __init__(self, source: Source, call: GuardedCall) -> None:
        self._source = source
        self._call = call

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._call.beat()  # raises if the call was given up: the source may be closed
        with self._call.waits_elsewhere():
            return self._source.read_into(offset, buffer)
