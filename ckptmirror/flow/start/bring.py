"""Bring: the leader carries out the moves that ``core.start.decide`` chooses and reports each outcome.

Rules:
* Nothing is decided here, and nothing is written to a mirror before the claim.
* Everything that is skipped appears once in the log, in the events and in ``ResumeInfo.passed_over``.
* A note in the root names the save that is being brought. If this start is killed, the next one continues from there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    LocalStorageFull,
    RefusedOnlyCopy,
)
from ckptmirror.core.meta_merging import plain
from ckptmirror.core.model import Attempt, Kind, Meta, new_id
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.attempts import claim_from, count
from ckptmirror.core.start.decide import (
    MakeRoom,
    Move,
    Outcome,
    Refuse,
    Result,
    Scratch,
    Try,
    Wish,
    next_move,
    run_of,
    settled,
)
from ckptmirror.core.start.disks import Torn, never_whole, torn
from ckptmirror.core.start.evidence import ANYWHERE, DISK
from ckptmirror.core.start.explain import Notice, goes_on, with_root
from ckptmirror.core.start.mirror_places import Expected, expected_places
from ckptmirror.core.start.quarantine import quarantine_changes, why_quarantined
from ckptmirror.core.tensor_lists import is_proof
from ckptmirror.core.uncommitted import PartsThere, parts_there
from ckptmirror.flow.fetch.blocks import ObjectToRead, read_all
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.fetch.stage_progress import OnProgress
from ckptmirror.flow.places.catalog import MetaCache, local_catalog, objects_of
from ckptmirror.flow.retention.reconcile import forget_brought, note_brought, renew_records
from ckptmirror.flow.save.persistent_dir import bring_snapshot
from ckptmirror.flow.start.claim import RunClaim, StartOver
from ckptmirror.flow.start.disk_facts import DiskFacts, TakenNames
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.survey import Survey, survey
from ckptmirror.local.listing import is_not_readable_now
from ckptmirror.local.save_logger import save_logger

__all__ = ["Bringer", "Proposal", "keeps_part"]

_log = logging.getLogger("ckptmirror.resume")
_SEES_NOTHING: Mapping[str, str | None] = {}


@dataclass(frozen=True)
class Proposal:
    """What the ranks vote on: a save, or a start at step 0 (no meta).

    Attributes:
        meta: The save: in the root, where it is whole; or, where ``gathered``, under its plain names.
        sources: The mirrors that send what nodes lack, the best first, each with the save's meta there.
        kept: The persistent directory and the snapshot's meta there, from which its parts come to the disks first.
        share_downloads: Whether what several nodes lack is fetched from the mirror by one of them, as rank 0 has it.
        places: Which place each mirror is, by URL, as the job's leader found it: for the other nodes to compare.
        expected: The places that nodes see for mirrors that none remembers: for all to use no other ones.
        gathered: Whether each node gathers what its ranks read beside what is in its root.
        trusted: Whether a node's own files are taken as they are, for the vote to check. Otherwise each is first
            compared with its checksum, so that only those that are whole are used.
    """

    run_id: str
    meta: Meta | None = None
    kind: Kind = "dcp"
    place: str = DISK
    skipped: tuple[str, ...] = ()
    sources: tuple[tuple[str, Meta], ...] = ()
    kept: tuple[str, Meta] | None = None
    share_downloads: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    gathered: bool = False
    trusted: bool = True


def keeps_part(root: Path, seen: Survey, move: Try) -> bool:
    """Whether a mirror has only some kinds of a save, and this disk a node's part, which may be all that is left.

    Only the whole save may take the place of the part. So the files that are loaded are gathered beside it.
    """
    if move.place not in seen.seen or not seen.metas[(move.save.save_id, move.place)].partial:
        return False
    return move.save.save_id in local_catalog(root).parts


class Bringer:
    """Proposes one copy after another, and claims the run for the one that was loaded.

    Args:
        node: The leader's side of the root, prepared for a start.
        wish: What the caller asked for.
        bus: Receives an event for each copy that cannot be used and each mirror that does not answer.
        others: The disks of the job's other nodes; none: this node is the job.
        sees: Which place this node saw for each mirror that no node remembered, when all looked.
        on_progress: Called with the progress of a download.
        without: Parts of the state that are not loaded. Who names a save, in a job of one node, may leave out what that
            save lost.
        puts_together: Whether a save that no place has whole is proposed too, to be put together.
    """

    def __init__(
        self,
        node: Node,
        wish: Wish,
        bus: events.EventBus,
        others: Sequence[DiskFacts] = (),
        sees: Mapping[str, str | None] = _SEES_NOTHING,
        on_progress: OnProgress | None = None,
        without: Collection[str] = (),
        puts_together: bool = True,
    ) -> None:
        is_named = isinstance(wish.reference, str) and not wish.is_auto and wish.reference != "scratch"
        self._without = without if is_named and not others else ()
        self._node = node
        self._others = others
        self._wish = wish
        self._bus = bus
        self._on_progress = on_progress
        self._puts_together = puts_together
        self._cache: MetaCache = {}
        self._logged: list[str] = []
        self._tried: list[Outcome] = []
        self._chosen: Try | Scratch | None = None
        self._freed = False
        self._persistent = node.look_at_persistent()
        for disk in others:
            node.remember_places(disk.places)  # before a mirror is asked
        self._expected = expected_places(sees, [disk.sees for disk in others])
        node.expect_places(self._expected)
        self.seen: Survey = self._survey()
        self._new_run_id = new_id()
        self._report_silent()

    def _survey(self) -> Survey:
        node = self._node
        own = node.look_at_disk()
        own = replace(own, catalog=own.catalog.without(self._without)) if self._without else own
        disks = [own, *self._others]
        kept, together = self._persistent, self._puts_together
        seen = survey(
            disks,
            node.mirrors,
            persistent=kept,
            cache=self._cache,
            reads_parts=together,
            shares=node.share_downloads,
        )
        return seen if together else seen.without({ANYWHERE})

    def settle(self) -> None:
        """Go on with what a person began where this start is asked to begin, if somebody did."""
        self._wish, begun = settled(self.seen.evidence, self._wish)
        if begun is None:
            return
        self._log_once(Notice(with_root(goes_on(begun), str(self._node.root)), "warning"))
        if self._without:  # no save is named any more
            self._without = ()
            self.seen = self._survey()

    def _report_silent(self) -> None:
        for row in self.seen.evidence.mirrors():
            error = self.seen.seen[row.place].error if row.place in self.seen.seen else None
            if not row.answers and error is not None:
                refused = row.reach is Reach.REFUSED
                self._bus.emit(events.MirrorUnreachable(mirror=row.place, reason=row.why, refused=refused))
        is_new = (self._node.persistent_is_new, *(disk.persistent_is_new for disk in self._others))
        for number, created in enumerate(is_new):
            if created and run_of(self.seen.evidence) is not None:
                where = f" on node {number}" if self._others else ""
                self._log_once(
                    Notice(f"{self._node.persistent_dir}, which did not exist{where}, was created: is a mount missing?")
                )

    @property
    def abandoned(self) -> dict[str, str]:
        """The saves of which only some nodes' parts are left, by id, with the reason."""
        return {
            save.save_id: f"step {save.step} is abandoned: a crash, or a mirror that lost it, left only parts of it"
            for save in never_whole(self.seen.evidence)
        }

    @property
    def whole(self) -> frozenset[str]:
        """The ids of the saves that the disks of this job have whole, alone or together."""
        return frozenset(copy.save.save_id for copy in self.seen.evidence.disk.copies)

    @property
    def taken(self) -> TakenNames:
        """What the mirrors that answered say of the names of saves."""
        catalogs = {url: one.catalog for url, one in self.seen.seen.items() if one.catalog is not None}
        steps = frozenset[int]().union(*(names.plain_steps(one.others) for one in catalogs.values()))
        return TakenNames(steps, frozenset(catalogs))

    def torn(self, attempt: Attempt, proposal: Proposal) -> Torn:
        """Return the saves of which disks of this job have parts, and no disk of this job has the rest.

        Args:
            attempt: The attempt that has claimed the run.
            proposal: What it begins from, which is whole in the root now unless it was gathered beside it.
        """
        found = torn(self.seen.evidence, attempt)
        return found if proposal.meta is None or proposal.gathered else found.without(proposal.meta.save_id)

    @property
    def chosen(self) -> Try | None:
        """The copy that was proposed last; None for a start at step 0."""
        return self._chosen if isinstance(self._chosen, Try) else None

    def next(self) -> Proposal:
        """Bring the next copy to this disk and propose it, or propose a start at step 0.

        Raises:
            Temporary: The remaining copies cannot be read now.
            RefusedOnlyCopy: There are saves, but none can be resumed.
        """
        while True:
            move = self._move(self.seen)
            match move:
                case Refuse(error=error):
                    waiting = [f"Step {one.step}: {one.problem.why}" for _, one in self._waiting(-1)]
                    if waiting and isinstance(error, RefusedOnlyCopy | CheckpointNotFound):
                        error.hint = f"{'. '.join(waiting)}. Or else: {error.hint}"
                    raise error
                case MakeRoom():
                    last = self._tried[-1]
                    freed = self._freed if self._others else bool(self._node.rotate(in_use={last.save_id}).deleted)
                    result = Result.MADE_ROOM if freed else Result.STILL_FULL
                    self._tried.append(Outcome(last.save_id, last.kind, last.place, result, last.reason, last.error))
                case Scratch():
                    self._chosen = move
                    run_id = run_of(self.seen.evidence) or self._new_run_id
                    skipped, places = tuple(self._logged), self._node.places()
                    return Proposal(run_id, skipped=skipped, places=places, expected=self._expected)
                case Try():
                    self._say_of_other_kinds(move)
                    for url, one in self._waiting(move.save.step) if self._wish.is_auto else ():
                        name = f"{url}/{next(iter(one.names.values()))}"
                        self._log_once(Notice(f"step {one.step} ({name}): {one.problem.why}", step=one.step, place=url))
                    if move.place == ANYWHERE and not self._others:
                        forget_brought(self._node.root)  # what the try of a mirror left takes room
                    if self._others or move.place == ANYWHERE or keeps_part(self._node.root, self.seen, move):
                        self._chosen = move
                        return self._for_all_nodes(move)
                    meta = self._brought(move)
                    if meta is not None:
                        self._chosen = move
                        return Proposal(move.run_id or meta.run_id, meta, move.kind, move.place, tuple(self._logged))

    def _for_all_nodes(self, move: Try) -> Proposal:
        save = self.seen.metas[(move.save.save_id, move.place)]
        kept = self._kept(save, move.place)
        return Proposal(
            move.run_id or save.run_id,
            plain(save),
            move.kind,
            move.place,
            tuple(self._logged),
            tuple(self._sources(save, move.place)),
            kept,
            self._node.share_downloads and move.place != ANYWHERE,
            self._node.places(),
            self._expected,
            gathered=True,
            trusted=move.place == DISK or (kept is not None and move.place != ANYWHERE),
        )

    def _kept(self, save: Meta, place: str) -> tuple[str, Meta] | None:
        """Return the persistent directory and what it has of a snapshot, if that is to come from there."""
        for row in self.seen.evidence.rows:
            if row.sort == "persistent" and place in (row.place, ANYWHERE):
                at_place = self.seen.metas.get((save.save_id, row.place))
                return (row.place, at_place) if at_place is not None else None
        return None

    def _sources(self, save: Meta, place: str) -> list[tuple[str, Meta]]:
        """Return the mirrors that send what nodes lack, each with the save's meta there."""
        if place in self.seen.seen:
            return [(place, save)]
        catalogs = {mirror.url: self.seen.seen[mirror.url].catalog for mirror in self._node.mirrors}
        found = [(url, one) for url, one in catalogs.items() if one is not None]
        if place == DISK:
            return [(url, self.seen.metas[(save.save_id, url)]) for url, one in found if save.save_id in one.whole][:1]
        have = [(url, tuple(one.files_of(save, one.metas_of(save.save_id)).values())) for url, one in found]
        return [(url, replace(save, artifacts=artifacts)) for url, artifacts in have if artifacts]

    def _say_of_other_kinds(self, move: Try) -> None:
        for one in self.seen.evidence.disk.problems:
            if one.save_id == move.save.save_id and one.kinds and move.kind not in one.kinds:
                self._log_once(Notice(f"kind {'+'.join(one.kinds)} of step {move.save.step} ({one.name}): {one.why}"))

    def _waiting(self, above: int) -> list[tuple[str, PartsThere]]:
        """Return, by mirror, the saves of later steps that wait there for nodes, and of which no disk has a part."""
        here = {part.save.save_id[:8] for part in self.seen.evidence.disk.parts}
        return [
            (url, one)
            for url, place in self.seen.seen.items()
            if place.catalog is not None
            for one in parts_there(place.catalog.others, place.catalog.known)
            if one.step > above and one.digits not in here
        ]

    def _move(self, seen: Survey) -> Move:
        move = next_move(seen.evidence, self._wish, self._tried)
        for notice in move.notices:
            self._log_once(notice)
        if isinstance(move, Refuse):
            move.error.hint = with_root(move.error.hint, str(self._node.root))
        return move

    def reject(
        self,
        proposal: Proposal,
        reason: str,
        result: Result,
        error: CkptMirrorError | None = None,
        *,
        freed: bool = False,
    ) -> None:
        """Record that a copy could not be used.

        Args:
            proposal: The proposal that the ranks voted on.
            reason: Why it cannot be used.
            result: The same for the decision.
            error: What kept a node from getting it.
            freed: Whether the nodes have rotated since, and that freed space.
        """
        self._freed = freed
        if proposal.meta is None:
            return
        self._tried.append(Outcome(proposal.meta.save_id, proposal.kind, proposal.place, result, reason, error))

    def claim(self, proposal: Proposal) -> RunClaim:
        """Claim the run for what was loaded.

        Raises:
            StartOver: An attempt or a save has appeared since the survey.
            StoreTemporary: A mirror that must take the claim stopped answering.
        """
        chosen = self._chosen
        assert chosen is not None, "something was proposed"
        seen = self._survey()
        self._check_unchanged(seen, chosen, ())
        parent = proposal.meta.ref if proposal.meta is not None else None
        claim = claim_from(
            seen.evidence,
            Attempt(new_id(), 0, parent, by_person=chosen.by_person),
            proposal.run_id,
            needs_all=isinstance(chosen, Scratch) or chosen.needs_all,
            adopted=chosen.adopt if isinstance(chosen, Try) else (),
        )
        run = RunClaim(self._node.root, self._node.table, self._node.mirrors, claim, self._cache)
        run.make(seen)
        self._check_unchanged(self._survey(), chosen, {run.attempt.id})  # by now every other attempt is fenced
        self._report_quarantine(seen, run.attempt)
        return run

    def _report_quarantine(self, seen: Survey, claimed: Attempt) -> None:
        """Emit an event for each save that is quarantined since the last attempt, or that this one releases."""
        added, released = quarantine_changes(seen.evidence, list(count(seen.evidence).heard.values()), claimed)
        for save_id, failures in added.items():
            step, why = failures[0].step, why_quarantined(failures)
            self._bus.emit(events.SaveQuarantined(step=step, save_id=save_id, reason=why))
        for save_id, failures in released.items():
            why = f"attempt {claimed.number} was told to continue from it"
            self._bus.emit(events.SaveReleased(step=failures[0].step, save_id=save_id, reason=why))

    def _check_unchanged(self, seen: Survey, chosen: Try | Scratch, own: Collection[str]) -> None:
        before = {heard.attempt.id for row in self.seen.evidence.rows for heard in row.heard} | set(own)
        now = {heard.attempt for row in seen.evidence.rows for heard in row.heard if heard.attempt.id not in before}
        if now:
            newest = max(now, key=lambda attempt: (attempt.number, attempt.id))
            raise StartOver(f"attempt {newest.number} ({newest.id[:8]}) has started since")
        move = self._move(seen)
        if isinstance(move, Refuse):
            raise move.error
        if isinstance(chosen, Try) and (not isinstance(move, Try) or move.save.save_id != chosen.save.save_id):
            raise StartOver(f"step {chosen.save.step} is no longer the newest")
        if isinstance(chosen, Scratch) and not isinstance(move, Scratch):
            raise StartOver("there is a save now")

    def start_over(self, why: StartOver) -> None:
        """Survey every place again, because something new appeared."""
        _log.warning("the start looks at every place again: %s", why)
        self._tried.clear()
        self.seen = self._survey()

    # -- one copy --------------------------------------------------------------------------------------------

    def _brought(self, move: Try) -> Meta | None:
        """Bring a copy to this disk; return None and record the outcome if that fails."""
        meta = self.seen.metas[(move.save.save_id, move.place)]
        result = Result.NOT_BROUGHT
        failure: CkptMirrorError | None = None
        try:
            if move.place == DISK:
                return meta
            row = self.seen.evidence.row(move.place)
            if row is not None and row.sort == "persistent":
                bring_snapshot(self._node.root, Path(move.place), meta)
                return meta
            return self._staged(move, meta)
        except IntegrityError as error:
            if not is_not_readable_now(error.__cause__):
                if self._left_lists_out(meta, move.place):
                    return self._brought(move)
                self._tried.append(Outcome(meta.save_id, move.kind, move.place, Result.BROKEN, str(error)))
                return None
            failure = error  # of this disk
        except LocalStorageFull as error:
            result, failure = Result.NO_ROOM, error
        except CkptMirrorError as error:  # the copy itself may be good
            failure = error
        self._tried.append(Outcome(meta.save_id, move.kind, move.place, result, str(failure), failure))
        return None

    def _left_lists_out(self, meta: Meta, place: str) -> bool:
        """Leave the lists of tensors that are damaged on a mirror out of its copy of a save, since no load needs them.

        Returns:
            Whether there were any: then the copy may be tried once more.
        """
        mirror = next((one for one in self._node.mirrors if one.url == place), None)
        lists = tuple(one for one in meta.artifacts if is_proof(one))
        if mirror is None or not lists:
            return False
        try:
            there = objects_of(mirror.store, replace(meta, artifacts=lists))
        except CkptMirrorError:
            return False
        listed = [(one, there[one.object_name]) for one in lists if one.object_name in there]
        found = read_all([ObjectToRead(mirror.store, info.name, info.generation, one.digest) for one, info in listed])
        wrong = {one.path: why for (one, _), why in zip(listed, found, strict=True) if why and why.state == "damaged"}
        if not wrong:
            return False
        path, why = next(iter(wrong.items()))
        save_logger(_log, meta).warning("step %d: %s/%s: %s; no load needs it", meta.step, place, path, why.why)
        left = meta.narrowed(meta.kinds, wrong)
        self.seen = replace(self.seen, metas={**self.seen.metas, (meta.save_id, place): left})
        return True

    def _staged(self, move: Try, meta: Meta) -> Meta:
        """Stage a save into the root, in place of a broken local copy of it.

        Raises:
            IntegrityError: The mirror's copy is broken or no longer whole.
        """
        node = self._node
        mirror = next(mirror for mirror in node.mirrors if mirror.url == move.place)
        note_brought(node.root, meta.save_id, beside=False)
        try:
            staged = stage_save(
                mirror,
                meta,
                node.root,
                kinds=(move.kind,) if self._is_on_all_mirrors(meta) else meta.kinds,
                full=True,
                repair=True,
                on_progress=self._on_progress,
                bus=self._bus,
            )
        except CheckpointNotFound as error:
            raise BrokenMeta(f"{move.place} no longer has all of it: {error}") from error
        renew_records(node.table, [mirror.url for mirror in node.mirrors], staged)
        return staged

    def _is_on_all_mirrors(self, meta: Meta) -> bool:
        """Whether every mirror has the save. One that lacks it gets it from the local copy, which must be whole."""
        catalogs = [self.seen.seen[mirror.url].catalog for mirror in self._node.mirrors]
        return all(catalog is not None and meta.save_id in catalog.whole for catalog in catalogs)

    def _log_once(self, notice: Notice) -> None:
        """Log a notice, once."""
        if notice.line in self._logged:
            return
        self._logged.append(notice.line)
        log = _log.error if notice.level == "error" else _log.warning
        line = with_root(notice.line, str(self._node.root))
        log("skipped %s" if notice.step is not None else "%s", line)
        if notice.step is not None:
            self._bus.emit(
                events.CopyBroken(step=notice.step, save_id=notice.save_id, place=notice.place, reason=notice.line)
            )
