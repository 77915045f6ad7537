"""Which tensors of a save go to which of the model."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckptmirror.core.errors import UsageError
from ckptmirror.core.name_rules import ALL_NAMES, name_rules, parts_alone


def alike(saved: Iterable[str], _: Iterable[str]) -> dict[str, str]:
    return {name: name for name in saved}


@pytest.mark.parametrize(
    ("rename", "name", "new"),
    [
        ({"old.*": "new.*"}, "old.a.b", "new.a.b"),
        ({"*.old.*": "*.new.*"}, "x.old.y", "x.new.y"),
        ({"a*b*": "*-"}, "a1b2", "1-"),
        ({"exact": "other"}, "exact", "other"),
        ({"exact": "other"}, "exact.more", "exact.more"),
        ({"a.*": "b.*", "*": "c.*"}, "a.x", "b.x"),
        (str.upper, "a", "A"),
    ],
)
def test_a_saved_name_becomes(rename: object, name: str, new: str) -> None:
    assert name_rules(rename=rename).renamed(name) == new


def test_two_names_can_change_places() -> None:
    rules = name_rules(rename={"a": "b", "b": "a"})
    assert rules.pair(["a", "b"], ["a", "b"], [], alike) == ({"a": "b", "b": "a"}, ())


@pytest.mark.parametrize("rename", [3, {"a": 1}, {"a": "*"}, {"a?": "b"}, {"[ab]": "c"}])
def test_another_kind_of_rename_is_refused(rename: object) -> None:
    with pytest.raises(UsageError, match="it must be a dict of patterns, or a function"):
        name_rules(rename=rename)


def test_patterns_and_parts_are_told_apart() -> None:
    exclude = ("optimizer", "model", "model.head.*")
    assert parts_alone(exclude) == ["optimizer", "model"]
    assert name_rules(exclude).exclude == ("head.*",)
    assert parts_alone("model.head.*") == "model.head.*", "a text in place of a tuple is refused later"
    assert name_rules() == ALL_NAMES


def test_what_other_ranks_hold_is_not_missing_here() -> None:
    assert ALL_NAMES.pair(["a", "b"], ["a"], ["b"], alike) == ({"a": "a"}, ())
    with pytest.raises(UsageError, match="Not in the model: b"):
        ALL_NAMES.pair(["a", "b"], ["a"], [], alike)


def test_a_pattern_may_match_on_another_rank_alone() -> None:
    assert name_rules(["model.b*"]).pair(["a", "b"], ["a"], ["b"], alike) == ({"a": "a"}, ())


def test_a_pattern_of_a_tensor_that_the_model_no_longer_has_leaves_it_in_the_save() -> None:
    assert name_rules(["model.head.*"]).pair(["a", "head.w"], ["a"], [], alike) == ({"a": "a"}, ())
