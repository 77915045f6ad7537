"""A device without memory, or one that failed, says nothing about a checkpoint: its error arrives as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState, load_checkpoint
from ckptmirror.formats import dcp_read, read_full
from tests.kit.formats import load, make_state, save

ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: device-side assert")]


class Value:
    """An object of the user's own that keeps a tensor on a device."""

    error: Exception | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"at": torch.ones(3)}

    def load_state_dict(self, _state: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error


def fails(error: Exception) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.fixture(params=ERRORS, ids=["memory", "failure"])
def error(request: pytest.FixtureRequest) -> Exception:
    found: Exception = request.param
    return found


@pytest.mark.parametrize("kind", ["dcp", "model"])
@pytest.mark.parametrize("part", ["model", "optimizer", "extra"])
def test_in_a_load(tmp_path: Path, kind: Any, part: str, error: Exception) -> None:
    state = make_state()
    state.extra = {"value": Value()}
    meta = save(kind, tmp_path, state)
    other: TrainState = make_state(1)
    other.extra = {"value": Value()}
    if part == "model":
        other.model.set_extra_state = fails(error)
    elif part == "optimizer":
        other.optimizer.load_state_dict = fails(error)
    else:
        other.extra["value"].error = error
    with pytest.raises(type(error)):
        load(kind, tmp_path, meta, other)


def test_in_the_memory_for_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    meta = save("dcp", tmp_path, make_state())
    monkeypatch.setattr(dcp_read.torch, "empty", fails(error))
    with pytest.raises(type(error)):
        load("dcp", tmp_path, meta, make_state(1))


def test_in_a_save(tmp_path: Path, error: Exception) -> None:
    state = make_state()
    state.extra = {"value": Value()}
    state.extra["value"].error = error
    with pytest.raises(type(error)):
        save("model", tmp_path, state)


def test_in_load_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with CheckpointManager(tmp_path, kinds=("model",)) as manager:
        manager.resume(state := make_state())
        manager.save(1, state).wait("committed")
    monkeypatch.setattr(read_full, "read_full", fails(error))
    with pytest.raises(type(error)):
        load_checkpoint(tmp_path / "model_000001.pt")
