"""Reads what ``torch.save`` wrote: a ``.pt`` file, or one tensor's archive inside a larger file.

Rules:
* Only regular files are opened, never a link.
* The archive's directory says where the bytes are (``archives``), the pickle in it what they mean (``pickles``), and
  ``described_tensors`` makes tensors of both. torch does not read these files.
* What is not allowed is :class:`UnsafePickle`; what is broken is :class:`IntegrityError`. Both name the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from mmap import MAP_PRIVATE
from mmap import mmap as map_file
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError, UnsafePickle, UsageError
from ckptmirror.local import direct_io
from ckptmirror.untrusted.archives import ReadAt, records_of
from ckptmirror.untrusted.described_tensors import is_known, make
from ckptmirror.untrusted.pickles import check_whole, read_pickle
from ckptmirror.untrusted.read_limits import Budget

__all__ = ["check_regular", "load_bytes", "load_part", "load_pt", "named", "open_regular", "refused_as_usage"]

_ALIGNMENT = 16  # of the largest dtype
_END_BYTES = 4096
_Into = Callable[[memoryview, int], None]


def load_pt(path: Path, *, mmap: bool = False) -> Any:
    """Load a ``.pt`` file that holds tensors and plain values into host memory.

    Args:
        path: The file.
        mmap: Map the file instead of reading it: for tensors that are copied from, piece by piece, right after.

    Raises:
        UnsafePickle: The file asks for anything else.
        IntegrityError: The file is missing, is not a regular file, or is broken.
    """
    with open_regular(path) as (descriptor, size_bytes):
        mapped = map_file(descriptor, size_bytes, flags=MAP_PRIVATE) if mmap and size_bytes else None
        return load_part(descriptor, 0, size_bytes, str(path), mapped=mapped)


def load_part(
    descriptor: int, begin: int, size_bytes: int, name: str, *, mapped: Any = None, into: memoryview | None = None
) -> Any:
    """Like :func:`load_pt`, from an archive of ``size_bytes`` at ``begin`` of an open file, called ``name``.

    Args:
        descriptor: The open file.
        begin: Where the archive begins.
        size_bytes: Its size.
        name: For messages.
        mapped: The mapped file, as in :func:`load_pt`.
        into: Memory that the first storage of exactly as many bytes is read into.
    """
    ends: dict[int, bytes] = {}  # by offset; they hold nearly all but the values, so it takes few reads

    def read_at(offset: int, count: int) -> bytes:
        stop = min(offset + count, size_bytes)
        for at in (max(0, size_bytes - _END_BYTES), 0):
            if at <= offset and stop <= at + _END_BYTES:
                if at not in ends:
                    ends[at] = os.pread(descriptor, min(_END_BYTES, size_bytes - at), begin + at)
                return ends[at][offset - at : stop - at]
        return os.pread(descriptor, max(0, stop - offset), begin + offset)

    def read_into(target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], begin + offset + done)
            if not count:
                raise IntegrityError("It was cut short.")
            done += count

    with named(name):
        return _load(read_at, read_into, size_bytes, mapped, into)


def load_bytes(data: bytes, name: str) -> Any:
    """Like :func:`load_pt`, from memory."""

    def read_into(target: memoryview, offset: int) -> None:
        target[:] = data[offset : offset + len(target)]

    with named(name):
        return _load(lambda offset, count: data[offset : offset + count], read_into, len(data))


def _load(
    read_at: ReadAt, read_into: _Into, size_bytes: int, mapped: Any = None, into: memoryview | None = None
) -> Any:
    records = records_of(read_at, size_bytes)
    if "data.pkl" not in records:
        raise IntegrityError("It is an archive without data.pkl.")
    if (order := records.get("byteorder")) is not None and read_at(order.offset, 16)[: order.size_bytes] != b"little":
        raise IntegrityError("It was written on a machine of another byte order.")
    pickled = records["data.pkl"]
    budget = Budget(pickled.size_bytes)
    described = read_pickle(read_at(pickled.offset, pickled.size_bytes), is_known, persistent=True, budget=budget)
    check_whole(described, pickled.size_bytes)

    def storage(key: str, count: int) -> torch.UntypedStorage:
        nonlocal into
        offset = records[f"data/{key}"].offset
        if not count:
            return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
        if mapped is not None and offset % _ALIGNMENT == 0:
            return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=offset).untyped_storage()
        if into is not None and len(into) == count:
            target, into = into, None
            read_into(target, offset)
            return torch.frombuffer(target, dtype=torch.uint8).untyped_storage()
        memory = torch.empty(count, dtype=torch.uint8, device="cpu")
        read_into(memory.numpy().data, offset)
        return memory.untyped_storage()

    sizes_bytes = {name[5:]: r.size_bytes for name, r in records.items() if name.startswith("data/")}
    return make(described, storage, sizes_bytes, budget)


@contextmanager
def open_regular(path: Path) -> Generator[tuple[int, int], None, None]:
    """Yield the descriptor and the size in bytes of a regular file; raises as :func:`check_regular`."""
    check_regular(path)
    descriptor = direct_io.open_regular(path)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


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


@contextmanager
def named(name: str) -> Iterator[None]:
    """Begin the errors of broken or hostile bytes with ``name``."""
    try:
        yield
    except IntegrityError as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error


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
