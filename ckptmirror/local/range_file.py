"""A file of known size that many threads write in any order: the target of a download.

Rules:
* The whole size is allocated before the first byte, so a disk that is too small fails at once, not after an hour.
* A temporary of the same size is continued: the caller decides by checksum which ranges it need not fetch again. One
  that another user planted (``own_files``) is not: its owner could change it once it is published.
* Aligned pieces of aligned buffers bypass the page cache, other pieces use it; ``seal`` makes everything durable.
* It holds a lock on its temporary, so that two processes never fill the same file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ckptmirror.core.errors import IntegrityError
from ckptmirror.local import crashpoints, direct_io
from ckptmirror.local.own_files import has_trusted_owner
from ckptmirror.local.storage_errors import explained

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RangeFile"]

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RangeFile:
    """A preallocated temporary of ``size_bytes``, written and read at offsets. All methods but close may run at once.

    With ``sparse``, only some ranges of it will be written, and read right after: nothing is allocated before, and what
    is written stays in the page cache.

    Attributes:
        continued: Whether the file existed before, so that some of its ranges may be good already.

    Raises:
        LocalStorageFull: There is no room for the whole file; it is removed.
        NameTaken: Another process is filling this file.
        LocalStorageUnwritable: Read-only, no permission, no directory, a link or a directory in its place.
    """

    def __init__(self, temporary: Path, size_bytes: int, *, sparse: bool = False) -> None:
        self.path = temporary
        self.size_bytes = size_bytes
        self._sparse = sparse
        self.continued = False
        self._direct = -1
        self._descriptor = -1
        with explained("create", temporary):
            self._descriptor = self._opened()
        self._direct = self._opened_direct() if not sparse else -1

    def write_at(self, offset: int, buffer: Buffer) -> None:
        """Write all of ``buffer`` at ``offset``.

        Raises:
            ValueError: It would reach past the end.
            IntegrityError: The device failed.
        """
        view = self._checked(offset, buffer)
        direct = self._direct >= 0 and offset % direct_io.ALIGNMENT_BYTES == 0 and _is_aligned(view)
        aligned = view.nbytes // direct_io.ALIGNMENT_BYTES * direct_io.ALIGNMENT_BYTES if direct else 0
        with explained("write", self.path):
            if aligned:
                self._write_direct(view[:aligned], offset)
            direct_io.write_full(self._descriptor, view[aligned:], offset + aligned)

    def read_at(self, offset: int, buffer: Buffer) -> None:
        """Fill ``buffer`` from ``offset``.

        Raises:
            ValueError: It would reach past the end.
            IntegrityError: The device failed, or the file became shorter.
        """
        view = self._checked(offset, buffer)
        try:
            count = direct_io.read_full(self._descriptor, view, offset)
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read from byte {offset}: {error.strerror}.") from error
        if count != view.nbytes:
            raise IntegrityError(f"{self.path} ends at byte {offset + count}; it should have {self.size_bytes}.")

    def seal(self) -> None:
        """Make everything written durable under the temporary name, and close.

        Raises:
            IntegrityError: The device failed; the file cannot be trusted.
        """
        try:
            with explained("make durable", self.path), crashpoints.around("file.fsync"):
                os.fsync(self._descriptor)
            with explained("make durable", self.path):
                size_bytes = os.fstat(self._descriptor).st_size
            if size_bytes != self.size_bytes:
                raise IntegrityError(f"{self.path} has {size_bytes} bytes; it should have {self.size_bytes}.")
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is, to be continued another time. May be called again."""
        for descriptor in (self._direct, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._descriptor = -1

    def __enter__(self) -> RangeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> int:
        descriptor = self._found()
        if descriptor < 0:
            with crashpoints.around("file.create"):
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
        try:
            _lock(descriptor)
            facts = os.fstat(descriptor)
            if not os.path.samestat(facts, os.lstat(self.path)):  # its earlier holder published it just now
                raise FileExistsError(errno.EEXIST, "another process has just published it")
            self.continued = facts.st_size == self.size_bytes > 0
            if not self.continued:
                self._allocate(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _found(self) -> int:
        """Open a temporary that an earlier call left; -1 if there is none, or it was removed because it is not ours."""
        try:
            descriptor = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            return -1
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            # Two names: published by link(2), and a crash came before the temporary was unlinked.
            if facts.st_nlink == 1 and has_trusted_owner(facts, self.path.parent.stat()):
                kept, descriptor = descriptor, -1
                return kept
            _lock(descriptor)
            with crashpoints.around("file.unlink"):
                os.unlink(self.path)  # noqa: PTH108
            return -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _allocate(self, descriptor: int) -> None:
        try:
            with crashpoints.around("file.truncate"):
                os.ftruncate(descriptor, 0)
            if self._sparse:
                os.ftruncate(descriptor, self.size_bytes)
            elif self.size_bytes:
                with crashpoints.around("file.allocate"):
                    os.posix_fallocate(descriptor, 0, self.size_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                with crashpoints.around("file.truncate"):  # reserves no space: a full disk shows while writing
                    os.ftruncate(descriptor, self.size_bytes)
                return
            with crashpoints.around("file.unlink"):
                os.unlink(self.path)  # noqa: PTH108
            raise

    def _opened_direct(self) -> int:
        """Open the same inode a second time for direct writes; -1 if the file system cannot."""
        try:
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return -1

    def _write_direct(self, view: memoryview, offset: int) -> None:
        try:
            direct_io.write_full(self._direct, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct_io.write_full(self._descriptor, view, offset)

    def _checked(self, offset: int, buffer: Buffer) -> memoryview:
        view = direct_io.byte_view(buffer)
        if offset < 0 or offset + view.nbytes > self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + view.nbytes} reach past the end of {self.size_bytes}")
        return view


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise FileExistsError(errno.EEXIST, "another process fills it") from error
        raise


def _is_aligned(view: memoryview) -> bool:
    if view.readonly or not view.nbytes:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % direct_io.ALIGNMENT_BYTES == 0
