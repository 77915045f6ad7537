"""Two lists of attempts that grew apart: the mirrors' branch is the run's."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import LineageError, RefusedOnlyCopy
from ckptmirror.core.lineage import SaveFacts, join_lists, lineage, next_number, told_by_drain
from ckptmirror.core.model import Attempt, AttemptList, SaveRef
from ckptmirror.core.resumption import check_fresh_start

RUN = "5" * 32
A = Attempt("a" * 32, 0, None)
A_SAVE = SaveRef(A.id, 1, 100, "1" * 32)
ONLINE = Attempt("b" * 32, 1, A_SAVE)
OFFLINE = Attempt("f" * 32, 1, A_SAVE)  # the greater id: by number and id alone it would win
OFFLINE_AGAIN = Attempt("e" * 32, 2, SaveRef(OFFLINE.id, 1, 110, "2" * 32))


def listed(*attempts: Attempt) -> AttemptList:
    return AttemptList(RUN, attempts)


SAVES = [
    SaveFacts("1" * 32, A.id, 1, 100, ("dcp",)),
    SaveFacts("2" * 32, OFFLINE.id, 1, 110, ("dcp",)),
    SaveFacts("3" * 32, ONLINE.id, 1, 5000, ("dcp",)),
]


def test_an_attempt_that_the_mirrors_were_not_told_of_yet_counts() -> None:
    joined, apart = join_lists(listed(A, OFFLINE), listed(A))
    assert {attempt.id for attempt in joined.attempts} == {A.id, OFFLINE.id}
    assert apart == frozenset()


@pytest.mark.parametrize("offline", [(OFFLINE,), (OFFLINE, OFFLINE_AGAIN)])
def test_attempts_that_ran_apart_while_the_run_went_on_are_set_aside_but_stay_listed(
    offline: tuple[Attempt, ...],
) -> None:
    joined, apart = join_lists(listed(A, *offline), listed(A, ONLINE))
    assert {attempt.id for attempt in joined.attempts} == {A.id, ONLINE.id, *(one.id for one in offline)}
    assert apart == {one.id for one in offline}


def test_with_what_ran_apart_set_aside_the_mirrors_branch_is_current() -> None:
    joined, apart = join_lists(listed(A, OFFLINE, OFFLINE_AGAIN), listed(A, ONLINE))
    order = lineage([attempt for attempt in joined.attempts if attempt.id not in apart], SAVES)
    assert [step for step, _ in order.current] == [100, 5000]
    assert [save.step for save in order.superseded] == [110]


def test_once_the_next_attempt_is_decided_what_ran_apart_loses_by_number() -> None:
    joined, _ = join_lists(listed(A, OFFLINE, OFFLINE_AGAIN), listed(A, ONLINE))
    following = Attempt("7" * 32, next_number(joined), SaveRef(ONLINE.id, 1, 5000, "3" * 32))
    order = lineage([*joined.attempts, following], SAVES)
    assert [step for step, _ in order.current] == [100, 5000]


def test_a_save_of_a_branch_apart_that_is_resumed_by_its_id_is_then_the_lineage() -> None:
    joined, _ = join_lists(listed(A, OFFLINE), listed(A, ONLINE))
    following = Attempt("7" * 32, next_number(joined), SaveRef(OFFLINE.id, 1, 110, "2" * 32))
    order = lineage([*joined.attempts, following], SAVES)
    assert [step for step, _ in order.current] == [100, 110]
    assert order.unknown == ()


def test_an_undecided_attempt_on_the_mirror_sets_nothing_aside() -> None:
    undecided = Attempt("c" * 32, 1, None, decided=False)
    joined, apart = join_lists(listed(A, OFFLINE), listed(A, undecided))
    assert OFFLINE in joined.attempts
    assert apart == frozenset()


def test_lists_of_two_runs_are_not_joined() -> None:
    with pytest.raises(LineageError):
        join_lists(listed(A), AttemptList("6" * 32, (A,)))


def test_step_0_is_refused_when_the_newest_attempt_continued_from_a_save_that_is_nowhere() -> None:
    order = lineage([A, ONLINE], [])
    with pytest.raises(RefusedOnlyCopy, match="continued from step 100"):
        check_fresh_start(order, decided_scratch=True, continued_from=100, silent_required=(), problems={})


UNDECIDED = Attempt("9" * 32, 3, None, decided=False)


def test_a_drain_tells_of_the_roots_decided_attempts() -> None:
    assert told_by_drain(listed(A, OFFLINE, UNDECIDED), listed()) == listed(A, OFFLINE)
    assert told_by_drain(listed(A, OFFLINE, UNDECIDED), listed(A)) == listed(A, OFFLINE)


def test_a_drain_tells_a_mirror_where_another_start_was_of_nothing_new() -> None:
    assert told_by_drain(listed(A, OFFLINE), listed(A, ONLINE)) == listed(A, ONLINE)


def test_a_drain_decides_an_attempt_that_the_mirror_lists_as_undecided() -> None:
    claimed = Attempt(OFFLINE.id, OFFLINE.number, None, decided=False)
    assert told_by_drain(listed(A, OFFLINE), listed(A, claimed, ONLINE)) == listed(A, ONLINE, OFFLINE)
    assert told_by_drain(listed(A, claimed), listed(A, OFFLINE)) == listed(A, OFFLINE)


def test_a_drain_of_another_run_tells_nothing() -> None:
    with pytest.raises(LineageError, match="different runs"):
        told_by_drain(listed(A), AttemptList("6" * 32, (A,)))
