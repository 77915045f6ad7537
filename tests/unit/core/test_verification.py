"""What it means that some saves of a place are not whole, and which command mends one."""

from __future__ import annotations

import pytest

from ckptmirror.core.model import Attempt, Kind, SaveRef
from ckptmirror.core.start.lineage import SaveFacts, Standing
from ckptmirror.core.verification import (
    State,
    Verdict,
    kinds_to_stage,
    outcome,
    repair_command,
    standing_if_whole,
    still_needed,
    worst,
)


def verdict(
    step: int | None = 100,
    state: State = "damaged",
    standing: Standing = "current",
    kinds: tuple[Kind, ...] = ("dcp", "model"),
) -> Verdict:
    return Verdict(step, kinds, standing, state)


def test_damage_outweighs_what_could_not_be_read_and_a_refusal_what_may_pass():
    assert worst([]) == "whole"
    assert worst(["whole", "unreadable"]) == "unreadable"
    assert worst(["unreadable", "refused"]) == "refused"
    assert worst(["refused", "damaged", "whole"]) == "damaged"


@pytest.mark.parametrize(("standing", "counts"), [("current", 1), ("unknown", 1), ("replaced", 0), ("superseded", 0)])
def test_only_what_may_be_chosen_counts(standing: Standing, counts: int):
    assert len(still_needed([verdict(standing=standing)])) == counts
    assert outcome([verdict(standing=standing)]) == ("damaged" if counts else "whole")


def test_a_broken_snapshot_counts_until_a_save_of_the_lineage_is_as_new():
    snapshot = verdict(150, kinds=("emergency",))
    assert outcome([verdict(100, "whole"), snapshot]) == "damaged"
    assert outcome([verdict(200, "whole"), snapshot]) == "whole"
    assert outcome([verdict(150, "whole"), snapshot]) == "whole"
    assert outcome([verdict(200, "damaged"), snapshot]) == "damaged"
    assert len(still_needed([verdict(200, "whole", "superseded"), snapshot])) == 1


def test_a_save_that_nobody_can_date_counts():
    assert outcome([verdict(None, "unreadable", "unknown", ())]) == "unreadable"


def test_what_is_not_whole_stands_where_it_would_if_it_were():
    first, second = Attempt("a", 0, None), Attempt("b", 1, SaveRef("a", 1, 100, "s1"))
    one, two = SaveFacts("s1", "a", 1, 100, ("dcp",)), SaveFacts("s2", "a", 2, 200, ("dcp",))
    assert standing_if_whole([first], [one], two) == "current"
    assert standing_if_whole([first, second], [one], two) == "superseded"
    again = SaveFacts("s3", "b", 1, 100, ("dcp",))
    assert standing_if_whole([first, second], [again], one) == "replaced"
    assert standing_if_whole([], [one], two) == "unknown"
    twin = SaveFacts("s2", "a", 3, 200, ("model",))  # another meta of the same save
    assert standing_if_whole([first], [one, twin], two) == "current"


def test_the_fewest_kinds_are_staged_that_bring_all_that_is_damaged():
    both: tuple[Kind, ...] = ("model", "dcp")
    assert kinds_to_stage(both, []) == ("dcp", "model")
    assert kinds_to_stage(both, [("model",)]) == ("model",)
    assert kinds_to_stage(both, [("dcp", "model"), ("model",)]) == ("model",)
    assert kinds_to_stage(both, [("dcp", "model")]) == ("dcp",)
    assert kinds_to_stage(both, [("model",), ("dcp",)]) == ("dcp", "model")
    assert kinds_to_stage(("emergency",), [("emergency",)]) == ()


def test_a_directory_is_mended_from_a_mirror_and_a_mirror_from_a_directory():
    here = repair_command(step=5, kinds=("dcp", "model"), standing="current", place="/r", mirror="gs://b/p")
    assert here == (
        "ckptmirror stage --step 5 --kind dcp --full --refresh --mirror gs://b/p --dest /r && "
        "ckptmirror stage --step 5 --kind model --full --refresh --mirror gs://b/p --dest /r"
    )
    aside = repair_command(step=5, kinds=("dcp",), standing="superseded", place="/r", mirror="gs://b/p")
    assert " --superseded " in aside
    assert repair_command(step=5, kinds=(), standing="current", place="/r", mirror="gs://b/p") == ""
    there = repair_command(step=5, kinds=("dcp",), standing="current", place="gs://b/p", root="/r")
    assert there == "ckptmirror drain --root /r"
    unknown = repair_command(step=5, kinds=("dcp",), standing="current", place="gs://b/p", root="/r", is_known=False)
    assert unknown == "ckptmirror push --root /r --mirror gs://b/p --step 5"
    assert repair_command(step=5, kinds=("dcp",), standing="current", place="gs://b/p") == ""
    brought = repair_command(
        step=5, kinds=("dcp",), standing="current", place="gs://b/p", root="/r", mirror="gs://other/p"
    )
    assert brought == (
        "ckptmirror stage --step 5 --kind dcp --full --refresh --mirror gs://other/p --dest /r && "
        "ckptmirror drain --root /r"
    )
    assert repair_command(step=5, kinds=(), standing="current", place="gs://b/p", root="/r", mirror="gs://o/p") == ""


def test_a_place_with_a_blank_in_its_name_can_be_pasted_into_a_shell():
    said = repair_command(step=5, kinds=("dcp",), standing="current", place="/a b/run", mirror="gs://b/p")
    assert said.endswith("--dest '/a b/run'")
    assert repair_command(step=5, kinds=("dcp",), standing="current", place="gs://b/p", root="/a b") == (
        "ckptmirror drain --root '/a b'"
    )
