"""What a start does next: one pure function of the evidence, the request, and what was tried.

``next_move`` is replayed from the beginning after each outcome and keeps no state. It holds every rule of a start, in
this order; ``attempts`` decides which attempts count.

1. All places must name one run. A list of a later version ends the start. So does a broken list of this root, unless a
   mirror's list replaces it. Snapshots of other runs in the persistent directory are ignored. If the run is named
   nowhere else, a person must choose among them; but without any mirror, a single run there is this one, and its disk
   was lost.
2. While a person's attempt is doubtful, every start waits.
3. A start from scratch, forced or not, needs an answer from every configured mirror and every mirror that a list names.
   Without force it is refused if anything was saved. A start that goes back to a save, or starts over by force, where a
   person did so before and training saved since, is the same command started again, and goes on from the newest save
   (``settled``). With force, a start goes back to a save each time.
4. Candidates: the newest save of the lineage first. Within a step: dcp, then model, then an emergency snapshot, then
   the saves that those replaced, newest first. Within a save: the disk (last, while its repair is unfinished), then the
   mirrors in configured order, then the persistent directory, then the files of all these together; copies that
   lost lists of tensors after all others. So a start goes back only from a save of which some file is whole nowhere. A
   step or a save id names its own candidates. Superseded and unknown saves are chosen only by their id.
5. Once a rank has begun to load a save, only other copies of that save are tried.
6. If something that looks like a save would be tried first but is not whole, a start never skips it silently. It does
   not skip it at all while the thing cannot be read, or while a mirror that does not answer may hold it.
7. After a copy that is broken or could not be brought, another copy of the same save is tried. Before going back to an
   older save, a start waits for mirrors that do not answer, and for what may be read or brought later.
8. While a place is silent, a start continues only from a save that this root vouches for (it made the save, or
   continued from it by a claim that it completed everywhere), and only if it has heard of no rival. A decision (a
   person's choice, or going back past a save that looks whole) needs every required mirror to answer and to record it.
9. While any mirror does not answer, a start does not skip a newer attempt of another root that no answering place has a
   save of, that no list names, or that ran apart. So optional mirrors must answer too about an attempt that this start
   has heard of, but not about one that it has never heard of.
10. If only another number of ranks can load the newest emergency snapshot, since the ranks that wrote it held different
    values, only a save of the same step may be used in place of it, unless a person names another.
11. A save that is quarantined (``quarantine``) is not tried before the newest save of an earlier step. That is a
    decision, which every required mirror records. It is left alone while any mirror does not answer, or something that
    may be whole cannot be read, and where there is no earlier step, or a start has gone back to that one before. If the
    earlier save cannot be loaded, the quarantined one is tried after all. Only ``auto`` passes over it.
12. Step 0 needs what a start from scratch needs, and either no sign that anything was ever saved, or a recorded
    decision to start from scratch that no save followed. If it was made elsewhere and leaves saves behind, the start
    says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    LineageError,
    NewerFormat,
    NotSigned,
    RefusedOnlyCopy,
    UsageError,
)
from ckptmirror.core.model import KINDS, Attempt, Kind
from ckptmirror.core.reach import Reach
from ckptmirror.core.start import explain
from ckptmirror.core.start.attempts import Counted, count, is_own, others_of, rival_of
from ckptmirror.core.start.evidence import DISK, Evidence, ListFound, Origin, Problem, Row, Voice
from ckptmirror.core.start.explain import Notice
from ckptmirror.core.start.lineage import SaveFacts, lineage
from ckptmirror.core.start.quarantine import chosen_saves, quarantined_at

__all__ = [
    "MakeRoom",
    "Move",
    "Outcome",
    "Refuse",
    "Result",
    "Scratch",
    "Try",
    "Wish",
    "next_move",
    "run_of",
    "settled",
]


@dataclass(frozen=True)
class Wish:
    """What the caller asked of a start.

    Attributes:
        reference: ``"auto"``, ``"latest"``, ``"scratch"``, a step, or a save id (8 digits or more).
        kind: The kind to load, if the caller named one.
        force: Start from scratch even where there are saves; go back to a save even if training continued from it.
        world_size: How many ranks will load.
    """

    reference: str | int = "auto"
    kind: Kind | None = None
    force: bool = False
    world_size: int = 1

    @property
    def is_auto(self) -> bool:
        """Whether the caller named no save, so that no person decided to go back."""
        return self.reference in ("auto", "latest")


class Result(StrEnum):
    """Why a copy that was tried could not be used."""

    BROKEN = "broken"
    UNREADABLE = "unreadable"  # an I/O error or a permission: it may be whole
    OTHER_RANKS = "other_ranks"  # only as many ranks as saved it can load it
    TOUCHED = "touched"  # a rank had begun to load it
    NOT_BROUGHT = "not_brought"  # it could not be brought to this disk now
    NO_ROOM = "no_room"
    MADE_ROOM = "made_room"  # rotation freed space: an answer to MakeRoom
    STILL_FULL = "still_full"  # rotation freed nothing: the other answer


@dataclass(frozen=True)
class Outcome:
    """The outcome of a copy that was tried.

    Attributes:
        error: Why it could not be brought. Raised as it is, in place of going back to an older save.
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
        run_id: The run to continue; None only if no place names it.
        needs_all: Whether every required mirror must take the claim.
        by_person: Whether the attempt counts before it has saved anything: a person chose its save, or this start
            decided to skip a save that is broken but looks whole to others.
        adopt: Attempts that no list names, which the claim adds to the lists.
    """

    save: SaveFacts
    kind: Kind
    place: str
    needs_all: bool
    run_id: str | None = None
    by_person: bool = False
    adopt: tuple[Attempt, ...] = ()
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True)
class MakeRoom:
    """The disk has no room for a copy: rotate, and report whether that freed space."""

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
    """Decide what a start does next.

    Args:
        evidence: What every place reports.
        wish: What the caller asked for.
        tried: What was tried so far, in order.
    """
    start = _Start(evidence, wish, tried)
    try:
        return start.move()
    except LineageError as error:
        return Refuse(
            explain.not_one_run(error, [row.place for row in evidence.answering() if row.sort != "anywhere"]),
            start.said(),
        )
    except CkptMirrorError as error:
        return Refuse(error, start.said())


def settled(evidence: Evidence, wish: Wish) -> tuple[Wish, Attempt | None]:
    """Return what a start does in place of going back, or starting over, a second time: the rest of rule 3.

    Asked once, before the start claims the run: afterwards its own attempt is on the way.

    Returns:
        The wish, and the attempt that the start goes on with; None if it does what it was asked to do.
    """
    if wish.is_auto or wish.force is not (wish.reference == "scratch"):
        return wish, None
    try:
        counted = count(_of_run(evidence, _run_to_continue(evidence, wish)))
    except CkptMirrorError:
        return wish, None  # next_move says why
    decided = [one for one in counted.known.values() if one.by_person and one.id in counted.counting]
    have_saved = {save.attempt for save in counted.saves}
    for at, begun in enumerate(counted.order.way):
        by_person = any(one.parent == begun.parent and one.number <= begun.number for one in decided)
        if by_person and _began_at(begun, wish.reference) and (at > 0 or begun.id in have_saved):
            return replace(wish, reference="auto"), begun
    return wish, None


def run_of(evidence: Evidence) -> str | None:
    """Return the id of the run; None if neither this disk nor a mirror names one.

    Raises:
        ConfigError: They name several runs.
    """
    named = {row.run_id: row for row in evidence.answering() if row.run_id is not None and row.sort != "persistent"}
    if len(named) > 1:
        who = {run_id: explain.named_place(row) for run_id, row in named.items() if run_id is not None}
        runs = "; ".join(f"{place} holds run {run_id[:8]}" for run_id, place in who.items())
        raise explain.not_one_run(runs, who.values())
    return next(iter(named), None)


_ID_DIGITS = 8
_NOT_BROUGHT = (Result.NOT_BROUGHT, Result.NO_ROOM, Result.STILL_FULL)


@dataclass(frozen=True)
class _Candidate:
    """One save in one kind, the places that have it (best first), and the id of the save that replaced it, or ""."""

    save: SaveFacts
    kind: Kind
    rows: tuple[Row, ...]
    age: tuple[int, int]
    replaced_by: str = ""


@dataclass(frozen=True)
class _Held:
    """A save that may still become usable, so going back to an older one is refused with this error."""

    save_id: str
    step: int
    error: CkptMirrorError
    or_step: int | None = None  # another save of this step may still be tried


class _Start:
    """One replay. Its only state is the notices that it has collected."""

    def __init__(self, evidence: Evidence, wish: Wish, tried: Sequence[Outcome]) -> None:
        by_name = [
            replace(row, problems=tuple(sorted(row.problems, key=lambda one: one.name))) for row in evidence.rows
        ]
        self._all = replace(evidence, rows=tuple(by_name))  # so the notices do not depend on the order of a listing
        self._wish = wish
        self._tried = tried
        self._notices: list[Notice] = []

    def said(self) -> tuple[Notice, ...]:
        return tuple(self._notices)

    def move(self) -> Move:
        self._check_places()
        self._run_id = _run_to_continue(self._all, self._wish)
        self._evidence = _of_run(self._all, self._run_id)
        self._counted: Counted = count(self._evidence)
        self._silent = _phrased(self._all, self._counted.silent)
        self._unheard = _phrased(self._all, _not_answering(self._all)) | self._silent
        self._go_back = "" if self._silent else "go back on purpose with policy=<step>"
        self._whole = {save.save_id for save in self._counted.saves}
        self._note_what_is_not_seen()
        if self._counted.doubtful:
            raise explain.person_in_doubt(self._counted.doubtful, self._silent)
        self._problems = self._in_line()
        if self._wish.reference == "scratch":
            return self._start_over()
        return self._continue() or self._step_0()

    # -- rule 1 ----------------------------------------------------------------------------------------------

    def _check_places(self) -> None:
        for row in self._all.rows:
            if row.listed is ListFound.NEWER and row.answers:
                raise NewerFormat(f"The list of attempts of {row.place} was written by a later version: {row.why}")
        if why := explain.not_believed(self._all):
            raise NotSigned(why)
        is_listed = any(row.answers and row.listed is ListFound.SOUND for row in self._all.mirrors())
        if self._all.disk.listed is ListFound.BROKEN and not is_listed:
            if explain.NOT_BELIEVED in self._all.disk.why:
                raise NotSigned(self._all.disk.why)
            raise BrokenMeta(
                f"{self._all.disk.why.removesuffix('.')}, and no mirror has a list that can be used.",
                hint="Move it away, and the list is rebuilt from the saves; a rewind with no save after it is lost.",
            )

    def _note_what_is_not_seen(self) -> None:
        dropped = [row.place for row in self._all.mirrors() if row.reach is Reach.DROPPED]
        for place, phrase in (self._unheard | _phrased(self._all, dropped)).items():
            level: Literal["error", "warning"] = "error" if phrase == explain.NOT_CONFIGURED else "warning"
            self._note(f"{place} {phrase}: what only it holds was not seen", level)
        for row in self._all.rows:
            if row.sort == "persistent" and row.run_id not in (self._run_id, None):
                self._note(f"{row.place} has snapshots of another run, {row.run_id}, which are left alone", "warning")
        is_listed = any(row.listed is ListFound.SOUND for row in self._evidence.answering() if row.sort == "mirror")
        for row in self._evidence.answering():
            is_lost = row.listed is ListFound.LOST and not (
                row.sort == "disk" and is_listed
            )  # mirrors name what counts
            if row.sort != "persistent" and (is_lost or row.listed is ListFound.BROKEN):
                self._note(
                    f"{row.place} had no list of attempts, so it was rebuilt from the saves: if you rewound the run or "
                    "started it over, and made no save after that, do so again"
                )
        others = "mirrors" if self._evidence.mirrors() else "other nodes"
        for attempt in sorted(self._counted.apart):
            self._note(
                f"{explain.named(self._counted.known[attempt])} ran apart from the {others}, and the run continued "
                "without it: its saves are superseded; each can be resumed by its save id"
            )

    # -- rules 3 and 12 --------------------------------------------------------------------------------------

    def _start_over(self) -> Move:
        order = self._counted.order
        saved = [f"step {step}" for step in order.steps()[-5:]]
        saved += [f"step {save.step} (save {save.save_id[:8]})" for save in (*order.superseded, *order.unknown)][:5]
        saved += self._traces(None)
        if saved and not self._wish.force:
            raise explain.never_step_0(saved, asked=True)
        if self._unheard:
            raise explain.not_answering("A start over needs the answer of every mirror. ", self._unheard)
        return Scratch(by_person=self._wish.force or bool(self._counted.heard), notices=self.said())

    def _step_0(self) -> Move:
        if self._wish.reference != "auto":
            raise self._none_loaded(repr(self._wish.reference))
        if self._unheard:
            raise explain.not_answering(
                "There is nothing here to continue the run from, but a mirror that cannot be read may hold it, and "
                "starting at step 0 might fork the run: ",
                self._unheard,
            )
        self._look_past(None)
        order = self._counted.order
        decided = order.way[0] if order.way and order.way[0].parent is None and order.way[0].by_person else None
        left = order.unknown if decided is not None else (*order.superseded, *order.replaced, *order.unknown)
        traces = self._traces(decided) + [self._line(one) for one in self._failed()]
        traces += [f"step {save.step} (save {save.save_id[:8]})" for save in left]
        if traces or order.current:
            raise explain.never_step_0(traces[:10], asked=False)
        behind = [*order.superseded, *order.replaced] if decided is not None else []
        if decided is not None and behind and not is_own(self._evidence, decided):
            last = max(behind, key=lambda save: (save.step, self._counted.known[save.attempt].number, save.number))
            self._note(
                f"training starts at step 0, because {explain.named(decided)} elsewhere was started from scratch; "
                f"it leaves {len(behind)} saves behind, up to step {last.step}. If nobody decided that, stop, and "
                f"start once with manager.resume(state, policy={last.save_id[:8]!r})"
            )
        return Scratch(by_person=False, notices=self.said())

    def _traces(self, decided: Attempt | None) -> list[str]:
        """Return everything that shows that training happened here, but cannot be resumed from.

        Args:
            decided: A recorded start from scratch: the saves that it left behind are not traces.
        """
        in_line = {one.name for one in self._problems}
        left = self._counted.known.keys() if decided is not None else ()
        broken = [
            one
            for row in self._evidence.answering()
            for one in row.problems
            if one.save_id not in self._whole
            if not one.is_save or one.name in in_line or one.save is None or one.save.attempt not in left
        ]
        found = [f"{one.name}: {one.why}" for one in broken]
        found += [
            f"step {save.step} (save {save.save_id[:8]}): no list names its attempt {save.attempt[:8]}"
            for save in self._counted.strangers
        ]
        have = {save.attempt for save in self._counted.saves}
        have |= {one.save.attempt for one in broken if one.save is not None}
        saved = self._evidence.heard_as(Voice.COUNTS)
        for one in sorted(self._counted.heard.values(), key=_age):
            if decided is not None and _age(one) < _age(decided):
                continue
            if one.id in saved and one.id not in have:
                found.append(f"{explain.named(one)} has saved, but nothing of it is left")
            elif one.parent is not None and one.parent.save_id not in self._whole:
                found.append(f"{explain.named(one)} continued from step {one.parent.step}, but that save is gone")
        return found

    # -- rule 4 ----------------------------------------------------------------------------------------------

    def _continue(self) -> Move | None:
        candidates = self._candidates()
        earlier = self._instead_of_quarantined(candidates)
        candidates.sort(key=lambda one: one.save.save_id != earlier)  # it comes first; all others stay in order
        only, held = self._so_far()
        asked_for_room = any(one.result in (Result.MADE_ROOM, Result.STILL_FULL) for one in self._tried)
        for candidate, row in ((one, row) for one in candidates for row in one.rows):
            save = candidate.save
            outcomes = [one.result for one in self._tried if _is_of(one, candidate, row)]
            if outcomes[-1:] == [Result.NO_ROOM] and not asked_for_room:
                return MakeRoom(save.save_id, candidate.kind, row.place, self.said())
            if outcomes and outcomes[-1] is not Result.MADE_ROOM:
                continue
            if only not in (None, save.save_id):
                continue
            for one in held:
                if one.step >= save.step and one.save_id != save.save_id and one.or_step != save.step:
                    raise one.error
            self._check_going_back(candidate)
            self._note_what_is_aside(save)
            passed = [one for one in self._failed() if one.save_id != save.save_id and self._step_of(one) >= save.step]
            goes_back = bool(passed and not self._silent) or save.save_id == earlier
            decides = goes_back or not self._wish.is_auto
            return Try(
                save,
                candidate.kind,
                row.place,
                needs_all=decides or not self._vouches_for(save),
                run_id=self._run_id,
                by_person=decides,
                adopt=self._adopted(save),
                notices=self.said(),
            )
        if held:
            raise held[0].error
        if only is not None:
            raise self._none_loaded(f"save {only[:8]}")
        return None

    # -- rule 11 ---------------------------------------------------------------------------------------------

    def _instead_of_quarantined(self, candidates: Sequence[_Candidate]) -> str | None:
        """Return the id of the save to try first if the newest one is quarantined; None if the order stays."""
        if self._wish.reference != "auto" or not candidates:
            return None
        newest = candidates[0].save
        heard = self._counted.heard.values()
        failures = quarantined_at(self._evidence, heard).get(newest.save_id)
        if failures is None:
            return None
        earlier = next((one.save for one in candidates if one.save.step < newest.step), None)
        obstacle = ""
        if earlier is None:
            obstacle = "there is no earlier save"
        elif earlier.save_id in chosen_saves(heard):
            obstacle = f"the run was taken back to step {earlier.step} before"
        elif self._unheard or any(one.hindrance for one in self._problems):
            obstacle = "to go back, every mirror has to answer and every save to be readable"
        elif not any(self._is_left(one, row) for one in candidates if one.save == earlier for row in one.rows):
            obstacle = f"step {earlier.step} cannot be loaded"
        self._note(explain.quarantined(newest, failures, earlier, obstacle))
        return earlier.save_id if earlier is not None and not obstacle else None

    def _is_left(self, candidate: _Candidate, row: Row) -> bool:
        """Whether this copy may still be tried."""
        return not any(_is_of(one, candidate, row) for one in self._failed())

    def _candidates(self) -> list[_Candidate]:
        reference = self._wish.reference
        try:
            if self._wish.is_auto:
                found = self._on_the_lineage()
            elif isinstance(reference, int):
                found = [one for one in self._on_the_lineage() if one.save.step == reference]
                if not found:
                    raise explain.missing_step(reference, self._counted.order)
            else:
                save = self._by_id(reference)
                found = [self._candidate(save, kind) for kind in KINDS if kind in save.kinds]
            found = [one for one in found if self._wish.kind in (None, one.kind)]
            if reference != "auto" and not found:
                raise CheckpointNotFound(f"There is no whole save {reference!r}.")
        except CheckpointNotFound as error:
            self._check_hindered(one for one in self._problems if reference in ("latest", one.step))
            self._check_hindered(self._of_id(reference))
            if self._unheard:
                raise explain.not_answering(f"{error.message} It may be there: ", self._unheard) from error
            if broken := [f"{one.name}: {one.why}" for one in self._problems if reference in ("latest", one.step)]:
                raise CheckpointNotFound(f"{error.message} Not whole: {'; '.join(broken)}.", hint=error.hint) from error
            raise
        return found

    def _candidate(self, save: SaveFacts, kind: Kind, replaced_by: str = "") -> _Candidate:
        copies = [
            ((copy.no_proof, row.place == DISK and copy.unfinished), row)
            for row in self._evidence.answering()
            for copy in row.copies
            if copy.save.save_id == save.save_id and kind in copy.save.kinds
        ]
        rows = tuple(row for _, row in sorted(copies, key=lambda one: one[0]))
        return _Candidate(save, kind, rows, self._age(save), replaced_by)

    def _on_the_lineage(self) -> list[_Candidate]:
        order = self._counted.order
        saves = {save.save_id: save for save in (*order.current.values(), *order.replaced)}.values()
        found = []
        for kind in KINDS:
            for save in (one for one in saves if kind in one.kinds):
                stands = order.current[(save.step, kind)].save_id
                found.append(self._candidate(save, kind, "" if stands == save.save_id else stands))
        return sorted(found, key=lambda one: (one.save.step, not one.replaced_by, one.age), reverse=True)

    def _age(self, save: SaveFacts) -> tuple[int, int]:
        """Sort key: of two saves of one step, the one with the greater key is newer."""
        attempt = self._counted.known.get(save.attempt)
        return attempt.number if attempt is not None else -1, save.number

    def _by_id(self, reference: str) -> SaveFacts:
        if len(reference) < _ID_DIGITS or not set(reference) <= set("0123456789abcdef"):
            raise explain.unknown_reference(reference)
        found = [save for save in self._counted.saves if save.save_id.startswith(reference)]
        if len(found) > 1:
            raise UsageError(f"{len(found)} save ids start with {reference}.", hint="Give more digits.")
        if not found:
            why = "".join(f" {one.name} is not whole: {one.why}." for one in self._of_id(reference))
            raise CheckpointNotFound(f"No whole save has an id that starts with {reference}.{why}")
        return found[0]

    def _of_id(self, reference: str | int) -> list[Problem]:
        found = [one for row in self._evidence.answering() for one in row.problems]
        return [one for one in found if isinstance(reference, str) and one.save_id.startswith(reference)]

    # -- rules 5, 7 and 10: what was tried -------------------------------------------------------------------

    def _so_far(self) -> tuple[str | None, list[_Held]]:
        """Return the only save that may still be loaded, and those that may still become usable."""
        only: str | None = None
        held: list[_Held] = []
        for one in self._failed():
            self._note(self._line(one), step=self._step_of(one), save_id=one.save_id, place=one.place)
            if one.result is Result.TOUCHED:
                only = one.save_id
            held += self._held_by(one)
        return only, held

    def _held_by(self, one: Outcome) -> list[_Held]:
        """Return what holds a start back after this outcome, if anything does."""
        step = self._step_of(one)
        if one.result in _NOT_BROUGHT:
            error = one.error or explain.not_readable(f"The copy of step {step} in {one.place}", one.reason)
            return [_Held(one.save_id, step, error)]
        if one.result is Result.UNREADABLE:
            return [_Held(one.save_id, step, explain.not_readable(f"The copy of step {step}", one.reason))]
        if one.result is Result.OTHER_RANKS:
            copies = (copy for row in self._evidence.rows for copy in row.copies if copy.save.save_id == one.save_id)
            saved_by = max((copy.world_size for copy in copies), default=0)
            needs_ranks = explain.emergency_needs_ranks(step, saved_by, self._wish.world_size)
            return [_Held(one.save_id, step, needs_ranks, or_step=step)]
        if one.kind != "emergency" and self._unheard:  # no mirror holds emergency snapshots
            why = f"The copy of step {step} is broken ({one.reason}), and a whole one may be there: "
            waits = explain.not_answering(why, self._unheard, or_else=self._go_back)
            return [_Held(one.save_id, step, waits)]
        return []

    def _failed(self) -> list[Outcome]:
        """Return the copies that failed, except those that rotation has made room for, or still may."""
        first = next((n for n, one in enumerate(self._tried) if one.result is Result.NO_ROOM), None)
        return [one for n, one in enumerate(self._tried) if n != first and one.result is not Result.MADE_ROOM]

    def _none_loaded(self, what: str) -> IntegrityError:
        return IntegrityError(f"No copy of {what} could be loaded: " + "; ".join(map(self._line, self._failed())))

    def _step_of(self, outcome: Outcome) -> int:
        return next((save.step for save in self._counted.saves if save.save_id == outcome.save_id), -1)

    def _line(self, outcome: Outcome) -> str:
        verb = "cannot be fetched now: " if outcome.result in _NOT_BROUGHT else ""
        return f"step {self._step_of(outcome)} (save {outcome.save_id[:8]}, {outcome.place}): {verb}{outcome.reason}"

    # -- rules 6, 8 and 9: may this one be continued from? ---------------------------------------------------

    def _check_going_back(self, candidate: _Candidate) -> None:
        save, silent = candidate.save, self._silent
        if self._wish.is_auto or isinstance(self._wish.reference, int):
            self._look_past(candidate)
        if silent and not self._wish.is_auto:
            raise explain.not_answering("A person's choice is recorded on every required mirror. ", silent)
        if silent and not self._vouches_for(save):
            here = any(row.place == DISK for row in candidate.rows)
            what = "may have come from elsewhere" if here else "is not on this disk"
            raise explain.not_answering(f"Step {save.step}, the newest that can be seen, {what}. ", silent)
        if silent and (rival := rival_of(self._evidence, self._counted, save.attempt)) is not None:
            raise explain.rival_may_have_saved(rival, silent)
        if self._unheard and self._wish.is_auto and (newer := self._unseen_after(save)) is not None:
            raise explain.rival_may_have_saved(newer, self._unheard, or_else=self._go_back)
        if candidate.replaced_by:
            self._note(
                f"step {save.step} (save {candidate.replaced_by[:8]}): no copy in kind {candidate.kind} can be used; "
                f"save {save.save_id[:8]}, which it replaced, is tried"
            )

    def _vouches_for(self, save: SaveFacts) -> bool:
        """Whether this root made a save, or continued from it by a claim that it completed everywhere."""
        disk = self._evidence.disk
        if disk.listed is not ListFound.SOUND:
            return False
        copies = [copy for row in self._evidence.rows for copy in row.copies]
        if any(copy.save.save_id == save.save_id and copy.origin is Origin.SAVED_HERE for copy in copies):
            return True
        return any(
            Voice.COMPLETED in heard.voices
            and is_own(self._evidence, heard.attempt)
            and heard.attempt.parent is not None
            and heard.attempt.parent.save_id == save.save_id
            for heard in disk.heard
        )

    def _unseen_after(self, save: SaveFacts) -> Attempt | None:
        """Return the newest attempt that rule 9 does not let a start skip for this save; None if there is none."""
        known, this = self._counted.known, self._counted.known[save.attempt]
        mirrors = [row for row in self._evidence.answering() if row.sort == "mirror"]
        shown = {one.attempt for one in self._counted.saves}  # a torn snapshot shows nothing of the saves beside it
        shown |= {one for row in mirrors for one in row.heard_as(Voice.COUNTS)}
        seen = self._evidence.heard_as(Voice.COUNTS) & shown & known.keys() - self._counted.apart
        others = others_of(self._evidence, self._counted.heard.values())
        return max((one for one in others if _age(one) > _age(this) and one.id not in seen), key=_age, default=None)

    def _in_line(self) -> list[Problem]:
        """Return the problems that could be saves of the lineage, each with only the kinds in which it would count."""
        removed = {one for row in self._evidence.answering() for one in row.removed}
        found = []
        for row in self._evidence.answering():
            waits = row.sort != "mirror" or row.required or row.was_required  # not for what an optional mirror has
            for one in row.problems:
                if one.is_save and one.save_id not in self._whole | removed and (kinds := self._kinds_if_whole(one)):
                    found.append(replace(one, kinds=kinds, hindrance=one.hindrance if waits else ""))
        return found

    def _kinds_if_whole(self, problem: Problem) -> tuple[Kind, ...]:
        facts = problem.save
        if facts is None:
            return problem.kinds
        counting = set(self._counted.counting)
        if facts.attempt in self._counted.known.keys() - self._counted.apart:
            counting.add(facts.attempt)
        others = [save for save in self._counted.saves if save.save_id != facts.save_id]
        current = lineage(self._counted.known.values(), [*others, facts], counting).current
        return tuple(kind for kind in problem.kinds if current.get((facts.step, kind)) == facts)

    def _look_past(self, candidate: _Candidate | None) -> None:
        """Note what is newer but not whole; refuse if any of it may be whole in a place that cannot be read."""
        passed = [one for one in self._problems if candidate is None or self._comes_before(one, candidate)]
        if not self._wish.is_auto:  # by naming a step, the person decided about everything newer
            passed = [one for one in passed if one.step == self._wish.reference]
        for one in passed:
            step = -1 if one.step is None else one.step
            what = one.name if one.step is None else f"step {one.step} ({one.name})"
            self._note(f"{what}: {one.why}", step=step, save_id=one.save_id, place=one.name)
        self._check_hindered(passed)
        for one in passed:
            if self._unheard and one.kinds != ("emergency",):  # no mirror holds emergency snapshots
                why = f"{one.name} is not whole ({one.why}), and may be there: "
                raise explain.not_answering(why, self._unheard, or_else=self._go_back)

    def _check_hindered(self, problems: Iterable[Problem]) -> None:
        for one in problems:
            if one.hindrance:
                raise explain.not_readable(one.name, one.why, one.hindrance)

    def _comes_before(self, problem: Problem, candidate: _Candidate) -> bool:
        """Whether the problem, if it were whole, would be tried before the candidate."""
        if problem.step is None or problem.step > candidate.save.step:
            return True
        if problem.step < candidate.save.step:
            return False
        return bool(candidate.replaced_by) or problem.save is None or self._age(problem.save) >= candidate.age

    # -- what a person should know ---------------------------------------------------------------------------

    def _note_what_is_aside(self, chosen: SaveFacts) -> None:
        strangers = self._counted.strangers
        broken = {one.save_id for one in self._failed()}
        aside = [one for one in self._counted.order.superseded if one not in strangers and one.save_id not in broken]
        later = [save for save in aside if save.step > chosen.step]
        if later and self._wish.is_auto:
            last = max(later, key=lambda save: (save.step, self._age(save))).save_id
            steps = f"{len(later)} saves (steps {later[0].step} to {later[-1].step}) are"
            one = f"step {later[0].step} (save {last[:8]}) is"
            self._note(
                f"{steps if len(later) > 1 else one} whole and superseded: a later attempt continued from an earlier "
                f"save; if that was not meant, stop, and continue from it {explain.with_what(last)}",
                "warning",
            )
        for save in strangers:
            if save.step >= chosen.step and save.save_id != chosen.save_id:
                self._note(
                    f"step {save.step} (save {save.save_id[:8]}): no list names its attempt {save.attempt[:8]} (an "
                    "older list was restored, or the attempt was never listed); resume it by its save id, if it is "
                    "right"
                )

    def _adopted(self, save: SaveFacts) -> tuple[Attempt, ...]:
        """Return the attempt of a save that a person named, and its ancestors, as far as no list names them."""
        found: list[Attempt] = []
        one = self._counted.heard.get(save.attempt)
        while one is not None and one.id not in self._counted.known:
            if found and one.number >= found[-1].number:
                break  # the data contradicts itself: the claim will raise
            found.append(one)
            one = self._counted.heard.get(one.parent.attempt) if one.parent is not None else None
        return tuple(found)

    def _note(
        self,
        line: str,
        level: Literal["error", "warning"] = "error",
        *,
        step: int | None = None,
        save_id: str = "",
        place: str = "",
    ) -> None:
        notice = Notice(line, level, step, save_id, place)
        if notice not in self._notices:
            self._notices.append(notice)


def _not_answering(evidence: Evidence) -> list[str]:
    """Return the configured mirrors that did not answer."""
    return [row.place for row in evidence.mirrors() if not row.answers and row.reach is not Reach.DROPPED]


def _phrased(evidence: Evidence, places: Iterable[str]) -> dict[str, str]:
    """Return, for each place, why its answer is missing."""
    return {place: explain.missing_word(evidence.row(place)) for place in places}


def _run_to_continue(evidence: Evidence, wish: Wish) -> str | None:
    """Return the id of the run; None if no place names one.

    Raises:
        ConfigError: This disk and the mirrors name several runs.
        RefusedOnlyCopy: Only snapshots in the persistent directory name a run, and it may not be this one.
        StoreTemporary: So it is, but a mirror does not answer.
        NotAuthorised: It refuses the credentials.
    """
    run_id = run_of(evidence)
    snapshots = [(copy, row) for row in evidence.rows if row.sort == "persistent" for copy in row.copies]
    if run_id is not None or not snapshots or wish.reference == "scratch":
        return run_id
    if not evidence.mirrors() and len({row.run_id for _, row in snapshots}) == 1:
        return snapshots[0][1].run_id
    if isinstance(wish.reference, str) and not wish.is_auto:
        named = [row.run_id for copy, row in snapshots if copy.save.save_id.startswith(wish.reference)]
        if named:
            return named[0]
    copy, row = max(snapshots, key=lambda one: (one[0].save.step, one[0].save.save_id))
    silent, name = count(evidence).silent, f"policy={copy.save.save_id[:8]!r}"
    if unheard := _phrased(evidence, {**silent, **dict.fromkeys(_not_answering(evidence))}):
        raise explain.not_answering(
            f"{row.place} has an emergency snapshot of step {copy.save.step}, and only a mirror can say whether it is "
            "of this run. ",
            unheard,
            or_else="" if silent else f"continue from it with {name}",
        )
    raise RefusedOnlyCopy(
        f"{row.place} has an emergency snapshot of step {copy.save.step}, and neither this disk nor a mirror says "
        "whether it is of this run.",
        hint=f"To continue from it, give {name}. To begin another run, give it a "
        "persistent_dir of its own, or policy='scratch' with force=True.",
    )


def _of_run(evidence: Evidence, run_id: str | None) -> Evidence:
    """Return the evidence without snapshots of other runs in the persistent directory; unchanged if no run is known."""
    rows = [row for row in evidence.rows if row.sort != "persistent" or run_id is None or row.run_id in (None, run_id)]
    return replace(evidence, rows=tuple(rows))


def _is_of(outcome: Outcome, candidate: _Candidate, row: Row) -> bool:
    return (outcome.save_id, outcome.kind, outcome.place) == (candidate.save.save_id, candidate.kind, row.place)


def _began_at(attempt: Attempt, reference: str | int) -> bool:
    """Whether an attempt started at this step, save id or "scratch"."""
    parent = attempt.parent
    if parent is None or reference == "scratch":
        return parent is None and reference == "scratch"
    if isinstance(reference, int):
        return parent.step == reference
    return len(reference) >= _ID_DIGITS and parent.save_id.startswith(reference)


def _age(attempt: Attempt) -> tuple[int, str]:
    return attempt.number, attempt.id
