"""What every kind of save promises about parts that go together: rates and schedules, groups, ties."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState
from tests.kit.formats import KINDS, load, same_bits, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


def parts(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})


# -- rates and schedules ----------------------------------------------------------------------------------------------


def scheduled(rate: Any = 1.0) -> TrainState:
    model = parts("body", "head")
    groups = [{"params": list(model[name].parameters()), "lr": copy.deepcopy(rate)} for name in ("body", "head")]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return TrainState(model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))


def steps(state: TrainState, number: int) -> list[float]:
    for _ in range(number):
        state.optimizer.step()
        state.scheduler.step()
    return [float(group["lr"]) for group in state.optimizer.param_groups]


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("saved_too", [True, False], ids=["left out", "not saved"])
def test_an_optimizer_that_is_not_loaded_follows_its_loaded_scheduler(
    kind: Kind, rate: Any, saved_too: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, other = scheduled(rate), scheduled(rate)
    steps(state, 3)
    meta = save(kind, tmp_path, state if saved_too else TrainState(state.model, scheduler=state.scheduler))
    rates = [group["lr"] for group in other.optimizer.param_groups]
    report = load(kind, tmp_path, meta, other, exclude=("optimizer",) if saved_too else ())
    (line,) = [line for line in report.missing if "learning rate" in line]
    assert line.startswith("optimizer: it was not loaded, its learning rate is set from 1, 1 to 0.125, 0.125")
    assert "its learning rate is set from 1, 1 to 0.125, 0.125" in caplog.text
    if isinstance(rate, torch.Tensor):
        assert all(group["lr"] is kept for group, kept in zip(other.optimizer.param_groups, rates, strict=True))
    assert steps(other, 2) == steps(state, 2)


def test_an_optimizer_that_is_loaded_keeps_the_rate_that_it_had(kind: Kind, tmp_path: Path) -> None:
    """One that a person changed after the scheduler had set it."""
    for where in ("optimizer", "extra"):
        state, other = scheduled(), scheduled()
        steps(state, 3)
        state.optimizer.param_groups[0]["lr"] = 0.7
        rates = other.optimizer
        if where == "extra":
            for one in (state, other):
                one.extra, one.optimizer = {"optimizer": one.optimizer}, None
        root = tmp_path / where
        root.mkdir()
        report = load(kind, root, save(kind, root, state), other)
        assert report.missing == ()
        assert [group["lr"] for group in rates.param_groups] == [0.7, 0.125]


def test_schedulers_in_a_list_and_of_other_groups_are_looked_at_one_by_one(kind: Kind, tmp_path: Path) -> None:
    def build(groups: int) -> TrainState:
        model = parts("body", "head")
        listed = [{"params": list(model["body"].parameters())}, {"params": list(model["head"].parameters())}]
        optimizers = [torch.optim.SGD(listed[:groups], lr=1.0), torch.optim.SGD(listed[1:], lr=1.0)]
        return TrainState(
            model, scheduler=[lr_scheduler.ConstantLR(optimizers[0]), lr_scheduler.StepLR(optimizers[1], 1, 0.1)]
        )

    state, other = build(1), build(2)
    state.scheduler[1].optimizer.step()
    state.scheduler[1].step()
    report = load(kind, tmp_path, save(kind, tmp_path, state), other)
    assert [g["lr"] for one in other.scheduler for g in one.optimizer.param_groups][2:] == [pytest.approx(0.1)]
    assert sum("learning rate" in line for line in report.missing) == 1


# -- the order of groups ----------------------------------------------------------------------------------------------


def grouped(order: str, *, several: bool, schedule: bool) -> TrainState:
    model = parts("b", "h")
    rates = {"b": 0.1, "h": 0.9}
    groups = [{"params": list(model[n].parameters()), "lr": rates[n], "name": n} for n in order]
    if several:
        optimizers = [torch.optim.AdamW([group]) for group in groups]
        schedulers = [lr_scheduler.LambdaLR(one, lambda _: 1.0) for one in optimizers]
        return TrainState(model, optimizers, schedulers if schedule else None)
    optimizer = torch.optim.AdamW(groups)
    return TrainState(model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) if schedule else None)


@pytest.mark.parametrize("several", [False, True], ids=["groups", "optimizers"])
def test_another_order_of_groups_is_refused_beside_a_scheduler(kind: Kind, several: bool, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, grouped("bh", several=several, schedule=True))
    other = grouped("hb", several=several, schedule=True)
    before = copy.deepcopy(dict(other.model.state_dict()))
    with pytest.raises(UsageError, match=r"Saved: 0: b \(b\.weight\); 1: h .*Here: 1: h \(h\.weight\); 0: b") as caught:
        load(kind, tmp_path, meta, other)
    assert 'exclude=("scheduler",)' in caught.value.hint
    same_bits(before, dict(other.model.state_dict()))


@pytest.mark.parametrize("why", ["left out", "not here", "not saved"])
@pytest.mark.parametrize("several", [False, True], ids=["groups", "optimizers"])
def test_another_order_of_groups_is_accepted_where_no_scheduler_is_loaded(
    kind: Kind, why: str, several: bool, tmp_path: Path
) -> None:
    meta = save(kind, tmp_path, grouped("bh", several=several, schedule=why != "not saved"))
    other = grouped("hb", several=several, schedule=why != "not here")
    load(kind, tmp_path, meta, other, exclude=("scheduler",) if why == "left out" else ())
    found = [g for one in (other.optimizer if several else [other.optimizer]) for g in one.param_groups]
    assert [(group["name"], group["lr"]) for group in found] == [("h", 0.9), ("b", 0.1)]


# -- what is not here -------------------------------------------------------------------------------------------------


class Cursor:
    """A data loader that knows its position."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_every_part_that_the_save_has_and_the_state_has_not_is_reported(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = scheduled()
    state.scaler, state.ema = torch.amp.GradScaler("cpu"), copy.deepcopy(state.model)
    state.dataloader, state.extra = Cursor(), {"epoch": 1}
    meta = save(kind, tmp_path, state)
    named = ("optimizer", "scheduler", "scaler", "ema", "dataloader", "extra")
    here = TrainState(parts("body", "head"))
    missing = load(kind, tmp_path, meta, here).missing
    assert missing == tuple(
        f"{part}: the save has state for it, and your TrainState has nothing that takes it; it was not loaded"
        for part in named
    )
    assert all(line in caplog.text for line in missing)
    assert load(kind, tmp_path, meta, here, exclude=named).missing == ()
    assert load(kind, tmp_path, meta, here, exclude=named[1:]).missing == missing[:1]


def test_parts_that_had_no_state_are_not_missed(kind: Kind, tmp_path: Path) -> None:
    state = TrainState(nn.Linear(2, 2), scaler=torch.amp.GradScaler("cpu", enabled=False), extra={})
    meta = save(kind, tmp_path, state)
    assert load(kind, tmp_path, meta, TrainState(nn.Linear(2, 2))).missing == ()


# -- names that become one --------------------------------------------------------------------------------------------


def tied(*, tie: bool, dtype: torch.dtype = torch.float32) -> TrainState:
    model = parts("a", "b", "c").to(dtype)
    if tie:
        model["b"].weight = model["a"].weight
    return TrainState(model)


def test_values_that_differ_are_not_given_to_tied_parameters(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, tied(tie=False))
    other = tied(tie=True)
    before = copy.deepcopy(dict(other.model.state_dict()))
    with pytest.raises(UsageError, match=r"a\.weight and b\.weight share memory in this model"):
        load(kind, tmp_path, meta, other)
    same_bits(before, dict(other.model.state_dict()))


def test_tied_parameters_are_compared_under_the_names_that_were_saved(kind: Kind, tmp_path: Path) -> None:
    state = nn.Module()
    state.module = tied(tie=False).model
    meta = save(kind, tmp_path, TrainState(state))
    with pytest.raises(UsageError, match=r"a\.weight and b\.weight share memory in this model"):
        load(kind, tmp_path, meta, tied(tie=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_equal_are_given_to_tied_parameters(kind: Kind, dtype: torch.dtype, tmp_path: Path) -> None:
    state = tied(tie=False)
    with torch.no_grad():
        state.model["b"].weight.copy_(state.model["a"].weight)
    other = tied(tie=True, dtype=dtype)
    load(kind, tmp_path, save(kind, tmp_path, state), other)
    same_bits(
        {name: value.to(dtype) for name, value in state.model.state_dict().items()}, dict(other.model.state_dict())
    )


class Views(nn.Module):
    """Buffers that show parts of one tensor."""

    def __init__(self, base: torch.Tensor, *, apart: bool) -> None:
        super().__init__()
        for name, part in {"rows": base[1:3], "column": base[:, 2], "last": base[3:]}.items():
            self.register_buffer(name, part.clone() if apart else part)


def test_parts_of_one_tensor_are_compared_where_they_meet(kind: Kind, tmp_path: Path) -> None:
    state = Views(torch.randn(4, 6), apart=True)
    (tmp_path / "alike").mkdir()
    (tmp_path / "other").mkdir()
    meta = save(kind, tmp_path / "alike", TrainState(state))
    other = Views(torch.zeros(4, 6), apart=False)
    load(kind, tmp_path / "alike", meta, TrainState(other))
    same_bits(dict(state.state_dict()), dict(other.state_dict()))
    state.get_buffer("column")[2] += 1
    meta = save(kind, tmp_path / "other", TrainState(state))
    with pytest.raises(UsageError, match="rows and column share memory"):
        load(kind, tmp_path / "other", meta, TrainState(other))


def test_what_was_saved_as_one_is_not_given_to_parts_that_overlap(kind: Kind, tmp_path: Path) -> None:
    def build(base: torch.Tensor, start: int) -> TrainState:
        model = nn.Module()
        model.register_buffer("a", base[:3])
        model.register_buffer("b", base[start : start + 3])
        return TrainState(model)

    meta = save(kind, tmp_path, build(torch.arange(4.0), 0))
    with pytest.raises(UsageError, match="a and b share memory"):
        load(kind, tmp_path, meta, build(torch.zeros(4), 1))


class Wrapped(nn.Module):
    """A module whose own attribute is named as in a wrapper."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        if both:
            self.module = parts("head")
        self.head = nn.Linear(3, 3, bias=False)


def test_two_saved_names_are_not_taken_for_one_live_name(kind: Kind, tmp_path: Path) -> None:
    state = Wrapped(both=True)
    meta = save(kind, tmp_path, TrainState(state, torch.optim.SGD(state.parameters())))
    other = Wrapped(both=False)
    for optimizer in (None, torch.optim.SGD(other.parameters())):
        with pytest.raises(UsageError, match=r"Not in the model: module\.head\.weight"):
            load(kind, tmp_path, meta, TrainState(other, optimizer))


# -- what is refused, and how -----------------------------------------------------------------------------------------


def test_a_sparse_buffer_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match=r"model\.graph is a tensor of layout torch\.sparse_coo") as caught:
        save(kind, tmp_path, TrainState(model))
    assert "persistent=False" in caught.value.hint


def test_a_parameter_that_is_not_the_models_is_told_by_its_place_and_shape(kind: Kind, tmp_path: Path) -> None:
    model, loss = nn.Linear(2, 2), nn.Linear(5, 1)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": [model.bias.detach(), *loss.parameters()][1:]}]
    )
    with pytest.raises(UsageError, match=r"Parameter 0 of group 1, of shape \(1, 5\), is not in the model") as caught:
        save(kind, tmp_path, TrainState(model, optimizer))
    assert "nn.ModuleDict" in caught.value.hint


def test_a_lazy_parameter_is_refused_with_the_way_out(kind: Kind, tmp_path: Path) -> None:
    state, other = (TrainState(nn.Sequential(nn.LazyLinear(3))) for _ in range(2))
    with pytest.raises(UsageError, match=r"0\.weight is a lazy parameter"):
        save(kind, tmp_path, state)
    state.model(torch.ones(2, 4))
    meta = save(kind, tmp_path, state)
    with pytest.raises(UsageError, match=r"0\.weight is a lazy parameter") as caught:
        load(kind, tmp_path, meta, other)
    assert "one forward" in caught.value.hint
    other.model(torch.zeros(2, 4))
    load(kind, tmp_path, meta, other)
    same_bits(dict(state.model.state_dict()), dict(other.model.state_dict()))


def test_schedulers_under_parameters_are_refused_with_the_way_out(kind: Kind, tmp_path: Path) -> None:
    state = scheduled()
    state.scheduler = {next(state.model.parameters()): state.scheduler}
    with pytest.raises(UsageError, match="scheduler has a key of type Parameter") as caught:
        save(kind, tmp_path, state)
    assert "a list" in caught.value.hint
