"""Deep reading: every byte of many files or objects, compared with the checksums of its blocks, and kept nowhere.

Rules:
* One pool for all (``local.pool``), by ranges, so that one large file is read in parallel too.
* Of an object the generation is pinned: what is put in its place meanwhile is not read for it.
* A block of a mirror that does not verify is asked for a bounded number of times: it may have broken on its way.
* A file is read past the page cache where the file system allows, so that what rotted on the disk is seen.
* Damage ends nothing: all of it is found. A mirror that stops answering ends the reading of that mirror.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptmirror.core.errors import CkptMirrorError, NotAuthorised, ObjectNotFound
from ckptmirror.core.model import Digest
from ckptmirror.core.verification import State
from ckptmirror.local import direct_io
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.listing import is_not_readable_now
from ckptmirror.local.pool import run_jobs
from ckptmirror.stores.base import Store

__all__ = ["WORKERS", "FileToRead", "Found", "ObjectToRead", "ToRead", "read_all"]

WORKERS = 4
_TRIES_PER_BLOCK = 3
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """Why something did not read as it was saved.

    Attributes:
        state: ``damaged``; or nobody knows: ``unreadable``, ``refused``.
        is_gone: It was there when it was listed, and is no more: it may have been deleted in order.
    """

    why: str
    state: State = "damaged"
    is_gone: bool = False


class ToRead(Protocol):
    """Bytes that can be read at any offset."""

    @property
    def digest(self) -> Digest:
        """What they must be."""
        ...

    @property
    def tries(self) -> int:
        """How often a block is read before it is called damaged."""
        ...

    def open(self) -> None:
        """Called once before the first fill."""
        ...

    def fill(self, offset: int, length: int, buffer: memoryview) -> memoryview:
        """Return ``length`` bytes from ``offset`` (fewer where there are fewer), in ``buffer``."""
        ...

    def close(self) -> None:
        """Called once after the last fill."""
        ...

    def explain(self, error: BaseException) -> Found | None:
        """What an error of the above says of these bytes; None if it says nothing of them."""
        ...


class FileToRead:
    """A local file."""

    tries = 1

    def __init__(self, path: Path, digest: Digest) -> None:
        self.digest = digest
        self._path = path
        self._descriptor = -1

    def open(self) -> None:
        """See :meth:`ToRead.open`."""
        self._descriptor = direct_io.open_for_reading(self._path)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            raise OSError(errno.ENXIO, "not a regular file")

    def fill(self, offset: int, length: int, buffer: memoryview) -> memoryview:
        """See :meth:`ToRead.fill`."""
        whole_pages = min(len(buffer), -(-length // _PAGE) * _PAGE)  # direct reads are of whole pages
        count = direct_io.read_full(self._descriptor, buffer[:whole_pages], offset)
        return buffer[: min(count, length)]

    def close(self) -> None:
        """See :meth:`ToRead.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def explain(self, error: BaseException) -> Found | None:
        """See :meth:`ToRead.explain`."""
        if not isinstance(error, OSError):
            return None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return Found("it is gone", is_gone=True)
        why = f"it cannot be read: {error.strerror or error}"
        return Found(why, "unreadable" if is_not_readable_now(error) else "damaged")


class ObjectToRead:
    """An object of a mirror, at one generation."""

    tries = _TRIES_PER_BLOCK

    def __init__(self, store: Store, name: str, generation: int, digest: Digest) -> None:
        self.digest = digest
        self._store = store
        self._name = name
        self._generation = generation

    def open(self) -> None:
        """See :meth:`ToRead.open`."""

    def fill(self, offset: int, length: int, buffer: memoryview) -> memoryview:
        """See :meth:`ToRead.fill`."""
        piece = buffer[:length]
        self._store.download(self._name, generation=self._generation, offset=offset, buffer=piece)
        return piece

    def close(self) -> None:
        """See :meth:`ToRead.close`."""

    def explain(self, error: BaseException) -> Found | None:
        """See :meth:`ToRead.explain`."""
        if isinstance(error, ObjectNotFound):
            return Found("it went, or was replaced, while it was read", is_gone=True)
        return None


@dataclass(frozen=True)
class _Job:
    """A run of whole blocks, ``[first, last)``."""

    item: _Item
    first: int
    last: int


class _Item:
    """One of the things to read, while it is read."""

    def __init__(self, source: ToRead, chunk_size_bytes: int) -> None:
        self.source = source
        digest = source.digest
        run = max(chunk_size_bytes // digest.block_size_bytes, 1)
        count = len(digest.blocks)
        self.jobs = [_Job(self, first, min(first + run, count)) for first in range(0, count, run)]
        self.wrong: list[int] = []
        self.found: Found | None = None
        self._remaining = len(self.jobs)
        self._lock = threading.Lock()
        self._is_open = False

    @property
    def is_unread(self) -> bool:
        """Whether some of it was not read."""
        return self._remaining > 0

    def open(self) -> None:
        with self._lock:
            if not self._is_open:
                self.source.open()
                self._is_open = True

    def job_over(self, wrong: Sequence[int]) -> None:
        with self._lock:
            self.wrong += wrong
            self._remaining -= 1
            is_last = not self._remaining
        if is_last:
            self.close()

    def close(self) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self.source.close()

    def outcome(self) -> Found | None:
        if self.found is not None or not self.wrong:
            return self.found
        number, digest = min(self.wrong), self.source.digest
        others = f", and {len(self.wrong) - 1} more of {len(digest.blocks)} blocks" if len(self.wrong) > 1 else ""
        return Found(f"block {number} (from byte {number * digest.block_size_bytes}) has another crc32c{others}")


def read_all(
    sources: Sequence[ToRead], *, on_bytes: Callable[[int], None] | None = None, workers: int = WORKERS
) -> list[Found | None]:
    """Read everything of one place and say of each what is wrong with it, in order; None: it is what was saved.

    ``on_bytes`` is called, by one thread at a time, with the number of bytes just read. A mirror that does not answer
    any more raises nothing: what was not read by then is ``unreadable``.
    """
    return _Reading(sources, on_bytes).run(workers)


class _Reading:
    """One call: what its threads share."""

    def __init__(self, sources: Sequence[ToRead], on_bytes: Callable[[int], None] | None) -> None:
        self._items = [_Item(source, direct_io.BUFFER_SIZE_BYTES) for source in sources]
        self._on_bytes = on_bytes
        self._telling = threading.Lock()
        self._stop = threading.Event()
        self._ended: CkptMirrorError | None = None

    def run(self, workers: int) -> list[Found | None]:
        jobs = [job for item in self._items for job in item.jobs]
        run_jobs(jobs, self._read, name="ckptmirror-verify", workers=workers, stop=self._stop, at_end=self._close)
        return [self._outcome(item) for item in self._items]

    def _close(self) -> None:
        for item in self._items:
            item.close()

    def _outcome(self, item: _Item) -> Found | None:
        found = item.outcome()
        if found is None and self._ended is not None and item.is_unread:
            state: State = "refused" if isinstance(self._ended, NotAuthorised) else "unreadable"
            return Found(f"it was not read to its end: {self._ended}", state)
        return found

    def _read(self, job: _Job, buffer: memoryview) -> None:
        item = job.item
        if item.found is not None:
            return  # it is known already what is wrong with it
        try:
            item.open()
            wrong = [number for number in range(job.first, job.last) if not self._is_right(item.source, number, buffer)]
        except (CkptMirrorError, OSError) as error:
            item.found = item.source.explain(error)
            if item.found is None:
                if not isinstance(error, CkptMirrorError):
                    raise
                self._ended = self._ended or error  # the mirror as a whole
                self._stop.set()
            return
        item.job_over(wrong)

    def _is_right(self, source: ToRead, number: int, buffer: memoryview) -> bool:
        """Read one block, piece by piece, as often as it takes."""
        digest = source.digest
        begin = number * digest.block_size_bytes
        end = min(begin + digest.block_size_bytes, digest.size_bytes)
        for turn in range(source.tries):
            crc, at = 0, begin
            while at < end and not self._stop.is_set():
                piece = source.fill(at, min(len(buffer), end - at), buffer)
                if not len(piece):
                    return False  # it ends too early
                crc = crc32c(piece, crc)
                at += len(piece)
                if turn == 0 and self._on_bytes is not None:
                    with self._telling:
                        self._on_bytes(len(piece))
            if at < end:
                raise _StoppedError("the reading ended")
            if crc == digest.blocks[number]:
                return True
        return False


class _StoppedError(CkptMirrorError):
    """Another worker met what ends the reading; never the first error."""
