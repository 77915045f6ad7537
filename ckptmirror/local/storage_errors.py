"""Turns an error of the local disk into one that says what failed, why, and what to do.

Rules:
* Every call that changes the disk runs inside :func:`explained`; only it turns an OSError into a ckptmirror error.
* Full (no space, no quota, no inodes), not writable (read-only, permission, a file in the way) and broken (the device
  failed) are different errors.
* An I/O error never counts as "already there" and is never retried: the kernel may have dropped the bytes.
* Reading a name that does not exist stays a FileNotFoundError, because callers catch it. What is read for its own sake
  is read inside :func:`permitted`: an error of another kind keeps its meaning.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from ckptmirror.core.errors import (
    CkptMirrorError,
    IntegrityError,
    LocalStorageFull,
    LocalStorageUnwritable,
    NameTaken,
    Temporary,
)

__all__ = ["disk_error", "explained", "is_there", "permitted", "why_full"]

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_FILE_HINT = "Choose another path, or move that file away."
_DISK_HEALTH_HINT = "Check the disk's health (the kernel log names the device), then save again; nothing was committed."


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Run the body, and turn an OSError into an error that says what failed, why, and what to do.

    Args:
        action: The action as a verb phrase: "write".
        path: The path that it acts on.

    Raises:
        LocalStorageFull: No space, quota or inodes are left.
        LocalStorageUnwritable: Read-only, no permission, something in the way, or not there.
        NameTaken: The name exists.
        IntegrityError: The device failed.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, action, path) from error


@contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Run the body, which reads ``path``, and turn only a lack of permission into an error of ckptmirror.

    Raises:
        LocalStorageUnwritable: This user may not read it.
    """
    try:
        yield
    except PermissionError as error:
        raise disk_error(error, "read", path) from error


def is_there(path: Path) -> bool:
    """Whether a path exists; a link counts, wherever it points.

    Raises:
        LocalStorageUnwritable: This user may not look.
        IntegrityError: The device reported an I/O error.
    """
    try:
        path.lstat()
    except ValueError:  # it is no name at all
        return False
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise disk_error(error, "read", path) from error
    return True


def disk_error(error: OSError, action: str, path: Path) -> CkptMirrorError:
    """Return the ckptmirror error that explains ``error``."""
    code = error.errno
    what = f"Cannot {action} {path}"
    if code in (errno.ENOSPC, errno.EDQUOT):
        return LocalStorageFull(f"{what}: {why_full(path, code)}.")
    if code == errno.EEXIST:
        return NameTaken(f"{what}: the name exists already.")
    if code == errno.EIO:
        return IntegrityError(f"{what}: the device reported an I/O error.", hint=_DISK_HEALTH_HINT)
    if code in (errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ENOMEM):
        return Temporary(f"{what}: {os.strerror(code)}.", hint="Raise the limit (`ulimit -n`) or stop other processes.")
    reason = _why_unwritable(path, code)
    if reason is not None:
        return LocalStorageUnwritable(f"{what}: {reason}.", hint=_hint_of(path, code))
    return CkptMirrorError(f"{what}: {error.strerror or error}.")


def _hint_of(path: Path, code: int | None) -> str | None:
    """Return what helps; None if the usual does."""
    if code == errno.ENOTDIR:
        return _FILE_HINT
    if code != errno.EXDEV:
        return None
    here, copy = quote(str(path)), quote(f"{path}.copy")
    return f"In a container, copy it out of the lower layer: cp -a {here} {copy} && rm -r {here} && mv {copy} {here}"


def why_full(path: Path, code: int = errno.ENOSPC) -> str:
    """Return what a disk has none left of, for people."""
    if code == errno.EDQUOT:
        return "the disk quota is used up"
    try:
        facts = os.statvfs(path if path.is_dir() else path.parent)
    except OSError:
        return "no space is left"
    if facts.f_files and not facts.f_favail:
        return f"no inodes are left ({facts.f_files} in use)"
    return f"no space is left ({facts.f_bavail * facts.f_frsize} bytes free)"


def _why_unwritable(path: Path, code: int | None) -> str | None:
    match code:
        case errno.EROFS:
            return "the file system is mounted read-only"
        case errno.EACCES | errno.EPERM:
            return f"user id {os.geteuid()} has no permission"
        case errno.ENOTDIR:
            return f"{_file_in_the_way(path)} is a file, not a directory"
        case errno.ENOENT:
            return f"{path.parent} does not exist" if not path.parent.exists() else "it does not exist"
        case errno.ELOOP:
            return "a symbolic link is in its place, and links are not followed"
        case errno.EXDEV:
            return "it would have to go to another file system, or it is in one of the lower layers of an overlay"
        case errno.ENAMETOOLONG | errno.EFBIG | errno.EISDIR | errno.ENOTEMPTY | errno.EBUSY:
            return os.strerror(code)
        case (
            errno.ENODEV | errno.ENXIO | errno.ESTALE | errno.ENOTCONN | errno.EINVAL | errno.EOPNOTSUPP | errno.ENOSYS
        ):
            return f"the file system cannot do it ({os.strerror(code)})"
    return None


def _file_in_the_way(path: Path) -> Path:
    for candidate in (*reversed(path.parents), path):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    return path
