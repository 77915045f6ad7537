"""Parameter groups of stages, joined to those of one model."""

from __future__ import annotations

from typing import Any

import pytest

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.stages import by_stage, elsewhere_in, in_stages, join_groups


def group(lr: float, *params: str) -> dict[str, Any]:
    return {"lr": lr, "params": list(params)}


def test_groups_with_equal_settings_of_different_stages_are_one() -> None:
    saved = in_stages([group(0.1, "c"), group(0.2, "d")], 1) | in_stages([group(0.1, "a"), group(0.2, "b")], 0)
    assert join_groups(saved) == [group(0.1, "a", "c"), group(0.2, "b", "d")]


def test_groups_of_one_stage_stay_apart_even_if_their_settings_are_equal() -> None:
    saved = in_stages([group(0.1, "a"), group(0.1, "b")], 0) | in_stages([group(0.1, "c"), group(0.1, "d")], 1)
    assert join_groups(saved) == [group(0.1, "a", "c"), group(0.1, "b", "d")]


def test_groups_with_other_settings_are_added_in_the_order_of_the_stages() -> None:
    saved = in_stages([group(0.3, "z")], 10) | in_stages([group(0.1, "a")], 2)
    assert join_groups(saved) == [group(0.1, "a"), group(0.3, "z")]


def test_a_save_without_stages_is_as_it_was() -> None:
    groups = [group(0.1, "a"), group(0.1, "b")]
    assert in_stages(groups, None) is groups
    assert join_groups(groups) is groups
    assert by_stage("text") == ["text"]


@pytest.mark.parametrize(
    "saved", [{"pp0": 3}, {"pp0": [3]}, {"pp0": [{"lr": 0.1}]}, {"elsewhere": [group(0.1, "a")]}, {}]
)
def test_what_is_no_groups_is_a_broken_save(saved: Any) -> None:
    with pytest.raises(IntegrityError):
        join_groups(saved)


def test_names_that_only_other_ranks_hold_are_known_with_and_without_prefixes() -> None:
    is_elsewhere = elsewhere_in(["module.a", "module.b", "module.c"], ["a"], frozenset({"b"}))
    assert [name for name in ("module.a", "module.b", "module.c") if is_elsewhere(name)] == ["module.b"]
    assert not elsewhere_in(["a"], [], frozenset())("a")
