"""Where a start begins: the order of candidates, what is never passed by, and when step 0 is allowed."""

from __future__ import annotations

from ckptmirror.core.model import Artifact, Attempt, Digest, Kind, Meta, SaveRef, Tombstone
from ckptmirror.core.problems import (
    DISK,
    Candidate,
    Problem,
    first_in_line,
    passed_by,
    strangers,
    unexplained,
)
from ckptmirror.core.start.lineage import SaveFacts, lineage

A = Attempt("aa" * 16, 0, None)
BOTH: tuple[Kind, ...] = ("dcp", "model")


def save(number: int, step: int, kinds: tuple[Kind, ...] = BOTH, attempt: Attempt = A) -> SaveFacts:
    return SaveFacts(f"{attempt.id[0]}{number:07d}" + "0" * 24, attempt.id, number, step, kinds)


def everywhere(*saves: SaveFacts, at: tuple[str, ...] = (DISK,)) -> dict[tuple[str, Kind], tuple[str, ...]]:
    return {(one.save_id, kind): at for one in saves for kind in one.kinds}


def test_a_replaced_save_that_was_resumed_from_leaves_the_one_that_replaced_it_off_the_lineage() -> None:
    first, broken = save(1, 5, ("dcp",)), save(2, 5, ("dcp",))
    after = Attempt("bb" * 16, 1, SaveRef(A.id, 1, 5, first.save_id))
    order = lineage([A, after], [first, broken])
    assert order.standing_by_save() == {first.save_id: "current", broken.save_id: "superseded"}


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
