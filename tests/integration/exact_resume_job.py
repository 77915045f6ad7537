"""Trainings for test_exact_resume.py: functions of a module, since each rank's process imports them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import TrainState
from ckptmirror.integrations import plain_loop
from ckptmirror.integrations.ddp import rebuild_buckets
from tests.kit.training import Cursor, new_state, train

WIDTH = 67  # no multiple of three, so a sum of three ranks depends on where in a bucket a gradient is


def one_rank() -> TrainState:
    return new_state()


def one_step(state: TrainState) -> list[float]:
    return train(state)


# -- what goes wrong ----------------------------------------------------------------------------------------------


def step_by_the_clock(state: TrainState) -> list[float]:
    state.extra["best"] = -time.time()
    return train(state)


class Forgetful(Cursor):
    """Says where it is, and does not go there."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        pass


def state_that_forgets() -> TrainState:
    state = new_state()
    state.dataloader = Forgetful()
    return state


class Drawing(Cursor):
    """A save, and nothing else, that asks it where it is draws a random number."""

    def state_dict(self) -> dict[str, int]:
        if any(frame.filename.endswith("formats/capture.py") for frame in inspect.stack()):
            torch.rand(1)
        return super().state_dict()


def state_that_draws() -> TrainState:
    state = new_state()
    state.dataloader = Drawing()
    return state


SEEN = {"steps": 0}


def step_that_counts_outside_the_state(state: TrainState) -> list[float]:
    SEEN["steps"] += 1
    state.optimizer.param_groups[0]["weight_decay"] = 0.01 * SEEN["steps"]
    return train(state)


def step_that_raises(state: TrainState) -> None:
    raise ArithmeticError("no step today")


# -- several ranks --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Its layers run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.drop(torch.tanh(self.first(batch)))))
        return out


def loss_of_anything(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.ones(4, WIDTH))
    return out.square().mean()


def ddp(recipe: str) -> TrainState:
    torch.manual_seed(0)
    more: dict[str, Any] = {"find_unused_parameters": True} if recipe == "fixed buckets" else {}
    model = DistributedDataParallel(Net(), **more)
    torch.manual_seed(100 + dist.get_rank())
    if recipe == "rebuilt buckets":
        before = torch.get_rng_state(), [one.clone() for one in model.state_dict().values()]
        rebuild_buckets(model, loss_of_anything)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), before[1], strict=True))
        assert all(one.grad is None for one in model.parameters())
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainState(model, adam, dataloader=Cursor(), extra={"seen": 0})


def ddp_step(state: TrainState) -> float:
    state.dataloader.next()
    batch = torch.randn(4, WIDTH)
    loss = (state.model(batch) - batch).square().mean()
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.extra["seen"] += 4
    return float(loss.item())


def loop() -> TrainState:
    return plain_loop.build_state(dist.get_rank(), dist.get_world_size(), wrap=True)


def loop_step(state: TrainState) -> float:
    return plain_loop.train_step(state)
