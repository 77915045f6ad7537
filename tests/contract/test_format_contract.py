"""What every kind of save promises: the same tests for each format."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.model import Kind
from ckptmirror.formats import TrainState, get_format
from ckptmirror.local.checksums import verify_file
from tests.kit.formats import (
    KINDS,
    everything,
    files_below,
    load,
    make_state,
    same_bits,
    save,
    train,
)

pytestmark = pytest.mark.parametrize("kind", KINDS)


def test_every_value_comes_back_bit_for_bit(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 3)
    meta = save(kind, tmp_path, state)
    expected = copy.deepcopy(everything(state))
    other = make_state(seed=1)
    report = load(kind, tmp_path, meta, other)
    same_bits(expected, everything(other))
    assert {"model", "optimizer", "scheduler", "ema", "extra", "rng"} <= set(report.loaded)
    assert report.missing == ()


def test_training_goes_on_as_if_it_had_never_stopped(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 3)
    meta = save(kind, tmp_path, state)
    train(state, 4)
    draws = (random.random(), numpy.random.rand(), torch.rand(2))
    other = make_state(seed=1)
    train(other, 1)
    load(kind, tmp_path, meta, other)
    train(other, 4)
    same_bits(everything(state), everything(other))
    same_bits(draws, (random.random(), numpy.random.rand(), torch.rand(2)))


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "momentum", "sgd"])
def test_optimizer_round_trip(kind: Kind, optimizer: str, tmp_path: Path) -> None:
    state = make_state(optimizer=optimizer)
    train(state, 3)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1, optimizer=optimizer)
    load(kind, tmp_path, meta, other)
    same_bits(state.optimizer.state_dict(), other.optimizer.state_dict())


def test_saving_before_the_first_step_changes_nothing(kind: Kind, tmp_path: Path) -> None:
    state, untouched = make_state(), make_state()
    steps: list[int] = []
    state.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    meta = save(kind, tmp_path, state)
    assert steps == []
    assert state.optimizer.state_dict()["state"] == {}
    other = make_state(seed=1)
    other.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    load(kind, tmp_path, meta, other)
    assert steps == []
    torch.manual_seed(5)
    train(untouched, 2)
    torch.manual_seed(5)
    train(other, 2)
    same_bits(untouched.optimizer.state_dict(), other.optimizer.state_dict())
    same_bits(dict(untouched.model.state_dict()), dict(other.model.state_dict()))


def test_loading_a_save_without_optimizer_history_empties_the_optimizer(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    train(other, 2)
    load(kind, tmp_path, meta, other)
    assert other.optimizer.state_dict()["state"] == {}


def test_tied_weights_stay_tied(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    load(kind, tmp_path, meta, other)
    assert other.model.head.weight is other.model.embed.weight
    assert torch.equal(other.model.head.weight, state.model.embed.weight)


def test_live_tensors_are_filled_in_place(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, make_state())
    other = make_state(seed=1)
    before = {name: tensor.data_ptr() for name, tensor in other.model.named_parameters()}
    load(kind, tmp_path, meta, other)
    assert {name: tensor.data_ptr() for name, tensor in other.model.named_parameters()} == before


def test_loading_does_not_keep_the_files_open_or_mapped(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    load(kind, tmp_path, meta, other)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_no_tmp_files_after_save(kind: Kind, tmp_path: Path) -> None:
    save(kind, tmp_path, make_state())
    assert [path.name for path in tmp_path.rglob("*") if path.name.endswith(".tmp")] == []


def test_artifacts_name_every_file_with_its_digest(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    assert sorted(str(path.relative_to(tmp_path)) for path in files_below(tmp_path)) == sorted(
        artifact.path for artifact in meta.artifacts
    )
    for artifact in meta.artifacts:
        verify_file(tmp_path / artifact.path, artifact.digest)
        assert artifact.kinds == (kind,)


def test_a_truncated_file_is_an_integrity_error_and_not_a_silent_load(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    for path in files_below(tmp_path):
        if path.suffix == ".json":
            continue
        whole = path.read_bytes()
        for length in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(IntegrityError):
                load(kind, tmp_path, meta, make_state(seed=1))
        path.write_bytes(whole)


def test_a_missing_file_is_an_integrity_error(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    for path in files_below(tmp_path):
        if path.suffix == ".json":
            continue
        hidden = path.rename(path.with_name("hidden"))
        with pytest.raises(IntegrityError):
            load(kind, tmp_path, meta, make_state(seed=1))
        hidden.rename(path)


def test_a_link_in_the_place_of_a_file_is_not_followed(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    for path in files_below(tmp_path):
        if path.suffix == ".json":
            continue
        moved = path.rename(path.with_name("elsewhere"))
        path.symlink_to(moved)
        with pytest.raises(IntegrityError):
            load(kind, tmp_path, meta, make_state(seed=1))
        path.unlink()
        moved.rename(path)


def test_a_model_of_another_shape_is_refused_by_name_and_left_as_it_was(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, make_state())
    other = make_state(seed=1, width=8)
    before = copy.deepcopy(dict(other.model.state_dict()))
    with pytest.raises(UsageError, match=r"has the shape \(.*6.*\) in the checkpoint and \(.*8.*\) in the model"):
        load(kind, tmp_path, meta, other)
    same_bits(before, dict(other.model.state_dict()))


def test_missing_and_unexpected_names_are_listed(kind: Kind, tmp_path: Path) -> None:
    meta = save(kind, tmp_path, make_state())
    other = make_state(seed=1)
    other.model.more = nn.Linear(2, 2)
    del other.model.norm
    with pytest.raises(
        UsageError, match=r"(?s)Missing in the checkpoint: more\.weight, more\.bias.*Not in the model: norm\."
    ):
        load(kind, tmp_path, meta, other, exclude=("optimizer",))


def test_an_optimizer_with_other_groups_is_refused_before_anything_is_loaded(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 1)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    before = copy.deepcopy(dict(other.model.state_dict()))
    with pytest.raises(UsageError, match="does not match the save"):
        load(kind, tmp_path, meta, other)
    same_bits(before, dict(other.model.state_dict()))


def test_a_save_without_optimizer_is_loud(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = make_state()
    state.optimizer = None
    state.scheduler = None
    meta = save(kind, tmp_path, state)
    report = load(kind, tmp_path, meta, make_state(seed=1))
    assert [line.partition(":")[0] for line in report.missing] == ["optimizer", "scheduler"]
    assert "The save holds no optimizer" in caplog.text
    assert "optimizer" not in report.loaded


def test_excluded_parts_stay_as_they_are(kind: Kind, tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    meta = save(kind, tmp_path, state)
    other = make_state(seed=1)
    before = copy.deepcopy(everything(other))
    parts = ("model", "optimizer", "scheduler", "ema", "extra", "rng")
    for part in parts:
        report = load(kind, tmp_path, meta, other, exclude=tuple(p for p in parts if p != part))
        assert report.loaded == (part,)
        if part != "model":
            continue
        same_bits({**before, "model": dict(state.model.state_dict())}, everything(other))


@pytest.mark.parametrize("saved_as", ["plain", "compiled", "wrapped"])
@pytest.mark.parametrize("loaded_as", ["plain", "compiled", "wrapped"])
def test_wrappers_leave_no_marks_in_the_names(kind: Kind, saved_as: str, loaded_as: str, tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    expected = copy.deepcopy(everything(state))
    meta = save(kind, tmp_path, _wrapped(state, saved_as))
    other = _wrapped(make_state(seed=1), loaded_as)
    load(kind, tmp_path, meta, other)
    same_bits(expected, everything(other))


def _wrapped(state: TrainState, how: str) -> TrainState:
    if how == "compiled":
        state.model = torch.compile(state.model, backend="eager")
    elif how == "wrapped":

        class Part(nn.Module):
            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self.module = module  # an attribute of the user's own: the name is part of the model here

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.module(tokens)

        state.model = Part(state.model)
        state.ema = Part(state.ema)
    return state


def test_the_format_is_found_by_its_kind(kind: Kind) -> None:
    assert get_format(kind).kind == kind


def test_the_default_device_and_inference_mode_change_nothing(kind: Kind, tmp_path: Path) -> None:
    state, other = make_state(), make_state(seed=1)
    train(state, 2)
    more = {"array": numpy.arange(3.0), "tensor": torch.ones(2)}
    state.extra = {"epoch": 1, "history": [0.5], **more}
    with torch.device("meta"), torch.inference_mode():
        meta = save(kind, tmp_path, state)
    with torch.device("meta"):
        load(kind, tmp_path, meta, other)
    assert other.extra is not None
    assert other.extra.pop("array").tolist() == state.extra.pop("array").tolist()
    same_bits(everything(state), everything(other))
    train(other, 1)
