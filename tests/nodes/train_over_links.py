"""A training script for torchrun on nodes whose link is cut in a save, and comes back.

In the step in which the link is cut it waits, at a place in the save, until somebody opens and closes its FIFO: once so
that the link can be cut, and, after the save has failed, once so that it can come back. A node that then
``STAYS`` waits for its uploads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.flow.save.commit import SaveCommit

TIMEOUT_S = 6.0


def main(base: Path, last_step: int, cut_at: int, place: str) -> None:
    """Train to a step. ``place``: before, prepare or publish, of the save in which the link is cut."""
    dist.init_process_group("gloo")
    node, torn = os.environ["GROUP_RANK"], base / "torn"
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))

    def wait(what: str) -> None:
        print(f"node {node} waits: {what}", flush=True)
        (base / f"{what}-{node}").read_text()

    def wait_at(place: str) -> None:
        honest = getattr(SaveCommit, place)

        def act(commit: SaveCommit) -> None:
            wait("cut")
            honest(commit)

        setattr(SaveCommit, place, act)

    manager = CheckpointManager(
        os.environ["NODE_ROOT"],
        [os.environ.get("MIRROR", f"file://{base}/mirror")],
        kinds=("dcp",),
        timeout_s=TIMEOUT_S,
    )
    start = manager.resume(state)
    first = start.step + 1 if start is not None else 1
    try:
        for step in range(first, last_step + 1):
            torch.manual_seed(1000 * step + dist.get_rank())
            model(torch.rand(2, 8)).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            if step == cut_at and not torn.exists():
                manager.wait("mirrored", timeout_s=60.0)
                dist.barrier()
                if place == "before":
                    wait("cut")
                else:
                    wait_at(place)
            manager.save(step, state).wait("committed", timeout_s=10 * TIMEOUT_S)
    except CkptMirrorError as error:
        print(f"node {node} fails: {error}", flush=True)
        torn.touch()
        wait("heal")
        if "STAYS" in os.environ:
            try:
                manager.wait("mirrored", timeout_s=60.0)
            except CkptMirrorError as late:
                print(f"node {node} stays: {late}", flush=True)
        raise SystemExit(1) from error
    # Before the manager closes: at the interpreter's end, gloo's thread may not drop a collective's last tensor.
    total = sum(float(value.full_tensor().double().sum()) for value in model.state_dict().values())
    manager.close(60.0)
    if dist.get_rank() == 0:
        print(f"from step {first} to {last_step}: {total!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
