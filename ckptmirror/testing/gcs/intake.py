"""Bytes on their way into a file, with their checksums.

Rules:
* What a file keeps of an unfinished upload is a multiple of 256 KiB; the rest waits in memory for the end
  (https://cloud.google.com/storage/docs/performing-resumable-uploads).
* Writing and hashing run in a thread, one batch at a time, while the next batch arrives.
* After an error, or a restart of the server, the file is the truth: it is cut to a multiple and hashed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import google_crc32c

__all__ = ["GRANULE_BYTES", "Intake", "invert_byte"]

GRANULE_BYTES = 256 * 1024
_BATCH_BYTES = 4 * GRANULE_BYTES
_READ_BYTES = 1024 * 1024


class Intake:
    """One file that grows.

    Attributes:
        kept_bytes: What is in the file and hashed.
    """

    def __init__(self, path: Path, *, md5: bool) -> None:
        self._path = path
        self._with_md5 = md5
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._batch: asyncio.Future[None] | None = None
        self._submitted_bytes = 0
        self._reset_hashes()

    def _reset_hashes(self) -> None:
        self.kept_bytes = 0
        self._crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False) if self._with_md5 else None

    @property
    def size_bytes(self) -> int:
        """All that arrived: in the file, on its way there, or waiting."""
        return self._submitted_bytes + self._waiting_bytes

    @property
    def crc32c(self) -> bytes:
        return self._crc32c.to_bytes(4, "big")

    @property
    def md5(self) -> bytes | None:
        return None if self._md5 is None else self._md5.digest()

    def recover(self) -> None:
        """Start from what the file holds, cut to a multiple of 256 KiB. Runs in a thread."""
        self._reset_hashes()
        self._waiting, self._waiting_bytes = [], 0
        size_bytes = os.fstat(self._file).st_size // GRANULE_BYTES * GRANULE_BYTES
        os.ftruncate(self._file, size_bytes)
        while self.kept_bytes < size_bytes:
            self._hash(os.pread(self._file, _READ_BYTES, self.kept_bytes))
        self._submitted_bytes = self.kept_bytes

    def _hash(self, chunk: bytes) -> None:
        if not chunk:
            raise OSError("the file is shorter than it was")
        self._crc32c = google_crc32c.extend(self._crc32c, chunk)
        if self._md5 is not None:
            self._md5.update(chunk)
        self.kept_bytes += len(chunk)

    def _take(self, chunks: list[bytes]) -> None:
        offset = self.kept_bytes
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                written = os.pwrite(self._file, view, offset)
                offset += written
                view = view[written:]
            self._hash(chunk)

    async def add(self, chunk: bytes) -> None:
        """Take the next bytes; they are in the file when ``settle`` has returned, but for the last odd part."""
        self._waiting.append(chunk)
        self._waiting_bytes += len(chunk)
        if self._waiting_bytes >= _BATCH_BYTES:
            await self._submit(self._waiting_bytes // GRANULE_BYTES * GRANULE_BYTES)

    async def _submit(self, size_bytes: int) -> None:
        await self.settle()
        chunks, taken_bytes = self._waiting, 0
        for index, chunk in enumerate(chunks):
            taken_bytes += len(chunk)
            if taken_bytes >= size_bytes:
                cut = len(chunk) - (taken_bytes - size_bytes)
                self._waiting = [chunk[cut:], *chunks[index + 1 :]]
                chunks = [*chunks[:index], chunk[:cut]]
                break
        self._waiting_bytes -= size_bytes
        self._submitted_bytes += size_bytes
        self._waiting = [chunk for chunk in self._waiting if chunk]
        taken = [chunk for chunk in chunks if chunk]
        self._batch = asyncio.get_running_loop().run_in_executor(None, self._take, taken)

    async def settle(self) -> None:
        """Wait until the batch on its way is in the file."""
        batch = self._batch
        if batch is not None:
            try:
                await asyncio.shield(batch)
            finally:
                if batch.done():
                    self._batch = None

    async def write_multiple(self) -> None:
        """Put what is a multiple of 256 KiB into the file; the odd rest goes on waiting."""
        if self._waiting_bytes >= GRANULE_BYTES:
            await self._submit(self._waiting_bytes // GRANULE_BYTES * GRANULE_BYTES)
        await self.settle()

    async def keep_multiple(self) -> None:
        """The stream broke off: keep what is a multiple of 256 KiB, forget the odd rest."""
        await self.write_multiple()
        self._waiting, self._waiting_bytes = [], 0

    async def finish(self) -> None:
        """Everything has arrived: put the odd rest into the file too."""
        if self._waiting_bytes:
            await self._submit(self._waiting_bytes)
        await self.settle()

    def md5_of_file(self) -> bytes:
        """The md5 of a finished file whose md5 was not computed on the way. Runs in a thread."""
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()

    def close(self) -> None:
        """Close the file; a batch under way must have settled."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def invert_byte(path: Path, offset: int) -> bool:
    """Let one stored byte rot; False if there is none at that offset."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        if byte:
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0xFF]))
    return bool(byte)
