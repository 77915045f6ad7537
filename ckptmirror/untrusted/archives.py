"""The archive around a ``.pt`` file: where its records are.

Rules:
* Only the directory at the end of the archive is read, and only if torch could have written it: nothing compressed, no
  name twice, nothing outside the file, nothing in front of it, no two records in the same place. A read never exceeds
  the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from ckptmirror.core.errors import IntegrityError, UnsafePickle

__all__ = ["ReadAt", "Record", "records_of"]

ReadAt = Callable[[int, int], bytes]

_MAX_DIRECTORY_BYTES = 1 << 30  # ten million tensors
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    """Where a record's bytes are in the archive."""

    offset: int
    size_bytes: int


def records_of(read_at: ReadAt, size_bytes: int) -> dict[str, Record]:
    """Return the records of an archive of ``size_bytes``, by their names below its one directory.

    Raises:
        UnsafePickle: Reading them would cost more than its bytes.
        IntegrityError: It is broken, or not an archive that torch writes.
    """
    try:
        return _records(read_at, size_bytes)
    except (struct.error, UnicodeDecodeError) as error:
        raise IntegrityError("It is not a whole archive.") from error


def _records(read_at: ReadAt, size_bytes: int) -> dict[str, Record]:
    """Return the records by their names below the archive's one directory."""
    begin, length, count = _directory(read_at, size_bytes)
    data = read_at(begin, length)
    if len(data) != length:
        raise IntegrityError("It is not a whole archive.")
    found: dict[str, Record] = {}
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
        offset = _data_offset(read_at, local, begin)
        places.append((local, offset + size))
        found[below] = Record(offset, size)
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


def _data_offset(read_at: ReadAt, local: int, end: int) -> int:
    header = _LOCAL.unpack(read_at(local, _LOCAL.size)) if local < end else (b"",)
    if header[0] != b"PK\3\4":
        raise IntegrityError("The directory of the archive names a place where no record begins.")
    return int(local) + _LOCAL.size + int(header[-2]) + int(header[-1])


def _check_apart(places: list[tuple[int, int]], end: int) -> None:
    before = 0
    for begin, stop in sorted(places):
        if begin < before:
            raise UnsafePickle("Two records of the archive are in one place.")
        before = stop
    if not places or min(places)[0] != 0:
        raise IntegrityError("There is something in front of the archive.")
    if before > end:
        raise IntegrityError("A record reaches past the end of the archive.")
