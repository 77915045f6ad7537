"""Checks the archive around a ``.pt`` file, so that loading it costs no more memory than the file has bytes.

Rules:
* Only the directory at the end of the archive is trusted, and only if torch could have written it: nothing compressed,
  no name twice, nothing outside the file, no two records in the same place. So a read never exceeds the file.
* Every storage that the pickle names has a record of that many bytes; every tensor is inside its storage.
* Calls that allocate memory by a number are refused. torch's allow-list decides what a pickle may name.
* The check runs before torch sees the file, also on files that ckptmirror wrote: what a load would refuse is not saved.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.formats.pickle_scan import PickleRules, scan_pickle
from ckptmirror.formats.pickle_values import Global, Made

__all__ = ["Archive", "check_archive", "check_archive_file", "check_archive_stream"]

ReadAt = Callable[[int, int], bytes]

_MAX_DIRECTORY_BYTES = 1 << 30  # ten million tensors
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Record:
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Archive:
    """The result of checking an archive.

    Attributes:
        has_sparse: Whether it holds sparse tensors, whose indices can only be checked after loading.
    """

    has_sparse: bool


def check_archive_file(path: Path) -> Archive:
    """Check a ``.pt`` file. For what is raised see :func:`check_archive`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return check_archive(lambda offset, count: os.pread(descriptor, count, offset), os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def check_archive_stream(stream: BinaryIO | io.BytesIO) -> Archive:
    """Check an archive that fills the rest of a stream, and restore the stream's position."""
    begin = stream.tell()
    size_bytes = stream.seek(0, os.SEEK_END) - begin

    def read_at(offset: int, count: int) -> bytes:
        stream.seek(begin + offset)
        return stream.read(count)

    try:
        return check_archive(read_at, size_bytes)
    finally:
        stream.seek(begin)


def check_archive(read_at: ReadAt, size_bytes: int) -> Archive:
    """Check an archive of ``size_bytes``.

    Raises:
        UnsafePickle: Loading it would cost more than its bytes, or do something that no checkpoint needs.
        IntegrityError: It is broken, or not an archive that torch writes.
    """
    try:
        records = _records(read_at, size_bytes)
    except (struct.error, UnicodeDecodeError) as error:
        raise IntegrityError("It is not a whole archive.") from error
    found = records.get("data.pkl")
    if found is None:
        raise IntegrityError("It is an archive without data.pkl.")
    data = read_at(found.offset, found.size_bytes)
    rules = _TorchRules({n[5:]: r.size_bytes for n, r in records.items() if n.startswith("data/")})
    scan_pickle(data, rules)
    return Archive(rules.has_sparse)


# -- the directory ------------------------------------------------------------------------------------------


def _records(read_at: ReadAt, size_bytes: int) -> dict[str, _Record]:
    """Return the records by their names below the archive's one directory."""
    begin, length, count = _directory(read_at, size_bytes)
    data = read_at(begin, length)
    if len(data) != length:
        raise IntegrityError("It is not a whole archive.")
    found: dict[str, _Record] = {}
    places: list[tuple[int, int]] = []
    at, top = 0, None
    for _ in range(count):
        (magic, _, _, flags, method, _, _, _, packed, size, n_name, n_extra, n_comment, disk, _, _, local) = (
            _ENTRY.unpack_from(data, at)
        )
        name_end = at + _ENTRY.size + n_name
        name = data[at + _ENTRY.size : name_end].decode()
        at = name_end + n_extra + n_comment
        if magic != b"PK\1\2" or at > length or disk:
            raise IntegrityError("The directory of the archive is broken.")
        size, packed, local = _wide(data[name_end : name_end + n_extra], size, packed, local)
        if method or flags & 1 or packed != size:
            raise UnsafePickle(f"The record {name[-80:]!a} is compressed or encrypted, which torch does not write.")
        own_top, slash, below = name.partition("/")
        if not slash or (top is not None and own_top != top):
            raise IntegrityError(f"The record {name[:80]!a} is not in the archive's directory.")
        top = own_top
        if below in found:
            raise IntegrityError(f"The record {below[:80]!a} is there twice.")
        offset = _data_offset(read_at, local)
        places.append((local, offset + size))
        found[below] = _Record(offset, size)
    if at != length:
        raise IntegrityError("The directory of the archive holds more than it says.")
    _check_apart(places, begin)
    return found


def _directory(read_at: ReadAt, size_bytes: int) -> tuple[int, int, int]:
    """Return where the directory begins, its length, and the number of its entries."""
    at = size_bytes - _END.size
    magic, disk, disk_2, here, count, length, begin, comment = _END.unpack(read_at(max(at, 0), _END.size))
    if magic != b"PK\5\6" or comment or disk or disk_2 or here != count:
        raise IntegrityError("It is not an archive as torch.save writes it, or it was cut short.")
    locator = read_at(at - _LOCATOR_64.size, _LOCATOR_64.size) if at >= _LOCATOR_64.size else b""
    if locator[:4] == b"PK\6\7":
        at -= _LOCATOR_64.size + _END_64.size
        if _LOCATOR_64.unpack(locator)[2] != at:
            raise IntegrityError("The directory of the archive is not at its end.")
        magic, rest, _, _, disk, disk_2, here, count, length, begin = _END_64.unpack(read_at(at, _END_64.size))
        if magic != b"PK\6\6" or rest != _END_64.size - 12 or disk or disk_2 or here != count:
            raise IntegrityError("The directory of the archive is broken.")
    if begin + length != at or length > _MAX_DIRECTORY_BYTES:
        raise IntegrityError("The directory of the archive is too large, or is not at its end.")
    return begin, length, count


def _wide(extra: bytes, size: int, packed: int, local: int) -> tuple[int, int, int]:
    """Return the three numbers, taken from the extra field where they do not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(wide, -1) if size == _32 else size
            packed = next(wide, -1) if packed == _32 else packed
            local = next(wide, -1) if local == _32 else local
            break
        at += 4 + length
    if min(size, packed, local) < 0:
        raise IntegrityError("The directory of the archive is broken.")
    return size, packed, local


def _data_offset(read_at: ReadAt, local: int) -> int:
    header = _LOCAL.unpack(read_at(local, _LOCAL.size))
    if header[0] != b"PK\3\4":
        raise IntegrityError("The directory of the archive names a place where no record begins.")
    return int(local) + _LOCAL.size + int(header[-2]) + int(header[-1])


def _check_apart(places: list[tuple[int, int]], end: int) -> None:
    before = 0
    for begin, stop in sorted(places):
        if begin < before:
            raise UnsafePickle("Two records of the archive are in one place.")
        before = stop
    if before > end:
        raise IntegrityError("A record reaches past the end of the archive.")


# -- the pickle ---------------------------------------------------------------------------------------------

_OVER_STORAGE = frozenset(f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "qtensor"))
_ITEM_BYTES = {
    f"torch.{name}Storage": size_bytes
    for size_bytes, names in {
        2: ("Half", "BFloat16", "Short"),
        4: ("Float", "Int", "QInt32"),
        8: ("Double", "Long", "ComplexFloat"),
        16: ("ComplexDouble",),
    }.items()
    for name in names
}
_CALLS_ANOTHER = "torch._tensor._rebuild_from_type_v2"
_ALLOCATES = re.compile(r"torch\.((cuda|xpu|hpu|mtia)\.)?((sparse|storage)\.)?\w*(Tensor|Storage)", re.ASCII)
_BYTEARRAYS = frozenset({"builtins.bytearray", "__builtin__.bytearray"})
_OF_ANOTHER = _BYTEARRAYS | {  # these make as many values as what they are given has; a tensor has as many as it says
    *("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset"),
    *("collections.Counter", "collections.OrderedDict", "torch.Size"),
}
_ENCODES = "_codecs.encode"


class _TorchRules(PickleRules):
    def __init__(self, sizes_bytes: Mapping[str, int]) -> None:
        self._sizes_bytes = sizes_bytes
        self.has_sparse = False

    def check_call(self, called: Any, arguments: list[Any]) -> bool:
        if called in _OVER_STORAGE:
            _check_view(arguments)
            return _are_bare(arguments[4:])
        if called == "torch._utils._rebuild_parameter":
            return _are_bare(arguments)
        if called == "torch._utils._rebuild_sparse_tensor":
            self.has_sparse = True
        elif called in _OF_ANOTHER:
            if any(isinstance(one, Made) and one.kind == "object" and one.items[:1] != [_ENCODES] for one in arguments):
                raise UnsafePickle(f"It makes a {called} of a tensor, of any length.")
            if called in _BYTEARRAYS and any(type(argument) is int for argument in arguments):
                raise UnsafePickle("It makes a bytearray of a length.")
        elif called == _ENCODES:
            if len(arguments) > 1 and arguments[1] not in ("latin1", "latin-1"):
                raise UnsafePickle(f"It encodes a text as {str(arguments[1])[:20]!a}.")
        elif called == _CALLS_ANOTHER:
            if len(arguments) < 3 or not isinstance(arguments[0], Global) or not isinstance(arguments[2], Made):
                raise IntegrityError("It rebuilds a tensor from nothing.")
            if arguments[0] == _CALLS_ANOTHER:
                raise UnsafePickle("It rebuilds a tensor that is rebuilt.")
            self.check_call(arguments[0], arguments[2].items)
        elif _ALLOCATES.fullmatch(called):
            raise UnsafePickle(f"It makes a {called} by itself, of any length.")
        return False

    def persistent(self, identifier: Any) -> Made:
        parts = identifier.items if isinstance(identifier, Made) and identifier.kind == "tuple" else []
        if len(parts) != 5 or parts[0] != "storage" or not isinstance(parts[1], Global):
            raise UnsafePickle("It asks for a persistent object that is not a storage.")
        key, count = parts[2], parts[4]
        size_bytes = self._sizes_bytes.get(key) if isinstance(key, str) else None
        if size_bytes is None or type(count) is not int:
            raise IntegrityError(f"It names a storage {str(key)[:40]!a} that the archive does not hold.")
        if not 0 <= count * _ITEM_BYTES.get(parts[1], 1) <= size_bytes:
            raise IntegrityError(f"It says that storage {key[:40]!a} has {count} values; it has {size_bytes} bytes.")
        return Made("object", [], size_bytes)


def _are_bare(arguments: list[Any]) -> bool:
    """Whether there is nothing in the arguments of a tensor but values, tensors, and the empty dict of its hooks."""
    return all(not isinstance(one, Made) or len(one.items) == 0 or _is_empty(one) for one in arguments)


def _is_empty(made: Made) -> bool:
    called, *arguments = made.items
    return isinstance(called, Global) and all(isinstance(one, Made) and not one.items for one in arguments)


def _check_view(arguments: list[Any]) -> None:
    """Refuse a tensor that is not inside its storage."""
    storage, offset, size, stride = arguments[:4] if len(arguments) >= 4 else (None, None, None, None)
    shapes = [shape.items for shape in (size, stride) if isinstance(shape, Made) and shape.kind == "tuple"]
    if not isinstance(storage, Made) or storage.size_bytes is None or len(shapes) != 2:
        raise IntegrityError("It makes a tensor over something that is not a storage.")
    if any(type(number) is not int or number < 0 for number in (offset, *shapes[0], *shapes[1])):
        raise IntegrityError("It makes a tensor with an invalid shape.")
    if len(shapes[0]) != len(shapes[1]):
        raise IntegrityError("It makes a tensor with an invalid shape.")
    if 0 in shapes[0]:
        return
    last = offset + sum((count - 1) * step for count, step in zip(*shapes, strict=True))
    if last >= storage.size_bytes:
        raise IntegrityError(f"It makes a tensor that ends at value {last} of a storage of {storage.size_bytes} bytes.")
