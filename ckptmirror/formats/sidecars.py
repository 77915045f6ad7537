"""The files beside every kind: ``extra_*`` (everything else that a resume needs) and ``tensors_*`` (for comparison).

Rules:
* Each rank writes its own pair once per save, whatever the kinds.
* Random generators and the data position belong to a rank. A rank that the save did not have keeps its own, and reports
  that; with fewer ranks, the positions of the missing ranks are reported. Everything else (scheduler, scaler, EMA, the
  user's extra) is shared: a new rank takes rank 0's. If the ranks' extras differed, that is reported.
* Positions and values that can be merged (``formats.merging``) are: then no rank is new, and none is missing.
* All parts of a load share one record of the memory that already has its values, since several parts may own the same
  memory.
* A part that the save lacks, or that the live state lacks, is reported and logged, never skipped silently.
* A scheduler writes its rate into the optimizer's groups at each step, usually by scaling the current rate. So an
  optimizer that was not loaded gets the rates of its scheduler that was; one that was loaded keeps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core import per_rank
from ckptmirror.core.containers import TreePath, any_leaf, item_at, leaves, place, placed_leaves
from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.formats.already_filled import Taken, same
from ckptmirror.formats.artifacts import write_json, write_pt
from ckptmirror.formats.base import LoadReport, LoadTarget, Missing, Snapshot, WriteContext
from ckptmirror.formats.capture import HAS_OPTIMIZER, walk_tensors
from ckptmirror.formats.extra_aliases import KEY as ALIASES
from ckptmirror.formats.live_sums import fingerprints_of
from ckptmirror.formats.merging import merged, merged_keys, merges
from ckptmirror.formats.names import live_values, some
from ckptmirror.formats.optimizer_state import optimizers_of
from ckptmirror.formats.rank_files import RankFiles, rank_files
from ckptmirror.formats.restore import Restorer
from ckptmirror.formats.rng import load_rng
from ckptmirror.formats.shards import Piece, cut, piece_of
from ckptmirror.formats.state_tree import has_position, state_of, warn_left_alone
from ckptmirror.formats.tensor_bytes import has_plain_bytes
from ckptmirror.sums.digests import digest32

__all__ = [
    "TENSORS_FORMAT",
    "extra_files_read",
    "extra_tree",
    "load_extra",
    "load_sidecars",
    "merge_extra",
    "rank_extras",
    "ranks_read",
    "tensor_list",
    "write_sidecars",
]

TENSORS_FORMAT = "ckptmirror-tensors"


def write_sidecars(
    snapshot: Snapshot, context: WriteContext, listed: Mapping[str, Any] | None = None
) -> tuple[list[Artifact], list[dict[str, Any]]]:
    """Write and seal this rank's ``extra_*`` and ``tensors_*`` files, which all kinds of the save share.

    Args:
        snapshot: What this rank saves.
        context: Where.
        listed: What :func:`tensor_list` returned; it is called if nothing is passed.

    Returns:
        The artifacts, and the entries of ``tensors_*``.
    """
    extra, tensors = context.name.extra(context.rank), context.name.tensors(context.rank)
    if listed is None:
        listed = tensor_list(snapshot, rank=context.rank, world_size=context.world_size)
    digests = {
        extra: write_pt(cut(snapshot.extra), context.root / extra, save_id=context.save_id),
        tensors: write_json(listed, context.root / tensors, save_id=context.save_id),
    }
    written = [Artifact(path=p, kinds=context.kinds, rank=context.rank, digest=d) for p, d in digests.items()]
    return written, listed["tensors"]


def tensor_list(snapshot: Snapshot, *, rank: int, world_size: int, sums: bool = True) -> dict[str, Any]:
    """Return the contents of ``tensors_*.json``: shape, dtype, place and checksums of each of this rank's tensors.

    ``sum32`` adds up over the pieces of a tensor (see ``sums.digests.digest32``), and so does ``fingerprint``;
    ``crc32c`` is that of the piece. ``per_rank`` marks what each rank has of its own. The list holds nothing else, so
    that saves of equal tensors have equal files.

    Args:
        snapshot: What this rank saves.
        rank: This rank.
        world_size: The number of ranks.
        sums: Whether to list ``sum32`` and ``crc32c``; they read host memory.
    """
    parts = per_rank.with_own(snapshot.model, snapshot.optimizer, snapshot.extra)
    tensors = walk_tensors({**parts, "ema": snapshot.extra.get("ema")})
    entries = {name: _describe(name, tensor, sums) for name, tensor in tensors}
    for one in fingerprints_of(tensors):
        entries[one.name]["fingerprint"] = list(one.sums)
    own = [name for name, _ in walk_tensors(per_rank.only(parts, per_rank.names_in(snapshot.extra)))]
    if per_rank.names_in(snapshot.extra):  # and averages of these
        own += [name for name, one in entries.items() if name.startswith("ema.") and one.get("sizes") == one["shape"]]
    for name in own:
        entries[name]["per_rank"] = True
    return {
        "format": TENSORS_FORMAT,
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "sharded": snapshot.sharded,
        "tensors": list(entries.values()),
    }


def _describe(name: str, tensor: torch.Tensor, sums: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if not has_plain_bytes(tensor):
        return described
    piece = piece_of(tensor)
    described |= {"offsets": list(piece.region.offsets), "sizes": list(piece.region.sizes)}
    if sums:
        described["sum32"], described["crc32c"] = digest32(piece.data.cpu())
    return described


def load_sidecars(root: Path, meta: Meta, target: LoadTarget) -> LoadReport:
    """Load everything of ``meta``, whose files are in ``root``, but model and optimizer; on any number of ranks.

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        UsageError: An object does not take its saved state.
    """
    source = _extra_files(root, meta, target)
    if source is None:
        own = SaveName(meta.step, meta.tag).extra(target.rank)
        missing = Missing()
        missing.lacks("extra", f"{own}: nothing but model and optimizer can be loaded")
        return LoadReport(missing=tuple(missing))
    return load_extra(source, target, meta.step)


def extra_files_read(root: Path, meta: Meta, target: LoadTarget) -> set[str]:
    """Return the names of the ``extra_*`` files that :func:`load_sidecars` reads on a rank.

    What may be compared or joined with what other ranks had (shards, memory in two places, a changed number of ranks)
    counts as read from all of them.

    Args:
        root: The directory that has the rank's own file.
        meta: The save.
        target: Who loads.

    Raises:
        IntegrityError: Its own file is broken or hostile.
        FileNotFoundError: It is missing.
    """
    files = _extra_files(root, meta, target)
    ranks = ranks_read(files, meta, target) if files is not None else ()
    return {SaveName(meta.step, meta.tag).extra(rank) for rank in ranks}


def ranks_read(extras: RankFiles, meta: Meta, target: LoadTarget) -> set[int]:
    """Return the ranks whose extra state a rank reads; see :func:`extra_files_read`."""
    everyone = set(extras.ranks)
    if target.world_size != meta.world_size or target.rank not in everyone or _may_need_others(extras.tree()):
        return everyone
    if any_leaf((target.state.dataloader, target.state.extra), merges):
        return everyone
    if target.state.ema is None or "ema" in extras.tree():
        return {target.rank}
    try:  # an average that all ranks have alike is in the first rank's file alone
        return {target.rank, 0} if 0 in everyone and not _may_need_others(extras.tree(0)) else everyone
    except IntegrityError:  # it is not here, or the vote finds what is wrong with it
        return everyone


def _may_need_others(tree: Any) -> bool:
    return not isinstance(tree, dict) or bool(tree.get(ALIASES)) or any_leaf(tree, lambda leaf: isinstance(leaf, Piece))


def extra_tree(root: Path, meta: Meta, target: LoadTarget) -> Any:
    """Return what :func:`load_sidecars` loads from first; None if the save has no extra state."""
    source = _extra_files(root, meta, target)
    return source.tree() if source is not None else None


def rank_extras(root: Path, meta: Meta, target: LoadTarget) -> per_rank.RankExtras:
    """Return what the files of all ranks have, as far as it is read."""
    source = _extra_files(root, meta, target)
    if source is None:
        return per_rank.RankExtras(None, meta.world_size)
    return per_rank.RankExtras(
        source.tree(), meta.world_size, lambda: ((rank, source.tree(rank)) for rank in source.ranks)
    )


def merge_extra(root: Path, meta: Meta, target: LoadTarget) -> None:
    """Merge what :func:`load_sidecars` will load, where that is merged; it may raise what that would."""
    if (source := _extra_files(root, meta, target)) is not None:
        merged(source, target)


def _extra_files(root: Path, meta: Meta, target: LoadTarget) -> RankFiles | None:
    return rank_files(root, meta, SaveName(meta.step, meta.tag).extra, target.rank)


def load_extra(source: RankFiles, target: LoadTarget, step: int) -> LoadReport:
    """Load the extra state that ``source`` holds of each rank; its files must have this step."""
    loader = _Loader(source, target)
    if (saved := loader.tree.get("step")) != step:
        raise IntegrityError(f"The extra state is of step {saved}, not {step}.")
    for name in ("scheduler", "scaler", "ema", "dataloader", "extra"):
        loader.part(name)
    loader.rng()
    loader.learning_rates()
    return LoadReport(tuple(loader.loaded), tuple(loader.missing))


class _Loader:
    def __init__(self, source: RankFiles, target: LoadTarget) -> None:
        self.source, self.target, self.state = merged(source, target), target, target.state
        self.merged_keys = merged_keys(target)
        self.own = target.rank in source.ranks  # whether the save has this rank's own generators and data position
        self.tree = self._tree(None)
        self.loaded: list[str] = []
        self.missing = Missing()
        self.taken = Taken()
        self.taken.take(self.state.model, "the model")
        self.taken.take(optimizers_of(self.state.optimizer), "the optimizer")

    def _tree(self, rank: int | None) -> dict[str, Any]:
        tree = self.source.tree(rank)
        if not isinstance(tree, dict):
            raise IntegrityError("A file of extra state is not a dict.")
        return tree

    def part(self, name: str) -> None:
        target = getattr(self.state, name)
        if name in self.target.exclude:
            return
        if target is None:
            if self.tree.get(name):  # an empty state has nothing to load
                self.missing.unused(name)
            return
        if name == "dataloader":
            warn_left_alone(target)
        if name == "dataloader" and not any_leaf(target, has_position):
            if self.own and name in self.tree:
                self.missing.unused(name)
        elif name == "dataloader" and not self.own:
            self._take_merged_positions(target)
        elif name == "scaler" and self.tree.get(name) == {}:
            if state_of(target, name) == {}:
                return  # it is disabled here too
            self.missing.lacks(name, "state, it was disabled; it starts at its default")
        elif name == "scaler" and self.tree.get(name) and state_of(target, name) == {}:
            self.missing.unused(name)  # it is disabled here and would ignore the state
        elif name in self.tree or (name == "ema" and name in self._tree(0)):
            self._take(name, target)
            self.loaded.append(name)
            if name == "dataloader":
                self._count_positions()
            elif name == "extra":
                self._compare_ranks()
            elif name == "ema":
                self._tell_of_averages_of_others()
        else:
            self.missing.lacks(name)

    def _take(self, name: str, target: Any) -> None:
        here = [self.state.model, self.state.ema, self.state.extra]
        source = self.source if name in self.tree else self.source.of(0)
        restorer = Restorer(source, self.taken, here, self.missing)
        try:
            if name == "extra":
                self.taken.take(state_of(self.state.ema, "ema"), "the average")  # the extra may share memory with it
                restorer.restore_values(target, (name,), name)
            elif name == "dataloader":
                restorer.restore_objects(target, (name,), name, has_position)
            else:
                restorer.restore_objects(target, (name,), name)
        except RecursionError as error:
            raise UsageError(
                f"The saved {name} is nested too deep to be loaded from here, below what else this thread has called.",
                hint=f"Call sys.setrecursionlimit(n) first: it is {sys.getrecursionlimit()}.",
            ) from error

    def _take_merged_positions(self, target: Any) -> None:
        """Give this rank, which is new, the positions that were merged for it, and report the others."""
        for path, loader in placed_leaves(target):
            where = place(target, path, "dataloader")
            if merges(loader) and item_at(self.tree, ("dataloader", *path)) is not None:
                restorer = Restorer(self.source, self.taken, None, self.missing)
                restorer.restore_objects(loader, ("dataloader", *path), where, has_position)
                self.loaded += [] if "dataloader" in self.loaded else ["dataloader"]
            elif has_position(loader):
                self.missing.lacks(where, "position of this rank; it starts where it is")

    def _count_positions(self) -> None:
        unmerged = any_leaf(self.state.dataloader, lambda loader: has_position(loader) and not merges(loader))
        if unmerged and (dropped := self._dropped()):
            self.missing.say(
                f"dataloader: the positions of ranks {some(dropped)} of the save are dropped, as this job has no "
                "such ranks",
                "; what those ranks had read of the data is not known here",
            )

    def _tell_of_averages_of_others(self) -> None:
        """Report that averages of what each rank had of its own are those of another rank, or were not merged."""
        if not (names := per_rank.saved_names(self.tree)):
            return
        if "ema" not in self.tree:
            self.missing.say(
                f"ema: the save has rank 0's alone, and each rank had averages of its own of {some(names)}"
            )
        elif self.source.world_size != self.target.world_size:
            mine = self._unmerged_averages(self.tree)
            others = [self._unmerged_averages(self._tree(rank)) for rank in self.source.ranks]
            pairs = [(mine[path], leaf) for one in others for path, leaf in one.items() if path in mine]  # of its stage
            if any(not same(one, other, shards_alike=True) for one, other in pairs):
                of_all = live_values(self.state.model)
                called = {per_rank.name_of_average(path, names, of_all) for path in mine} - {""}
                what = f"averages of their own of {some(sorted(called))}" if called else "averages of their own"
                whose = "its own of then" if self.own else "those of another rank"
                self.missing.say(f"ema: the ranks of the save had {what}, which nothing merges; this one takes {whose}")

    def _unmerged_averages(self, tree: Mapping[str, Any]) -> dict[TreePath, Any]:
        leaves_there = placed_leaves(tree.get("ema"))
        return {path: leaf for path, leaf in leaves_there if ("ema", *path) not in self.target.merged}

    def _compare_ranks(self) -> None:
        """Report it if the number of ranks changed and the ranks of the save had different values in extra."""
        first, *others = self.source.ranks
        if not self.own and any(self._differs(first, rank) for rank in others):
            self.missing.say(
                f"extra: the ranks of the save had different values; this rank is new and takes rank {first}'s"
            )
        if lost := [rank for rank in self._dropped() if self._differs(first, rank)]:
            self.missing.say(
                f"extra: the values of ranks {some(lost)} of the save, which differ from rank {first}'s, are dropped, "
                "as this job has no such ranks"
            )

    def _differs(self, one: int, other: int) -> bool:
        return not same(self._unmerged(one), self._unmerged(other), shards_alike=True)

    def _unmerged(self, rank: int) -> Any:
        extra = self._tree(rank).get("extra")
        return {k: v for k, v in extra.items() if k not in self.merged_keys} if isinstance(extra, dict) else extra

    def _dropped(self) -> list[int]:
        return [rank for rank in self.source.ranks if rank >= self.target.world_size]

    def rng(self) -> None:
        if "rng" in self.target.exclude:
            return
        if not self.own:
            self.missing.lacks("rng", "random generators of this rank; they stay as they are")
            return
        absent = load_rng(self.source.full_value(("rng",)))
        self.loaded.append("rng")
        for name in absent:
            self.missing.say(f"rng.{name}: the save has it, this process has not")

    def learning_rates(self) -> None:
        """Set the rates of each optimizer that was not loaded to those that its scheduler, which was, last set."""
        loaded = []
        if "optimizer" not in self.target.exclude and self.tree.get(HAS_OPTIMIZER, True):
            loaded = optimizers_of(self.state.optimizer)
        for one in leaves(self.state.scheduler) if "scheduler" in self.loaded else ():
            optimizer, rates = getattr(one, "optimizer", None), getattr(one, "_last_lr", None)
            groups = getattr(optimizer, "param_groups", None)
            if not isinstance(groups, list) or not isinstance(rates, (list, tuple)) or len(groups) != len(rates):
                continue
            try:
                was, now = [float(group["lr"]) for group in groups], list(map(float, rates))
            except (KeyError, TypeError, ValueError):  # rates of a type of the user's own
                continue
            if was == now or any(optimizer is other for other in loaded) or self.taken.knows(optimizer):
                continue
            for group, rate in zip(groups, now, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            before, after = (", ".join(f"{rate:g}" for rate in each) for each in (was, now))
            self.missing.say(
                f"optimizer: it was not loaded, its learning rate is set from {before} to {after}, as the loaded "
                "scheduler has it"
            )
