"""An average of the weights that not every rank of a node has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState
from tests.kit.processes import run_ranks
from tests.nodes.jobs import WAIT_S, built

pytestmark = pytest.mark.long
NODES = "aabb"


def new_state(weight: float, *, has_average: bool) -> TrainState:
    average = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(average.weight, weight)
    return replace(built("fsdp"), ema=average if has_average else None)


def save_two(rank: int, base: Path) -> None:
    state = new_state(0.0, has_average=True)
    with CheckpointManager(base / NODES[rank], [], kinds=("dcp",), timeout_s=WAIT_S) as manager:
        manager.resume(state)
        for step in (1, 2):
            manager.save(step, new_state(float(step), has_average=True)).wait("committed", timeout_s=WAIT_S)


def resume_with(rank: int, base: Path, ranks: tuple[int, ...]) -> tuple[Any, ...]:
    state = new_state(0.0, has_average=rank in ranks)
    with CheckpointManager(base / NODES[rank], [], kinds=("dcp",), timeout_s=WAIT_S) as manager:
        start = manager.resume(state)
    assert start is not None
    return start.step, start.passed_over, state.ema.weight[0, 0].item() if state.ema else None


def test_an_average_that_one_rank_has_and_its_leader_has_not_comes_back_from_the_newest_save(tmp_path: Path) -> None:
    run_ranks(4, save_two, tmp_path)
    found = run_ranks(4, resume_with, tmp_path, (3,))
    assert [(step, passed_over) for step, passed_over, _ in found] == [(2, ())] * 4
    assert [average for *_, average in found] == [None, None, None, 2.0]
