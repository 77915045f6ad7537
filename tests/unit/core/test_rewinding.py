"""What an attempt from an older save leaves behind and takes up, over the cases of LINEAGE.md."""

from __future__ import annotations

from ckptmirror.core.model import Attempt, SaveRef
from ckptmirror.core.rewinding import Fork, fork_at
from ckptmirror.core.start.lineage import SaveFacts

A1, A2, A3 = (SaveFacts(f"a{n}", "A", n, n * 100, ("dcp",)) for n in (1, 2, 3))
B1 = SaveFacts("b1", "B", 1, 300, ("dcp",))
A = Attempt("A", 0, None)


def ref(save: SaveFacts) -> SaveRef:
    return SaveRef(save.attempt, save.number, save.step, save.save_id)


B = Attempt("B", 1, ref(A2))


def test_what_lies_after_the_save_is_left_behind():
    assert fork_at([A], [A1, A2, A3], ref(A1)) == Fork((A2, A3), ())


def test_the_newest_save_leaves_nothing_behind():
    assert fork_at([A], [A1, A2, A3], ref(A3)) == Fork((), ())


def test_a_save_of_an_earlier_attempt_leaves_later_attempts_behind():
    assert fork_at([A, B], [A1, A2, A3, B1], ref(A1)) == Fork((A2, B1), ())


def test_a_superseded_save_takes_up_what_led_to_it():
    assert fork_at([A, B], [A1, A2, A3, B1], ref(A3)) == Fork((B1,), (A3,))


def test_undoing_a_rewind_restores_the_lineage():
    back = Attempt("C", 2, ref(A1))
    assert fork_at([A, back], [A1, A2, A3], ref(A3)) == Fork((), (A2, A3))


def test_a_replaced_save_leaves_behind_what_replaced_it():
    again = SaveFacts("a4", "A", 4, 200, ("dcp",))
    assert fork_at([A], [A1, A2, again], ref(A2)) == Fork((again,), ())


def test_an_undecided_attempt_has_no_say():
    begun = Attempt("C", 7, None, decided=False)
    assert fork_at([A, begun], [A1, A2], ref(A1)) == Fork((A2,), ())
