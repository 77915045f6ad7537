"""Writes one artifact once: computes its checksum while writing, and makes it durable before it has a name.

Rules:
* The order: temporary beside the final name, write, check the length, fsync, publish without replacing, fsync the
  directory.
* The crc32c is computed from the same buffers that go to the disk, before they go.
* The first error counts: every later write repeats it, closing removes the temporary, and nothing hides it.
* fsync is tried once. After an error the artifact is abandoned, never published.
* The temporary of a dead process is overwritten; that of a live writer is not touched.
* A writer holds at most ``_BUFFERS`` buffers: a slow disk makes write() wait, but does not fill the memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.core.model import Digest
from ckptmirror.core.names import tmp_name
from ckptmirror.local import crashpoints, direct_io
from ckptmirror.local.checksums import BlockDigest
from ckptmirror.local.directories import fsync_dir, rename_noreplace
from ckptmirror.local.storage_errors import disk_error, explained
from ckptmirror.local.write_queue import WriteQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ArtifactWriter", "create_temporary"]

_BUFFERS = 3
_PIECE_SIZE_BYTES = 1024 * 1024  # copied with the GIL held, so kept short


class ArtifactWriter(io.RawIOBase):
    """A binary file object for ``torch.save``, ``pickle.dump`` and DCP streams that writes one durable artifact.

    Use it as a context manager: an error in the body removes the temporary. ``seal()``, ``close()`` and leaving it
    make the temporary complete and durable; ``publish()`` also names it. One thread writes it.

    Args:
        final: The final name.
        save_id: 32 hex digits; the temporary carries the first eight.

    Raises:
        NameTaken: Another live writer holds the temporary.
        LocalStorageFull: No space or no inodes are left.
        LocalStorageUnwritable: Read-only, no permission, no directory.
    """

    def __init__(self, final: Path, save_id: str) -> None:
        self.final = Path(final)
        self.temporary = self.final.with_name(tmp_name(self.final.name, save_id))
        self._digest = BlockDigest()
        self._sealed: Digest | None = None
        self._failure: CkptMirrorError | None = None
        self._buffer: memoryview | None = None
        self._filled = 0  # of the buffer
        self._summed = 0  # of these, in the digest already
        self._offset = 0  # of the buffer in the file
        self._queue: WriteQueue | None = None
        self._descriptor = -1
        self._descriptor = create_temporary(self.temporary)
        self._facts = os.fstat(self._descriptor)
        self._owner_pid = os.getpid()

    # -- the file object ------------------------------------------------------------------------------------

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._offset + self._filled

    def fileno(self) -> int:
        """Refuse: bytes written past this object would miss their checksum."""
        raise io.UnsupportedOperation("an artifact is written through write() only, so that it is checksummed")

    def flush(self) -> None:
        """Do nothing: durability comes from ``seal()`` alone."""

    def write(self, buffer: Buffer, /) -> int:
        """Take all bytes of any C-contiguous buffer; return their number.

        Raises:
            LocalStorageFull: No space is left (perhaps for the bytes of an earlier call).
            IntegrityError: The device failed.
        """
        if self._descriptor < 0 and self._failure is None:
            raise ValueError("write to a sealed artifact")
        self._raise_failure()
        view = direct_io.byte_view(buffer)
        taken = 0
        while taken < view.nbytes:
            if self._buffer is None:
                self._buffer = direct_io.take_buffer()
            room = min(self._buffer.nbytes - self._filled, _PIECE_SIZE_BYTES, view.nbytes - taken)
            self._buffer[self._filled : self._filled + room] = view[taken : taken + room]
            self._filled += room
            taken += room
            if self._filled - self._summed >= _PIECE_SIZE_BYTES:  # not at each of torch's many small writes
                self._sum()
            if self._filled == self._buffer.nbytes:
                self._send_buffer()
        return view.nbytes

    def close(self) -> None:
        """Seal, unless sealed or abandoned already; remove the temporary after a failure. Never publishes."""
        if self.closed:
            return
        try:
            if self._failure is not None:
                self.abandon()
            elif self._descriptor >= 0:
                self.seal()
        finally:
            super().close()

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.abandon()
        if self._failure is not None and error is not self._failure and isinstance(error, Exception):
            raise self._failure from error  # a serializer's own error says less

    def __del__(self) -> None:
        # Dropped without close(): only close the descriptor; the next start removes the temporary.
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- the three ends -------------------------------------------------------------------------------------

    def seal(self) -> Digest:
        """Make everything written complete and durable under the temporary name; nothing stays open.

        Raises:
            LocalStorageFull: No space is left; the temporary is gone.
            IntegrityError: The device failed or lost bytes; the temporary is gone.
        """
        if self._sealed is not None:
            return self._sealed
        try:
            self._raise_failure()
            if self._descriptor < 0:
                raise ValueError("seal of an abandoned artifact")
            self._write_rest()
            digest = self._digest.digest()
            with self._explained("write"):
                size_bytes = os.fstat(self._descriptor).st_size
            if size_bytes != digest.size_bytes:
                raise IntegrityError(f"{self.temporary} has {size_bytes} bytes, but {digest.size_bytes} were written.")
            with self._explained("make durable"), crashpoints.around("file.fsync"):
                os.fsync(self._descriptor)
            with self._explained("make durable"):
                self._facts = os.fstat(self._descriptor)
            self._let_go_of_descriptor()
        except BaseException as error:
            if isinstance(error, CkptMirrorError):
                self._failure = error
            self.abandon()
            raise
        self._sealed = digest
        return digest

    def publish(self) -> Digest:
        """Seal, then give the artifact its final name, durably.

        Raises:
            NameTaken: The name exists; it was not touched, and the temporary is gone.
            IntegrityError: The temporary name is another file.
        """
        digest = self.seal()
        try:
            with self._explained("publish"):
                facts = os.lstat(self.temporary)
            if not self._is_own(facts):
                raise IntegrityError(f"{self.temporary} is not the file that was sealed: two writers share a save id.")
            rename_noreplace(self.temporary, self.final)
        except BaseException:
            self.abandon()
            raise
        fsync_dir(self.final.parent)
        return digest

    def abandon(self) -> None:
        """Free everything and remove the temporary. Disk errors are ignored: an earlier error matters more."""
        self._stop_writing()
        self._give_buffer()
        with contextlib.suppress(OSError):
            if self._descriptor >= 0:
                self._let_go_of_descriptor()
        with contextlib.suppress(OSError):
            self._remove_own_temporary()

    # -- inside ---------------------------------------------------------------------------------------------

    def _sum(self) -> None:
        """Add the bytes that were written since the last time to the digest."""
        if self._buffer is not None and self._summed < self._filled:
            self._digest.update(self._buffer[self._summed : self._filled])
            self._summed = self._filled

    def _send_buffer(self) -> None:
        """Hand the full buffer to the writing thread; wait while too many are unwritten."""
        self._sum()
        assert self._buffer is not None
        if self._queue is None:
            with self._explained("write"):
                direct_io.allow_direct(self._descriptor)
            self._queue = WriteQueue(_BUFFERS - 1)
        buffer, self._buffer, self._filled, self._summed = self._buffer, None, 0, 0
        offset, self._offset = self._offset, self._offset + buffer.nbytes
        with self._explained("write"):
            self._queue.put(self._write_buffer, buffer, offset)

    def _write_buffer(self, buffer: memoryview, offset: int) -> None:
        direct_io.write_full(self._descriptor, buffer, offset)

    def _write_rest(self) -> None:
        if self._queue is not None:
            with self._explained("write"):
                self._queue.drain()
        self._sum()
        if self._buffer is not None and self._filled:
            aligned = self._filled // direct_io.ALIGNMENT_BYTES * direct_io.ALIGNMENT_BYTES
            if not direct_io.is_direct(self._descriptor):
                aligned = 0
            with self._explained("write"):
                direct_io.write_full(self._descriptor, self._buffer[:aligned], self._offset)
                if aligned < self._filled:
                    direct_io.forbid_direct(self._descriptor)
                    tail = self._buffer[aligned : self._filled]
                    direct_io.write_full(self._descriptor, tail, self._offset + aligned)
            self._offset += self._filled
        self._give_buffer()

    def _stop_writing(self) -> None:
        if self._queue is not None and self._owner_pid == os.getpid():
            self._queue.stop()
        self._queue = None

    def _give_buffer(self) -> None:
        if self._buffer is not None:
            direct_io.give_buffer(self._buffer)
        self._buffer, self._filled, self._summed = None, 0, 0

    def _let_go_of_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with self._explained("close"):
            os.close(descriptor)

    def _remove_own_temporary(self) -> None:
        if self._is_own(os.lstat(self.temporary)) and self._owner_pid == os.getpid():
            with crashpoints.around("file.unlink"):
                os.unlink(self.temporary)  # noqa: PTH108

    def _is_own(self, facts: os.stat_result) -> bool:
        """Whether this is the file that was written. After it is closed, another file may get its inode number."""
        if not os.path.samestat(facts, self._facts):
            return False
        sealed = self._sealed is not None
        return not sealed or (facts.st_size, facts.st_mtime_ns) == (self._facts.st_size, self._facts.st_mtime_ns)

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Explain an OSError and keep it as the failure that every later call repeats."""
        try:
            yield
        except OSError as error:
            self._failure = disk_error(error, action, self.temporary)
            raise self._failure from error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def create_temporary(path: Path, *, dir_fd: int | None = None) -> int:
    """Create a temporary and return its descriptor. Its lock shows other processes that the writer is alive.

    Args:
        path: Its path.
        dir_fd: Its directory, if that is open: then no link that takes the directory's place is followed.

    Raises:
        NameTaken: A live writer holds it.
        LocalStorageFull: No space or no inodes are left.
        LocalStorageUnwritable: Read-only, no permission, no directory.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    place = path if dir_fd is None else path.name
    with explained("create", path):
        try:
            with crashpoints.around("file.create"):
                descriptor = os.open(place, flags, 0o666, dir_fd=dir_fd)
        except FileExistsError:
            _remove_dead_temporary(place, dir_fd)
            with crashpoints.around("file.create"):
                descriptor = os.open(place, flags, 0o666, dir_fd=dir_fd)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:  # another process took it for a dead writer's just now
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            raise
        return descriptor


def _remove_dead_temporary(place: Path | str, dir_fd: int | None) -> None:
    """Remove a temporary that no live writer holds.

    Raises:
        FileExistsError: A live writer holds it.
    """
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        with crashpoints.around("file.unlink"):
            os.unlink(place, dir_fd=dir_fd)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with crashpoints.around("file.unlink"):
            os.unlink(place, dir_fd=dir_fd)
    except BlockingIOError as error:
        raise FileExistsError(errno.EEXIST, "another live writer holds it") from error
    finally:
        os.close(descriptor)
