"""A disk quota that is used up, as SQLite meets it: each file may be written over, and none may grow.

SQLite calls what the kernel refuses for a quota an I/O error, and tells the errno only to who asks for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import apsw


@dataclass
class Quota:
    """Whether the quota is used up, and how often something was refused."""

    used_up: bool = False
    refused: int = 0


class _File(apsw.VFSFile):
    def __init__(self, quota: Quota, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._quota = quota
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)

    def xWrite(self, data: bytes, offset: int) -> None:
        spent = not Path(f"{self._path.removesuffix('-wal')}-reserve").stat().st_size
        if self._quota.used_up and not spent and offset + len(data) > os.stat(self._path).st_blocks * 512:
            self._quota.refused += 1
            refusal = apsw.IOError("the quota is used up")
            refusal.extendedresult = apsw.SQLITE_IOERR_WRITE
            raise refusal
        super().xWrite(data, offset)


class _Disk(apsw.VFS):
    def __init__(self, quota: Quota, name: str) -> None:
        self._quota = quota
        super().__init__(name, "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self._quota, name, flags)

    def xGetLastError(self) -> tuple[int, str]:
        return errno.EDQUOT, os.strerror(errno.EDQUOT)


@contextmanager
def quota_of_tables() -> Iterator[Quota]:
    """Put the tables that are opened in the body on a disk with a quota, of which spending the reserve frees some."""
    quota = Quota()
    disk = _Disk(quota, "ckptmirror-quota")
    allocate = os.posix_fallocate

    def refused(descriptor: int, offset: int, length: int) -> None:
        if quota.used_up:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        allocate(descriptor, offset, length)

    try:
        with patch.object(os, "posix_fallocate", refused):
            yield quota
    finally:
        disk.unregister()
