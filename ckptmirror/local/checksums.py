"""CRC-32C of bytes and of files, block by block, with bounded memory.

Rules:
* A digest depends only on the bytes, not on how they were split into writes.
* Blocks start at 4 MiB; past 4,096 blocks the block size doubles and pairs of blocks are combined.
* Files are read past the page cache if the file system allows it, so that damage on the disk is found.
* A symbolic link is never followed: it could lead to other bytes.
* The library is loaded at its first use, because a verb sends its first request before it has bytes to check.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import MAX_BLOCKS, MIN_BLOCK_SIZE_BYTES, Digest
from ckptmirror.local import direct_io

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BlockDigest", "combine", "crc32c", "digest_file", "verify_file"]


@functools.cache
def _native() -> Any:
    from awscrt import checksums

    return checksums


def crc32c(buffer: Buffer, previous: int = 0) -> int:
    """Return the CRC-32C of any C-contiguous buffer, continuing from ``previous``. The GIL is released meanwhile."""
    view = direct_io.byte_view(buffer)
    return int(_native().crc32c(view, previous)) if view.nbytes else previous


def combine(first: int, second: int, second_size_bytes: int) -> int:
    """Return the CRC-32C of two joined pieces, from the CRC-32C of each and the length of the second."""
    return int(_native().combine_crc32c(first, second, second_size_bytes)) if second_size_bytes else first


class BlockDigest:
    """Computes the :class:`~ckptmirror.core.model.Digest` of bytes that come in any pieces."""

    def __init__(self, block_size_bytes: int = MIN_BLOCK_SIZE_BYTES) -> None:
        self._block_size_bytes = block_size_bytes
        self._blocks: list[int] = []
        self._current = 0
        self._current_size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Number of bytes taken so far."""
        return len(self._blocks) * self._block_size_bytes + self._current_size_bytes

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """CRC-32C of each block that is complete so far."""
        return tuple(self._blocks)

    def update(self, buffer: Buffer) -> None:
        """Take the next bytes."""
        view = direct_io.byte_view(buffer)
        taken = 0
        while taken < view.nbytes:
            piece = view[taken : taken + self._block_size_bytes - self._current_size_bytes]
            self._current = int(_native().crc32c(piece, self._current))
            self._current_size_bytes += piece.nbytes
            taken += piece.nbytes
            if self._current_size_bytes == self._block_size_bytes:
                self._end_block()

    def digest(self) -> Digest:
        """Return the digest of everything taken so far; more may follow."""
        blocks, whole, short = list(self._blocks), 0, self._current_size_bytes
        for block in blocks:
            whole = combine(whole, block, self._block_size_bytes)
        if short:
            blocks.append(self._current)
            whole = combine(whole, self._current, short)
        size_bytes, block_size_bytes = self.size_bytes, self._block_size_bytes
        if len(blocks) > MAX_BLOCKS:  # the full number of blocks, which is even, and a short one
            blocks = _combined_pairs(blocks, block_size_bytes)
            block_size_bytes *= 2
        return Digest(size_bytes, whole, block_size_bytes, tuple(blocks))

    def _end_block(self) -> None:
        self._blocks.append(self._current)
        self._current, self._current_size_bytes = 0, 0
        if len(self._blocks) <= MAX_BLOCKS:
            return
        last = self._blocks.pop()  # one too many: it begins the next, larger block
        self._blocks = _combined_pairs(self._blocks, self._block_size_bytes)
        self._current, self._current_size_bytes = last, self._block_size_bytes
        self._block_size_bytes *= 2


def _combined_pairs(blocks: list[int], size_bytes: int) -> list[int]:
    """Combine full blocks two by two; an odd last one, which may be short, stays as it is."""
    pairs = [combine(first, second, size_bytes) for first, second in zip(blocks[::2], blocks[1::2], strict=False)]
    return pairs + blocks[-1:] if len(blocks) % 2 else pairs


def digest_file(path: Path) -> Digest:
    """Read a file from the disk and return its digest.

    Raises:
        FileNotFoundError: There is no such file.
        IntegrityError: It cannot be read, or is not a regular file.
    """
    found = BlockDigest()
    descriptor = _open(path)
    try:
        for piece in _pieces(descriptor, path):
            found.update(piece)
    finally:
        os.close(descriptor)
    return found.digest()


def verify_file(path: Path, digest: Digest) -> None:
    """Read a file from the disk and compare it with ``digest``, block by block.

    Raises:
        FileNotFoundError: There is no such file.
        IntegrityError: It differs (the message says where), cannot be read, or is not a regular file.
    """
    descriptor = _open(path)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != digest.size_bytes:
            raise IntegrityError(f"{path} has {size_bytes} bytes, but {digest.size_bytes} were saved.")
        found = BlockDigest(digest.block_size_bytes)
        checked = 0
        for piece in _pieces(descriptor, path):
            found.update(piece)
            checked = _compare_blocks(path, digest, found.full_blocks, checked)
    finally:
        os.close(descriptor)
    whole = found.digest()
    _compare_blocks(path, digest, whole.blocks, checked)
    if whole != digest:
        raise IntegrityError(
            f"{path}: crc32c {whole.crc32c:08x} over {whole.size_bytes} bytes, "
            f"but {digest.crc32c:08x} over {digest.size_bytes} bytes was saved."
        )


def _compare_blocks(path: Path, digest: Digest, found: tuple[int, ...], checked: int) -> int:
    for index in range(checked, len(found)):
        expected = digest.blocks[index] if index < len(digest.blocks) else None
        if found[index] != expected:
            offset = index * digest.block_size_bytes
            raise IntegrityError(
                f"{path}: block {index} (from byte {offset}) has crc32c {found[index]:08x}, "
                f"but {'no such block' if expected is None else f'{expected:08x}'} was saved."
            )
    return len(found)


def _open(path: Path) -> int:
    try:
        return direct_io.open_for_reading(path)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENXIO):
            raise IntegrityError(f"{path} cannot be opened: {error.strerror}.") from error
        raise


def _pieces(descriptor: int, path: Path) -> Iterator[memoryview]:
    """Yield the file's bytes in order; each piece is valid until the next one is requested."""
    with direct_io.kept_buffer() as buffer:
        offset = 0
        while True:
            try:
                count = direct_io.read_full(descriptor, buffer, offset)
            except OSError as error:
                raise IntegrityError(f"{path} cannot be read from byte {offset}: {error.strerror}.") from error
            if count:
                yield buffer[:count]
            offset += count
            if count < buffer.nbytes:
                return
