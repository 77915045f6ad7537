"""The directory behind a ``file://`` mirror: found, recognised, walked and locked.

Rules:
* Every path is walked component by component with O_NOFOLLOW: no link inside the mirror is ever followed, so no name
  leaves it.
* The directory is made only on first contact, and only below a parent that exists. Once met, by this process or by an
  earlier one that remembered it, it is recognised by the random id in its lock file; if it is gone, or another stands
  in its place, the mount vanished: that is a temporary fault, and nothing is made or written there.
* On first contact nothing is made below a directory that /etc/fstab lists and that is not mounted. What remains
  possible: where nobody remembers the mirror (a new machine, a lost table) and the mount is one that fstab does not
  list, a fresh mirror is made in the empty directory.
* Read-modify-write holds an exclusive flock(2) on the lock file. On NFS, Linux carries flock over to the server as a
  byte-range lock (since 2.6.12), so it excludes other hosts too; a mount with ``local_lock=flock`` or ``nolock`` breaks
  that.
* What a call of the kernel takes is not ours to bound: a hard NFS mount blocks while its server is away. Waiting for
  the lock is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptmirror.core.errors import NotAuthorised, StorePermanent, StoreTemporary
from ckptmirror.local import crashpoints

__all__ = ["FSTAB", "LOCK_FILE", "Place", "explained", "fsync_names", "link_new"]

LOCK_FILE = ".ckptmirror.lock"
FSTAB = Path("/etc/fstab")
_MOUNTED = Path("/proc/self/mountinfo")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_POLL_S = 0.02
_MOUNT_HINT = "Is its file system mounted? A mirror that was made anew on purpose needs a URL of its own."
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_PERMANENT = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV, errno.EFBIG)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError of the body into the store error that it means."""
    try:
        yield
    except OSError as error:
        message = f"{what}: {error.strerror or error}"
        if error.errno in _UNWRITABLE:
            raise NotAuthorised(message, hint="Make the mirror's directory accessible to this user.") from error
        if error.errno in _PERMANENT:
            raise StorePermanent(message, hint="Look for a file or link that stands in the way.") from error
        raise StoreTemporary(message, hint="Check that the file system is mounted, healthy, and has space.") from error


def link_new(parent: int, temporary: str, final: str) -> None:
    """Publish ``temporary`` as ``final`` in one step, if that name is free; the temporary name stays.

    Raises:
        FileExistsError: It is not free, and it is not our own link whose answer NFS lost.
    """
    try:
        with crashpoints.around("mirror.link"):
            os.link(temporary, final, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    except FileExistsError:
        if os.stat(temporary, dir_fd=parent, follow_symlinks=False).st_nlink < 2:
            raise


def fsync_names(directory: int) -> None:
    """Make the names in an open directory durable."""
    with crashpoints.around("mirror.fsync_directory"):
        os.fsync(directory)


class Place:
    """One mirror directory."""

    def __init__(self, root: Path, lock_timeout_s: float, fstab: Path = FSTAB) -> None:
        self._root = root
        self._fstab = fstab
        self._lock_timeout_s = lock_timeout_s
        self._id: bytes | None = None  # the random id in the lock file, once met
        self._seen: tuple[int, int] | None = None  # device and inode of the lock file when its id was last read
        self._read_only = False

    def identity(self, expected: str | None = None) -> str | None:
        """Return the random id in the lock file, None where none may be made.

        Args:
            expected: What it was when an earlier process met the directory.

        Raises:
            StoreTemporary: The directory is not there, or it is not the one that was met before.
            StorePermanent: The lock file holds no id.
        """
        if expected is not None and self._id is None:
            self._id = expected.encode()
        with self.root():
            pass
        if self._id is None:
            return None
        identity = self._id.decode("ascii", "replace")
        if expected not in (None, identity):
            raise self._vanished("another mirror stands in its place")
        if not re.fullmatch("[0-9a-f]{32}", identity):
            raise StorePermanent(f"{self._root}/{LOCK_FILE} holds no id.", hint="Give the mirror another directory.")
        return identity

    @contextmanager
    def root(self) -> Iterator[int]:
        """Lend a descriptor of the directory, which is the one that was met before.

        Raises:
            StoreTemporary: It is not there, or another is.
        """
        with explained(f"{self._root}"):
            descriptor = self._open_root()
        try:
            with explained(f"{self._root}"):
                self._recognise(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_root(self) -> int:
        try:
            return os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._id is not None:
                raise self._vanished("it was there before") from None
            if not self._root.parent.is_dir():
                raise self._vanished(f"neither is {self._root.parent}") from None
            self._refuse_empty_mount_point()
        with crashpoints.around("mirror.make_root"):
            self._root.mkdir(exist_ok=True)
        return os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _refuse_empty_mount_point(self) -> None:
        place = self._root.resolve()
        for point in (place, *place.parents[:-1]):
            if str(point) in _mount_points(self._fstab, 1) and str(point) not in _mount_points(_MOUNTED, 4):
                raise self._vanished(f"{point} is listed in {self._fstab} and is not mounted")

    def _vanished(self, why: str) -> StoreTemporary:
        return StoreTemporary(
            f"The mirror directory {self._root} is not there ({why}): is it mounted?", hint=_MOUNT_HINT
        )

    def _recognise(self, root: int) -> None:
        if self._read_only:
            return
        try:
            descriptor = os.open(LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        except FileNotFoundError:
            if self._id is not None:
                raise self._vanished("a directory without its lock file stands in its place") from None
            self._refuse_empty_mount_point()
            self._make_lock_file(root)
            return
        try:
            found = os.fstat(descriptor)
            if self._seen == (found.st_dev, found.st_ino):
                return
            identity = os.read(descriptor, 64)
        finally:
            os.close(descriptor)
        if self._id not in (None, identity):
            raise self._vanished("another mirror stands in its place")
        self._id, self._seen = identity, (found.st_dev, found.st_ino)

    def _make_lock_file(self, root: int) -> None:
        temporary = f"{LOCK_FILE}.{secrets.token_hex(4)}.tmp"
        try:
            with crashpoints.around("mirror.create"):
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=root)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            self._read_only = True  # an evaluation host that may only read
            return
        try:
            with crashpoints.around("mirror.write"):
                os.write(descriptor, secrets.token_hex(16).encode())
            with crashpoints.around("mirror.fsync"):
                os.fsync(descriptor)
            with suppress(FileExistsError):  # another process made it first; the next lines read whose it is
                link_new(root, temporary, LOCK_FILE)
        finally:
            os.close(descriptor)
            with crashpoints.around("mirror.unlink_temporary"):
                os.unlink(temporary, dir_fd=root)
        fsync_names(root)
        self._recognise(root)

    @contextmanager
    def parent(self, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
        """Lend a descriptor of the directory ``parts`` below the root.

        Raises:
            FileNotFoundError: It is not there (without ``create``), or a deletion keeps taking it away.
        """
        with self.root() as root:
            descriptor = self._walk(root, parts, create)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _walk(self, root: int, parts: tuple[str, ...], create: bool) -> int:
        here = os.dup(root)
        for part in parts:
            try:
                if create:
                    _make_directory(here, part)
                below = os.open(part, _DIRECTORY, dir_fd=here)
            finally:
                os.close(here)
            here = below
        return here

    def remove_empty(self, parts: tuple[str, ...]) -> None:
        """Remove the directory ``parts`` and those above it, below the root, as far as they are empty."""
        while parts:
            try:
                with self.parent(parts[:-1]) as above, crashpoints.around("mirror.remove_directory"):
                    os.rmdir(parts[-1], dir_fd=above)
            except OSError:
                return  # not empty, or already gone: an empty directory is no object, so nothing depends on it
            parts = parts[:-1]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the mirror's lock.

        Raises:
            StoreTemporary: Another holds it for longer than the time limit.
        """
        with self.root() as root, explained(f"{self._root}/{LOCK_FILE}"):
            descriptor = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            self._wait_for_lock(descriptor)
            yield
        finally:
            fcntl.flock(
                descriptor, fcntl.LOCK_UN
            )  # closing alone would not do: a forked child may share the descriptor
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
                    message = f"The file system of {self._root} has no locks, so two writers could not see one another."
                    raise StorePermanent(message, hint="Mount it with flock, or keep the mirror elsewhere.") from error
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise StoreTemporary(f"{self._root}/{LOCK_FILE} cannot be locked: {error.strerror}.") from error
            if time.monotonic() >= deadline:
                raise StoreTemporary(f"{self._root}/{LOCK_FILE} was locked by another for {self._lock_timeout_s:g} s.")
            time.sleep(_LOCK_POLL_S)

    def files(self, start: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and attributes of every regular file below ``start``, in no order; never through a link."""
        waiting = [start]
        while waiting:
            parts = waiting.pop()
            try:
                with self.parent(parts) as directory:
                    for entry in os.scandir(directory):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append((*parts, entry.name))
                        elif entry.is_file(follow_symlinks=False) and (found := _attributes(directory, entry.name)):
                            yield "/".join((*parts, entry.name)), found
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed meanwhile, or never there


def _mount_points(table: Path, column: int) -> set[str]:
    """The mount points that a table of the system lists; spaces stand in it as octal escapes."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    found = {row[column] for row in rows if len(row) > column}
    return {re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), point).rstrip("/") or "/" for point in found}


def _make_directory(parent: int, name: str) -> None:
    try:
        with crashpoints.around("mirror.make_directory"):
            os.mkdir(name, dir_fd=parent)
        fsync_names(parent)
    except FileExistsError:
        pass


def _attributes(directory: int, name: str) -> os.stat_result | None:
    """Open and ask: NFS answers a bare stat from a cache that may be seconds old, but asks the server at each open."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        return found if stat.S_ISREG(found.st_mode) else None
    finally:
        os.close(descriptor)
