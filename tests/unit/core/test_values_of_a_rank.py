"""What each rank has of its own: patterns, the record in a rank's file, and what a load makes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmirror.core import per_rank
from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.name_rules import ALL_NAMES

NAMES = ["shared.weight", "experts.0.weight", "experts.1.weight", "norm.running_mean"]
MODEL = {name: f"value of {name}" for name in NAMES}
MOMENTS = {name: f"moments of {name}" for name in NAMES[:2]}
OPTIMIZER = {"state": MOMENTS, "param_groups": [{"params": NAMES[:3]}]}


def extra_of(rank: int, *, is_here: bool, world_size: int = 2) -> dict[str, Any]:
    told = {"patterns": ["experts.*"], "names": NAMES[1:3]}
    snapshot = SimpleNamespace(model=MODEL, optimizer=OPTIMIZER, extra={"step": 1, per_rank.KEY: told})
    return per_rank.recorded(snapshot, rank, world_size, is_here=is_here)


def target(
    rank: int,
    world_size: int = 2,
    exclude: tuple[str, ...] = (),
    optimizer: object = "AdamW",
    declared: per_rank.PerRank = (),
) -> Any:
    state = SimpleNamespace(optimizer=optimizer, per_rank=declared)
    return SimpleNamespace(
        rank=rank,
        world_size=world_size,
        exclude=frozenset(exclude),
        state=state,
        elsewhere=frozenset(),
        rules=ALL_NAMES,
    )


def own_for(target: Any, *of_ranks: Any, world_size: int = 2) -> per_rank.Own | None:
    """What a rank has of its own of a save whose files have these, the first the one that it reads first."""
    saved = per_rank.RankExtras(of_ranks[0], world_size, lambda: enumerate(of_ranks))
    return per_rank.own_for(target, saved, per_rank.ValueTools(lambda value: value, lambda one, other: one == other))


def own_of(rank: int, *, is_here: bool) -> per_rank.Own:
    own = own_for(target(rank), extra_of(rank, is_here=is_here))
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
        own_for(target(0, world_size), extra)
    assert "Start with 2 ranks" in str(caught.value.hint)
    assert own_for(target(0, world_size, ("model", "optimizer")), extra) is None
    assert own_for(target(0, world_size, ("model",), None), extra) is None


def test_the_file_of_another_rank_is_refused() -> None:
    with pytest.raises(IntegrityError, match="rank 1 had"):
        own_for(target(1), extra_of(0, is_here=False))


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
        own_for(target(1), extra)


def test_ranks_that_have_other_names_tell_other_texts() -> None:
    assert per_rank.told(NAMES[1:3]) == per_rank.told(NAMES[2:0:-1])
    assert len({per_rank.told(NAMES), per_rank.told(NAMES[1:]), per_rank.told(()), per_rank.told(NAMES[:1])}) == 4


# -- another number of ranks -----------------------------------------------------------------------------------


class Array:
    """A value with a shape."""

    def __init__(self, *values: float, shape: tuple[int, ...] | None = None) -> None:
        self.values = values
        self.shape = (len(values),) if shape is None else shape


def records(ranks: int = 2, *, count: float = 3.0) -> list[dict[str, Any]]:
    """Rank 0 leaves its values in the kind; the others have moments of the first name alone."""
    found = []
    for rank in range(ranks):
        told = {"patterns": ["experts.*"], "names": NAMES[1:3]}
        model = {name: Array(rank, rank + number) for number, name in enumerate(NAMES)}
        state = {NAMES[1]: {"step": count if rank else 3.0, "exp_avg": Array(10.0 * rank, 1.0)}}
        snapshot = SimpleNamespace(model=model, optimizer={"state": state}, extra={per_rank.KEY: told})
        found.append(per_rank.recorded(snapshot, rank, ranks, is_here=rank > 0))
    return found


OF_KIND = {name: Array(0, number) for number, name in enumerate(NAMES)}
STATE_OF_KIND = {
    NAMES[1]: {"step": 3.0, "exp_avg": Array(0.0, 1.0)},
    NAMES[2]: {"step": 3.0, "exp_avg": Array(5.0, 5.0)},
}
LIVE = {name: Array(9, 9) for name in NAMES[1:3]}


def merged_of(merge: per_rank.Merge, rank: int = 2, world_size: int = 3, *, count: float = 3.0) -> per_rank.Own:
    of = records(count=count)
    found = own_for(target(rank, world_size, declared={"experts.*": merge}), *of)
    assert found is not None
    return found


def test_functions_merge_the_values_of_all_ranks_in_their_order() -> None:
    calls = []

    def merge(values: list[Any], rank: int, world_size: int) -> Any:
        calls.append(([getattr(value, "values", value) for value in values], rank, world_size))
        return values[-1]

    own = merged_of(merge)
    assert own.is_here
    assert {name: value.values for name, value in own.values(OF_KIND, LIVE).items()} == {
        NAMES[1]: (1, 2),
        NAMES[2]: (1, 3),
    }
    assert calls == [([(0, 1), (1, 2)], 2, 3), ([(0, 2), (1, 3)], 2, 3)]
    calls.clear()
    moments = own.moments(STATE_OF_KIND, LIVE)
    assert moments[NAMES[1]]["step"] == 3.0
    assert moments[NAMES[1]]["exp_avg"].values == (10.0, 1.0)
    assert NAMES[2] not in moments, "rank 1 had no state of it"
    assert [values for values, *_ in calls] == [[(0.0, 1.0), (10.0, 1.0)], [3.0, None], [(5.0, 5.0), None]]


def test_a_count_that_the_ranks_have_alike_is_not_merged_and_another_one_is() -> None:
    def steps(values: list[Any], _rank: int, _world_size: int) -> Any:
        return max((value for value in values if value is not None), key=lambda value: getattr(value, "values", value))

    assert merged_of(steps).moments(STATE_OF_KIND, LIVE)[NAMES[1]]["step"] == 3.0
    assert merged_of(steps, count=8.0).moments(STATE_OF_KIND, LIVE)[NAMES[1]]["step"] == 8.0


@pytest.mark.parametrize(
    ("merge", "why"),
    [
        (lambda *_: 1 / 0, "cannot be merged .*ZeroDivisionError"),
        (lambda *_: None, "to a NoneType, not to the shape"),
        (lambda *_: Array(1, 2, 3), r"to the shape \(3,\), not to the shape \(2,\)"),
        (lambda values: values[0], "cannot be merged .*TypeError"),
    ],
)
def test_a_function_that_fails_or_returns_another_shape_is_named(merge: Any, why: str) -> None:
    own = merged_of(merge)
    with pytest.raises(UsageError, match=rf"experts.0.weight of 2 ranks .*{why}") as caught:
        own.values(OF_KIND, LIVE)
    assert "or start with 2 ranks" in str(caught.value.hint)


def test_moments_take_the_shape_that_the_parameter_has_here() -> None:
    def joined(values: list[Any], _rank: int, _world_size: int) -> Any:
        return Array(*(number for value in values if value is not None for number in value.values))

    own = merged_of(joined)
    wide = {NAMES[1]: Array(0, 0, 0, 0), NAMES[2]: Array(0, 0, 0, 0)}
    assert own.values(OF_KIND, wide)[NAMES[1]].values == (0, 1, 1, 2)
    assert own.moments({NAMES[1]: STATE_OF_KIND[NAMES[1]]}, wide)[NAMES[1]]["exp_avg"].values == (0.0, 1.0, 10.0, 1.0)
    own = merged_of(lambda values, *_: values[0])
    own.values(OF_KIND, LIVE)
    with pytest.raises(UsageError, match=r"the optimizer's exp_avg of experts.0.weight of 2 ranks"):
        replace(own, functions={NAMES[1]: joined, NAMES[2]: joined}).moments(STATE_OF_KIND, LIVE)


@pytest.mark.parametrize(
    ("declared", "lacks"),
    [
        ({"experts.*": None}, "experts.0.weight, experts.1.weight"),
        ({"experts.0.*": lambda values, *_: values[0]}, "experts.1.weight"),
        ({"experts.1.*": None, "experts.*": lambda values, *_: values[0]}, "experts.1.weight"),
    ],
)
def test_names_without_a_function_are_refused(declared: per_rank.PerRank, lacks: str) -> None:
    of = records()
    with pytest.raises(UsageError, match=rf"of its own of {lacks} \(per_rank\)"):
        own_for(target(0, 3, declared=declared), *of)
    assert own_for(target(0, 2, declared=declared), *of) is not None


def test_each_record_has_to_be_that_of_its_rank() -> None:
    of = records()
    for broken in ([of[0], of[0]], [of[1], of[0]], [{}, of[0]]):
        with pytest.raises(IntegrityError, match="do not have what each rank had"):
            own_for(target(0, 3, declared={"*": lambda values, *_: values[0]}), *broken)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_only_the_ranks_of_one_stage_had_of_their_own_is_merged_or_refused(rank: int) -> None:
    """The file that a rank reads first may be that of another stage, which says nothing of them."""
    of = [{}, {}, *records(4)[2:]]
    with pytest.raises(UsageError, match=r"of its own of experts\.\* \(per_rank\), and it had 4 ranks: 3 ranks"):
        own_for(target(rank, 3), *of, world_size=4)
    own = own_for(target(rank, 3, declared={"*": lambda values, *_: values[0]}), *of, world_size=4)
    assert own is not None
    assert own.names == {NAMES[1], NAMES[2]}
    assert own.values(OF_KIND, LIVE)[NAMES[1]].values == (2, 3)
    assert own_for(target(rank, 4), *of, world_size=4) is None


@pytest.mark.parametrize("given", ["experts.*", 3, {"experts.*": "mean"}, {3: None}, [3]])
def test_what_is_no_declaration_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"TrainState\.per_rank"):
        per_rank.check_per_rank(given)
    per_rank.check_per_rank({"experts.*": None, "other": lambda values, *_: values[0]})
