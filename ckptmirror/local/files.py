"""Small files on this disk, written atomically, and files that are uploaded.

Rules:
* The order is always: temporary beside the final name, write, check the length, fsync, publish, fsync the directory.
* No file is replaced, except control files, a meta by a larger one of its save, and the link ``latest``.
* Links are never followed, neither to read nor to write.
* Each system call that changes the disk is between two crash points; each error says what, why and what to do.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.names import CONTROL_DIR, tmp_name
from ckptmirror.local import crashpoints, direct_io
from ckptmirror.local.checksummed_writer import create_temporary
from ckptmirror.local.directories import fsync_dir, rename_noreplace
from ckptmirror.local.own_files import check_own_dir
from ckptmirror.local.storage_errors import explained

__all__ = ["FileSource", "read_limited", "write_bytes"]

_GROWS_BYTES = 1 << 16  # read at once of a file that grows meanwhile


def write_bytes(path: Path, data: bytes, *, save_id: str, replace: bool = False) -> None:
    """Create a small file atomically and durably.

    Args:
        path: The final name.
        data: The content.
        save_id: A part of the temporary's name. If several threads may write the file at once, each call needs a new
            id.
        replace: Replace an existing file: a control file, or the meta of a staged save by one that names more; never
            an artifact.

    Raises:
        NameTaken: The name exists (without ``replace``); the file was not touched.
        LocalStorageFull: No space or no inodes are left; the temporary is removed.
        LocalStorageUnwritable: Read-only, no permission, no directory; or the control directory is not one of ours.
    """
    temporary = path.with_name(tmp_name(path.name, save_id))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if path.parent.name == CONTROL_DIR:
        check_own_dir(path.parent, "write to")
        flags |= os.O_NOFOLLOW
    with explained("create", temporary):
        directory = os.open(path.parent, flags)
    try:
        _write_in(directory, path, temporary, data, replace=replace)
    finally:
        os.close(directory)
    fsync_dir(path.parent)


def _write_in(directory: int, path: Path, temporary: Path, data: bytes, *, replace: bool) -> None:
    """Write and publish in an open directory: whoever puts a link in its place meanwhile gets nothing replaced."""
    descriptor = create_temporary(temporary, dir_fd=directory)
    try:
        try:
            with explained("write", temporary):
                direct_io.write_full(descriptor, memoryview(data), 0)
                size_bytes = os.fstat(descriptor).st_size
            if size_bytes != len(data):
                raise IntegrityError(f"{temporary} has {size_bytes} bytes, but {len(data)} were written.")
            with explained("make durable", temporary), crashpoints.around("file.fsync"):
                os.fsync(descriptor)
            if replace:
                with explained("replace", path), crashpoints.around("file.replace"):
                    os.rename(temporary.name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            else:
                rename_noreplace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError), crashpoints.around("file.unlink"):  # the first error counts
                os.unlink(temporary.name, dir_fd=directory)
            raise
    finally:
        os.close(descriptor)


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """Read a small regular file whole, never through a link.

    Raises:
        FileNotFoundError: There is no such file.
        IntegrityError: It is not a regular file, larger than ``limit_bytes``, or unreadable.
    """
    descriptor = direct_io.open_regular(path)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > limit_bytes:
            raise IntegrityError(f"{path} has {size_bytes} bytes; the limit is {limit_bytes}.")
        pieces = []
        remaining = limit_bytes + 1
        while remaining and (piece := os.read(descriptor, min(remaining, max(size_bytes + 1, _GROWS_BYTES)))):
            pieces.append(piece)
            remaining -= len(piece)
        if not remaining:
            raise IntegrityError(f"{path} grew past {limit_bytes} bytes while it was read.")
        return b"".join(pieces)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(descriptor)


class FileSource:
    """A file of a save, readable at any offset from any thread (the Source of ``stores.base``).

    Args:
        root: The directory of the save.
        path: The file's path below it, with no link in it.

    Raises:
        FileNotFoundError: There is no such file.
        IntegrityError: It is not a regular file, or a link is on the way to it.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.path = root / path
        self._descriptor = direct_io.open_regular(self.path, below=root)
        self._size_bytes = os.fstat(self._descriptor).st_size
        direct_io.allow_direct(self._descriptor)

    @property
    def size_bytes(self) -> int:
        """Length in bytes when the file was opened."""
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` and return how many bytes were read (short only at the end).

        Raises:
            IntegrityError: The device failed.
        """
        try:
            return direct_io.read_full(self._descriptor, direct_io.byte_view(buffer), offset)
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read from byte {offset}: {error.strerror}.") from error

    def close(self) -> None:
        """Close the file and drop its pages: an upload should not push the training's data out of memory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()
