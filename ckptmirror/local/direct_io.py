"""Reads and writes past the page cache, if the file system allows it, with reused aligned buffers.

Rules:
* Bytes that are written once and rarely read back do not belong in the page cache: O_DIRECT makes them durable faster,
  and leaves the training's memory alone. File systems without it (tmpfs, some overlays) use buffered I/O.
* Buffers are private anonymous mappings, aligned to a page. A process keeps at most ``KEPT_BUFFERS`` idle ones
  (64 MiB); a caller that takes a buffer gives it back.
* A forked child starts with no kept buffers: it must not share memory that its parent writes to disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import IntegrityError
from ckptmirror.local import crashpoints

__all__ = [
    "ALIGNMENT_BYTES",
    "BUFFER_SIZE_BYTES",
    "KEPT_BUFFERS",
    "aligned_buffer",
    "allow_direct",
    "byte_view",
    "forbid_direct",
    "give_buffer",
    "is_direct",
    "kept_buffer",
    "open_for_reading",
    "open_regular",
    "read_full",
    "take_buffer",
    "write_full",
]

ALIGNMENT_BYTES = 4096
BUFFER_SIZE_BYTES = 8 * 1024 * 1024
KEPT_BUFFERS = 8

_lock = threading.Lock()
_kept: list[memoryview] = []


def byte_view(buffer: Any) -> memoryview:
    """Return a flat view of the bytes of any C-contiguous buffer, of any element format, without copying.

    Raises:
        BufferError: The buffer is not C-contiguous.
    """
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise BufferError("The buffer is not C-contiguous.")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return a fresh writable buffer of ``size_bytes``, aligned to a page, outside the pool."""
    mapping = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= 2 * 1024 * 1024 and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise
    return memoryview(mapping)[:size_bytes]


def take_buffer() -> memoryview:
    """Take a buffer of ``BUFFER_SIZE_BYTES`` from the process's pool, or a fresh one."""
    with _lock:
        if _kept:
            return _kept.pop()
    return aligned_buffer(BUFFER_SIZE_BYTES)


def give_buffer(buffer: memoryview) -> None:
    """Give a taken buffer back; it is dropped if enough are kept."""
    with _lock:
        if len(_kept) < KEPT_BUFFERS:
            _kept.append(buffer)


@contextmanager
def kept_buffer() -> Iterator[memoryview]:
    """Lend a buffer of ``BUFFER_SIZE_BYTES`` for the body."""
    buffer = take_buffer()
    try:
        yield buffer
    finally:
        give_buffer(buffer)


def _forget_buffers_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_forget_buffers_in_child)


def open_regular(path: Path, *, below: Path | None = None) -> int:
    """Open a regular file for reading; never follow a symbolic link, never block on a pipe.

    Args:
        path: The file.
        below: A directory above it: nothing between the two may be a link either.

    Raises:
        FileNotFoundError: There is no such file.
        IntegrityError: It is not a regular file, or a link is on the way to it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if below is None:
            descriptor = os.open(path, flags)
        else:
            with _real_directory(below, path.parent) as directory:
                descriptor = os.open(path.name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = "is a symbolic link" if below is None or path.is_symlink() else "is behind a symbolic link"
            raise IntegrityError(f"{path} {what}, and links are not followed.") from error
        if error.errno == errno.ENOTDIR:  # a file is in the place of a directory, so nothing is below it
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if error.errno == errno.ENXIO:
            raise IntegrityError(f"{path} is not a regular file.") from error  # a socket
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise IntegrityError(f"{path} is not a regular file.")


@contextmanager
def _real_directory(root: Path, directory: Path) -> Iterator[int]:
    """Lend a descriptor of a directory below ``root``, reached through real directories only."""
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in directory.relative_to(root).parts:
            if stat.S_ISLNK(os.stat(part, dir_fd=here, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            above, here = here, -1
            try:
                here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            finally:
                os.close(above)
        yield here
    finally:
        if here >= 0:
            os.close(here)


def open_for_reading(path: Path) -> int:
    """Open a regular file to read it from the disk itself. Raises as :func:`open_regular`."""
    descriptor = open_regular(path)
    if not allow_direct(descriptor):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor


def allow_direct(descriptor: int) -> bool:
    """Switch O_DIRECT on; False if the file system cannot."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def forbid_direct(descriptor: int) -> None:
    """Switch O_DIRECT off: the bytes that follow are not aligned."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def is_direct(descriptor: int) -> bool:
    """Return whether O_DIRECT is on."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def read_full(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill an aligned buffer from an aligned ``offset``; return the count, short only at the end of the file."""
    done = 0
    while done < buffer.nbytes:
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(descriptor):
                raise
            forbid_direct(descriptor)  # no direct reads here, or the last read ended unaligned
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            continue
        if count == 0:
            break
        done += count
    return done


def write_full(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``; continue short writes, and repeat refused direct ones buffered."""
    done = 0
    while done < data.nbytes:
        try:
            with crashpoints.around("file.write"):
                count = os.pwrite(descriptor, data[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(descriptor):
                raise
            forbid_direct(descriptor)
            continue
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count
