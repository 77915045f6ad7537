"""What a rank does: saves and loads, and leaves what it found for the test to compare."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ckptmirror.core.errors import CkptMirrorError, LocalStorageFull, UsageError
from ckptmirror.core.model import Artifact, Attempt, Kind, Meta
from ckptmirror.core.names import SaveName, tmp_name
from ckptmirror.formats import LoadReport, LoadTarget, TrainState, WriteContext, get_format
from ckptmirror.formats.artifacts import ArtifactStream
from ckptmirror.formats.capture import capture, snapshot_from_tree, snapshot_tree
from ckptmirror.formats.emergency import write_emergency
from ckptmirror.formats.sidecars import load_sidecars, write_sidecars
from ckptmirror.local.directories import rename_noreplace
from ckptmirror.ranks.host_copy import HostCopier

SAVE_ID = "1f0c9a2e" * 4
STEP = 200
KINDS: tuple[Kind, ...] = ("dcp", "model")


class Network(nn.Module):
    """Uneven sizes, tied weights, running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 3)
        self.outer = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.outer(self.inner(self.embed(tokens)))))


def make_state(how: str, seed: int = 0) -> TrainState:
    """Return a seeded state, the same on every rank: "plain", "ddp" or "fsdp"."""
    torch.manual_seed(seed)
    model: nn.Module = Network()
    ema: nn.Module = copy.deepcopy(model)
    if how == "fsdp":
        for one in (model, ema):
            fully_shard(one.inner)
            fully_shard(one)
    elif how == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, extra={"epoch": 0})


def train(state: TrainState, steps: int, rank: int) -> None:
    """Train with data that differ between ranks."""
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        state.model(torch.randint(0, 7, (6,))).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()
        state.extra["epoch"] += 1


def whole(state: TrainState) -> dict[str, Any]:
    """Collective: return the unsharded model, optimizer and EMA, in host memory (complete on every rank)."""

    def full(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: full(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [full(value) for value in tree]
        if isinstance(tree, DTensor):
            return tree.full_tensor().cpu()
        return tree.clone() if isinstance(tree, torch.Tensor) else tree

    options = StateDictOptions()
    return {
        "model": full(get_model_state_dict(state.model, options=options)),
        "optimizer": full(state.optimizer.state_dict()),
        "ema": full(get_model_state_dict(state.ema, options=options)),
        "scheduler": state.scheduler.state_dict(),
        "extra": state.extra,
    }


def context(root: Path, group: Any, *, leader: bool | None = None) -> WriteContext:
    """Return this rank's context."""
    rank = dist.get_rank()
    is_leader = rank == 0 if leader is None else leader
    return WriteContext(root, SaveName(STEP), SAVE_ID, KINDS, rank, dist.get_world_size(), is_leader, group)


def save(root: Path, state: TrainState, here: WriteContext, *, host_copy: bool = True) -> Meta:
    """Save every kind in the way of the flow, and return the meta on every rank."""
    live = capture(state, step=STEP, kinds=KINDS, rank=here.rank, world_size=here.world_size)
    if host_copy:
        live = snapshot_from_tree(HostCopier().copy(snapshot_tree(live)).tree)
    mine: list[Artifact] = []
    for kind in KINDS:
        mine += get_format(kind).write(live, here)
    mine += write_sidecars(live, here)[0]
    return finish(root, mine, here, live.architecture)


def finish(root: Path, mine: list[Artifact], here: WriteContext, architecture: str | None) -> Meta:
    """Exchange the artifacts, check and publish on the leader, and return the meta."""
    reports: list[Any] = [None] * here.world_size
    dist.all_gather_object(reports, mine)
    together = [artifact for report in reports for artifact in report]
    if here.is_leader:
        for kind in KINDS:
            get_format(kind).check(here, together)
        for name in sorted({artifact.path.partition("/")[0] for artifact in together}):
            rename_noreplace(root / tmp_name(name, SAVE_ID), root / name)
    dist.barrier()
    return meta_of(KINDS, together, architecture)


def meta_of(kinds: tuple[Kind, ...], artifacts: list[Artifact], architecture: str | None) -> Meta:
    """Return a meta that names the artifacts."""
    return Meta(
        run_id="0" * 32,
        attempt=Attempt("0" * 32, 0, None),
        step=STEP,
        save_id=SAVE_ID,
        save_number=1,
        kinds=kinds,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        nodes=1,
        node=0,
        artifacts=tuple(artifacts),
        architecture_hash=architecture,
    )


def load(root: Path, kind: Kind, meta: Meta, state: TrainState, rank: int, world_size: int) -> LoadReport:
    """Load one kind, sidecars included."""
    target = LoadTarget(state, rank, world_size)
    tensors = get_format(kind).load(root, meta, target)
    if kind == "emergency":
        return tensors
    rest = load_sidecars(root, meta, target)
    return tensors + rest


def round_trip(how: str, directory: Path, group: Any) -> dict[str, Any]:
    """Save with all ranks, load into fresh states with all ranks, with both kinds."""
    rank = dist.get_rank()
    state = make_state(how)
    train(state, 3, rank)
    expected = whole(state)
    meta = save(directory, state, context(directory, group))
    generator = torch.get_rng_state()
    found = {}
    for kind in KINDS:
        other = make_state(how, seed=1)
        report = load(directory, kind, meta, other, rank, 2)
        found[kind] = {**whole(other), "missing": report.missing, "rng": torch.get_rng_state()}
    return {"expected": {**expected, "rng": generator, "missing": ()}, "found": found, "meta": meta}


def read_foreign(how: str, directory: Path) -> dict[str, Any]:
    """Load, on these ranks, what another number of ranks saved; the meta lies in the directory."""
    meta = pickle.loads((directory / "meta.pickle").read_bytes())
    found = {}
    for kind in KINDS:
        other = make_state(how, seed=1)
        report = load(directory, kind, meta, other, dist.get_rank(), 2)
        found[kind] = {**whole(other), "missing": report.missing}
    return {"found": found}


def emergency(how: str, directory: Path) -> dict[str, Any]:
    """Write an emergency snapshot, then load it; count that no collective was needed by doing it in different order."""
    rank = dist.get_rank()
    state = make_state(how)
    train(state, 3, rank)
    expected = whole(state)
    target = directory / "emergency_step_000200_20261121T131500Z"
    if rank == 1:  # one rank after the other: a collective in between would never return
        dist.barrier()
    mine = write_emergency(state, target, save_id=SAVE_ID, rank=rank, world_size=2, step=STEP)
    if rank == 0:
        dist.barrier()
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, mine)
    meta = meta_of(("emergency",), [artifact for report in reports for artifact in report], None)
    other = make_state(how, seed=1)
    report = load(target.parent, "emergency", meta, other, rank, 2)
    return {"expected": expected, "found": whole(other), "missing": report.missing, "meta": meta}


class Shadow:
    """An object that keeps weights of its own, as they are sharded."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "recent": deque([self.weights.get("inner.weight")], maxlen=3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]
        assert state["recent"][0].to_local().equal(self.weights["inner.weight"].to_local())


def sharded_extra(how: str, value: float) -> dict[str, Any]:
    """Return the user's own values, sharded as the model is, each tensor full of numbers from ``value`` on."""

    def numbers() -> dict[str, Any]:
        model = make_state(how).model
        with torch.no_grad():
            for _, tensor in sorted(model.named_parameters()):
                whole = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) + value
                tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
        return {name: tensor.detach() for name, tensor in model.named_parameters()}

    one, two, three = numbers(), numbers(), numbers()
    critic = make_state(how)
    if value:
        train(critic, 2, dist.get_rank())
    return {
        "dict": one,
        "list": [two["inner.weight"], "text"],
        "tuple": (two["inner.bias"],),
        "deque": deque([two["outer.weight"]], maxlen=2),
        "marked": defaultdict(list, {"a": [two["outer.bias"]]}),
        "object": Shadow(three),
        "objects": [Shadow(numbers())],
        "critic": critic.model,
        "optimizers": {"critic": critic.optimizer},
    }


def extra_tensors(extra: dict[str, Any]) -> list[Any]:
    """Return every tensor of :func:`sharded_extra`."""
    objects = [extra["object"], *extra["objects"]]
    return [
        *extra["dict"].values(),
        *(extra["list"][0], extra["tuple"][0], extra["deque"][0], extra["marked"]["a"][0]),
        *(tensor for one in objects for tensor in one.weights.values()),
        *(moments["exp_avg"] for moments in extra["optimizers"]["critic"].state.values()),
    ]


def extra_round_trip(how: str, directory: Path, group: Any) -> dict[str, Any]:
    """Save sharded values of the user's own, with every kind, and load them; leave what cannot be saved, by message."""
    rank = dist.get_rank()
    state = make_state(how)
    state.extra = sharded_extra(how, 5.0)
    expected = [tensor.full_tensor() for tensor in extra_tensors(state.extra)]
    meta = save(directory, state, context(directory, group))
    target = directory / "emergency_step_000200_20261121T131500Z"
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, write_emergency(state, target, save_id=SAVE_ID, rank=rank, world_size=2, step=STEP))
    emergency_meta = meta_of(("emergency",), [artifact for report in reports for artifact in report], None)
    found: dict[str, Any] = {}
    for kind in (*KINDS, "emergency"):
        other = make_state(how, seed=1)
        other.extra = sharded_extra(how, 0.0)
        before = extra_tensors(other.extra)[: -2 * len(other.extra["dict"])]
        if kind == "emergency":
            report = load(target.parent, kind, emergency_meta, other, rank, 2)
        else:
            report = load(directory, kind, meta, other, rank, 2)
        after = extra_tensors(other.extra)
        found[kind] = {
            "tensors": [tensor.full_tensor() for tensor in after],
            "in_place": all(now is then for now, then in zip(after, before, strict=False)),
            "missing": report.missing,
        }
        other.model, other.optimizer = other.extra["critic"], other.extra["optimizers"]["critic"]
        other.extra["epoch"] = 0
        train(other, 1, rank)
    refused = refused_shards(how, rank)
    try:
        lazy = make_state(how)
        lazy.extra = {"object": Shadow({})}
        load(directory, "model", meta, lazy, rank, 2)
    except UsageError as error:
        refused["lazy"] = error.message
    empty = make_state(how)
    empty.extra = {"list": []}
    whole = load(directory, "model", meta, empty, rank, 2).missing
    return {"expected": expected, "found": found, "refused": refused, "meta": meta, "whole": whole}


def refused_shards(how: str, rank: int) -> dict[str, str]:
    """Return the message of each save with a DTensor where no load could restore it."""
    weight = make_state(how).model.inner.weight.detach()
    partial = DTensor.from_local(torch.ones(2), weight.device_mesh, [Partial()])
    row = DTensor.from_local(torch.ones(2), weight.device_mesh, [Replicate()])
    critic = make_state(how).optimizer
    critic.state[critic.param_groups[0]["params"][0]] = {"factors": [row]}
    messages = {}
    for name, extra, moment in (
        ("elsewhere", {"critic": critic}, None),
        ("set", {"here": {weight}}, None),
        ("partial", {"here": [partial]}, None),
        ("moment", {}, {"factors": [row]}),
    ):
        state = make_state(how)
        state.extra = extra
        if moment is not None:
            state.optimizer.state[next(state.model.parameters())] = moment
        try:
            capture(state, step=STEP, kinds=("dcp",), rank=rank, world_size=2)
        except UsageError as error:
            messages[name] = error.message
    return messages


class _FullDisk(ArtifactStream):
    def write(self, data: Any) -> int:
        if dist.get_rank() == 1 and self.tell() > 600:
            self.error = self.error or LocalStorageFull("no space left on the device")
        return super().write(data)


def full_disk(how: str, directory: Path, group: Any) -> dict[str, Any]:
    """Rank 1's disk is full: every rank must learn it, and no rank may hang."""
    import ckptmirror.formats.artifacts as artifacts

    artifacts.ArtifactStream = _FullDisk
    state = make_state(how)
    train(state, 1, dist.get_rank())
    here = context(directory, group)
    live = capture(state, step=STEP, kinds=("dcp",), rank=here.rank, world_size=2)
    try:
        get_format("dcp").write(live, here)
    except CkptMirrorError as error:
        return {"error": type(error).__name__, "message": error.message}
    return {"error": None}


def two_disks(how: str, directory: Path, group: Any) -> dict[str, Any]:
    """Each rank is a node of its own: each checks its own directory, both have the same .metadata."""
    root = directory / f"node{dist.get_rank()}"
    root.mkdir()
    state = make_state(how)
    train(state, 2, dist.get_rank())
    here = context(root, group, leader=True)
    live = capture(state, step=STEP, kinds=("dcp",), rank=here.rank, world_size=2)
    mine = get_format("dcp").write(live, here)
    get_format("dcp").check(here, mine)
    rename_noreplace(root / tmp_name("dcp_000200", SAVE_ID), root / "dcp_000200")
    return {"paths": [(artifact.path, artifact.rank, artifact.digest.crc32c) for artifact in mine]}


def play(rank: int, scenario: str, directory: Path) -> None:
    """Run one scenario and leave its result as ``rank<r>.pickle``."""
    group = dist.new_group(backend="gloo")
    name, _, how = scenario.partition("-")
    if name == "roundtrip":
        result = round_trip(how, directory, group)
    elif name == "foreign":
        result = read_foreign(how, directory)
    elif name == "emergency":
        result = emergency(how, directory)
    elif name == "extra":
        result = extra_round_trip(how, directory, group)
    elif name == "fulldisk":
        result = full_disk(how, directory, group)
    else:
        result = two_disks(how, directory, group)
    (directory / f"rank{rank}.pickle").write_bytes(pickle.dumps(result))
