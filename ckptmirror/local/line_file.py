"""A file of lines with a size limit: several processes append to it, and the older lines are in a second file.

Rules:
* A line is one append by one system call, so lines of several processes do not mix. It is not fsynced: a power loss may
  cost the last lines, and nothing else depends on them.
* A line that a crash or a full disk cut short stays as it is; the next one begins on a line of its own.
* At ``limit_bytes`` the file replaces the older one, so at most twice the limit is kept. The process that renames holds
  the file's lock and has checked that the name still means this file, so two processes never both rename it.
* Nothing is written into a file that is not our own (``own_files``), or if the directory is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from ckptmirror.core.errors import IntegrityError
from ckptmirror.local import crashpoints
from ckptmirror.local.files import read_limited
from ckptmirror.local.own_files import open_own_file
from ckptmirror.local.storage_errors import disk_error, explained

__all__ = ["append_line", "read_lines"]

_OVERSHOOT = 2  # a file that could not be renamed may exceed the limit; it is read up to this factor


def append_line(path: Path, line: bytes, *, older: Path, limit_bytes: int) -> None:
    """Append one line, which ends with a line feed; past the limit, make the file the older one.

    Raises:
        LocalStorageFull: No room; a part of the line may have been written.
        LocalStorageUnwritable: It cannot be written.
    """
    with explained("append to", path), crashpoints.around("line.append"):
        descriptor = open_own_file(path, os.O_RDWR | os.O_APPEND, "append to")
        try:
            status = os.fstat(descriptor)
            if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(descriptor, line)
            if written < len(line):
                raise disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "append to", path)
            if status.st_size + written >= limit_bytes:
                _make_older(descriptor, path, older)
        finally:
            os.close(descriptor)


def _make_older(descriptor: int, path: Path, older: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process is about to, or locks do not work here: the next line tries again
        return
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            with crashpoints.around("line.make_older"):
                os.rename(path, older)  # noqa: PTH104


def read_lines(path: Path, *, older: Path, limit_bytes: int) -> tuple[list[bytes], list[str]]:
    """Return the lines of both files, older ones first, and a sentence for each thing that could not be read."""
    found: dict[Path, list[bytes]] = {older: [], path: []}
    problems = []
    for one in (path, older):  # in this order no line is missed if the file becomes the older one meanwhile
        try:
            found[one] = read_limited(one, _OVERSHOOT * limit_bytes).split(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (IntegrityError, OSError) as error:
            problems.append(str(error))
    return [line for lines in found.values() for line in lines if line], problems
