"""Reads an untrusted DCP directory into live objects, for any number of ranks.

Rules:
* torch reads nothing here: ``dcp_metadata`` and ``tensor_files`` do, and every piece is compared with ``.metadata``; no
  name leaves the directory and no link is followed.
* Each rank reads what it needs by itself, without collectives: a rank that fails does not block the others.
* Names, shapes and the optimizer's groups are compared before the first live tensor is written.
* Optimizer state is allocated from ``.metadata`` and the live parameters, so a fresh optimizer is never stepped. Most
  of its cost is that of new memory, which is made while the bytes are verified.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.core.per_rank import RankExtras
from ckptmirror.core.rebuilt_tree import rebuilt
from ckptmirror.core.regions import Region
from ckptmirror.formats.base import LoadReport, LoadTarget
from ckptmirror.formats.dcp_metadata import METADATA_NAME, check_entries, check_ranges, loads_metadata, regions_of
from ckptmirror.formats.load_model import plan_model
from ckptmirror.formats.load_parts import OwnValues, load_parts
from ckptmirror.formats.names import live_values, match_names
from ckptmirror.formats.optimizer_state import owners_of
from ckptmirror.formats.rank_files import named_file
from ckptmirror.formats.shards import Piece, Stored, fill_all, fills, is_row, local_of, region_of
from ckptmirror.formats.stages import by_stage, check_patterns, elsewhere_in, join_groups
from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS
from ckptmirror.formats.versions import KEY, Versions, attached, from_text
from ckptmirror.formats.weights_only_values import decode
from ckptmirror.local.daemon_pool import cores, run_jobs
from ckptmirror.local.files import read_limited
from ckptmirror.local.host_memory import back_with_memory
from ckptmirror.sums.digests import byte_view
from ckptmirror.untrusted.read_limits import max_depth
from ckptmirror.untrusted.tensor_files import check_regular, load_part, open_regular, refused_as_usage

__all__ = [
    "check_directory",
    "check_plain_values",
    "files_read",
    "load_directory",
    "prepare_directory",
    "ranges_read",
    "read_directory_metadata",
    "read_full_directory",
    "read_tree",
    "saved_pieces",
]

_METADATA_LIMIT_BYTES = 1 << 30
_OPTIMIZER_KEYS = ("optimizer", "optim")

Path_ = tuple[str | int, ...]


def read_directory_metadata(directory: Path) -> Metadata:
    """Parse and check ``directory/.metadata`` without trusting it.

    Raises:
        UnsafePickle: It asks for something that is not on the allow-list.
        IntegrityError: It is missing or broken, or it names a file outside the directory.
    """
    path = directory / METADATA_NAME
    check_regular(path)
    metadata = loads_metadata(read_limited(path, _METADATA_LIMIT_BYTES), str(path))
    check_entries(metadata, str(path))
    return metadata


@dataclass(frozen=True)
class _Entry:
    key: str
    path: Path_
    described: Any


class _Reader:
    """Reads the pieces and plain values that checked metadata describes.

    Attributes:
        files: Keeps each file open that was read from in this context.
    """

    def __init__(self, path: Path, metadata: Metadata, named: Container[str] | None = None) -> None:
        self.path = path
        self._named = named  # what may be read, by its path in the root; None: whatever is here
        self.files = ExitStack()
        self._metadata = metadata
        self._open: dict[str, int] = {}
        self._opening = threading.Lock()
        self._made: dict[str, tuple[torch.Tensor, Any]] = {}  # for which parameter, and the tensor

    def make(self, owners: Mapping[str, torch.Tensor], is_over: Callable[[], bool]) -> None:
        """Make the tensors that :meth:`value` fills for these owners, if of their shape and in host memory."""
        for key, owner in owners.items():
            described = self._metadata.state_dict_metadata[key]  # not yet verified: it may say any size
            if owner.device.type == "cpu" and getattr(described, "size", None) == owner.shape:
                self._made[key] = (owner, _allocate(described, owner))

        def back(local: torch.Tensor) -> None:
            back_with_memory(local.data_ptr(), local.nbytes, is_over)

        made = [local_of(value) for _, value in self._made.values()]
        run_jobs(made, back, name="ckptmirror-memory", workers=max(cores() // 2, 1))  # others read meanwhile

    def stored(self, entries: list[_Entry]) -> Stored:
        """Return the value of the model that ``entries`` describe; nothing is read."""
        first = entries[0]
        described = first.described
        if not isinstance(described, TensorStorageMetadata) or len(first.path) > 2:
            return Stored(lambda _region, _into=None: (), lambda: self.value(entries, 2))
        shape, dtype = tuple(described.size), described.properties.dtype
        return Stored(functools.partial(self._pieces, first), lambda: self.value(entries, 2), shape, dtype)

    def value(self, entries: list[_Entry], top: int = 0, owners: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Return what ``entries`` describe, below the first ``top`` names of their paths; sharded like its owners."""
        items, wanted = [], []
        with self.files:
            for entry in entries:
                owner = (owners or {}).get(entry.key)
                made_for, value = self._made.pop(entry.key, (None, None))
                if value is None or made_for is not owner:
                    value = _allocate(entry.described, owner)
                if value is None:
                    value = self.load(MetadataIndex(entry.key))
                else:
                    wanted.append((value, functools.partial(self._pieces, entry), entry.key))
                items.append((entry.path, value))
            fill_all(wanted)
        return decode(rebuilt(items, top))

    def load(self, index: MetadataIndex, into: torch.Tensor | None = None) -> Any:
        """Return a plain value, or a piece of a tensor, as it was written; see :func:`load_part`."""
        info = self._metadata.storage_data[index]
        memory = byte_view(into) if into is not None else None
        return load_part(self._descriptor(info.relative_path), info.offset, info.length, index.fqn, into=memory)

    def _pieces(self, entry: _Entry, wanted: Region, into: torch.Tensor | None = None) -> Iterator[Piece]:
        key, dtype = entry.key, entry.described.properties.dtype
        if into is not None and not is_row(into, dtype):
            into = None
        for index, region in _needed(entry, wanted):
            data = self.load(index, into if region == wanted else None)
            if not isinstance(data, torch.Tensor) or not fills(data):
                what = f"tensor of layout {data.layout}" if isinstance(data, torch.Tensor) else type(data).__name__
                raise IntegrityError(f"{self.path}: {key} holds a {what} that no DCP directory does.")
            if tuple(data.shape) != region.sizes or data.dtype != dtype:
                raise IntegrityError(
                    f"{self.path}: a piece of {key} is {data.dtype} {tuple(data.shape)}; .metadata says "
                    f"{dtype} {region.sizes}."
                )
            if into is not None and _is_in(data, into) and not is_row(data, dtype):
                data = data.clone()  # its values are in another order
            yield Piece(region, data.detach())

    def _descriptor(self, name: str) -> int:
        with self._opening:
            if not self._open:
                self.files.callback(self._open.clear)
            if name not in self._open:
                path = named_file(self.path.parent, self._named, f"{self.path.name}/{name}")
                self._open[name], _ = self.files.enter_context(open_regular(path))
            return self._open[name]


def load_directory(directory: Path, target: LoadTarget, named: Container[str], extra: RankExtras) -> LoadReport:
    """Load the model and the optimizer of a DCP directory, from files that its meta names; see :func:`load_parts`."""
    # Files of other nodes may be elsewhere, so a missing file shows only when this rank reads it.
    entries, reader = target.prepared or _open(directory, named, all_here=False)
    entries = _without_others(entries, target)
    own = [entry for entry in entries if entry.path[0] in _OPTIMIZER_KEYS and len(entry.path) > 1]
    return load_parts(
        target,
        model=lambda values: _read_model(target, entries, reader, values),
        optimizer=(lambda: _read_optimizer(target, own, reader)) if own else None,
        extra=extra,
    )


def prepare_directory(
    directory: Path, target: LoadTarget, named: Container[str], is_over: Callable[[], bool]
) -> tuple[list[_Entry], _Reader]:
    """Return what :func:`load_directory` begins with, and make memory for the optimizer's state until it is over."""
    entries, reader = _open(directory, named, all_here=False)
    if "optimizer" not in target.exclude and target.state.optimizer is not None:
        reader.make(_owners(entries, target.state.model, target.rules), is_over)
    return entries, reader


def read_full_directory(
    directory: Path, named: Container[str] | None = None, exclude: Container[str] = ()
) -> dict[str, Any]:
    """Return the whole state in host memory, without live objects: ``{"model": ..., "optimizer": ...}``, if there.

    Args:
        directory: The directory.
        named: As in :func:`read_tree`.
        exclude: "optimizer", if it is not wanted: none of its bytes are read.

    Raises:
        IntegrityError: The directory is incomplete, broken or hostile.
    """
    entries, reader = _open(directory, named, all_here=True)
    tree = reader.value(_without(entries, exclude))
    if isinstance(tree, dict) and KEY in tree:
        tree.setdefault("model", {})  # a model without tensors leaves no entry
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        raise UsageError(f"{directory} holds no model.")
    versions = _versions(tree.pop(KEY), directory) if KEY in tree else None
    tree["model"] = attached(tree["model"], versions)
    if "optimizer" not in tree and "optim" in tree:
        tree["optimizer"] = tree.pop("optim")
    if isinstance(optimizer := tree.get("optimizer"), dict) and "param_groups" in optimizer:
        optimizer["param_groups"] = join_groups(optimizer["param_groups"])
    return tree


def read_tree(directory: Path, named: Container[str] | None = None) -> Any:
    """Return everything in a DCP directory as it was passed to DCP: full tensors and plain values.

    Args:
        directory: The directory.
        named: The paths that the save's meta names; None: there is no meta.

    Raises:
        IntegrityError: The directory is incomplete, broken or hostile.
    """
    entries, reader = _open(directory, named, all_here=True)
    return reader.value(entries)


def saved_pieces(directory: Path, named: Container[str]) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces of every tensor, one at a time, each with the name that a list of tensors has for it."""
    entries, reader = _open(directory, named, all_here=True)
    with reader.files:
        for entry in (one for one in entries if isinstance(one.described, TensorStorageMetadata)):
            size = tuple(entry.described.size)
            for piece in reader._pieces(entry, Region(size, (0,) * len(size), size)):
                yield ".".join(map(str, entry.path)), piece


def check_directory(data: bytes, sizes_bytes: Mapping[str, int], where: str, *, all_here: bool) -> None:
    """Check that a ``.metadata`` describes whole tensors in files of these sizes, as a load does first.

    Args:
        data: The bytes of ``.metadata``.
        sizes_bytes: The size of each other file that the meta names there; ``all_here``: no other node has more.
        where: The directory's name, for messages.

    Raises:
        UnsafePickle: It asks for something that is not on the allow-list.
        IntegrityError: It is broken; pieces overlap, leave gaps, or are not where it says.
    """
    metadata = loads_metadata(data, where)
    check_entries(metadata, where)
    check_ranges(metadata, sizes_bytes, where, expected=lambda _: all_here)
    _entries(metadata)


def check_plain_values(directory: Path, metadata: Metadata, present: Container[str]) -> None:
    """Read every plain value in the files ``present`` as a load does, and rebuild the tree.

    Raises:
        UsageError: A load would refuse a value.
        IntegrityError: A value cannot be read.
    """
    entries = _entries(metadata)
    reader = _Reader(directory, metadata)
    items: list[tuple[Path_, Any]] = []
    with refused_as_usage(), reader.files:
        for entry in entries:
            described = entry.described
            if isinstance(described, TensorStorageMetadata):
                empty = torch.empty(described.size, dtype=described.properties.dtype, device="meta")
                items.append((entry.path, empty))
            elif metadata.storage_data[MetadataIndex(entry.key)].relative_path in present:
                items.append((entry.path, reader.load(MetadataIndex(entry.key))))
        if len(items) == len(entries):  # else the rest is on the disks of other nodes
            decode(rebuilt(items))


def files_read(directory: Path, target: LoadTarget) -> set[str]:
    """Return the names of the files that a load reads on this rank; only ``.metadata`` has to be here.

    What does not fit the live model counts as read in full: the load then says why it does not fit.

    Raises:
        IntegrityError: ``.metadata`` is broken or hostile.
    """
    return {METADATA_NAME, *(one.relative_path for one in _parts_read(directory, (), target))}


def ranges_read(directory: Path, exclude: Container[str], target: LoadTarget | None = None) -> dict[str, list[range]]:
    """Return the ranges of bytes that a load reads, by file; only ``.metadata`` has to be here.

    Args:
        directory: The directory.
        exclude: "optimizer", if it is not wanted.
        target: What this rank loads into: it reads its own shards. None: everything is read.

    Raises:
        IntegrityError: ``.metadata`` is broken or hostile.
    """
    found: dict[str, list[range]] = {}
    for one in _parts_read(directory, exclude, target):
        found.setdefault(one.relative_path, []).append(range(one.offset, one.offset + one.length))
    return found


def _parts_read(directory: Path, exclude: Container[str], target: LoadTarget | None) -> Iterator[Any]:
    """Yield where each part is stored that a load reads."""
    metadata = read_directory_metadata(directory)
    entries = _without(_entries(metadata), exclude)
    into: dict[str, Any] = {}
    if target is not None:
        module = target.state.model
        entries = _without_others(entries, target)
        into |= _owners(entries, module, target.rules)
        live = live_values(module)
        saved = {target.rules.renamed(name): of_name for name, of_name in _of_model(entries).items()}
        for name, there in match_names(saved, live).items():
            into |= {entry.key: live.get(there) for entry in saved[name]}
    for entry in entries:
        indices, own = [MetadataIndex(entry.key)], into.get(entry.key)
        if isinstance(entry.described, TensorStorageMetadata):
            wanted = region_of(own) if isinstance(own, torch.Tensor) and own.shape == entry.described.size else None
            indices = [index for index, _ in _needed(entry, wanted)]
        yield from (metadata.storage_data[index] for index in indices)


def _without(entries: list[_Entry], exclude: Container[str]) -> list[_Entry]:
    return [entry for entry in entries if "optimizer" not in exclude or entry.path[0] not in _OPTIMIZER_KEYS]


def _needed(entry: _Entry, wanted: Region | None) -> Iterator[tuple[MetadataIndex, Region]]:
    """Yield the pieces of a tensor that have values of ``wanted``, or all of them: where each is stored, its place."""
    for region in regions_of(entry.described):
        if wanted is None or region.overlap(wanted) is not None:
            yield MetadataIndex(entry.key, region.offsets), region


def _open(directory: Path, named: Container[str] | None, *, all_here: bool) -> tuple[list[_Entry], _Reader]:
    named_file(directory.parent, named, f"{directory.name}/{METADATA_NAME}")
    metadata = read_directory_metadata(directory)
    named_there = {info.relative_path for info in metadata.storage_data.values()}
    present = {name: check_regular(directory / name) for name in named_there if os.path.lexists(directory / name)}
    check_ranges(metadata, present, str(directory), expected=lambda _: all_here)
    return _entries(metadata), _Reader(directory, metadata, named)


def _entries(metadata: Metadata) -> list[_Entry]:
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    result = []
    for key, described in metadata.state_dict_metadata.items():
        path = paths.get(key)
        if not (isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)):
            path = tuple(key.split(".", 1))
        if len(path) > max_depth():
            raise IntegrityError(f"The metadata puts {key[:80]!a} more than {max_depth()} deep.")
        result.append(_Entry(key, path, described))
    return result


def _without_others(entries: list[_Entry], target: LoadTarget) -> list[_Entry]:
    """Return the entries without those of values, and of their optimizer state, that only other ranks hold."""
    if not target.elsewhere:
        return entries
    saved, live = {name for entry in entries if (name := _value_of(entry))}, live_values(target.state.model)
    check_patterns(saved, live, target.elsewhere, target.rules)
    is_elsewhere = elsewhere_in(saved, live, target.elsewhere, target.rules)
    return [entry for entry in entries if not ((name := _value_of(entry)) and is_elsewhere(name))]


def _value_of(entry: _Entry) -> str:
    """Return the name of the model's value that an entry is of, or of the state of; "" if it is of none."""
    at = 1 if entry.path[0] == "model" else 2 if entry.path[0] in _OPTIMIZER_KEYS and "state" in entry.path[1:2] else 0
    return str(entry.path[at]) if at and len(entry.path) > at else ""


def _is_in(data: torch.Tensor, memory: torch.Tensor) -> bool:
    return data.untyped_storage().data_ptr() == memory.data_ptr()


def _of_model(entries: list[_Entry]) -> dict[str, list[_Entry]]:
    """Return the entries of each value of the model."""
    saved: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.path[0] == "model" and len(entry.path) > 1:
            saved.setdefault(str(entry.path[1]), []).append(entry)
    return saved


def _owners(
    entries: list[_Entry], module: torch.nn.Module, rules: NameRules = ALL_NAMES
) -> dict[str, torch.nn.Parameter]:
    """Return, by key, the live parameter of each entry of the optimizer's state that has one."""
    of_state = [e for e in entries if e.path[0] in _OPTIMIZER_KEYS and e.path[1:2] == ("state",) and len(e.path) > 2]
    owners = owners_of({str(entry.path[2]) for entry in of_state}, module, rules)
    return {entry.key: owners[name] for entry in of_state if (name := str(entry.path[2])) in owners}


def _read_model(
    target: LoadTarget, entries: list[_Entry], reader: _Reader, own: OwnValues
) -> Callable[[], dict[str, torch.dtype]]:
    saved = _of_model(entries)
    if not saved and live_values(target.state.model):
        raise UsageError(f"{reader.path} holds no model.")
    text = [entry for entry in entries if entry.key == KEY and not isinstance(entry.described, TensorStorageMetadata)]
    versions = _versions(reader.value(text, 1), reader.path) if text else None
    stored = {name: reader.stored(entries) for name, entries in saved.items()}
    stored |= own(stored)
    module, elsewhere, rules = target.state.model, target.elsewhere, target.rules
    load = plan_model(module, stored, versions=versions, elsewhere=elsewhere, rules=rules, say=target.left.say)

    def load_and_close() -> dict[str, torch.dtype]:
        with reader.files:
            return load()

    return load_and_close


def _read_optimizer(target: LoadTarget, wanted: list[_Entry], reader: _Reader) -> dict[str, Any]:
    tree = reader.value(wanted, 1, _owners(wanted, target.state.model, target.rules))
    if not isinstance(tree, dict) or "param_groups" not in tree:
        raise UsageError(
            f"{reader.path} holds an optimizer in a layout that is not known.",
            hint='Load without it: exclude=("optimizer",).',
        )
    return {**tree, "param_groups": join_groups(tree["param_groups"])}


def _versions(saved: Any, directory: Path) -> Versions:
    """Return the versions of the modules, of all stages."""
    return {name: of for text in by_stage(saved) for name, of in from_text(text, str(directory)).items()}


def _allocate(described: Any, owner: torch.Tensor | None) -> Any:
    """Return an empty tensor as it is described, sharded like its owner; None for a plain value."""
    if not isinstance(described, TensorStorageMetadata):
        return None
    size, dtype = tuple(described.size), described.properties.dtype
    follows = owner is not None and size == tuple(owner.shape)
    try:
        if isinstance(owner, DTensor) and follows:
            return empty_dtensor(*size, dtype=dtype, device_mesh=owner.device_mesh, placements=owner.placements)
        return torch.empty(size, dtype=dtype, device=owner.device if owner is not None and follows else "cpu")
    except DEVICE_ERRORS:
        raise
    except RuntimeError as error:
        raise IntegrityError(f"The directory describes a tensor of {size}: {error}") from error
