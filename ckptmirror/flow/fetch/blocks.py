"""Blocks: reads the bytes of many files and objects, and compares each block with its checksum.

``receive`` downloads objects into temporaries. ``read_all`` keeps nothing, and reports what differs from the save.

Rules:
* One queue of ranges for all of them, and a few threads (``local.daemon_pool``): one large file is read in parallel,
  and many small ones too. A range is a run of whole blocks. Each thread has one buffer.
* The generation of an object is pinned: bytes of two versions are never mixed.
* A range of an object that does not verify is read again a bounded number of times: it may have broken in transit.
* A file is read past the page cache if the file system allows it, so that damage on the disk is found. A file that will
  be loaded is read through the page cache: the bytes that are checked are those that the load finds there, and the disk
  is read once.
* The first error ends ``receive``, including wrong bytes (I9). Blocks that an interrupted call left in a temporary, and
  that verify, are not fetched again. A temporary is sealed (fsynced and closed) after its last block; it is not renamed
  here.
* Damage does not end ``read_all``: it finds all of it. A mirror that stops answering ends the reading of that mirror.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, ObjectNotFound
from ckptmirror.core.model import Digest
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.verification import State
from ckptmirror.local import direct_io
from ckptmirror.local.checksums import BlockSum
from ckptmirror.local.daemon_pool import cores, run_jobs
from ckptmirror.local.listing import is_not_readable_now
from ckptmirror.local.range_file import RangeFile
from ckptmirror.stores.base import Store

__all__ = ["RANGE_BYTES", "WORKERS", "FileToRead", "Finding", "Incoming", "ObjectToRead", "read_all", "receive"]

WORKERS = 4
RANGE_BYTES = direct_io.BUFFER_SIZE_BYTES
_TRIES = 3
_PAGE = 4096
_Read: TypeAlias = Callable[[int, int, memoryview], int]
_AnyItem = TypeVar("_AnyItem", bound="_Item")


@dataclass(frozen=True)
class FileToRead:
    """A local file, and the digest that its bytes must have.

    Attributes:
        cached: Whether to read it through the page cache: it will be loaded right after.
    """

    path: Path
    digest: Digest
    cached: bool = False


@dataclass(frozen=True)
class ObjectToRead:
    """An object of a mirror at one generation, and the digest that its bytes must have."""

    store: Store
    name: str
    generation: int
    digest: Digest


@dataclass(frozen=True)
class Incoming:
    """An object, and the temporary that receives it, in a directory that exists.

    Attributes:
        ranges: The bytes that are wanted: the blocks that hold them come, and the rest of the file is a hole. None: all
            of them.
    """

    source: ObjectToRead
    path: Path
    ranges: tuple[range, ...] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a file or object did not read as it was saved.

    Attributes:
        state: ``damaged``; or, if that is unknown, ``unreadable`` or ``refused``.
        is_gone: It was there when it was listed, but is gone now: it may have been deleted on purpose.
    """

    why: str
    state: State = "damaged"
    is_gone: bool = False


def receive(incoming: Sequence[Incoming], *, on_bytes: Callable[[int, int], None]) -> None:
    """Download every object into its temporary; all of them are sealed on return, unless only ranges were wanted.

    ``on_bytes`` is called, by one thread at a time, with the number of bytes just received and the number just found in
    a temporary.

    Raises:
        IntegrityError: The mirror keeps sending other bytes than were saved.
        ObjectNotFound: An object was deleted or replaced meanwhile.
        StoreTemporary: The mirror stopped answering; the temporaries stay, and the next call continues them.
        LocalStorageFull: The disk filled up; the temporaries stay.
    """
    work = _Work([_Temporary(one) if one.ranges is None else _Partial(one, one.ranges) for one in incoming])

    def bring(item: _Temporary, span: range, buffer: memoryview) -> None:
        item.begin()
        is_kept = item.file.continued and not work.wrong_blocks(item.digest, span, buffer, item.read_kept)
        wrong = [] if is_kept else work.read(item, span, buffer)
        if wrong:
            raise IntegrityError(
                f"{item.source.store.url}/{item.source.name} is damaged: {_wrong_block(item.digest, wrong[0])} "
                f"({item.tries} downloads, same result).",
                hint="Stage the step from another mirror, or another step: see `ckptmirror ls`.",
            )
        item.end(wrong)
        with work.telling:
            on_bytes(0 if is_kept else len(span), len(span) if is_kept else 0)

    work.run(bring)


def read_all(
    sources: Sequence[FileToRead | ObjectToRead], *, on_bytes: Callable[[int], None] = lambda _count: None
) -> list[Finding | None]:
    """Read all files or objects of one place. Return for each, in order, what is wrong with it, or None.

    ``on_bytes`` is called, by one thread at a time, with the number of bytes just read. If a mirror stops answering,
    nothing is raised: the objects not read by then are ``unreadable``.
    """
    items = [_File(one) if isinstance(one, FileToRead) else _Object(one) for one in sources]
    work = _Work(items)
    ended: list[CkptMirrorError] = []

    def look(item: _Item, span: range, buffer: memoryview) -> None:
        if item.found is not None:
            return  # its fault is known already
        try:
            item.begin()
            if item.found is not None:
                return
            wrong = work.read(item, span, buffer)
        except (CkptMirrorError, OSError) as error:
            item.found = item.explained(error)
            if item.found is None:
                if not isinstance(error, CkptMirrorError):
                    raise
                ended.append(error)  # an error of the whole mirror
                work.stop.set()
            return
        item.end(wrong)
        with work.telling:
            on_bytes(len(span))

    # more threads than cores only disturb the read-ahead of the page cache
    is_cached = any(isinstance(one, FileToRead) and one.cached for one in sources)
    work.run(look, workers=cores() if is_cached else WORKERS)
    return [item.outcome(ended[0] if ended else None) for item in items]


class _Item:
    """One file or object while it is read."""

    tries = 1
    range_bytes = RANGE_BYTES

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        self.found: Finding | None = None
        run = max(self.range_bytes // digest.block_size_bytes, 1) * digest.block_size_bytes
        size = digest.size_bytes
        self.spans = [range(begin, min(begin + run, size)) for begin in range(0, size, run)] or [range(0)]
        self._wrong: list[int] = []
        self._left = len(self.spans)
        self._lock = threading.Lock()
        self._is_open = False

    def begin(self) -> None:
        with self._lock:
            if not self._is_open:
                self.open()
                self._is_open = True

    def end(self, wrong: Sequence[int]) -> None:
        """Note that a span was read to its end, and which of its blocks are wrong."""
        with self._lock:
            self._wrong += wrong
            self._left -= 1
            is_last = not self._left
        if is_last:
            self.complete()
            self.end_reading()

    def end_reading(self) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self.close()

    def outcome(self, ended: CkptMirrorError | None) -> Finding | None:
        """Return what is wrong with it; ``ended`` is the error that ended the reading early, if any."""
        if self.found is not None:
            return self.found
        if self._wrong:
            number, more = min(self._wrong), len(self._wrong) - 1
            others = f", and {more} more of {len(self.digest.blocks)} blocks are damaged" if more else ""
            return Finding(f"{_wrong_block(self.digest, number)}{others}")
        if self._left and ended is not None:
            state: State = "refused" if reach_after(ended) is Reach.REFUSED else "unreadable"
            return Finding(f"it was not read to its end: {ended}", state)
        return None

    def open(self) -> None:
        """Open it; called once before the first read."""

    def read(self, offset: int, length: int, buffer: memoryview) -> int:
        """Read ``length`` bytes into the start of ``buffer``; return how many were read."""
        raise NotImplementedError

    def complete(self) -> None:
        """Finish it; called once after the last read, if no error ended the reading."""

    def close(self) -> None:
        """Close it; called once after the last read."""

    def explained(self, error: Exception) -> Finding | None:
        """Return what an error of opening or reading means for these bytes; None if it means nothing for them."""
        raise NotImplementedError


def _wrong_block(digest: Digest, number: int) -> str:
    which = "SHA-256" if digest.hashes else "crc32c"
    return f"the {which} of block {number} (from byte {number * digest.block_size_bytes}) is wrong"


class _File(_Item):
    range_bytes = RANGE_BYTES // 2  # measured: twice as much at a time is slower from a disk

    def __init__(self, source: FileToRead) -> None:
        super().__init__(source.digest)
        self._source = source
        self._descriptor = -1

    def open(self) -> None:
        open_file = direct_io.open_regular if self._source.cached else direct_io.open_for_reading
        self._descriptor = open_file(self._source.path)
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes > self.digest.size_bytes:  # that it is shorter shows when it is read
            self.found = Finding(f"it has {size_bytes} bytes, but {self.digest.size_bytes} were saved")

    def read(self, offset: int, length: int, buffer: memoryview) -> int:
        whole_pages = min(len(buffer), -(-length // _PAGE) * _PAGE)  # direct reads are of whole pages
        return min(direct_io.read_full(self._descriptor, buffer[:whole_pages], offset), length)

    def close(self) -> None:
        os.close(self._descriptor)

    def explained(self, error: Exception) -> Finding | None:
        if isinstance(error, IntegrityError):
            return Finding("it is not a regular file")
        if not isinstance(error, OSError):
            return None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return Finding("it is gone", is_gone=True)
        why = f"it cannot be read: {error.strerror or error}"
        return Finding(why, "unreadable" if is_not_readable_now(error) else "damaged")


class _Object(_Item):
    tries = _TRIES

    def __init__(self, source: ObjectToRead) -> None:
        super().__init__(source.digest)
        self.source = source

    def read(self, offset: int, length: int, buffer: memoryview) -> int:
        source = self.source
        source.store.download(source.name, generation=source.generation, offset=offset, buffer=buffer[:length])
        return length

    def explained(self, error: Exception) -> Finding | None:
        if isinstance(error, ObjectNotFound):
            return Finding("it was deleted or replaced while it was read", is_gone=True)
        return None


class _Temporary(_Object):
    """An object that is downloaded into its temporary."""

    file: RangeFile

    def __init__(self, incoming: Incoming) -> None:
        super().__init__(incoming.source)
        self._path = incoming.path

    def open(self) -> None:
        self.file = RangeFile(self._path, self.digest.size_bytes)

    def read(self, offset: int, length: int, buffer: memoryview) -> int:
        super().read(offset, length, buffer)
        self.file.write_at(offset, buffer[:length])
        return length

    def read_kept(self, offset: int, length: int, buffer: memoryview) -> int:
        """Read what an earlier call left in the temporary."""
        self.file.read_at(offset, buffer[:length])
        return length

    def complete(self) -> None:
        self.file.seal()

    def close(self) -> None:
        self.file.close()


class _Partial(_Temporary):
    """An object of which only the blocks that hold some ranges are downloaded."""

    def __init__(self, incoming: Incoming, ranges: Sequence[range]) -> None:
        super().__init__(incoming)
        self.spans = _spans_over(self.digest, ranges, self.range_bytes)
        self._left = len(self.spans)

    def open(self) -> None:
        self.file = RangeFile(self._path, self.digest.size_bytes, sparse=True)

    def complete(self) -> None:
        """It is read right after, and then removed."""


def _spans_over(digest: Digest, ranges: Sequence[range], most_bytes: int) -> list[range]:
    """Return runs of whole blocks that hold ``ranges``, each of one block or up to ``most_bytes``."""
    size = digest.block_size_bytes
    inside = [range(one.start, min(one.stop, digest.size_bytes)) for one in ranges]  # what is not is found when read
    blocks = {number for one in inside if one for number in range(one.start // size, -(-one.stop // size))}
    spans: list[range] = []
    for number in sorted(blocks):
        begin, end = number * size, min((number + 1) * size, digest.size_bytes)
        if spans and spans[-1].stop == begin and end - spans[-1].start <= most_bytes:
            spans[-1] = range(spans[-1].start, end)
        else:
            spans.append(range(begin, end))
    return spans


class _Work(Generic[_AnyItem]):
    """One call: the state that its threads share."""

    def __init__(self, items: Sequence[_AnyItem]) -> None:
        self._items = items
        self.stop = threading.Event()
        self.telling = threading.Lock()

    def run(self, do: Callable[[_AnyItem, range, memoryview], None], *, workers: int = WORKERS) -> None:
        """Call ``do`` for every span of every item, and close every item; raise the first error."""

        def do_one(job: tuple[_AnyItem, range]) -> None:
            with direct_io.kept_buffer() as buffer, contextlib.suppress(_StoppedError):
                do(*job, buffer)

        def close() -> None:
            for item in self._items:
                item.end_reading()

        jobs = [(item, span) for item in self._items for span in item.spans]
        run_jobs(jobs, do_one, name="ckptmirror-blocks", workers=workers, stop=self.stop, at_end=close)

    def read(self, item: _Item, span: range, buffer: memoryview) -> list[int]:
        """Read a span, again if blocks are wrong; return the numbers of the blocks that stay wrong."""
        wrong: list[int] = []
        for _ in range(item.tries):
            wrong = self.wrong_blocks(item.digest, span, buffer, item.read)
            if not wrong:
                break
        return wrong

    def wrong_blocks(self, digest: Digest, span: range, buffer: memoryview, read: _Read) -> list[int]:
        """Read a span once, a buffer at a time; return the numbers of the blocks that have other checksums."""
        size = digest.block_size_bytes
        wrong: list[int] = []
        found = BlockSum(is_hashed=bool(digest.hashes))
        for offset in span[:: len(buffer)]:
            if self.stop.is_set():
                raise _StoppedError
            length = min(len(buffer), span.stop - offset)
            if read(offset, length, buffer) < length:  # it is too short
                return [*wrong, *range(offset // size, -(-span.stop // size))]
            for begin in range(offset, offset + length, size):  # a piece holds whole blocks, or is inside one
                end = min(begin + size, offset + length)
                found.update(buffer[begin - offset : end - offset])
                if end % size == 0 or end == digest.size_bytes:
                    number = begin // size
                    if found.crc32c != digest.blocks[number] or (digest.hashes and found.hash != digest.hashes[number]):
                        wrong.append(number)
                    found = BlockSum(is_hashed=bool(digest.hashes))
        return wrong


class _StoppedError(Exception):
    """Another thread hit an error that ends the work, or the caller was interrupted."""
