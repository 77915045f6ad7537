"""A store whose calls end: the decorator of every store that lies in a directory, whose file system may hang.

Rules:
* Each call is made by the directory's guard (``local/hang_guard``), and given up when nothing is heard of it.
* A call that was given up may still take effect, as a request may whose answer was lost: each carries a precondition.
  What it may no longer touch is the caller's: a download is handed over piece by piece, as long as somebody waits.
* It sits next to the store itself: what it gives up, the retrying store asks again.
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
        directory: Where its objects lie.
        limit_s: How long a call may say nothing; None: the guard's own limit.
    """

    def __init__(self, store: Store, directory: Path, limit_s: float | None = None) -> None:
        super().__init__(store)
        self._guard = hang_guard(directory)
        self._limit_s = limit_s
        self._ending = threading.Event()

    def identity(self, expected: str | None = None) -> str | None:
        return self._bounded(lambda: self._store.identity(expected))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`Store.list`. All of it is listed at once."""
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
        """Give up at once what hangs, too."""
        self._ending.set()
        super().stop_retrying()

    def ask_patiently(self) -> None:
        """The opposite."""
        self._ending.clear()
        super().ask_patiently()


class _Awaited:
    """A source whose waits do not count: a slow local disk, or a byte limit, does not mean that the mirror hangs."""

    def __init__(self, source: Source, call: GuardedCall) -> None:
        self._source = source
        self._call = call

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._call.beat()  # given up, it may be closed
        with self._call.waits_elsewhere():
            return self._source.read_into(offset, buffer)
