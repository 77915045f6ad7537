"""What two ranks do for test_load_state_ranks.py: sharded states that load what one process, or others, left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.formats import dcp_read
from ckptmirror.formats.shards import local_of
from tests.kit.processes import outcome

WAIT_S = 30.0


def plain(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def sharded(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 4), 0.2 * (number + 1))).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def record_what_is_made() -> list[torch.Tensor]:
    """Return a list that gets what is prepared for the loads of this process from now on."""
    made: list[torch.Tensor] = []
    make = dcp_read._Reader.make

    def record(self: Any, owners: Any, is_over: Any) -> None:
        make(self, owners, is_over)
        made.extend(local_of(value) for _, value in self._made.values())

    dcp_read._Reader.make = record  # type: ignore[method-assign]
    return made


def everything_that_happens(rank: int, base: str) -> dict[str, Any]:
    place = Path(base)
    found: dict[str, Any] = {}
    state = sharded(7)
    manager = CheckpointManager(place / "new", timeout_s=WAIT_S)
    manager.resume(state)
    report = manager.load(state, place / "old")  # in one process, by plain torch
    found["older"] = (report.step, report.loaded, report.missing)
    train(state.model, state.optimizer)
    found["older weights"] = whole(state.model)
    manager.save(201, state).wait()
    again = sharded(8)
    made = record_what_is_made()
    report = manager.load(again, 201)
    moments = [one for of in again.optimizer.state.values() for name, one in of.items() if name != "step"]
    found["prepared"] = [{local_of(one).data_ptr() for one in moments} <= {one.data_ptr() for one in made}, len(made)]
    found["own"] = (report.step, report.loaded)
    found["own weights"] = whole(again.model)
    # A reference that means something on the leader alone is resolved there, for all.
    mine = place / "old" if rank == 0 else place / "nowhere"
    found["leader's word"] = manager.load(sharded(9), mine).step
    found["missing"] = outcome(lambda: manager.load(sharded(9), place / "nowhere"))[:2]
    dist.barrier()
    if rank == 0:
        path = next((place / "new" / "dcp_000201").glob("__1_*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    untouched = sharded(9)
    found["rotten"] = outcome(lambda: manager.load(untouched, place / "new" / "dcp_000201"))[:2]
    found["rotten state"] = dict(untouched.optimizer.state)
    manager.close()
    return found
