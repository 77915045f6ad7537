"""The reserve: a little disk space beside the table, given up when a full disk would end all changes of the table.

A file that is not uploaded is not deleted, and an upload is a change of the table. So if the disk had no room left for
one, it would stay full for ever. With the reserve's space the log is moved into the table, and then written over from
its beginning.

Rules:
* It is a file of allocated, empty blocks. Nothing is ever written to it or read from it.
* It is taken after the first change of each process, and again after a change once there is room. A disk without room,
  or a file that ckptmirror may not write to, only means that there is no reserve.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local.crashpoints import around
from ckptmirror.local.own_files import open_own_file

__all__ = ["RESERVE_BYTES", "spend_reserve", "take_reserve"]

RESERVE_BYTES = 256 * 1024  # the table may have to grow by as much as has been logged since it last did: 100 pages


def take_reserve(table: Path) -> bool:
    """Allocate the reserve if it is not there; return whether it is now."""
    return _allocate(table, RESERVE_BYTES)


def spend_reserve(table: Path) -> None:
    """Free the reserve's blocks."""
    _allocate(table, 0)


def _allocate(table: Path, size_bytes: int) -> bool:
    path = table.with_name(f"{table.name}-reserve")
    with suppress(OSError, CkptMirrorError), around("table.reserve"):
        descriptor = open_own_file(path, os.O_RDWR, "keep the reserve in")
        try:
            found = os.fstat(descriptor)
            if found.st_size != size_bytes or found.st_blocks * 512 < size_bytes:  # a copy of a root may be sparse
                os.ftruncate(descriptor, 0)
                if size_bytes:
                    os.posix_fallocate(descriptor, 0, size_bytes)
            return True
        except OSError:
            os.ftruncate(descriptor, 0)  # ext4 keeps what it could allocate
            raise
        finally:
            os.close(descriptor)
    return False
