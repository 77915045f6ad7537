"""Which attempts count, and what may be committed: rows of evidence, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from start_rows import BOTH, ELSEWHERE, HERE, evidence, place, ref, save, silent

from ckptmirror.core.model import Attempt, Requirement
from ckptmirror.core.start.attempts import (
    claim_from,
    count,
    is_settled,
    may_commit,
    may_drain,
    mirror_list,
    overtaken_by,
    rival_of,
    with_earlier,
)
from ckptmirror.core.start.evidence import DISK, Heard, ListFound, Origin, Part, Row, Voice
from ckptmirror.core.start.lineage import SaveFacts
from tests.kit.cost import calls_of, steps_of

A1, A2, A3, B1 = save("a1", 100), save("a2", 200), save("a3", 300), save("b1", 200)
A = Attempt("A", 0, None, root=ELSEWHERE)
B = Attempt("B", 1, ref(A1), root=HERE)


# -- the case table of the lineage, as far as it depends on which attempts count -------------------------------

B_FROM_A2, B1_AT_300 = Attempt("B", 1, ref(A2), root=HERE), save("b1", 300)
BACK_TO_A1 = Attempt("C", 2, ref(A1), by_person=True, root=ELSEWHERE, required=BOTH)
MEANWHILE_BACK_TO_A1 = replace(BACK_TO_A1, number=1)


@dataclass(frozen=True)
class Case:
    """One row: what the places say, and the saves that are current."""

    name: str
    disk: Row
    mirrors: tuple[Row, Row]
    current: str


def both(listed: tuple[Attempt, ...], saves: tuple[SaveFacts, ...]) -> tuple[Row, Row]:
    return place("gs://a", listed, saves), place("gs://b", listed, saves)


TABLE = [
    Case("18: B without a save; a2 drained later", place(DISK), both((A, B), (A1, A2)), "a1 a2"),
    Case("19: B committed b1 at 200; a2 arrives later", place(DISK), both((A, B), (A1, A2, B1)), "a1 b1"),
    Case(
        "20: a person went back to a1, and one of two required mirrors lists it",
        place(DISK),
        (place("gs://a", (A, BACK_TO_A1), (A1, A2, A3)), place("gs://b", (A,), (A1, A2, A3))),
        "a1 a2 a3",
    ),
    Case("21: as 20, on both", place(DISK), both((A, BACK_TO_A1), (A1, A2, A3)), "a1"),
    Case(
        "22: b1 of B, which left at a1, on this root only; the mirrors have a1 a2",
        place(DISK, (A, B), (B1,)),
        both((A,), (A1, A2)),
        "a1 a2",
    ),
    Case(
        "23: b1 of B, which left at a2, on this root only; the mirrors have a1 a2",
        place(DISK, (A, B_FROM_A2), (B1_AT_300,)),
        both((A,), (A1, A2)),
        "a1 a2 b1",
    ),
    Case(
        "24: as 23, but a person went back to a1 on every mirror",
        place(DISK, (A, B_FROM_A2), (B1_AT_300,)),
        both((A, MEANWHILE_BACK_TO_A1), (A1, A2)),
        "a1",
    ),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_case_table_row(case: Case) -> None:
    found = count(evidence(case.disk, *case.mirrors))
    assert " ".join(save.save_id for save in found.order.in_order()) == case.current


def test_of_two_attempts_that_only_the_disk_has_the_newest_counts() -> None:
    """Attempt C could not read b1 when it started, and continued from a1, as B had."""
    c, c1 = Attempt("C", 2, ref(A1), root=HERE), save("c1", 200)
    found = count(evidence(place(DISK, (A, B, c), (B1, c1)), *both((A, B, c), (A1,))))
    assert [one.save_id for one in found.order.in_order()] == ["a1", "c1"]
    assert found.apart == set()


def test_a_drain_finishes_no_save_that_a_newer_attempt_of_this_disk_left_behind_before_that_has_one_there() -> None:
    c, c1 = Attempt("C", 2, ref(A1), root=HERE), save("c1", 200)
    here = place(DISK, (A, B, c), (B1, c1))
    verdict = may_drain(evidence(here, *both((A, B, c), (A1,))), "gs://a", B1)
    assert (verdict.may, verdict.rival) == ("behind", c)
    assert may_drain(evidence(here, *both((A, B, c), (A1,))), "gs://a", c1).may == "commit"
    assert may_drain(evidence(here, *both((A, B, c), (A1, c1))), "gs://a", B1).may != "behind"
    parts = replace(place(DISK, (A, B, c), (B1,)), parts=(Part(c1, c1.kinds, (0,), 2, Origin.SAVED_HERE, "part"),))
    assert may_drain(evidence(parts, *both((A, B, c), (A1,))), "gs://a", B1).may == "behind"
    given_up = replace(parts, parts=(replace(parts.parts[0], is_given_up=True),))
    assert may_drain(evidence(given_up, *both((A, B, c), (A1,))), "gs://a", B1).may == "commit"


def test_a_drain_finishes_what_an_attempt_that_has_only_claimed_left_behind_and_can_name_it() -> None:
    """It may be dead: an attempt counts from its first save (docs/adr/0014)."""
    here = place(DISK, (A,), (A1, A2))
    claimed = evidence(here, *both((A, B), (A1,)))
    assert may_drain(claimed, "gs://a", A2).may == "commit"
    assert overtaken_by(claimed, "gs://a", A2) == B
    assert overtaken_by(claimed, "gs://a", A1) is None  # B began from it
    assert overtaken_by(evidence(here, *both((A,), (A1,))), "gs://a", A2) is None
    assert overtaken_by(evidence(here, *both((A, B), (A1, B1))), "gs://a", A2) is None
    slow = evidence(here, place("gs://a", (A, B), (A1,)), place("gs://b", (A, B), (A1, B1)))
    assert overtaken_by(slow, "gs://a", A2) is None  # B counts, and only has not sent its saves there yet
    later = Attempt("C", 2, ref(A2), root=ELSEWHERE)
    assert overtaken_by(evidence(here, *both((A, B, later), (A1,))), "gs://a", A2) is None  # B is fenced already


def test_a_drain_overtakes_an_attempt_of_another_root_that_its_own_did_not_know() -> None:
    one, other = (Attempt(name, 1, ref(A1), root=root) for name, root in (("B", HERE), ("C", ELSEWHERE)))
    there = both((A, one), (A1,))
    assert overtaken_by(evidence(place(DISK, (A, other), ()), *there), "gs://a", save("c1", 200)) == one
    own = replace(other, root=HERE)  # then B is dead: a root has one attempt at a time
    assert overtaken_by(evidence(place(DISK, (A, own), ()), *there), "gs://a", save("c1", 200)) is None
    after = replace(other, number=2, parent=ref(B1))
    assert overtaken_by(evidence(place(DISK, (A, one, after), ()), *there), "gs://a", save("c1", 200)) is None


def test_a_listed_attempt_that_does_not_count_yet_may_begin_to_at_any_time() -> None:
    assert is_settled(evidence(place(DISK, (A,)), *both((A,), (A1,))))
    assert not is_settled(evidence(place(DISK, (A,)), *both((A, B), (A1,))))
    assert not is_settled(evidence(place(DISK, (A, B), (B1,)), *both((A,), (A1,))))
    assert is_settled(evidence(place(DISK, (A,)), *both((A, B), (A1, B1))))
    slow = place("gs://b", (A, B), (A1,))
    assert not is_settled(evidence(place(DISK, (A,)), place("gs://a", (A, B), (A1, B1)), slow))  # its first save there
    assert is_settled(evidence(place(DISK, (A,)), place("gs://a", (A, B), (A1, B1)), silent("gs://b")))
    assert not is_settled(evidence(place(DISK), *both((), ())))


def test_a_persons_attempt_that_counts_by_its_claim_keeps_no_save_that_it_left_behind_from_the_mirror() -> None:
    """What a mirror had of it may be lost: it counts all the same, so the older save fences nobody."""
    c = Attempt("C", 2, ref(A1), by_person=True, root=HERE, required=BOTH)
    here = place(DISK, (A, c), (A1, A2, save("c1", 200)), completed="C")
    assert may_drain(evidence(here, *both((A, c), (A1,))), "gs://a", A2).may == "commit"
    assert overtaken_by(evidence(here, *both((A, c), (A1,))), "gs://a", A2) is None
    here = place(DISK, (A, c), (A1, A2, save("c1", 200)))
    assert may_drain(evidence(here, *both((A,), (A1,))), "gs://a", A2).may == "behind"  # nobody else knows of it


def test_what_ran_apart_is_named_as_such() -> None:
    assert count(evidence(place(DISK, (A, B), (B1,)), *both((A,), (A1, A2)))).apart == {"B"}


# -- a person's attempt ------------------------------------------------------------------------------------------


def test_nobody_can_tell_whether_a_persons_attempt_counts_while_a_mirror_that_had_to_list_it_is_silent() -> None:
    found = count(evidence(place(DISK), place("gs://a", (A, BACK_TO_A1), (A1, A2)), silent("gs://b")))
    assert found.doubtful == (BACK_TO_A1,)
    assert "C" not in found.counting


def test_a_persons_attempt_that_this_root_completed_counts_while_a_mirror_is_silent() -> None:
    here = place(DISK, (A, BACK_TO_A1), completed="C")
    found = count(evidence(here, place("gs://a", (A, BACK_TO_A1), (A1, A2)), silent("gs://b")))
    assert found.doubtful == ()
    assert "C" in found.counting


def test_a_start_records_that_all_mirrors_have_taken_a_persons_attempt_of_another_root() -> None:
    """Else each later start would doubt it while one of them is silent."""
    taken = evidence(place(DISK, (A,)), *both((A, BACK_TO_A1), (A1, A2)))
    assert claim_from(taken, Attempt("D", 0, ref(A1)), "run", needs_all=False).root_list.completed == ("C",)
    on_one = evidence(place(DISK, (A,)), place("gs://a", (A, BACK_TO_A1), (A1,)), place("gs://b", (A,), (A1,)))
    one_silent = evidence(place(DISK, (A,)), place("gs://a", (A, BACK_TO_A1), (A1,)), silent("gs://b"))
    for seen in (on_one, one_silent):
        assert claim_from(seen, Attempt("D", 0, ref(A1)), "run", needs_all=False).root_list.completed == ()


def test_a_mirror_that_a_person_took_out_has_no_say_in_whether_all_have_taken_a_persons_attempt() -> None:
    without_b = (Requirement("gs://a", 2), Requirement("gs://b", 2, is_removed=True))
    seen = evidence(replace(place(DISK, (A,)), requirements=without_b), place("gs://a", (A, BACK_TO_A1), (A1, A2)))
    assert claim_from(seen, Attempt("D", 0, ref(A1)), "run", needs_all=False).root_list.completed == ("C",)
    answers = evidence(*seen.rows, place("gs://b", (A,), (A1, A2)))
    assert claim_from(answers, Attempt("D", 0, ref(A2)), "run", needs_all=False).root_list.completed == ()
    only_b = replace(BACK_TO_A1, required=("gs://b",))
    none_left = evidence(replace(place(DISK, (A, only_b)), requirements=without_b), place("gs://a", (A,), (A1,)))
    assert claim_from(none_left, Attempt("D", 0, ref(A1)), "run", needs_all=False).root_list.completed == ()


def test_a_mirror_that_became_required_later_does_not_undo_a_persons_attempt() -> None:
    required_later = place("gs://c", (A,), (A1,))
    found = count(evidence(place(DISK), *both((A, BACK_TO_A1), (A1, A2)), required_later))
    assert "C" in found.counting


def test_a_list_that_was_lost_does_not_undo_a_persons_attempt() -> None:
    lost = replace(
        place("gs://b", (), (A1, A2)),
        listed=ListFound.LOST,
        heard=(Heard(A, frozenset({Voice.NAMED, Voice.COUNTS})),),
    )
    assert "C" in count(evidence(place(DISK), place("gs://a", (A, BACK_TO_A1), (A1, A2)), lost)).counting


def test_a_claim_tells_every_mirror_of_a_persons_attempt_that_counts() -> None:
    """So a mirror that is new, or lost its list, does not undo it by a list that lacks it."""
    seen = evidence(place(DISK), *both((A, BACK_TO_A1), (A1, A2)))
    claim = claim_from(seen, Attempt("D", 0, ref(A1)), "run", needs_all=True)
    assert [one.id for one in mirror_list(claim, None).attempts] == ["A", "C", "D"]


def test_a_claim_does_not_tell_of_a_persons_attempt_that_is_not_on_every_mirror() -> None:
    seen = evidence(place(DISK), place("gs://a", (A, BACK_TO_A1), (A1, A2)), place("gs://b", (A,), (A1, A2)))
    claim = claim_from(seen, Attempt("D", 0, ref(A2)), "run", needs_all=True)
    assert [one.id for one in mirror_list(claim, None).attempts] == ["A", "D"]


def test_a_claim_tells_of_an_earlier_attempt_and_of_those_that_it_came_from_once_it_completes_a_save_of_it() -> None:
    apart = Attempt("X", 1, None)
    from_apart = Attempt("Y", 2, ref(save("x1", 150)))
    seen = evidence(place(DISK, (A, apart, from_apart), (A1,)), *both((A,), (A1,)))
    claim = claim_from(seen, Attempt("D", 0, ref(A1)), "run", needs_all=True)
    assert [one.id for one in mirror_list(claim, None).attempts] == ["A", "D"]
    told = with_earlier(claim, "Y")
    assert [one.id for one in mirror_list(told, None).attempts] == ["A", "X", "Y", "D"]
    assert with_earlier(claim, "stranger") == claim


# -- the first commit while a mirror is silent ------------------------------------------------------------------


def test_a_first_commit_waits_for_a_silent_mirror_while_another_root_may_have_saved_there() -> None:
    seen = evidence(place(DISK, (A, B), (B1,)), silent("gs://a"), place("gs://b", (A, B), (A1,)))
    verdict = may_commit(seen, "B")
    assert verdict.may == "wait"
    assert verdict.waits_for == ("gs://a",)
    assert verdict.rival == A


def test_a_first_commit_does_not_wait_where_this_root_has_committed_since_the_other_one_started() -> None:
    c = Attempt("C", 2, ref(B1), root=HERE)
    here = place(DISK, (A, B, c), (B1, save("c1", 300)), uploaded="B")
    assert may_commit(evidence(here, silent("gs://a"), place("gs://b", (A, B, c), (A1,))), "C").may == "commit"


def test_a_first_commit_that_would_supersede_what_counts_is_fenced() -> None:
    here = place(DISK, (A, B), (B1,))
    assert may_commit(evidence(here, *both((A, B), (A1, A2))), "B").may == "fenced"
    assert may_drain(evidence(here, *both((A, B), (A1, A2))), "gs://a", B1).may == "fenced"


def test_an_attempt_that_fenced_one_of_this_root_is_a_rival_though_no_list_in_sight_has_it() -> None:
    x = Attempt("X", 2, ref(A1), root=ELSEWHERE)
    here = place(DISK, (A, B), (B1,), uploaded="B")
    here = replace(here, heard=(*here.heard, Heard(x, frozenset({Voice.FENCED_US}))))
    seen = evidence(here, silent("gs://a"), place("gs://b", (A, B), (A1, B1)))
    assert rival_of(seen, count(seen), "B") == x


@pytest.mark.parametrize(("by_person", "root", "rival"), [(True, "a", False), (True, "x", True), (False, "a", True)])
def test_of_the_attempts_of_one_node_of_a_job_a_persons_alone_is_the_jobs(
    by_person: bool, root: str, rival: bool
) -> None:
    made = Attempt("P", 2, ref(A1), by_person=by_person, root=root)
    seen = evidence(place(DISK, (A, B, made), (B1,), uploaded="B"), silent("gs://a"), place("gs://b", (A, B), (A1, B1)))
    seen = replace(seen, roots=frozenset({"a", "b"}))
    assert (rival_of(seen, count(seen), "B") is not None) is rival


@pytest.mark.parametrize(("saves_here", "rival"), [((A1,), False), ((), True)])
def test_an_attempt_of_an_older_list_is_own_if_it_saved_here(saves_here: tuple[SaveFacts, ...], rival: bool) -> None:
    older = Attempt("A", 0, None)
    seen = evidence(place(DISK, (older,), saves_here), silent("gs://a"), place("gs://b", (older,)))
    assert (rival_of(seen, count(seen), "A") is not None) is rival


# -- lists that somebody filled ----------------------------------------------------------------------------------


def test_the_work_grows_with_the_attempts_that_a_list_names_and_not_faster() -> None:
    """8,000 persons' attempts are 1 MiB: each was compared with each, which took a start half a minute."""
    work = []
    for number in (100, 400):
        listed = tuple(Attempt(f"P{one}", one + 1, None, by_person=True, required=BOTH) for one in range(number))
        seen = evidence(place(DISK, (A, B, *listed), (B1,)), place("gs://a", (A, B, *listed), (A1,)), silent("gs://b"))
        work.append(steps_of(lambda seen=seen: rival_of(seen, count(seen), "B")))
    assert work[1] < 4.5 * work[0]


def test_attempts_that_no_list_names_may_have_one_another_as_parents() -> None:
    """A meta names each: nothing compares them, unless somebody continues from one. It never ended."""
    x, y = Attempt("X", 5, ref(save("y1", 10)), root=ELSEWHERE), Attempt("Y", 6, ref(save("x1", 10)), root=ELSEWHERE)
    here = place(DISK, (A, B), (B1,))
    there = place("gs://a", (A, B), (A1,))
    there = replace(there, heard=(*there.heard, *(Heard(one, frozenset({Voice.NAMED})) for one in (x, y))))
    seen = evidence(here, there, silent("gs://b"))
    counted = count(seen)
    assert calls_of(lambda: rival_of(seen, counted, "X")) < 1000
    assert rival_of(seen, counted, "X") == y
