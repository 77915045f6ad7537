"""Rows of evidence in a few words, and what a start is expected to do with them.

A save is named for its attempt and step: ``a.save(100)``. A row says what its place lists, and what it holds; how each
attempt is known follows from that, as a survey would fill it in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Attempt, Kind, SaveRef
from ckptmirror.core.problems import Hindrance
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.decide import MakeRoom, Move, Outcome, Refuse, Result, Scratch, Try, Wish, next_move
from ckptmirror.core.start.evidence import (
    ANYWHERE,
    DISK,
    Copy,
    Evidence,
    Heard,
    ListFound,
    Origin,
    Problem,
    Row,
    Sort,
    Voice,
    evidence_from_json,
    evidence_to_json,
)
from ckptmirror.core.start.lineage import SaveFacts
from tests.unit.core.core_builders import id_of

HERE, THERE, ELSEWHERE = (id_of(f"root {name}") for name in ("here", "there", "elsewhere"))
RUN, OTHER_RUN = id_of("run"), id_of("other run")
M, N, O, KEPT = "file:///m", "file:///n", "file:///optional", "/kept"  # noqa: E741 - O is the optional mirror
BOTH: tuple[Kind, ...] = ("dcp", "model")


@dataclass(frozen=True)
class By:
    """An attempt, which can save."""

    attempt: Attempt

    def save(self, step: int, *kinds: Kind, number: int = 0) -> Saved:
        """Return a save of this attempt, of kind dcp unless said; its number is its step unless given."""
        facts = SaveFacts(id_of(f"{self.attempt.id} {step} {number}"), self.attempt.id, number or step, step, kinds)
        return Saved(facts if kinds else replace(facts, kinds=("dcp",)), self.attempt)


@dataclass(frozen=True)
class Saved:
    """A save and its attempt."""

    facts: SaveFacts
    attempt: Attempt
    unfinished: bool = False
    ranks: int = 1

    @property
    def id(self) -> str:
        return self.facts.save_id

    @property
    def ref(self) -> SaveRef:
        return SaveRef(self.attempt.id, self.facts.number, self.facts.step, self.facts.save_id)

    def only(self, *kinds: Kind) -> Saved:
        """Return the copy of which only these kinds are whole."""
        return replace(self, facts=replace(self.facts, kinds=kinds))


def by(
    name: str,
    number: int,
    *,
    after: Saved | None = None,
    root: str = HERE,
    person: bool = False,
    needs: tuple[str, ...] = (),
    decided: bool = True,
) -> By:
    """Return an attempt: ``after`` is what it continued from, ``needs`` the mirrors that a person's has to be on."""
    parent = after.ref if after is not None else None
    return By(Attempt(id_of(name), number, parent, decided, by_person=person, root=root, required=needs))


def broken(
    save: Saved,
    why: str = "torn",
    *,
    at: str = "",
    readable: bool = True,
    hindrance: Hindrance = "",
    kinds: tuple[Kind, ...] | None = None,
) -> tuple[Problem, Attempt]:
    """Return the problem of a save that cannot be resumed from; ``readable``: whether its meta can be read."""
    name = at or f"meta_{save.facts.step:06d}.json"
    facts = save.facts if readable else None
    found = Problem(name, why, save.facts.step, save.id, kinds or save.facts.kinds, facts, hindrance)
    return found, save.attempt


def _row(
    place: str,
    sort: Sort,
    lists: Sequence[By] | None,
    holds: Iterable[tuple[Saved, Origin]],
    damaged: Iterable[tuple[Problem, Attempt]],
    voices: dict[Voice, Iterable[By]],
    counts: Iterable[str],
    **more: object,
) -> Row:
    copies, damaged = list(holds), list(damaged)
    listed = {one.attempt.id: one.attempt for one in lists or ()}
    of_metas = [save.attempt for save, _ in copies] + [attempt for problem, attempt in damaged if problem.save]
    attempts = listed | {one.attempt.id: one.attempt for group in voices.values() for one in group}
    attempts |= {one.id: one for one in of_metas if one.id not in attempts}
    heard = {one: set[Voice]() for one in attempts}
    for one in listed:
        heard[one].add(Voice.CLAIMED if attempts[one].decided else Voice.UNDECIDED)
    for one in {one.id for one in of_metas} - listed.keys():
        heard[one].add(Voice.NAMED)
    for one in set(counts) & attempts.keys():
        heard[one].add(Voice.COUNTS)
    for voice, group in voices.items():
        for by_whom in group:
            heard[by_whom.attempt.id].add(voice)
    list_found = ListFound.SOUND if lists is not None else ListFound.LOST if of_metas else ListFound.NONE
    found = {
        "listed": list_found if sort != "persistent" else ListFound.NONE,
        "run_id": RUN if attempts else None,
        "heard": tuple(Heard(attempts[one], frozenset(said)) for one, said in heard.items()),
        "copies": tuple(Copy(save.facts, origin, save.unfinished, save.ranks) for save, origin in copies),
        "problems": tuple(problem for problem, _ in damaged),
    }
    return Row(place, sort, **(found | more))  # type: ignore[arg-type]


def disk(
    lists: Sequence[By] | None = None,
    *,
    saved: Iterable[Saved] = (),
    staged: Iterable[Saved] = (),
    copied: Iterable[Saved] = (),
    completed: Iterable[By] = (),
    uploaded: Iterable[By] = (),
    met: Iterable[By] = (),
    damaged: Iterable[tuple[Problem, Attempt]] = (),
    **more: object,
) -> Row:
    """Return the row of this disk. ``lists`` None: its list is lost, or it never had one."""
    groups = ((saved, Origin.SAVED_HERE), (staged, Origin.STAGED), (copied, Origin.COPIED))
    holds = [(save, origin) for saves, origin in groups for save in saves]
    counts = {save.attempt.id for save, origin in holds if origin is not Origin.STAGED}
    counts |= {attempt.id for problem, attempt in damaged if problem.save and attempt.root == HERE}
    counts |= {one.attempt.parent.attempt for one in lists or () if one.attempt.parent and one.attempt.root == HERE}
    voices = {Voice.COMPLETED: completed, Voice.UPLOADED: uploaded, Voice.FENCED_US: met}
    return _row(DISK, "disk", lists, holds, damaged, voices, counts, **more)


def mirror(
    place: str,
    lists: Sequence[By] | None = None,
    holds: Iterable[Saved] = (),
    *,
    damaged: Iterable[tuple[Problem, Attempt]] = (),
    removed: Iterable[Saved] = (),
    **more: object,
) -> Row:
    """Return the row of a mirror that answers; it is required unless it is ``O``."""
    gone = list(removed)
    counts = {save.attempt.id for save in (*holds, *gone)} | {
        attempt.id for problem, attempt in damaged if problem.save
    }
    more = {"required": place != O, "removed": tuple(save.id for save in gone)} | more
    return _row(place, "mirror", lists, [(save, Origin.REMOTE) for save in holds], damaged, {}, counts, **more)


def kept(*saves: Saved, damaged: Iterable[tuple[Problem, Attempt]] = (), run: str | None = RUN) -> Row:
    """Return the row of the persistent directory for one run."""
    damaged = list(damaged)
    counts = [save.attempt.id for save in saves] + [attempt.id for problem, attempt in damaged if problem.save]
    holds = [(save, Origin.REMOTE) for save in saves]
    return _row(KEPT, "persistent", None, holds, damaged, {}, counts, run_id=run)


def together(*saves: Saved, origin: Origin = Origin.REMOTE, committed: Iterable[By] = ()) -> Row:
    """Return the row of what all places have together; ``committed``: whose saves parts on disks and mirrors show."""
    heard = tuple(Heard(one.attempt, frozenset({Voice.NAMED, Voice.COUNTS})) for one in committed)
    copies = tuple(Copy(save.facts, origin, world_size=save.ranks) for save in saves)
    return Row(ANYWHERE, "anywhere", heard=heard, copies=copies)


def silent(place: str, why: str = "503", **more: object) -> Row:
    """Return the row of a mirror that does not answer; it is required unless it is ``O``."""
    found = {"reach": Reach.SILENT, "required": place != O}
    return Row(place, "mirror", why=why, **(found | more))  # type: ignore[arg-type]


def dropped(place: str, *, was_required: bool = True) -> Row:
    """Return the row of a mirror that is no longer configured."""
    return Row(place, "mirror", Reach.DROPPED, was_required=was_required)


# -- what is expected ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a start does: one of its moves, and phrases of its notices or its error."""

    move: type[Move]
    save: Saved | None = None
    place: str = ""
    kind: Kind | None = None
    error: type[CkptMirrorError] | None = None
    phrases: tuple[str, ...] = ()
    fields: tuple[tuple[str, object], ...] = ()


def tries(save: Saved, place: str = DISK, kind: Kind | None = None, *, says: str = "", **fields: object) -> Expected:
    """Expect that it tries this copy; ``says``: a phrase of its notices, and none without one."""
    return Expected(Try, save, place, kind, phrases=(says,) if says else (), fields=tuple(fields.items()))


def makes_room(save: Saved, place: str) -> Expected:
    """Expect that it asks for a rotation."""
    return Expected(MakeRoom, save, place)


def refuses(error: type[CkptMirrorError], *phrases: str) -> Expected:
    """Expect that it refuses; each phrase is in the error or its hint."""
    return Expected(Refuse, error=error, phrases=phrases)


def step_0(*, by_person: bool = False, says: str = "") -> Expected:
    """Expect that it starts at step 0; ``says`` as in :func:`tries`."""
    return Expected(Scratch, phrases=(says,) if says else (), fields=(("by_person", by_person),))


@dataclass(frozen=True)
class Case:
    """One situation; the name is a sentence."""

    name: str
    rows: Sequence[Row]
    expected: Expected
    wish: Wish = field(default_factory=Wish)
    tried: Sequence[Outcome] = ()

    def check(self) -> None:
        """Check that the start does what is expected, and that the evidence survives JSON."""
        evidence = Evidence(tuple(self.rows), HERE)
        assert evidence_from_json(evidence_to_json(evidence)) == evidence
        move = next_move(evidence, self.wish, self.tried)
        want = self.expected
        assert isinstance(move, want.move), move
        said = "\n".join(notice.line for notice in move.notices)
        if isinstance(move, Refuse):
            assert type(move.error) is want.error, move.error
            said = f"{move.error}\n{move.error.hint}"
        for phrase in want.phrases:
            assert phrase in said, said
        if isinstance(move, Try) and not want.phrases:
            assert said == ""
        if isinstance(move, Try):
            assert want.save is not None
            assert (move.save.save_id, move.place) == (want.save.id, want.place)
            assert want.kind in (None, move.kind)
        for name, value in want.fields:
            assert getattr(move, name) == value, name


def went_wrong(
    save: Saved, place: str, result: Result, kind: Kind = "dcp", error: CkptMirrorError | None = None
) -> Outcome:
    """Return the outcome of a copy that was tried."""
    return Outcome(save.id, kind, place, result, "a bit flipped", error)
