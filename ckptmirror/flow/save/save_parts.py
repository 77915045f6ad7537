"""The values that the parts of a save pass to one another: the request, the host copy, the plan, the leader's side.

Rules:
* This file has the values and what follows from them alone; ``save.py`` uses them.
* Metrics and configuration that the caller passes beside the state are copied as plain values while the training waits.
  Later changes to them do not reach the meta.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmirror.core import per_rank, replica_agreement
from ckptmirror.core.errors import BrokenTable, CkptMirrorError, NoTable, RankFailed, RanksDiffer, UsageError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.core.plain_values import finite_metrics, plain_values
from ckptmirror.core.replica_agreement import Digests, Held
from ckptmirror.core.stages import NO_STAGES, Stages
from ckptmirror.core.tensor_lists import is_list
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.local.daemon_pool import begin_or_do
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.ranks.base import Ranks

if TYPE_CHECKING:
    from ckptmirror.formats.base import Snapshot, WriteContext
    from ckptmirror.formats.replica_sums import LeftOut
    from ckptmirror.formats.train_state import TrainState
    from ckptmirror.ranks.host_copy import HostCopier, Lease

__all__ = [
    "TABLE_BROKE",
    "Copied",
    "Holdings",
    "LeaderSide",
    "NotFiniteDetector",
    "Plan",
    "ReplicaCheck",
    "SaveMetadata",
    "SaveRequest",
    "StallDetector",
    "Written",
    "agreed_context",
    "holdings_of",
    "import_formats",
    "reserve_for",
    "write_files",
]

_ROOM_FOR_EXTRA_BYTES = 16 * 1024 * 1024
TABLE_BROKE = (BrokenTable, NoTable)
_log = logging.getLogger("ckptmirror.save")


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of ``save``, except the state."""

    step: int
    kinds: tuple[Kind, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0  # within the attempt; set by the saver, and the same on every rank once all begin the save


def _give_up(error: CkptMirrorError) -> None:
    raise error


def _ignore(*_: object) -> None:
    pass


@dataclass
class LeaderSide:
    """What only the node's leader has: the table, callbacks for its saves, and the function that rebuilds the table.

    And the steps of which a mirror had a plain name at the start.
    """

    table: UploadsTable
    mirrors: Sequence[MirrorSpec]
    fenced: Callable[[], str | None]
    on_commit: Callable[[Meta], None]
    recreate_table: Callable[[CkptMirrorError], None] = _give_up
    on_skipped: Callable[[int, str], None] = _ignore
    on_failed: Callable[[], None] = _ignore
    taken_steps: Collection[int] = ()


@dataclass(frozen=True)
class Holdings:
    """What a rank saves, to compare; "": unknown.

    Attributes:
        parameters: A hash of its parameters.
        optimizer: A hash of the parameters that its optimizer has state for.
        per_rank: The first name of what it has of its own, their number, and a hash of all of them.
    """

    parameters: str = ""
    optimizer: str = ""
    per_rank: str = ""


@dataclass(frozen=True)
class Plan:
    """What the ranks agree on before anything is written. Rank 0 also says the save id, and what all metas have."""

    step: int
    kinds: tuple[Kind, ...]
    number: int
    save_id: str
    free: bool
    holds: Holdings = Holdings()
    said: SaveMetadata | None = None
    is_cut: bool = False  # whether a collective failed on this rank, and this save needs one


def holdings_of(copied: object) -> Holdings:
    """Return the hashes of what a rank saves, to compare with the other ranks'."""
    if not isinstance(copied, Copied):
        return Holdings()
    own = per_rank.told(per_rank.names_in(copied.snapshot.extra))
    return Holdings(copied.snapshot.parameters, copied.snapshot.optimizer_holds, own)


def agreed_context(plans: Sequence[Plan], root: Path, ranks: Ranks, stages: Stages) -> WriteContext:
    """Return the context that all ranks write with: the save id of rank 0, the tag of the node's leader.

    Raises:
        RankFailed: The ranks do not plan the same save.
        RanksDiffer: The ranks have different models, or optimizers with state for different parameters, and only one
            rank's would be saved.
        UsageError: They declare different names with ``per_rank``.
    """
    from ckptmirror.formats.base import WriteContext

    rank, ours = ranks.rank, plans[ranks.rank]
    for other, theirs in enumerate(plans):
        if (theirs.step, theirs.kinds) != (ours.step, ours.kinds):
            raise RankFailed(
                f"Rank {other} saves step {theirs.step} {theirs.kinds}, while rank {rank} saves step {ours.step} "
                f"{ours.kinds}.",
                hint="Call save() with the same step and kinds on every rank. If a rank has left out a save, the ranks "
                "stay apart, and no later one succeeds: start the job again.",
            )
    if _differ([plan.holds.parameters for plan in plans], stages):
        raise RanksDiffer(
            "The ranks hold different models: the names, shapes or dtypes of their parameters differ. A model can be "
            "saved only if every rank holds all of it, or shards of it as DTensors, or if it is in stages.",
            hint="If each rank holds a part of one model, as a pipeline stage, create the manager with "
            'CheckpointManager(..., kinds=("dcp",), pp_rank=<number of the stage>).',
        )
    if _differ([plan.holds.optimizer for plan in plans], stages):
        raise RanksDiffer(
            "The optimizers of the ranks have state for different parameters, but an optimizer's state is saved once "
            "for all ranks.",
            hint='Pass this optimizer as TrainState(extra={"optimizer": …}): extra is saved for each rank. Or declare '
            'the parameters of which each rank has its own: TrainState(per_rank=("experts.*",)).',
        )
    first: dict[int | None, tuple[int, str]] = {}
    for other, own in enumerate(plan.holds.per_rank for plan in plans):
        one, its = first.setdefault(stages.of(other), (other, own))
        if own != its:
            raise UsageError(
                f"The ranks declare different names with per_rank: {its} on rank {one}, {own} on rank {other}.",
                hint="Create TrainState with the same per_rank, and the same model, on every rank.",
            )
    save_id = plans[0].save_id
    leader_of_node = plans[ranks.node_ranks[0]]
    return WriteContext(
        root=root,
        name=SaveName(ours.step, "" if leader_of_node.free else save_id[:8]),
        save_id=save_id,
        kinds=ours.kinds,
        rank=rank,
        world_size=ranks.world_size,
        is_leader=ranks.is_leader,
        torch_group=ranks.torch_group,
        nodes_of_ranks=ranks.nodes_of_ranks,
        stages=stages,
    )


def _differ(hashes: Sequence[str], stages: Stages) -> bool:
    """Whether ranks of one stage have different hashes, as far as these are known."""
    known = {(stages.of(rank), one) for rank, one in enumerate(hashes) if one}
    return len(known) > len({stage for stage, _ in known})


@dataclass(frozen=True)
class SaveMetadata:
    """Plain copies of the metrics and configuration that the caller passed beside the state."""

    metrics: Mapping[str, float]
    fields: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, request: SaveRequest, state: TrainState) -> SaveMetadata:
        """Copy them as plain values. Metrics that are not finite are left out, with a warning."""
        metrics, dropped = finite_metrics(request.metrics)
        if dropped:
            save_logger(_log, request).warning(
                "step %d: the metrics %s are not finite numbers and are left out", request.step, ", ".join(dropped)
            )
        return cls(metrics, plain_values(request.fields), plain_values(dict(state.training_config or {})))


@dataclass(frozen=True)
class Copied:
    """What the training thread passes to the background. Only the leader, which writes the meta, gets ``said``."""

    snapshot: Snapshot
    left_out: LeftOut
    lease: Lease
    said: SaveMetadata | None

    @classmethod
    def of(cls, live: Snapshot, copier: HostCopier, said: SaveMetadata | None) -> Copied:
        """Copy ``live`` to host memory."""
        from ckptmirror.formats.capture import snapshot_from_tree, snapshot_tree
        from ckptmirror.formats.replica_sums import sum_left_out

        lease = copier.copy({**snapshot_tree(live), "left_out": sum_left_out(live)})
        tree = dict(lease.tree)
        left_out = tree.pop("left_out")
        return cls(snapshot_from_tree(tree), left_out, lease, said)


@dataclass(frozen=True)
class Written:
    """What a rank wrote of a save.

    Attributes:
        artifacts: Its files.
        held: The tensors that it holds.
        listed: The crc32c of its list of tensors. None if it lists none, because rank 0 saves them for it.
    """

    artifacts: Sequence[Artifact] = ()
    held: Sequence[Held] = ()
    listed: int | None = None


def write_files(copied: Copied, context: WriteContext) -> Written:
    """Write and seal a rank's files, and sum its tensors meanwhile."""
    from ckptmirror.formats import get_format
    from ckptmirror.formats.replica_sums import held_by
    from ckptmirror.formats.sidecars import tensor_list, write_sidecars

    snapshot = copied.snapshot
    listing = begin_or_do(
        partial(tensor_list, snapshot, rank=context.rank, world_size=context.world_size), "ckptmirror-sums"
    )
    try:
        written = [artifact for kind in context.kinds for artifact in get_format(kind).write(snapshot, context)]
    finally:
        wait([listing])  # it reads the host copy, which is given back after a failure too
    sidecars, listed = write_sidecars(snapshot, context, listing.result())
    held = held_by(snapshot, listed, copied.left_out, context.kinds, context.stage)
    crc32c = next(one.digest.crc32c for one in sidecars if is_list(one.path)) if listed else None
    return Written([*written, *sidecars], held, crc32c)


class ReplicaCheck:
    """Compares what the ranks hold under the same names, at every save.

    Attributes:
        differ: Whether they held different values, or names, at the last save.
    """

    def __init__(self) -> None:
        self.differ = False
        self._told: set[str] = set()  # groups that differ, and may

    def compare(self, ranks: Ranks, held: Sequence[Held], digests: Sequence[Digests], context: WriteContext) -> None:
        """Compare what the ranks hold. Only if the digests differ, all ranks exchange once more.

        Args:
            ranks: The channel.
            held: The tensors that this rank holds.
            digests: Every rank's digests, by rank, on rank 0. Where there is one node, on every rank.
            context: The save's context.

        Raises:
            RanksDiffer: Parameters, or the optimizer's state, differ. Raised on every rank.
        """
        self.differ = False
        is_told = ranks.nodes > 1 and ranks.rank != 0
        asked = replica_agreement.representatives(digests, self._told) if not is_told else {}
        sides = {group: replica_agreement.sides(digests, group) for group in asked}
        if ranks.nodes > 1:
            what = f"learn whether the tensors of step {context.name.step} differ"
            asked, sides = ranks.exchange((asked, sides), what=what)[0]
        if not asked:
            return
        mine = [one for one in held if ranks.rank in asked.get(one.group, ())]
        lists = ranks.exchange(mine, what=f"compare the tensors of step {context.name.step}")
        found = replica_agreement.differing(lists)
        may_differ = list(filter(replica_agreement.may_differ, found))
        if names := [name for group in may_differ for name in found.pop(group)]:
            self._told.update(may_differ)
            if ranks.rank == 0:
                save_logger(_log, context.name).warning(
                    "the ranks hold different values of %s: this save and later ones keep rank 0's, because replicas "
                    "that train together continue from rank 0's. If each shall get back its own, declare the model's "
                    "names with TrainState(per_rank=...)",
                    _some(names),
                )
        if found:
            self.differ = True
            apart = next(sides[group] for group in found if sides[group])
            names = [name for group in found.values() for name in group]
            raise RanksDiffer(
                f"{_some(names)} {'have' if len(names) > 1 else 'has'} different values on "
                f"{replica_agreement.ranks_text(apart)}, and a checkpoint keeps one value under each name."
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class NotFiniteDetector:
    """Notices the first save of a row in which the model has NaN or infinity."""

    def __init__(self) -> None:
        self._before = False
        self._found: list[str] = []

    def look_at(self, snapshot: Snapshot) -> None:
        """Look for such tensors in what is being saved."""
        from ckptmirror.formats.not_finite import not_finite

        self._found = list(not_finite(snapshot))

    def committed(self) -> str:
        """Return the first names, now that it is saved; "" if there are none, or if the last save had some too."""
        is_new, self._before = bool(self._found) and not self._before, bool(self._found)
        return _some(self._found) if is_new else ""


class StallDetector:
    """Notices that training has stalled: two saves have the same tensors at different steps."""

    def __init__(self) -> None:
        self._previous: tuple[int, tuple[int, ...]] = (-1, ())  # step and sums of the last save's tensors
        self._sums: tuple[int, ...] = ()

    def look_at(self, listed: Iterable[int | None]) -> None:
        """Look at the ``listed`` of each rank of this node (:class:`Written`)."""
        self._sums = tuple(crc32c for crc32c in listed if crc32c is not None)

    def committed(self, meta: Meta) -> None:
        """Warn, now that it is saved, if this save has the same tensors as the previous one."""
        earlier, self._previous = self._previous, (meta.step, self._sums)
        if self._sums and earlier[1] == self._sums and earlier[0] != meta.step:
            save_logger(_log, meta).warning(
                "step %d has exactly the same tensors as the previous save: is the optimizer stepping?", meta.step
            )


def reserve_for(
    copier: HostCopier, kinds: Sequence[Kind], state: TrainState, ranks: Ranks, stages: Stages = NO_STAGES
) -> None:
    """Let ``copier`` allocate the memory for a save of ``state``; the size of the user's objects is estimated."""
    from ckptmirror.formats.capture import capture, capture_local, snapshot_tree

    state = replace(state, scheduler=None, scaler=None, dataloader=None, extra=None, merge_extra=None)
    live = capture_local(state, step=0, with_ema=ranks.rank == 0)
    if live.sharded and "model" in kinds:
        return  # only a capture on all ranks shows how much rank 0 gathers
    if not live.sharded:
        live = capture(state, step=0, kinds=kinds, rank=ranks.rank, world_size=ranks.world_size, stages=stages)
    copier.reserve(snapshot_tree(live), more_bytes=_ROOM_FOR_EXTRA_BYTES)


def import_formats(kinds: Sequence[Kind]) -> None:
    """Import the code that writes these kinds: once the interpreter is exiting, some imports fail."""
    from ckptmirror.formats import get_format, not_finite, replica_sums, sidecars  # noqa: F401
    from ckptmirror.ranks import host_copy  # noqa: F401

    for kind in kinds:
        get_format(kind)
