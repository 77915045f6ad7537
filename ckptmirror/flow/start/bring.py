"""What a start may continue from: the leader looks at every place, and proposes one copy after the other.

The order is decided by ``core.resumption``, what there is by ``survey``; here is how a copy comes to this disk.

Rules:
* Nothing is listed before this attempt is announced on the mirrors.
* A place that does not answer is not broken, nor is what cannot be read now. Going back to an older save then could
  lose training, so that is an error which may pass; a mirror that does not answer at all is passed by only if the disk
  has the save.
* What is newer than the save that is proposed, and cannot be used, is in the log and in ``passed_over``, always.
* Saves of another run are never candidates, and never nothing: they forbid a start at step 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from ckptmirror.core import events
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    LocalStorageFull,
    StoreTemporary,
)
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Attempt, Kind, Meta, new_id
from ckptmirror.core.resumption import (
    DISK,
    Candidate,
    Problem,
    candidates,
    check_fresh_start,
    check_passed_by,
    check_scratch,
    first_in_line,
    need_every_mirror,
    not_readable,
    passed_by,
    strangers,
)
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.fetch.stage_progress import OnProgress
from ckptmirror.flow.places.mirrors import Mirror, counting, counting_rows
from ckptmirror.flow.retention.reconcile import BRINGING_NAME, add_missing_records
from ckptmirror.flow.save.persistent_dir import bring_snapshot
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.policy import Policy, settled_policy
from ckptmirror.flow.start.survey import look_everywhere
from ckptmirror.local import files
from ckptmirror.local.saying import saying

__all__ = ["Proposal", "Proposer"]

_log = logging.getLogger("ckptmirror.resume")


@dataclass(frozen=True)
class Proposal:
    """What the leader puts to the vote: a save that lies whole in the root, or a start from scratch (no meta)."""

    run_id: str
    attempt: Attempt
    meta: Meta | None = None
    kind: Kind = "dcp"
    place: str = DISK
    passed_over: tuple[str, ...] = ()


class Proposer:
    """Proposes one copy after the other, on the leader."""

    def __init__(
        self,
        node: Node,
        policy: Policy,
        force: bool,
        bus: events.EventBus,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._node = node
        self._bus = bus
        self._on_progress = on_progress
        self._policy, self._kind = settled_policy(node.root, policy)
        self._force = force
        self._passed_over: list[str] = []  # copies that were tried
        self._not_seen: list[str] = []  # no copies, so not among what forbids a start from scratch
        self._unseen: tuple[str, CkptMirrorError] | None = None  # a save that may be whole, and cannot be seen now
        self._made_room = False
        self._only: str | None = None  # the one save that may still be loaded, once the state was touched
        self._claim = node.start_claim()
        self._places = look_everywhere(node.root, node.mirrors, self._claim, node.persistent)
        self._places.learn_save_ids(node.table)
        self._metas = self._places.metas()
        self._order = self._places.order(self._claim.attempts.attempts)
        self._strangers = strangers(self._order, self._claim.known.attempts)
        self._silent_asked = {url: self._places.silent[url] for url in self._asked() if url in self._places.silent}
        self._silent_asked |= self._dropped()
        self._first_in_line = self._problems_in_line()
        self._need_every_mirror: frozenset[str] = frozenset()
        self._queue = self._plan()
        for url, reason in self._places.silent.items():
            self._not_seen.append(f"{url} did not answer ({reason}): what it alone holds was not seen")
        if node.persistent_is_new and self._claim.known.attempts:
            self._say(f"{node.persistent_dir}, which was not there and was made: is a file system not mounted?")
        for line in self._claim.lost:
            _log.error("%s", line)
            self._not_seen.append(line)

    def _asked(self) -> Collection[str]:
        """The mirrors whose word is needed: the required ones; all, if none is required."""
        return counting([(mirror.url, mirror.required) for mirror in self._node.mirrors])

    def _dropped(self) -> dict[str, str]:
        """The mirrors that counted for the last start, that have saves, and that do not count or answer any more."""
        used = {record.mirror for record in self._node.table.records(state=RecordState.VERIFIED)}
        counted = set(counting_rows(self._node.table.mirrors()))
        dropped = (counted & used) - set(self._asked()) - self._places.mirrors.keys()
        for url in dropped - self._places.silent.keys():
            self._say(f"{url}, which this root was mirrored to and is not any more: what it alone holds was not seen")
        return {url: self._places.silent.get(url, "it is not configured any more") for url in dropped}

    def _problems_in_line(self) -> dict[str, Problem]:
        found = self._places.problems() | self._places.gone(self._node.table)
        optional = [url for url in self._places.mirrors if url not in self._asked()]
        for name in [name for name in found if any(name.startswith(f"{url}/") for url in optional)]:
            found[name] = replace(found[name], hindrance="")  # nothing waits for an optional mirror
        saves = {save.save_id: save for save in self._order.current.values()}
        saves |= {save.save_id: save for save in (*self._order.replaced, *self._order.superseded, *self._order.unknown)}
        decided = [attempt for attempt in self._claim.attempts.attempts if attempt.decided]
        return first_in_line(found, decided, saves.values())

    def _forbidding_step_0(self, *, decided_scratch: bool = False) -> dict[str, str]:
        """Everything that shows that there was training, and cannot be resumed from.

        Args:
            decided_scratch: Leave out, as with whole saves, what a recorded decision to start from scratch left behind.
        """
        places = self._places
        told = {attempt.id for attempt in self._claim.known.attempts if decided_scratch and attempt.decided}
        found = {
            name: problem
            for name, problem in places.problems().items()
            if name in self._first_in_line or problem.meta is None or problem.meta.attempt.id not in told
        }
        found |= places.remains() | places.gone(self._node.table, ever=True)
        return {name: str(problem) for name, problem in found.items()} | {
            f"step {save.step} (save {save.save_id[:8]})": f"no list tells of its attempt {save.attempt[:8]}"
            for save in self._strangers
        }

    def _plan(self) -> list[tuple[Candidate, str]]:
        if self._policy == "scratch":
            if not self._force:
                check_scratch(self._order, self._forbidding_step_0())
            return []
        reference = None if self._policy == "auto" else self._policy
        where = {key: list(metas) for key, metas in self._metas.items()}
        try:
            found = [one for one in candidates(self._order, where, reference) if self._kind in (None, one.kind)]
            if reference is not None and not found:
                raise CheckpointNotFound(f"There is no whole save {reference!r}.")
        except CheckpointNotFound as error:
            hindered = {name: one for name, one in self._first_in_line.items() if one.step == self._policy}
            check_passed_by(self._first_in_line if self._is_auto() else hindered, {})
            if self._places.silent:
                raise self._not_answering(f"{error.message} It may be there: ") from error
            raise
        if self._is_auto() and self._silent_asked:
            newest = next(iter(self._order.way), None)
            heard_of = (*self._claim.known.attempts, *self._claim.met.attempts)
            went_on_from = self._places.went_on_from(newest, self._claim.told_here, heard_of)
            self._need_every_mirror = need_every_mirror(found, went_on_from)
        return [(candidate, place) for candidate in found for place in candidate.places]

    def _is_auto(self) -> bool:
        """Whether no person named the save, so that going back is nobody's decision."""
        return self._policy in ("auto", "latest")

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
            if self._unseen is not None and candidate.save.save_id != self._unseen[0]:
                raise self._unseen[1]
            self._check_going_back(candidate)
            meta = self._metas[(candidate.save.save_id, candidate.kind)][place]
            try:
                if place != DISK:
                    meta = self._bring(place, meta, candidate.kind)
            except IntegrityError as error:
                self._pass_over(meta, candidate.kind, place, str(error))
                continue
            except LocalStorageFull as error:
                if self._made_room or not self._node.rotate().deleted:
                    self._unseen = self._unseen or (meta.save_id, error)
                    self._note(meta, place, f"cannot be brought now: {error}")
                else:
                    self._queue.insert(0, (candidate, place))
                self._made_room = True
                continue
            except CkptMirrorError as error:  # the copy may well be good: never a reason to go back to an older save
                self._unseen = self._unseen or (meta.save_id, error)
                self._note(meta, place, f"cannot be brought now: {error}")
                continue
            if candidate.save in self._strangers:  # named by its id: a person's decision
                self._claim.adopt(self._places.attempts_to(meta), self._node.mirrors)
            passed_over = (*self._not_seen, *self._passed_over, *self._unknown_from(meta))
            return Proposal(self._claim.run_id, self._claim.attempt, meta, candidate.kind, place, passed_over)
        return self._from_scratch()

    def _check_going_back(self, candidate: Candidate) -> None:
        """Check that nothing newer may be whole where it cannot be seen; say what newer things are not whole.

        Raises:
            Temporary: Something may be.
        """
        save = candidate.save
        if self._is_auto() or isinstance(self._policy, int):
            self._look_past(candidate)
        if save.save_id in self._need_every_mirror:
            what = "may have come from elsewhere" if DISK in candidate.places else "is not on this disk"
            raise self._not_answering(f"Step {save.step}, the newest that can be seen, {what}. ")
        if candidate.replaced_by:
            self._say(
                f"step {save.step} (save {candidate.replaced_by[:8]}): no copy in kind {candidate.kind} can be used; "
                f"save {save.save_id[:8]}, which it replaced, is tried"
            )

    def _look_past(self, candidate: Candidate | None) -> None:
        passed = passed_by(candidate, self._first_in_line)
        if not self._is_auto():  # a person named the step, and so decided about what is newer than that
            passed = {name: problem for name, problem in passed.items() if problem.step == self._policy}
        for name, problem in passed.items():
            if self._say(f"step {problem.step} ({name}): {problem.why}"):
                step = -1 if problem.step is None else problem.step
                self._bus.emit(
                    events.CopyBroken(step=step, save_id=problem.save_id, place=name, reason=str(problem.why))
                )
        check_passed_by(passed, self._silent_asked)

    def _say(self, line: str) -> bool:
        """Log what is passed over and is no copy that was tried, once; whether it is new."""
        if line in self._not_seen:
            return False
        _log.error("passed over %s", line)
        self._not_seen.append(line)
        return True

    def _unknown_from(self, chosen: Meta) -> list[str]:
        """Report the saves, as new as the chosen one, of which no list of attempts tells."""
        lines = []
        if self._policy == "auto":
            for save in self._order.superseded:
                if save.step > chosen.step and save.save_id in self._places.disk.saves:
                    saying(_log, save).warning(
                        "step %d (save %s) lies whole here and is superseded: a later attempt went on from an earlier "
                        "save. If that was not meant, stop it and run `ckptmirror rewind --root %s --save %s`.",
                        save.step,
                        save.save_id[:8],
                        quote(str(self._node.root)),
                        save.save_id[:8],
                    )
        for save in self._strangers:
            if save.step >= chosen.step and save.save_id != chosen.save_id:
                lines.append(
                    f"step {save.step} (save {save.save_id[:8]}): no list tells of its attempt {save.attempt[:8]} (an "
                    "older list was restored, or the attempt was never told); resume it by its save id, if it is right"
                )
                saying(_log, save).error("passed over %s", lines[-1])
        return lines

    def _from_scratch(self) -> Proposal:
        if self._unseen is not None:
            raise self._unseen[1]
        if self._only is not None or self._policy not in ("auto", "scratch"):
            asked = f"save {self._only[:8]}" if self._only is not None else repr(self._policy)
            raise IntegrityError(f"No copy of {asked} could be loaded: " + "; ".join(self._passed_over))
        if self._policy == "auto":
            newest = self._order.way[0] if self._order.way else None
            silent = [url for url in self._asked() if url in self._places.silent]
            if not silent:
                self._look_past(None)
            decided_scratch = bool(self._order.way) and self._order.complete
            tried = {f"copy {n}": why for n, why in enumerate(self._passed_over)}
            check_fresh_start(
                self._order,
                decided_scratch=decided_scratch,
                continued_from=newest.parent.step if newest is not None and newest.parent is not None else None,
                silent_required=silent,
                problems=self._forbidding_step_0(decided_scratch=decided_scratch) | tried,
            )
        return Proposal(self._claim.run_id, self._claim.attempt)

    def reject(self, proposal: Proposal, reason: str, *, touched: bool, unreadable: bool = False) -> None:
        """Note that a copy could not be used.

        Args:
            proposal: What was put to the vote.
            reason: Why it cannot be used.
            unreadable: An I/O error or a permission kept a rank from reading it: it may be whole, and only another copy
                of it may stand in, unless a person named the save.
            touched: Whether a rank had begun to load it: then only another copy of the same save makes the state whole
                again, and an older save would leave parts of this one in it.
        """
        if proposal.meta is None:
            return
        self._pass_over(proposal.meta, proposal.kind, proposal.place, reason)
        if unreadable and self._unseen is None and self._is_auto():
            self._unseen = (proposal.meta.save_id, not_readable(f"The copy of step {proposal.meta.step}", reason))
        if touched:
            self._only = proposal.meta.save_id

    def _pass_over(self, meta: Meta, kind: Kind, place: str, reason: str) -> None:
        self._note(meta, place, reason)
        if kind != "emergency" and self._silent_asked and self._unseen is None:
            # Going back further could lose training that a mirror holds safe.
            self._unseen = (meta.save_id, self._not_answering(f"The copy of step {meta.step} is broken ({reason}). "))

    def _not_answering(self, why: str) -> StoreTemporary:
        unseen = self._places.silent | self._silent_asked
        silent = "; ".join(f"{url} does not answer ({reason})" for url, reason in unseen.items())
        return StoreTemporary(
            f"{why}{silent}.", hint="Start again when it answers, or name an older save with policy=<step>."
        )

    def _note(self, meta: Meta, place: str, reason: str) -> None:
        line = f"step {meta.step} (save {meta.save_id[:8]}, {place}): {reason}"
        saying(_log, meta, event="CopyBroken").error("passed over %s", line)
        self._bus.emit(events.CopyBroken(step=meta.step, save_id=meta.save_id, place=place, reason=reason))
        self._passed_over.append(line)

    def _bring(self, url: str, meta: Meta, kind: Kind) -> Meta:
        """Stage a save, or copy a snapshot, into the root; a broken local copy of it steps aside for the mirror's.

        A note says what is being brought, so that a start that is killed here is continued by the next.

        Raises:
            IntegrityError: The mirror's copy is broken, or no longer whole.
        """
        if self._places.persistent is not None and url == self._places.persistent.place:
            bring_snapshot(self._node.root, Path(url), meta)
            return meta
        mirror: Mirror = next(mirror for mirror in self._node.mirrors if mirror.url == url)
        note = json.dumps({"save_id": meta.save_id}).encode()
        files.write_bytes(self._node.root / BRINGING_NAME, note, save_id=new_id(), replace=True)
        try:
            kinds = (kind,) if self._is_on_all_mirrors(meta) else meta.kinds
            staged = stage_save(
                mirror,
                meta,
                self._node.root,
                kinds=kinds,
                full=True,
                repair=True,
                on_progress=self._on_progress,
                bus=self._bus,
            )
        except CheckpointNotFound as error:
            raise BrokenMeta(f"{url} no longer has all of it: {error}") from error
        self._node.table.forget_save(meta.save_id)  # its records named the paths of the copy that stepped aside
        add_missing_records(self._node.table, self._node.mirrors, [staged], staged_everywhere=True)
        return staged

    def _is_on_all_mirrors(self, meta: Meta) -> bool:
        """Whether no mirror lacks the save; one that does is given it from the local copy, which must be all of it."""
        catalogs = self._places.mirrors
        return all(m.url in catalogs and meta.save_id in catalogs[m.url].saves for m in self._node.mirrors)
