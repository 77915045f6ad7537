"""A model with NaN or infinity in it is saved as it is, and named once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptmirror import TrainState, load_checkpoint
from ckptmirror.core import events
from ckptmirror.core.errors import BackgroundSaveFailed, LocalStorageUnwritable
from ckptmirror.flow.save.save import Saver
from tests.kit.training import running


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_value_is_named_at_the_first_of_the_saves_that_have_it(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    heard: list[events.NotFinite] = []
    with running(tmp_path) as manager:
        manager.resume(TrainState(model))
        manager.events.subscribe(lambda event: heard.append(event) if isinstance(event, events.NotFinite) else None)
        for step in (1, 2, 3):
            if step == 2:
                with torch.no_grad():
                    model[1].weight[1, 3] = value
            manager.save(step, TrainState(model)).wait()
    assert [(one.step, one.path) for one in heard] == [(2, "model.1.weight")]
    found = load_checkpoint(tmp_path, map_location="cpu").model["1.weight"]
    assert torch.equal(found.isfinite(), model[1].weight.isfinite())


def test_what_only_overflows_in_a_sum_is_not_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64).half()
    torch.nn.init.constant_(model.weight, 60_000.0)
    heard: list[object] = []
    with running(tmp_path) as manager:
        manager.resume(TrainState(model))
        manager.events.subscribe(lambda event: heard.append(event) if isinstance(event, events.NotFinite) else None)
        manager.save(1, TrainState(model)).wait()
    assert heard == []


def test_a_save_that_failed_is_not_said_to_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, float("nan"))
    heard: list[int] = []

    def refused(*_: object) -> None:
        raise LocalStorageUnwritable("Cannot publish.")

    with running(tmp_path) as manager:
        manager.resume(TrainState(model))
        manager.events.subscribe(lambda one: heard.append(one.step) if isinstance(one, events.NotFinite) else None)
        with monkeypatch.context() as patched:
            patched.setattr(Saver, "_commit", refused)
            with pytest.raises(BackgroundSaveFailed, match="Cannot publish"):
                manager.save(1, TrainState(model)).wait()
        manager.save(2, TrainState(model)).wait()
    assert heard == [2]
