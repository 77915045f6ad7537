"""What a start may continue from: the leader looks at every place, and proposes one copy after the other.

The order is decided by ``core.resumption``; here are the places, and how a copy comes to this disk.

Rules:
* Nothing is listed before this attempt is announced on the mirrors.
* A copy on the disk counts only if it holds all that the save has of its kind: what ``stage`` brought for evaluation
  has no random numbers and no data position, and training does not continue from that.
* A place that does not answer is not broken. Going back to an older save while a place is silent could lose training,
  so that is an error which may pass; a mirror that does not answer at all is passed by only if the disk has the save.
* Saves of another run are never candidates.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    LocalStorageFull,
    NotAuthorised,
    StoreTemporary,
    Temporary,
)
from ckptmirror.core.lineage import Lineage, SaveFacts, lineage
from ckptmirror.core.model import Attempt, Kind, Meta
from ckptmirror.core.resumption import DISK, Candidate, candidates, check_fresh_start, check_scratch
from ckptmirror.flow.catalog import Catalog, local_catalog, mirror_catalog
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.flow.node import Node
from ckptmirror.flow.reconcile import BRINGING_NAME, add_missing_records
from ckptmirror.flow.stage import stage_save
from ckptmirror.local import files

__all__ = ["Policy", "Proposal", "Proposer"]

_log = logging.getLogger("ckptmirror.resume")

Policy = str | int


@dataclass(frozen=True)
class Proposal:
    """What the leader puts to the vote: a save that lies whole in the root, or a start from scratch (no meta)."""

    run_id: str
    attempt: Attempt
    meta: Meta | None = None
    kind: Kind = "dcp"
    place: str = DISK
    passed_over: tuple[str, ...] = ()


@dataclass
class Places:
    """Everything the leader sees: the catalogs of the disk and of the mirrors that answered."""

    run_id: str
    disk: Catalog
    mirrors: dict[str, Catalog] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)

    def metas(self) -> dict[tuple[str, Kind], dict[str, Meta]]:
        """For each save id and kind: the meta by place, best place first."""
        found: dict[tuple[str, Kind], dict[str, Meta]] = {}
        for place, catalog in ((DISK, self.disk), *self.mirrors.items()):
            for meta in catalog.saves.values():
                for kind in meta.kinds if meta.run_id == self.run_id else ():
                    if place != DISK or self._holds_all(meta, kind):
                        found.setdefault((meta.save_id, kind), {})[place] = meta
        return found

    def _holds_all(self, meta: Meta, kind: Kind) -> bool:
        """Whether a local copy has every file that a resume from this kind needs."""
        if meta.staged_from is None:
            return True
        mine = {names.untagged(artifact.path) for artifact in meta.artifacts_of(kind)}
        elsewhere = [there.saves[meta.save_id] for there in self.mirrors.values() if meta.save_id in there.saves]
        if elsewhere:
            return all({names.untagged(a.path) for a in other.artifacts_of(kind)} <= mine for other in elsewhere)
        name = names.SaveName(meta.step)
        needed = {name.extra(rank) for rank in range(meta.world_size)}
        return needed <= mine and (kind != "model" or name.optim(0) in mine)

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


class Proposer:
    """Proposes one copy after the other, on the leader."""

    def __init__(self, node: Node, policy: Policy, force: bool, bus: events.EventBus) -> None:
        self._node = node
        self._bus = bus
        self._policy = policy
        self._force = force
        self._passed_over: list[str] = []
        self._not_seen: list[str] = []  # no copy at all, so not among what forbids a start from scratch
        self._unseen: tuple[int, CkptMirrorError] | None = None  # a step that may be whole where nobody answers
        self._made_room = False
        self._only: str | None = None  # the one save that may still be loaded, once the state was touched
        self._claim = node.start_claim()
        self._places = self._look()
        self._metas = self._places.metas()
        self._order = self._places.order(self._claim.attempts.attempts)
        self._queue = self._plan()
        for url, reason in self._places.silent.items():
            self._not_seen.append(f"{url} did not answer ({reason}): what it alone holds was not seen")

    def _look(self) -> Places:
        places = Places(self._claim.run_id, local_catalog(self._node.root))
        for mirror in self._node.mirrors:
            if mirror.url in self._claim.unclaimed:
                places.silent[mirror.url] = self._claim.unclaimed[mirror.url]
                continue
            try:
                places.mirrors[mirror.url] = mirror_catalog(mirror)
            except (Temporary, NotAuthorised, BrokenMeta) as error:
                if mirror.required:  # it answered a moment ago: what it holds is asked for, not guessed
                    raise
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

    def next(self) -> Proposal:
        """Bring the next copy to this disk and propose it, or propose a start from scratch.

        Raises:
            Temporary: What is left cannot be seen now.
            RefusedOnlyCopy: There are saves, and none can be resumed.
        """
        while self._queue:
            candidate, place = self._queue.pop(0)
            if self._only not in (None, candidate.save.save_id):
                continue
            if self._unseen is not None and candidate.save.step != self._unseen[0]:
                raise self._unseen[1]
            meta = self._metas[(candidate.save.save_id, candidate.kind)][place]
            try:
                if place != DISK:
                    meta = self._bring(place, meta, candidate.kind)
            except IntegrityError as error:
                self._pass_over(meta, candidate.kind, place, str(error))
                continue
            except LocalStorageFull as error:
                if self._made_room or not self._node.rotate().deleted:
                    self._unseen = self._unseen or (meta.step, error)
                    self._note(meta, place, f"cannot be brought now: {error}")
                else:
                    self._queue.insert(0, (candidate, place))
                self._made_room = True
                continue
            except CkptMirrorError as error:  # the copy may well be good: never a reason to go back to an older save
                self._unseen = self._unseen or (meta.step, error)
                self._note(meta, place, f"cannot be brought now: {error}")
                continue
            passed_over = (*self._not_seen, *self._passed_over)
            return Proposal(self._claim.run_id, self._claim.attempt, meta, candidate.kind, place, passed_over)
        return self._from_scratch()

    def _from_scratch(self) -> Proposal:
        if self._unseen is not None:
            raise self._unseen[1]
        if self._only is not None or self._policy not in ("auto", "scratch"):
            asked = f"save {self._only[:8]}" if self._only is not None else repr(self._policy)
            raise IntegrityError(f"No copy of {asked} could be loaded: " + "; ".join(self._passed_over))
        if self._policy == "auto":
            asked_mirrors = [m for m in self._node.mirrors if m.required] or self._node.mirrors
            newest = self._order.way[0] if self._order.way else None
            check_fresh_start(
                self._order,
                decided_scratch=bool(self._order.way) and self._order.complete,
                continued_from=newest.parent.step if newest is not None and newest.parent is not None else None,
                silent_required=[m.url for m in asked_mirrors if m.url in self._places.silent],
                problems=self._places.problems() | {f"copy {n}": why for n, why in enumerate(self._passed_over)},
            )
        return Proposal(self._claim.run_id, self._claim.attempt)

    def reject(self, proposal: Proposal, reason: str, *, touched: bool) -> None:
        """Note that a copy could not be used.

        Args:
            proposal: What was put to the vote.
            reason: Why it cannot be used.
            touched: Whether a rank had begun to load it: then only another copy of the same save makes the state whole
                again, and an older save would leave parts of this one in it.
        """
        if proposal.meta is None:
            return
        self._pass_over(proposal.meta, proposal.kind, proposal.place, reason)
        if touched:
            self._only = proposal.meta.save_id

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
        """Stage a save into the root; a broken local copy of it steps aside for the mirror's.

        A note says what is being brought, so that a start that is killed here is continued by the next.

        Raises:
            IntegrityError: The mirror's copy is broken, or no longer whole.
        """
        mirror: Mirror = next(mirror for mirror in self._node.mirrors if mirror.url == url)
        note = json.dumps({"save_id": meta.save_id}).encode()
        files.write_bytes(self._node.root / BRINGING_NAME, note, save_id=meta.save_id, replace=True)
        try:
            kinds = (kind,) if self._is_on_all_mirrors(meta) else meta.kinds
            staged = stage_save(mirror, meta, self._node.root, kinds=kinds, full=True, repair=True, bus=self._bus)
        except CheckpointNotFound as error:
            raise BrokenMeta(f"{url} no longer has all of it: {error}") from error
        self._node.table.forget_save(meta.save_id)  # its records named the paths of the copy that stepped aside
        add_missing_records(self._node.table, self._node.mirrors, [staged], staged_everywhere=True)
        return staged

    def _is_on_all_mirrors(self, meta: Meta) -> bool:
        """Whether no mirror lacks the save; one that does is given it from the local copy, which must be all of it."""
        catalogs = self._places.mirrors
        return all(m.url in catalogs and meta.save_id in catalogs[m.url].saves for m in self._node.mirrors)
