"""What a start does next: one pure function of the evidence, of what was asked for, and of what was tried.

``next_move`` is replayed from the beginning with each outcome; nothing remembers anything. Every rule stands here, in
this order; which attempts count is said by ``attempts``.

1. All places tell of one run. A place that says no for good, or whose list is of a later version, ends the start. So
   does a broken list of this root that no mirror's list stands in for.
2. While a person's decision is in doubt, every start waits.
3. A start over, forced or not, needs the answer of every configured mirror and of every one that a list names.
   Without force it is refused where anything was saved.
4. Candidates: the newest save of the lineage first; of one step dcp, then model, then an emergency snapshot, then the
   saves that those replaced, newest first. Of one save the disk first (last, while a repair of it is unfinished), then
   the mirrors in configured order, then the persistent directory. A step or a save id names its own candidates.
   Superseded and unknown saves are chosen only by their id.
5. Of a save, once a rank has begun to load it, only other copies of that same save are tried.
6. What looks like a save that would be tried first, and is not whole, is never passed by in silence; and not at all
   while it cannot be read, or while a silent place may hold it.
7. A copy that turned out broken, or could not be brought, gives way to another copy of the same save. Going back to an
   older save then waits for silent places, and for what may be read or brought later.
8. A save is continued from while a place is silent only if this root vouches for it (made it, or continued from it by a
   claim that it completed everywhere), and no rival is heard of. A person's choice needs every required mirror.
9. An emergency snapshot by another number of ranks is not passed by, unless a person names another save.
10. Step 0 needs what a start over needs, and either nothing saved anywhere or a recorded decision to start over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    LineageError,
    NewerFormat,
    RefusedOnlyCopy,
    StorePermanent,
    UsageError,
)
from ckptmirror.core.lineage import SaveFacts, lineage
from ckptmirror.core.model import KINDS, Attempt, Kind
from ckptmirror.core.start import explain
from ckptmirror.core.start.attempts import Counted, count, is_own, rival_of
from ckptmirror.core.start.evidence import (
    DISK,
    Copy,
    Evidence,
    ListFound,
    Origin,
    Problem,
    Reach,
    Row,
    Voice,
)
from ckptmirror.core.start.explain import Notice

__all__ = ["MakeRoom", "Move", "Outcome", "Refuse", "Result", "Scratch", "Try", "Wish", "next_move", "run_of"]


@dataclass(frozen=True)
class Wish:
    """What a start was asked for.

    Attributes:
        reference: ``"auto"``, ``"latest"``, ``"scratch"``, a step, or a save id (8 digits or more).
        kind: Of the copy, if one was named.
        force: Of a start over: where there are saves too.
        world_size: How many ranks will load.
    """

    reference: str | int = "auto"
    kind: Kind | None = None
    force: bool = False
    world_size: int = 1

    @property
    def is_auto(self) -> bool:
        """Whether nobody named a save, so that going back is nobody's decision."""
        return self.reference in ("auto", "latest")


class Result(StrEnum):
    """How trying a copy went wrong."""

    BROKEN = "broken"
    UNREADABLE = "unreadable"  # an I/O error or a permission: it may be whole
    TOUCHED = "touched"  # a rank had begun to load it
    NOT_BROUGHT = "not_brought"  # it could not come to this disk now
    NO_ROOM = "no_room"
    MADE_ROOM = "made_room"  # rotation freed something after that
    STILL_FULL = "still_full"  # it did not


@dataclass(frozen=True)
class Outcome:
    """What became of a copy that was tried.

    Attributes:
        error: Of what could not be brought: raised instead of going back to an older save.
    """

    save_id: str
    kind: Kind
    place: str
    result: Result
    reason: str
    error: CkptMirrorError | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Try:
    """Bring this copy to the disk, verify and load it; then claim the run.

    Attributes:
        needs_all: Whether every required mirror has to take the claim.
        by_person: Whether it is a person's decision.
        adopt: Attempts that no list tells of, which the claim takes in.
    """

    save: SaveFacts
    kind: Kind
    place: str
    needs_all: bool
    by_person: bool = False
    adopt: tuple[Attempt, ...] = ()
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class MakeRoom:
    """The disk has no room for a copy: rotate, and say what came of it."""

    save_id: str
    kind: Kind
    place: str
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class Scratch:
    """Start at step 0."""

    by_person: bool
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class Refuse:
    """Do nothing, and raise this."""

    error: CkptMirrorError
    notices: tuple[Notice, ...] = ()


Move = Try | MakeRoom | Scratch | Refuse


def next_move(evidence: Evidence, wish: Wish, tried: Sequence[Outcome] = ()) -> Move:
    """Say what a start does next.

    Args:
        evidence: What every place says.
        wish: What was asked for.
        tried: What was tried before, in order.
    """
    start = _Start(evidence, wish, tried)
    try:
        return start.move()
    except LineageError as error:
        return Refuse(explain.not_one_run(error, [row.place for row in evidence.answering()]), start.said())
    except CkptMirrorError as error:
        return Refuse(error, start.said())


def run_of(evidence: Evidence) -> str | None:
    """Return the id of the run; None where neither this disk nor a mirror names one.

    Raises:
        ConfigError: They name several.
    """
    named = {row.run_id: row for row in evidence.answering() if row.run_id is not None and row.sort != "persistent"}
    if len(named) > 1:
        told = "; ".join(f"{row.place} holds run {run_id[:8]}" for run_id, row in named.items() if run_id is not None)
        raise explain.not_one_run(told, [row.place for row in named.values()])
    return next(iter(named), None)


@dataclass(frozen=True)
class _Candidate:
    """One save in one kind, its copies best first, and the save that replaced it ("": none)."""

    save: SaveFacts
    kind: Kind
    copies: tuple[tuple[Row, Copy], ...]
    replaced_by: str = ""
    age: tuple[int, int] = (-1, -1)


class _Start:
    """One replay. Its only state is what it has said."""

    def __init__(self, evidence: Evidence, wish: Wish, tried: Sequence[Outcome]) -> None:
        self._all = evidence
        self._wish = wish
        self._tried = tried
        self._notices: list[Notice] = []

    def said(self) -> tuple[Notice, ...]:
        return tuple(self._notices)

    def move(self) -> Move:
        self._check_places()
        run_id = run_of(self._all)
        self._evidence = _of_run(self._all, run_id, self._wish)
        self._counted: Counted = count(self._evidence)
        self._say_what_is_not_seen()
        if self._counted.doubtful:
            raise explain.person_in_doubt(self._counted.doubtful, self._counted.silent)
        self._problems = self._in_line()
        if self._wish.reference == "scratch":
            return self._start_over()
        return self._continue() or self._step_0()

    # -- rule 1 ----------------------------------------------------------------------------------------------

    def _check_places(self) -> None:
        for row in self._all.rows:
            if row.reach is Reach.REFUSED and row.required:
                raise StorePermanent(f"{row.place}: {row.why}")
            if row.listed is ListFound.NEWER and row.answers:
                raise NewerFormat(f"The list of attempts of {row.place} is of a later version: {row.why}")
        told = any(row.answers and row.listed is ListFound.TOLD for row in self._all.mirrors())
        if self._all.disk.listed is ListFound.BROKEN and not told:
            raise BrokenMeta(
                f"{self._all.disk.why}, and no mirror has a list.",
                hint="Move it away, and the list is rebuilt from the saves; a rewind that nothing was saved after is "
                "lost.",
            )

    def _say_what_is_not_seen(self) -> None:
        for row in self._all.mirrors():
            if row.reach is Reach.DROPPED:
                self._say(f"{row.place}, which is no mirror of this root any more: what it alone holds was not seen")
            elif not row.answers:
                self._say(f"{row.place} did not answer ({row.why}): what it alone holds was not seen", "warning")
        for row in self._evidence.answering():
            if row.listed in (ListFound.LOST, ListFound.BROKEN) and row.sort != "persistent":
                self._say(
                    f"{row.place} had no list of attempts, and it was rebuilt: a rewind or a start over that nothing "
                    "was saved after would not be known"
                )
        for attempt in sorted(self._counted.apart):
            one = self._counted.known[attempt]
            self._say(
                f"attempt {one.number} ({attempt[:8]}) ran apart from the mirrors, and the run continued without it: "
                "its saves are superseded; each can be resumed by its save id"
            )

    # -- rules 3 and 10 --------------------------------------------------------------------------------------

    def _unheard(self) -> dict[str, str]:
        """Every place whose answer a start at step 0 needs and has not."""
        silent = {row.place: row.why for row in self._all.mirrors() if not row.answers and row.reach != Reach.DROPPED}
        return silent | dict(self._counted.silent)

    def _start_over(self) -> Move:
        saved = self._saved()
        if saved and not self._wish.force:
            raise explain.never_step_0(saved, asked=True)
        if unheard := self._unheard():
            raise explain.not_answering("A start over needs the answer of every mirror. ", unheard)
        return Scratch(by_person=bool(saved or self._counted.heard), notices=self.said())

    def _saved(self) -> list[str]:
        order = self._counted.order
        found = [f"step {step}" for step in sorted({step for step, _ in order.current})[-5:]]
        found += [f"step {save.step} (save {save.save_id[:8]})" for save in (*order.superseded, *order.unknown)][:5]
        return found + [f"{one.name}: {one.why}" for one in self._forbidding(decided=False)][:5]

    def _step_0(self) -> Move:
        if self._wish.reference != "auto":
            asked = repr(self._wish.reference)
            raise IntegrityError(f"No copy of {asked} could be loaded: " + "; ".join(map(_line, self._broken())))
        order = self._counted.order
        unheard = self._unheard()
        if not unheard:
            self._look_past(None)
        if unheard:
            raise explain.not_answering(
                "There is no save on the disk, and it is unknown whether there is one where nobody answers; starting "
                "at step 0 might fork the run: ",
                unheard,
            )
        decided = bool(order.way) and order.complete
        since = (order.way[-1].number, order.way[-1].id) if decided else (-1, "")
        continued = [
            attempt
            for attempt in self._counted.heard.values()
            if attempt.parent is not None and (attempt.number, attempt.id) > since
            if attempt.parent.save_id not in self._whole()  # else it is superseded, and was not lost
        ]
        if continued and not order.current:
            newest = max(continued, key=lambda attempt: (attempt.number, attempt.id))
            assert newest.parent is not None
            raise RefusedOnlyCopy(
                f"Attempt {newest.number} ({newest.id[:8]}) continued from step {newest.parent.step}, but no save of "
                "the lineage is there any more.",
                hint="Check the root and the mirror URLs, or decide with policy='scratch', force=True.",
            )
        problems = [f"{one.name}: {one.why}" for one in self._forbidding(decided=decided)]
        problems += [_line(one) for one in self._broken()]
        left = [*order.unknown] if decided else [*order.superseded, *order.replaced, *order.unknown]
        if problems or left or order.current:
            listed = problems[:5] + [f"step {save.step} (save {save.save_id[:8]})" for save in left[:5]]
            raise explain.never_step_0(listed, asked=False)
        return Scratch(by_person=False, notices=self.said())

    def _forbidding(self, *, decided: bool) -> list[Problem]:
        """Everything that shows that there was training, and cannot be resumed from.

        Args:
            decided: Leave out what a recorded decision to start over left behind.
        """
        in_line = {one.name for one in self._problems}
        known = self._counted.known.keys() if decided else ()
        found = [
            one
            for row in self._all.answering()
            for one in row.problems
            if not one.is_save or one.name in in_line or one.save is None or one.save.attempt not in known
            if one.save_id not in self._whole()
        ]
        found += [
            Problem(f"step {s.step} (save {s.save_id[:8]})", f"no list tells of its attempt {s.attempt[:8]}", s.step)
            for s in self._counted.strangers
        ]
        return found

    # -- rule 4 ----------------------------------------------------------------------------------------------

    def _continue(self) -> Move | None:
        queue = self._queue()
        only, unseen = self._so_far()
        for candidate, (row, copy) in queue:
            save = candidate.save
            outcomes = [one for one in self._tried if _is_of(one, candidate, row)]
            if outcomes and outcomes[-1].result is Result.NO_ROOM and not self._has_asked_for_room(self._tried):
                return MakeRoom(save.save_id, candidate.kind, row.place, self.said())
            if outcomes and outcomes[-1].result is not Result.MADE_ROOM:
                continue
            if only not in (None, save.save_id):
                continue
            if unseen is not None and save.save_id != unseen[0]:
                raise unseen[1]
            self._check_going_back(candidate, copy)
            needs_all = not (self._wish.is_auto and self._vouches_for(save))
            self._say_of_strangers(save)
            return Try(
                save,
                candidate.kind,
                row.place,
                needs_all=needs_all,
                by_person=not self._wish.is_auto,
                adopt=self._adopted(save),
                notices=self.said(),
            )
        if unseen is not None:
            raise unseen[1]
        if only is not None:
            raise IntegrityError(
                f"No copy of save {only[:8]} could be loaded: " + "; ".join(map(_line, self._broken()))
            )
        return None

    def _queue(self) -> Iterator[tuple[_Candidate, tuple[Row, Copy]]]:
        try:
            candidates = [one for one in self._candidates() if self._wish.kind in (None, one.kind)]
            if self._wish.reference != "auto" and not candidates:
                raise CheckpointNotFound(f"There is no whole save {self._wish.reference!r}.")
        except CheckpointNotFound as error:
            self._check_hindered(one for one in self._problems if one.step == self._wish.reference)
            if self._counted.silent or self._unheard():
                raise explain.not_answering(f"{error.message} It may be there: ", self._unheard()) from error
            raise
        return ((one, copy) for one in candidates for copy in one.copies)

    def _candidates(self) -> list[_Candidate]:
        reference = self._wish.reference
        order = self._counted.order
        if isinstance(reference, int):
            found = [one for one in self._on_the_lineage() if one.save.step == reference]
            if not found:
                raise explain.missing_step(reference, order)
        elif self._wish.is_auto:
            found = self._on_the_lineage()
        else:
            save = self._by_id(reference)
            found = [_Candidate(save, kind, ()) for kind in KINDS if kind in save.kinds]
        numbers = {attempt.id: attempt.number for attempt in order.way}
        return [
            replace(one, copies=copies, age=(numbers.get(one.save.attempt, -1), one.save.number))
            for one in found
            if (copies := self._copies_of(one.save.save_id, one.kind))
        ]

    def _on_the_lineage(self) -> list[_Candidate]:
        order = self._counted.order
        numbers = {attempt.id: attempt.number for attempt in order.way}
        found = []
        for save in {save.save_id: save for save in (*order.current.values(), *order.replaced)}.values():
            for kind in save.kinds:
                stands = order.current[(save.step, kind)].save_id
                age = (-numbers[save.attempt], -save.number, save.save_id)
                rank = (-save.step, stands != save.save_id, age, KINDS.index(kind))
                found.append((rank, _Candidate(save, kind, (), "" if stands == save.save_id else stands)))
        return [one for _, one in sorted(found, key=lambda item: item[0])]

    def _by_id(self, reference: str) -> SaveFacts:
        if len(reference) < 8 or not set(reference) <= set("0123456789abcdef"):
            raise explain.unknown_reference(reference)
        found = [save for save in self._counted.saves if save.save_id.startswith(reference)]
        if not found:
            raise CheckpointNotFound(f"No save id starts with {reference}.")
        if len(found) > 1:
            raise UsageError(f"{len(found)} save ids start with {reference}.", hint="Give more digits.")
        return found[0]

    def _copies_of(self, save_id: str, kind: Kind) -> tuple[tuple[Row, Copy], ...]:
        found = [
            (row, copy)
            for row in self._evidence.answering()
            for copy in row.copies
            if copy.save.save_id == save_id and kind in copy.save.kinds
        ]
        return tuple(sorted(found, key=lambda one: one[0].place == DISK and one[1].unfinished))

    # -- rules 5 and 7: what was tried -----------------------------------------------------------------------

    def _so_far(self) -> tuple[str | None, tuple[str, CkptMirrorError] | None]:
        """Return the one save that may still be loaded, and a save that may be whole with what is then raised."""
        only: str | None = None
        unseen: tuple[str, CkptMirrorError] | None = None
        for index, one in enumerate(self._tried):
            asks_for_room = one.result is Result.NO_ROOM and not self._has_asked_for_room(self._tried[:index])
            if one.result is Result.MADE_ROOM or asks_for_room:
                continue
            step = next((save.step for save in self._counted.saves if save.save_id == one.save_id), -1)
            verb = "" if one.error is None else "cannot be brought now: "
            line = f"step {step} (save {one.save_id[:8]}, {one.place}): {verb}{one.reason}"
            self._say(line, step=step, save_id=one.save_id, place=one.place)
            if one.result is Result.TOUCHED:
                only = one.save_id
            if unseen is not None:
                continue
            if one.error is not None:
                unseen = (one.save_id, one.error)
            elif one.result is Result.UNREADABLE and self._wish.is_auto:
                unseen = (one.save_id, explain.not_readable(f"The copy of step {step}", one.reason))
            elif one.kind != "emergency" and self._counted.silent and self._wish.is_auto:
                why = f"The copy of step {step} is broken ({one.reason}). "
                unseen = (one.save_id, explain.not_answering(why, self._counted.silent))
        return only, unseen

    def _has_asked_for_room(self, tried: Sequence[Outcome]) -> bool:
        return any(one.result in (Result.MADE_ROOM, Result.STILL_FULL) for one in tried)

    def _broken(self) -> list[Outcome]:
        return [one for one in self._tried if one.result is not Result.MADE_ROOM]

    # -- rules 6, 8 and 9: may this one be continued from? ---------------------------------------------------

    def _check_going_back(self, candidate: _Candidate, copy: Copy) -> None:
        save, silent = candidate.save, self._counted.silent
        if self._wish.is_auto or isinstance(self._wish.reference, int):
            self._look_past(candidate)
        if silent and not self._wish.is_auto:
            raise explain.not_answering("A person's choice is recorded on every required mirror. ", silent)
        if silent and not self._vouches_for(save):
            here = any(row.place == DISK for row, _ in candidate.copies)
            what = "may have come from elsewhere" if here else "is not on this disk"
            raise explain.not_answering(f"Step {save.step}, the newest that can be seen, {what}. ", silent)
        if silent and (rival := rival_of(self._evidence, self._counted, save.attempt)) is not None:
            raise explain.rival_may_have_saved(rival, silent)
        if self._wish.is_auto and candidate.kind == "emergency" and copy.world_size != self._wish.world_size:
            raise explain.emergency_needs_ranks(save, copy.world_size, self._wish.world_size)
        if candidate.replaced_by:
            self._say(
                f"step {save.step} (save {candidate.replaced_by[:8]}): no copy in kind {candidate.kind} can be used; "
                f"save {save.save_id[:8]}, which it replaced, is tried"
            )

    def _vouches_for(self, save: SaveFacts) -> bool:
        """Whether this root made a save, or continued from it by a claim that it completed everywhere."""
        disk = self._evidence.disk
        if disk.listed is not ListFound.TOLD:
            return False
        if any(copy.save.save_id == save.save_id and copy.origin is Origin.SAVED_HERE for copy in disk.copies):
            return True
        return any(
            Voice.COMPLETED in heard.voices
            and is_own(self._evidence, heard.attempt)
            and heard.attempt.parent is not None
            and heard.attempt.parent.save_id == save.save_id
            for heard in disk.heard
        )

    def _in_line(self) -> list[Problem]:
        """The problems that could be a save of the lineage, with only the kinds in which they would count."""
        found = []
        for row in self._evidence.answering():
            for one in row.problems:
                if not one.is_save or one.save_id in self._whole():
                    continue
                needed = row.sort != "mirror" or row.required or row.was_required
                hindrance = one.hindrance if needed else ""  # nothing waits for an optional mirror
                kinds = self._kinds_if_whole(one)
                if kinds:
                    found.append(replace(one, kinds=kinds, hindrance=hindrance))
        return found

    def _kinds_if_whole(self, problem: Problem) -> tuple[Kind, ...]:
        facts = problem.save
        if facts is None:
            return problem.kinds
        others = [save for save in self._counted.saves if save.save_id != facts.save_id]
        may_count = {facts.attempt} & self._counted.known.keys() - self._counted.apart
        counting = {*self._counted.counting, *may_count}
        current = lineage(self._counted.known.values(), [*others, facts], counting).current
        return tuple(kind for kind in problem.kinds if current.get((facts.step, kind)) == facts)

    def _whole(self) -> set[str]:
        return {save.save_id for save in self._counted.saves}

    def _look_past(self, candidate: _Candidate | None) -> None:
        """Say what is newer and not whole; nothing of it may be whole where it cannot be seen."""
        passed = [one for one in self._problems if candidate is None or self._comes_before(one, candidate)]
        if not self._wish.is_auto:  # a person named the step, and so decided about what is newer than that
            passed = [one for one in passed if one.step == self._wish.reference]
        for one in passed:
            step = -1 if one.step is None else one.step
            self._say(f"step {one.step} ({one.name}): {one.why}", step=step, save_id=one.save_id, place=one.name)
        self._check_hindered(passed)
        for one in passed:
            if self._counted.silent and one.kinds != ("emergency",):  # those are on no mirror
                raise explain.not_answering(
                    f"{one.name} is not whole ({one.why}), and may be there: ", self._counted.silent
                )

    def _check_hindered(self, problems: Iterable[Problem]) -> None:
        for one in problems:
            if one.hindrance:
                raise explain.not_readable(one.name, one.why, one.hindrance)

    def _comes_before(self, problem: Problem, candidate: _Candidate) -> bool:
        """Whether it would be tried before the candidate, were it whole."""
        if problem.step is None or problem.step > candidate.save.step:
            return True
        if problem.step < candidate.save.step:
            return False
        if candidate.replaced_by or problem.save is None:
            return True
        attempt = self._counted.known.get(problem.save.attempt)
        return (attempt.number if attempt is not None else -1, problem.save.number) >= candidate.age

    # -- what a person should know ---------------------------------------------------------------------------

    def _say_of_strangers(self, chosen: SaveFacts) -> None:
        here = {copy.save.save_id for copy in self._evidence.disk.copies}
        if self._wish.reference == "auto":
            for save in self._counted.order.superseded:
                if save.step > chosen.step and save.save_id in here:
                    self._say(
                        f"step {save.step} (save {save.save_id[:8]}) is whole here and superseded: a later attempt "
                        "continued from an earlier save; if that was not meant, stop and run "
                        f"`ckptmirror rewind --save {save.save_id[:8]}`",
                        "warning",
                    )
        for save in self._counted.strangers:
            if save.step >= chosen.step and save.save_id != chosen.save_id:
                self._say(
                    f"step {save.step} (save {save.save_id[:8]}): no list tells of its attempt {save.attempt[:8]} (an "
                    "older list was restored, or the attempt was never told); resume it by its save id, if it is right"
                )

    def _adopted(self, save: SaveFacts) -> tuple[Attempt, ...]:
        """The attempt of a save that a person named, and those before it, as far as no list tells of them."""
        found: list[Attempt] = []
        one = self._counted.heard.get(save.attempt)
        while one is not None and one.id not in self._counted.known:
            if found and one.number >= found[-1].number:
                break  # the data contradicts itself, which the claim will say
            found.append(one)
            one = self._counted.heard.get(one.parent.attempt) if one.parent is not None else None
        return tuple(found)

    def _say(
        self, line: str, level: str = "error", *, step: int | None = None, save_id: str = "", place: str = ""
    ) -> None:
        notice = Notice(line, "warning" if level == "warning" else "error", step, save_id, place)
        if notice not in self._notices:
            self._notices.append(notice)


def _of_run(evidence: Evidence, run_id: str | None, wish: Wish) -> Evidence:
    """Leave out the snapshots of other runs that share the persistent directory.

    Without any mirror, a single run there is this one: its disk was lost.

    Raises:
        RefusedOnlyCopy: Mirrors are there, and none names a run, or there are snapshots of several: nobody can tell.
    """
    kept = [row for row in evidence.rows if row.sort == "persistent" and row.copies]
    if run_id is None and len(kept) == 1 and not evidence.mirrors():
        run_id = kept[0].run_id
    if run_id is None and kept and wish.reference != "scratch":
        named = [row for row in kept for copy in row.copies if copy.save.save_id.startswith(str(wish.reference))]
        if wish.is_auto or not named:
            copy = max((copy for row in kept for copy in row.copies), key=lambda one: one.save.step)
            raise RefusedOnlyCopy(
                f"{kept[0].place} has an emergency snapshot of step {copy.save.step}, and neither this disk nor a "
                "mirror says whether it is of this run.",
                hint=f"To continue from it give policy={copy.save.save_id[:8]!r}. To begin another run give it a "
                "persistent_dir of its own, or policy='scratch' with force=True.",
            )
        run_id = named[0].run_id
    rows = tuple(row for row in evidence.rows if row.sort != "persistent" or row.run_id in (run_id, None))
    return replace(evidence, rows=rows)


def _is_of(outcome: Outcome, candidate: _Candidate, row: Row) -> bool:
    return (outcome.save_id, outcome.kind, outcome.place) == (candidate.save.save_id, candidate.kind, row.place)


def _line(outcome: Outcome) -> str:
    return f"save {outcome.save_id[:8]}, {outcome.place}: {outcome.reason}"
