"""The directory behind a ``file://`` mirror: finds, recognises, walks and locks it.

Rules:
* Every path is walked component by component with O_NOFOLLOW: no link inside the mirror is ever followed, so no name
  leaves it.
* Reading creates nothing. The first change, or the first request for the id, creates the directory and its lock file,
  and only below a parent that exists.
* A directory without an id is never changed. If it has none and none can be created, each change is refused.
* Once this process knows the id, or an earlier one remembered it, every call compares it with the lock file. If the
  lock file is missing or has another id, the mount vanished: that is a temporary error, and nothing is created or
  written there. Device and inode numbers prove nothing, because the next mount may reuse them.
* On first contact nothing is created, and nothing counts as empty, below a directory that /etc/fstab lists and that is
  not mounted (``file_mounts``). One gap remains: if nothing remembers the mirror (a new machine, a lost table) and
  fstab does not list the mount, a fresh mirror is created in the empty directory.
* A lock file, a directory or an object may be visible before it is durable, because the process that created it may
  have died in between. So they are fsynced, with the names above them, before they count.
* Read-modify-write holds an exclusive flock(2) on the lock file. On NFS, Linux sends flock to the server as a
  byte-range lock (since 2.6.12), so it excludes other hosts too; a mount with ``local_lock=flock`` or ``nolock``
  breaks that.
* The wait for the lock has a time limit. A kernel call has none: a hard NFS mount blocks while its server is away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from ckptmirror.core.errors import BucketNotFound, NotAuthorised, StorePermanent, StoreTemporary
from ckptmirror.local import crashpoints
from ckptmirror.local.hang_guard import beat
from ckptmirror.local.processes import lock_holders, named_processes
from ckptmirror.stores.file_mounts import FSTAB, unmounted_point

__all__ = ["LOCK_FILE", "Place", "explained", "fsync_found", "fsync_names", "link_new", "read_identity"]

LOCK_FILE = ".ckptmirror.lock"
_ID = re.compile(b"[0-9a-f]{32}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_POLL_S = 0.02
_MAX_DEPTH = 32
_OF_FILE_SYSTEMS = ("lost+found", ".snapshot", ".snapshots", ".zfs")
_MOUNT_HINT = "Is its file system mounted? If you recreated the mirror on purpose, give it a new URL."
_TYPO_HINT = (
    "Correct the mirror's URL, or mount its file system. The first process that saves there (a trainer, a push) "
    "creates it."
)
_READER_HINT = "Correct the URL, or mount its file system."
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
            hint = f"Let user id {os.geteuid()} read and write there: `ls -ld` says whose each file and directory is."
            raise NotAuthorised(message, hint=hint) from error
        if error.errno in _PERMANENT:
            raise StorePermanent(message, hint="Look for a file or link in its place.") from error
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


def fsync_found(descriptor: int) -> None:
    """Make a file durable that others created; a file system without any fsync (a read-only one) needs none."""
    try:
        with crashpoints.around("mirror.fsync_found"):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


class Place:
    """One mirror directory."""

    def __init__(self, root: Path, lock_timeout_s: float, fstab: Path = FSTAB) -> None:
        self._root = root
        self._fstab = fstab
        self._lock_timeout_s = lock_timeout_s
        self._id: bytes | None = None  # the random id in the lock file, once known
        self._is_durable = False  # whether this process has fsynced the names of the lock file and of the directory

    def identity(self, expected: str | None = None) -> str | None:
        """Return the random id in the lock file; None if there is none and none can be created.

        Args:
            expected: The id that an earlier process saw.

        Raises:
            StoreTemporary: The directory is not there, or it is another one than before.
            StorePermanent: The lock file holds no id.
        """
        if expected is not None and self._id is None:
            self._id = expected.encode()
        try:
            with self.root(changing=True):
                identity = (self._id or b"").decode()
        except NotAuthorised as error:
            try:
                with self.root():
                    return None  # read-only, as on an evaluation host; it may become writable later
            except BucketNotFound:
                raise error from None
        if expected not in (None, identity):
            raise self._vanished("another mirror is in its place")
        return identity

    @contextmanager
    def root(self, *, changing: bool = False) -> Iterator[int]:
        """Lend a descriptor of the directory, after checking that it is the same one as before.

        Args:
            changing: Create the directory and its id if they are missing.

        Raises:
            StoreTemporary: It is not there, or another is in its place.
            BucketNotFound: It does not exist, and no earlier contact is known.
            NotAuthorised: It has no id, and none can be created.
        """
        with explained(f"{self._root}"):
            descriptor = self._open_root(changing)
        try:
            with explained(f"{self._root}"):
                self._recognise(descriptor, changing)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_root(self, make: bool) -> int:
        known = self._id  # read it before looking: another thread may make the directory meanwhile
        try:
            return os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if known is not None:
                raise self._vanished("it was there before") from None
            self._refuse_empty_mount_point()
            if not self._root.parent.is_dir():
                raise self._misplaced(make) from None
            if not make:
                raise BucketNotFound(f"The mirror directory {self._root} does not exist.", hint=_TYPO_HINT) from None
        with crashpoints.around("mirror.make_root"):
            self._root.mkdir(exist_ok=True)
        return os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _refuse_empty_mount_point(self) -> None:
        point = unmounted_point(self._root.resolve(), self._fstab)
        if point is not None:
            raise self._vanished(f"{point} is listed in {self._fstab} and is not mounted")

    def _misplaced(self, make: bool) -> BucketNotFound:
        parent = self._root.parent
        if not make:
            return BucketNotFound(f"There is no mirror at {self._root}: {parent} does not exist.", hint=_READER_HINT)
        return BucketNotFound(
            f"The mirror directory {self._root} cannot be created: there is no {parent}.",
            hint=f"Mount its file system, or correct the mirror's URL, or create it: `mkdir -p {quote(str(parent))}`.",
        )

    def _vanished(self, why: str) -> StoreTemporary:
        if self._id is None:
            hint = _MOUNT_HINT
        else:
            known = self._id.decode("ascii", "replace")
            restore = f"`echo {known} > {quote(f'{self._root}/{LOCK_FILE}')}`"
            hint = f"{_MOUNT_HINT} If only {LOCK_FILE} was removed or recreated there, restore it: {restore}."
        return StoreTemporary(f"The mirror directory {self._root} is not there ({why}): is it mounted?", hint=hint)

    def _recognise(self, root: int, make: bool) -> None:
        known = self._id  # read it before looking: another thread may create the file meanwhile
        identity = _read_id(root)
        if identity is None:
            if known is not None:
                raise self._vanished("a directory without its lock file is in its place")
            self._refuse_empty_mount_point()
            if not make:
                return
            self._make_lock_file(root)
            identity = _read_id(root)
        if self._id not in (None, identity):
            raise self._vanished("another mirror is in its place")
        if identity is not None and _ID.fullmatch(identity):
            self._id = identity
        elif make:
            raise _without_id(self._root)
        if make and not self._is_durable:
            fsync_found(root)
            _fsync_above(root)
            self._is_durable = True

    def _make_lock_file(self, root: int) -> None:
        temporary = f"{LOCK_FILE}.{secrets.token_hex(4)}.tmp"
        try:
            with crashpoints.around("mirror.create"):
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=root)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            raise NotAuthorised(
                f"{self._root} has no {LOCK_FILE}, and none can be created ({error.strerror}): nothing was changed.",
                hint="Make the mirror's directory writable to this user.",
            ) from error
        try:
            with crashpoints.around("mirror.write"):
                os.write(descriptor, secrets.token_hex(16).encode())
            with crashpoints.around("mirror.fsync"):
                os.fsync(descriptor)
            with suppress(FileExistsError):  # another process created it first: its id is read next
                link_new(root, temporary, LOCK_FILE)
        finally:
            os.close(descriptor)
            with crashpoints.around("mirror.unlink_temporary"):
                os.unlink(temporary, dir_fd=root)

    @contextmanager
    def parent(self, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
        """Lend a descriptor of the directory ``parts`` below the root.

        Args:
            create: Create it if it is missing, and make its name and those above it durable.

        Raises:
            FileNotFoundError: It is not there (without ``create``), or deletions keep removing it.
        """
        with self.root(changing=create) as root:
            descriptor = self._walk(root, parts, _make_directory if create else _leave_alone)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _walk(self, root: int, parts: tuple[str, ...], before: Callable[[int, str], None]) -> int:
        here = os.dup(root)
        for part in parts:
            try:
                before(here, part)
                below = os.open(part, _DIRECTORY, dir_fd=here)
            finally:
                os.close(here)
            here = below
        return here

    def settle(self, file: int, parts: tuple[str, ...]) -> None:
        """Make a file that was found durable, with its name in the directory ``parts`` and the names above it."""
        fsync_found(file)
        with self.root() as root:
            directory = self._walk(root, parts, lambda above, _: fsync_found(above))
        try:
            fsync_found(directory)
        finally:
            os.close(directory)

    def remove_empty(self, parts: tuple[str, ...]) -> None:
        """Remove the directory ``parts``, and those above it but below the root, as long as they are empty."""
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
            StoreTemporary: Another process holds it for longer than the time limit.
        """
        with self.root(changing=True) as root, explained(f"{self._root}/{LOCK_FILE}"):
            descriptor = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            self._wait_for_lock(descriptor)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked child may share the descriptor
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
                raise StoreTemporary(
                    f"{self._root}/{LOCK_FILE} was locked by another process for {self._lock_timeout_s:g} s "
                    f"({named_processes(lock_holders(self._root / LOCK_FILE))}).",
                    hint="It is tried again; if that goes on, stop the process that holds the lock.",
                )
            beat()  # it is the lock that does not come, and not the file system that does not answer
            time.sleep(_LOCK_POLL_S)

    def files(self, start: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name and attributes of every regular file below ``start``, in any order; follow no link.

        Directories that are deeper than any of ours are left out: each is reached from the root, so the time would grow
        with the square of the depth. So are those that a file system has in its top directory for itself, which only
        root may enter.
        """
        waiting = [start]
        while waiting:
            parts = waiting.pop()
            try:
                with self.parent(parts) as directory:
                    for entry in os.scandir(directory):
                        beat()
                        if entry.is_dir(follow_symlinks=False):
                            is_of_file_system = not parts and entry.name in _OF_FILE_SYSTEMS
                            if len(parts) < _MAX_DEPTH and not is_of_file_system:
                                waiting.append((*parts, entry.name))
                        elif entry.is_file(follow_symlinks=False) and (found := _attributes(directory, entry.name)):
                            yield "/".join((*parts, entry.name)), found
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed meanwhile, or never there
            except PermissionError:
                with explained(f"file://{self._root.joinpath(*parts)}"):
                    raise


def read_identity(directory: Path) -> str | None:
    """Return the id of the mirror that is in a directory now; None if there is none. Creates nothing.

    Raises:
        OSError: The directory cannot be read.
        StorePermanent: Its lock file holds no id.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        identity = _read_id(descriptor)
    finally:
        os.close(descriptor)
    if identity is not None and not _ID.fullmatch(identity):
        raise _without_id(directory)
    return identity.decode() if identity is not None else None


def _without_id(root: Path) -> StorePermanent:
    hint = "Write into it the identity that each root has noted in its .ckptmirror/mirror-*.json."
    return StorePermanent(f"{root}/{LOCK_FILE} holds no id.", hint=hint)


def _read_id(root: int) -> bytes | None:
    """Read the lock file now; None if there is none."""
    try:
        descriptor = os.open(LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, 64).rstrip(b"\n")  # a person may have written it with echo
    finally:
        os.close(descriptor)


def _make_directory(parent: int, name: str) -> None:
    with suppress(FileExistsError), crashpoints.around("mirror.make_directory"):
        os.mkdir(name, dir_fd=parent)
    fsync_names(parent)  # also if it existed: the process that created it may have died before this


def _leave_alone(_parent: int, _name: str) -> None:
    """A directory that is only read."""


def _fsync_above(root: int) -> None:
    """Make the directory's own name durable, if this user may open its parent."""
    try:
        above = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    except PermissionError:
        return
    try:
        fsync_found(above)
    finally:
        os.close(above)


def _attributes(directory: int, name: str) -> os.stat_result | None:
    """Return a file's attributes by opening it: NFS asks the server at each open, but answers a stat from its cache.

    A file that this user may not open has a name and a size, too.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    except PermissionError:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return found if stat.S_ISREG(found.st_mode) else None
    try:
        found = os.fstat(descriptor)
        return found if stat.S_ISREG(found.st_mode) else None
    finally:
        os.close(descriptor)
