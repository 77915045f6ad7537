"""Creates, publishes and replaces names on disk so that they survive a power loss.

Rules:
* A name is durable only after its directory is fsynced. A function that publishes a name fsyncs the directory, or its
  docstring says that the caller must.
* Publishing never replaces. It uses RENAME_NOREPLACE; or, for files, link and unlink; or, for directories, mkdir and a
  rename over that new directory, which works only while it is empty. A check is never followed by a rename that could
  replace.
* fsync is tried once: after an I/O error the kernel may have dropped the bytes, and a second fsync would succeed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path

from ckptmirror.core.errors import ConfigError, LocalStorageUnwritable, NameTaken, UsageError
from ckptmirror.core.model import new_id
from ckptmirror.core.names import tmp_name
from ckptmirror.core.setting_checks import WrongValue, directory_path
from ckptmirror.local import crashpoints
from ckptmirror.local.storage_errors import disk_error, explained

__all__ = [
    "absolute_dir",
    "exchange_dirs",
    "fsync_dir",
    "fsync_file",
    "fsync_tree",
    "make_dirs",
    "publish_dir",
    "rename_noreplace",
    "replace_link",
]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_libc = ctypes.CDLL(None, use_errno=True)


def absolute_dir(given: str | os.PathLike[str], name: str) -> Path:
    """Return the absolute path of a directory, which may not exist; ``name`` is the caller's name for it.

    Raises:
        ConfigError: It is a URL, empty, or no path.
    """
    try:
        path = os.fspath(given)
        if not path or "\0" in path:
            raise TypeError
        return Path(directory_path(path)).absolute()
    except TypeError:
        raise ConfigError(f"{name} is {given!r}; it must be the path of a directory.") from None
    except WrongValue as wrong:
        raise ConfigError(f"{name} {wrong.why}.", hint=wrong.hint) from None


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        LocalStorageUnwritable: The directory cannot be opened, or the file system cannot make one durable.
        IntegrityError: The device failed.
    """
    with explained("make durable the names in", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with crashpoints.around("dir.fsync"):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the bytes of one regular file durable; not its name (see :func:`fsync_dir`).

    Raises:
        LocalStorageUnwritable: There is no such file, or a link is in its place.
        IntegrityError: The device failed.
    """
    with explained("make durable", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with crashpoints.around("file.fsync"):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make every file and every directory below ``path``, and ``path`` itself, durable. Links are not followed.

    Raises:
        IntegrityError: The device failed.
    """
    for directory, _, files, directory_fd in os.fwalk(path, topdown=False, follow_symlinks=False):
        for name in files:
            with explained("make durable", Path(directory, name)):
                _fsync_regular(name, directory_fd)
        fsync_dir(Path(directory))


def _fsync_regular(name: str, directory_fd: int) -> None:
    if not stat.S_ISREG(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode):
        return
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        with crashpoints.around("file.fsync"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(path: Path) -> None:
    """Create a directory and its missing parents, each durable before the next is created.

    Raises:
        LocalStorageFull: No space or no inodes are left.
        LocalStorageUnwritable: Read-only, no permission, or a file is in the way.
    """
    path = path.absolute()
    missing = []
    existing = path
    while not _is_dir(existing):
        missing.append(existing)
        existing = existing.parent
    if existing != existing.parent:
        # A crash may have come between an earlier mkdir and its fsync. We did not create what we may not open.
        with contextlib.suppress(LocalStorageUnwritable):
            fsync_dir(existing.parent)
    for directory in reversed(missing):
        # Another process may make the same directory at this moment.
        mkdir_point = crashpoints.around("dir.mkdir")
        with explained("make the directory", directory), contextlib.suppress(FileExistsError), mkdir_point:
            os.mkdir(directory)  # noqa: PTH102
        fsync_dir(directory.parent)


def _is_dir(path: Path) -> bool:
    with explained("make the directory", path):
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116  (a root may be reached through links)
        except FileNotFoundError:
            if path.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
            return False
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return True


def rename_noreplace(source: Path, target: Path, *, label: str = "file.publish") -> None:
    """Rename a file or directory; atomic, and only if the new name is free. The caller fsyncs the directory.

    Args:
        source: What is renamed; a symbolic link is renamed itself.
        target: The new name, on the same file system.
        label: The crash points' name.

    Raises:
        FileNotFoundError: There is no ``source``.
        NameTaken: ``target`` exists; nothing was changed.
    """
    try:
        _rename_noreplace(source, target, label)
    except FileNotFoundError as error:
        if not os.path.lexists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source)) from error
        raise disk_error(error, "publish", target) from error
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # another process put files into the directory that we claimed
            error = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        raise disk_error(error, "publish", target) from error


def _rename_noreplace(source: Path, target: Path, label: str) -> None:
    try:
        with crashpoints.around(label):
            _renameat2(source, target, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        if stat.S_ISDIR(os.lstat(source).st_mode):
            _rename_over_own_directory(source, target, label)
        else:
            _link_and_unlink(source, target, label)


def _renameat2(source: Path, target: Path, flags: int) -> None:
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    ctypes.set_errno(0)
    answer = _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    if answer != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def _link_and_unlink(source: Path, target: Path, label: str) -> None:
    with crashpoints.around(label):
        os.link(source, target, follow_symlinks=False)
    with crashpoints.around("file.unlink"):
        os.unlink(source)  # noqa: PTH108


def _rename_over_own_directory(source: Path, target: Path, label: str) -> None:
    """Claim the name with an empty directory, then rename over it; this fails if it is no longer empty."""
    with crashpoints.around("dir.claim"):
        os.mkdir(target)  # noqa: PTH102
    try:
        with crashpoints.around(label):
            os.rename(source, target)  # noqa: PTH104
    except OSError:
        with contextlib.suppress(OSError), crashpoints.around("dir.rmdir"):  # the first error is the one that counts
            os.rmdir(target)  # noqa: PTH106
        raise


def publish_dir(temporary: Path, final: Path) -> None:
    """Give a complete directory its final name, durably. Its files must be fsynced already.

    Raises:
        NameTaken: ``final`` exists; nothing was changed.
        IntegrityError: The device failed; nothing was published.
    """
    _fsync_dirs(temporary)
    rename_noreplace(temporary, final, label="dir.publish")
    fsync_dir(final.parent)


def exchange_dirs(temporary: Path, final: Path) -> bool:
    """Let a complete directory and the one that has its final name exchange their names, in one step and durably.

    Its files must be fsynced already.

    Returns:
        Whether the file system can do that; if not, nothing was changed.
    """
    _fsync_dirs(temporary)
    try:
        with crashpoints.around("dir.exchange"):
            _renameat2(temporary, final, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return False
        raise disk_error(error, "replace", final) from error
    fsync_dir(final.parent)
    return True


def _fsync_dirs(top: Path) -> None:
    for directory, _, _ in os.walk(top, topdown=False, followlinks=False):
        fsync_dir(Path(directory))


def replace_link(link: Path, target: str) -> None:
    """Make ``link`` a relative symbolic link to ``target``: readers see the old one or the new one.

    Raises:
        UsageError: ``target`` is not a path below the link's directory.
        NameTaken: The name exists and is not a link; it stays.
    """
    parts = Path(target).parts
    if not parts or Path(target).is_absolute() or ".." in parts:
        raise UsageError(f"A link must name something beside it, which {target!r} does not.")
    temporary = link.with_name(tmp_name(link.name, new_id()))
    with explained("create the link", temporary), crashpoints.around("link.create"):
        temporary.symlink_to(target)
    try:
        if os.path.lexists(link) and not link.is_symlink():
            raise NameTaken(f"{link} is not a symbolic link, so it is not replaced.")
        with explained("replace the link", link), crashpoints.around("link.replace"):
            os.rename(temporary, link)  # noqa: PTH104
    except BaseException:
        with contextlib.suppress(OSError), crashpoints.around("file.unlink"):  # the first error counts
            os.unlink(temporary)  # noqa: PTH108
        raise
    fsync_dir(link.parent)
