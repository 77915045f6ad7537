"""Jobs of 1 to 4 ranks: each saves, and leaves a snapshot, in roots of its own, and loads what all of them saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.model import Kind
from tests.integration.formats_worker import Network, train, whole

WAIT_S = 60.0
SIZES = (1, 2, 3, 4)
KINDS: tuple[Kind, ...] = ("model", "emergency")
Found = dict[str, Any]


def together(parts: list[list[int]], rank: int, world_size: int) -> list[int]:
    """Merge the samples that ranks have seen, and deal them out again."""
    return sorted(sample for part in parts for sample in part)[rank::world_size]


def build(seed: int) -> TrainState:
    """A state whose model, optimizer and average are sharded over all ranks."""
    torch.manual_seed(seed)
    model: nn.Module = Network()
    ema: nn.Module = copy.deepcopy(model)
    for one in (model, ema):
        fully_shard(one.inner)
        fully_shard(one)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    extra = {"epoch": 0, "samples": [dist.get_rank(), 100 + dist.get_rank()]}
    merge = {"samples": together}
    return TrainState(model, optimizer, scheduler=scheduler, ema=ema, extra=extra, merge_extra=merge)


def save_every_kind(rank: int, base: str) -> Found:
    """Save a trained state in each kind, and return what it holds."""
    state = build(0)
    train(state, 3, rank)
    for kind in KINDS:
        with _manager(base, kind, dist.get_world_size()) as manager:
            manager.resume(build(1))
            if kind == "emergency":
                manager.save_emergency_checkpoint(3, state)
            else:
                manager.save(3, state)
    return whole(state)


def load_every_save(rank: int, base: str) -> dict[tuple[str, int], Found]:
    """Load what each number of ranks saved, and return what this rank then holds."""
    found: dict[tuple[str, int], Found] = {}
    for saved in SIZES:
        for kind in KINDS:
            state = build(2)
            with _manager(base, kind, saved) as manager:
                start = manager.resume(state)
            assert start is not None
            found[kind, saved] = {"kind": start.kind, "missing": start.missing, "state": whole(state)}
    return found


def _manager(base: str, kind: Kind, saved: int) -> CheckpointManager:
    return CheckpointManager(Path(base) / f"{kind}-{saved}", kinds=("model",), timeout_s=WAIT_S)


def values_of_a_rank(rank: int, base: str) -> str:
    """Leave a snapshot of ranks that hold different parameters under one name, beside sharded ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    with torch.no_grad():
        model[1].bias.fill_(rank)
    with CheckpointManager(base, kinds=("model",), timeout_s=WAIT_S) as manager:
        manager.resume(TrainState(model))
        return manager.save_emergency_checkpoint(1, TrainState(model)).name
