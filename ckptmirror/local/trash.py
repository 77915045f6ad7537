"""Removes files in two steps: one rename moves them into the trash, and later they are deleted.

Rules:
* Only paths below the root are moved, never through a link. Only entries of the trash, and temporaries of a given save
  by their names, are deleted.
* A crash between the two steps leaves the old name whole, or an entry in the trash that the next ``empty_trash``
  removes.
* Two processes may empty the same trash: an entry that is already gone is no error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import NameTaken, UsageError
from ckptmirror.core.model import new_id
from ckptmirror.local import crashpoints
from ckptmirror.local.directories import rename_noreplace
from ckptmirror.local.own_files import make_own_dir
from ckptmirror.local.storage_errors import explained

__all__ = ["empty_trash", "make_trash", "move_to_trash", "remove_temporaries", "remove_tree_in_trash"]

_TRIES = 3
_MAX_DEPTH = 64
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def move_to_trash(root: Path, path: Path) -> Path:
    """Rename ``path`` (a file, a directory, or a link itself) into the root's trash; return its new path.

    The caller fsyncs the directory that it was in.

    Raises:
        FileNotFoundError: There is no such path.
        UsageError: It is not below the root, or it belongs to the control directory.
        LocalStorageUnwritable: The trash is not one that ckptmirror may write to.
    """
    below = _below_root(root, path)
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    trash = make_trash(root)
    for _ in range(_TRIES):
        target = trash / f"{below.name[:200]}.{new_id()[:16]}"
        try:
            rename_noreplace(path, target, label="trash.rename")
        except NameTaken:
            continue
        return target
    raise NameTaken(f"No free name for {path.name} in {trash}.")


def make_trash(root: Path) -> Path:
    """Make the root's trash, if it is missing, and return its path.

    Raises:
        LocalStorageUnwritable: It cannot be made, or is not one that ckptmirror may write to.
    """
    trash = root / names.TRASH_DIR
    make_own_dir(trash.parent)
    make_own_dir(trash)
    return trash


def _below_root(root: Path, path: Path) -> Path:
    try:
        below = path.relative_to(root)
    except ValueError:
        raise UsageError(f"{path} is not below {root}: it is not moved to its trash.") from None
    in_control = below.parts[:1] == (names.CONTROL_DIR,)
    if not below.parts or ".." in below.parts or (in_control and (len(below.parts) < 2 or below.parts[1] == "trash")):
        raise UsageError(f"{path} cannot be moved to the trash of {root}.")
    for parent in below.parents:
        if parent.parts and (root / parent).is_symlink():
            raise UsageError(f"{root / parent} is a symbolic link: nothing is moved through it.")
    return below


def empty_trash(root: Path) -> int:
    """Delete everything in the root's trash; return the number of things that were in it.

    Raises:
        LocalStorageUnwritable: Something cannot be deleted.
    """
    with _directory(root, names.CONTROL_DIR, "trash") as trash_fd:
        if trash_fd is None:
            return 0
        entries = sorted(os.listdir(trash_fd))  # noqa: PTH208  (pathlib cannot list a descriptor)
        for name in entries:
            with explained("delete", root / names.TRASH_DIR / name):
                _remove(trash_fd, name, 0)
        return len(entries)


def remove_tree_in_trash(root: Path, path: Path) -> None:
    """Delete one thing that :func:`move_to_trash` put into the root's trash.

    Raises:
        UsageError: It is not in the trash.
    """
    if path.parent != root / names.TRASH_DIR:
        raise UsageError(f"{path} is not in the trash of {root}: it is not deleted.")
    with _directory(root, names.CONTROL_DIR, "trash") as trash_fd, explained("delete", path):
        if trash_fd is not None:
            _remove(trash_fd, path.name, 0)


def remove_temporaries(root: Path, save_id: str, *, rank: int | None = None, shared: bool = False) -> list[str]:
    """Delete the temporaries of one save at the top of the root, in place; return their names.

    They do not go through the trash: a disk without free inodes may have no room for its directory, and after a crash
    the name of what is left still shows that it is a temporary.

    Args:
        root: The local root.
        save_id: The save: its temporaries have the first eight digits of the id in their names.
        rank: Delete the temporaries of files with this rank in their names.
        shared: Delete the temporaries of files and directories without a rank.
    """
    removed = []
    with _directory(root) as root_fd:
        assert root_fd is not None
        for name in sorted(os.listdir(root_fd)):  # noqa: PTH208
            parsed = names.parse_name(name)
            if parsed is None or parsed.role != "tmp" or parsed.save != save_id[:8]:
                continue
            if (shared and parsed.rank is None) or (rank is not None and parsed.rank == rank):
                with explained("delete", root / name):
                    _remove(root_fd, name, 0)
                removed.append(name)
    return removed


@contextmanager
def _directory(root: Path, *parts: str) -> Iterator[int | None]:
    """Open a directory below the root step by step, never through a link; None if it is not there."""
    with explained("open", root.joinpath(*parts)):
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            try:
                deeper = os.open(part, _DIRECTORY_FLAGS, dir_fd=descriptor)
            except FileNotFoundError:
                deeper = -1
            finally:
                os.close(descriptor)
            descriptor = deeper
            if descriptor < 0:
                break
    if descriptor < 0:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(directory_fd: int, name: str, depth: int) -> None:
    """Delete one entry of an open directory, depth first. An entry that is already gone is no error."""
    if depth > _MAX_DEPTH:
        raise OSError(errno.ENAMETOOLONG, "directories are nested too deep")
    with suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            with crashpoints.around("trash.unlink"):
                os.unlink(name, dir_fd=directory_fd)
            return
        deeper = os.open(name, _DIRECTORY_FLAGS, dir_fd=directory_fd)
        try:
            for entry in sorted(os.listdir(deeper)):  # noqa: PTH208
                _remove(deeper, entry, depth + 1)
        finally:
            os.close(deeper)
        with crashpoints.around("trash.rmdir"):
            os.rmdir(name, dir_fd=directory_fd)
