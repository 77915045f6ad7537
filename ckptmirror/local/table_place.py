"""Finds and opens a root's pending-uploads table: one root, one table.

Rules:
* A table outside the root (``state_dir``) is noted in the root, and every verb follows the note. With two tables, each
  would know only some of the mirrors, and a rotation deletes by one of them.
* If a noted table is not on this machine, that is an error, never a reason to create another.
* A root with a table does not get another one elsewhere: a person has to move it.
* Whoever can write to the root can write the note, so it names only a file with the table's name, and a broken table is
  set aside only inside the root or in the ``state_dir`` of the caller, never where only the note says so.
* The note is written before anything is saved, once the table is open and belongs to this root or to none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.errors import (
    BrokenTable,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    LocalStorageFull,
    NoTable,
    TableLocked,
)
from ckptmirror.core.model import new_id
from ckptmirror.local import directories, files, trash
from ckptmirror.local.file_systems import refuse_fuse, refuse_network_place
from ckptmirror.local.storage_errors import permitted
from ckptmirror.local.uploads import LeaseClock, RootIdentity, UploadsTable

__all__ = [
    "check_is_no_mirror",
    "check_place",
    "is_mirror",
    "note_place",
    "open_known_table",
    "open_table",
    "table_path",
]

_NOTE_LIMIT_BYTES = 64 * 1024
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255  # of Linux
_log = logging.getLogger("ckptmirror")


@dataclass(frozen=True, slots=True)
class _Note:
    """The root's note of its table's place.

    Attributes:
        host: The machine that wrote it, for people: machines change their names, and disks their machines.
        path: Absolute.
        id: The table's own. Another host that mounts the root may have an old table at this path. "": not known.
    """

    host: str
    path: str
    id: str = ""


def table_path(root: Path, state_dir: Path | None = None) -> Path:
    """Return where the uploads table of a root is or will be. Only this function decides that.

    Raises:
        NoTable: The root notes a place that is not on this machine.
        ConfigError: The root's table is not in ``state_dir``, or its note cannot be read.
    """
    inside = root / names.TABLE_NAME
    if state_dir is None:
        note = _read_note(root)
        if note is None:
            return inside
        if not Path(note.path).exists():
            raise _not_here(root, note, "there is none here.")
        return Path(note.path)
    wanted = state_dir.absolute() / inside.name
    try:
        note = _read_note(root)
    except ConfigError:
        note = None  # opening the table here rewrites it
    present = Path(note.path) if note is not None else inside
    if present.resolve() != wanted.resolve() and _tells_of(present, root):
        raise ConfigError(
            f"The pending-uploads table of {root} is at {present}, not at {wanted}.",
            hint=f"Leave state_dir out. To move the table, stop the trainer and move {present}* to {wanted.parent}.",
        )
    return wanted


def check_place(root: Path, state_dir: Path | None = None) -> None:
    """Check the places of root and table before anything is created in the root.

    If the table is outside the root, check also that the root still has its saves.

    Raises:
        NoTable: The root is a mirror.
        ConfigError: The root is under FUSE, or the table would be created on a network file system.
        Temporary: The root is not mounted now.
        ForeignTable: The table is another root's.
    """
    check_is_no_mirror(root)
    refuse_fuse(root)
    path = table_path(root, state_dir)
    if not path.exists():
        refuse_network_place(path.parent)
    if path == root / names.TABLE_NAME or not path.exists():
        return
    with (
        contextlib.suppress(BrokenTable, TableLocked, LocalStorageFull),  # opening it to write handles these
        UploadsTable.open(path, read_only=True) as table,
    ):
        table.check_root(root)


def is_mirror(directory: Path) -> bool:
    """Whether a directory is a mirror, and no trainer saves to it."""
    if not os.path.isfile(directory / names.WRITER_NAME):  # noqa: PTH113 - False too where nobody may look
        return False
    return not os.path.lexists(directory / names.ATTEMPTS_NAME)


def check_is_no_mirror(root: Path) -> None:
    """Check that a directory that should be a root is not a mirror: a rotation would delete the copies there.

    Raises:
        NoTable: It is one.
    """
    if is_mirror(root):
        raise NoTable(
            f"{root} is a mirror, not a directory that a trainer saves to.",
            hint=f"`ckptmirror ls {quote(str(root))}` lists what it has, and a start on an empty root with this mirror "
            f"brings it. If it is a copy of a mirror that no run uses, delete {names.WRITER_NAME} in it first.",
        )


def open_table(root: Path, state_dir: Path | None = None, clock: LeaseClock | None = None) -> UploadsTable:
    """Open or create the root's pending-uploads table; in ``state_dir`` if the root is on a network file system.

    A broken table is moved aside, never deleted, and recreated. It is a cache of facts: a file that it does not know
    counts as not durable until the mirrors are asked again. So is an old one of this host, if the root notes the table
    of another host that has led since.

    Raises:
        BrokenTable: It is broken, and only the root's note names its place. Nothing was changed.
        ForeignTable: It is another root's. Nothing was changed.
        Temporary: The root is not mounted now. Nothing was changed.
    """
    path = table_path(root, state_dir)
    directories.make_dirs(path.parent)
    try:
        table = _open_own(root, path, clock)
    except BrokenTable as error:
        if state_dir is None and path != root / names.TABLE_NAME:
            raise BrokenTable(
                f"{str(error).rstrip('.')}. Only {root / names.TABLE_NOTE_NAME} says that it is this root's table, "
                "so it stays.",
                hint=f"Start the trainer with its state_dir, {path.parent} if that is the one: it recreates the table.",
            ) from error
        table = _open_anew(root, path, clock, str(error))
    if state_dir is not None and (note := _note_of_another(root, table)) is not None:
        table.close()
        why = f"{path} is out of date: the table of {root} was last in {note.path} on {note.host}."
        table = _open_anew(root, path, clock, why)
    try:
        if state_dir is None:
            _check_noted(root, table)
        note_place(root, table)
    except BaseException:
        table.close()
        raise
    return table


def _open_anew(root: Path, path: Path, clock: LeaseClock | None, why: str) -> UploadsTable:
    """Set the table at ``path`` aside, and create another."""
    aside = UploadsTable.set_aside(path)
    _log.error("%s It is now at %s; its facts are gathered again from disk and mirrors.", why, aside)
    return _open_own(root, path, clock)


def open_known_table(root: Path, state_dir: Path | None = None, *, read_only: bool = False) -> UploadsTable:
    """Open the root's pending-uploads table, which must be there.

    Raises:
        NoTable: ckptmirror has not saved here.
        ForeignTable: The table is another root's.
    """
    table = UploadsTable.open(_known_path(root, state_dir), read_only=read_only)
    try:
        table.check_root(root)  # another root's facts would pass for this one's
        _check_noted(root, table)
    except BaseException:
        table.close()
        raise
    return table


def _known_path(root: Path, state_dir: Path | None) -> Path:
    """Return where the root's table is.

    Raises:
        NoTable: There is none; the message says what the directory is instead.
    """
    check_is_no_mirror(root)
    path = table_path(root, state_dir)
    if path.exists():
        return path
    if state_dir is not None and (note := _read_note(root)) is not None:
        raise _not_here(root, note, "there is none here.")
    if not root.is_dir():
        raise NoTable(f"{root} does not exist.")
    if any(root.glob("meta_*.json")):
        raise NoTable(
            f"{root} has saves, but no pending-uploads table.",
            hint="If a trainer saves there, start it: it rebuilds the table. If they are staged copies, list them with "
            f"`ckptmirror ls {quote(str(root))}`.",
        )
    raise NoTable(f"{root} has no pending-uploads table: no trainer has saved there.")


def _open_own(root: Path, path: Path, clock: LeaseClock | None) -> UploadsTable:
    table = UploadsTable.open(path, create=True, clock=clock)
    try:
        table.check_root(root)
        table.check_pages()
        for ask in (table.saves, table.records, table.counts, table.mirrors, table.unasked, table.own_id):
            ask()  # damage in the schema shows only in queries
        return table
    except BaseException:
        table.close()
        raise


def _check_noted(root: Path, table: UploadsTable) -> None:
    """Check that a table is the one that the root notes.

    Raises:
        NoTable: It is another host's that has the same path.
    """
    note = _read_note(root)
    if note is not None and note.id and note.path == str(table.path) and note.id != table.own_id():
        raise _not_here(root, note, "what this machine has there is another one.")


def _note_of_another(root: Path, table: UploadsTable) -> _Note | None:
    """Return the root's note if it names another table than this one, which had been noted earlier."""
    with contextlib.suppress(ConfigError):
        note = _read_note(root)
        if note is not None and note.id and (own := table.own_id()) and own != note.id:
            return note
    return None


def _not_here(root: Path, note: _Note, what: str) -> NoTable:
    return NoTable(
        f"The pending-uploads table of {root} is in {note.path} on {note.host}; {what}",
        hint="Use the machine that has it. If it is lost, start the trainer with its state_dir: the table is "
        "rebuilt from disk and mirrors.",
    )


def _tells_of(path: Path, root: Path) -> bool:
    """Whether a table exists and is this root's; True also if it cannot be read."""
    if not path.exists():
        return False
    try:
        with UploadsTable.open(path, read_only=True) as table:
            known = table.identity()
    except CkptMirrorError:
        return True
    return known is not None and known.same_directory(RootIdentity.of(root, known.run_id))


def _read_note(root: Path) -> _Note | None:
    path = root / names.TABLE_NOTE_NAME
    try:
        with permitted(path):
            note = _Note(**json.loads(files.read_limited(path, _NOTE_LIMIT_BYTES)))
        if not isinstance(note.host, str) or not Path(note.path).is_absolute():
            raise ValueError("it holds no absolute path")
        if not isinstance(note.id, str):
            raise ValueError(f"the table's id is {note.id!r}")
        if Path(note.path).name != Path(names.TABLE_NAME).name:
            raise ValueError(f"a table's file is always named {Path(names.TABLE_NAME).name}")
        raw = os.fsencode(note.path)
        if len(raw) > _MAX_PATH_BYTES or max(map(len, raw.split(b"/"))) > _MAX_NAME_BYTES:
            raise ValueError("no file has such a long path")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, RecursionError, IntegrityError) as error:
        raise ConfigError(
            f"{path} does not say where the pending-uploads table is: {error}",
            hint="Start the trainer with its state_dir, which rewrites it.",
        ) from error
    return note


def note_place(root: Path, table: UploadsTable) -> None:
    """Note in the root where its table is, unless that is the usual place.

    Nothing is written if the note says so already (the disk may be full).
    """
    path, note_path = table.path, root / names.TABLE_NOTE_NAME
    if path.resolve() == (root / names.TABLE_NAME).resolve():
        with contextlib.suppress(FileNotFoundError):
            trash.move_to_trash(root, note_path)
            directories.fsync_dir(note_path.parent)
        return
    note = _Note(socket.gethostname(), str(path), table.give_id())
    with contextlib.suppress(ConfigError):
        if _read_note(root) == note:
            return
    directories.make_dirs(note_path.parent)
    files.write_bytes(note_path, json.dumps(asdict(note), indent=1).encode() + b"\n", save_id=new_id(), replace=True)
