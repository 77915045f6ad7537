"""Trainings on a GPU: functions of a module, since each rank's process imports them."""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import TrainState
from tests.kit.training import WIDTH, Cursor

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
HIDDEN = 48


class Network(nn.Module):
    """Dropout, so that the generator of the device matters, and a buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.drop = nn.Dropout(0.3)
        self.outer = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(self.drop(self.norm(torch.tanh(self.inner(batch)))))
        return found


def state(way: str) -> TrainState:
    """Build what ``way`` names, from a seed."""
    torch.manual_seed(3)
    torch.cuda.set_device(0)
    device = "cpu" if way == "offloaded" else "cuda"
    model: Any = Network().to(device)
    ema: Any = copy.deepcopy(model)
    if way == "offloaded":
        model, ema = (sharded(one, offload_policy=CPUOffloadPolicy()) for one in (model, ema))
    elif way == "sharded":
        model, ema = (sharded(one, mp_policy=MixedPrecisionPolicy(torch.bfloat16)) for one in (model, ema))
    elif way == "replicated":
        model = DistributedDataParallel(model)
    elif way == "compiled":
        model = torch.compile(model)
    elif way == "graphed":
        torch.cuda.make_graphed_callables(model, (torch.zeros(4, WIDTH, device="cuda"),))
    more: dict[str, Any] = {"fused": way == "fused"} if way in ("fused", "plain") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=way == "graphed", **more)
    if way == "plain":
        turned = torch.randn(5, dtype=torch.complex64, device="cuda").conj()
        model.register_buffer("conjugate", turned)
        model.register_buffer("negative", turned.imag)
    extra: dict[str, Any] = {"loss": torch.zeros((), device="cuda"), "rank": rank()}
    if way == "fused":
        extra["generator"] = torch.Generator("cuda").manual_seed(5)
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50),
        ema=ema,
        scaler=torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=2) if way == "scaled" else None,
        dataloader=Cursor(),
        extra=extra,
    )


def step(state: TrainState) -> list[float]:
    """Do one step; return the loss, and a draw of each generator."""
    batch = state.dataloader.next().cuda() + rank()
    half = torch.autocast("cuda", dtype=torch.float16) if state.scaler else contextlib.nullcontext()
    with half:
        loss = (state.model(batch) - batch).square().mean()
    state.optimizer.zero_grad()
    (state.scaler.scale(loss) if state.scaler else loss).backward()
    if state.scaler:
        state.scaler.step(state.optimizer)
        state.scaler.update()
    else:
        state.optimizer.step()
    state.scheduler.step()
    with torch.no_grad():
        for average, parameter in zip(state.ema.parameters(), state.model.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)
        network(state.model).seen += 1
    state.extra["loss"].copy_(loss.detach())
    own = torch.rand(1, device="cuda", generator=state.extra.get("generator"))
    return [loss.item(), own.item(), torch.rand(1, device="cuda").item(), torch.rand(1).item()]


def network(model: Any) -> Network:
    """The network below its wrapper."""
    for name in ("module", "_orig_mod"):
        model = getattr(model, name, model)
    found: Network = model
    return found


def sharded(model: Network, **policies: Any) -> Network:
    fully_shard(model.inner, **policies)
    fully_shard(model, **policies)
    return model


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
