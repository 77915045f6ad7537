"""Reading files that may be hostile or broken: only tensors, plain values and a list of known types.

Rules:
* ``.pt`` files go through ``torch.load(weights_only=True)``, ``.metadata`` through :class:`AllowListUnpickler`; nothing
  is unpickled in another way.
* Before either sees a file, it is read without making anything of it (``archives``, ``pickle_scan``): what would cost
  more than its bytes is refused. Only a ``.metadata`` that this job has just written is spared that.
* Only regular files are opened, never a link.
* What is not allowed is :class:`UnsafePickle`; what is broken is :class:`IntegrityError`. Both name the file.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata

from ckptmirror.core.errors import IntegrityError, Temporary, UnsafePickle, UsageError
from ckptmirror.formats.archives import check_archive, check_archive_file, check_archive_stream
from ckptmirror.formats.metadata_allow_list import AllowListUnpickler, unchanged_classes
from ckptmirror.formats.sparse import checked_sparse
from ckptmirror.formats.vetting import vet

__all__ = [
    "broken",
    "check_regular",
    "check_slice",
    "load_pt",
    "load_stream",
    "loads_metadata",
    "refused_as_usage",
]

_NOT_ALLOWED = (
    "Unsupported global",
    "Unsupported operand",
    "Unsupported class",
    "Can only",
    "is blocked",
    "Trying to",
    "functions",
)


def load_pt(path: Path, *, map_location: str = "cpu", mmap: bool = False) -> Any:
    """Load a ``.pt`` file that holds tensors and plain values.

    Args:
        path: The file.
        map_location: The device to load to.
        mmap: Map the file instead of reading it: for tensors that are copied from, piece by piece, right after.

    Raises:
        UnsafePickle: The file asks for anything else.
        IntegrityError: The file is missing, is not a regular file, or is broken.
    """
    check_regular(path)

    def load() -> Any:
        archive = check_archive_file(path)
        loaded = torch.load(str(path), map_location=map_location, weights_only=True, mmap=mmap)
        return checked_sparse(loaded) if archive.has_sparse else loaded

    return _guarded(str(path), load)


def load_stream(stream: BinaryIO | io.BytesIO, name: str) -> Any:
    """Like :func:`load_pt`, from an open file; ``name`` is for messages."""

    def load() -> Any:
        archive = check_archive_stream(stream)
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
        return checked_sparse(loaded) if archive.has_sparse else loaded

    return _guarded(name, load)


def check_slice(stream: Any, offset: int, length: int, name: str) -> None:
    """Check a tensor's archive inside a larger file, as :func:`load_stream` does before it loads.

    Raises:
        UnsafePickle: Loading it would do or cost more than any tensor needs.
        IntegrityError: It is broken.
    """

    def read_at(begin: int, count: int) -> bytes:
        stream.seek(offset + begin)
        found: bytes = stream.read(max(0, min(count, length - begin)))
        return found

    if _guarded(name, lambda: check_archive(read_at, length)).has_sparse:
        raise UnsafePickle(f"{name}: It holds a sparse tensor, which no DCP directory does.")


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file.

    Raises:
        IntegrityError: It is missing, or a link, or not a file.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is missing.") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise IntegrityError(f"{path} is not a regular file.")
    return status.st_size


def broken(error: BaseException, name: str) -> IntegrityError:
    """Return the error to raise for what torch made of a hostile or broken file."""
    text = str(error) or type(error).__name__
    if isinstance(error, pickle.UnpicklingError) and any(mark in text for mark in _NOT_ALLOWED):
        return UnsafePickle(f"{name} names something that is not on the allow-list: {_short(text)}")
    return IntegrityError(f"{name} is broken: {_short(text)}")


@contextmanager
def refused_as_usage() -> Generator[None, None, None]:
    """Convert refusals to usage errors while a save reads its own files back: the value cannot be saved.

    Raises:
        UsageError: In place of :class:`UnsafePickle`.
    """
    try:
        yield
    except UnsafePickle as error:
        raise UsageError(
            f"What was written could not be loaded back, so it is not saved: {error.message}",
            hint="Save numbers, text, lists, dicts and tensors, or an object with state_dict() and load_state_dict().",
        ) from error


def _guarded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except IntegrityError as error:
        raise type(error)(f"{name}: {error.message}") from error
    except Exception as error:  # whatever torch makes of hostile or broken bytes, the file is not what was saved
        raise broken(error, name) from error


def _short(text: str) -> str:
    for line in text.splitlines():
        if "Unsupported" in line or "Trying to" in line:
            return line.strip()[:300]
    return text.strip().splitlines()[0][:300] if text.strip() else "no message"


def loads_metadata(data: bytes, name: str, *, just_written: bool = False) -> metadata.Metadata:
    """Unpickle the bytes of a ``.metadata`` file.

    Args:
        data: The bytes.
        name: For messages.
        just_written: Whether this very job wrote them: then they hold no attack, and the allow-list is enough.

    Raises:
        UnsafePickle: It asks for a global that is not on the list.
        IntegrityError: It is broken, or something else than DCP's metadata.
        Temporary: It is large, and the machine too busy to try it first.
    """
    try:
        with unchanged_classes() as changed:
            if not just_written:
                vet(data)
            value = AllowListUnpickler(io.BytesIO(data)).load()
    except (IntegrityError, Temporary) as error:
        raise type(error)(f"{name}: {error.message}") from error
    except Exception as error:  # hostile pickles fail in any way; whatever it is, the file is not what was saved
        raise IntegrityError(f"{name} is broken: {_short(str(error) or type(error).__name__)}") from error
    if changed:
        raise UnsafePickle(f"{name} tried to change the class {changed[0]}.")
    if not isinstance(value, metadata.Metadata):
        raise IntegrityError(f"{name} holds a {type(value).__name__}, not the metadata of a DCP directory.")
    return value
