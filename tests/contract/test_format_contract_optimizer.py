"""What every kind of save promises about optimizer state: exactly what was saved, in whatever it lies."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState
from tests.kit.formats import KINDS, load, same_bits, save

pytestmark = pytest.mark.parametrize("kind", KINDS)


def nested_state() -> dict[str, Any]:
    """State as SOAP or Shampoo keep it, and stranger."""
    return {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((2, 3), 1 / 3),
        "count": torch.tensor([2**24 + 1]),
        "factors": [torch.full((3, 3), 1 / 3), torch.full((2, 2), 1 / 7, dtype=torch.float64)],
        "pair": (torch.full((2,), 1 / 3), 5),
        "ids": [torch.tensor([2**24 + 1])],
        "by_side": {"L": torch.full((2, 2), 1 / 3), "mask": torch.tensor([True, False]), "mode": "eigh"},
        "recent": deque([torch.tensor([1 / 3])], maxlen=4),
        "mode": "eigh",
        "array": numpy.arange(3.0),
        "number": numpy.float32(0.1),
        "none": None,
        "empty": {},
    }


def build(seed: int, dtype: torch.dtype) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2, bias=False).to(dtype)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))


def state_of(state: TrainState) -> dict[str, Any]:
    """Return the live state of the one parameter, arrays and deques in comparable form."""
    found = dict(state.optimizer.state[state.model.weight])
    array, recent = found.pop("array"), found.pop("recent")
    assert (type(array), array.dtype) == (numpy.ndarray, numpy.dtype("float64"))
    assert (type(recent), recent.maxlen) == (deque, 4)
    return {**found, "array": array.tolist(), "recent": list(recent)}


@pytest.mark.parametrize("left_out", [(), ("model",)])
def test_state_in_lists_and_dicts_comes_back_exactly(kind: Kind, left_out: tuple[str, ...], tmp_path: Path) -> None:
    state = build(0, torch.bfloat16)
    state.optimizer.state[state.model.weight] = nested_state()
    expected = copy.deepcopy(state_of(state))
    meta = save(kind, tmp_path, state)
    other = build(1, torch.bfloat16)
    report = load(kind, tmp_path, meta, other, exclude=left_out)
    assert "optimizer" in report.loaded
    same_bits(expected, state_of(other))


def test_only_floating_point_state_follows_a_parameter_to_another_dtype(kind: Kind, tmp_path: Path) -> None:
    state = build(0, torch.float32)
    state.optimizer.state[state.model.weight] = nested_state()
    meta = save(kind, tmp_path, state)
    other = build(1, torch.bfloat16)
    load(kind, tmp_path, meta, other)
    found = state_of(other)
    cast = [found["exp_avg"], *found["factors"], found["pair"][0], found["by_side"]["L"], *found["recent"]]
    assert {tensor.dtype for tensor in cast} == {torch.bfloat16}
    same_bits([found["step"], found["count"], *found["ids"]], [torch.tensor(3.0), *[torch.tensor([2**24 + 1])] * 2])
    assert found["by_side"]["mask"].dtype == torch.bool


@pytest.mark.parametrize("seen_as", ["the same", "plain"])
def test_a_compiled_module_inside_a_checkpointing_wrapper_keeps_its_moments(
    kind: Kind, seen_as: str, tmp_path: Path
) -> None:
    def wrapped(seed: int) -> TrainState:
        state = build(seed, torch.bfloat16)
        compiled: Any = torch.compile(state.model, backend="eager")
        inside = nn.Sequential(checkpoint_wrapper(compiled))
        state.model = torch.compile(inside, backend="eager")
        return state

    def plain(seed: int) -> TrainState:
        state = build(seed, torch.bfloat16)
        state.model = nn.Sequential(state.model)
        return state

    state = wrapped(0)
    (parameter,) = state.model.parameters()
    state.optimizer.state[parameter] = {"m": torch.full((2, 3), 1 / 3)}
    meta = save(kind, tmp_path, state)
    other = wrapped(1) if seen_as == "the same" else plain(1)
    load(kind, tmp_path, meta, other)
    (found,) = other.model.parameters()
    assert torch.equal(found, parameter)
    same_bits({"m": torch.full((2, 3), 1 / 3)}, dict(other.optimizer.state[found]))


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number of its own in its state."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        super().load_state_dict(state)


def with_critic(seed: int, kind: type[torch.optim.SGD] = Counting) -> tuple[TrainState, TrainState]:
    """Return a state with another model and its optimizer in ``extra``, and these two as a state of their own."""
    state, critic = build(seed, torch.float32), build(seed, torch.bfloat16)
    critic.optimizer = kind(critic.model.parameters(), lr=0.1, momentum=0.5)
    state.extra = {"critic": critic.model, "optimizers": [critic.optimizer]}
    return state, critic


def test_an_optimizer_in_extra_gets_its_state_exactly(kind: Kind, tmp_path: Path) -> None:
    state, critic = with_critic(0)
    critic.optimizer.state[critic.model.weight] = nested_state()
    critic.optimizer.param_groups[0]["lr"] = 0.25
    critic.optimizer.calls = 7
    expected = copy.deepcopy(state_of(critic))
    meta = save(kind, tmp_path, state)
    other, found = with_critic(1)
    report = load(kind, tmp_path, meta, other)
    assert report.missing == ()
    assert other.extra["optimizers"][0] is found.optimizer
    same_bits(expected, state_of(found))
    assert (found.optimizer.param_groups[0]["lr"], found.optimizer.calls) == (0.25, 7)


def test_an_optimizer_in_extra_with_other_groups_is_refused_by_its_place(kind: Kind, tmp_path: Path) -> None:
    state, _ = with_critic(0)
    meta = save(kind, tmp_path, state)
    other, found = with_critic(1)
    found.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UsageError, match=r"extra\.optimizers\[0\] does not take its saved state"):
        load(kind, tmp_path, meta, other)


def trained(channels_last: bool) -> TrainState:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    step(state, 0)
    return state


def step(state: TrainState, seed: int) -> None:
    torch.manual_seed(seed)
    state.optimizer.zero_grad()
    state.model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    state.optimizer.step()


@pytest.mark.parametrize("was_channels_last", [True, False])
def test_moments_lie_in_memory_as_their_parameters_do(kind: Kind, was_channels_last: bool, tmp_path: Path) -> None:
    """A fused kernel walks both alike, whatever their strides say; a convolution may round by its layout."""
    saved, fresh = trained(was_channels_last), trained(True)
    meta = save(kind, tmp_path, saved)
    load(kind, tmp_path, meta, fresh)
    for parameter in fresh.model.parameters():
        assert fresh.optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
    for one in (saved, fresh):
        step(one, 7)
    for name, parameter in saved.model.named_parameters():
        torch.testing.assert_close(parameter, fresh.model.get_parameter(name).contiguous(), rtol=1e-4, atol=1e-5)


def test_what_an_optimizer_keeps_beside_its_state_is_refused_and_kept_in_extra(kind: Kind, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.calls = 5
    with pytest.raises(UsageError, match="calls") as refused:
        save(kind, tmp_path, TrainState(model=model, optimizer=optimizer))
    assert "extra" in refused.value.hint
    (tmp_path / "other").mkdir()
    meta = save(kind, tmp_path / "other", TrainState(model=model, extra={"optimizer": optimizer}))
    fresh = TrainState(model=nn.Linear(2, 2), extra={"optimizer": Counting(model.parameters(), lr=0.1)})
    load(kind, tmp_path / "other", meta, fresh)
    assert fresh.extra is not None
    assert fresh.extra["optimizer"].calls == 5


def test_state_that_the_save_lacks_for_some_parameters_is_missed_loudly(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where each rank keeps the state of its own parameters only, one rank's is not all of it."""
    saved, fresh = trained(False), trained(False)
    del saved.optimizer.state[saved.model.bias]
    fresh.optimizer.state.clear()
    meta = save(kind, tmp_path, saved)
    load(kind, tmp_path, meta, fresh)
    assert "holds no optimizer state of" in caplog.text
    assert "bias" in caplog.text


class Keeping(torch.optim.SGD):
    """An optimizer with state of its own under any key."""

    def keep(self, key: Any, value: Any) -> Keeping:
        self.state[key] = {"n": value}
        return self


def kept(key: Any, value: int) -> tuple[nn.Linear, Keeping]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, Keeping(model.parameters(), lr=0.1, momentum=0.9).keep(key, value)


@pytest.mark.parametrize("key", [("global", 0), 99, 0, "weight"], ids=str)
def test_state_under_a_key_that_could_not_be_told_is_refused(kind: Kind, key: Any, tmp_path: Path) -> None:
    model, optimizer = kept(key, 3)
    with pytest.raises(UsageError, match=r"has state under the key .*, which is not a parameter's") as refused:
        save(kind, tmp_path, TrainState(model=model, optimizer=optimizer))
    assert "extra" in refused.value.hint
    assert list(tmp_path.rglob("*.pt")) == []


@pytest.mark.parametrize("key", [("global", 0), 99, "calls"], ids=str)
def test_state_that_is_no_parameters_comes_back_in_extra(kind: Kind, key: Any, tmp_path: Path) -> None:
    model, optimizer = kept(key, 3)
    meta = save(kind, tmp_path, TrainState(model=model, extra={"optimizer": optimizer}))
    other, fresh = kept(key, 0)
    load(kind, tmp_path, meta, TrainState(model=other, extra={"optimizer": fresh}))
    assert {k: v for k, v in fresh.state.items() if not isinstance(k, torch.Tensor)} == {key: {"n": 3}}


def test_named_state_of_an_only_optimizer_comes_back_and_of_several_is_refused(kind: Kind, tmp_path: Path) -> None:
    model, optimizer = kept("calls", 3)
    meta = save(kind, tmp_path, TrainState(model=model, optimizer=optimizer))
    other, fresh = kept("calls", 0)
    load(kind, tmp_path, meta, TrainState(model=other, optimizer=fresh))
    assert fresh.state["calls"] == {"n": 3}
    two = [Keeping([model.weight], lr=0.1).keep("calls", 1), Keeping([model.bias], lr=0.1)]
    with pytest.raises(UsageError, match="state under calls, which is not a parameter's: with several"):
        save(kind, tmp_path, TrainState(model=model, optimizer=two))


def test_two_optimizers_over_one_parameter_are_refused(kind: Kind, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    two = [torch.optim.AdamW(model.parameters()), torch.optim.SGD([model.bias], lr=0.1)]
    with pytest.raises(UsageError, match="Two optimizers train the parameter bias") as refused:
        save(kind, tmp_path, TrainState(model=model, optimizer=two))
    assert "extra" in refused.value.hint
    two[1].param_groups[0]["lr"] = 0.5
    meta = save(kind, tmp_path, TrainState(model=model, optimizer=two[0], extra={"optimizer": two[1]}))
    fresh = torch.optim.SGD([model.bias], lr=0.1)
    load(kind, tmp_path, meta, TrainState(model=model, optimizer=two[0], extra={"optimizer": fresh}))
    assert fresh.param_groups[0]["lr"] == 0.5


def test_state_that_parameters_share_is_named_once(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = torch.zeros(())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"own": torch.ones(2), "n": count}
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        save(kind, tmp_path / place, TrainState(model=model, optimizer=optimizer))
    said = [record.getMessage() for record in caplog.records if "is one tensor" in record.getMessage()]
    assert said == ["optimizer: the state 'n' of weight and bias is one tensor; after a resume each has one of its own"]
