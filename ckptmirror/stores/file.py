"""``file:///directory``: a mirror in a directory, local or NFS.

Rules:
* An object is a regular file; ``/`` in its name makes sub-directories. A file that ends in ``.tmp`` is not an object:
  it is still being written.
* A file is never written to after it has its final name. A create is link(2) from a temporary; a replace is rename(2)
  under the mirror's lock (``file_place``), after comparing the generation.
* The generation is made from inode, modification time and size. We set that time, to the nanosecond and later than
  that of the replaced file, so a reused inode number gives another generation.
* The file system has no checksums: an upload reads its file back from the disk and compares it before it gets its name.
* A created object is durable before the call returns. The writer of an object that is found may have been killed
  between link(2) and fsync(2). So the object is made durable after it was read to its end, and before a create says
  that the name is taken: every verification does one or the other.
* There is no custom metadata and no resumable session.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from ckptmirror.core.errors import (
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.model import Digest
from ckptmirror.core.names import check_relative_path
from ckptmirror.local import crashpoints
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.direct_io import (
    BUFFER_SIZE_BYTES,
    allow_direct,
    forbid_direct,
    kept_buffer,
    read_full,
    write_full,
)
from ckptmirror.local.hang_guard import beat
from ckptmirror.local.read_ahead import read_ahead
from ckptmirror.stores.base import Capabilities, ObjectInfo, Upload
from ckptmirror.stores.file_mounts import FSTAB
from ckptmirror.stores.file_place import LOCK_FILE, Place, explained, fsync_found, fsync_names, link_new
from ckptmirror.stores.file_temporaries import remove_stale_temporaries, remove_temporary, temporary_name
from ckptmirror.stores.locations import is_object_name

__all__ = ["SCHEMES", "FileStore", "normalise", "open"]

SCHEMES = ("file",)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY_RACES_LIMIT = 5


def normalise(url: str) -> str:
    """Return the normalised URL.

    Raises:
        ConfigError: It is not ``file:///`` and an absolute path other than ``/``.
    """
    path = _path(url)
    return "file://" + quote(str(path))


def open(url: str) -> FileStore:
    """Open the mirror in a directory. The first change creates it if its parent exists."""
    return FileStore(_path(url))


def _path(url: str) -> Path:
    rest = url.removeprefix("file://")
    host, _, path = rest.partition("/")
    if host not in ("", "localhost") or any(mark in rest for mark in "?#"):
        raise ConfigError("A file:// URL is file:/// and an absolute path, without host, query or fragment.")
    text = os.path.normpath("/" + unquote(path).lstrip("/"))
    if text == "/" or "\0" in text or ".." in unquote(path).split("/"):
        raise ConfigError(f"{url!r} cannot be a mirror.", hint="Write file:///directory/run.")
    return Path(text)


class FileStore:
    """A mirror in a directory."""

    def __init__(self, root: Path, *, lock_timeout_s: float = 30.0, fstab: Path = FSTAB) -> None:
        self._root = root
        self._place = Place(root, lock_timeout_s, fstab)

    @property
    def url(self) -> str:
        """The mirror's URL."""
        return "file://" + quote(str(self._root))

    @property
    def capabilities(self) -> Capabilities:
        """Create-only by link(2), compare and swap by the lock; neither checksums nor metadata."""
        return Capabilities(True, True, False, False, False)

    @property
    def local_directory(self) -> Path:
        """The directory of the URL."""
        return self._root

    def identity(self, expected: str | None = None) -> str | None:
        """Return the random id in the mirror's lock file."""
        return self._place.identity(expected)

    # -- asking ---------------------------------------------------------------------------------------------

    def stat(self, name: str) -> ObjectInfo | None:
        with explained(f"{self.url}/{name}"), self._opened(name) as descriptor:
            info = None if descriptor is None else _info(name, os.fstat(descriptor))
            if descriptor is not None and info is not None and info.size_bytes == 0:
                self._place.settle(descriptor, _parts(name)[:-1])  # a caller may verify it without reading it
            return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        start = tuple(prefix.split("/")[:-1])
        if start:
            check_relative_path("/".join(start))
        with explained(f"{self.url}/{prefix}"):
            found = [_info(n, s) for n, s in self._place.files(start) if n.startswith(prefix) and _is_object(n)]
        return iter(sorted(found, key=lambda info: info.name))

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        with explained(f"{self.url}/{name}"), self._at(name, generation) as (descriptor, info):
            if info.size_bytes > limit_bytes:
                raise StorePermanent(f"{self.url}/{name} has {info.size_bytes} bytes, more than {limit_bytes}.")
            data = bytearray(info.size_bytes)
            self._fill(descriptor, name, 0, memoryview(data))
            self._place.settle(descriptor, _parts(name)[:-1])
            return bytes(data), info

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        with explained(f"{self.url}/{name}"), self._at(name, generation) as (descriptor, info):
            if not allow_direct(descriptor):  # read the disk, not the page cache
                os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)
            self._fill(descriptor, name, offset, buffer)
            if offset + len(buffer) == info.size_bytes:
                self._place.settle(descriptor, _parts(name)[:-1])

    def _fill(self, descriptor: int, name: str, offset: int, buffer: memoryview) -> None:
        if read_full(descriptor, buffer, offset) < len(buffer):
            raise StoreTemporary(f"{self.url}/{name} ends before byte {offset + len(buffer)}.")

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """Lend a descriptor of the object's file, None if there is none."""
        parts = _parts(name)
        try:
            with self._place.parent(parts[:-1]) as parent:
                descriptor = os.open(parts[-1], _READ, dir_fd=parent)
        except FileNotFoundError:
            yield None
            return
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StorePermanent(f"{self.url}/{name} is not a regular file.")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _at(self, name: str, generation: int | None) -> Iterator[tuple[int, ObjectInfo]]:
        with self._opened(name) as descriptor:
            info = None if descriptor is None else _info(name, os.fstat(descriptor))
            if descriptor is None or info is None or generation not in (None, info.generation):
                raise ObjectNotFound(f"There is no object {name} on {self.url}" + (" any more." if generation else "."))
            yield descriptor, info

    # -- changing -------------------------------------------------------------------------------------------

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """Create or replace a small object; the metadata is not kept."""
        del metadata

        def fill(descriptor: int) -> None:
            write_full(descriptor, memoryview(data), 0)

        if if_generation == 0:
            return self._create(name, fill)
        parts = _parts(name)
        with explained(f"{self.url}/{name}"), self._place.locked(), self._parent_of(parts) as parent:
            old = self._expect(parent, parts, if_generation)
            if old is None:
                raise PreconditionFailed(f"{self.url}/{name} does not exist: no generation {if_generation}.")
            with self._temporary(parent, parts[-1], fill, later_than_ns=old.st_mtime_ns) as (temporary, found):
                with crashpoints.around("mirror.replace"):
                    os.rename(temporary, parts[-1], src_dir_fd=parent, dst_dir_fd=parent)
                fsync_names(parent)
            return _info(name, found)

    def upload(self, upload: Upload) -> ObjectInfo:
        """Create an object; the session is ignored."""

        def fill(descriptor: int) -> None:
            _copy(upload, descriptor)
            with crashpoints.around("mirror.fsync"):
                os.fsync(descriptor)
            _verify(upload.name, descriptor, upload.digest)

        return self._create(upload.name, fill)

    def _create(self, name: str, fill: Callable[[int], None]) -> ObjectInfo:
        parts = _parts(name)
        for _ in range(_DIRECTORY_RACES_LIMIT):
            try:
                with explained(f"{self.url}/{name}"), self._parent_of(parts, create=True) as parent:
                    return self._create_in(parent, parts[-1], name, fill)
            except _DirectoryTakenAwayError:
                continue  # a deletion removed the directory that we had just created
        raise StoreTemporary(f"The directory of {self.url}/{name} keeps being removed.")

    def _create_in(self, parent: int, last: str, name: str, fill: Callable[[int], None]) -> ObjectInfo:
        if _exists(parent, last):
            raise self._taken(parent, last, name)
        remove_stale_temporaries(parent, last)
        with self._temporary(parent, last, fill) as (temporary, found):
            try:
                link_new(parent, temporary, last)
            except FileExistsError as error:
                raise self._taken(parent, last, name) from error
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                self._rename_new(parent, temporary, last, name)
            fsync_names(parent)
        return _info(name, found)

    def _taken(self, parent: int, last: str, name: str) -> PreconditionFailed:
        """Make the existing file and its name durable; the names of the directories above are durable already."""
        try:
            descriptor = os.open(last, _READ, dir_fd=parent)
        except OSError:
            pass  # gone, a link, or not ours to read: then nobody can read it back either
        else:
            try:
                fsync_found(descriptor)
            finally:
                os.close(descriptor)
        fsync_names(parent)
        return PreconditionFailed(f"{self.url}/{name} exists.")

    def _rename_new(self, parent: int, temporary: str, last: str, name: str) -> None:
        """Create without hard links: the lock makes look-then-rename one step for every user of this store."""
        with self._place.locked():
            if _exists(parent, last):
                raise self._taken(parent, last, name)
            with crashpoints.around("mirror.rename"):
                os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)

    @contextmanager
    def _parent_of(self, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
        try:
            lent = self._place.parent(parts[:-1], create=create)
            parent = lent.__enter__()
        except FileNotFoundError as error:
            if create:
                raise _DirectoryTakenAwayError from error
            raise PreconditionFailed(f"{self.url}/{'/'.join(parts)} does not exist.") from error
        try:
            yield parent
        finally:
            lent.__exit__(None, None, None)

    @contextmanager
    def _temporary(
        self, parent: int, last: str, fill: Callable[[int], None], *, later_than_ns: int = 0
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Lend a durable file under a temporary name in ``parent``; the name is removed afterwards."""
        temporary = temporary_name(last)
        try:
            with crashpoints.around("mirror.create"):
                descriptor = os.open(temporary, _NEW, 0o666, dir_fd=parent)
        except FileNotFoundError as error:
            raise _DirectoryTakenAwayError from error
        try:
            with suppress(OSError):  # shows others that its writer lives, if the file system has locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            fill(descriptor)
            time_ns = max(time.time_ns(), later_than_ns + 1)
            with crashpoints.around("mirror.set_time"):
                os.utime(descriptor, ns=(time_ns, time_ns))
            with crashpoints.around("mirror.fsync"):
                os.fsync(descriptor)
            yield temporary, os.fstat(descriptor)
        finally:
            remove_temporary(temporary, parent)
            os.close(descriptor)

    def delete(self, name: str, *, generation: int) -> None:
        """Delete an object, and the directories that become empty."""
        parts = _parts(name)
        with explained(f"{self.url}/{name}"), self._place.locked():
            try:
                with self._place.parent(parts[:-1]) as parent:
                    if self._expect(parent, parts, generation) is None:
                        return
                    with crashpoints.around("mirror.unlink"):
                        os.unlink(parts[-1], dir_fd=parent)
                    fsync_names(parent)
            except FileNotFoundError:
                return
            self._place.remove_empty(parts[:-1])

    def _expect(self, parent: int, parts: tuple[str, ...], generation: int) -> os.stat_result | None:
        """Return the attributes of the file, which must be at ``generation``; None if there is none."""
        try:
            descriptor = os.open(parts[-1], _READ, dir_fd=parent)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if _generation(found) != generation:
            raise PreconditionFailed(f"{self.url}/{'/'.join(parts)} is not at generation {generation}.")
        return found

    def close(self) -> None:
        """Nothing is held open between calls."""


class _DirectoryTakenAwayError(Exception):
    pass


def _parts(name: str) -> tuple[str, ...]:
    check_relative_path(name)
    if not _is_object(name):
        raise StorePermanent(f"{name!r} cannot be an object's name: it is reserved for temporaries or the lock.")
    return tuple(name.split("/"))


def _is_object(name: str) -> bool:
    return is_object_name(name) and not name.endswith(".tmp") and name != LOCK_FILE


def _generation(found: os.stat_result) -> int:
    text = f"{found.st_ino}:{found.st_mtime_ns}:{found.st_size}".encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1) or 1


def _info(name: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, found.st_size, _generation(found), None)


def _exists(parent: int, last: str) -> bool:
    try:
        os.stat(last, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _copy(upload: Upload, descriptor: int) -> None:
    allow_direct(descriptor)
    offset, size_bytes = 0, upload.digest.size_bytes
    with closing(read_ahead(upload.source.read_into, 0, size_bytes)) as pieces:
        for piece in pieces:
            if len(piece) < BUFFER_SIZE_BYTES:
                forbid_direct(descriptor)
            write_full(descriptor, piece, offset)
            offset += len(piece)
            upload.on_progress(offset)
    if offset < size_bytes:
        raise IntegrityError(f"The source of {upload.name} ends at byte {offset} of {size_bytes}.")


def _verify(name: str, descriptor: int, digest: Digest) -> None:
    """Read the file back from the disk and compare it with the committed digest."""
    if not allow_direct(descriptor):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    found, offset = 0, 0
    with kept_buffer() as buffer:
        while count := read_full(descriptor, buffer, offset):
            found = crc32c(buffer[:count], found)
            offset += count
            beat()
    if (offset, found) != (digest.size_bytes, digest.crc32c):
        raise IntegrityError(f"{name} does not read back as it was committed; nothing was stored.")
