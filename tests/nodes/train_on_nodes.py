"""A training script for torchrun on several nodes. The node's root is in the environment, in place of a local disk."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState


def main(base: Path, last_step: int, die_at: int) -> None:
    """Train to a step; at another, node 1 dies once, without a word."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    with CheckpointManager(os.environ["NODE_ROOT"], [f"file://{base}/mirror"], timeout_s=60.0) as manager:
        start = manager.resume(state)
        first = start.step + 1 if start is not None else 1
        for step in range(first, last_step + 1):
            torch.manual_seed(1000 * step + dist.get_rank())
            model(torch.rand(2, 8)).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            manager.save(step, state)
            died = base / "died"
            if step == die_at and os.environ["GROUP_RANK"] == "1" and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        # Before the manager closes: at the interpreter's end, gloo's thread may not drop a collective's last tensor.
        total = sum(float(value.full_tensor().double().sum()) for value in model.state_dict().values())
    if dist.get_rank() == 0:
        sys.stdout.write(f"from step {first} to {last_step}: {total!r}\n")  # one write, beside what others log
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
