"""A training script for an elastic torchrun job: on two nodes that a third has left it ends after two steps."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, Retention, StopRequest, TrainState


def new_state() -> TrainState:
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 8)
    return TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def train(state: TrainState, step: int) -> float:
    """One step, on data that every rank has alike; return a sum of the weights."""
    torch.manual_seed(step)
    state.model(torch.rand(2, 8)).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return sum(float(value.detach().double().sum()) for value in state.model.parameters())


def main(base: Path) -> None:
    """Train until torchrun stops the ranks, since their number changes. A FIFO tells which save is on the mirror."""
    dist.init_process_group("gloo")
    state = new_state()
    state.model = DistributedDataParallel(state.model)
    stop = StopRequest().install()
    manager = CheckpointManager(
        os.environ["NODE_ROOT"], [f"file://{base}/mirror"], retention=Retention(keep_last=2), timeout_s=60.0
    )
    start = manager.resume(state)
    first = start.step + 1 if start is not None else 1
    is_last = dist.get_world_size() == 2 and (base / "left").exists()
    tells = base / f"trains on {dist.get_world_size()}"
    for step in itertools.count(first):
        total = train(state, step)
        if step % 20 == 0:
            manager.save(step, state)
        if stop.check(manager.ranks):
            manager.save_emergency_checkpoint(step, state)
            break
        if is_last and step == first + 1:
            break
        if not is_last and step == first + 40:
            manager.wait("mirrored", timeout_s=60.0)
            if dist.get_rank() == 0:
                tells.write_text(str(step - step % 20))
    manager.close(stop=stop)
    if is_last and dist.get_rank() == 0:
        (base / "end").write_text(f"{first} {step} {total!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
