"""Where the table's file may be, how it is created, and how a broken one is set aside.

Rules:
* It is never on a network file system or under FUSE: its locks and shared memory do not work there.
* A table appears whole or not at all: it is built under a temporary name, fsynced, and published without replacing.
* An upload session, which it holds, is a key to the mirror. So a table may be read only by those who may write it: with
  the umask 022 its mode is 0600, with 007 it is 0660.
* A write-ahead log belongs to one database: SQLite would replay it into the next one. So a log without its database is
  moved away before a table is published, and a table that is set aside is moved with its log, log first.
* A table has no rollback journal: SQLite would write its pages into the table, and delete the file that it names.
* Creating and setting aside hold a lock on the directory. No code here opens a table's file while it may be open as a
  database: closing it would drop the database's locks.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptmirror.core.errors import NameTaken, NoTable, TableLocked
from ckptmirror.core.model import new_id
from ckptmirror.core.names import tmp_name
from ckptmirror.local import directories
from ckptmirror.local.crashpoints import around
from ckptmirror.local.file_systems import refuse_network_place
from ckptmirror.local.own_files import refused
from ckptmirror.local.processes import lock_holders, named_processes
from ckptmirror.local.storage_errors import explained

__all__ = ["LOGS", "create_in_place", "refuse_journal", "set_aside"]

LOGS = ("-wal", "-shm", "-journal")
"""The endings of the files that SQLite keeps beside a database."""
_WAIT_STEP_S = 0.02


@contextmanager
def _directory_lock(directory: Path, timeout_s: float) -> Iterator[None]:
    """Hold the directory's lock for creating and moving tables."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TableLocked(
                        f"another process holds the lock with which a table is created or moved in {directory} "
                        f"({named_processes(lock_holders(directory))})",
                        hint="Try again in a moment; if it is held for longer, stop that process.",
                    ) from None
                time.sleep(_WAIT_STEP_S)
        yield
    finally:
        os.close(descriptor)


def create_in_place(path: Path, build: Callable[[Path], None], *, timeout_s: float) -> None:
    """Let ``build`` make a database under a temporary name and publish it as ``path``, if there is none yet.

    Raises:
        ConfigError: The directory is not on node-local disk.
        NoTable: The directory does not exist.
        LocalStorageFull: No space; nothing is left behind.
        LocalStorageUnwritable: The directory cannot be written.
        TableLocked: Another process was creating one for longer than ``timeout_s``.
    """
    directory = path.parent
    if path.exists():
        return
    if not directory.is_dir():
        raise NoTable(f"the table cannot be created: {directory} does not exist")
    with explained("create", path):
        refuse_network_place(directory)
        with _directory_lock(directory, timeout_s):
            if path.exists():
                return
            _remove_temporaries(path)
            _move_logs(path, f".stray-{secrets.token_hex(4)}")
            _build_and_publish(path, build)


def refuse_journal(path: Path) -> None:
    """Check that no rollback journal is beside a table, which has only a write-ahead log from its first moment.

    Raises:
        LocalStorageUnwritable: There is one.
    """
    journal = path.with_name(path.name + "-journal")
    if os.path.lexists(journal):
        raise refused("open the table", journal, "no table of ckptmirror has a rollback journal")


def _build_and_publish(path: Path, build: Callable[[Path], None]) -> None:
    temporary = path.with_name(tmp_name(path.name, new_id()))
    try:
        with around("table.create"):
            _create_private(temporary)
        build(temporary)
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with around("table.fsync"):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(NameTaken):  # a process that does not use our lock created one: use that one
            directories.rename_noreplace(temporary, path, label="table.publish")
        directories.fsync_dir(path.parent)
    finally:
        _remove_temporaries(path)


def _create_private(path: Path) -> None:
    """Create a file that only those may read whom the umask lets write; SQLite gives its logs the same mode."""
    # Nobody may read it at first, so nobody can open it in between and read later what is written then.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o222)
    try:
        writers = os.fstat(descriptor).st_mode & 0o222
        with suppress(PermissionError):  # a file system without modes
            os.fchmod(descriptor, 0o600 | writers | writers << 1)
    finally:
        os.close(descriptor)


def _remove_temporaries(path: Path) -> None:
    """Remove what a killed creation left behind; under the lock no other creation runs."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.tmp(-wal|-shm|-journal)?")
    for entry in path.parent.iterdir():
        if ours.fullmatch(entry.name):
            with around("table.remove_temporary"):
                entry.unlink(missing_ok=True)


def _move_logs(path: Path, suffix: str) -> None:
    for log in LOGS:
        beside = path.with_name(path.name + log)
        if beside.exists():
            with around("table.move_log"):
                beside.rename(path.with_name(f"{path.name}{suffix}{log}"))


def set_aside(path: Path, *, timeout_s: float) -> Path:
    """Rename a broken table, with its logs, to a free name beside it, and return that name. Nothing is deleted.

    Raises:
        NoTable: There is none.
        TableLocked: Another process was creating or moving one for longer than ``timeout_s``.
        LocalStorageUnwritable: The directory cannot be written.
    """
    suffix = f".broken-{secrets.token_hex(4)}"
    aside = path.with_name(path.name + suffix)
    if not path.exists():
        raise NoTable(f"there is no pending-uploads table at {path}")
    with explained("set aside", path), _directory_lock(path.parent, timeout_s):
        _move_logs(path, suffix)
        directories.rename_noreplace(path, aside, label="table.set_aside")
        directories.fsync_dir(path.parent)
    return aside
