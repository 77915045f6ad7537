"""A small training with everything that a resume must bring back, for tests of the manager in one process.

Rules:
* A step is deterministic given the state: two equal states train to equal states, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError

WIDTH = 6


class Cursor:
    """A data loader that knows its position."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.sin(torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH) + self.position)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


def new_state(seed: int = 0, *, optimizer: bool = True) -> TrainState:
    """Model with dropout, AdamW, schedule, EMA, gradient scaler, data position and values of the user's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, WIDTH))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TrainState(
        model=model,
        optimizer=adam if optimizer else None,
        scheduler=torch.optim.lr_scheduler.LinearLR(adam, start_factor=0.1, total_iters=50) if optimizer else None,
        ema=torch.optim.swa_utils.AveragedModel(model),
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        dataloader=Cursor(),
        extra={"epoch": 0, "best": float("inf"), "history": []},
        training_config={"width": WIDTH},
    )


def train(state: TrainState, steps: int = 1) -> list[float]:
    """Train; return the losses."""
    losses = []
    for _ in range(steps):
        batch = state.dataloader.next()
        loss = (state.model(batch) - batch).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.ema.update_parameters(state.model)
        losses.append(loss.item())
        state.extra["epoch"] += 1
        state.extra["best"] = min(state.extra["best"], losses[-1])
        state.extra["history"].append(losses[-1])
    return losses


def everything(state: TrainState) -> dict[str, Any]:
    """A copy of all that training depends on."""
    return copy.deepcopy(
        {
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict(),
            "ema": state.ema.state_dict(),
            "scaler": state.scaler.state_dict(),
            "data": state.dataloader.state_dict(),
            "extra": state.extra,
            "rng": torch.get_rng_state(),
        }
    )


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def without_workers(manager: CheckpointManager) -> CheckpointManager:
    """Let a manager that has not resumed upload nothing."""
    if manager._node is not None:
        manager._node._workers_per_mirror = 0
    return manager


@contextmanager
def running(root: Path, *mirrors: Any, uploads: bool = True, **more: Any) -> Iterator[CheckpointManager]:
    """A manager that is closed whatever happens, without waiting for a mirror."""
    manager = CheckpointManager(root, mirrors, **more)
    if not uploads:
        without_workers(manager)
    try:
        yield manager
    finally:
        with suppress(CkptMirrorError):
            manager.close(timeout_s=0.0)


def saved_run(root: Path, steps: tuple[int, ...], *mirrors: Any, **more: Any) -> dict[int, dict[str, Any]]:
    """Run one attempt that resumes, saves at ``steps`` and closes; return the state at each step."""
    states = {}
    with CheckpointManager(root, mirrors, **more) as manager:
        state = new_state()
        start = manager.resume(state)
        at = start.step if start is not None else 0
        for step in steps:
            train(state, step - at)
            at = step
            manager.save(step, state).wait()
            states[step] = everything(state)
    return states
