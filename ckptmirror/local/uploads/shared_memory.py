"""The table's shared memory, where the blocks of a file system are smaller than a page of memory.

SQLite writes one byte of each page of the file, and maps it. The rest of the page may then be a hole, and on a full
disk the first store into a hole ends the process with SIGBUS. The first change stores into every page.

Rules:
* There is room for the whole file before it is made, and before the first change. Where blocks are as large as pages,
  SQLite itself finds that there is none.
* The file is never opened here: closing it again would drop the locks that SQLite has on it.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import apsw

__all__ = ["check_room_for_shared_memory"]

_BYTES = 32 * 1024  # SQLite's unit; the log is moved into the table long before it needs a second one


def check_room_for_shared_memory(table: Path) -> None:
    """Check that every page of the table's shared memory has its blocks, or gets them.

    Raises:
        apsw.FullError: The disk has no room for them.
    """
    facts = os.statvfs(table.parent)
    if facts.f_frsize >= mmap.PAGESIZE or facts.f_flag & os.ST_RDONLY:
        return
    if facts.f_bavail * facts.f_frsize >= 2 * _BYTES:  # the log begins, too
        return
    with suppress(FileNotFoundError):
        if table.with_name(f"{table.name}-shm").stat().st_blocks * 512 >= _BYTES:
            return
    raise apsw.FullError("no room for the table's shared memory")
