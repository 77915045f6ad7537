"""A model whose layers are dealt out to stages in any way: what the ranks of each stage do, and what they end with.

Each layer trains by itself, on data that its number and the step decide. So the values after a step do not depend on
which rank holds which layer, and a job in one process says what they must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local import crashpoints
from tests.kit.processes import outcome, run_ranks

WAIT_S = 60.0
LAYERS = (0, 1, 2, 3)


class Part(nn.Module):
    """Some layers of the model, under the names that they have in all of it."""

    def __init__(self, layers: Sequence[int], called: str) -> None:
        super().__init__()
        self.called = called
        self.add_module(called, nn.ModuleDict())
        for number in layers:
            torch.manual_seed(number)
            self.dealt[str(number)] = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    @property
    def dealt(self) -> Any:
        """The layers, by number."""
        return getattr(self, self.called)

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, layer in self.dealt.items():
            torch.manual_seed(1000 * step + int(name))
            total = total + layer(torch.rand(5, 4)).square().mean()
        return total


def build(layers: Sequence[int], mesh: DeviceMesh | None = None, called: str = "layers") -> TrainState:
    """The state of a rank that holds these layers, sharded over the mesh."""
    model: Any = Part(layers, called)
    if mesh is not None:
        for layer in model.dealt.values():
            fully_shard(layer, mesh=mesh)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if not n.endswith("weight")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return TrainState(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), extra={})


def train(state: TrainState, step: int) -> None:
    state.model(step).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()


def values(state: TrainState) -> dict[str, Any]:
    """Every tensor of model and optimizer, whole, and the settings of each parameter, by its name in ``layers``."""

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    found = {f"model.{name}": whole(value).clone() for name, value in state.model.state_dict().items()}
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            found[f"settings.{name}"] = (group["lr"], group["weight_decay"])
            for key, value in state.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{key}"] = whole(value).clone()
    return {name.replace(f"{state.model.called}.", "layers."): value for name, value in found.items()}


@dataclass(frozen=True)
class Job:
    """What a job does.

    Attributes:
        base: The directory of the roots.
        held: The layers of each rank. Ranks with the same layers are one stage.
        steps: What is trained and saved, from the save on that the job resumes from.
        nodes: The node of each rank, a letter each; "": one node.
        mirrored: Whether there is a mirror.
        dies: The rank that is killed in the last save; -1: none.
        crash_at: The point at which it dies.
        snapshot: The step of an emergency snapshot at the end; 0: none.
        names_stages: Whether ranks pass pp_rank.
        sharded: Whether the ranks of a stage share it out; else they are replicas.
        differs: The rank whose parameters are changed before the save; -1: none.
        called: What the model calls its layers. With another name than when they were saved, the resume renames.
    """

    base: Path
    held: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...] = ()
    nodes: str = ""
    mirrored: bool = False
    dies: int = -1
    crash_at: str = ""
    snapshot: int = 0
    names_stages: bool = True
    sharded: bool = True
    differs: int = -1
    called: str = "layers"

    def run(self) -> list[Found]:
        return run_ranks(len(self.held), take_part, self, dead=(self.dies,) if self.dies >= 0 else ())

    def stage_of(self, rank: int) -> int:
        return sorted(set(self.held)).index(self.held[rank])


@dataclass
class Found:
    """What a rank found: where it began and with what, what it ended with, and its error."""

    step: int | None = None
    kind: str = ""
    began: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None
    failed: str = ""
    hint: str = ""


def take_part(rank: int, job: Job) -> Found:
    """Resume, then train and save."""
    mesh = None
    for stage in dict.fromkeys(job.held):
        members = [other for other, layers in enumerate(job.held) if layers == stage]
        group = dist.new_group(members)
        if rank in members and len(members) > 1 and job.sharded:
            mesh = DeviceMesh.from_group(group, "cpu")
    state = build(job.held[rank], mesh, job.called)
    found = Found()
    try:
        manager = CheckpointManager(
            job.base / (job.nodes[rank] if job.nodes else "root"),
            [f"file://{job.base}/mirror"] if job.mirrored else [],
            kinds=("dcp",),
            pp_rank=job.stage_of(rank) if job.names_stages else None,
            timeout_s=WAIT_S,
        )
    except CkptMirrorError as error:
        return Found(failed=str(error), hint=error.hint)
    try:
        renames = {f"layers.{one}.*": f"{job.called}.{one}.*" for one in LAYERS} if job.called != "layers" else None
        start = manager.resume(state, rename=renames)
        if start is not None:
            found = Found(start.step, start.kind, values(state))
        for step in job.steps:
            train(state, step)
            if rank == job.differs:
                next(state.model.parameters()).data.add_(1.0)
            if step == job.steps[-1] and rank == job.dies:
                manager.wait("committed")
                crashpoints.arm(job.crash_at)
            manager.save(step, state)
        if job.steps:
            manager.wait("mirrored" if job.mirrored else "committed", timeout_s=WAIT_S)
        if job.snapshot:
            train(state, job.snapshot)
            manager.save_emergency_checkpoint(job.snapshot, state)
        found.ended = values(state)
    except CkptMirrorError as error:
        found.failed, found.hint = str(error), error.hint
    finally:
        try:
            manager.close(timeout_s=0.0 if found.failed else WAIT_S)
        except CkptMirrorError as error:
            found.failed = found.failed or str(error)
    return found


def expected(step: int) -> dict[str, Any]:
    """What the whole model holds after a step."""
    state = build(LAYERS)
    for number in range(1, step + 1):
        train(state, number)
    return values(state)


def other_splits_of_what_stages_keep(rank: int, base: str) -> dict[str, tuple[str, str]]:
    """Save an average, and rates that differ between stages; return how this and another split resume each."""
    outcomes = {}
    for what in ("ema", "rates"):
        for split in ("saved", "same", "other"):
            stage = rank // 2
            layers = ((0, 1), (2, 3))[stage] if split != "other" else ((0,), (1, 2, 3))[stage]
            state = build(layers)
            if what == "ema":
                state.ema = torch.optim.swa_utils.AveragedModel(state.model)
            elif split == "saved":
                for group in state.optimizer.param_groups:
                    group["lr"] += stage
            with CheckpointManager(f"{base}/{what}", kinds=("dcp",), pp_rank=stage, timeout_s=WAIT_S) as manager:
                outcomes[f"{what} {split}"] = outcome(lambda: manager.resume(state))[:2]  # noqa: B023 - called here
                if split == "saved":
                    manager.save(1, state)
                elif split == "other":
                    outcomes[f"{what} without"] = outcome(
                        lambda: manager.resume(state, exclude=("ema", "optimizer"))  # noqa: B023 - called here
                    )[:2]
    return outcomes
