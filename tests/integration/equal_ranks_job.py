"""What two or three ranks do in one job for test_save_equal_ranks.py: each part notes what happened on its rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Kind
from tests.kit.roots import leftovers, whole

WAIT_S = 60.0
KINDS: dict[str, tuple[Kind, ...]] = {"dcp": ("dcp",), "model": ("model",), "both": ("dcp", "model")}


class Lines(logging.Handler):
    """What the package logs on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Layer(nn.Module):
    """A layer with an expert, as every rank names its own, and a running average."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.expert = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.expert(self.norm(self.shared(batch)))
        return out


def new_state() -> TrainState:
    torch.manual_seed(0)
    model = Layer()
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1), extra={"seen": 0})


def step(state: TrainState, module: nn.Module | None = None, *, seed: int) -> None:
    """One step with the data of ``seed``; ``module`` runs in place of the model."""
    torch.manual_seed(seed)
    batch = torch.randn(8, 4)
    state.optimizer.zero_grad()
    (module or state.model)(batch).square().mean().backward()
    state.optimizer.step()
    state.extra["seen"] += seed


def saved(manager: CheckpointManager, at: int, state: TrainState) -> tuple[str, str, str, int]:
    """Save; what the handle raises, its text and hint, and the exit code of the cause."""
    try:
        manager.save(at, state).wait()
    except CkptMirrorError as error:
        return type(error.__cause__).__name__, str(error), error.hint, getattr(error.__cause__, "exit_code", -1)
    return "saved", "", "", 0


def values(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.model.state_dict().items()}


def everything_that_happens(rank: int, base: str, kinds: str) -> dict[str, Any]:
    """All parts, in the order of the tests."""
    place = Path(base)
    found: dict[str, Any] = {}
    lines = Lines()
    logging.getLogger("ckptmirror").addHandler(lines)
    unequal(rank, place / "unequal", KINDS[kinds], found)
    replicas(rank, place / "replicas", KINDS[kinds], found, lines)
    counters(rank, place / "counters", KINDS[kinds], found, lines)
    replicated_shards(rank, place / "tensors", KINDS[kinds], found)
    return found


def unequal(rank: int, root: Path, kinds: tuple[Kind, ...], found: dict[str, Any]) -> None:
    """Ranks that go apart in several ways; after each the next save, of equal ranks, works."""
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    state = new_state()
    manager.resume(state)
    step(state, seed=1)
    found["equal"] = saved(manager, 1, state)
    last = dist.get_world_size() - 1

    def apart(name: str, at: int, change: Callable[[], object]) -> None:
        kept = {n: v.clone() for n, v in state.model.state_dict().items()}, state.optimizer.state_dict()
        kept = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, kept)
        with torch.no_grad():
            change()
        found[name] = saved(manager, at, state)
        dist.barrier()
        found[f"left by {name}"] = sorted(whole(root)), leftovers(root)
        dist.barrier()
        state.model.load_state_dict(kept[0])
        state.optimizer.load_state_dict(kept[1])
        found[f"after {name}"] = saved(manager, at, state)

    def moment() -> None:
        if rank == last:
            state.optimizer.state[state.model.shared.weight]["exp_avg"][0, 0] += 1e-3

    apart("expert", 2, lambda: state.model.expert.weight.add_(rank))
    apart("local steps", 3, lambda: [p.add_(0.01 * rank) for p in state.model.parameters()])
    apart("moment", 4, moment)
    apart("frozen", 5, lambda: rank == last and state.model.shared.bias.requires_grad_(False).add_(1))

    with torch.no_grad():
        state.model.expert.weight.add_(rank)
    found["before the emergency"] = saved(manager, 6, state)
    manager.save_emergency_checkpoint(7, state)
    found["emergency saved"] = values(state)
    manager.close()
    dist.barrier()
    fresh = new_state()
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    start = manager.resume(fresh)
    found["emergency resumed"] = start and (start.step, start.kind), values(fresh)
    manager.close()


def snapshot_of_unequal(rank: int, root: Path, differ_in: str, stage: int | None) -> tuple[str, Any, Any]:
    """Ranks whose models, or whose optimizers' states, have other names: a save is refused, a snapshot is taken."""

    def new() -> TrainState:
        names = "ab" if differ_in == "moments" or rank == 0 else "ac"
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    state = new()
    for number, module in enumerate(state.model.values()):
        nn.init.constant_(module.weight, 10.0 * rank + number)
        if differ_in != "moments" or number != rank:
            module.weight.grad = torch.full_like(module.weight, rank + 1.0)
    with CheckpointManager(root, kinds=("dcp",), timeout_s=WAIT_S, pp_rank=stage) as manager:
        manager.resume(new())
        state.optimizer.step()
        refused = saved(manager, 1, state)
        manager.save_emergency_checkpoint(2, state)
    dist.barrier()
    again = new()
    with CheckpointManager(root, kinds=("dcp",), timeout_s=WAIT_S, pp_rank=stage) as manager:
        manager.resume(again)
    return refused[0], values(state), values(again)


def replicas(rank: int, root: Path, kinds: tuple[Kind, ...], found: dict[str, Any], lines: Lines) -> None:
    """Data-parallel training, as it is by default: running averages, generators and extra values of each rank's own.

    From the second step on, each has an average of the weights of its own, too.
    """
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    state = replace(new_state(), ema=nn.Linear(2, 2))
    manager.resume(state)
    parallel = DistributedDataParallel(state.model)
    lines.lines.clear()
    for at in (1, 2, 3):
        step(state, parallel, seed=10 * at + rank)
        nn.init.constant_(state.ema.bias, float(rank if at > 1 else 0))
        found[f"replicas {at}"] = saved(manager, at, state)
    found["replicas"] = values(state)
    found["replicas lines"] = list(lines.lines)
    manager.close()


class Flat:
    """Averages in one tensor."""

    def __init__(self, rank: int) -> None:
        self.shadow = torch.full((3,), float(rank))

    def state_dict(self) -> torch.Tensor:
        return self.shadow

    def load_state_dict(self, state: torch.Tensor) -> None:
        self.shadow = state


def save_with_average(rank: int, root: Path, form: str, kinds: tuple[Kind, ...] = ("dcp", "model")) -> str:
    """An average that only rank 0 keeps, and the other has without memory; or one in a single tensor, that differs."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    average: Any = Flat(rank) if form == "one tensor" else nn.Linear(2, 2, device="cpu" if rank == 0 else "meta")
    state = TrainState(model, ema=average)
    with CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S) as manager:
        manager.resume(state)
        return saved(manager, 1, state)[0]


class Counting(nn.Linear):
    """A layer that counts, and saves that beside its tensors."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counters(rank: int, root: Path, kinds: tuple[Kind, ...], found: dict[str, Any], lines: Lines) -> None:
    """A number that each rank counts for itself: alike at the first save, then not."""
    torch.manual_seed(0)
    state = TrainState(Counting(2, 2))
    lines.lines.clear()
    with CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S) as manager:
        manager.resume(state)
        for at in (1, 2, 3):
            state.model.calls = 7 * at + (rank if at > 1 else 0)
            found[f"counters {at}"] = saved(manager, at, state)
            if at == 1:
                found["counters alike"] = [line for line in lines.lines if "_extra_state" in line]
    found["counters apart"] = [line for line in lines.lines if "_extra_state" in line]


def replicated_shards(rank: int, root: Path, kinds: tuple[Kind, ...], found: dict[str, Any]) -> None:
    """DTensors: shards differ as they should, what is replicated does not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Linear(dist.get_world_size() * 2, 4, bias=False)
    model.norm = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    state = TrainState(model, None, extra={"rank": rank})
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    manager.resume(state)
    found["shards"] = saved(manager, 1, state)
    norm = model.norm
    assert isinstance(norm, DTensor)
    with torch.no_grad():
        norm.to_local().add_(rank)
    found["replicated apart"] = saved(manager, 2, state)
    with torch.no_grad():
        norm.to_local().sub_(rank)
    found["shards again"] = saved(manager, 2, state)
    manager.close()
