"""The connection to the table's file: opened lazily, one per table object, used under a lock, closed before a fork.

Rules:
* Write-ahead log with synchronous=FULL: a commit that returned survives a power loss (docs/adr/0001).
* Every wait has a limit: for other processes SQLite's busy timeout, for other threads the lock's.
* No connection lives across a fork: SQLite's locks and shared memory belong to a process. Before a fork each table
  waits for its running change and closes; parent and child reopen it at their next use. If a change does not end (a
  disk that hangs), the fork waits only for a limited time, and the child never uses or closes that connection.
* Text leaves the database as bytes, so that one broken letter damages one row.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import apsw

from ckptmirror.core.errors import BrokenTable, CkptMirrorError, NewerTable, NoTable, TableLocked
from ckptmirror.local.crashpoints import around
from ckptmirror.local.file_systems import refuse_network_place
from ckptmirror.local.own_files import check_own_file
from ckptmirror.local.uploads.failures import found_no_room, full_by_quota, named_failures, reuse_log_if_full
from ckptmirror.local.uploads.place import LOGS, create_in_place, refuse_journal, set_aside
from ckptmirror.local.uploads.records import canonical_crc
from ckptmirror.local.uploads.reserve import spend_reserve, take_reserve
from ckptmirror.local.uploads.shared_memory import check_room_for_shared_memory
from ckptmirror.local.uploads.statements import migrations, statement

__all__ = ["APPLICATION_ID", "Database"]

APPLICATION_ID = 0x636B7074
"""The letters "ckpt" in the file's header: what kind of database this is."""


class Database:
    """One file, one connection, one lock."""

    def __init__(self, path: Path, *, read_only: bool, busy_timeout_s: float) -> None:
        self.path = path
        self.read_only = read_only
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._connection: apsw.Connection | None = None
        self._has_reserve = False
        self._disk_is_full = False
        self._closed = False
        _open_databases.add(self)

    # -- opening --------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Create the file if there is none."""
        with named_failures(self.path):
            create_in_place(self.path, self._build, timeout_s=self._busy_timeout_s)

    def _build(self, temporary: Path) -> None:
        with _Closing(apsw.Connection(str(temporary), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
            connection.execute(statement("build in a rollback journal"))
            connection.execute(statement("make every commit of the build durable"))
            connection.execute(statement("begin a change"))
            for number, migration in enumerate(migrations(), start=1):
                connection.execute(migration)
                connection.pragma("user_version", number)
            connection.execute(statement("name the application"))
            with around("table.build"):
                connection.execute(statement("commit the change"))
            connection.execute(statement("use a write-ahead log")).fetchall()

    def check(self) -> None:
        """Open the file now and check that it is a sound table of a version that this code knows."""
        with self.reading() as connection:
            if not self.read_only:
                found = connection.execute(statement("look over the pages")).fetchall()
                if found != [("ok",)]:
                    raise BrokenTable(f"{self.path} is damaged: {found[0][0]}")

    def _open(self) -> apsw.Connection:
        if not self.path.exists():
            raise NoTable(f"there is no pending-uploads table at {self.path}")
        refuse_network_place(self.path.parent)
        for name in ("", *LOGS):  # SQLite follows links, and writes over what it takes for an old log
            check_own_file(self.path.with_name(self.path.name + name), "open the table")
        refuse_journal(self.path)
        check_room_for_shared_memory(self.path)
        connection = self._connect()
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: apsw.Connection) -> None:
        with full_by_quota(connection):
            connection.set_busy_timeout(int(self._busy_timeout_s * 1000))
            connection.execute(statement("trust no function that the schema names"))
            connection.execute(statement("make every commit durable"))
            connection.execute(statement("keep the log small"))
            connection.execute(statement("move the log into the table soon"))
            connection.execute(statement("keep scratch tables in memory"))
            self._check_version(connection)
            if connection.execute(statement("read the schema")).fetchall() != _schema(migrations()):
                raise BrokenTable(f"{self.path} is damaged: its schema is not the one that was made")

    def _connect(self) -> apsw.Connection:
        if not self.read_only or self._disk_is_full:  # a reader would leave the shared memory in the reserve's place
            return apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_timeout(int(self._busy_timeout_s * 1000))  # a writer may be closing, or recovering
            connection.execute(statement("read the schema version")).fetchall()
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            connection.close()
            log = self.path.with_name(self.path.name + "-wal")
            if log.exists() and log.stat().st_size > 0:
                raise
            # The medium is read-only, and the log is empty: no process can be changing the file.
            uri = self.path.absolute().as_uri() + "?immutable=1"
            connection = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        return connection

    def _check_version(self, connection: apsw.Connection) -> None:
        application = _number(connection, "read the application")
        version = _number(connection, "read the schema version")
        if application != APPLICATION_ID:
            raise BrokenTable(f"{self.path} is not a pending-uploads table (application id {application})")
        newest = len(migrations())
        if version < 1:  # a table is built whole before it gets its name
            raise BrokenTable(f"{self.path} is not a sound table: its schema version is {version}")
        if version > newest:
            raise NewerTable(f"{self.path} has schema version {version}, this ckptmirror knows up to {newest}")
        if version < newest and self.read_only:
            raise TableLocked(f"{self.path} has schema version {version} and must be opened by a writer once")
        while version < newest:
            version = self._migrate(connection)

    def _migrate(self, connection: apsw.Connection) -> int:
        """Take the next migration step under the write lock, unless another process has; return the version."""
        connection.execute(statement("begin a change"))
        try:
            version = _number(connection, "read the schema version")
            if version < len(migrations()):
                connection.execute(migrations()[version])
                version += 1
                connection.pragma("user_version", version)
            with around("table.migrate"):
                connection.execute(statement("commit the change"))
        except BaseException:
            _undo(connection)
            raise
        return version

    # -- using ----------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Lend the connection for one statement, which sees one moment of the table."""
        with self._held(), named_failures(self.path):
            connection = self._ready()
            with full_by_quota(connection):
                yield connection

    @contextmanager
    def change(self, verb: str) -> Iterator[apsw.Connection]:
        """Lend the connection inside a transaction; leaving the block makes it durable, an error undoes it."""
        with self._held(), named_failures(self.path):
            connection = self._ready()
            try:
                with full_by_quota(connection):
                    connection.execute(statement("begin a change"))
                    if not self._has_reserve:
                        check_room_for_shared_memory(self.path)
                    if self._disk_is_full:  # the table does not grow while a mirror is away for days
                        connection.execute(statement("forget the oldest tries"))
                    yield connection
                    with around(f"table.{verb}"):
                        connection.execute(statement("commit the change"))
            except BaseException as error:
                _undo(connection)
                self._disk_is_full |= reuse_log_if_full(connection, error, self.path)
                raise
            if (self._disk_is_full or not self._has_reserve) and take_reserve(self.path):
                self._has_reserve, self._disk_is_full = True, False
                connection.execute(statement("move the log into the table soon")).fetchall()

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=4 * self._busy_timeout_s):
            raise TableLocked(f"{self.path} is held by another thread of this process")
        try:
            yield
        finally:
            self._lock.release()

    def _ready(self) -> apsw.Connection:
        if self._closed:
            raise NoTable(f"the table {self.path} was closed in this process")
        if self._connection is None:
            try:
                self._connection = self._open()
            except apsw.Error as error:
                if not found_no_room(error, self.path):
                    raise
                spend_reserve(self.path)
                self._disk_is_full = True
                self._connection = self._open()
        return self._connection

    def recreate(self) -> Path | None:
        """Replace a broken or missing table by an empty one; return where the broken one is now.

        The other users of this object continue with the new one.

        Raises:
            NoTable: This object was closed.
        """
        with self._held():
            if self._closed:
                raise NoTable(f"the table {self.path} was closed in this process")
            with suppress(CkptMirrorError):  # a broken table may fail to close
                self._disconnect()
            aside = set_aside(self.path, timeout_s=self._busy_timeout_s) if self.path.exists() else None
            self.create()
            self.check()
            return aside

    def close(self) -> None:
        """Close for good."""
        with self._held():
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with named_failures(self.path):
                connection.close()
            if self._disk_is_full:
                take_reserve(self.path)  # SQLite deleted its log and its shared memory

    # -- facts ----------------------------------------------------------------------------------------------

    def read_fact(self, name: str, fits: Callable[[Any], bool]) -> Any:
        """Return a fact's JSON value, None if it was never written.

        Args:
            name: Its name.
            fits: Whether a value is one that this fact may have.

        Raises:
            BrokenTable: The fact is damaged.
        """
        with self.reading() as connection:
            rows = connection.execute(statement("read a fact"), {"name": name}).fetchall()
        if not rows:
            return None
        _, value, row_crc = rows[0]
        try:
            text = cast(bytes, value).decode("utf-8")
            if canonical_crc([name, text]) != row_crc:
                raise ValueError("its checksum is wrong")
            found = json.loads(text)
            if not fits(found):
                raise ValueError("it is not what was written there")
            return found
        except (ValueError, AttributeError, RecursionError) as error:
            raise BrokenTable(f"the fact {name!r} in {self.path} is broken: {error}") from error

    def write_fact(self, name: str, value: Any, *, replace: bool = True) -> None:
        """Write a fact durably; without ``replace``, only if there is none yet."""
        text = json.dumps(value)
        row = {"name": name, "value": text, "row_crc": canonical_crc([name, text])}
        with self.change("write_fact") as connection:
            connection.execute(statement("write a fact" if replace else "write a fact unless it is there"), row)


class _Closing:
    """Closes a connection at the end of a block; apsw's own context manager is a savepoint."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> apsw.Connection:
        return self._connection

    def __exit__(self, *error: object) -> None:
        self._connection.close()


@functools.cache
def _schema(steps: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the schema that the migrations create.

    Another schema could forbid valid changes, or have a view in place of a table, whose rows have no end.
    """
    with _Closing(apsw.Connection(":memory:")) as connection:
        for migration in steps:
            connection.execute(migration)
        return connection.execute(statement("read the schema")).fetchall()


def _number(connection: apsw.Connection, name: str) -> int:
    return cast(int, connection.execute(statement(name)).fetchall()[0][0])


def _undo(connection: apsw.Connection) -> None:
    """Roll back the transaction if SQLite has not done so; the first error is the one that counts."""
    if connection.in_transaction:
        with suppress(apsw.Error):
            connection.execute(statement("undo the change"))


# -- forks --------------------------------------------------------------------------------------------------

_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


class _HeldForFork(threading.local):
    """The tables that the forking thread holds during the fork."""

    def __init__(self) -> None:
        self.databases: list[Database] = []
        self.busy: list[Database] = []


_held_for_fork = _HeldForFork()


def _before_fork() -> None:
    for database in sorted(
        _open_databases, key=id
    ):  # one order for all threads: two that fork at once cannot block each other
        if not database._lock.acquire(timeout=4 * database._busy_timeout_s):
            _held_for_fork.busy.append(database)
            continue
        _held_for_fork.databases.append(database)
        with suppress(CkptMirrorError):  # a broken table does not block a fork: its next user finds out
            database._disconnect()


def _after_fork() -> None:
    while _held_for_fork.databases:
        _held_for_fork.databases.pop()._lock.release()
    _held_for_fork.busy.clear()


def _after_fork_in_child() -> None:
    for database in _held_for_fork.busy:
        if database._connection is not None:
            _leave_alone(database._connection)
            database._connection = None
        database._lock = threading.RLock()  # its holder is not in the child
    _after_fork()


def _leave_alone(connection: apsw.Connection) -> None:
    """Prevent this process from closing the parent's connection at its end, which would write to the file."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
