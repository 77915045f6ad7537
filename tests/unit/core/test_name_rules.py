"""Which tensors of a save go to which of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ckptmirror.core.errors import UsageError
from ckptmirror.core.name_rules import ALL_NAMES, marked, name_rules, parts_alone


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


class Table:
    """Renames by a table, as a method."""

    def __init__(self, **table: str) -> None:
        self.table = table

    def new(self, name: str) -> str:
        return self.table[name]


def test_a_rename_is_told_by_what_it_makes_of_the_names_of_a_model() -> None:
    names = ["a", "b", "c"]
    mark = name_rules(rename={"a": "b", "b": "a"}).mark(names)
    same = [{"b": "a", "a": "b"}, Table(a="b", b="a").new, lambda name: {"a": "b", "b": "a"}.get(name, name)]
    for rename in same:
        rules = name_rules(rename=rename)
        assert rules.mark(reversed(names)) == mark
        done = rules.for_save(marked("hash", mark), mark, names)
        assert [done.renamed(name) for name in names] == names
        assert rules.for_save("hash", mark, names) is rules
    others = [
        Table(a="a", b="c", c="b").new,
        {"a": "b", "b": "a", "c": "d"},
    ]
    assert len({mark, *(name_rules(rename=rename).mark(names) for rename in others)}) == 1 + len(others)
    more = name_rules(rename={"a": "b", "b": "a", "old": "d"})
    assert more.mark([*names, "d"]) == mark, "the model has more names now"
    assert more.for_save(marked("hash", mark), mark, [*names, "d"]).renamed("old") == "d"
    assert ALL_NAMES.mark(names) == name_rules(rename={}).mark(names) == ""
    assert ALL_NAMES.for_save("hash", "", names) is ALL_NAMES


def test_a_pattern_that_fits_nothing_is_refused_beside_names_that_stay_if_the_model_misses_one() -> None:
    saved, typo = ["new.weight", "head.weight"], {"haed.*": "out.*"}
    mark = name_rules(rename={"old.*": "new.*"}).mark(saved)

    def pair(rename: dict[str, str], saved: list[str], live: list[str]) -> Any:
        rules = name_rules(rename=rename, strict=False)
        rules = rules.for_save(marked("hash", mark), rules.mark(live), live)
        assert rules.kept
        return rules.pair(saved, live, (), lambda names, _: {name: name for name in names})[0]

    with pytest.raises(UsageError, match=r"holds 'haed\.\*', .* closest: head.weight"):
        pair(typo, saved, ["new.weight", "out.weight"])
    assert pair({"old.*": "new.*"}, saved[1:], saved[1:]) == {saved[1]: saved[1]}, "new.* has left the model since"


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
