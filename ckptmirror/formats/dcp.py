"""Kind ``dcp``: a directory in torch's own distributed format, written by all ranks, read by any number of them.

Layout of the state: ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``, so
plain ``dcp.load({"model": ..., "optimizer": ...}, checkpoint_id=...)`` and ``dcp_to_torch_save`` read it. Beside these
``module_versions`` is a text (``formats.versions``). Of a model in stages, ``param_groups`` and ``module_versions``
have one entry for each stage (``formats.stages``), and the name of a tensor belongs to one stage.

Rules:
* Ranks write into one temporary directory per node; the leader publishes it only after ``check``.
* Each rank checks that every item that ``.metadata`` places in its files is really there; the leader then checks the
  bytes on disk, and loads every plain value. torch does neither.
* The coordinator's ``.metadata`` is written, byte for byte, on every node.
* What ranks have alike is written once, by any of them; but what is small, by the first, into a file of its own. Else
  each rank would read a little from the large files of others, and each node of a job would need them.
* ``CheckpointException``, which no ``except Exception`` sees, never leaves this package.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.serialization import config as serialization_config

from ckptmirror.core.containers import leaves
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.core.model import Artifact, Digest, Kind, Meta
from ckptmirror.core.names import SaveName, tmp_name
from ckptmirror.core.rank_names import rank_name
from ckptmirror.core.stages import Stages
from ckptmirror.formats.base import LoadReport, LoadTarget, Snapshot, WriteContext
from ckptmirror.formats.dcp_files import SMALL, DirectoryWriter
from ckptmirror.formats.dcp_metadata import METADATA_NAME, check_entries, check_ranges
from ckptmirror.formats.dcp_read import (
    check_plain_values,
    load_directory,
    prepare_directory,
    read_directory_metadata,
)
from ckptmirror.formats.sidecars import rank_extras
from ckptmirror.formats.stages import in_stages
from ckptmirror.formats.tensor_bytes import compact
from ckptmirror.formats.versions import KEY, to_text, versions_in
from ckptmirror.formats.weights_only_values import MARK
from ckptmirror.local.checksummed_writer import ArtifactWriter
from ckptmirror.untrusted.tensor_files import check_regular

__all__ = ["FORMAT", "DcpFormat"]

_FILE = re.compile(rf"__(\d+)_(?:{SMALL})?\d+\.distcp")
_SMALL_BYTES = 64 * 1024


class DcpFormat:
    """Reads and writes kind ``dcp``."""

    kind: Kind = "dcp"

    def write(self, snapshot: Snapshot, context: WriteContext) -> list[Artifact]:
        """Write this rank's shards (and the coordinator's ``.metadata``) into the node's temporary directory.

        Collective over ``context.torch_group``. The snapshot's tensors are in host memory.

        Raises:
            CkptMirrorError: A rank failed; names it and the cause. Raised on every rank.
        """
        small_bytes = _SMALL_BYTES if context.world_size > 1 and context.rank == 0 else None
        writer = DirectoryWriter(_temporary(context), context.name.dcp_dir, context.save_id, small_bytes=small_bytes)
        try:
            digests = _save(snapshot, writer, context)
        finally:
            writer.files.abandon()
        return [
            Artifact(
                path=f"{context.name.dcp_dir}/{name}",
                kinds=("dcp",),
                rank=None if name == METADATA_NAME else context.rank,
                digest=digest,
            )
            for name, digest in sorted(digests.items())
        ]

    def check(self, context: WriteContext, artifacts: Sequence[Artifact]) -> None:
        """Check that the node's temporary directory holds exactly the artifacts and all that ``.metadata`` names.

        Raises:
            IntegrityError: It does not; the save must not be committed.
        """
        directory = _temporary(context)
        prefix = f"{context.name.dcp_dir}/"
        named = {a.path.removeprefix(prefix): a.digest.size_bytes for a in artifacts if a.path.startswith(prefix)}
        found = {entry.name: check_regular(Path(entry.path)) for entry in os.scandir(directory)}
        if METADATA_NAME not in found:
            raise IntegrityError(f"{directory.name} has no {METADATA_NAME}.")
        for name in sorted(named.keys() | found.keys()):
            if named.get(name) != found.get(name):
                on_disk, reported = found.get(name, "no"), named.get(name, "none")
                raise IntegrityError(f"{directory.name}/{name} has {on_disk} bytes on disk, {reported} were reported.")
        metadata = read_directory_metadata(directory)
        here = {None, *(artifact.rank for artifact in artifacts)}
        del found[METADATA_NAME]
        one_rank = context.world_size == 1
        check_ranges(metadata, found, directory.name, expected=lambda name: one_rank or _writer_of(name) in here)
        check_plain_values(directory, metadata, found)

    def prepare(self, root: Path, meta: Meta, target: LoadTarget, is_over: Callable[[], bool]) -> Any:
        """Read what is in the directory, and make the tensors of the optimizer's state; see :class:`Format`."""
        return prepare_directory(root / SaveName(meta.step, meta.tag).dcp_dir, target, meta.paths, is_over)

    def load(self, root: Path, meta: Meta, target: LoadTarget) -> LoadReport:
        """Load model and optimizer of ``meta``; see :class:`Format`."""
        directory = root / SaveName(meta.step, meta.tag).dcp_dir
        return load_directory(directory, target, meta.paths, rank_extras(root, meta, target))


FORMAT = DcpFormat()
_IS_ALONE = "torch.distributed is (disabled|unavailable)"


def _hush_torch() -> None:
    """Let torch not say at every save of one process that it is alone.

    The filter is not restored, since other threads may change filters meanwhile. It is set only if it is not there:
    with each, Python forgets which warnings it has shown.
    """
    if not any(getattr(said, "pattern", "") == _IS_ALONE for _, said, *_ in warnings.filters):
        warnings.filterwarnings("ignore", message=_IS_ALONE)


def _save(snapshot: Snapshot, writer: DirectoryWriter, context: WriteContext) -> dict[str, Digest]:
    group = context.torch_group
    state = _layout(snapshot, context.stage)
    if group is None:
        _hush_torch()
    else:
        _check_is_there(group)  # without any group torch would take each rank for alone
    try:
        # A second checksum of every byte costs most of the CPU time of a write. Only torch reads these files, and it
        # does not check it; what is checked is the artifact's crc32c. The setting is this thread's alone.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # made at import
            metadata = save(
                state,
                storage_writer=writer,
                planner=_Planner(context.stages),
                process_group=group,
                no_dist=group is None,
            )
        # Every rank comes here or none; what may fail on one rank alone follows only after the last collective.
        copy = _share_metadata(writer.directory, group) if group is not None else None
    except CheckpointException as error:
        raise _of_first_rank(error, context.nodes_of_ranks) from error
    except (RuntimeError, ValueError):
        if group is not None:
            _check_is_there(group)
        raise
    mine = context.rank
    where = f"{writer.directory.name}/{METADATA_NAME}"
    digests = dict(writer.files.digests)
    check_entries(metadata, where)
    sizes_bytes = {name: digest.size_bytes for name, digest in digests.items() if name != METADATA_NAME}
    check_ranges(metadata, sizes_bytes, where, expected=lambda name: _writer_of(name) == mine)
    if context.is_leader and mine != 0:
        digests[METADATA_NAME] = _write_copy(writer.directory, copy, context.save_id)
    return digests


def _check_is_there(group: Any) -> None:
    """Check that the training has not destroyed all groups.

    Raises:
        UsageError: It has.
    """
    try:
        dist.get_rank(group)
    except ValueError as error:
        raise UsageError(
            "the process groups were destroyed before kind dcp was written: call close() before "
            "torch.distributed.destroy_process_group().",
            hint="Create the manager again after init_process_group().",
        ) from error


def _of_first_rank(error: CheckpointException, nodes_of_ranks: Sequence[int]) -> CkptMirrorError:
    """Return the error to raise for torch's: that of the first failed rank, with its number and node."""
    rank, (cause, _) = sorted(error.failures.items())[0]
    others = f" ({len(error.failures)} ranks failed)" if len(error.failures) > 1 else ""
    kind = type(cause).__name__
    if isinstance(cause, CkptMirrorError):
        found = type(cause)(f"writing kind dcp: {cause.message}{others}", hint=cause.hint)
    else:
        found = CkptMirrorError(f"writing kind dcp: {kind}: {str(cause) or kind}{others}")
    found.put_in_front(rank_name(rank, nodes_of_ranks))
    return found


class _Planner(DefaultSavePlanner):
    """Decides which rank writes what several have alike."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave what is small to the first rank that has it, then do as torch does.

        Raises:
            UsageError: Two stages have one name.
        """
        if self._stages.of_ranks:
            self._refuse_one_name(all_plans)
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in taken]
            taken |= {item.index for item in items if (item.tensor_storage_size() or 0) <= _SMALL_BYTES}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)

    def _refuse_one_name(self, all_plans: list[SavePlan]) -> None:
        first: dict[str, int] = {}
        for stage, plan in zip(self._stages.of_ranks, all_plans, strict=True):
            for name in (item.index.fqn for item in plan.items):
                if first.setdefault(name, stage) != stage:
                    raise UsageError(
                        f"Stages {first[name]} and {stage} both have {name}, and a checkpoint keeps one value under "
                        "each name.",
                        hint="Give each stage the names that its layers have in the whole model. Register a buffer "
                        "that every stage has with persistent=False.",
                    )


def _layout(snapshot: Snapshot, stage: int | None) -> dict[str, Any]:
    model = snapshot.model
    state: dict[str, Any] = {
        "model": {name: v if isinstance(v, torch.Tensor) else _flattenable(v) for name, v in model.items()}
    }
    if snapshot.optimizer is not None:
        shapes = {name: value.shape for name, value in model.items() if isinstance(value, torch.Tensor)}
        state["optimizer"] = {
            "state": {
                name: _flattenable(v, shapes.get(name)) for name, v in snapshot.optimizer["state"].items() if v != {}
            },
            "param_groups": in_stages(_flattenable(snapshot.optimizer["param_groups"]), stage),
        }
    if (versions := versions_in(snapshot.extra, ("model",))) is not None:
        state[KEY] = in_stages(
            to_text(versions), stage
        )  # here too, since the extra files may not travel with the directory
    return cast(dict[str, Any], compact(state))


def _flattenable(tree: Any, shape: torch.Size | None = None) -> Any:
    """Return ``tree`` in a form that DCP saves without loss.

    DCP's flattening drops empty dicts and converts every key to text, and a load recreates every tensor in row-major
    order. A tensor with another memory layout gets a mark that keeps it, unless it has the parameter's ``shape``: it
    then takes the parameter's layout.
    """
    if type(tree) is dict:
        if any(type(key) is not str for key in tree):
            items = [[key, _flattenable(value, shape)] for key, value in tree.items()]
            return {MARK: "dict", "items": items}
        return {key: _flattenable(value, shape) for key, value in tree.items()} or {MARK: "dict", "items": []}
    if type(tree) is list:
        return [_flattenable(item, shape) for item in tree]
    if type(tree) is tuple and any(isinstance(leaf, torch.Tensor) for leaf in leaves(tree)):
        # else it is pickled with its tensors
        return {MARK: "tuple", "items": [_flattenable(item, shape) for item in tree]}
    if type(tree) is torch.Tensor and not tree.is_contiguous() and tree.shape != shape:
        strides = tree.stride()
        order = sorted(range(tree.dim()), key=lambda axis: -strides[axis])
        in_rows = tree.permute(order)
        return {MARK: "permuted", "order": order, "data": in_rows} if in_rows.is_contiguous() else tree
    return tree


def _share_metadata(directory: Path, group: Any) -> bytes | None:
    """Collective: return the coordinator's ``.metadata``, or None if it could not be read there."""
    box: list[bytes | None] = [None]
    if dist.get_rank(group) == 0:
        with suppress(OSError):  # the coordinator's check() finds this again, the other ranks get an empty box
            box = [(directory / METADATA_NAME).read_bytes()]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def _write_copy(directory: Path, data: bytes | None, save_id: str) -> Digest:
    if data is None:
        raise IntegrityError(f"The coordinator could not read its {METADATA_NAME} again.")
    with ArtifactWriter(directory / METADATA_NAME, save_id) as writer:
        writer.write(data)
        return writer.publish()


def _temporary(context: WriteContext) -> Path:
    return context.root / tmp_name(context.name.dcp_dir, context.save_id)


def _writer_of(name: str) -> int | None:
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None
