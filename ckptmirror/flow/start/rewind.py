"""Rewind: go back to an older save, by recording an attempt that continues from it and trains nothing.

It does what ``resume(policy=step)`` does, without loading: the same choice, the same way to bring a copy to this disk
(``bring``), the same claim (``claim``). The trainer's next start, on any machine, then continues from there by itself.

Rules:
* Nothing is deleted: the saves after it are superseded. Rotation may later delete the local copies that every
  required mirror holds; ckptmirror does not delete on a mirror yet. A rewind to one of them by its save id puts it
  back on the lineage.
* It holds the root lock, like a trainer: while a trainer runs here it is refused.
* Nothing is written anywhere until the save was found: a mistyped step, root or URL leaves no trace.
* Nothing is recorded until a copy is on this disk with every checksum verified.
* It is recorded even if the run already seems to continue from that save: something newer may be out of sight, or an
  attempt elsewhere may be about to save.
* A mirror that a person pushed to, or took out of the run, is asked for its copies. The run does not depend on it, so
  nothing waits for it.
* Mirrors that do not answer are reported. The next start here, or the same rewind again, records it there. Until then,
  a start elsewhere that asks only those mirrors does not know about the rewind.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    ConfigError,
    IntegrityError,
    LocalStorageFull,
    NoTable,
    NotSigned,
    Temporary,
)
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.retention import Retention
from ckptmirror.core.rewinding import Fork, fork_at
from ckptmirror.core.start.attempts import count
from ckptmirror.core.start.decide import Refuse, Result, Scratch, Try, Wish, next_move, run_of
from ckptmirror.core.start.disks import never_whole
from ckptmirror.core.start.evidence import ANYWHERE, Evidence
from ckptmirror.core.start.explain import not_believed, unknown_reference
from ckptmirror.core.start.lineage import SaveFacts
from ckptmirror.flow.fetch.blocks import FileToRead, read_all
from ckptmirror.flow.places.attempt_lists import check_can_sign, trusted_attempts
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, close_mirrors, mirror_specs, open_mirrors
from ckptmirror.flow.retention.reconcile import forget_brought
from ckptmirror.flow.save.commit import point_latest
from ckptmirror.flow.start.bring import Bringer, Proposal, keeps_part
from ckptmirror.flow.start.claim import RunClaim, StartOver
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.survey import Survey, survey
from ckptmirror.local.root_id import read_root_id
from ckptmirror.local.table_place import check_is_no_mirror, open_known_table
from ckptmirror.local.uploads import UploadsTable

__all__ = ["RewindPlan", "Rewound", "plan_rewind", "rewind"]

_log = logging.getLogger("ckptmirror.rewind")
_STARTS_LIMIT = 5
_NOT_ALL_KINDS = "no mirror has all kinds of it"
_NOT_BACK = ("auto", "latest")  # policies that do not go back
OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class RewindPlan:
    """What a rewind would do.

    Attributes:
        save: The save to go back to; None: the run starts over at step 0.
        places: Where it is whole: ``"disk"``, or a mirror's URL; best first.
        fork: The saves that it supersedes, and those that it puts back on the lineage.
        silent: Mirrors that do not answer, with the reason.
    """

    save: SaveFacts | None
    places: tuple[str, ...]
    fork: Fork
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewound:
    """A rewind that was recorded.

    Attributes:
        attempt: The number of the attempt that records it.
        step: The step of the save; 0 with no ``save_id`` and no ``kind`` if the run starts over.
        place: Where the copy came from: ``"disk"``, or a mirror's URL; "" for none.
        before: The newest whole save of the lineage before; a rewind to it undoes this one. None if there was none.
        before_of_all: A newer save that was on the lineage before, of which this disk has one node's part: a start of
            all nodes from it undoes this. None if there is none.
        recorded_on: The mirrors whose lists record it.
        unreachable: The mirrors that do not record it yet, with the reason.
    """

    attempt: int
    step: int
    save_id: str
    kind: Kind | None
    place: str
    fork: Fork
    before: SaveFacts | None
    before_of_all: SaveFacts | None
    recorded_on: tuple[str, ...]
    unreachable: Mapping[str, str]


def plan_rewind(root: Path, reference: int | str, *, mirrors: Sequence[str] = ()) -> RewindPlan:
    """Return what a rewind would do. Locks and records nothing; mirrors that the table knows are opened as usual.

    Args:
        root: The root that the trainer saves to, or will.
        reference: A step of the lineage; a save id (8 digits or more), also of a superseded save; or ``"scratch"``.
        mirrors: URLs beside those that the root's table knows.

    Raises:
        CheckpointNotFound: There is no such save, or no run at all.
        StoreTemporary: It may be on a mirror that does not answer.
        NoTable: No mirror is named, and there is no table that names one.
        ConfigError: Root and mirrors belong to different runs.
        NotSigned: Everything there is signed by keys that this process does not believe.
    """
    if reference in _NOT_BACK:
        raise unknown_reference(str(reference))
    check_is_no_mirror(root)
    with _looking(root, mirrors) as (opened, table):
        seen = survey([look_at_disk(root, table, read_root_id(root))], opened)
        needless = _needless(root, table)
    silent = {row.place: row.why for row in seen.evidence.mirrors() if not row.answers}
    everything, seen = seen, seen.without({ANYWHERE})  # a verb puts no save together
    needed = seen.without(needless & silent.keys())
    if why := not_believed(seen.evidence):
        raise NotSigned(why)
    if run_of(seen.evidence) is None:
        where = ", ".join([str(root), *(mirror.url for mirror in opened)])
        raise CheckpointNotFound(f"{where} names no run.", hint="Check --root and --mirror.")
    move = next_move(needed.evidence, Wish(reference, force=True))
    if isinstance(move, Refuse) and isinstance(move.error, CheckpointNotFound):
        move = next_move(seen.evidence, Wish(reference, force=True))  # a silent mirror may have it
    else:
        seen = needed
    if isinstance(move, Refuse):
        again = next_move(everything.evidence, Wish(reference, force=True))
        if isinstance(move.error, CheckpointNotFound) and isinstance(again, Try):
            raise CheckpointNotFound(
                f"No place has step {again.save.step} whole: {root} and the mirrors have it together.",
                hint=f"A start puts it together: {_start_from(reference)}.",
            )
        raise _with_verb(root, reference, seen, move.error, mirrors)
    if isinstance(move, Scratch):
        return RewindPlan(None, (), _fork(seen, move), silent)
    assert isinstance(move, Try), "a save was named"
    if keeps_part(root, seen, move):
        raise _needs_all_nodes(root, reference, move.save.step, _NOT_ALL_KINDS)
    rows = [row.place for row in seen.evidence.rows]
    there = {place for save_id, place in seen.metas if save_id == move.save.save_id}
    places = (move.place, *(place for place in rows if place in there and place != move.place))
    return RewindPlan(move.save, places, _fork(seen, move), silent)


def _with_verb(
    root: Path, reference: int | str, seen: Survey, error: CkptMirrorError, mirrors: Sequence[str]
) -> CkptMirrorError:
    """Return the error with a hint: the command that goes back to a superseded save of the step, or what does.

    Where a disk has one node's part of the save, and no mirror the whole of it, only all nodes together can go back.
    """
    lost = never_whole(seen.evidence)
    order = count(seen.evidence).order
    aside = {save.save_id: save for save in (*order.superseded, *order.unknown) if save.step == reference}
    here = [one.save for one in seen.evidence.disk.parts if _names(reference, one.save)]
    parts = [save for save in here if save.save_id not in aside and save not in lost]
    if isinstance(error, CheckpointNotFound) and parts:
        return _needs_all_nodes(root, reference, parts[0].step, "no mirror has the whole save")
    if isinstance(error, CheckpointNotFound) and aside:
        ids = " or ".join(f"--save {save_id[:8]}" for save_id in aside)
        places = " ".join([f"--root {quote(str(root))}", *(f"--mirror {quote(url)}" for url in mirrors)])
        error.hint = f"Name it by its save id: `ckptmirror rewind {places}` with {ids}."
    return error


def _names(reference: int | str, save: SaveFacts) -> bool:
    return save.save_id.startswith(reference) if isinstance(reference, str) else save.step == reference


def _needs_all_nodes(root: Path, reference: int | str, step: int, why: str) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"{root} has only one node's part of step {step}, and {why}.",
        hint=f"Go back on all nodes together: {_start_from(reference)}.",
    )


def _start_from(reference: int | str) -> str:
    return f"start once with manager.resume(state, policy={reference!r})"


def _fork(seen: Survey, move: Try | Scratch) -> Fork:
    """What an attempt from a save, or from step 0, would change among all saves that a meta names, whole or not.

    Of several nodes, whether an attempt counts of which this disk has parts alone, only their disks together tell. So
    what is superseded if it does is named too.
    """
    counted = count(seen.evidence)
    parts = [part.save for part in seen.evidence.disk.parts if not part.is_given_up]
    facts = {save.save_id: save for save in (*parts, *counted.saves)}
    for problem in (one for row in seen.evidence.answering() for one in row.problems if one.is_save):
        if problem.save is not None:
            facts.setdefault(problem.save.save_id, problem.save)
    attempts, parent = list(counted.known.values()), None
    if isinstance(move, Try):
        attempts, parent = [*attempts, *move.adopt], seen.metas[(move.save.save_id, move.place)].ref
    perhaps = {save.attempt for save in parts if save.attempt in counted.known} - set(counted.counting)
    forks = [
        fork_at(attempts, list(facts.values()), parent, {*counted.counting, *more})
        for more in ((), *((one,) for one in sorted(perhaps)))
    ]
    superseded = {save.save_id: save for fork in forks for save in fork.superseded}
    in_order = sorted(superseded.values(), key=lambda save: (save.step, save.save_id))
    return replace(forks[0], superseded=tuple(in_order))


def rewind(
    root: Path,
    reference: int | str,
    *,
    mirrors: Sequence[str] = (),
    bus: events.EventBus | None = None,
    on_progress: OnBytes | None = None,
) -> Rewound:
    """Record that the run continues from an older save, or starts over.

    Args:
        root: The root that the trainer saves to, or will.
        reference: A step of the lineage; a save id (8 digits or more), also of a superseded save; or ``"scratch"``.
        mirrors: URLs beside those that the root's table knows.
        bus: Receives events about what is brought, what is broken, and the new attempt.
        on_progress: Called with bytes done and total bytes, first of a download, then of the check.

    Raises:
        RootLocked: A trainer, or another verb, holds the root.
        CheckpointNotFound: There is no such save.
        IntegrityError: Every copy of it is damaged. Nothing was recorded.
        StoreTemporary: A mirror that must answer does not. Nothing was recorded.
        AttemptFenced: A newer attempt of the run is starting right now. Nothing was recorded.
    """
    check_can_sign(root)
    plan = plan_rewind(root, reference, mirrors=mirrors)  # raises before anything is written anywhere
    bus = bus or events.EventBus()
    began = time.monotonic()
    node = Node(root, _specs(root, mirrors, plan.silent), Retention(), bus, verb="rewind")
    try:
        node.prepare()
        bringer = Bringer(
            node,
            Wish(reference, force=True),
            bus,
            on_progress=lambda at: (
                on_progress(at.received_bytes + at.kept_bytes, at.total_bytes) if on_progress is not None else None
            ),
            puts_together=False,
        )
        try:
            proposal, meta, claim, seen, fork = _recorded(root, bringer, on_progress)
        except IntegrityError as error:
            if not isinstance(error, BrokenMeta):  # each copy is damaged
                error.hint = (
                    f"{error.hint} If each file is whole somewhere, a start puts it together: {_start_from(reference)}."
                )
            raise
        order = count(seen.evidence).order.in_order()
        before = order[-1] if order and order[-1].save_id != (meta.save_id if meta is not None else "") else None
        forget_brought(root)
        if meta is not None:
            _point_latest_at(root, meta)
        number, save_id = claim.attempt.number, meta.save_id if meta is not None else ""
        place = proposal.place if meta is not None else ""
        bus.emit(
            events.AttemptDecided(
                attempt=number,
                step=meta.step if meta is not None else None,
                save_id=save_id,
                place=place,
                duration_s=time.monotonic() - began,
            )
        )
        bus.emit(events.AttemptEnded(attempt=number, status="rewound"))
        return Rewound(
            attempt=number,
            step=meta.step if meta is not None else 0,
            save_id=save_id,
            kind=proposal.kind if meta is not None else None,
            place=place,
            fork=fork,
            before=before,
            before_of_all=_newest_of_all(seen.evidence, fork, order[-1] if order else None),
            recorded_on=tuple(mirror.url for mirror in node.mirrors if mirror.url not in claim.unclaimed),
            unreachable=dict(claim.unclaimed),
        )
    finally:
        node.close()


def _recorded(
    root: Path, bringer: Bringer, on_progress: OnBytes | None
) -> tuple[Proposal, Meta | None, RunClaim, Survey, Fork]:
    """Record the decision once a copy is here; return it with what was seen before it and what it changes."""
    for _ in range(_STARTS_LIMIT):
        proposal, meta = _first_sound(root, bringer, on_progress)
        seen = bringer.seen
        fork = _fork(seen, bringer.chosen or Scratch(by_person=True))
        try:
            return proposal, meta, bringer.claim(proposal), seen, fork
        except StartOver as why:
            bringer.start_over(why)
    raise Temporary("Other attempts of this run keep starting at the same time.", hint="Stop them first.")


def _newest_of_all(evidence: Evidence, fork: Fork, whole: SaveFacts | None) -> SaveFacts | None:
    """Return the newest superseded save that is newer than the newest ``whole`` one and that all nodes may have."""
    lost = never_whole(evidence)
    parts = {part.save.save_id for part in evidence.disk.parts if part.of > 1 and part.save not in lost}
    newer = [save for save in fork.superseded if whole is None or save.step > whole.step]
    return next((save for save in reversed(newer) if save.save_id in parts), None)


def _first_sound(root: Path, bringer: Bringer, on_progress: OnBytes | None) -> tuple[Proposal, Meta | None]:
    """Bring one copy after another to this disk until every checksum of one is right; None if the run starts over.

    Raises:
        IntegrityError: Every copy is damaged.
        CheckpointNotFound: Only all nodes together can bring what is left.
    """
    while True:
        proposal = bringer.next()
        meta = proposal.meta
        if meta is None:
            return proposal, None
        if proposal.gathered:
            raise _needs_all_nodes(root, meta.save_id[:8], meta.step, _NOT_ALL_KINDS)
        artifacts = meta.artifacts_of(proposal.kind)
        total, done = sum(artifact.digest.size_bytes for artifact in artifacts), 0

        def count_bytes(count: int, total: int = total) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(done, total)

        found = read_all([FileToRead(root / a.path, a.digest) for a in artifacts], on_bytes=count_bytes)
        wrong = [(artifact.path, fault) for artifact, fault in zip(artifacts, found, strict=True) if fault is not None]
        if not wrong:
            return proposal, meta
        path, fault = min(wrong, key=lambda one: one[1].state != "damaged")
        result = Result.BROKEN if fault.state == "damaged" else Result.UNREADABLE
        bringer.reject(proposal, f"{path}: {fault.why}", result)


def _point_latest_at(root: Path, meta: Meta) -> None:
    """Point ``latest``, the link for people and other tools, at the save."""
    if meta.kinds == ("emergency",):
        return
    try:
        point_latest(root, meta)
    except (LocalStorageFull, OSError) as error:
        _log.warning("%s still names another step: %s", root / names.LATEST_NAME, error)


# -- which mirrors -------------------------------------------------------------------------------------------


def _specs(root: Path, mirrors: Sequence[str], silent: Collection[str] = ()) -> list[MirrorSpec]:
    """Return the mirrors of the root's table, but ``silent`` ones that are needless, then those of the caller."""
    named = mirror_specs(mirrors)
    known: list[MirrorSpec] = []
    with _table_of(root, named) as table:
        if table is not None:
            left_out = _needless(root, table) & set(silent)
            known = [MirrorSpec(row.url, row.required) for row in table.mirrors() if row.url not in left_out]
    urls = {spec.url for spec in known}
    return [*known, *(spec for spec in named if spec.url not in urls)]


def _needless(root: Path, table: UploadsTable | None) -> set[str]:
    """Return the mirrors of the table on which the run does not depend."""
    listed = trusted_attempts(root)
    removed = {one.url for one in listed.requirements if one.is_removed} if listed is not None else set()
    rows = table.mirrors() if table is not None else []
    return {row.url for row in rows if row.pushed or (row.url in removed and not row.required)}


@contextlib.contextmanager
def _table_of(root: Path, named: Sequence[MirrorSpec]) -> Iterator[UploadsTable | None]:
    """Return the root's table; None if there is none yet and the caller named mirrors.

    Raises:
        NoTable: There is no table, and the caller named no mirror.
        ConfigError: The table names no mirrors, and the caller named none.
    """
    hint = "Check the path. To rewind the run from a fresh disk, add --mirror URL."
    try:
        table = open_known_table(root)
    except NoTable as error:
        if not named or not _may_do_without(root):
            raise NoTable(error.message, hint=hint if _may_do_without(root) else error.hint) from error
        yield None
        return
    try:
        if not table.knows_mirrors() and not named:
            raise ConfigError(f"The table of {root} does not know its mirrors yet.", hint="Add --mirror URL.")
        yield table
    finally:
        table.close()


def _may_do_without(root: Path) -> bool:
    """Whether a table may be created here: not if the root says that its table is elsewhere."""
    return not (root / names.TABLE_NOTE_NAME).exists()


@contextlib.contextmanager
def _looking(root: Path, mirrors: Sequence[str]) -> Iterator[tuple[list[Mirror], UploadsTable | None]]:
    """Open the mirrors; for one that the root does not know, create and record nothing."""
    named = mirror_specs(mirrors)
    opened: list[Mirror] = []
    with _table_of(root, named) as table:
        specs = _specs(root, mirrors)
        known = {row.url for row in table.mirrors()} if table is not None else set()
        try:
            for spec in specs:
                opened += open_mirrors([spec], root, table if spec.url in known else None, is_verb=True)
            yield opened, table
        finally:
            close_mirrors(opened)
