"""What is passed as a part of the state is looked at where it is passed, hours before the first save may need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import UsageError

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
WRONG = {
    "a model's state": ({"model": MODEL.state_dict()}, "model is of type OrderedDict", "model=model"),
    "two models": ({"model": [MODEL, MODEL]}, "model is of type list", "ModuleList"),
    "no model": ({"model": None}, "model is of type NoneType", "model=model"),
    "a class": ({"model": nn.Linear}, "model is the class Linear", "model=model"),
    "an optimizer's state": (
        {"optimizer": OPTIMIZER.state_dict()},
        "optimizer.param_groups[0].lr is of type float",
        "optimizer itself",
    ),
    "parameters": ({"optimizer": list(MODEL.parameters())}, "optimizer[0] is of type Parameter", "optimizer itself"),
    "a class of optimizers": ({"optimizer": torch.optim.SGD}, "optimizer is the class SGD", "optimizer itself"),
    "a model for an optimizer": (
        {"optimizer": MODEL},
        "optimizer is of type Linear, which has no param_groups",
        "optimizer itself",
    ),
    "a number": ({"scheduler": 5}, "scheduler is of type int, which has no state_dict", "scheduler itself"),
    "weights": ({"ema": [MODEL.state_dict()]}, "ema[0].weight is of type Tensor", "ema itself"),
    "a list": ({"extra": [1]}, "extra is of type list, not a dict", "extra={"),
    "a text": ({"training_config": "lr=0.1"}, "training_config is of type str, not a dict", "training_config={"),
}


@pytest.mark.parametrize(("parts", "told", "what_to_pass"), WRONG.values(), ids=WRONG)
def test_a_part_of_another_kind_is_refused_where_it_is_passed(parts: dict[str, Any], told: str, what_to_pass: str):
    with pytest.raises(UsageError) as caught:
        TrainState(**{"model": MODEL, **parts})
    assert str(caught.value).startswith(f"TrainState.{told}")
    assert what_to_pass in caught.value.hint


def test_one_that_was_set_later_is_refused_by_resume_and_load(tmp_path: Path):
    state = TrainState(model=MODEL)
    state.optimizer = OPTIMIZER.state_dict()
    with CheckpointManager(tmp_path / "run") as manager:
        for begin in (manager.resume, manager.load):
            with pytest.raises(UsageError, match="optimizer itself"):
                begin(state)
        state.optimizer = OPTIMIZER
        assert manager.resume(state) is None


def test_parts_that_are_several_or_empty_are_taken():
    scheduler = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
    TrainState(MODEL, [OPTIMIZER], {"a": scheduler, "b": [scheduler]}, ema=(MODEL,), scaler={}, extra={})
