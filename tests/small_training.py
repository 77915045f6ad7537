"""A small training with everything that a resume must bring back, for tests of the manager in one process.

Rules:
* A step is deterministic given the state: two equal states train to equal states, bit for bit.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError, StorePermanent
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local import crashpoints
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores.faulty import FaultyStore, StoreFault
from tests import clean_processes

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


@contextmanager
def running(root: Path, *mirrors: Any, **more: Any) -> Iterator[CheckpointManager]:
    """A manager that is closed whatever happens, without waiting for a mirror."""
    manager = CheckpointManager(root, mirrors, **more)
    try:
        yield manager
    finally:
        with suppress(CkptMirrorError):
            manager.close(timeout_s=0.0)


def saved_run(root: Path, steps: tuple[int, ...], *mirrors: Any, **more: Any) -> dict[int, dict[str, Any]]:
    """One attempt that goes on from what there is, saves at ``steps`` and closes; return the state at each step."""
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


def whole(root: Path) -> dict[int, Meta]:
    """The newest whole save of each step on the disk."""
    return {save.meta.step: save.meta for save in read_inventory(root).saves}


def faulty(manager: CheckpointManager, *faults: StoreFault) -> list[FaultyStore]:
    """Put a scripted store before each mirror of a manager that has not resumed yet; return them in order."""
    assert manager._node is not None
    stores = [FaultyStore(mirror.store, faults) for mirror in manager._node.mirrors]
    manager._node.mirrors = [
        Mirror(mirror.url, mirror.required, store)  # type: ignore[arg-type]
        for mirror, store in zip(manager._node.mirrors, stores, strict=True)
    ]
    return stores


def refusing() -> StoreFault:
    """Every upload of a file is refused for good."""
    return StoreFault("upload", when="before", times=0, error=lambda: StorePermanent("refused (a scripted fault)"))


def dead() -> StoreFault:
    """The mirror answers nothing."""
    return StoreFault(when="before", times=0)


def killed_at(crash_at: str | None, job: Callable[..., object], *arguments: Any, **more: Any) -> bool:
    """Run ``job`` in a child that dies by SIGKILL at a crash point; whether it did (else it ended in order)."""
    child = clean_processes.process(_until_killed, crash_at, job, arguments, more)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), "the child failed in another way"
    return child.exitcode != 0


def _until_killed(crash_at: str | None, job: Callable[..., object], arguments: Any, more: dict[str, Any]) -> None:
    crashpoints.arm(crash_at)
    job(*arguments, **more)


def leftovers(root: Path) -> list[str]:
    """Everything below a root that is temporary or in the trash, but for a status that is being written."""
    inventory = read_inventory(root)
    loose = [*root.rglob("*.tmp"), *inventory.temporaries, *inventory.trash]
    return [str(path) for path in loose if not path.name.startswith("status.json.")]


def artifact(root: Path, meta: Meta, name: str) -> Path:
    """The path of the one artifact of a save whose path contains ``name``."""
    (path,) = [a.path for a in meta.artifacts if name in a.path]
    return root / path


def control(root: Path, name: str) -> Path:
    """A file of the control directory."""
    return root / names.CONTROL_DIR / name
