"""The physical limits of the disk: one thread, O_DIRECT where the file system has it; after a write, fsync."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from ckptmirror.local import direct_io

__all__ = ["read_raw", "write_raw"]

_PIECE_BYTES = 8 * 1024 * 1024
_piece = memoryview(mmap.mmap(-1, _PIECE_BYTES))
_piece[:] = os.urandom(_PIECE_BYTES)


def write_raw(path: Path, size_bytes: int) -> None:
    """Write ``size_bytes`` to a new file and make them durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        direct_io.allow_direct(descriptor)
        for offset in range(0, size_bytes, _PIECE_BYTES):
            direct_io.write_full(descriptor, _piece[: min(_PIECE_BYTES, size_bytes - offset)], offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_raw(path: Path) -> None:
    """Read a file to its end, and keep nothing."""
    buffer = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    descriptor = direct_io.open_for_reading(path)
    try:
        offset = 0
        while count := direct_io.read_full(descriptor, buffer, offset):
            offset += count
    finally:
        os.close(descriptor)
