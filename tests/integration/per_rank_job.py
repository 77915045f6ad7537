"""What the ranks of test_per_rank.py do: training with experts and running averages that each rank has of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Kind
from ckptmirror.core.per_rank import PerRank
from ckptmirror.formats import load_parts
from tests.integration.equal_ranks_job import saved

WAIT_S = 60.0
OWN = ("experts.*", "norm.running_*", "norm.num_batches_tracked")


class Mixture(nn.Module):
    """A layer that all ranks share, and experts of which each rank trains its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, batch: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.shared(batch))
        for number in chosen:
            out = out + self.experts[number](out)
        return out


def new_state(rank: int, own: PerRank = OWN) -> TrainState:
    """What the command builds: what is shared is equal on all ranks, experts are not."""
    torch.manual_seed(0)
    model = Mixture()
    torch.manual_seed(100 + rank)
    for expert in model.experts:
        nn.init.normal_(expert.weight)
    torch.manual_seed(7)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1), ema=ema, per_rank=own)


def step(state: TrainState, rank: int, number: int) -> None:
    """One step on data of the rank's own; gradients of what is shared are averaged.

    No rank trains every expert, so the optimizers have state of different ones.
    """
    torch.manual_seed(1000 * number + rank)
    chosen = [0, 1 + rank % 2]
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 4), chosen).square().mean().backward()
    for name, parameter in state.model.named_parameters():
        if not name.startswith("experts."):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    state.optimizer.step()
    state.ema.update_parameters(state.model)


def held(state: TrainState) -> dict[str, Any]:
    """Copies of everything that a rank has."""
    tree = {"model": dict(state.model.state_dict()), "optimizer": state.optimizer.state_dict()}
    if state.ema is not None:
        tree["ema"] = dict(state.ema.state_dict())
    copied: dict[str, Any] = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)
    return copied


def attempt(call: Callable[[], Any]) -> tuple[str, str, str]:
    """The kind of the error of ``call``, its text and hint."""
    try:
        call()
    except CkptMirrorError as error:
        return type(error).__name__, str(error), str(error.hint)
    return "done", "", ""


def resumed(base: Path, rank: int, kinds: tuple[Kind, ...], state: TrainState, **how: Any) -> Any:
    manager = CheckpointManager(base, kinds=kinds, timeout_s=WAIT_S)
    try:
        return manager.resume(state, **how)
    finally:
        manager.close()
        dist.barrier()


def everything_that_happens(rank: int, base: str, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    root = Path(base) / "root"
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    state = new_state(rank)
    state.extra = {"tokens": 7 + rank}
    manager.resume(state)
    for number in (1, 2):
        step(state, rank, number)
    found["save"] = saved(manager, 2, state)
    found["at 2"] = held(state)
    manager.close()
    dist.barrier()

    again = new_state(rank)
    resumed(root, rank, kinds, again)
    found["resumed at 2"] = held(again)
    undeclared = new_state(rank, ())
    resumed(root, rank, kinds, undeclared)
    found["resumed without per_rank"] = held(undeclared)
    for number in (3, 4):
        step(state, rank, number)
        step(again, rank, number)
    found["at 4"], found["resumed and at 4"] = held(state), held(again)

    with_rank_0s = new_state(rank)
    kept, load_parts.own_for = load_parts.own_for, lambda *_: None
    found["rank 0's"] = attempt(lambda: resumed(root, rank, kinds, with_rank_0s))
    load_parts.own_for = kept

    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    manager.resume(new_state(rank))
    manager.save_emergency_checkpoint(4, again)
    manager.close()
    dist.barrier()
    last = new_state(rank)
    info = resumed(root, rank, kinds, last)
    found["emergency"] = info.step, info.kind
    found["resumed from the emergency"] = held(last)
    return found


def refusals(rank: int, base: str, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    manager = CheckpointManager(Path(base) / "refusals", kinds=kinds, timeout_s=WAIT_S)
    state = new_state(rank)
    found["typo"] = attempt(lambda: manager.resume(new_state(rank, ("expert.*",))))
    manager.resume(state)
    step(state, rank, 1)
    state.per_rank = ("experts.1.*", "experts.2.*", *OWN[1:])
    found["some not declared"] = saved(manager, 1, state)
    state.per_rank = OWN if rank else OWN[:1]
    found["declared by some"] = saved(manager, 1, state)
    state.per_rank = ("expert.*",)
    found["typo at save"] = attempt(lambda: manager.save(1, state).wait())
    state.per_rank = OWN
    if rank == dist.get_world_size() - 1:
        with torch.no_grad():
            state.model.shared.weight[0, 0] += 1
    found["shared"] = saved(manager, 1, state)
    manager.close()
    dist.barrier()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(2 * dist.get_world_size(), 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    manager = CheckpointManager(Path(base) / "shards", kinds=kinds, timeout_s=WAIT_S)
    manager.resume(TrainState(model))
    found["shards"] = attempt(lambda: manager.save(1, TrainState(model, per_rank=("weight",))).wait())
    return found


def new_sharded(rank: int) -> TrainState:
    """A model cut by ``fully_shard``, whose running averages, and a layer that is not cut, are each rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
    torch.manual_seed(rank)
    nn.init.normal_(model[2].weight)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False), per_rank=("1.*_*", "2.*"))


def locally(tree: Any) -> Any:
    """The same, with a plain copy of this rank's piece in place of each shard."""
    return torch.utils._pytree.tree_map_only(DTensor, lambda one: one.to_local().clone(), tree)


def sharded(rank: int, base: str, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """What is each rank's own, beside shards."""
    found: dict[str, Any] = {}
    root = Path(base) / "sharded"
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    state = new_sharded(rank)
    manager.resume(state)
    torch.manual_seed(rank)
    state.model(torch.randn(8, 4)).square().mean().backward()
    state.optimizer.step()
    found["save"] = saved(manager, 1, state)
    found["at 1"] = locally(held(state))
    again = new_sharded(rank)
    found["load"] = attempt(lambda: manager.load(again, 1))
    found["loaded at 1"] = locally(held(again))
    manager.save_emergency_checkpoint(2, state)
    manager.close()
    dist.barrier()
    last = new_sharded(rank)
    resumed(root, rank, kinds, last)
    found["resumed at 2"] = locally(held(last))
    return found


def mean(values: list[Any], _rank: int, _world_size: int) -> Any:
    """The mean of those that have one; None if no rank has one."""
    assert type(values) is list
    known = [value for value in values if value is not None]
    return torch.stack([one.double() for one in known]).mean(0).to(known[0].dtype) if known else None


def of_one(values: list[Any], rank: int, _world_size: int) -> Any:
    assert type(values) is list  # as torch.stack and torch.cat take them
    return values[rank % len(values)]


MERGED = {"experts.0.*": mean, "experts.*": of_one, "norm.running_*": mean, "norm.num_batches_tracked": of_one}


def expected(name: str, values: list[Any], rank: int) -> Any:
    """What MERGED makes of what the ranks have under a name."""
    if name.startswith(("experts.0.", "norm.running_")):
        return mean(values, rank, 0)
    return of_one(values, rank, 0) if name.startswith(("experts.", "norm.num")) else values[0]


def fails(values: list[Any], rank: int, world_size: int) -> Any:
    if rank == world_size - 1:
        raise ValueError("nobody knows how")
    return values[0]


def widens(values: list[Any], rank: int, world_size: int) -> Any:
    return torch.cat(values) if rank == world_size - 1 and values[0].dim() else values[0]


def sharded_others(rank: int, base: str, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """Another number of ranks, for what was saved beside shards."""
    found: dict[str, Any] = {}
    root = Path(base) / "sharded"
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    state = new_sharded(rank)
    state.per_rank = {"2.weight": mean, "*": of_one}
    found["loaded"] = attempt(lambda: manager.load(state, 1))
    found["at 1"] = locally(held(state))
    again = new_sharded(rank)
    again.per_rank = {"2.weight": mean, "1.*_*": of_one, "2.*": of_one}
    info = manager.resume(again)
    found["resumed"] = info and (info.step, info.kind)
    found["at 2"] = locally(held(again))
    manager.close()
    return found


def others(rank: int, base: str, kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """Another number of ranks."""
    found: dict[str, Any] = {}
    root = Path(base) / "root"
    state = new_state(rank)
    before = held(state)
    manager = CheckpointManager(root, kinds=kinds, timeout_s=WAIT_S)
    found["resume"] = attempt(lambda: manager.resume(state))
    found["load"] = attempt(lambda: manager.load(state, 2))
    state.per_rank = {**dict.fromkeys(OWN), "experts.*": of_one}
    found["some without a function"] = attempt(lambda: manager.load(state, 2))
    for name, merge in (("fails", fails), ("widens", widens)):
        state.per_rank = {**MERGED, "experts.0.*": merge}
        found[name] = attempt(lambda: manager.resume(state)), attempt(lambda: manager.load(state, 2))
    state.per_rank, state.extra = MERGED, {"tokens": 0}
    state.merge_extra = {"tokens": fails}
    found["extra fails"] = attempt(lambda: manager.load(state, 2))
    state.per_rank, state.extra, state.merge_extra = OWN, None, None
    found["before"], found["after"] = before, held(state)
    merged = new_state(rank, MERGED)
    found["merged"] = attempt(lambda: manager.load(merged, 2)), held(merged)
    info = manager.resume(state, exclude=("model", "optimizer"))
    found["without"] = info and info.step
    found["told without"] = info and info.missing
    again = new_state(rank, MERGED)
    info = manager.resume(again)
    found["resumed"] = info and (info.step, info.kind), held(again)
    found["told"] = info and info.missing
    step(again, rank, 5)
    found["save"] = saved(manager, 5, again)
    manager.close()
    dist.barrier()
    last = new_state(rank, MERGED)
    resumed(root, rank, kinds, last)
    found["at 5"] = held(again), held(last)
    return found


MESHES = {"replicas": (), "shards": (2,), "shards of replicas": (2, 1)}


def on_mesh(rank: int, base: str, mesh: str, kind: str) -> dict[str, torch.Tensor] | str:
    """Save, if there is nothing yet, else load, a model on a mesh; running averages are each rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    ema = AveragedModel(model)
    if size := MESHES[mesh]:
        for module in (model, ema.module):
            fully_shard(module, mesh=init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard")[-len(size) :]))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer, ema=ema, per_rank=("1.running_mean", "1.running_var"))
    with CheckpointManager(Path(base), kinds=("dcp",), timeout_s=WAIT_S) as manager:
        try:
            if manager.resume(state) is None:
                model[1].running_mean.fill_(rank + 1.0)
                ema.update_parameters(model)
                if kind == "emergency":
                    manager.save_emergency_checkpoint(1, state)
                else:
                    manager.save(1, state).wait()
        except CkptMirrorError as error:
            return str(error)
    values = {**model.state_dict(), **{f"ema.{name}": value for name, value in ema.state_dict().items()}}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in values.items()
    }


def resumed_with_a_list_damaged(rank: int, base: str) -> tuple[list[float], tuple[str, ...]]:
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
    for name, module in model.items():
        nn.init.constant_(module.weight, 1.0 + rank * (name == "a"))
    state = TrainState(model, per_rank=("a.*",))
    with CheckpointManager(Path(base), kinds=("dcp",), timeout_s=WAIT_S) as manager:
        start = manager.resume(state)
        if start is None:
            manager.save(1, state).wait()
        return [float(module.weight) for module in model.values()], start.missing if start is not None else ()
