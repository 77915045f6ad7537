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

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core import names
from ckptmirror.core.containers import TreePath, placed_leaves
from ckptmirror.core.errors import IntegrityError, KindMismatch, UsageError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.per_rank import KEY, RankExtras, recorded, saved_names, with_record
from ckptmirror.core.regions import Region
from ckptmirror.formats.already_filled import same
from ckptmirror.formats.artifacts import write_json, write_pt
from ckptmirror.formats.base import LoadReport, LoadTarget, Snapshot, WriteContext
from ckptmirror.formats.capture import capture_local
from ckptmirror.formats.load_model import plan_model
from ckptmirror.formats.load_parts import OwnValues, load_parts
from ckptmirror.formats.merging import merged
from ckptmirror.formats.model import full_optimizer
from ckptmirror.formats.names import live_parameters, live_values, match_names
from ckptmirror.formats.rank_files import RankFiles, rank_files
from ckptmirror.formats.shards import Piece, cut, region_of
from ckptmirror.formats.sidecars import load_extra, ranks_read, tensor_list
from ckptmirror.formats.stages import check_patterns, in_stages
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
        module = target.state.model
        saved = _snapshot(source, directory)
        shared = _pieces(source, directory, target) if saved.get("sharded") is True else source.of(0)
        tree = _snapshot(shared, directory)

        def model(own: OwnValues) -> Callable[[], Mapping[str, torch.dtype]]:
            if shared is not source:  # else only this rank's names are here
                check_patterns(tree["model"], live_values(module), target.elsewhere, target.rules)
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
            extra=_rank_extras(source, directory),
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
    renamed = target.rules.renamed
    saved: dict[Hashable, Region | None] = {renamed(name): _region(value) for name, value in tree["model"].items()}
    if saved.keys() != live.keys() or any(saved[name] != region for name, region in own.items()):
        return False
    if _asks_for_all_stages(tree, target):
        return False
    state = placed_leaves(optimizer.get("state")) if isinstance(optimizer, dict) else ()
    return all(own.get(renamed(str(path[0]))) == leaf.region for path, leaf in state if isinstance(leaf, Piece))


def _asks_for_all_stages(tree: Mapping[str, Any], target: LoadTarget) -> bool:
    """Whether there are patterns for the names of all stages of a save, and the job may have no stages any more."""
    has_patterns = bool(target.rules.exclude or target.rules.rename)
    return has_patterns and tree.get("stage") is not None and not target.elsewhere


def _pieces(source: RankFiles, directory: Path, target: LoadTarget) -> RankFiles:
    """Return files in pieces, of which the first has all that a rank needs.

    On the same number of ranks it has what the rank had itself, and from others only what that lacks.

    Raises:
        IntegrityError: A file is broken or hostile.
        KindMismatch: Ranks held values of their own of what is joined, and nothing merges them.
    """
    live = live_values(target.state.model)

    def live_names(saved: Iterable[str]) -> dict[str, str]:
        new = {name: target.rules.renamed(name) for name in saved}
        matched = match_names(new.values(), [*live, *target.elsewhere])
        return {name: matched[there] for name, there in new.items()}

    is_same = source.world_size == target.world_size
    first = _snapshot(source, directory)
    own = live_names(first["model"]) if is_same else {}
    lacks = {name for name in live if not target.rules.leaves(name)}.difference(own.values())
    if not (lacks or _asks_for_all_stages(first, target)):
        return source
    trees = [_snapshot(source.of(rank), directory) for rank in source.ranks]
    joined = {name for tree in trees for name in tree["model"]}
    if is_same:
        joined = {name for name, there in live_names(joined.difference(own)).items() if there in lacks}
    for tree in trees:  # of these, each rank has its own, or what load_parts merges
        joined -= saved_names(tree["extra"])
    _refuse_values_of_a_rank(source, target.state.model, joined, is_same=is_same)
    return _joined(source, own) if is_same else _joined(source.of(0), ())


def _region(value: Any) -> Region | None:
    """Return the region of a saved value of the model; None if it is no tensor."""
    return value.region if isinstance(value, Piece) else region_of(value) if isinstance(value, torch.Tensor) else None


def emergency_merge_extra(root: Path, meta: Meta, target: LoadTarget) -> None:
    """Merge what is merged of the extra state, as ``sidecars.merge_extra`` does."""
    merged(_source(root, meta, target)[0].below("extra"), target)


def _rank_extras(source: RankFiles, directory: Path) -> RankExtras:
    """Return the extra state of all ranks; of files in pieces, with all values that each rank has of its own."""

    def of_all() -> Iterator[tuple[int, Any]]:
        for rank in source.ranks:
            tree = _snapshot(source.of(rank), directory)
            is_apart = tree.get("sharded") is True and KEY in tree["extra"]
            yield rank, with_record(tree, rank) if is_apart else tree["extra"]

    return RankExtras(_snapshot(source, directory)["extra"], source.world_size, of_all)


def _source(root: Path, meta: Meta, target: LoadTarget) -> tuple[RankFiles, Path]:
    tops = {artifact.path.split("/")[0] for artifact in meta.artifacts_of("emergency") if "/" in artifact.path}
    if len(tops) != 1:
        raise IntegrityError(f"The meta names {len(tops)} directories of an emergency snapshot.")
    directory = root / tops.pop()
    source = rank_files(root, meta, lambda rank: f"{directory.name}/{names.emergency_files(rank)[0]}", target.rank)
    if source is None:
        raise IntegrityError(f"The meta names no file of {directory.name}.")
    return source, directory


def _refuse_values_of_a_rank(
    source: RankFiles, module: torch.nn.Module, joined: Collection[str], *, is_same: bool
) -> None:
    """Refuse to join what ranks held under some names if that would lose what one of them held.

    Args:
        source: The files.
        module: The live model, whose buffers may differ.
        joined: The names.
        is_same: Whether as many ranks load, so that each has its own groups.

    Raises:
        KindMismatch: Ranks hold other names, or different values under one name and at one place.
    """
    parameters = {name for name, _ in live_parameters(module)}
    for part in ("model", "optimizer"):
        at = 0 if part == "model" else 1

        def is_joined(path: TreePath, at: int = at) -> bool:
            name = path[at] if len(path) > at else None
            return name in joined if isinstance(name, str) else not is_same

        trees = (placed_leaves(source.tree(rank).get(part)) for rank in source.ranks)
        held = [{path: value for path, value in tree if is_joined(path)} for tree in trees]
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


def _joined(source: RankFiles, own: Container[str]) -> RankFiles:
    """Return the files, of which the first has all names: its own, and of each other that of the first that has it.

    Of the names ``own``, it has no state of an optimizer but its own.
    """
    trees = [source.tree(), *map(source.tree, source.ranks)]
    values: dict[TreePath, Any] = {("model",): {}, ("optimizer",): None}
    groups: dict[Any, Any] = {}
    state: dict[Any, Any] = {}
    for tree in reversed(trees):
        values["model",] |= tree["model"]
        if isinstance(optimizer := tree.get("optimizer"), dict):
            held = optimizer.get("state") or {}
            state |= held if tree is trees[0] else {name: held[name] for name in held if name not in own}
            groups |= in_stages(optimizer.get("param_groups"), tree.get("stage") or 0)
            values["optimizer",] = {"state": state, "param_groups": groups}
    return source.replaced(values)


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
        f"{rank}), so only {len(source.ranks)} ranks with the parameters that each had can load it.",
        hint=f"Start with {len(source.ranks)} ranks, and build the model of each as it was.",
    )


def _snapshot(source: RankFiles, directory: Path) -> dict[str, Any]:
    """Return what the first file of ``source`` holds."""
    tree = source.tree()
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("model", "extra")):
        raise IntegrityError(f"A file of {directory.name} is not an emergency snapshot.")
    return {"optimizer": None, **tree}
