"""Averages of values that each rank has of its own, where another number of ranks merges them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckptmirror import CheckpointManager, TrainState
from tests.kit.processes import run_ranks

pytestmark = pytest.mark.long

WAIT_S = 30.0


def mean(values: list[Any], _rank: int, _world_size: int) -> Any:
    known = [value for value in values if value is not None]
    return torch.stack(known).mean(0, dtype=torch.float64).to(known[0].dtype)


class ByName:
    """Averages by the names of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = dict(state["shadow"])


class Model(nn.Module):
    """A scale that each rank has of its own, and one that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shared = nn.Module()
        self.shared.scale = nn.Parameter(torch.ones(3))


def new_state(case: str, rank: int) -> TrainState:
    model = Model()
    average: Any = ByName(model) if case == "by name" else AveragedModel(model)
    held = average.shadow if case == "by name" else dict(average.module.named_parameters())
    nn.init.constant_(held["scale"], 100.0 * (rank + 1))
    nn.init.constant_(held["shared.scale"], 7.0)
    if case == "by name" and rank == 2:
        del average.shadow["scale"]
    per_rank = {"*": mean} if case == "all" else {"scale": mean}
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=average, per_rank=per_rank)


def save(rank: int, root: Path, case: str) -> None:
    with CheckpointManager(root, kinds=("dcp",), timeout_s=WAIT_S) as manager:
        state = new_state(case, rank)
        manager.resume(state)
        manager.save(1, state).wait()


def resume(rank: int, root: Path, case: str) -> tuple[Any, ...]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptmirror").addHandler(handler)
    with CheckpointManager(root, kinds=("dcp",), timeout_s=WAIT_S) as manager:
        state = new_state(case, 9)
        start = manager.resume(state)
    assert start is not None
    held = state.ema.shadow if case == "by name" else dict(state.ema.module.named_parameters())
    told = [line for line in lines if "ema" in line]
    return held["scale"][0].item(), held["shared.scale"][0].item(), start.missing, told


@pytest.mark.parametrize(
    ("case", "merged"),
    [
        ("all", 200.0),  # ``n_averaged`` is the average of nothing
        ("ends alike", 200.0),  # the name of what is shared ends with that of the other
        ("by name", 150.0),  # rank 2 has none
    ],
)
def test_averages_are_merged_by_the_names_of_their_own_values(case: str, merged: float, tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path / "root", case)
    for own, shared, missing, told in run_ranks(2, resume, tmp_path / "root", case):
        assert (own, shared) == (merged, 7.0)
        assert (missing, told) == ((), [])
