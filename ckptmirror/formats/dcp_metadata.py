"""Reads DCP's ``.metadata``: from the description of the pickle into torch's own records, field by field.

Rules:
* Only the fields that a load needs are taken, each with its type; torch's classes are called here, never by the pickle.
* What a newer torch adds is ignored as long as it consists of the names on the list.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.pickles import Made, Name, read_pickle
from ckptmirror.formats.tensor_files import named

__all__ = ["loads_metadata"]

_HERE = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = frozenset(
    {
        *(
            _HERE + name
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "BytesStorageMetadata",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *_DTYPES,
        _STORAGE_INFO,
        "torch.Size",
        "torch.serialization._get_layout",
        "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 pickles a member of an enumeration; nobody calls it here
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("WindowsPath", "PureWindowsPath")
        ),
    }
)


def loads_metadata(data: bytes, name: str) -> metadata.Metadata:
    """Read the bytes of a ``.metadata`` file; ``name`` is for messages.

    Raises:
        UnsafePickle: It names what is not on the list, or would cost more than its bytes.
        IntegrityError: It is broken, or something else than DCP's metadata.
    """
    with named(name):
        made = read_pickle(data, _NAMES.__contains__)
        if type(made) is not Made or made.name != f"{_HERE}Metadata":
            raise IntegrityError(f"It holds a {type(made).__name__}, not the metadata of a DCP directory.")
        fields = _fields(made, "Metadata")
        sizes: dict[int, torch.Size] = {}
        entries, storage = fields.get("state_dict_metadata"), fields.get("storage_data")
        if type(entries) is not dict or type(storage) is not dict:
            raise IntegrityError("It has no table of entries.")
        return metadata.Metadata(
            {key: _entry(entry, sizes) for key, entry in entries.items()},
            fields.get("planner_data"),
            {_index(index, sizes): _info(info) for index, info in storage.items()},
        )


def _fields(made: Any, kind: str) -> dict[str, Any]:
    full = _STORAGE_INFO if kind == "_StorageInfo" else _HERE + kind
    if type(made) is not Made or made.name != full or made.arguments or not made.is_object:
        raise IntegrityError(f"It holds a {getattr(made, 'name', type(made).__name__)} in place of a {kind}.")
    if type(made.state) is not dict:
        raise IntegrityError(f"It holds a {kind} without its fields.")
    return made.state


def _entry(made: Any, sizes: dict[int, torch.Size]) -> metadata.TensorStorageMetadata | metadata.BytesStorageMetadata:
    if type(made) is Made and made.name == f"{_HERE}BytesStorageMetadata" and not made.arguments and not made.state:
        return metadata.BytesStorageMetadata()
    fields = _fields(made, "TensorStorageMetadata")
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise IntegrityError("It describes a tensor without pieces.")
    pieces = []
    for chunk in chunks:
        of = _fields(chunk, "ChunkStorageMetadata")
        pieces.append(metadata.ChunkStorageMetadata(_size(of.get("offsets"), sizes), _size(of.get("sizes"), sizes)))
    return metadata.TensorStorageMetadata(
        _properties(fields.get("properties")), _size(fields.get("size"), sizes), pieces
    )


def _properties(made: Any) -> metadata.TensorProperties:
    if type(made) is Made and made.name == f"{_HERE}TensorProperties" and made.is_object and not made.arguments:
        state = made.state
        if type(state) is tuple and len(state) == 5 and type(state[0]) is Name and state[0] in _DTYPES:
            return metadata.TensorProperties(dtype=_DTYPES[state[0]])  # the other four are deprecated, and not used
    raise IntegrityError("It describes a tensor without a dtype.")


def _size(made: Any, sizes: dict[int, torch.Size]) -> torch.Size:
    """Return a ``torch.Size``; one that the pickle shares is made once."""
    if (known := sizes.get(id(made))) is not None:
        return known
    is_size = type(made) is Made and made.name == "torch.Size" and len(made.arguments) == 1 and made.state is None
    numbers = made.arguments[0] if is_size else None
    if type(numbers) is not tuple or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise IntegrityError("It describes a tensor with no valid size.")
    sizes[id(made)] = torch.Size(numbers)
    return sizes[id(made)]


def _index(made: Any, sizes: dict[int, torch.Size]) -> metadata.MetadataIndex:
    fields = _fields(made, "MetadataIndex")
    fqn, offset = fields.get("fqn"), fields.get("offset")
    if type(fqn) is not str:
        raise IntegrityError("It stores something without a name.")
    return metadata.MetadataIndex(fqn, None if offset is None else _size(offset, sizes))


def _info(made: Any) -> _StorageInfo:
    fields = _fields(made, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise IntegrityError("It says that the files were transformed while they were written.")
    return _StorageInfo(*(_text(fields.get(key)) for key in ("relative_path", "offset", "length")))


def _text(value: Any) -> Any:
    """Return a relative path as text, anything else as it is; ``dcp_check`` compares it with the files."""
    is_path = type(value) is Made and value.name.startswith("pathlib") and value.state is None
    if is_path and all(type(part) is str for part in value.arguments):
        return str(PurePosixPath(*value.arguments))
    return value
