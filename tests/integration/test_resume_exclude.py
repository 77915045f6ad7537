"""Resuming without a part of the state: it stays as it is, and everybody is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptmirror.core.errors import UsageError
from tests.kit.training import everything, new_state, running, same, saved_run


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_an_optimizer_that_does_not_match_is_left_out_as_the_error_says(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = saved_run(tmp_path, (3,), kinds=(kind,))[3]
    state = new_state(seed=1)
    state.optimizer = torch.optim.SGD([{"params": [p], "lr": 0.5} for p in state.model.parameters()])
    state.scheduler = None
    with running(tmp_path) as manager:
        with pytest.raises(UsageError) as refused:
            manager.resume(state)
        assert 'exclude=("optimizer",)' in refused.value.hint
        start = manager.resume(state, exclude=("optimizer",))
    assert start is not None
    assert "optimizer" not in start.loaded
    assert "optimizer: left out (exclude), it stays as it is" in start.missing
    assert "optimizer: left out (exclude)" in caplog.text
    assert {group["lr"] for group in state.optimizer.param_groups} == {0.5}
    assert same(dict(state.model.state_dict()), saved["model"])


def test_all_but_the_model_can_be_left_out(tmp_path: Path) -> None:
    saved = saved_run(tmp_path, (3,))[3]
    state = new_state(seed=1)
    before = everything(state)
    with running(tmp_path) as manager:
        start = manager.resume(state, exclude=["optimizer", "scheduler", "scaler", "ema", "dataloader", "extra", "rng"])
    assert start is not None
    assert start.loaded == ("model",)
    after = everything(state)
    assert same(after["model"], saved["model"])
    assert all(same(before[part], after[part]) for part in ("optimizer", "scheduler", "ema", "extra"))


@pytest.mark.parametrize("wrong", ["optimizer", ("optimiser",)])
def test_a_part_that_is_none_is_refused_before_anything_is_looked_at(tmp_path: Path, wrong: str) -> None:
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match="it must be a tuple of names"):
            manager.resume(new_state(), exclude=wrong)
        assert manager.resume(new_state()) is None
