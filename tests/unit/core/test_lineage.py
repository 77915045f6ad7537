"""Lineage: every row of its case table, and what must hold for any history."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from core_builders import a_meta, id_of
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.errors import LineageError
from ckptmirror.core.model import Attempt, AttemptList, Kind, Requirement, SaveRef
from ckptmirror.core.start.lineage import (
    Lineage,
    SaveFacts,
    attempts_of_metas,
    counted_by_a_reader,
    lineage,
    merge_attempts,
    merge_requirements,
    next_number,
    removal,
    untaken,
)

DCP: tuple[Kind, ...] = ("dcp",)
MODEL: tuple[Kind, ...] = ("model",)


def save(name: str, step: int, kinds: tuple[Kind, ...] = DCP) -> SaveFacts:
    """``a2`` is the second save of attempt A."""
    return SaveFacts(name, name[0].upper(), int(name[1:]), step, kinds)


def ref(facts: SaveFacts) -> SaveRef:
    return SaveRef(facts.attempt, facts.number, facts.step, facts.save_id)


A1, A2, A3 = save("a1", 100), save("a2", 200), save("a3", 300)
A = Attempt("A", 0, None)
B = Attempt("B", 1, ref(A2))


@dataclass(frozen=True)
class Row:
    """One row of the case table: what is known, and the save that is current for each step and kind."""

    name: str
    attempts: tuple[Attempt, ...]
    saves: tuple[SaveFacts, ...]
    current: dict[tuple[int, Kind], str]
    replaced: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


A1_A2: dict[tuple[int, Kind], str] = {(100, "dcp"): "a1", (200, "dcp"): "a2"}
B1_MODEL = save("b1", 200, MODEL)

TABLE = [
    Row("1: A alone, a1 a2", (A,), (A1, A2), A1_A2),
    Row("2: a3 is a zombie's", (A, B), (A1, A2, A3), A1_A2, superseded=("a3",)),
    Row(
        "3: B saves b1 at 300 too",
        (A, B),
        (A1, A2, A3, save("b1", 300)),
        A1_A2 | {(300, "dcp"): "b1"},
        superseded=("a3",),
    ),
    Row("4: zombie A saves 200 again after the fork", (A, B), (A1, A2, save("a3", 200)), A1_A2, superseded=("a3",)),
    Row("5: zombie A saves 100 again after the fork", (A, B), (A1, A2, save("a3", 100)), A1_A2, superseded=("a3",)),
    Row("6: B adds kind model at 200", (A, B), (A1, A2, B1_MODEL), A1_A2 | {(200, "model"): "b1"}),
    Row(
        "7: B saves dcp at 200 again",
        (A, B),
        (A1, A2, save("b1", 200)),
        {(100, "dcp"): "a1", (200, "dcp"): "b1"},
        replaced=("a2",),
    ),
    Row(
        "8: C from a1, nothing saved yet: a rewind",
        (A, B, Attempt("C", 2, ref(A1))),
        (A1, A2, A3, save("b1", 300)),
        {(100, "dcp"): "a1"},
        superseded=("a2", "a3", "b1"),
    ),
    Row(
        "9: C from a3: a superseded save resumed by id",
        (A, B, Attempt("C", 2, ref(A3))),
        (A1, A2, A3, save("b1", 300)),
        A1_A2 | {(300, "dcp"): "a3"},
        superseded=("b1",),
    ),
    Row("10: C from scratch", (A, B, Attempt("C", 2, None)), (A1, A2, A3), {}, superseded=("a1", "a2", "a3")),
    Row(
        "11: A saves 200 again in its own attempt",
        (A,),
        (A1, A2, save("a3", 200)),
        {(100, "dcp"): "a1", (200, "dcp"): "a3"},
        replaced=("a2",),
    ),
    Row(
        "12: A adds model at 200 after a2, then B",
        (A, B),
        (A1, A2, save("a3", 200, MODEL)),
        A1_A2 | {(200, "model"): "a3"},
    ),
    Row(
        "13: equal numbers, the greater id wins",
        (A, Attempt("B", 1, ref(A1)), Attempt("C", 1, ref(A2))),
        (A1, A2, save("b1", 200)),
        A1_A2,
        superseded=("b1",),
    ),
    Row("14: a save of an attempt that no list has", (A, B), (A1, A2, save("x1", 250)), A1_A2, superseded=("x1",)),
    Row(
        "15: the newest attempt's parent is of an unknown attempt",
        (A, Attempt("C", 5, SaveRef("X", 3, 200, "x3"))),
        (A1, A2, save("c1", 300), save("x2", 150)),
        {(300, "dcp"): "c1"},
        unknown=("a1", "x2", "a2"),
    ),
    Row("16: no attempts known", (), (A1, A2), {}, unknown=("a1", "a2")),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_case_table_row(row: Row) -> None:
    found = lineage(row.attempts, row.saves)
    assert {key: facts.save_id for key, facts in found.current.items()} == row.current
    assert tuple(facts.save_id for facts in found.replaced) == row.replaced
    assert {facts.save_id for facts in found.superseded} == set(row.superseded)
    assert {facts.save_id for facts in found.unknown} == set(row.unknown)


@pytest.mark.parametrize("number", [0, 1])
def test_case_table_row_17_a_parent_whose_number_is_not_lower_is_an_error_in_the_data(number: int) -> None:
    with pytest.raises(LineageError, match="not older"):
        lineage([Attempt("A", 1, None), Attempt("B", number, ref(A2)), Attempt("C", 1, SaveRef("B", 1, 1, "b1"))], [A1])


def test_undecided_attempts_do_not_count() -> None:
    found = lineage([A, Attempt("B", 1, None, decided=False)], [A1, A2])
    assert found == lineage([A], [A1, A2])
    assert lineage([Attempt("B", 1, None, decided=False)], [A1]).unknown == (A1,)


def test_a_save_that_repeats_a_kind_and_adds_one_after_the_fork_is_superseded() -> None:
    found = lineage([A, B], [A1, A2, save("a3", 200, ("dcp", "model"))])
    assert [facts.save_id for facts in found.superseded] == ["a3"]


def test_a_kind_added_twice_after_the_fork_counts_once() -> None:
    found = lineage([A, B], [A1, A2, save("a3", 200, MODEL), save("a4", 200, MODEL)])
    assert found.current[(200, "model")].save_id == "a3"
    assert [facts.save_id for facts in found.superseded] == ["a4"]


def test_a_kind_that_an_earlier_attempt_gave_the_step_is_not_added_again() -> None:
    b1 = save("b1", 200, MODEL)
    c = Attempt("C", 2, ref(b1))
    found = lineage([A, B, c], [A1, A2, b1, save("b2", 200, DCP)])
    assert found.current == {(100, "dcp"): A1, (200, "dcp"): A2, (200, "model"): b1}
    assert [facts.save_id for facts in found.superseded] == ["b2"]


def test_nothing_is_added_where_the_save_at_the_fork_is_not_known() -> None:
    found = lineage([A, B], [A1, save("a3", 200, MODEL)])
    assert found.current == {(100, "dcp"): A1}


def test_another_save_with_the_number_of_the_fork_is_not_on_the_lineage() -> None:
    double = SaveFacts("z2", "A", 2, 200, MODEL)
    found = lineage([A, B], [A1, A2, double])
    assert found.current == {(100, "dcp"): A1, (200, "dcp"): A2}
    assert found.superseded == (double,)


def test_a_save_stays_current_for_the_kind_that_nothing_replaced() -> None:
    both = save("a2", 200, ("dcp", "model"))
    found = lineage([A, Attempt("B", 1, ref(both))], [both, save("b1", 200)])
    assert found.current[(200, "model")] == both
    assert found.replaced == ()
    assert found.standing_by_save() == {"a2": "current", "b1": "current"}


def test_saves_in_order_follow_the_lineage_not_the_names() -> None:
    b1 = save("b1", 300)
    found = lineage([A, B], [b1, A2, A1])
    assert found.in_order() == (A1, A2, b1)
    assert found.in_order("model") == ()
    assert found.steps() == (100, 200, 300)
    assert [attempt.id for attempt in found.way] == ["B", "A"]


def test_an_id_that_stands_for_two_things_is_an_error() -> None:
    assert lineage([A, A], [A1, A1]).current == {(100, "dcp"): A1}
    with pytest.raises(LineageError, match="described twice"):
        lineage([A], [A1, SaveFacts("a1", "A", 1, 101, DCP)])
    with pytest.raises(LineageError, match="listed twice"):
        lineage([A, Attempt("A", 0, ref(A1))], [])


# -- any history --------------------------------------------------------------------------------------------


@dataclass
class History:
    """A simulated run: attempts that start from saves, and zombies that go on saving after their successor started."""

    attempts: list[Attempt]
    saves: list[SaveFacts]
    zombies: list[SaveFacts]
    truth: dict[tuple[int, Kind], SaveFacts]


@st.composite
def histories(draw: st.DrawFn) -> History:
    rng = random.Random(draw(st.integers(0, 2**32)))
    attempts: list[Attempt] = []
    saves: list[SaveFacts] = []
    zombies: list[SaveFacts] = []
    chain: dict[str, list[SaveFacts]] = {}  # attempt id -> the saves that led to its start, then its own
    for number in range(draw(st.integers(1, 6))):
        attempt_id = f"{rng.randrange(16):x}{number}"
        parent = rng.choice(saves) if saves and rng.random() < 0.85 else None
        before: list[SaveFacts] = []
        if parent is not None:
            line = chain[parent.attempt]
            before = line[: line.index(parent) + 1]
        attempts.append(Attempt(attempt_id, number, None if parent is None else ref(parent)))
        step, mine = (parent.step if parent else 0), []
        for count in range(1, rng.randrange(5) + 1):
            step += rng.choice([0, 1, 1, 2])
            kinds = rng.choice([DCP, MODEL, ("dcp", "model")])
            mine.append(SaveFacts(f"{attempt_id}.{count}", attempt_id, count, step, kinds))
        chain[attempt_id] = before + mine
        saves += mine
    newest = attempts[-1].id
    for attempt in attempts[:-1]:  # every older attempt is still alive and saves what it likes
        count = max((s.number for s in saves if s.attempt == attempt.id), default=0)
        parent_step = attempt.parent.step if attempt.parent else 0
        for extra in range(rng.randrange(3)):
            have = {(s.step, kind) for s in saves for kind in s.kinds if s.attempt == attempt.id}
            at = rng.choice(sorted({step for step, _ in have} | {parent_step + 50}))
            kinds = tuple(kind for kind in ("dcp", "model") if (at, kind) in have) or DCP
            zombies.append(SaveFacts(f"{attempt.id}.z{extra}", attempt.id, count + 1 + extra, at, kinds))
    truth = {(s.step, kind): s for s in chain[newest] for kind in s.kinds}
    return History(attempts, saves, zombies, truth)


def same(one: Lineage, other: Lineage) -> bool:
    return (one.current, one.replaced, one.superseded, one.unknown, one.way) == (
        other.current,
        other.replaced,
        other.superseded,
        other.unknown,
        other.way,
    )


@given(histories())
def test_the_chain_that_led_here_is_current(history: History) -> None:
    found = lineage(history.attempts, history.saves)
    for key, facts in history.truth.items():
        # A save at the very step of a fork may add a kind that the chain lacks, and nothing else may differ.
        assert found.current[key] == facts
    for key in found.current.keys() - history.truth.keys():
        facts = found.current[key]
        assert any(a.parent and (a.parent.attempt, a.parent.step) == (facts.attempt, facts.step) for a in found.way)


@given(histories())
def test_zombie_saves_after_the_fork_never_become_current(history: History) -> None:
    found = lineage(history.attempts, [*history.saves, *history.zombies])
    assert not {facts.save_id for facts in history.zombies} & {facts.save_id for facts in found.current.values()}
    assert found.current == lineage(history.attempts, history.saves).current


@given(histories(), st.randoms(use_true_random=False))
def test_the_order_of_the_inputs_does_not_matter(history: History, rng: random.Random) -> None:
    attempts, saves = list(history.attempts), [*history.saves, *history.zombies]
    expected = lineage(attempts, saves)
    rng.shuffle(attempts)
    rng.shuffle(saves)
    assert same(lineage(attempts, saves), expected)


@given(histories(), st.sets(st.integers(0, 5)))
def test_every_save_has_exactly_one_standing_even_when_attempts_are_missing(history: History, lost: set[int]) -> None:
    attempts = [attempt for attempt in history.attempts if attempt.number not in lost]
    saves = [*history.saves, *history.zombies]
    found = lineage(attempts, saves)
    standing = found.standing_by_save()
    assert standing.keys() == {facts.save_id for facts in saves}
    current = {facts.save_id for facts in found.current.values()}
    groups = [current, *({s.save_id for s in g} for g in (found.replaced, found.superseded, found.unknown))]
    assert sum(len(group) for group in groups) == len(standing)
    if found.complete:
        assert not found.unknown


@given(st.integers(2, 6), st.integers(0, 3))
def test_cycles_are_an_error_in_the_data(length: int, base: int) -> None:
    attempts = [
        Attempt(f"{i:02d}", base + i, SaveRef(f"{(i - 1) % length:02d}", 1, 100, f"s{(i - 1) % length}"))
        for i in range(length)
    ]
    with pytest.raises(LineageError):
        lineage(attempts, [])


@given(st.data())
def test_any_lists_give_a_lineage_or_a_lineage_error(data: st.DataObject) -> None:
    names = st.sampled_from(["A", "B", "C", "D"])
    refs = st.builds(SaveRef, names, st.integers(1, 3), st.integers(0, 3), st.sampled_from(["s1", "s2", "s3"]))
    attempts = data.draw(st.lists(st.builds(Attempt, names, st.integers(0, 3), st.none() | refs), max_size=5))
    kinds = st.sampled_from([DCP, MODEL, ("dcp", "model")])
    facts = st.builds(
        SaveFacts, st.sampled_from(["s1", "s2", "s3"]), names, st.integers(1, 3), st.integers(0, 3), kinds
    )
    saves = data.draw(st.lists(facts, max_size=5))
    try:
        found = lineage(attempts, saves)
    except LineageError:
        return
    assert found.standing_by_save().keys() == {s.save_id for s in saves}


# -- lists of attempts --------------------------------------------------------------------------------------


def test_decided_wins_over_undecided_in_any_order() -> None:
    undecided = AttemptList("R", (A, Attempt("B", 1, None, decided=False)))
    decided = AttemptList("R", (B,))
    assert merge_attempts(undecided, decided) == merge_attempts(decided, undecided) == AttemptList("R", (A, B))
    assert merge_attempts(undecided) == undecided


def test_lists_that_contradict_one_another_are_an_error() -> None:
    for other in (
        AttemptList("OTHER", (A,)),
        AttemptList("R", (Attempt("B", 2, ref(A2)),)),
        AttemptList("R", (Attempt("B", 1, ref(A1)),)),
        AttemptList("R", (Attempt("B", 1, None),)),
        AttemptList("R", (Attempt("B", 3, None, decided=False),)),
    ):
        with pytest.raises(LineageError):
            merge_attempts(AttemptList("R", (A, B)), other)
    with pytest.raises(LineageError):
        merge_attempts()


@given(histories(), st.integers(0, 6), st.integers(0, 6))
def test_merging_is_a_union(history: History, low: int, high: int) -> None:
    whole = AttemptList("R", tuple(history.attempts))
    pieces = AttemptList("R", tuple(history.attempts[low:])), AttemptList("R", tuple(history.attempts[:high]))
    merged = merge_attempts(*pieces)
    assert merged == merge_attempts(*reversed(pieces)) == merge_attempts(merged, merged)
    assert merge_attempts(merged, whole).attempts == whole.attempts


def test_numbers_of_attempts_rise_from_0() -> None:
    assert next_number(AttemptList("R")) == 0
    assert next_number(AttemptList("R", (A, B))) == 2
    assert next_number(AttemptList("R", (Attempt("Z", 7, None, decided=False), A))) == 8
    assert next_number(AttemptList("R", (A, B), (Requirement("gs://a", 4, is_removed=True),))) == 5


WORDS = st.builds(Requirement, st.sampled_from("ab"), st.integers(0, 3), st.booleans())


@given(words=st.lists(WORDS), rng=st.randoms())
def test_the_newest_word_on_a_mirror_is_the_last_in_any_order(words: list[Requirement], rng: random.Random) -> None:
    merged = merge_requirements(words)
    for one in merged:
        said = [word for word in words if word.url == one.url]
        assert one.number == max(word.number for word in said)
        assert one.is_removed == any(word.is_removed for word in said if word.number == one.number)
    assert {one.url for one in merged} == {word.url for word in words}
    rng.shuffle(words)
    assert set(merge_requirements([*merge_requirements(words[:2]), *words])) == set(merged)


def test_a_removal_ends_what_it_knew_and_a_later_start_requires_the_mirror_again() -> None:
    known = AttemptList("R", (A, B), (Requirement("gs://a", 1), Requirement("gs://b", 1)))
    told = merge_attempts(known, AttemptList("R", requirements=(removal("gs://a", [known]),)))
    assert told.required == ("gs://b",)
    assert merge_attempts(told, known).required == ("gs://b",)
    later = AttemptList("R", requirements=(Requirement("gs://a", next_number(told)),))
    assert set(merge_attempts(known, told, later).required) == {"gs://a", "gs://b"}


def test_a_lost_list_is_rebuilt_from_the_metas() -> None:
    first = a_meta()
    second = Attempt(id_of("B"), 1, first.ref)
    metas = [a_meta(attempt=second, save_id=id_of("two"), artifacts=()), first, first]
    rebuilt = attempts_of_metas(metas)
    assert rebuilt == AttemptList(first.run_id, (first.attempt, second))
    assert attempts_of_metas([]) is None
    with pytest.raises(LineageError):
        attempts_of_metas([first, a_meta(run_id=id_of("another run"))])


@pytest.mark.parametrize(
    ("staged_from", "completed", "counts"),
    [
        ("gs://bucket/run", ("C",), True),  # it took another root's branch
        ("gs://bucket/run", (), False),  # a mirror did not take its claim: the next start may decide otherwise
        (None, ("C",), False),  # it went back on its own branch, of which something may still be read
    ],
)
def test_a_start_counts_for_a_reader_before_its_first_save_if_it_continued_from_another_root(
    staged_from: str | None, completed: tuple[str, ...], counts: bool
) -> None:
    parent = a_meta(attempt=A, staged_from=staged_from)
    own = a_meta(attempt=B, save_id=id_of("own"))
    start = Attempt("C", 2, SaveRef("A", 1, 200, parent.save_id))
    listed = AttemptList("run", (A, B, start), completed=completed)
    assert counted_by_a_reader(listed, [parent, own], ()) == {"A", "B"} | ({"C"} if counts else set())
    assert counted_by_a_reader(listed, [own], ()) == {"B"} | ({"C"} if completed else set())


def test_a_persons_decision_counts_for_a_reader_unless_a_mirror_did_not_take_it() -> None:
    decided, failed = (Attempt(one, 2, ref(A1), by_person=True, required=("gs://bucket/run",)) for one in "DF")
    older = Attempt("O", 1, ref(A1), by_person=True)  # of a list that does not say who had to take it
    listed = AttemptList("run", (A, older, decided, failed), completed=("D",))
    assert untaken(listed) == [failed]
    assert counted_by_a_reader(listed, [], {"F"}) == {"O", "D"}
