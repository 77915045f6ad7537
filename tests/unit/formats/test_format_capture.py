"""Capturing a live state: aliases, names, refusals, hashes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState, get_format
from ckptmirror.formats.capture import (
    _text_of_plain,
    capture,
    snapshot_from_tree,
    snapshot_tree,
    walk_tensors,
)
from ckptmirror.formats.names import live_parameters, live_values
from ckptmirror.formats.weights_only_values import encode
from tests.kit.formats import STEP, context, make_state, train


def take(state: TrainState, *kinds: Kind, rank: int = 0, world_size: int = 1) -> Any:
    return capture(state, step=STEP, kinds=kinds or ("dcp", "model"), rank=rank, world_size=world_size)


def test_nothing_is_cloned(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    snapshot = take(state)
    live = {tensor.data_ptr() for tensor in state.model.state_dict().values() if isinstance(tensor, torch.Tensor)}
    assert {tensor.data_ptr() for _, tensor in walk_tensors(snapshot.model)} == live
    assert snapshot.full_model.keys() == snapshot.model.keys()
    assert all(snapshot.full_model[name] is snapshot.model[name] for name in snapshot.model)
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    captured = [tensor for _, tensor in walk_tensors(snapshot.optimizer)]
    assert {tensor.data_ptr() for tensor in captured} == {tensor.data_ptr() for tensor in moments}


def test_containers_are_new_so_that_training_does_not_reach_them() -> None:
    state = make_state()
    train(state, 1)
    snapshot = take(state)
    train(state, 2)
    assert snapshot.extra["extra"]["epoch"] == 1
    assert len(snapshot.extra["extra"]["history"]) == 1
    assert snapshot.extra["scheduler"]["last_epoch"] == 1


def test_the_whole_model_is_there_only_if_it_is_asked_for() -> None:
    assert take(make_state(), "dcp").full_model is None
    assert take(make_state(), "model").full_model is not None
    assert take(make_state(), "model", rank=1, world_size=2).full_model is None


def test_other_ranks_of_an_unsharded_model_leave_out_what_rank_0_writes() -> None:
    state = make_state()
    train(state, 1)
    first, second = take(state, "model"), take(state, "model", rank=1, world_size=2)
    assert (second.model, second.optimizer) == ({}, None)
    assert "ema" in first.extra
    assert "ema" not in second.extra
    assert first.architecture == second.architecture
    both = take(state, "dcp", rank=1, world_size=2)
    assert set(both.model) == {name for name, _ in state.model.named_parameters(remove_duplicate=False)}


def test_the_architecture_hash_follows_names_shapes_and_dtypes_not_values() -> None:
    first = take(make_state(0)).architecture
    assert first == take(make_state(1)).architecture
    assert first != take(make_state(0, width=8)).architecture
    state = make_state(0)
    state.model.half()
    assert first != take(state).architecture


def test_plain_values_that_are_equal_have_one_text_and_others_none() -> None:
    one, other = {"a": 1, "b": [None, True, 0.5, "x"]}, {"b": [None, True, 0.5, "x"], "a": 1}
    assert _text_of_plain(one) == _text_of_plain(other) is not None
    assert _text_of_plain({"a": 1}) != _text_of_plain({"a": True})
    assert _text_of_plain([torch.ones(2)]) == _text_of_plain([torch.zeros(3)])
    assert _text_of_plain({"a": encode({"x", "y"}, "extra")}) is None
    assert _text_of_plain({"a": bytes(1_000_000)}) is None


def test_a_snapshot_survives_its_tree() -> None:
    snapshot = take(make_state())
    assert snapshot_from_tree(snapshot_tree(snapshot)) == snapshot


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    state = TrainState(model=nn.Linear(2, 2), optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    with pytest.raises(UsageError, match="not in the model"):
        take(state)


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"TrainState\.model"):
        take(TrainState(model={"weight": 1}))


def test_a_tensor_subclass_that_a_safe_load_refuses_is_refused() -> None:
    class Mine(torch.Tensor):
        pass

    state = make_state()
    state.extra = {"mine": torch.zeros(2).as_subclass(Mine)}
    with pytest.raises(UsageError, match=r"extra\.mine is a tensor of type"):
        take(state)


def test_a_snapshot_without_the_whole_model_is_not_written_as_kind_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="captured without"):
        get_format("model").write(take(make_state(), "dcp"), context(tmp_path, ("model",)))


def test_the_formats_package_does_not_import_torch_by_itself() -> None:
    code = "import sys, ckptmirror.formats, ckptmirror.formats.base; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_kind_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no kind 'zip'"):
        get_format("zip")


class _Holds(nn.Module):
    """A module of the user's own whose attribute is named as in a wrapper."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(2, 2))


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize(
    "built",
    [
        lambda: _compiled(nn.Linear(2, 2)),
        lambda: nn.Sequential(_compiled(nn.Linear(2, 2))),
        lambda: _compiled(checkpoint_wrapper(nn.Linear(2, 2))),
        lambda: checkpoint_wrapper(_compiled(nn.Linear(2, 2))),
        lambda: checkpoint_wrapper(nn.Sequential(_compiled(nn.Linear(2, 2)))),
        lambda: _compiled(nn.Sequential(checkpoint_wrapper(_compiled(nn.Linear(2, 2))))),
        lambda: _Holds("_orig_mod"),
        lambda: _Holds("module"),
        lambda: _compiled(_Holds("module")),
        lambda: nn.DataParallel(nn.Linear(2, 2)),
    ],
    ids=range(10),
)
def test_a_parameter_has_the_name_of_its_value_however_it_is_wrapped(built: Callable[[], nn.Module]) -> None:
    model = built()
    values = live_values(model)
    parameters = dict(live_parameters(model))
    assert parameters.keys() == values.keys()
    assert all(parameter.data_ptr() == values[name].data_ptr() for name, parameter in parameters.items())


def test_the_names_follow_a_model_that_changes_between_saves() -> None:
    model: Any = nn.Sequential(_compiled(nn.Linear(2, 2)))
    assert set(live_values(model)) == {"0.weight", "0.bias"}
    model.append(nn.Linear(2, 2))
    assert set(live_values(model)) == {"0.weight", "0.bias", "1.weight", "1.bias"} == get_model_state_dict(model).keys()
    model[0] = nn.Linear(2, 2)
    with torch.no_grad():
        model[0].weight.fill_(3)
    values = live_values(model)
    assert set(values) == get_model_state_dict(model).keys()
    assert torch.equal(values["0.weight"], torch.full((2, 2), 3.0))


@pytest.mark.parametrize("own", [True, False], ids=["of its own", "none"])
def test_an_iterator_of_a_loader_draws_from_the_global_generator_unless_the_loader_has_its_own(own: bool) -> None:
    """What the guide says of a resume within an epoch, which makes a new iterator."""
    loader = torch.utils.data.DataLoader([1, 2], generator=torch.Generator() if own else None)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    iter(loader)
    assert torch.equal(before, torch.get_rng_state()) == own


def test_a_field_that_no_save_would_keep_is_refused() -> None:
    @dataclass
    class WithMore(TrainState):
        curriculum: object = None
        _cache: object = None

    take(WithMore(model=nn.Linear(2, 2), _cache=1))
    with pytest.raises(UsageError, match="curriculum, which no save would keep"):
        take(WithMore(model=nn.Linear(2, 2), curriculum=3))
