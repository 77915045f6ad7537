"""Files that ckptmirror writes in place: what may be there already, where another user could have put it.

Rules:
* Such a file is regular and has one name, and neither it nor its directory is a link: otherwise another file would be
  written.
* A directory that ckptmirror makes below a root (the control directory, the trash, that of a snapshot) is a real one.
* In a directory that everyone may write to, it belongs to this user, to root, or to the owner of that directory. If
  only some may write there, the owner has chosen them.
* A temporary that is continued belongs to one of these three in any directory, because its owner can still change it
  once it is published.
* A directory is shared if anyone but this user and root may put other files into it, or another directory in its place.
  In a sticky directory nobody renames what others have there, and a group may have this user alone.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path
from shlex import quote

from ckptmirror.core.errors import LocalStorageUnwritable
from ckptmirror.local.directories import make_dirs
from ckptmirror.local.storage_errors import explained

__all__ = [
    "check_own_dir",
    "check_own_file",
    "has_trusted_owner",
    "is_planted",
    "make_own_dir",
    "may_move",
    "open_own_file",
    "refused",
    "sharing_of",
]

OWN_DIRECTORY_HINT = "Stage into a directory of your own (`mkdir -p -m 700 ~/staged` makes one)."
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_own_file(path: Path, flags: int, action: str) -> int:
    """Open a file of a control directory, and create it if it is missing.

    Args:
        path: The file; its directory exists.
        flags: More flags of ``open(2)``.
        action: The action as a verb phrase: "append to".

    Raises:
        LocalStorageUnwritable: The file or its directory is not one that ckptmirror may write; nothing was written.
    """
    with explained(action, path.parent):
        directory = os.open(path.parent, os.O_RDONLY | _FLAGS)
    try:
        with explained(action, path):
            place, above = os.fstat(directory), os.stat("..", dir_fd=directory, follow_symlinks=False)
        _check_owner(path.parent, place, above, action)
        with explained(action, path):
            descriptor = os.open(path.name, flags | os.O_CREAT | _FLAGS, 0o666, dir_fd=directory)
        try:
            _check_file(path, os.fstat(descriptor), place, action)
        except BaseException:
            os.close(descriptor)
            raise
    finally:
        os.close(directory)
    return descriptor


def make_own_dir(path: Path) -> None:
    """Make a directory below a root, or check the one that is there.

    Raises:
        LocalStorageUnwritable: It cannot be made, or it is not one that ckptmirror may write to.
    """
    with explained("write to", path):
        is_link = path.is_symlink()
    if not is_link:
        make_dirs(path)
    check_own_dir(path, "write to")


def check_own_dir(path: Path, action: str) -> None:
    """Check a directory below a root.

    Raises:
        LocalStorageUnwritable: It is not one that ckptmirror may write to, or it is not there.
    """
    with explained(action, path):
        facts, place = path.lstat(), path.parent.stat()
    if stat.S_ISLNK(facts.st_mode):
        raise refused(action, path, "it is a symbolic link, and links are not followed")
    _check_owner(path, facts, place, action)


def check_own_file(path: Path, action: str) -> None:
    """Check a file that SQLite opens by its name; it may be missing, and SQLite reports a directory itself.

    Raises:
        LocalStorageUnwritable: It is not one that ckptmirror may write.
    """
    with explained(action, path):
        try:
            facts = path.lstat()
        except FileNotFoundError:
            return
        place = path.parent.stat()
    if not stat.S_ISDIR(facts.st_mode):
        _check_file(path, facts, place, action)


def is_planted(facts: os.stat_result, place: os.stat_result) -> bool:
    """Whether another user may have put this into the directory ``place``, which everyone may write to."""
    return bool(place.st_mode & stat.S_IWOTH) and not has_trusted_owner(facts, place)


def has_trusted_owner(facts: os.stat_result, place: os.stat_result) -> bool:
    """Whether something in the directory ``place`` belongs to this user, to root, or to the directory's owner."""
    return facts.st_uid in (os.geteuid(), 0, place.st_uid)


def may_move(path: Path) -> bool:
    """Whether this user may rename a file or directory that another owns into another directory."""
    facts, place = path.lstat(), path.parent.stat()
    if place.st_mode & stat.S_ISVTX and os.geteuid() not in (0, place.st_uid):
        return False
    return not stat.S_ISDIR(facts.st_mode) or os.access(path, os.W_OK, effective_ids=True)  # ".." in it changes


def sharing_of(directory: Path) -> str | None:
    """Return who else may write to a directory or one above it, and what to do; None if it is not shared."""
    real = Path(os.path.realpath(directory))
    with explained("look at", directory):
        for place in dict.fromkeys((directory, real, *directory.parents, *real.parents)):
            facts = place.stat()
            who = _others_in(facts, is_above=place not in (directory, real))
            if who is not None:
                hint = OWN_DIRECTORY_HINT
                if facts.st_uid == os.geteuid():
                    hint = f"Close it (`chmod go-w {quote(str(place))}`), or stage into another directory."
                return f"{who} may write to {place}. {hint}"
    return None


def _others_in(facts: os.stat_result, *, is_above: bool) -> str | None:
    if facts.st_uid not in (0, os.geteuid()):
        return f"user id {facts.st_uid}"
    if is_above and facts.st_mode & stat.S_ISVTX:
        return None
    if facts.st_mode & stat.S_IWOTH:
        return "everyone"
    if facts.st_mode & stat.S_IWGRP and not _is_of_this_user_alone(facts.st_gid):
        return f"group id {facts.st_gid}"
    return None


def _is_of_this_user_alone(group_id: int) -> bool:
    """Whether a group is the one that many systems make for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and {*group.gr_mem} <= {user.pw_name}


def _check_file(path: Path, facts: os.stat_result, place: os.stat_result, action: str) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise refused(action, path, "it is a symbolic link, and links are not followed")
    if not stat.S_ISREG(facts.st_mode):
        raise refused(action, path, "it is not a regular file")
    if facts.st_nlink > 1:  # 0: it was deleted meanwhile
        raise refused(action, path, "it has a second name (a hard link), and that file would be overwritten")
    _check_owner(path, facts, place, action)


def _check_owner(path: Path, facts: os.stat_result, place: os.stat_result, action: str) -> None:
    if is_planted(facts, place):
        why = f"it belongs to user id {facts.st_uid}, in a directory that everyone may write to"
        raise refused(action, path, why)


def refused(action: str, path: Path, why: str) -> LocalStorageUnwritable:
    """Return the error about a file that is in the way, with the command that moves it away."""
    hint = f"Stop the processes that use it, then move it away: `mv {quote(str(path))} {quote(f'{path}.refused')}`."
    return LocalStorageUnwritable(f"Cannot {action} {path}: {why}.", hint=hint)
