"""What two ranks do for test_formats_ranks.py: states that are not the same on every rank, or share memory there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.model import Kind
from tests.integration.save_ranks_job import WAIT_S
from tests.kit.processes import outcome

KINDS: tuple[Kind, ...] = ("dcp", "model", "emergency")


class LocalMomentum(torch.optim.Optimizer):
    """Momentum over the rank's own shards, as fused kernels keep it, beside whole weights of the start."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        for parameter in self.param_groups[0]["params"]:
            local, state = parameter.to_local(), self.state[parameter]
            if not state:
                state["local"] = torch.zeros_like(local)
                state["anchor"] = parameter.full_tensor().clone()
            state["local"].mul_(0.9).add_(parameter.grad.to_local())
            local.add_(state["local"], alpha=-0.05)
            parameter.mul_(1 - 0.01 * float((state["anchor"] - parameter.full_tensor()).norm()))


def sharded(seed: int, optimizer: Callable[[Any], Any] = torch.optim.AdamW) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return TrainState(model, optimizer(model.parameters()), extra={})


def step(state: TrainState, seed: int, optimizer: Any = None) -> None:
    torch.manual_seed(seed)
    state.model.zero_grad()
    state.model(torch.randn(8, 4)).square().mean().backward()
    (optimizer or state.optimizer).step()


def full(values: Any) -> dict[str, torch.Tensor]:
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in values.items()}


def save(root: Path, kind: Kind, state: TrainState) -> None:
    manager = CheckpointManager(root, kinds=("dcp",) if kind == "emergency" else (kind,), timeout_s=WAIT_S)
    manager.resume(state)
    if kind == "emergency":
        manager.save_emergency_checkpoint(1, state)
    else:
        manager.save(1, state).wait()
    manager.close()
    dist.barrier()


def resume(root: Path, state: TrainState) -> tuple[str, ...]:
    manager = CheckpointManager(root, timeout_s=WAIT_S)
    start = manager.resume(state)
    manager.close()
    dist.barrier()
    assert start is not None
    return start.missing


def everything_that_happens(rank: int, base: str) -> dict[str, Any]:
    """All parts, in the order of the tests."""
    place = Path(base)
    found: dict[str, Any] = {}
    local_state(place, found)
    for kind in KINDS:
        evaluated(place / f"evaluated-{kind}", kind, found)
        placeholder(place / f"placeholder-{kind}", kind, found)
        own_buffers(rank, place / f"buffers-{kind}", kind, found)
        versions(place / f"versions-{kind}", kind, found)
        tied_shards(place / f"tied-{kind}", kind, found)
    stages(rank, place, found)
    looked_at(rank, place / "looked", found)
    spread(rank, place, found)
    return found


def local_state(place: Path, found: dict[str, Any]) -> None:
    """State of the shards, in plain tensors: refused for the model's optimizer, exact in extra."""
    state = sharded(0, LocalMomentum)
    step(state, 1)
    manager = CheckpointManager(place / "local", timeout_s=WAIT_S)
    manager.resume(TrainState(state.model))
    found["local refused"] = outcome(lambda: manager.save(1, state).wait())
    manager.close()
    for kind in KINDS:
        state, fresh = sharded(0, LocalMomentum), sharded(1, LocalMomentum)
        for one in (state, fresh):
            one.extra, one.optimizer = {"optimizer": one.optimizer}, None
        step(state, 1, state.extra["optimizer"])
        save(place / f"local-{kind}", kind, state)
        found[f"local missing {kind}"] = resume(place / f"local-{kind}", fresh)
        for one in (state, fresh):
            step(one, 2, one.extra["optimizer"])
        found[f"local {kind}"] = full(state.model.state_dict()), full(fresh.model.state_dict())


def evaluated(root: Path, kind: Kind, found: dict[str, Any]) -> None:
    """A forward before the resume leaves the outermost module whole."""
    state, fresh = sharded(0), sharded(1)
    step(state, 1)
    save(root, kind, state)
    with torch.no_grad():
        fresh.model(torch.ones(2, 4))
    found[f"evaluated missing {kind}"] = resume(root, fresh)
    for one in (state, fresh):
        step(one, 2)
    found[f"evaluated {kind}"] = full(state.model.state_dict()), full(fresh.model.state_dict())


def placeholder(root: Path, kind: Kind, found: dict[str, Any]) -> None:
    """The best weights are at first the sharded live ones, later a copy."""
    state, fresh = sharded(0), sharded(1)
    state.extra["best"] = copy.deepcopy(state.model.state_dict())
    best = full(state.extra["best"])
    step(state, 1)
    save(root, kind, state)
    fresh.extra["best"] = fresh.model.state_dict()
    resume(root, fresh)
    found[f"placeholder {kind}"] = full(state.model.state_dict()), full(fresh.model.state_dict())
    found[f"placeholder best {kind}"] = best, full(fresh.extra["best"])
    found[f"placeholder kept {kind}"] = all(isinstance(value, DTensor) for value in fresh.extra["best"].values())


def own_buffers(rank: int, root: Path, kind: Kind, found: dict[str, Any]) -> None:
    """The model in extra too, wrapped, with running averages that differ between the ranks."""

    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), broadcast_buffers=False)
        return TrainState(model, extra={"net": model.module})

    state, fresh = build(0), build(1)
    torch.manual_seed(5 + rank)
    state.model(torch.randn(8, 4))
    save(root, kind, state)
    found[f"buffers missing {kind}"] = resume(root, fresh)
    found[f"buffers {kind}"] = dict(state.model.state_dict()), dict(fresh.model.state_dict())


class Turned(nn.Linear):
    """Before version 2 it kept its weight transposed."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def versions(root: Path, kind: Kind, found: dict[str, Any]) -> None:
    """Modules with versions, replicated and sharded, and in the average too."""

    def build(seed: int, *, shard: bool) -> TrainState:
        torch.manual_seed(seed)
        model, ema = nn.Sequential(Turned(4, 4)), nn.Sequential(Turned(4, 4))
        return TrainState(fully_shard(model) if shard else DistributedDataParallel(model), ema=ema)

    for shard in (False, True):
        place = root.with_name(f"{root.name}-{shard}")
        state, fresh = build(0, shard=shard), build(1, shard=shard)
        save(place, kind, state)
        resume(place, fresh)
        for part in ("model", "ema"):
            values = [full(getattr(one, part).state_dict()) for one in (state, fresh)]
            found[f"versions {part} {kind} {shard}"] = tuple(values)


def tied_shards(root: Path, kind: Kind, found: dict[str, Any]) -> None:
    """Shards that are tied here and were not when they were saved."""

    def build(*, tie: bool) -> TrainState:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        if tie:
            model[1].weight = model[0].weight
        return TrainState(fully_shard(model))

    save(root, kind, build(tie=False))
    found[f"tied {kind}"] = outcome(lambda: resume(root, build(tie=True)))


def spread(rank: int, place: Path, found: dict[str, Any]) -> None:
    """An optimizer whose state is spread over the ranks: refused, and kept in the way that the hint tells."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def build() -> tuple[TrainState, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
        return TrainState(model, extra={}), optimizer

    state, optimizer = build()
    step(state, 1, optimizer)
    for where in ("optimizer", "extra"):
        wrong = TrainState(state.model, optimizer) if where == "optimizer" else state
        state.extra = {"zero": optimizer}
        manager = CheckpointManager(place / f"spread-{where}", timeout_s=WAIT_S)
        manager.resume(TrainState(state.model))
        found[f"spread {where}"] = outcome(lambda: manager.save(1, wrong).wait())  # noqa: B023 - called at once
        manager.close()
    for to in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=to)
        if rank == to:
            state.extra = {"zero": optimizer.state_dict()}
    save(place / "spread", "model", state)
    fresh, other = build()
    resume(place / "spread", fresh)
    assert fresh.extra is not None
    other.load_state_dict(fresh.extra["zero"])
    step(state, 2, optimizer)
    step(fresh, 2, other)
    found["spread"] = full(state.model.state_dict()), full(fresh.model.state_dict())


def stages(rank: int, place: Path, found: dict[str, Any]) -> None:
    """Each rank holds another model: refused together, and saved by a manager for each."""
    groups = [dist.new_group([0]), dist.new_group([1])]

    def build(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for kind in ("dcp", "model"):
        manager = CheckpointManager(place / f"stages-{kind}", kinds=(kind,), timeout_s=WAIT_S)
        manager.resume(build(rank))
        found[f"stages {kind}"] = outcome(lambda: manager.save(1, build(rank)).wait())  # noqa: B023 - called at once
        manager.close()
    state, fresh = build(rank), build(7)
    root = place / f"stage{rank}"
    manager = CheckpointManager(root, process_group=groups[rank], timeout_s=WAIT_S)
    manager.resume(state)
    manager.save(1, state).wait()
    manager.close()
    manager = CheckpointManager(root, process_group=groups[rank], timeout_s=WAIT_S)
    manager.resume(fresh)
    manager.close()
    found["own stage"] = dict(state.model.state_dict()), dict(fresh.model.state_dict())


def looked_at(rank: int, root: Path, found: dict[str, Any]) -> None:
    """One rank looked into the state of a parameter that has none, which makes an empty one."""
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["used"](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank == 0:
        found["steps"] = [float(optimizer.state[p].get("step", 0)) for p in model.parameters()]
    state = TrainState(model, optimizer)
    manager = CheckpointManager(root, timeout_s=WAIT_S)
    manager.resume(state)
    found["looked at"] = outcome(lambda: manager.save(1, state).wait())
    manager.close()
