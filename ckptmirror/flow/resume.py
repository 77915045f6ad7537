"""Resume: one vote of all ranks on where training continues.

The leader knows the places and proposes (``core.resumption`` orders the candidates); every rank checks its share of
the bytes before it votes; a no of any rank moves all ranks to the next copy of the same save, then to the next older
save.

Rules:
* Nothing is loaded before its checksums were verified, by the ranks together, on this disk.
* A place that does not answer is not broken: where it may hold the step that cannot be used from elsewhere, the start
  fails with a temporary error, and does not go back to an older save.
* A requested step that is missing is an error on every rank; starting at 0 is a decision (``check_fresh_start``).
* The attempt is announced on the mirrors before anything is listed, and its parent is written after the load.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmirror.core import events
from ckptmirror.core.errors import (
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    KindMismatch,
    StoreTemporary,
    Temporary,
)
from ckptmirror.core.lineage import Lineage, SaveFacts, lineage
from ckptmirror.core.model import Attempt, Kind, Meta, SaveRef
from ckptmirror.core.resumption import DISK, Candidate, candidates, check_fresh_start, check_scratch
from ckptmirror.flow.catalog import Catalog, local_catalog, mirror_catalog
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.flow.node import Node
from ckptmirror.flow.reconcile import add_missing_records
from ckptmirror.flow.stage import stage_save
from ckptmirror.local.checksums import verify_file
from ckptmirror.ranks.base import Ranks

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["Policy", "ResumeInfo", "resume_run"]

_log = logging.getLogger("ckptmirror.resume")

Policy = str | int


@dataclass(frozen=True)
class ResumeInfo:
    """Where training continues.

    Attributes:
        step: The step of the save that was loaded.
        kind: The kind that was loaded.
        place: ``"disk"`` or the URL of the mirror it was brought from.
        loaded: Parts of the state that were loaded.
        missing: Parts of the state that the save does not hold.
        passed_over: Newer saves and copies that could not be used, each with the reason.
    """

    step: int
    save_id: str
    kind: Kind
    place: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class _Proposal:
    """What the leader puts to the vote: a save that lies whole in the root, or a start from scratch (no meta)."""

    run_id: str
    attempt: Attempt
    meta: Meta | None = None
    kind: Kind = "dcp"
    place: str = DISK
    passed_over: tuple[str, ...] = ()


@dataclass
class _Places:
    """Everything the leader sees: the catalogs of the disk and of the mirrors that answered."""

    disk: Catalog
    mirrors: dict[str, Catalog]
    silent: dict[str, str] = field(default_factory=dict)

    def metas(self) -> dict[tuple[str, Kind], dict[str, Meta]]:
        """For each save id and kind: the meta by place, best place first."""
        found: dict[tuple[str, Kind], dict[str, Meta]] = {}
        for place, catalog in ((DISK, self.disk), *self.mirrors.items()):
            for meta in catalog.saves.values():
                for kind in meta.kinds:
                    found.setdefault((meta.save_id, kind), {})[place] = meta
        return found

    def order(self, attempts: Sequence[Attempt]) -> Lineage:
        """The lineage of all places together."""
        facts: dict[str, SaveFacts] = {}
        for (save_id, kind), metas in self.metas().items():
            meta = next(iter(metas.values()))
            kinds = facts[save_id].kinds if save_id in facts else ()
            facts[save_id] = SaveFacts(
                save_id=save_id, attempt=meta.attempt.id, number=meta.save_number, step=meta.step, kinds=(*kinds, kind)
            )
        return lineage([attempt for attempt in attempts if attempt.decided], list(facts.values()))

    def problems(self) -> dict[str, str]:
        """Everything that looks like a save and is not, by place and name."""
        problems = {f"{self.disk.place}/{name}": why for name, why in self.disk.problems.items()}
        for url, catalog in self.mirrors.items():
            problems |= {f"{url}/{name}": why for name, why in catalog.problems.items()}
        return problems


class _Proposer:
    """The leader's part: proposes one copy after the other."""

    def __init__(self, node: Node, policy: Policy, force: bool, bus: events.EventBus) -> None:
        self._node = node
        self._bus = bus
        self._policy = policy
        self._force = force
        self._passed_over: list[str] = []
        self._unseen: tuple[int, Temporary] | None = None  # a step that may be whole in a place that does not answer
        self._claim = node.start_claim()
        self._places = self._look()
        self._metas = self._places.metas()
        self._order = self._places.order(self._claim.attempts.attempts)
        self._queue = self._plan()

    def _look(self) -> _Places:
        places = _Places(local_catalog(self._node.root), {})
        for mirror in self._node.mirrors:
            if mirror.url in self._claim.unclaimed:
                places.silent[mirror.url] = self._claim.unclaimed[mirror.url]
                continue
            try:
                places.mirrors[mirror.url] = mirror_catalog(mirror)
            except Temporary as error:
                places.silent[mirror.url] = str(error)
        return places

    def _plan(self) -> list[tuple[Candidate, str]]:
        if self._policy == "scratch":
            if not self._force:
                check_scratch(self._order, self._places.problems())
            return []
        reference = None if self._policy == "auto" else self._policy
        where = {key: list(metas) for key, metas in self._metas.items()}
        try:
            found = candidates(self._order, where, reference)
            if reference is not None and not found:
                raise CheckpointNotFound(f"There is no whole save {reference!r}.")
        except CheckpointNotFound as error:
            if self._places.silent:
                raise self._not_answering(f"{error.message} It may be there: ") from error
            raise
        return [(candidate, place) for candidate in found for place in candidate.places]

    def next(self) -> _Proposal:
        """Bring the next copy to this disk and propose it, or propose a start from scratch.

        Raises:
            Temporary: What is left cannot be seen now.
            RefusedOnlyCopy: There are saves, and none can be resumed.
        """
        while self._queue:
            candidate, place = self._queue.pop(0)
            if self._unseen is not None and candidate.save.step != self._unseen[0]:
                raise self._unseen[1]
            meta = self._metas[(candidate.save.save_id, candidate.kind)][place]
            try:
                if place != DISK:
                    meta = self._bring(place, meta, candidate.kind)
            except Temporary as error:
                self._unseen = (meta.step, error)
                self._note(meta, place, f"cannot be brought now: {error}")
                continue
            except (IntegrityError, KindMismatch) as error:
                self._pass_over(meta, candidate.kind, place, str(error))
                continue
            return _Proposal(
                self._claim.run_id, self._claim.attempt, meta, candidate.kind, place, tuple(self._passed_over)
            )
        if self._unseen is not None:
            raise self._unseen[1]
        if self._policy not in ("auto", "scratch"):
            raise IntegrityError(f"No copy of {self._policy!r} could be loaded: " + "; ".join(self._passed_over))
        if self._policy == "auto":
            silent = [m.url for m in self._node.mirrors if m.required and m.url in self._places.silent]
            problems = self._places.problems() | {f"copy {n}": why for n, why in enumerate(self._passed_over)}
            check_fresh_start(
                self._order, decided_scratch=self._decided_scratch(), silent_required=silent, problems=problems
            )
        return _Proposal(self._claim.run_id, self._claim.attempt)

    def reject(self, proposal: _Proposal, reason: str) -> None:
        """Note that a copy could not be used."""
        if proposal.meta is not None:
            self._pass_over(proposal.meta, proposal.kind, proposal.place, reason)

    def _pass_over(self, meta: Meta, kind: Kind, place: str, reason: str) -> None:
        self._note(meta, place, reason)
        required = {mirror.url for mirror in self._node.mirrors if mirror.required}
        if kind != "emergency" and required & self._places.silent.keys() and self._unseen is None:
            # Going back further could lose training that a mirror holds safe.
            self._unseen = (meta.step, self._not_answering(f"The copy of step {meta.step} is broken ({reason}). "))

    def _not_answering(self, why: str) -> StoreTemporary:
        silent = "; ".join(f"{url} does not answer ({reason})" for url, reason in self._places.silent.items())
        return StoreTemporary(
            f"{why}{silent}.", hint="Start again when it answers, or name an older save with policy=<step>."
        )

    def _note(self, meta: Meta, place: str, reason: str) -> None:
        line = f"step {meta.step} (save {meta.save_id[:8]}, {place}): {reason}"
        _log.error("passed over %s", line)
        self._bus.emit(events.CopyBroken(step=meta.step, save_id=meta.save_id, place=place, reason=reason))
        self._passed_over.append(line)

    def _bring(self, url: str, meta: Meta, kind: Kind) -> Meta:
        """Stage a save into the root; a broken local copy of it steps aside for the mirror's."""
        mirror: Mirror = next(mirror for mirror in self._node.mirrors if mirror.url == url)
        staged = stage_save(mirror, meta, self._node.root, kinds=(kind,), full=True, repair=True, bus=self._bus)
        self._node.table.forget_save(meta.save_id)  # its records named the paths of the copy that stepped aside
        add_missing_records(self._node.table, self._node.mirrors, [staged])
        return staged

    def _decided_scratch(self) -> bool:
        """Whether the newest decided attempt's way ends at a recorded start from scratch."""
        by_id = {attempt.id: attempt for attempt in self._claim.known.attempts if attempt.decided}
        if not by_id:
            return False
        at = max(by_id.values(), key=lambda attempt: (attempt.number, attempt.id))
        while at.parent is not None:
            if at.parent.attempt not in by_id:
                return False
            at = by_id[at.parent.attempt]
        return True


def resume_run(
    root: Path,
    ranks: Ranks,
    node: Node | None,
    state: TrainState,
    *,
    policy: Policy = "auto",
    force: bool = False,
    exclude: frozenset[str] = frozenset(),
    bus: events.EventBus,
) -> tuple[ResumeInfo | None, str, Attempt]:
    """Load the save that training continues from, on every rank.

    Args:
        node: Set on the leader.
        policy: ``"auto"``; ``"scratch"`` (``force`` where there are saves); a step; ``"latest"``; or a save id.

    Returns:
        What was loaded (None: training starts from scratch), the run's id, and this attempt, decided.

    Raises:
        CheckpointNotFound: The requested save is not there.
        RefusedOnlyCopy: There are saves and none can be resumed.
        StoreTemporary: A required mirror does not answer and there is nothing on the disk.
    """
    proposer: _Proposer | None = None
    failure: BaseException | None = None
    if node is not None:
        try:
            proposer = _Proposer(node, policy, force, bus)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
    ranks.exchange(None, what="claim the run", error=failure)
    while True:
        proposal = _propose(ranks, proposer)
        if proposal.meta is None:
            attempt = _decide(ranks, node, None)
            return None, proposal.run_id, attempt
        reason = _verify_and_load(root, ranks, proposal, state, exclude)
        if isinstance(reason, str):
            if proposer is not None:
                proposer.reject(proposal, reason)
            continue
        attempt = _decide(ranks, node, proposal.meta.ref)
        return _info(proposal, reason), proposal.run_id, attempt


def _propose(ranks: Ranks, proposer: _Proposer | None) -> _Proposal:
    proposal: _Proposal | None = None
    failure: BaseException | None = None
    if proposer is not None:
        try:
            proposal = proposer.next()
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
    proposals = [given for given in ranks.exchange(proposal, what="propose a save", error=failure) if given is not None]
    return proposals[0]


def _verify_and_load(
    root: Path, ranks: Ranks, proposal: _Proposal, state: TrainState, exclude: frozenset[str]
) -> LoadReport | str:
    """Vote on the bytes, load, vote on the load. Text says why this copy cannot be used; other errors are raised."""
    assert proposal.meta is not None
    votes = ranks.exchange(_check_share(root, ranks, proposal.meta, proposal.kind), what="vote on a save")
    reasons = [vote for vote in votes if vote is not None]
    if reasons:
        return reasons[0]
    report: LoadReport | None = None
    reason: str | None = None
    failure: BaseException | None = None
    try:
        report = load_kind(root, proposal.meta, proposal.kind, state, ranks, exclude)
    except (IntegrityError, KindMismatch, FileNotFoundError) as error:
        reason = f"rank {ranks.rank}: {error}"
    except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
        failure = error
    reasons = [vote for vote in ranks.exchange(reason, what="load a save", error=failure) if vote is not None]
    if reasons:
        return reasons[0]
    assert report is not None
    return report


def _check_share(root: Path, ranks: Ranks, meta: Meta, kind: Kind) -> str | None:
    """Verify every n-th artifact of the kind; together the ranks of a node verify them all."""
    mine = meta.artifacts_of(kind)[ranks.local_rank :: ranks.local_world_size]
    for artifact in mine:
        try:
            verify_file(root / artifact.path, artifact.digest)
        except (OSError, CkptMirrorError) as error:
            return f"rank {ranks.rank}: {error}"
    return None


def load_kind(
    root: Path, meta: Meta, kind: Kind, state: TrainState, ranks: Ranks, exclude: frozenset[str]
) -> LoadReport:
    """Load one kind of a save that lies verified in ``root`` into the state, sidecars included."""
    from ckptmirror.formats import get_format
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.sidecars import load_sidecars

    arguments: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.world_size, "exclude": exclude}
    tensors = get_format(kind).load(root, meta, state, torch_group=ranks.torch_group, **arguments)
    if kind == "emergency":
        return tensors  # its files hold everything
    sidecars = load_sidecars(root, meta, state, **arguments)
    return LoadReport(meta.step, tensors.loaded + sidecars.loaded, tensors.missing + sidecars.missing)


def _decide(ranks: Ranks, node: Node | None, parent: SaveRef | None) -> Attempt:
    attempt: Attempt | None = None
    failure: BaseException | None = None
    if node is not None:
        try:
            node.decide(parent)
            attempt = node.claim.attempt if node.claim is not None else None
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
    decided = [
        given for given in ranks.exchange(attempt, what="decide the attempt", error=failure) if given is not None
    ]
    return decided[0]


def _info(proposal: _Proposal, report: LoadReport) -> ResumeInfo:
    assert proposal.meta is not None
    for part in report.missing:
        _log.warning("step %d holds no %s", report.step, part)
    return ResumeInfo(
        step=proposal.meta.step,
        save_id=proposal.meta.save_id,
        kind=proposal.kind,
        place=proposal.place,
        loaded=report.loaded,
        missing=report.missing,
        passed_over=proposal.passed_over,
    )
