"""Reads DCP's ``.metadata``, field by field, into torch's own records, and compares these with the files beside it.

Rules:
* Only the fields that a load needs are taken, each with its type; torch's classes are called here, never by the pickle.
* What a newer torch adds is ignored as long as it consists of the names on the list.
* Every name is one plain file name inside the directory, every range is inside its file, ranges do not overlap, every
  file is referred to.
* Every chunk of every tensor, and every plain value, has its range; chunks of a tensor are apart and cover it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.core.regions import Region, are_apart
from ckptmirror.untrusted.described_tensors import DTYPES
from ckptmirror.untrusted.pickles import Made, Name, check_whole, read_pickle, shown
from ckptmirror.untrusted.read_limits import Budget
from ckptmirror.untrusted.tensor_files import named

__all__ = ["METADATA_NAME", "check_entries", "check_ranges", "loads_metadata", "regions_of"]

METADATA_NAME = ".metadata"

_HERE = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_OF_TENSORS = ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_READ = frozenset(
    {
        *(_HERE + name for name in ("Metadata", "MetadataIndex", "BytesStorageMetadata", *_OF_TENSORS)),
        *DTYPES,
        _STORAGE_INFO,
        "torch.Size",
    }
)
_IGNORED = frozenset(
    {
        *(_HERE + name for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        "torch.serialization._get_layout",
        "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 pickles a member of an enumeration
    }
)
_FREE_PIECES = 100_000
_MAX_DIMENSIONS = 64  # of torch; the product of many large numbers takes hours


def loads_metadata(data: bytes, name: str) -> dcp.Metadata:
    """Read the bytes of a ``.metadata`` file; ``name`` is for messages.

    Raises:
        UnsafePickle: It names what is not on the list, or would cost more than its bytes.
        IntegrityError: It is broken, or something else than DCP's metadata.
    """
    with named(name):
        made = read_pickle(data, (_READ | _IGNORED).__contains__)
        if type(made) is not Made or made.name != f"{_HERE}Metadata":
            raise IntegrityError(f"It holds a {type(made).__name__}, not the metadata of a DCP directory.")
        fields = _fields(made, "Metadata")
        sizes: dict[int, torch.Size] = {}
        entries, storage, paths = map(fields.get, ("state_dict_metadata", "storage_data", "planner_data"))
        check_whole(paths, len(data))  # the rest is taken apart below, each level with its type
        if type(entries) is not dict or type(storage) is not dict:
            raise IntegrityError("It has no table of entries.")
        if any(type(key) is not str for key in entries):
            raise IntegrityError("It has an entry without a name.")
        indices = [_index(made, sizes) for made in storage]
        Budget(len(data)).check_keys((index.fqn, tuple(index.offset or ())) for index in indices)
        pieces = sum(len(chunks) for entry in entries.values() if (chunks := _chunks(entry)) is not None)
        if pieces > len(indices) + _FREE_PIECES:  # pieces without values may have one place for all
            raise UnsafePickle(f"It describes {pieces} pieces, and stores {len(indices)}.")
        return dcp.Metadata(
            {key: _entry(entry, key, sizes) for key, entry in entries.items()},
            paths,
            {index: _info(info, index.fqn) for index, info in zip(indices, storage.values(), strict=True)},
        )


def _fields(made: Any, kind: str) -> dict[str, Any]:
    full = _STORAGE_INFO if kind == "_StorageInfo" else _HERE + kind
    if type(made) is not Made or made.name != full or made.arguments or not made.is_object:
        raise IntegrityError(f"It holds a {getattr(made, 'name', type(made).__name__)} in place of a {kind}.")
    if type(made.state) is not dict:
        raise IntegrityError(f"It holds a {kind} without its fields.")
    return made.state


def _entry(made: Any, name: str, sizes: dict[int, torch.Size]) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if type(made) is Made and made.name == f"{_HERE}BytesStorageMetadata" and not made.arguments and not made.state:
        return dcp.BytesStorageMetadata()
    fields = _fields(made, "TensorStorageMetadata")
    chunks = _chunks(made)
    if chunks is None:
        raise IntegrityError(f"It describes {name} without pieces.")
    pieces = []
    for chunk in chunks:
        of = _fields(chunk, "ChunkStorageMetadata")
        pieces.append(
            dcp.ChunkStorageMetadata(_size(of.get("offsets"), name, sizes), _size(of.get("sizes"), name, sizes))
        )
    return dcp.TensorStorageMetadata(
        _properties(fields.get("properties"), name), _size(fields.get("size"), name, sizes), pieces
    )


def _chunks(made: Any) -> list[Any] | None:
    chunks = made.state.get("chunks") if type(made) is Made and type(made.state) is dict else None
    return chunks if type(chunks) is list else None


def _properties(made: Any, name: str) -> dcp.TensorProperties:
    if type(made) is Made and made.name == f"{_HERE}TensorProperties" and made.is_object and not made.arguments:
        state = made.state
        if type(state) is tuple and len(state) == 5 and type(state[0]) is Name and state[0] in DTYPES:
            return dcp.TensorProperties(dtype=DTYPES[state[0]])  # the other four are deprecated, and not used
    raise IntegrityError(f"It describes {name} without a dtype.")


def _size(made: Any, name: str, sizes: dict[int, torch.Size]) -> torch.Size:
    """Return a ``torch.Size``; one that the pickle shares is made once."""
    if (known := sizes.get(id(made))) is not None:
        return known
    is_size = type(made) is Made and made.name == "torch.Size" and len(made.arguments) == 1 and made.state is None
    numbers = made.arguments[0] if is_size else None
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMENSIONS or not all(map(_is_count, numbers)):
        raise IntegrityError(f"It describes {name} with no valid size.")
    sizes[id(made)] = torch.Size(numbers)
    return sizes[id(made)]


def _index(made: Any, sizes: dict[int, torch.Size]) -> dcp.MetadataIndex:
    fields = _fields(made, "MetadataIndex")
    fqn, offset = fields.get("fqn"), fields.get("offset")
    if type(fqn) is not str:
        raise IntegrityError("It stores something without a name.")
    return dcp.MetadataIndex(fqn, None if offset is None else _size(offset, fqn, sizes))


def _info(made: Any, name: str) -> _StorageInfo:
    fields = _fields(made, "_StorageInfo")
    path, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if type(path) is not str or not _is_count(offset) or not _is_count(length):
        raise IntegrityError(
            f"It says that {name} is at {shown(path)}, offset {shown(offset)}, length {shown(length)}."
        )
    if fields.get("transform_descriptors"):
        raise IntegrityError(f"It says that {name} was transformed while it was written, which is not supported.")
    return _StorageInfo(path, offset, length)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def check_entries(metadata: dcp.Metadata, where: str) -> None:
    """Check the names and the completeness of ``metadata``, without looking at any file.

    Args:
        metadata: torch's own, or what :func:`loads_metadata` returned.
        where: For messages.

    Raises:
        IntegrityError: Names ``where`` and the entry.
    """
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    for index, info in storage.items():
        path = info.relative_path
        if index.fqn not in entries:
            raise IntegrityError(f"{where} stores something that it does not describe.")
        if not path or path in (".", "..", METADATA_NAME) or any(c in path for c in "/\\\0"):
            raise IntegrityError(f"{where}: {index.fqn} is at {path!r}, which is not a file name inside the directory.")
    for name, entry in entries.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            _check_tensor(name, entry, storage, where)
        elif dcp.MetadataIndex(name) not in storage:
            raise IntegrityError(f"{where}: {name} was planned but not written.")


def regions_of(entry: dcp.TensorStorageMetadata) -> list[Region]:
    """Return the places of the pieces of a tensor."""
    return [Region(tuple(entry.size), tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def check_ranges(
    metadata: dcp.Metadata,
    sizes_bytes: Mapping[str, int],
    where: str,
    *,
    expected: Callable[[str], bool] = lambda _: True,
) -> None:
    """Check every range against the files' sizes.

    Args:
        metadata: Checked by :func:`check_entries`.
        where: The directory's name, for messages.
        sizes_bytes: The size of each file in the directory, except ``.metadata``.
        expected: Whether a file that is referred to should be among them (it may be on another node's disk).

    Raises:
        IntegrityError: A file is missing, too short, or referred to by nothing; ranges overlap.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in metadata.storage_data.items():
        ranges.setdefault(info.relative_path, []).append((info.offset, info.length, index.fqn))
    for file, items in ranges.items():
        if file not in sizes_bytes:
            if expected(file):
                raise IntegrityError(f"{where}: the file {file}, which holds {items[0][2]}, is missing.")
            continue
        end = 0
        for offset, length, name in sorted(items):
            if offset < end:
                raise IntegrityError(f"{where}: {name} overlaps another entry in {file}.")
            end = offset + length
            if end > sizes_bytes[file]:
                raise IntegrityError(f"{where}: {name} ends at byte {end} of {file}, which has {sizes_bytes[file]}.")
    if unknown := sorted(set(sizes_bytes) - set(ranges)):
        raise IntegrityError(f"{where}: nothing refers to the file {unknown[0]}.")


def _check_tensor(
    name: str, entry: dcp.TensorStorageMetadata, storage: Mapping[dcp.MetadataIndex, Any], where: str
) -> None:
    volume, pieces = 0, regions_of(entry)
    for piece in pieces:
        if not piece.is_inside:
            raise IntegrityError(f"{where}: a piece of {name} is outside its shape {piece.shape}.")
        info = storage.get(dcp.MetadataIndex(name, piece.offsets))
        if info is None:
            raise IntegrityError(f"{where}: the piece of {name} at {piece.offsets} was planned but not written.")
        if info.length < math.prod(piece.sizes) * entry.properties.dtype.itemsize:
            raise IntegrityError(f"{where}: the piece of {name} at {piece.offsets} is too short.")
        volume += math.prod(piece.sizes)
    if volume != math.prod(entry.size):
        raise IntegrityError(f"{where}: the pieces of {name} hold {volume} of its {math.prod(entry.size)} values.")
    if not are_apart(pieces):
        raise IntegrityError(f"{where}: the pieces of {name} overlap, or lie in no grid that can be checked.")
