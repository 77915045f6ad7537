"""Checksums of bytes and of files, block by block, with bounded memory: CRC-32C, and SHA-256 where saves are signed.

Rules:
* A digest depends only on the bytes, not on how they were split into writes.
* Blocks start at 4 MiB; past 4,096 blocks the block size doubles and pairs of blocks are combined.
* Files are read past the page cache if the file system allows it, so that damage on the disk is found.
* A symbolic link is never followed: it could lead to other bytes.
* SHA-256 is a tree over pieces of 4 MiB (RFC 6962, section 2.1), so that hashes of blocks are combined as well.
* The library is loaded at its first use, because a verb sends its first request before it has bytes to check.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmirror.core import signing
from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import MAX_BLOCKS, MIN_BLOCK_SIZE_BYTES, Digest
from ckptmirror.local import direct_io

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BlockDigest", "BlockSum", "combine", "crc32c", "digest_file", "verify_file"]


_LEAF, _NODE = b"\0", b"\1"  # what RFC 6962 puts in front of what is hashed


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


class BlockSum:
    """The checksums of one block, while its bytes come.

    Args:
        is_hashed: Whether to compute the SHA-256 tree hash, too.
    """

    def __init__(self, *, is_hashed: bool) -> None:
        self.size_bytes = 0
        self.crc32c = 0
        self._hashes: list[bytes] = []  # of whole leaves
        self._leaf = hashlib.sha256(_LEAF) if is_hashed else None

    def update(self, view: memoryview) -> None:
        """Take the next bytes."""
        self.crc32c = crc32c(view, self.crc32c)
        while self._leaf is not None and view.nbytes:
            piece = view[: MIN_BLOCK_SIZE_BYTES - self.size_bytes % MIN_BLOCK_SIZE_BYTES]
            self._leaf.update(piece)
            self.size_bytes += piece.nbytes
            view = view[piece.nbytes :]
            if self.size_bytes % MIN_BLOCK_SIZE_BYTES == 0:
                self._hashes.append(self._leaf.digest())
                self._leaf = hashlib.sha256(_LEAF)
        self.size_bytes += view.nbytes

    @property
    def hash(self) -> bytes:
        """The tree hash of the bytes taken so far, of which there is one at least; b"" without hashing."""
        if self._leaf is None:
            return b""
        rest = [self._leaf.digest()] if self.size_bytes % MIN_BLOCK_SIZE_BYTES else []
        hashes = self._hashes + rest
        while len(hashes) > 1:
            hashes = _hashed_pairs(hashes)
        return hashes[0]


class BlockDigest:
    """Computes the :class:`~ckptmirror.core.model.Digest` of bytes that come in any pieces.

    Args:
        block_size_bytes: Of each block at first.
        is_hashed: Whether to hash the blocks, too; by default, if this process signs what it saves.
    """

    def __init__(self, block_size_bytes: int = MIN_BLOCK_SIZE_BYTES, *, is_hashed: bool | None = None) -> None:
        self._block_size_bytes = block_size_bytes
        self._is_hashed = signing.current().sign is not None if is_hashed is None else is_hashed
        self._blocks: list[int] = []
        self._hashes: list[bytes] = []
        self._current = BlockSum(is_hashed=self._is_hashed)

    @property
    def size_bytes(self) -> int:
        """Number of bytes taken so far."""
        return len(self._blocks) * self._block_size_bytes + self._current.size_bytes

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """CRC-32C of each block that is complete so far."""
        return tuple(self._blocks)

    def update(self, buffer: Buffer) -> None:
        """Take the next bytes."""
        view = direct_io.byte_view(buffer)
        taken = 0
        while taken < view.nbytes:
            piece = view[taken : taken + self._block_size_bytes - self._current.size_bytes]
            self._current.update(piece)
            taken += piece.nbytes
            if self._current.size_bytes == self._block_size_bytes:
                self._end_block()

    def digest(self) -> Digest:
        """Return the digest of everything taken so far; more may follow."""
        blocks, hashes, whole, last = list(self._blocks), list(self._hashes), 0, self._current
        for block in blocks:
            whole = combine(whole, block, self._block_size_bytes)
        if last.size_bytes:
            blocks.append(last.crc32c)
            hashes += [last.hash] if self._is_hashed else []
            whole = combine(whole, last.crc32c, last.size_bytes)
        size_bytes, block_size_bytes = self.size_bytes, self._block_size_bytes
        if len(blocks) > MAX_BLOCKS:  # the full number of blocks, which is even, and a short one
            blocks, hashes = _combined_pairs(blocks, block_size_bytes), _hashed_pairs(hashes)
            block_size_bytes *= 2
        return Digest(size_bytes, whole, block_size_bytes, tuple(blocks), tuple(hashes))

    def _end_block(self) -> None:
        if len(self._blocks) < MAX_BLOCKS:
            self._blocks.append(self._current.crc32c)
            self._hashes += [self._current.hash] if self._is_hashed else []
            self._current = BlockSum(is_hashed=self._is_hashed)
            return
        self._blocks = _combined_pairs(self._blocks, self._block_size_bytes)  # the current one begins a larger block
        self._hashes = _hashed_pairs(self._hashes)
        self._block_size_bytes *= 2


def _hashed_pairs(hashes: list[bytes]) -> list[bytes]:
    """Hash two by two; an odd last one stays as it is."""
    pairs = [hashlib.sha256(_NODE + a + b).digest() for a, b in zip(hashes[::2], hashes[1::2], strict=False)]
    return pairs + hashes[-1:] if len(hashes) % 2 else pairs


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
        found = BlockDigest(digest.block_size_bytes, is_hashed=bool(digest.hashes))
        checked = 0
        for piece in _pieces(descriptor, path):
            found.update(piece)
            checked = _compare_blocks(path, digest, found.full_blocks, checked)
    finally:
        os.close(descriptor)
    whole = found.digest()
    _compare_blocks(path, digest, whole.blocks, checked)
    if whole.hashes != digest.hashes:
        raise IntegrityError(f"{path}: its crc32c is right, and its SHA-256 is not: somebody has changed it.")
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
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IntegrityError(f"{path} cannot be opened: {error.strerror}.") from error


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
