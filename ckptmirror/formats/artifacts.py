"""Writes one file of a save: tensors or JSON, checksummed while written, then sealed or published.

Rules:
* The bytes go straight from the tensors' memory to the writer.
* The first disk error is raised, not the error that torch makes of it.
* A file that failed leaves nothing behind.
* Before a file of tensors is reported, the loader that a resume uses reads it back, except the tensors' bytes. So a
  value that cannot be loaded never becomes part of a save.
* Sealed: complete and fsynced under its temporary name, for the node's leader to publish. Published: under its final
  name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.core.model import Digest
from ckptmirror.formats.shards import read_pieces
from ckptmirror.formats.tensor_bytes import compact
from ckptmirror.local.checksummed_writer import ArtifactWriter
from ckptmirror.untrusted.read_limits import TooDeep, too_deep
from ckptmirror.untrusted.tensor_files import load_pt, refused_as_usage

__all__ = ["ArtifactStream", "stream_to", "write_json", "write_pt"]

_SMALL_BYTES = 64 * 1024


class ArtifactStream(io.RawIOBase):
    """An :class:`ArtifactWriter` in the form that torch writes to.

    A disk error is not raised into torch, whose frames would keep the memory of an ``io.BytesIO`` that was being
    written: if the garbage collector finds it in a cycle, Python 3.12.0 and 3.12.1 crash (gh-111049).

    Attributes:
        error: The first error. Later writes are discarded; the caller raises the error after torch has returned.
    """

    def __init__(self, writer: ArtifactWriter) -> None:
        super().__init__()
        self.writer = writer
        self.error: Exception | None = None
        self._small = bytearray()  # torch writes a tensor's header in 39 pieces

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``, or nothing of it once there was an error."""
        size_bytes = memoryview(data).nbytes
        if size_bytes < _SMALL_BYTES:
            self._small += data
        else:
            self.pass_on(data)
        if len(self._small) >= _SMALL_BYTES:
            self.pass_on()
        return size_bytes

    def pass_on(self, data: Any = b"") -> None:
        """Give the writer the small pieces so far, then ``data``."""
        small, self._small = self._small, bytearray()
        try:
            if self.error is None:
                self.writer.write(small)
                self.writer.write(data)
        except Exception as error:  # noqa: BLE001 - raised by whoever made this stream
            self.error = _without_frames(error)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.writer.tell() + len(self._small)

    def flush(self) -> None:
        """Do nothing: torch calls this after every item, but the writer makes the bytes durable at the end."""


def _without_frames(error: Exception) -> Exception:
    """Drop the tracebacks of an error and of what led to it: through them all callers' frames would live on."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error


def write_pt(tree: Any, path: Path, *, save_id: str, publish: bool = False) -> Digest:
    """Write ``tree`` (tensors and plain values) with ``torch.save`` as ``path``, sealed or published.

    Raises:
        NameTaken: ``publish`` was set and the path exists.
        LocalStorageFull: The disk is full.
        UsageError: The tree holds something that a load refuses.
    """
    with ArtifactWriter(path, save_id) as writer:
        try:
            with stream_to(writer) as stream:
                torch.save(compact(tree), cast(IO[bytes], stream))
        except (CkptMirrorError, OSError):
            raise
        except Exception as error:
            raise CkptMirrorError(f"{path.name} could not be written: {error}") from error
        digest = writer.seal()
        _read_back(writer.temporary, tree)
        return writer.publish() if publish else digest


def write_json(value: Any, path: Path, *, save_id: str, publish: bool = False) -> Digest:
    """Write ``value`` as one line of ASCII JSON with sorted keys as ``path``, sealed or published."""
    with ArtifactWriter(path, save_id) as writer:
        writer.write(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")
        return writer.publish() if publish else writer.seal()


def _read_back(written: Path, tree: Any) -> None:
    try:
        with refused_as_usage():
            read_pieces(load_pt(written, mmap=True))  # so only what is looked at is read
    except UsageError as error:
        if isinstance(error.__cause__, TooDeep):
            raise too_deep(tree, "") from error
        raise


@contextmanager
def stream_to(writer: ArtifactWriter) -> Iterator[ArtifactStream]:
    """Yield a stream for torch; raise its first error at the end, not what torch makes of it."""
    stream = ArtifactStream(writer)
    try:
        yield stream
        stream.pass_on()
    finally:
        if stream.error is not None:
            raise stream.error
