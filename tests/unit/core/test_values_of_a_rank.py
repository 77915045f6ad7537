"""What each rank has of its own: patterns, the record in a rank's file, and what a load makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptmirror.core import per_rank
from ckptmirror.core.errors import IntegrityError, UsageError

NAMES = ["shared.weight", "experts.0.weight", "experts.1.weight", "norm.running_mean"]
MODEL = {name: f"value of {name}" for name in NAMES}
MOMENTS = {name: f"moments of {name}" for name in NAMES[:2]}
OPTIMIZER = {"state": MOMENTS, "param_groups": [{"params": NAMES[:3]}]}


def extra_of(rank: int, *, is_here: bool, world_size: int = 2) -> dict[str, Any]:
    told = {"patterns": ["experts.*"], "names": NAMES[1:3]}
    snapshot = SimpleNamespace(model=MODEL, optimizer=OPTIMIZER, extra={"step": 1, per_rank.KEY: told})
    return per_rank.recorded(snapshot, rank, world_size, is_here=is_here)


def target(rank: int, world_size: int = 2, exclude: tuple[str, ...] = (), optimizer: object = "AdamW") -> Any:
    state = SimpleNamespace(optimizer=optimizer)
    return SimpleNamespace(rank=rank, world_size=world_size, exclude=frozenset(exclude), state=state)


def own_of(rank: int, *, is_here: bool) -> per_rank.Own:
    own = per_rank.own_for(target(rank), extra_of(rank, is_here=is_here))
    assert own is not None
    return own


def test_patterns_match_whole_names() -> None:
    assert per_rank.matching(["experts.*"], NAMES) == NAMES[1:3]
    assert per_rank.matching(["experts"], NAMES) == []
    assert per_rank.matching(["*.running_*", "experts.1.*"], NAMES) == NAMES[2:]


@pytest.mark.parametrize(("pattern", "close"), [("expert.*", "experts.*"), ("norm.runing_mean", "norm.running_mean")])
def test_a_pattern_that_matches_nothing_is_refused_with_what_is_close(pattern: str, close: str) -> None:
    with pytest.raises(UsageError, match="no parameter or buffer") as caught:
        per_rank.check_patterns(["shared.*", pattern], NAMES)
    assert repr(pattern) in str(caught.value)
    assert close in str(caught.value).split("close to it are")[1]


def test_a_pattern_that_nothing_is_close_to_is_refused_with_some_names() -> None:
    with pytest.raises(UsageError, match=r"it has experts\.0\.weight"):
        per_rank.check_patterns(["zzz"], NAMES)


def test_the_first_rank_leaves_its_values_in_the_kinds_and_others_have_them_in_their_files() -> None:
    first, own = own_of(0, is_here=False), own_of(1, is_here=True)
    assert (first.model, first.optimizer, first.names) == ({}, {}, set(NAMES[1:3]))
    assert own.model == {name: MODEL[name] for name in NAMES[1:3]}
    assert own.optimizer == {NAMES[1]: MOMENTS[NAMES[1]]}
    kept, moments = per_rank.without(MODEL, OPTIMIZER, own.names)
    assert kept.keys() == {NAMES[0], NAMES[3]}
    assert moments == {**OPTIMIZER, "state": {NAMES[0]: MOMENTS[NAMES[0]]}}
    both = per_rank.with_own(kept, moments, extra_of(1, is_here=True))
    assert both == {"model": MODEL, "optimizer": OPTIMIZER}
    assert per_rank.only(both, NAMES[1:3]) == {"model": own.model, "optimizer": {"state": own.optimizer}}


def test_the_state_of_a_rank_that_has_none_of_a_parameter_stays_empty() -> None:
    shared = {NAMES[0]: "all", NAMES[2]: "rank 0's"}
    assert own_of(1, is_here=True).state_of(shared, {NAMES[1]: "own"}) == {NAMES[0]: "all", NAMES[1]: "own"}
    assert own_of(0, is_here=False).state_of(shared, {}) == shared


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_is_refused(world_size: int) -> None:
    extra = extra_of(0, is_here=False)
    with pytest.raises(UsageError, match=rf"had 2 ranks: {world_size} rank") as caught:
        per_rank.own_for(target(0, world_size), extra)
    assert "Start with 2 ranks" in str(caught.value.hint)
    assert per_rank.own_for(target(0, world_size, ("model", "optimizer")), extra) is None
    assert per_rank.own_for(target(0, world_size, ("model",), None), extra) is None


def test_the_file_of_another_rank_is_refused() -> None:
    with pytest.raises(IntegrityError, match="rank 1 had"):
        per_rank.own_for(target(1), extra_of(0, is_here=False))


def test_names_that_are_held_elsewhere_now_are_refused() -> None:
    own = own_of(1, is_here=True)
    own.refuse_other_names(NAMES, NAMES[1:3])
    wrapped = [f"module.{name}" for name in NAMES]
    own.refuse_other_names(wrapped, wrapped[1:3])
    with pytest.raises(UsageError, match=r"experts.1.weight is not in the model here"):
        own.refuse_other_names(NAMES[:2], NAMES[1:3])
    with pytest.raises(UsageError, match=r"experts.2.weight is not in what the save has"):
        own.refuse_other_names([*NAMES, "experts.2.weight"], NAMES[1:3])


@pytest.mark.parametrize(
    "change",
    [{"names": 3}, {"names": [[]]}, {"rank": "1"}, {"model": {"other": 1}}, {"more": 1}, {"patterns": [1]}, None],
    ids=str,
)
def test_a_broken_record_is_refused(change: dict[str, Any] | None) -> None:
    extra = extra_of(1, is_here=True)
    extra[per_rank.KEY] = {**extra[per_rank.KEY], **change} if change is not None else "text"
    with pytest.raises(IntegrityError, match="broken record"):
        per_rank.own_for(target(1), extra)


def test_ranks_that_have_other_names_tell_other_texts() -> None:
    assert per_rank.told(NAMES[1:3]) == per_rank.told(NAMES[2:0:-1])
    assert len({per_rank.told(NAMES), per_rank.told(NAMES[1:]), per_rank.told(()), per_rank.told(NAMES[:1])}) == 4
