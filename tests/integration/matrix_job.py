"""Jobs of 1 to 8 ranks that save in roots of their own, or are killed in the next save; and jobs that load it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Kind
from ckptmirror.local import crashpoints
from tests.integration.formats_worker import Network, train, whole

FULL = os.environ.get("CKPTMIRROR_MATRIX") == "full"
WAIT_S = 300.0 if FULL else 60.0
STEP = 3
KINDS: tuple[Kind, ...] = ("dcp", "model", "emergency")
COMMITTED = "link.replace:before"  # the step after is committed by then
KILLS = ("file.fsync:before", "save.publish:before", COMMITTED)
Found = dict[str, Any]


class Saved(NamedTuple):
    """How a save came about, and so what there is to load.

    Attributes:
        wrapped: "fsdp", "ddp" or "compiled" (under DDP).
        kind: The kind that is saved, and loaded.
        ranks: How many saved.
        killed: The crash point of the next save at which every rank was killed; "": none was.
    """

    wrapped: str
    kind: Kind
    ranks: int
    killed: str = ""

    def root(self, base: str) -> Path:
        return Path(base) / "-".join((self.wrapped, self.kind, str(self.ranks), self.killed.replace(":", "-")))


def together(parts: list[list[int]], rank: int, world_size: int) -> list[int]:
    """Merge the samples that ranks have seen, and deal them out again."""
    return sorted(sample for part in parts for sample in part)[rank::world_size]


def build(wrapped: str, seed: int) -> TrainState:
    """A state whose model, optimizer and average are sharded over all ranks ("fsdp"), or the same on each."""
    torch.manual_seed(seed)
    model: Any = Network()
    ema: nn.Module = copy.deepcopy(model)
    if wrapped == "fsdp":
        for one in (model, ema):
            fully_shard(one.inner)
            fully_shard(one)
    else:
        model = DistributedDataParallel(model)
    if wrapped == "compiled":
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    extra = {"epoch": 0, "samples": [dist.get_rank(), 100 + dist.get_rank()]}
    merge = {"samples": together}
    return TrainState(model, optimizer, scheduler=scheduler, ema=ema, extra=extra, merge_extra=merge)


def save_all(rank: int, base: str, saves: list[Saved]) -> bytes:
    """Save a trained state in each way; return what it holds, by step, then and later. To be killed, give one way."""
    state = build(saves[0].wrapped, 0)
    train(state, STEP, rank)
    held = {STEP: copy.deepcopy(whole(state))}
    for saved in saves:
        with _manager(base, saved) as manager:
            manager.resume(build(saved.wrapped, 1))
            if saved.kind == "emergency":
                manager.save_emergency_checkpoint(STEP, state)
            else:
                manager.save(STEP, state).wait()
            if saved.killed:
                train(state, 1, rank)
                dist.barrier()
                crashpoints.arm(saved.killed)
                with contextlib.suppress(CkptMirrorError):  # the leader is gone
                    manager.save(STEP + 1, state).wait()
                os.kill(os.getpid(), signal.SIGKILL)
    train(state, 1, rank)
    return pickle.dumps(held | {STEP + 1: whole(state)})  # as bytes: tensors in a pipe take a descriptor each


def load_all(rank: int, base: str, saves: list[Saved]) -> bytes:
    """Load what each job saved; return what this rank then holds, by save."""
    found: dict[Saved, Found] = {}
    for saved in saves:
        state = build(saved.wrapped, 2)
        with _manager(base, saved) as manager:
            start = manager.resume(state)
        assert start is not None
        found[saved] = {"step": start.step, "kind": start.kind, "missing": start.missing, "state": whole(state)}
    return pickle.dumps(found)


def _manager(base: str, saved: Saved) -> CheckpointManager:
    kinds: tuple[Kind, ...] = ("model",) if saved.kind == "emergency" else (saved.kind,)
    return CheckpointManager(saved.root(base), kinds=kinds, timeout_s=WAIT_S)


def values_of_a_rank(rank: int, base: str) -> str:
    """Leave a snapshot of ranks that hold different parameters under one name, beside sharded ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    with torch.no_grad():
        model[1].bias.fill_(rank)
    with CheckpointManager(base, kinds=("model",), timeout_s=WAIT_S) as manager:
        manager.resume(TrainState(model))
        return manager.save_emergency_checkpoint(1, TrainState(model)).name
