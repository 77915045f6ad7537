"""The classes that DCP's ``.metadata`` may name, and an unpickler that accepts nothing else.

Rules:
* Allowed are DCP's own dataclasses, sizes, dtypes, layouts and paths; no other class, and only functions of this
  module.
* A pickle may set attributes on a class that it may name (BUILD): ``unchanged_classes`` undoes that.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ckptmirror.core.errors import UnsafePickle

__all__ = ["AllowListUnpickler", "unchanged_classes"]


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise UnsafePickle(f".metadata names a layout {name!r}.")
    return found


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _member(kind: Any, name: Any) -> Any:
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as ``getattr(its class, its name)``."""
    if kind is not metadata._MEM_FORMAT_ENCODING or not isinstance(name, str) or name not in kind.__members__:
        raise UnsafePickle(f".metadata asks for the attribute {name!r} of {getattr(kind, '__name__', kind)!r}.")
    return kind.__members__[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    **{
        ("torch.distributed.checkpoint.metadata", kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.BytesStorageMetadata,
            metadata.StorageMeta,
            # Written by TensorProperties itself; torch has no public name for it.
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    # What FileSystemWriter writes for every item; torch has no public name for it.
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
_CLASSES = [
    kind for kind in _ALLOWED.values() if isinstance(kind, type) and kind.__module__.startswith("torch.distributed")
]


class AllowListUnpickler(pickle.Unpickler):
    """Unpickles DCP's ``.metadata``: its own dataclasses, sizes, dtypes, layouts and paths, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed global.

        Raises:
            UnsafePickle: It is not on the list.
        """
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        if module == "torch" and name.isidentifier():
            dtype = vars(torch).get(name)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise UnsafePickle(f".metadata asks to load {module}.{name}, which is not on the allow-list.")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - the base class's signature
        """Refuse: ``.metadata`` has no persistent objects.

        Raises:
            UnsafePickle: Always.
        """
        raise UnsafePickle(".metadata asks for a persistent object.")


@contextmanager
def unchanged_classes() -> Iterator[list[str]]:
    """Undo changes to the classes on the list. Yields a list that afterwards holds the classes that were changed."""
    before = [dict(vars(kind)) for kind in _CLASSES]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for kind, attributes in zip(_CLASSES, before, strict=True):
            now = dict(vars(kind))
            if now == attributes:
                continue
            changed.append(kind.__name__)
            for name in now.keys() - attributes.keys():
                delattr(kind, name)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    setattr(kind, name, value)
