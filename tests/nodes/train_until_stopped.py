"""A training script for the jobs in deploy/: it trains until it is asked to stop, or one step if it continues."""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, StopRequest, TrainState


def main() -> None:
    """Train on nodes that are all on this machine, so that each needs a disk with its number."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    stop = StopRequest().install()
    manager = CheckpointManager(f"{os.environ['LOCAL_SSD']}-{os.environ['SLURM_NODEID']}", timeout_s=60.0)
    start = manager.resume(state)
    for step in itertools.count(start.step + 1 if start is not None else 1):
        model(torch.rand(2, 8)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        # One write: torchrun runs Python unbuffered, so that the lines that ranks print at once would be mixed.
        sys.stdout.write(f"step {step} after {start and start.kind}\n")
        if start is not None:
            break
        if stop.check(manager.ranks):
            manager.save_emergency_checkpoint(step, state)
            break
    manager.close(stop=stop)
    dist.destroy_process_group()
    if start is None:
        sys.exit(75)  # it is not done: a pod of an indexed job that ends with 0 is never started again


if __name__ == "__main__":
    main()
