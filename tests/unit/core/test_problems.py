"""What looks like a save but is not whole, and which of it a reader skips."""

from __future__ import annotations

from ckptmirror.core.model import Artifact, Attempt, Digest, Kind, Meta, SaveRef, Tombstone
from ckptmirror.core.problems import (
    Explained,
    Problem,
    skipped_for,
    unexplained,
)
from ckptmirror.core.start.lineage import SaveFacts, lineage

A = Attempt("aa" * 16, 0, None)
BOTH: tuple[Kind, ...] = ("dcp", "model")


def save(number: int, step: int, kinds: tuple[Kind, ...] = BOTH, attempt: Attempt = A) -> SaveFacts:
    return SaveFacts(f"{attempt.id[0]}{number:07d}" + "0" * 24, attempt.id, number, step, kinds)


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


def skipped(
    chosen: SaveFacts, kind: Kind, problems: dict[str, Problem], *, whole: tuple[SaveFacts, ...] = ()
) -> set[str]:
    metas = [meta_of(one) for one in (chosen, *whole)]
    return set(skipped_for(metas[0], kind, problems, [A], metas))


def test_a_reader_skips_what_would_have_been_chosen_were_it_whole() -> None:
    problems = {
        "newer": Problem("torn", 11),
        "older": Problem("torn", 9),
        "unknown": Problem("torn"),
        "same, unknown": Problem("torn", 10),
        "same, after": problem(save(6, 10, ("model",))),
        "same, before": problem(save(4, 10, ("model",))),
        "another kind": problem(save(7, 11, ("dcp",))),
        "itself": problem(save(5, 10, ("model",))),
    }
    assert skipped(save(5, 10, ("model",)), "model", problems) == {"newer", "unknown", "same, unknown", "same, after"}


def test_what_would_be_superseded_or_replaced_even_if_it_were_whole_is_not_skipped() -> None:
    kept, torn = save(1, 1), save(3, 3)
    rewind = Attempt("bb" * 16, 1, SaveRef(A.id, 1, 1, kept.save_id))
    undecided = Attempt("cc" * 16, 2, SaveRef(A.id, 1, 1, kept.save_id), decided=False)
    mine = save(1, 4, ("dcp",), rewind)
    problems = {"superseded": problem(torn), "mine": problem(mine, rewind), "unread": Problem("not JSON", 9)}
    found = skipped_for(meta_of(kept), "dcp", problems, [A, rewind, undecided], [meta_of(kept)])
    assert set(found) == {"mine", "unread"}
    replaced = {"torn": problem(save(2, 5))}
    assert skipped(save(1, 1), "dcp", replaced, whole=(save(3, 5, ("dcp",)),)) == set()
    assert skipped(save(1, 1), "model", replaced, whole=(save(3, 5, ("dcp",)),)) == {"torn"}


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
    found = unexplained(listed, Explained.by(metas), [removed])
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
