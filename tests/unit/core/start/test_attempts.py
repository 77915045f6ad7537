"""Which attempts count, and what may be committed: rows of evidence, and what follows from them."""

from __future__ import annotations

from start_rows import ELSEWHERE, HERE, evidence, place, ref, save, silent

from ckptmirror.core.model import Attempt
from ckptmirror.core.start.attempts import may_commit
from ckptmirror.core.start.evidence import DISK

A1, A2, A3 = save("a1", 100), save("a2", 200), save("a3", 300)
A = Attempt("A", 0, None, root=ELSEWHERE)


# -- the first commit while a mirror is silent ------------------------------------------------------------------

B = Attempt("B", 1, ref(A1), root=HERE)
B1 = save("b1", 200)


def test_a_first_commit_waits_for_a_silent_mirror_while_another_root_may_have_saved_there() -> None:
    seen = evidence(place(DISK, (A, B), (B1,)), silent("gs://a"), place("gs://b", (A, B), (A1,)))
    verdict = may_commit(seen, "B")
    assert verdict.may == "wait"
    assert verdict.waits_for == ("gs://a",)
    assert verdict.rival == A


def test_a_first_commit_does_not_wait_where_this_root_has_committed_since_the_other_one_started() -> None:
    c1 = save("c1", 300)
    c = Attempt("C", 2, ref(B1), root=HERE)
    seen = evidence(place(DISK, (A, B, c), (B1, c1), uploaded="B"), silent("gs://a"), place("gs://b", (A, B, c), (A1,)))
    assert may_commit(seen, "C").may == "commit"
