"""Kind ``emergency``: what a rank can save by itself in its last seconds, in a separate directory.

``rank0.pt`` is ``{"step", "world_size", "sharded", "model", "optimizer", "extra"}``; sharded tensors are plain pieces
with their place in the whole; ``tensors_rank0.json`` lists them.

Rules:
* No collectives, ever: another rank may be dead or stuck in one.
* If tensors are sharded, or an earlier save was refused because the ranks differ, every rank writes its own pieces.
  Otherwise rank 0 writes model and optimizer, the other ranks only their own extra state.
* Any number of ranks can load: the same number gets back what each rank had; another number joins the pieces, and gets
  the buffers of rank 0, as from any other kind.
* No save has compared the ranks, so the load of another number of ranks does. If they hold different parameters or
  optimizer state under one name, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core import names
from ckptmirror.core.containers import TreePath, placed_leaves
from ckptmirror.core.errors import IntegrityError, KindMismatch, UsageError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.per_rank import KEY, own_for, recorded, with_record
from ckptmirror.core.regions import Region
from ckptmirror.formats.already_filled import same
from ckptmirror.formats.artifacts import write_json, write_pt
from ckptmirror.formats.base import LoadReport, LoadTarget, Snapshot, WriteContext
from ckptmirror.formats.capture import capture_local
from ckptmirror.formats.load_model import plan_model
from ckptmirror.formats.load_parts import OWN_VALUES, OwnValues, load_parts
from ckptmirror.formats.merging import merged
from ckptmirror.formats.model import full_optimizer
from ckptmirror.formats.names import live_parameters, live_values
from ckptmirror.formats.rank_files import RankFiles, rank_files
from ckptmirror.formats.shards import Piece, cut, region_of
from ckptmirror.formats.sidecars import load_extra, ranks_read, tensor_list
from ckptmirror.formats.stages import check_renames, in_stages
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.versions import Versions, versions_in
from ckptmirror.local.directories import make_dirs

__all__ = [
    "FORMAT",
    "EmergencyFormat",
    "emergency_extra",
    "emergency_merge_extra",
    "snapshot_files_read",
    "write_emergency",
]


def write_emergency(
    state: TrainState,
    directory: Path,
    *,
    save_id: str,
    rank: int,
    world_size: int,
    step: int,
    apart: bool = False,
    stage: int | None = None,
) -> list[Artifact]:
    """Write this rank's part of an emergency snapshot, from the live tensors, and publish it in ``directory``.

    Args:
        state: What to save.
        directory: The snapshot's.
        save_id: The snapshot's.
        rank: This process's rank.
        world_size: Number of ranks.
        step: The step.
        apart: Whether ranks are known to hold different values under one name, so that each writes its own.
        stage: The stage that this rank holds, of a model in stages; then each writes its own too.

    Returns:
        The artifacts, their paths relative to the parent of ``directory`` (the root).

    Raises:
        UsageError: Something in ``state`` could not be loaded back; names it.
    """
    snapshot = capture_local(state, step=step, with_ema=apart or stage is not None or rank == 0)
    of_each = apart or stage is not None or snapshot.sharded
    is_here = rank != 0 and not of_each
    extra = recorded(snapshot, rank, world_size, is_here=is_here)
    snapshot = Snapshot({}, None, None, extra, False) if is_here else replace(snapshot, extra=extra)
    make_dirs(directory)
    content = {
        "step": step,
        "world_size": world_size,
        "sharded": of_each,
        "stage": stage,
        "model": cut(snapshot.model),
        "optimizer": cut(snapshot.optimizer),
        "extra": cut(snapshot.extra),
    }
    pieces, listed = names.emergency_files(rank)
    tensors = tensor_list(snapshot, rank=rank, world_size=world_size, sums=False)
    digests = {
        pieces: write_pt(content, directory / pieces, save_id=save_id, publish=True),
        listed: write_json(tensors, directory / listed, save_id=save_id, publish=True),
    }
    return [
        Artifact(path=f"{directory.name}/{name}", kinds=("emergency",), rank=rank, digest=digest)
        for name, digest in digests.items()
    ]


class EmergencyFormat:
    """Reads kind ``emergency``; :func:`write_emergency` writes it, in one go and without a host copy."""

    kind: Kind = "emergency"

    def write(self, snapshot: Snapshot, context: WriteContext) -> list[Artifact]:  # noqa: ARG002 - the seam's signature
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError("Emergency snapshots are written by save_emergency_checkpoint.")

    def check(self, context: WriteContext, artifacts: Sequence[Artifact]) -> None:
        """Do nothing: each file was checked as it was written."""

    def prepare(self, root: Path, meta: Meta, target: LoadTarget, is_over: Callable[[], bool]) -> None:
        """Do nothing: the files are mapped."""

    def load(self, root: Path, meta: Meta, target: LoadTarget) -> LoadReport:
        """Load the whole snapshot, including its extra state, since it has no sidecars.

        Raises:
            IntegrityError: A file is missing, broken or hostile.
            UsageError: It does not fit the state.
            KindMismatch: Another number of ranks wrote it, and each had values of its own. Nothing has changed.
        """
        source, directory = _source(root, meta, target)
        saved = _snapshot(source, directory)
        module = target.state.model
        extra = partial(_extra_of_rank, source, directory)
        own = own_for(target, extra(), extra, OWN_VALUES)  # refused before the ranks are compared
        sharded = saved.get("sharded") is True
        if not sharded:
            shared = source.of(0)
        elif meta.world_size == target.world_size and _new_names(saved, target).keys() == live_values(module).keys():
            shared = source
        else:
            for rank in source.ranks:
                _snapshot(source.of(rank), directory)
            _refuse_values_of_a_rank(source, module, own.names if own is not None else frozenset())
            shared = _joined(source)
        tree = _snapshot(shared, directory)

        def model(own: OwnValues) -> Callable[[], Mapping[str, torch.dtype]]:
            all_names = _names_of_all(source, directory, meta, target) if shared is source else tree["model"].keys()
            check_renames(all_names, live_values(module), target.elsewhere, target.rules)
            return plan_model(
                module,
                {**tree["model"], **own(tree["model"])},
                lambda name: shared.others(("model", name)),
                versions=_versions(source, directory),
                elsewhere=target.elsewhere,
                rules=target.rules,
                say=target.left.say,
            )

        has_optimizer = tree["optimizer"] is not None
        parts = load_parts(
            target,
            model=model,
            optimizer=(lambda: full_optimizer(shared.below("optimizer"), target)) if has_optimizer else None,
            extra=extra,
        )
        rest = load_extra(source.below("extra"), target, meta.step)
        return parts + rest


FORMAT = EmergencyFormat()


def emergency_extra(root: Path, meta: Meta, target: LoadTarget) -> dict[str, Any]:
    """Return the extra state of the target's rank, or of rank 0 if the snapshot does not have this rank."""
    extra: dict[str, Any] = _snapshot(*_source(root, meta, target))["extra"]
    return extra


def snapshot_files_read(root: Path, meta: Meta, target: LoadTarget) -> set[str]:
    """Return the paths of the files that a load reads on a rank: its own, and the others that it may need.

    Raises:
        IntegrityError: Its own file is broken or hostile.
        FileNotFoundError: It is missing.
    """
    source, directory = _source(root, meta, target)
    tree = _snapshot(source, directory)
    ranks = ranks_read(source.below("extra"), meta, target)
    if tree.get("sharded") is not True:
        ranks.add(0)
    elif not _are_own_pieces(tree, target):
        ranks.update(source.ranks)
    return {f"{directory.name}/{names.emergency_files(rank)[0]}" for rank in ranks}


def _are_own_pieces(tree: Mapping[str, Any], target: LoadTarget) -> bool:
    """Whether a rank's file holds the very pieces that the rank holds now."""
    live, optimizer = live_values(target.state.model), tree["optimizer"]
    own: dict[Hashable, Region] = {
        name: region_of(value) for name, value in live.items() if isinstance(value, torch.Tensor)
    }
    saved: dict[Hashable, Region | None] = {name: _region(value) for name, value in _new_names(tree, target).items()}
    if saved.keys() != live.keys() or any(saved[name] != region for name, region in own.items()):
        return False
    state = placed_leaves(optimizer.get("state")) if isinstance(optimizer, dict) else ()
    renamed = target.rules.renamed
    return all(own.get(renamed(str(path[0]))) == leaf.region for path, leaf in state if isinstance(leaf, Piece))


def _new_names(tree: Mapping[str, Any], target: LoadTarget) -> dict[str, Any]:
    """Return what a rank's file has of the model, under the names that it has there."""
    return {target.rules.renamed(name): value for name, value in tree["model"].items()}


def _names_of_all(source: RankFiles, directory: Path, meta: Meta, target: LoadTarget) -> Collection[str]:
    """Return the names that all ranks saved, for a check of ``rename``; one rank does it, if its node has the files."""
    has_all = len(source.ranks) == meta.world_size
    if not (has_all and target.rank == 0 and target.elsewhere and target.rules.rename):
        return ()
    return {name for rank in source.ranks for name in _snapshot(source.of(rank), directory)["model"]}


def _region(value: Any) -> Region | None:
    """Return the region of a saved value of the model; None if it is no tensor."""
    return value.region if isinstance(value, Piece) else region_of(value) if isinstance(value, torch.Tensor) else None


def emergency_merge_extra(root: Path, meta: Meta, target: LoadTarget) -> None:
    """Merge what is merged of the extra state, as ``sidecars.merge_extra`` does."""
    merged(_source(root, meta, target)[0].below("extra"), target)


def _extra_of_rank(source: RankFiles, directory: Path, rank: int | None = None) -> dict[str, Any]:
    """Return the extra state of the first file, or of a rank, then with all values that the rank has of its own."""
    tree = _snapshot(source if rank is None else source.of(rank), directory)
    is_apart = rank is not None and tree.get("sharded") is True and KEY in tree["extra"]
    return with_record(tree, rank) if is_apart and rank is not None else tree["extra"]


def _source(root: Path, meta: Meta, target: LoadTarget) -> tuple[RankFiles, Path]:
    tops = {artifact.path.split("/")[0] for artifact in meta.artifacts_of("emergency") if "/" in artifact.path}
    if len(tops) != 1:
        raise IntegrityError(f"The meta names {len(tops)} directories of an emergency snapshot.")
    directory = root / tops.pop()
    source = rank_files(root, meta, lambda rank: f"{directory.name}/{names.emergency_files(rank)[0]}", target.rank)
    if source is None:
        raise IntegrityError(f"The meta names no file of {directory.name}.")
    return source, directory


def _refuse_values_of_a_rank(source: RankFiles, module: torch.nn.Module, merged: Collection[str]) -> None:
    """Refuse the pieces of another number of ranks if joining them would lose what a rank held and nothing merges.

    Raises:
        KindMismatch: Ranks hold other names, or different values under one name and at one place.
    """
    parameters = {name for name, _ in live_parameters(module)}
    for part in ("model", "optimizer"):
        at = 0 if part == "model" else 1
        trees = (placed_leaves(source.tree(rank).get(part)) for rank in source.ranks)
        held = [{path: v for path, v in tree if path[at : at + 1] == () or path[at] not in merged} for tree in trees]
        stages = [source.tree(rank).get("stage") for rank in source.ranks]
        first: dict[Any, dict[TreePath, Any]] = {}
        for rank, stage, own in zip(source.ranks, stages, held, strict=True):
            if other := next(iter(own.keys() ^ first.setdefault(stage, own).keys()), None):
                raise _of_a_rank(f"{part}.{'.'.join(map(str, other))} is not on all of them", rank, source)
        paths = {path for own in first.values() for path in own if path[:1] != ("param_groups",)}
        for path in sorted(paths, key=str):
            is_buffer = part == "model" and path[0] not in parameters
            if not is_buffer and (differs := _first_other(own.get(path) for own in held)) is not None:
                raise _of_a_rank(f"{part}.{'.'.join(map(str, path))} differs", source.ranks[differs], source)


def _joined(source: RankFiles) -> RankFiles:
    """Return the files, of which the first has all names, each with the value of the first rank that has it."""
    trees = [source.tree(rank) for rank in source.ranks]
    values: dict[TreePath, Any] = {("model",): {}, ("optimizer",): None}
    groups: dict[Any, Any] = {}
    state: dict[Any, Any] = {}
    for tree in reversed(trees):
        values["model",] |= tree["model"]
        if isinstance(optimizer := tree.get("optimizer"), dict):
            state |= optimizer.get("state") or {}
            groups |= in_stages(optimizer.get("param_groups"), tree.get("stage") or 0)
            values["optimizer",] = {"state": state, "param_groups": groups}
    return source.of(0).replaced(values)


def _versions(source: RankFiles, directory: Path) -> Versions | None:
    """Return the versions of the modules that any rank had; None if the snapshot has none."""
    found = [versions_in(source.tree(rank)["extra"], ("model",), directory.name) for rank in source.ranks]
    known = [one for one in found if one is not None]
    return {name: of for one in known for name, of in one.items()} if known else None


def _first_other(values: Iterable[Any]) -> int | None:
    """Return the number of the first value that differs from an earlier one at the same place of the whole."""
    seen: dict[Region, torch.Tensor] = {}
    for number, value in enumerate(values):
        if (region := _region(value)) is not None and not same(seen.setdefault(region, value.data), value.data):
            return number
    return None


def _of_a_rank(what: str, rank: int, source: RankFiles) -> KindMismatch:
    return KindMismatch(
        f"The ranks of the emergency snapshot held values of their own ({what} between ranks {source.ranks[0]} and "
        f"{rank}), so only {len(source.ranks)} ranks can load it.",
        hint=f"Start with {len(source.ranks)} ranks.",
    )


def _snapshot(source: RankFiles, directory: Path) -> dict[str, Any]:
    """Return what the first file of ``source`` holds."""
    tree = source.tree()
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("model", "extra")):
        raise IntegrityError(f"A file of {directory.name} is not an emergency snapshot.")
    return {"optimizer": None, **tree}
