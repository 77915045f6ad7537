"""What holds for every start, over generated histories of a run; ``worlds`` says what the histories can contain.

``CKPTMIRROR_CAMPAIGN=full`` takes 20,000 examples of each.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ckptmirror.core.model import Attempt
from ckptmirror.core.start import attempts, decide
from ckptmirror.core.start.decide import MakeRoom, Move, Outcome, Refuse, Result, Scratch, Try, Wish, next_move
from ckptmirror.core.start.evidence import (
    Evidence,
    ListFound,
    Origin,
    Voice,
    evidence_from_json,
    evidence_to_json,
)
from ckptmirror.core.start.lineage import SaveFacts
from tests.unit.core.start.worlds import Root, World, worlds

pytestmark = pytest.mark.long

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
many = settings(
    max_examples=20_000 if FULL else 300,
    derandomize=not FULL,  # the same examples in every run of `make test`; a campaign looks further
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
TRIED_IN_VAIN = [one for one in Result if one not in (Result.MADE_ROOM, Result.STILL_FULL)]


# -- what is true, computed without the rules under test -------------------------------------------------------


class Past:
    """Who continued from what, as far as one evidence tells."""

    def __init__(self, evidence: Evidence) -> None:
        heard = [heard.attempt for row in evidence.answering() for heard in row.heard]
        self.attempts: dict[str, Attempt] = {one.id: one for one in heard}
        self.persons = {one.id for one in heard if one.by_person}
        self.saved = evidence.heard_as(Voice.COUNTS)
        self.saves = {copy.save.save_id: copy.save for row in evidence.answering() for copy in row.copies}

    def way(self, attempt: str) -> Iterator[tuple[str, int | None]]:
        """Yield an attempt and those before it, each with the number of the save where the next one left it."""
        left: int | None = None
        while attempt in self.attempts:
            yield attempt, left
            parent = self.attempts[attempt].parent
            if parent is None:
                return
            attempt, left = parent.attempt, parent.number

    def has(self, attempt: str, save: SaveFacts) -> bool:
        """Whether a save is in an attempt's past, or its own."""
        return any(one == save.attempt and (left is None or save.number <= left) for one, left in self.way(attempt))

    def may_leave(self, save: SaveFacts) -> bool:
        """Whether some attempt that saved, or that a person decided, did not continue from this save."""
        mine = {one for one, _ in self.way(save.attempt)}
        zombies = {
            one.attempt for one in self.saves.values() if one.attempt in mine and not self.has(save.attempt, one)
        }
        beside = {one for one in self.attempts if one not in mine and not self.has(one, save)}
        return bool(beside & (self.saved | self.persons) or zombies)


def is_older(past: Past, one: SaveFacts, than: SaveFacts) -> bool:
    """Whether a start from ``one`` loses training beside a start from ``than``."""
    if one.attempt == than.attempt:
        return one.number < than.number
    return one.step < than.step or (one.step == than.step and past.has(than.attempt, one))


def vouches(evidence: Evidence, save: SaveFacts) -> bool:
    """Whether the list of this root is there, and says that a save was made or continued here."""
    disk = evidence.disk
    made = {copy.save.save_id for copy in disk.copies if copy.origin is Origin.SAVED_HERE}
    went_on = {h.attempt.parent.save_id for h in disk.heard if Voice.COMPLETED in h.voices and h.attempt.parent}
    return disk.listed is ListFound.SOUND and save.save_id in made | went_on


# -- the properties, as functions: planted bugs must make them fail ---------------------------------------------


def silence_costs_at_most_a_refusal(world: World, root: int, url: str) -> None:
    there = world.roots[root]
    full, less = world.see(there), world.see(there, silent=[url])
    row, before, after = full.row(url), next_move(full, Wish()), next_move(less, Wish())
    if row is None or not row.answers:
        return
    assert not isinstance(after, Scratch), "step 0 while a mirror is silent"
    if not isinstance(after, Try):
        return
    assert isinstance(after.place, str)
    silent_row = less.row(url)
    assert silent_row is not None
    if silent_row.required or silent_row.was_required:
        assert vouches(less, after.save), "it goes on from what this root cannot vouch for"
    if isinstance(before, Try):
        past = Past(full)
        if is_older(past, after.save, before.save):
            mine = {one for one, _ in past.way(after.save.attempt)}
            newer = {one for one, _ in past.way(before.save.attempt)} - mine
            assert not newer & Past(less).attempts.keys(), "an older save, although it heard of a newer attempt"
            named = {problem.save_id for row in less.answering() for problem in row.problems}
            may_be_there = before.kind != "emergency" and before.save.save_id in named
            assert not may_be_there, "an older save, although it knows that the newer one was there"


def more_evidence_never_sets_back(world: World, there: Root, less: Evidence) -> None:
    full = world.see(there)
    before, after = next_move(less, Wish()), next_move(full, Wish())
    if not isinstance(before, Try) or isinstance(after, Refuse | MakeRoom):
        return
    past = Past(full)
    if isinstance(after, Scratch) or is_older(past, after.save, before.save):
        assert past.may_leave(before.save), f"{before} became {after}"


def step_0_only_where_nothing_was_saved(world: World, root: int) -> None:
    seen = world.see(world.roots[root])
    past = Past(seen)
    signs = past.saved or past.saves or any(row.problems for row in seen.answering())
    signs = signs or any(one.parent is not None for one in past.attempts.values())
    assert not (signs and isinstance(next_move(seen, Wish("scratch")), Scratch)), "without force"
    if signs and isinstance(next_move(seen, Wish()), Scratch):
        decided = [past.attempts[one] for one in past.persons if past.attempts[one].parent is None]
        assert decided, "and nobody had decided to start over"
        assert all(past.may_leave(save) or save.attempt not in past.attempts for save in past.saves.values())


def in_calm_nothing_is_refused(world: World, root: int) -> None:
    for mirror in world.mirrors.values():
        mirror.up = True
    seen = world.see(world.roots[root])
    past, move = Past(seen), next_move(seen, Wish())
    assert not isinstance(move, Refuse), move
    if past.saves:
        assert isinstance(move, Try)
        ahead = [one for one in past.saves.values() if is_older(past, move.save, one)]
        assert all(past.may_leave(one) for one in ahead), "it resumes an older save, and nothing left the newer"


def _without_a_copy(world: World, chooses: Random) -> World:
    """Return the world as it was before a save came to a place."""
    less = copy.deepcopy(world)
    places = [place for place in (*less.mirrors.values(), less.persistent) if place.saves]
    if places:
        place = chooses.choice(places)
        del place.saves[chooses.choice(sorted(place.saves))]
    return less


def _without_a_claim(world: World, chooses: Random) -> World:
    """Return the world as it was before a mirror listed an attempt that saved nothing there."""
    less = copy.deepcopy(world)
    mirror = chooses.choice(list(less.mirrors.values()))
    if mirror.listing is not None:
        saved = {save.attempt for save in mirror.facts()}
        unneeded = [one for one in mirror.listing.attempts if one.id not in saved and not one.by_person]
        if unneeded:
            gone = chooses.choice(unneeded)
            mirror.listing = replace(
                mirror.listing, attempts=tuple(one for one in mirror.listing.attempts if one != gone)
            )
    return less


def silence(world: World) -> None:
    """Check each mirror's silence, of both roots, as the mirrors are and as they would be if all others answered."""
    for _ in "as it is", "others up":
        for root, url in itertools.product((0, 1), world.mirrors):
            silence_costs_at_most_a_refusal(world, root, url)
        for mirror in world.mirrors.values():
            mirror.up = True


def a_row_more(world: World) -> None:
    """Check each mirror's row, of both roots, beside its silence and beside a configuration without it."""
    for _ in "as it is", "others up":
        for there, url in itertools.product(world.roots, world.mirrors):
            more_evidence_never_sets_back(world, there, world.see(there, silent=[url]))
            more_evidence_never_sets_back(world, there, world.see(there, unseen=[url]))
        for mirror in world.mirrors.values():
            mirror.up = True


def a_copy_or_a_claim_more(world: World) -> None:
    """Check a few copies and claims, of both roots."""
    for seed, change in itertools.product(range(3), (_without_a_copy, _without_a_claim)):
        less = change(world, Random(seed))
        for there, before in zip(world.roots, less.roots, strict=True):
            more_evidence_never_sets_back(world, there, less.see(before))


def step_0(world: World) -> None:
    """Check both roots."""
    for root in (0, 1):
        step_0_only_where_nothing_was_saved(world, root)


def in_calm(world: World) -> None:
    """Check both roots."""
    for root in (0, 1):
        in_calm_nothing_is_refused(world, root)


rooted = {"world": worlds(), "root": st.integers(0, 1)}


@many
@given(worlds())
def test_silence_turns_a_choice_into_a_refusal_or_into_what_this_root_vouches_for(world: World) -> None:
    silence(world)


@many
@given(worlds())
def test_a_row_more_never_sets_a_start_back(world: World) -> None:
    a_row_more(world)


@many
@given(worlds())
def test_a_copy_or_a_claim_more_never_sets_a_start_back(world: World) -> None:
    a_copy_or_a_claim_more(world)


@many
@given(worlds())
def test_step_0_is_never_taken_where_anything_was_saved(world: World) -> None:
    step_0(world)


@many
@given(worlds(calm=True))
def test_where_nothing_was_lost_and_every_mirror_answers_training_goes_on(world: World) -> None:
    in_calm(world)


def _essence(move: Move) -> tuple[object, ...]:
    if isinstance(move, Refuse):
        return Refuse, type(move.error), str(move.error), frozenset(move.notices)
    if isinstance(move, Try):
        return replace(move, notices=(), adopt=()), frozenset(move.adopt), frozenset(move.notices)
    return move, frozenset(move.notices)


@many
@given(**rooted, chooses=st.randoms(use_true_random=False))
def test_the_order_within_rows_changes_nothing_and_evidence_survives_json(
    world: World, root: int, chooses: Random
) -> None:
    seen = world.see(world.roots[root])
    assert evidence_from_json(evidence_to_json(seen)) == seen
    shuffled = [
        replace(row, **{name: tuple(chooses.sample(getattr(row, name), len(getattr(row, name)))) for name in SHUFFLED})
        for row in seen.rows
    ]
    for reference in ("auto", "latest", "scratch", 100, *sorted(world.saves)[:1]):
        wish = Wish(reference)
        assert _essence(next_move(seen, wish)) == _essence(next_move(seen, wish))
        assert _essence(next_move(seen, wish)) == _essence(next_move(replace(seen, rows=tuple(shuffled)), wish))


SHUFFLED = ("heard", "copies", "problems", "removed", "requirements")


@many
@given(**rooted, chooses=st.randoms(use_true_random=False))
def test_a_start_comes_to_an_end_whatever_becomes_of_each_copy(world: World, root: int, chooses: Random) -> None:
    seen = world.see(world.roots[root])
    copies = sum(len(copy.save.kinds) for row in seen.rows for copy in row.copies)
    wish = Wish(chooses.choice(["auto", "latest", 100, *world.saves]))
    tried: list[Outcome] = []
    touched = ""
    while isinstance(move := next_move(seen, wish, tried), Try | MakeRoom):
        save_id = move.save.save_id if isinstance(move, Try) else move.save_id
        assert touched in ("", save_id), "another save is loaded over parts of one"
        answers = TRIED_IN_VAIN if isinstance(move, Try) else [Result.MADE_ROOM, Result.STILL_FULL]
        result = chooses.choice(answers)
        touched = save_id if result is Result.TOUCHED else touched
        tried.append(Outcome(save_id, move.kind, move.place, result, "why"))
        assert len(tried) <= 3 * copies
    if any(one.result is not Result.MADE_ROOM for one in tried):
        assert isinstance(move, Refuse), "step 0 after copies that could not be loaded"


@many
@given(**rooted, chooses=st.randoms(use_true_random=False))
def test_what_may_be_whole_later_is_never_left_behind(world: World, root: int, chooses: Random) -> None:
    seen = world.see(world.roots[root])
    first = next_move(seen, Wish())
    if isinstance(first, Try):
        held = chooses.choice([Result.UNREADABLE, Result.NOT_BROUGHT, Result.STILL_FULL])
        tried = [Outcome(first.save.save_id, first.kind, first.place, held, "why")]
        move = next_move(seen, Wish(), tried)
        assert not isinstance(move, Try) or move.save.save_id == first.save.save_id
        assert not isinstance(move, Scratch)


# -- are they worth anything? ------------------------------------------------------------------------------------


def _seen(world: World) -> Move:
    return next_move(world.see(world.roots[0]), Wish())


def _changes(world: World, to: type[Move]) -> bool:
    there = world.roots[0]
    moves = [next_move(world.see(there, silent=[url]), Wish()) for url in world.mirrors]
    first = _seen(world)
    return isinstance(first, Try) and any(isinstance(one, to) and one != first for one in moves)


REACHED: dict[str, Callable[[World], bool]] = {
    "a choice becomes a refusal": lambda world: _changes(world, Refuse),
    "a choice becomes another": lambda world: any(
        isinstance(move := next_move(world.see(world.roots[0], silent=[url]), Wish()), Try)
        and isinstance(first := _seen(world), Try)
        and move.save != first.save
        for url in world.mirrors
    ),
    "step 0 after a decision": lambda world: bool(world.saves) and isinstance(_seen(world), Scratch),
    "a copy on a mirror": lambda world: isinstance(move := _seen(world), Try) and "file" in move.place,
    "a snapshot": lambda world: isinstance(move := _seen(world), Try) and move.kind == "emergency",
    "something is not whole": lambda world: any("torn" in notice.line for notice in _seen(world).notices),
}


def test_the_worlds_reach_what_matters() -> None:
    reached: set[str] = set()

    @settings(many, max_examples=700, derandomize=True)
    @given(worlds())
    def look(world: World) -> None:
        reached.update(what for what, is_there in REACHED.items() if what not in reached and is_there(world))

    look()
    assert REACHED.keys() - reached == set()


# -- planted bugs ------------------------------------------------------------------------------------------------


def _never(*_: object, **__: object) -> None:
    return None


def _all_count(evidence: Evidence) -> attempts.Counted:
    counts = frozenset({Voice.COUNTS})
    rows = [
        replace(row, heard=tuple(replace(one, voices=one.voices | counts) for one in row.heard))
        for row in evidence.rows
    ]
    return attempts.count(replace(evidence, rows=tuple(rows)))


PLANTED: dict[str, tuple[object, str, object, Callable[[World], None]]] = {
    "a start vouches for whatever it sees": (decide._Start, "_vouches_for", lambda *_: True, silence),
    "a newer attempt is not waited for": (decide._Start, "_unseen_after", _never, silence),
    "an attempt counts from its claim": (decide, "count", _all_count, a_copy_or_a_claim_more),
    "what is not whole is passed by": (decide._Start, "_look_past", _never, silence),
    "what the places show of saves that are gone is no trace": (
        decide._Start,
        "_traces",
        lambda *_: [],
        step_0,
    ),
    "a mirror that does not answer is not missed": (decide, "_not_answering", lambda _: [], silence),
    "the oldest save comes first": (
        decide._Start,
        "_on_the_lineage",
        lambda start, real=decide._Start._on_the_lineage: real(start)[::-1],
        in_calm,
    ),
}


FOUND_LATE = {"an attempt counts from its claim"}


@pytest.mark.parametrize("bug", [one for one in PLANTED if FULL or one not in FOUND_LATE])
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, check = PLANTED[bug]

    @settings(many, max_examples=12_000, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)
    @given(worlds(calm=check is in_calm))
    def look(world: World) -> None:
        with monkeypatch.context() as patch:  # the history was played by the right rules
            patch.setattr(where, name, wrong)
            check(world)

    with pytest.raises(AssertionError):
        look()
