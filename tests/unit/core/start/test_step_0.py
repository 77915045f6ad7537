"""Step 0: when a start may begin there, and when only a person may say so."""

from __future__ import annotations

from start_rows import ELSEWHERE, evidence, place, ref, save

from ckptmirror.core.errors import RefusedOnlyCopy
from ckptmirror.core.model import Attempt
from ckptmirror.core.start.decide import Refuse, Scratch, Wish, next_move
from ckptmirror.core.start.evidence import DISK

A1 = save("a1", 100)
A = Attempt("A", 0, None, root=ELSEWHERE)
OVER = Attempt("B", 1, None, by_person=True, root=ELSEWHERE, required=("gs://a", "gs://b"))
MEANWHILE = Attempt("C", 1, ref(A1), root="this root")


def test_an_attempt_that_died_before_its_first_save_does_not_undo_a_start_over() -> None:
    lists = (A, OVER)
    seen = evidence(place(DISK, (A, MEANWHILE), (A1,)), place("gs://a", lists, (A1,)), place("gs://b", lists, (A1,)))
    assert isinstance(next_move(seen, Wish()), Scratch)


def test_step_0_is_a_persons_decision_where_an_attempt_continued_from_a_save_that_nobody_has() -> None:
    seen = evidence(place(DISK), place("gs://a", (A, MEANWHILE)), place("gs://b", (A,)))
    move = next_move(seen, Wish())
    assert isinstance(move, Refuse)
    assert isinstance(move.error, RefusedOnlyCopy)
