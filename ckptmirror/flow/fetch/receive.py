"""Receive: many objects of a mirror into temporaries, by ranges in parallel, every block verified as it arrives.

Rules:
* One pool for all objects (``local.pool``), so that many small files are parallel too.
* The generation is pinned: bytes of two versions of an object are never mixed.
* A block that is not what was saved is fetched again a bounded number of times; then it is an IntegrityError (I9).
* Blocks that an interrupted call left in a temporary, and that verify, are not fetched again.
* A temporary is sealed (fsynced and closed) once its last block is in; nothing here gives anything its final name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import Digest
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.pool import run_jobs
from ckptmirror.stores.base import Store

__all__ = ["CHUNK_SIZE_BYTES", "WORKERS", "Incoming", "receive"]

WORKERS = 4
CHUNK_SIZE_BYTES = 8 * 1024 * 1024
_TRIES_PER_BLOCK = 3

Fill: TypeAlias = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Incoming:
    """One object to bring.

    Attributes:
        object_name: Its name on the mirror.
        generation: Read at this generation only.
        digest: What its bytes must be.
        path: The temporary that receives them, in a directory that exists.
    """

    object_name: str
    generation: int
    digest: Digest
    path: Path


@dataclass(frozen=True)
class _Job:
    """A run of whole blocks of one file, ``[offset, end)``."""

    file: _Receiving
    offset: int
    end: int


def receive(
    store: Store,
    incoming: Sequence[Incoming],
    *,
    on_bytes: Callable[[int, int], None] | None = None,
    workers: int = WORKERS,
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
) -> None:
    """Bring every object into its temporary; all of them are sealed on return.

    ``on_bytes`` is called, by one thread at a time, with bytes just received and bytes just found in place.

    Raises:
        IntegrityError: The mirror keeps sending other bytes than were saved.
        ObjectNotFound: An object went, or was replaced, meanwhile.
        StoreTemporary: The mirror stopped answering; the temporaries stay, and the next call continues them.
        LocalStorageFull: The disk filled up; the temporaries stay.
    """
    _Reception(store, incoming, on_bytes, chunk_size_bytes).run(workers)


class _Receiving:
    """One temporary while its blocks come in."""

    def __init__(self, incoming: Incoming, chunk_size_bytes: int) -> None:
        self.incoming = incoming
        run = max(chunk_size_bytes // incoming.digest.block_size_bytes, 1) * incoming.digest.block_size_bytes
        size = incoming.digest.size_bytes
        self.jobs = [_Job(self, offset, min(offset + run, size)) for offset in range(0, size, run)] or [
            _Job(self, 0, 0)
        ]
        self._remaining = len(self.jobs)
        self._lock = threading.Lock()
        self._file: files.RangeFile | None = None

    def open(self) -> files.RangeFile:
        with self._lock:
            if self._file is None:
                self._file = files.RangeFile(self.incoming.path, self.incoming.digest.size_bytes)
            return self._file

    def job_over(self) -> None:
        with self._lock:
            self._remaining -= 1
            if self._remaining or self._file is None:
                return
            file, self._file = self._file, None
        file.seal()

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()


class _Reception:
    """One call: what its threads share."""

    def __init__(
        self, store: Store, incoming: Sequence[Incoming], on_bytes: Callable[[int, int], None] | None, chunk: int
    ) -> None:
        self._store = store
        self._receiving = [_Receiving(one, chunk) for one in incoming]
        self._chunk_size_bytes = chunk
        self._on_bytes = on_bytes
        self._telling = threading.Lock()
        self._stop = threading.Event()

    def run(self, workers: int) -> None:
        jobs = [job for file in self._receiving for job in file.jobs]
        run_jobs(jobs, self._bring, name="ckptmirror-stage", workers=workers, stop=self._stop, at_end=self._close)

    def _close(self) -> None:
        for file in self._receiving:
            file.close()

    def _bring(self, job: _Job, kept_buffer: memoryview) -> None:
        buffer = kept_buffer[: self._chunk_size_bytes]
        file = job.file.open()
        length = job.end - job.offset
        if file.continued and self._wrong_block(job, buffer, file.read_at) is None:
            kept = length
        else:
            kept = 0
            self._fetch(job, buffer, file)
        job.file.job_over()
        if self._on_bytes is not None:
            with self._telling:
                self._on_bytes(length - kept, kept)

    def _fetch(self, job: _Job, buffer: memoryview, file: files.RangeFile) -> None:
        incoming = job.file.incoming

        def from_mirror(offset: int, piece: memoryview) -> None:
            self._store.download(incoming.object_name, generation=incoming.generation, offset=offset, buffer=piece)
            file.write_at(offset, piece)

        wrong: int | None = None
        for _ in range(_TRIES_PER_BLOCK):
            wrong = self._wrong_block(job, buffer, from_mirror)
            if wrong is None:
                return
        assert wrong is not None
        raise IntegrityError(
            f"{self._store.url}/{incoming.object_name} is not what was saved: block {wrong} (at byte "
            f"{wrong * incoming.digest.block_size_bytes}) has another crc32c, {_TRIES_PER_BLOCK} times.",
            hint="Stage the step from another mirror, or another step: see `ckptmirror ls`.",
        )

    def _wrong_block(self, job: _Job, buffer: memoryview, fill: Fill) -> int | None:
        """Fill the job's range piece by piece; return the number of the first block that does not verify."""
        digest = job.file.incoming.digest
        crc = 0
        for offset in range(job.offset, job.end, len(buffer)):
            if self._stop.is_set():
                raise _StoppedError
            piece = buffer[: min(len(buffer), job.end - offset)]
            fill(offset, piece)
            position = offset
            while position < offset + len(piece):
                number = position // digest.block_size_bytes
                block_end = min((number + 1) * digest.block_size_bytes, digest.size_bytes)
                stop = min(block_end, offset + len(piece))
                crc = crc32c(piece[position - offset : stop - offset], crc)
                if stop == block_end:
                    if crc != digest.blocks[number]:
                        return number
                    crc = 0
                position = stop
        return None


class _StoppedError(Exception):
    """Another worker failed, or the caller was interrupted; never the first error."""
