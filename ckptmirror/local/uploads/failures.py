"""Turns SQLite's exceptions into the errors of ckptmirror.

Rules:
* SQLite's own errors never leave this package.
* If the disk has no room for a longer log, the log is overwritten from its beginning, so that a full disk fails one
  change and not all. If the table has no room to take over what is in the log, or to be opened, the reserve is spent.
* A quota that is used up is a full disk, too. SQLite calls it an I/O error, so the connection is asked for the errno.
* A wrong statement is our own bug and is not reported as a state of the disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from ckptmirror.core import errors
from ckptmirror.local.storage_errors import permitted, why_full
from ckptmirror.local.uploads.reserve import spend_reserve
from ckptmirror.local.uploads.statements import statement

__all__ = ["found_no_room", "full_by_quota", "named_failures", "reuse_log_if_full"]

_REBUILD = (
    "The next start of the trainer moves the table aside, and builds a new one from disk and mirrors. "
    "Until then, ckptmirror deletes nothing."
)


@contextmanager
def full_by_quota(connection: apsw.Connection) -> Iterator[None]:
    """Raise SQLite's own "full" for an I/O error behind which the kernel says that a quota is used up.

    Raises:
        apsw.FullError: It does.
    """
    try:
        yield
    except apsw.IOError as error:
        if connection.system_errno != errno.EDQUOT:
            raise
        raise apsw.FullError(f"{error}: {os.strerror(errno.EDQUOT)}") from error


@contextmanager
def named_failures(path: Path) -> Iterator[None]:
    """Raise the errors of ``core.errors`` for those of SQLite, naming the table's file.

    Raises:
        TableLocked: Others held the table for longer than the busy timeout.
        BrokenTable: The file is not a sound database.
        LocalStorageFull: No space for the change, which was undone, or to open the table.
        LocalStorageUnwritable: The disk does not let the table be read or written.
        NoTable: The file cannot be opened.
    """
    try:
        with permitted(path):
            yield
    except (apsw.BusyError, apsw.LockedError) as error:
        raise errors.TableLocked(f"{path} is held by another process: {error}") from error
    except (apsw.CorruptError, apsw.NotADBError, apsw.FormatError, apsw.SchemaChangeError) as error:
        raise errors.BrokenTable(f"{path} is damaged: {error}", hint=_REBUILD) from error
    except apsw.SQLError as error:
        if not str(error).startswith(("no such", "malformed", "unsupported file format")):
            raise  # a statement of ours is wrong
        raise errors.BrokenTable(f"{path} lacks parts of its schema: {error}", hint=_REBUILD) from error
    except apsw.FullError as error:
        raise errors.LocalStorageFull(f"no space for a change of {path}: {error}") from error
    except apsw.IOError as error:
        if path.is_dir():
            raise _directory(path) from error
        if found_no_room(error, path):
            raise _no_room_to_open(path) from error
        raise errors.LocalStorageUnwritable(f"{path} cannot be read or written: {error}") from error
    except (apsw.ReadOnlyError, apsw.PermissionsError, apsw.AuthError) as error:
        raise errors.LocalStorageUnwritable(f"{path} cannot be read or written: {error}") from error
    except apsw.CantOpenError as error:
        if path.is_dir():
            raise _directory(path) from error
        if found_no_room(error, path):
            raise _no_room_to_open(path) from error
        if path.exists():
            raise _unopened(path, error) from error
        raise errors.NoTable(f"there is no pending-uploads table at {path}") from error


def found_no_room(error: BaseException, path: Path) -> bool:
    """Whether SQLite failed because the disk of the table is full.

    It says "I/O error" if there is no block for the table's shared memory, and "cannot open" if there is no inode.
    """
    if isinstance(error, apsw.CantOpenError):
        facts = os.statvfs(path.parent)
        return path.exists() and bool(facts.f_files) and not facts.f_favail  # some file systems count none
    return isinstance(error, apsw.FullError) or getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE


def _no_room_to_open(path: Path) -> errors.LocalStorageFull:
    by_hand = "Delete a file of 100 KiB or more on that disk by hand: every verb opens this table. Then see"
    return errors.LocalStorageFull(
        f"no space to open {path}: {why_full(path)}", hint=f"{by_hand} `ckptmirror rotate --dry-run`."
    )


def _directory(path: Path) -> errors.LocalStorageUnwritable:
    hint = "Move it away: the next start of the trainer rebuilds the table from disk and mirrors."
    return errors.LocalStorageUnwritable(f"{path} is a directory, not the pending-uploads table.", hint=hint)


def _unopened(path: Path, error: apsw.CantOpenError) -> errors.LocalStorageUnwritable:
    if os.access(path, os.R_OK):
        return errors.LocalStorageUnwritable(f"{path} cannot be opened: {error}")
    owner = path.stat().st_uid
    return errors.LocalStorageUnwritable(
        f"{path} cannot be opened: it belongs to user id {owner}, and user id {os.geteuid()} may not read it.",
        hint=f"Run the command as user id {owner}; or let both share the root with the umask 007.",
    )


def reuse_log_if_full(connection: apsw.Connection, error: BaseException, path: Path) -> bool:
    """After a change that found no room, let the next one overwrite the log instead of extending it.

    Returns:
        Whether the disk is full: the reserve is spent now.
    """
    if not found_no_room(error, path):
        return False
    spend_reserve(path)
    with suppress(apsw.Error):  # the first error is the one that counts
        connection.execute(statement("move the log into the table at once")).fetchall()
        connection.execute(statement("move the log into the table")).fetchall()
    return True
