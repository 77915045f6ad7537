"""Where a start begins: the order of candidates, and when step 0 is allowed."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import CheckpointNotFound, RefusedOnlyCopy, StoreTemporary, UsageError
from ckptmirror.core.lineage import Lineage, SaveFacts, lineage
from ckptmirror.core.model import Attempt, Kind, SaveRef
from ckptmirror.core.resumption import DISK, candidates, check_fresh_start, check_scratch

A = Attempt("aa" * 16, 0, None)
BOTH: tuple[Kind, ...] = ("dcp", "model")


def save(number: int, step: int, kinds: tuple[Kind, ...] = BOTH, attempt: Attempt = A) -> SaveFacts:
    return SaveFacts(f"{attempt.id[0]}{number:07d}" + "0" * 24, attempt.id, number, step, kinds)


def everywhere(*saves: SaveFacts, at: tuple[str, ...] = (DISK,)) -> dict[tuple[str, Kind], tuple[str, ...]]:
    return {(one.save_id, kind): at for one in saves for kind in one.kinds}


def chosen(order: Lineage, *args: object, **kwargs: object) -> list[tuple[int, str]]:
    return [(one.save.step, one.kind) for one in candidates(order, *args, **kwargs)]  # type: ignore[arg-type]


def test_newest_step_first_and_of_a_step_dcp_then_model_then_emergency() -> None:
    saves = [save(1, 9), save(2, 10, ("model",)), save(3, 10, ("emergency",)), save(4, 10, ("dcp",))]
    assert chosen(lineage([A], saves), everywhere(*saves)) == [
        *((10, "dcp"), (10, "model"), (10, "emergency")),
        *((9, "dcp"), (9, "model")),
    ]


def test_steps_are_ordered_as_numbers() -> None:
    saves = [save(1, 999_999), save(2, 1_000_000)]
    assert chosen(lineage([A], saves), everywhere(*saves))[0] == (1_000_000, "dcp")


def test_places_keep_their_order_and_what_is_nowhere_is_no_candidate() -> None:
    one, two = save(1, 1, ("dcp",)), save(2, 2, ("dcp",))
    (candidate,) = candidates(lineage([A], [one, two]), everywhere(one, at=(DISK, "gs://a", "gs://b")))
    assert (candidate.save, candidate.places) == (one, (DISK, "gs://a", "gs://b"))


def test_a_later_save_of_a_step_and_kind_stands_for_the_earlier() -> None:
    first, again = save(1, 5, ("dcp",)), save(2, 5, ("dcp",))
    (candidate,) = candidates(lineage([A], [first, again]), everywhere(first, again))
    assert candidate.save == again


def test_superseded_saves_are_found_by_id_alone() -> None:
    kept, aside = save(1, 1), save(2, 2)
    rewind = Attempt("bb" * 16, 1, SaveRef(attempt=A.id, number=1, step=1, save_id=kept.save_id))
    order = lineage([A, rewind], [kept, aside])
    places = everywhere(kept, aside)
    assert chosen(order, places) == [(1, "dcp"), (1, "model")]
    with pytest.raises(CheckpointNotFound, match="off the lineage") as failed:
        candidates(order, places, 2)
    assert aside.save_id[:8] in failed.value.hint
    assert chosen(order, places, aside.save_id[:8]) == [(2, "dcp"), (2, "model")]


def test_a_step_that_is_missing_names_the_nearest() -> None:
    saves = [save(n, step) for n, step in enumerate((1, 2, 5, 9, 50, 60), start=1)]
    with pytest.raises(CheckpointNotFound, match=r"There is no save of step 7\. The nearest are 1, 2, 5, 9"):
        candidates(lineage([A], saves), everywhere(*saves), 7)
    with pytest.raises(CheckpointNotFound, match="There is no save at all"):
        candidates(lineage([A], []), {}, 7)


@pytest.mark.parametrize("reference", ["newest", "abc", "000002", "dcp_000002", "DEADBEEF"])
def test_what_is_neither_step_nor_latest_nor_id_is_a_usage_error(reference: str) -> None:
    with pytest.raises(UsageError):
        candidates(lineage([A], [save(1, 1)]), {}, reference)


def test_an_ambiguous_id_is_an_error() -> None:
    one = SaveFacts("1234567890" + "a" * 22, A.id, 1, 1, BOTH)
    two = SaveFacts("1234567890" + "b" * 22, A.id, 2, 2, BOTH)
    with pytest.raises(UsageError, match="2 save ids start with"):
        candidates(lineage([A], [one, two]), {}, "1234567890")


def fresh(
    order: Lineage, *, scratch: bool = False, silent: tuple[str, ...] = (), problems: dict[str, str] | None = None
) -> None:
    check_fresh_start(
        order, decided_scratch=scratch, continued_from=None, silent_required=silent, problems=problems or {}
    )


def test_step_0_is_allowed_where_there_is_nothing() -> None:
    fresh(lineage([], []))
    fresh(lineage([A], []), scratch=True)


def test_step_0_needs_the_answer_of_every_required_mirror() -> None:
    with pytest.raises(StoreTemporary, match="gs://a"):
        fresh(lineage([], []), silent=("gs://a",))


def test_anything_broken_forbids_step_0_even_after_a_decided_scratch() -> None:
    for scratch in (False, True):
        with pytest.raises(RefusedOnlyCopy, match=r"meta_000001\.json: bad checksum"):
            fresh(lineage([], []), scratch=scratch, problems={"meta_000001.json": "bad checksum"})


def test_a_save_that_could_not_be_loaded_forbids_step_0() -> None:
    with pytest.raises(RefusedOnlyCopy):
        fresh(lineage([A], [save(1, 1)]), scratch=True, problems={})


def test_superseded_saves_allow_step_0_only_after_a_decided_scratch() -> None:
    scratch = Attempt("cc" * 16, 1, None)
    order = lineage([A, scratch], [save(1, 1)])
    fresh(order, scratch=True)
    with pytest.raises(RefusedOnlyCopy, match="step 1"):
        fresh(order, scratch=False)


def test_unknown_saves_forbid_step_0_always() -> None:
    with pytest.raises(RefusedOnlyCopy, match="step 1"):
        fresh(lineage([], [save(1, 1)]), scratch=True)


def test_a_start_over_without_force_leaves_nothing_behind() -> None:
    check_scratch(lineage([A], []), {})
    with pytest.raises(RefusedOnlyCopy, match="step 1; step 2") as refused:
        check_scratch(lineage([A], [save(1, 1), save(2, 2)]), {})
    assert "force=True" in refused.value.hint
    with pytest.raises(RefusedOnlyCopy, match="torn"):
        check_scratch(lineage([], []), {"meta": "torn"})
