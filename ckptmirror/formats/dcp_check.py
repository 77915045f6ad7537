"""Checks that a DCP directory is consistent: that its files hold what ``.metadata`` says.

Rules:
* Every name is one plain file name inside the directory, every range is inside its file, ranges do not overlap.
* Every chunk of every tensor, and every plain value, has its range; chunks of a tensor are apart and cover it.
* Every file is referred to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.shards import are_apart

__all__ = ["METADATA_NAME", "check_entries", "check_ranges", "file_names"]

METADATA_NAME = ".metadata"


def check_entries(metadata: Metadata, where: str) -> None:
    """Check the names and the completeness of ``metadata``, without looking at any file.

    Args:
        metadata: torch's own, or what ``dcp_metadata`` made, which checks the types.
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
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, storage, where)
        elif MetadataIndex(name) not in storage:
            raise IntegrityError(f"{where}: {name} was planned but not written.")


def file_names(metadata: Metadata) -> set[str]:
    """Return the names of the files that ``metadata`` refers to."""
    return {info.relative_path for info in metadata.storage_data.values()}


def check_ranges(
    metadata: Metadata,
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


def _check_tensor(name: str, entry: TensorStorageMetadata, storage: Mapping[MetadataIndex, Any], where: str) -> None:
    size, item_bytes = entry.size, entry.properties.dtype.itemsize
    volume = 0
    boxes = []
    for chunk in entry.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if not len(offsets) == len(sizes) == len(size) or any(
            o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise IntegrityError(f"{where}: a piece of {name} is outside its shape {tuple(size)}.")
        info = storage.get(MetadataIndex(name, offsets))
        if info is None:
            raise IntegrityError(f"{where}: the piece of {name} at {tuple(offsets)} was planned but not written.")
        if info.length < math.prod(sizes) * item_bytes:
            raise IntegrityError(f"{where}: the piece of {name} at {tuple(offsets)} is too short.")
        volume += math.prod(sizes)
        boxes.append((tuple(offsets), tuple(o + n for o, n in zip(offsets, sizes, strict=True))))
    if volume != math.prod(size):
        raise IntegrityError(f"{where}: the pieces of {name} hold {volume} of its {math.prod(size)} values.")
    if not are_apart([box for box in boxes if all(begin < end for begin, end in zip(*box, strict=True))]):
        raise IntegrityError(f"{where}: the pieces of {name} overlap, or lie in no grid that can be checked.")
