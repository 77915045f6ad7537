"""Where a start begins: the order of candidates, what is never passed by, and when step 0 is allowed."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import (
    CheckpointNotFound,
    NotAuthorised,
    RefusedOnlyCopy,
    StoreTemporary,
    Temporary,
    UsageError,
)
from ckptmirror.core.lineage import Lineage, SaveFacts, lineage
from ckptmirror.core.model import Artifact, Attempt, Digest, Kind, Meta, SaveRef, Tombstone
from ckptmirror.core.resumption import (
    DISK,
    Candidate,
    Problem,
    candidates,
    check_fresh_start,
    check_passed_by,
    check_scratch,
    first_in_line,
    need_every_mirror,
    passed_by,
    strangers,
    unexplained,
)

A = Attempt("aa" * 16, 0, None)
BOTH: tuple[Kind, ...] = ("dcp", "model")


def save(number: int, step: int, kinds: tuple[Kind, ...] = BOTH, attempt: Attempt = A) -> SaveFacts:
    return SaveFacts(f"{attempt.id[0]}{number:07d}" + "0" * 24, attempt.id, number, step, kinds)


def everywhere(*saves: SaveFacts, at: tuple[str, ...] = (DISK,)) -> dict[tuple[str, Kind], tuple[str, ...]]:
    return {(one.save_id, kind): at for one in saves for kind in one.kinds}


def chosen(order: Lineage, *args: object, **kwargs: object) -> list[tuple[int, str]]:
    return [(one.save.step, one.kind) for one in candidates(order, *args, **kwargs)]  # type: ignore[arg-type]


def test_newest_step_first_and_of_a_step_the_newest_save_and_of_a_save_dcp_then_model() -> None:
    saves = [save(1, 9), save(2, 10, ("model",)), save(3, 10, ("emergency",)), save(4, 10, ("dcp",))]
    assert chosen(lineage([A], saves), everywhere(*saves)) == [
        *((10, "dcp"), (10, "emergency"), (10, "model")),
        *((9, "dcp"), (9, "model")),
    ]


def test_steps_are_ordered_as_numbers() -> None:
    saves = [save(1, 999_999), save(2, 1_000_000)]
    assert chosen(lineage([A], saves), everywhere(*saves))[0] == (1_000_000, "dcp")


def test_places_keep_their_order_and_what_is_nowhere_is_no_candidate() -> None:
    one, two = save(1, 1, ("dcp",)), save(2, 2, ("dcp",))
    (candidate,) = candidates(lineage([A], [one, two]), everywhere(one, at=(DISK, "gs://a", "gs://b")))
    assert (candidate.save, candidate.places) == (one, (DISK, "gs://a", "gs://b"))


def test_a_later_save_of_a_step_stands_for_the_earlier_which_is_tried_before_an_older_step() -> None:
    older, first, second = save(1, 4, ("dcp",)), save(2, 5), save(3, 5)
    third = save(4, 5, ("dcp",))
    order = lineage([A], [older, first, second, third])
    found = candidates(order, everywhere(older, first, second, third))
    assert [(one.save, one.kind, one.replaced_by) for one in found] == [
        (third, "dcp", ""),
        (second, "model", ""),
        (second, "dcp", third.save_id),
        (first, "dcp", third.save_id),
        (first, "model", second.save_id),
        (older, "dcp", ""),
    ]
    assert [one.save.step for one in candidates(order, everywhere(older, first, second, third), 5)] == [5] * 5


def test_a_replaced_save_of_a_later_attempt_is_newer_whatever_its_number() -> None:
    first, second = save(7, 5, ("dcp",)), save(8, 5, ("dcp",))
    later = Attempt("bb" * 16, 1, SaveRef(A.id, 8, 5, second.save_id))
    again, once_more = save(1, 5, ("dcp",), later), save(2, 5, ("dcp",), later)
    saves = [first, second, again, once_more]
    found = candidates(lineage([A, later], saves), everywhere(*saves))
    assert [one.save for one in found] == [once_more, again, second, first]


def test_a_replaced_save_that_was_resumed_from_leaves_the_one_that_replaced_it_off_the_lineage() -> None:
    first, broken = save(1, 5, ("dcp",)), save(2, 5, ("dcp",))
    after = Attempt("bb" * 16, 1, SaveRef(A.id, 1, 5, first.save_id))
    order = lineage([A, after], [first, broken])
    assert order.standing_by_save() == {first.save_id: "current", broken.save_id: "superseded"}


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


# -- what is not whole ------------------------------------------------------------------------------------------------


def meta_of(facts: SaveFacts, *, attempt: Attempt = A, paths: tuple[str, ...] = ()) -> Meta:
    digest = Digest(0, 0, 4 * 1024 * 1024, ())
    artifacts = tuple(Artifact(path, facts.kinds, 0, digest) for path in paths)
    tag = facts.save_id[:8] if any("-" in path for path in paths) else ""
    return Meta("r" * 32, attempt, facts.step, facts.save_id, facts.number, facts.kinds, 1, 1, 0, artifacts, tag)


def problem(facts: SaveFacts, attempt: Attempt = A) -> Problem:
    return Problem.of(meta_of(facts, attempt=attempt), "torn")


def test_a_problem_counts_if_it_would_have_been_tried_first_were_it_whole() -> None:
    here = Candidate(save(5, 10, ("model",)), "model", (DISK,), age=(0, 5))
    problems = {
        "newer": Problem("torn", 11),
        "older": Problem("torn", 9),
        "unknown": Problem("torn"),
        "same, unknown": Problem("torn", 10),
        "same, after": problem(save(6, 10, ("emergency",))),
        "same, before": problem(save(4, 10, ("dcp",))),
    }
    assert set(passed_by(here, problems)) == {"newer", "unknown", "same, unknown", "same, after"}
    assert set(passed_by(None, problems)) == set(problems)
    replaced = Candidate(here.save, "model", (DISK,), replaced_by="b" * 32)
    assert "same, before" in passed_by(replaced, problems)


def test_what_would_be_superseded_or_replaced_even_if_it_were_whole_is_in_nobodys_way() -> None:
    kept, aside, torn = save(1, 1), save(2, 2), save(3, 3)
    rewind = Attempt("bb" * 16, 1, SaveRef(A.id, 1, 1, kept.save_id))
    mine = save(1, 4, ("dcp",), rewind)
    earlier = save(0, 1)  # by number, replaced by ``kept``
    problems = {"aside": problem(torn), "earlier": problem(earlier), "mine": problem(mine, rewind)}
    found = first_in_line(problems, [A, rewind], [kept, aside])
    assert {name: one.kinds for name, one in found.items()} == {"mine": ("dcp",)}
    assert set(first_in_line({"unread": Problem("not JSON", 9)}, [A, rewind], [kept])) == {"unread"}


def test_a_problem_counts_only_in_the_kinds_that_no_later_save_stands_for() -> None:
    torn, later = save(1, 5), save(2, 5, ("dcp",))
    assert first_in_line({"torn": problem(torn)}, [A], [later])["torn"].kinds == ("model",)


def test_what_cannot_be_read_now_is_an_error_that_may_pass_and_names_the_deliberate_way() -> None:
    with pytest.raises(Temporary, match="EIO") as failed:
        check_passed_by({"meta": Problem("EIO", 9, hindrance="unreadable")}, {})
    assert "policy=<step>" in failed.value.hint
    with pytest.raises(NotAuthorised, match="403") as refused:
        check_passed_by({"meta": Problem("403", 9, hindrance="refused")}, {})
    assert "policy=<step>" in refused.value.hint


def test_what_is_not_whole_is_passed_over_unless_a_silent_mirror_may_hold_it() -> None:
    torn = {"meta": Problem("torn", 9)}
    check_passed_by(torn, {})
    with pytest.raises(StoreTemporary, match=r"meta is not whole \(torn\).* gs://a does not answer \(503\)"):
        check_passed_by(torn, {"gs://a": "503"})
    check_passed_by({"snapshot": Problem("torn", 9, kinds=("emergency",))}, {"gs://a": "503"})


def test_while_a_required_mirror_is_silent_the_first_choice_must_be_on_the_disk() -> None:
    one, two, alarm = save(1, 1, ("dcp",)), save(2, 2), save(3, 3, ("emergency",))
    here, there = (DISK, "gs://b"), ("gs://b",)
    own = {one.save_id, two.save_id, alarm.save_id}
    assert need_every_mirror([Candidate(two, "dcp", here), Candidate(one, "dcp", there)], own) == frozenset()
    assert need_every_mirror([Candidate(two, "dcp", there), Candidate(one, "dcp", here)], own) == {two.save_id}
    assert need_every_mirror([Candidate(two, "dcp", there), Candidate(two, "model", here)], own) == frozenset()
    snapshot_first = [
        Candidate(alarm, "emergency", (DISK,)),
        Candidate(two, "dcp", there),
        Candidate(one, "dcp", there),
    ]
    assert need_every_mirror(snapshot_first, own) == {two.save_id}
    assert need_every_mirror([], own) == frozenset()
    assert need_every_mirror([Candidate(two, "dcp", here)], set()) == {two.save_id}, "somebody staged it here"


def test_saves_of_an_attempt_that_no_list_tells_of_are_strangers() -> None:
    never_told = Attempt("cc" * 16, 1, None)
    undecided = Attempt("dd" * 16, 2, None, decided=False)
    saves = [save(1, 1), save(1, 2, attempt=never_told), save(1, 3, attempt=undecided)]
    assert strangers(lineage([A], saves), [A, undecided]) == saves[1:]


def test_files_that_no_meta_tells_of_are_one_problem_for_each_save() -> None:
    told = save(1, 1)
    metas = [meta_of(told, paths=("dcp_000001/.metadata", "extra_000001_rank0.pt"))]
    listed = [
        *("dcp_000001/.metadata", "dcp_000001/notes.txt", f"dcp_000001-{told.save_id[:8]}/.metadata"),
        f"parts/meta_000001-{told.save_id[:8]}.part00001-of-00002.json",
        *("dcp_000002/.metadata", "model_000002.pt", "model_000003-0123abcd.pt", "extra_000001-0123abcd_rank0.pt"),
        "parts/meta_000007-0123abcd.part00001-of-00002.json",
        *("dist_ckpt_000004", "extra_000004.pt", "meta.json"),
        *("notes.txt", "latest", ".ckptmirror", "writer.json", "model_000005.pt.0123abcd.tmp", "meta_000006.json"),
        *("model_000009.pt", "model_000009-99999999.pt"),
    ]
    removed = Tombstone("9" * 32, 9, ("model",), "retention", "2026-11-21T00:00:00Z")
    found = unexplained(listed, metas, [removed])
    assert {name: (one.step, one.why) for name, one in found.items()} == {
        "dcp_000002": (2, "no valid meta names it (nor 1 more of step 2)"),
        "model_000003-0123abcd.pt": (3, "no valid meta names it"),
        "extra_000001-0123abcd_rank0.pt": (1, "no valid meta names it"),
        "parts/meta_000007-0123abcd.part00001-of-00002.json": (7, "no valid meta names it"),
        **{
            name: (None, "of an older layout, which is never resumed from")
            for name in ("dist_ckpt_000004", "extra_000004.pt", "meta.json")
        },
    }
