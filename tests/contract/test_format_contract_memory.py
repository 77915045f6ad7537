"""What every kind of save promises where live values share memory: nothing is given the values of something else."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState
from tests.kit.formats import KINDS, load, same_bits, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


def build(seed: int) -> TrainState:
    """A model, stepped once, with an empty extra."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), extra={})
    step(state)
    return state


def step(state: TrainState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 4)).square().mean().backward()
    state.optimizer.step()


def of_both(state: TrainState) -> dict[str, Any]:
    return {"model": dict(state.model.state_dict()), "optimizer": state.optimizer.state_dict()}


PLACEHOLDERS: dict[str, Callable[[TrainState], Any]] = {
    "state dict": lambda state: state.model.state_dict(),
    "detached list": lambda state: [p.detach() for p in state.model.parameters()],
    "parameters": lambda state: list(state.model.parameters()),
    "rows": lambda state: {"rows": state.model.weight.data[1:3]},
    "optimizer": lambda state: state.optimizer.state_dict(),
    "moments": lambda state: list(state.optimizer.state.values()),
}


@pytest.mark.parametrize("what", PLACEHOLDERS)
def test_a_placeholder_of_live_values_does_not_write_into_them(kind: Kind, what: str, tmp_path: Path) -> None:
    """The best weights so far: at first the live ones themselves, later a copy of older ones."""
    state, fresh = build(0), build(1)
    state.extra = {"best": copy.deepcopy(PLACEHOLDERS[what](state))}
    best = copy.deepcopy(state.extra)
    step(state)
    meta = save(kind, tmp_path, state)
    fresh.extra = {"best": PLACEHOLDERS[what](fresh)}
    assert load(kind, tmp_path, meta, fresh).missing == ()
    same_bits(of_both(state), of_both(fresh))
    same_bits(best, fresh.extra)
    step(fresh)
    same_bits(best, fresh.extra)


def test_what_was_saved_as_the_live_values_themselves_still_is(kind: Kind, tmp_path: Path) -> None:
    state, fresh = build(0), build(1)
    for one in (state, fresh):
        one.extra = {"flat": [one.model.weight.data.view(-1)], "net": one.model}
    meta = save(kind, tmp_path, state)
    kept = fresh.extra["flat"][0]
    load(kind, tmp_path, meta, fresh)
    assert fresh.extra["flat"][0] is kept
    assert fresh.extra["net"] is fresh.model
    same_bits(of_both(state), of_both(fresh))


SHARED: dict[str, tuple[Callable[[], Any], Any]] = {
    "list of one tensor": (lambda: [torch.zeros(2)] * 3, [torch.full((2,), float(i)) for i in range(3)]),
    "dict of one tensor": (lambda: dict.fromkeys("ab", torch.zeros(2)), {"a": torch.ones(2), "b": torch.zeros(2)}),
    "deque of one tensor": (lambda: deque([torch.zeros(1)] * 2, 2), deque([torch.ones(1), torch.zeros(1)], 2)),
    "one list": (lambda: [[]] * 3, [[1], [2, 3], []]),
    "one dict": (lambda: {"a": (one := {"x": None}), "b": one}, {"a": {"x": [1]}, "b": {"x": [2]}}),
    "one list of tensors": (lambda: [[torch.zeros(1)]] * 2, [[torch.ones(1)], [torch.zeros(1)]]),
    "views of one tensor": (lambda: list(torch.zeros(4).unfold(0, 2, 1)), list(torch.arange(6.0).reshape(3, 2))),
    "view that overlaps itself": (lambda: torch.zeros(4).unfold(0, 2, 1), torch.arange(6.0).reshape(3, 2)),
    "other forms of one tensor": (lambda: [torch.zeros(4)] * 2, [torch.ones(4), torch.ones(2, 3)]),
    "tuple of one tensor": (lambda: (torch.zeros(2),) * 2, (torch.ones(2), torch.zeros(2))),
}


@pytest.mark.parametrize("how", SHARED)
def test_values_that_are_one_at_the_start_come_back_as_several(kind: Kind, how: str, tmp_path: Path) -> None:
    placeholder, values = SHARED[how]
    expected = copy.deepcopy(values)
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra={"x": values}))
    fresh = TrainState(model=nn.Linear(2, 2), extra={"x": placeholder()})
    assert len(load(kind, tmp_path, meta, fresh).missing) == (how == "view that overlaps itself")
    found, expected = ([list(x) if isinstance(x, deque) else x] for x in (fresh.extra["x"], expected))  # type: ignore[index]
    same_bits(expected, found)


def test_values_that_were_one_when_saved_stay_one(kind: Kind, tmp_path: Path) -> None:
    def of(value: float) -> dict[str, Any]:
        tensor, numbers = torch.full((3,), value), [value]
        return {"a": tensor, "b": tensor, "part": tensor[1:], "c": [numbers, numbers]}

    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra=of(5.0)))
    into = of(0.0)
    kept, numbers = into["a"], into["c"][0]
    load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), extra=into))
    assert into["a"] is into["b"] is kept
    assert into["part"].data_ptr() == kept[1:].data_ptr()
    assert into["c"][0] is into["c"][1] is numbers
    same_bits(of(5.0), into)


def test_the_columns_of_one_matrix_are_filled_in_place(kind: Kind, tmp_path: Path) -> None:
    """Their ranges of bytes overlap, their bytes do not."""
    saved, matrix = torch.arange(8.0).reshape(4, 2), torch.zeros(4, 2)
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra={"a": saved[:, 0], "b": saved[:, 1]}))
    into = {"a": matrix[:, 0], "b": matrix[:, 1]}
    load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), extra=into))
    assert torch.equal(matrix, saved)


@pytest.mark.parametrize("where", ["extra", "ema"])
def test_a_module_with_the_models_memory_and_other_values_is_refused_by_name(
    kind: Kind, where: str, tmp_path: Path
) -> None:
    state, fresh = build(0), build(1)
    for one in (state, fresh):
        best: Any = one.model if one is fresh else copy.deepcopy(one.model)
        setattr(one, where, {"best": best})
    step(state)
    meta = save(kind, tmp_path, state)
    with pytest.raises(UsageError, match=rf"{where}\.best shares the memory of its weight with the model") as caught:
        load(kind, tmp_path, meta, fresh)
    assert "copy.deepcopy" in caught.value.hint
    same_bits(of_both(state), of_both(fresh))


def test_an_average_that_shares_frozen_parameters_is_loaded(kind: Kind, tmp_path: Path) -> None:
    def frozen(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        average = copy.deepcopy(model)
        average[0] = model[0]
        with torch.no_grad():
            average[1].weight.add_(1)
        return TrainState(model=model, ema=average)

    state, fresh = frozen(0), frozen(1)
    meta = save(kind, tmp_path, state)
    load(kind, tmp_path, meta, fresh)
    assert fresh.ema[0] is fresh.model[0]
    same_bits(dict(state.ema.state_dict()), dict(fresh.ema.state_dict()))
    same_bits(dict(state.model.state_dict()), dict(fresh.model.state_dict()))


class Shadow:
    """An average that fills its own tensors when it is given its state."""

    def __init__(self, value: float) -> None:
        self.shadow = {"w": torch.full((2,), value)}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)


def test_a_placeholder_of_an_average_does_not_write_into_it(kind: Kind, tmp_path: Path) -> None:
    state, fresh = (TrainState(model=nn.Linear(2, 2), ema=Shadow(value)) for value in (1.0, 0.0))
    state.extra = {"best": Shadow(7.0).state_dict()}
    fresh.extra = {"best": fresh.ema.state_dict()}
    meta = save(kind, tmp_path, state)
    load(kind, tmp_path, meta, fresh)
    assert fresh.ema.shadow["w"].tolist() == [1.0, 1.0]
    assert fresh.extra["best"]["shadow"]["w"].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("in_a_list", [False, True])
def test_one_object_in_two_places_is_given_one_state_and_not_two(kind: Kind, in_a_list: bool, tmp_path: Path) -> None:
    def pair(first: Shadow, second: Shadow) -> dict[str, Any]:
        inner = [first]
        return {"a": inner, "b": inner if second is first else [second]} if in_a_list else {"a": first, "b": second}

    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra=pair(Shadow(1.0), Shadow(2.0))))
    one = Shadow(0.0)
    with pytest.raises(UsageError, match=r"extra\.b is a \w+ that has another place in the state too"):
        load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), extra=pair(one, one)))
    (tmp_path / "same").mkdir()
    meta = save(kind, tmp_path / "same", TrainState(model=nn.Linear(2, 2), extra=pair(Shadow(3.0), Shadow(3.0))))
    into = pair(one, one)
    load(kind, tmp_path / "same", meta, TrainState(model=nn.Linear(2, 2), extra=into))
    assert one.shadow["w"].tolist() == [3.0, 3.0]


def test_weights_kept_beside_their_own_module_are_replaced_whatever_comes_first(kind: Kind, tmp_path: Path) -> None:
    def of(seed: int, *, own: bool) -> dict[str, Any]:
        torch.manual_seed(seed)
        critic = nn.Linear(2, 2)
        teacher = [torch.full_like(p, 3.0) if own else p.detach() for p in critic.parameters()]
        return {"teacher": teacher, "critic": critic}

    state = of(0, own=True)
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra=state))
    fresh = of(1, own=False)
    load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), extra=fresh))
    assert list(fresh) == ["teacher", "critic"]
    same_bits(state["teacher"], fresh["teacher"])
    same_bits(dict(state["critic"].state_dict()), dict(fresh["critic"].state_dict()))


def test_a_buffer_that_lies_upon_itself_is_refused_before_anything_is_given(kind: Kind, tmp_path: Path) -> None:
    def expanded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.ones(1).expand(4))
        return model

    meta = save(kind, tmp_path, TrainState(model=expanded(0)))
    fresh = expanded(1)
    before = copy.deepcopy(dict(fresh.state_dict()))
    with pytest.raises(UsageError, match="mask has several values at one place in memory") as caught:
        load(kind, tmp_path, meta, TrainState(model=fresh))
    assert ".clone()" in caught.value.hint
    same_bits(before, dict(fresh.state_dict()))


def test_sparse_and_odd_live_tensors_are_replaced(kind: Kind, tmp_path: Path) -> None:
    saved = {"sparse": torch.eye(3).to_sparse(), "meta": torch.ones(2), "empty": torch.empty(0, 3)}
    meta = save(kind, tmp_path, TrainState(model=nn.Linear(2, 2), extra=dict(saved)))
    sparse = torch.zeros(3, 3).to_sparse()
    into = {"sparse": sparse, "meta": torch.ones(2, device="meta"), "empty": torch.empty(0, 3)}
    load(kind, tmp_path, meta, TrainState(model=nn.Linear(2, 2), extra=into))
    assert torch.equal(into["sparse"].to_dense(), torch.eye(3))
    assert into["meta"].tolist() == [1.0, 1.0]


def test_what_was_saved_apart_with_equal_values_comes_apart(kind: Kind, tmp_path: Path) -> None:
    """The best weights so far equal the live ones when they are saved, and are not them."""
    torch.manual_seed(0)
    saved = nn.Linear(2, 2)
    apart = {
        "best": copy.deepcopy(saved.state_dict()),
        "last": saved.weight.detach().clone(),
        "array": saved.weight.detach().numpy().copy(),
        "hist": [torch.ones(2), torch.ones(2)],
        "lists": [[1], [1]],
        "one": saved.bias.data,  # and this is it
    }
    meta = save(kind, tmp_path, TrainState(model=saved, extra=apart))
    model = nn.Linear(2, 2)
    zeros, numbers = torch.zeros(2), [0]
    into: dict[str, Any] = {
        "best": model.state_dict(),
        "last": model.weight.data,
        "array": model.weight.detach().numpy(),
        "hist": [zeros, zeros],
        "lists": [numbers, numbers],
        "one": model.bias.data,
    }
    assert load(kind, tmp_path, meta, TrainState(model=model, extra=into)).missing == ()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    into["hist"][0].add_(1)
    into["lists"][0].append(2)
    assert torch.equal(into["best"]["weight"], saved.weight)
    assert torch.equal(into["last"], saved.weight)
    assert into["array"].tolist() == saved.weight.tolist()
    assert [one.tolist() for one in into["hist"]] == [[2.0, 2.0], [1.0, 1.0]]
    assert into["lists"] == [[1, 2], [1]]
    assert torch.equal(into["one"], model.bias)


def test_a_module_that_was_saved_apart_is_not_given_its_values_in_the_models_memory(kind: Kind, tmp_path: Path) -> None:
    saved = nn.Linear(2, 2)
    meta = save(kind, tmp_path, TrainState(model=saved, extra={"best": copy.deepcopy(saved)}))
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"extra\.best shares the memory.*was saved apart"):
        load(kind, tmp_path, meta, TrainState(model=model, extra={"best": model}))
    (tmp_path / "one").mkdir()
    once_more = save(kind, tmp_path / "one", TrainState(model=saved, extra={"net": saved}))
    load(kind, tmp_path / "one", once_more, TrainState(model=model, extra={"net": model}))


def test_a_schedule_in_extra_is_refused_with_groups_in_another_order_too(kind: Kind, tmp_path: Path) -> None:
    def build(*names: str) -> TrainState:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.get_parameter(name)], "lr": rate} for name, rate in zip(names, (1.0, 0.1))]  # noqa: B905
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return TrainState(model=model, optimizer=optimizer, extra={"schedule": schedule})

    meta = save(kind, tmp_path, build("weight", "bias"))
    with pytest.raises(UsageError, match="not in the order in which they were saved"):
        load(kind, tmp_path, meta, build("bias", "weight"))
