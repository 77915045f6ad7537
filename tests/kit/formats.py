"""States to save, and one way to save and load them in every kind: shared by the tests of the formats."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptmirror.core.model import KINDS as ALL_KINDS
from ckptmirror.core.model import Artifact, Attempt, Kind, Meta
from ckptmirror.core.names import SaveName, emergency_dir_name, tmp_name
from ckptmirror.formats import LoadReport, LoadTarget, TrainState, WriteContext, get_format
from ckptmirror.formats.capture import capture
from ckptmirror.formats.emergency import write_emergency
from ckptmirror.formats.sidecars import load_sidecars, write_sidecars
from ckptmirror.local.directories import rename_noreplace

KINDS: tuple[Kind, ...] = ALL_KINDS
SAVE_ID = "1f0c9a2e" * 4
STEP = 200


class Network(nn.Module):
    """Every form of value that a model may hold."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.low = nn.Parameter(torch.randn(3, 4).bfloat16())
        base = torch.randn(4, 6)
        self.register_buffer("f16", torch.randn(7).half())
        self.register_buffer("ints", torch.arange(5))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("transposed", torch.randn(3, 5).t())
        self.register_buffer("rows", base[1:3])
        self.register_buffer("column", base[:, 2])
        self.register_buffer("negative_zero", torch.tensor([-0.0, float("nan"), float("inf")]))
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "empty": {}}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(self.embed(tokens)))
        return self.head(hidden) + self.low.float().sum()


def make_state(seed: int = 0, *, width: int = 6, optimizer: str = "adamw") -> TrainState:
    """Return a fresh, seeded training state."""
    torch.manual_seed(seed)
    model = Network(width)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    built: torch.optim.Optimizer
    if optimizer == "adamw":
        built = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    elif optimizer == "adam":
        built = torch.optim.Adam(groups, lr=1e-2, amsgrad=True)
    elif optimizer == "momentum":
        built = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    else:
        built = torch.optim.SGD(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(built, milestones=[2, 4, 4], gamma=0.5)
    return TrainState(
        model=model, optimizer=built, scheduler=scheduler, ema=copy.deepcopy(model), extra={"epoch": 0, "history": []}
    )


def train(state: TrainState, steps: int) -> None:
    """Train a little; the data come from torch's generator, so that its state matters."""
    for _ in range(steps):
        loss = state.model(torch.randint(0, 5, (8,))).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if state.scheduler is not None:
            state.scheduler.step()
        network = bare_network(state.model)
        network.calls += 1
        with torch.no_grad():
            for shadow, live in zip(state.ema.parameters(), network.parameters(), strict=True):
                shadow.lerp_(live, 0.1)
        if state.extra is not None:
            state.extra["epoch"] += 1
            state.extra["history"].append(loss.item() + random.random())


def bare_network(model: Any) -> Network:
    """Return the network inside its wrappers."""
    while not isinstance(model, Network):
        model = getattr(model, "module", None) or model._orig_mod
    return model


def context(root: Path, kinds: tuple[Kind, ...], *, tag: str = "") -> WriteContext:
    """Return the context of a single process."""
    return WriteContext(root, SaveName(STEP, tag), SAVE_ID, kinds, rank=0, world_size=1, is_leader=True)


def save(kind: Kind, root: Path, state: TrainState) -> Meta:
    """Save one kind in a single process, in the way of the flow: write, check, publish."""
    if kind == "emergency":
        directory = root / emergency_dir_name(STEP, "20261121T131500Z")
        return meta_of(
            (kind,), write_emergency(state, directory, save_id=SAVE_ID, rank=0, world_size=1, step=STEP), None
        )
    here = context(root, (kind,))
    snapshot = capture(state, step=STEP, kinds=(kind,), rank=0, world_size=1)
    artifacts = get_format(kind).write(snapshot, here) + write_sidecars(snapshot, here)[0]
    get_format(kind).check(here, artifacts)
    publish(root, artifacts)
    return meta_of((kind,), artifacts, snapshot.architecture)


def publish(root: Path, artifacts: list[Artifact]) -> None:
    """Give every sealed file or directory its final name."""
    for name in sorted({artifact.path.partition("/")[0] for artifact in artifacts}):
        rename_noreplace(root / tmp_name(name, SAVE_ID), root / name)


def meta_of(
    kinds: tuple[Kind, ...], artifacts: list[Artifact], architecture: str | None, *, world_size: int = 1
) -> Meta:
    """Return a meta that names the artifacts."""
    return Meta(
        run_id="0" * 32,
        attempt=Attempt("0" * 32, 0, None),
        step=STEP,
        save_id=SAVE_ID,
        save_number=1,
        kinds=kinds,
        world_size=world_size,
        nodes=1,
        node=0,
        artifacts=tuple(artifacts),
        architecture_hash=architecture,
    )


def load(
    kind: Kind,
    root: Path,
    meta: Meta,
    state: TrainState,
    *,
    rank: int = 0,
    world_size: int = 1,
    exclude: tuple[str, ...] = (),
) -> LoadReport:
    """Load one kind, sidecars included."""
    target = LoadTarget(state, rank, world_size, frozenset(exclude))
    tensors = get_format(kind).load(root, meta, target)
    if kind == "emergency":
        return tensors
    rest = load_sidecars(root, meta, target)
    return tensors + rest


def same_bits(first: Any, second: Any, where: str = "") -> None:
    """Assert that two trees are equal, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        assert isinstance(second, torch.Tensor), where
        assert (first.dtype, first.shape) == (second.dtype, second.shape), where
        one, other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
        assert torch.equal(one, other), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            same_bits(value, second[key], f"{where}.{key}")
    elif isinstance(first, (list, tuple)):
        assert type(first) is type(second), where
        assert len(first) == len(second), where
        for index, value in enumerate(first):
            same_bits(value, second[index], f"{where}[{index}]")
    else:
        assert type(first) is type(second), where
        assert first == second, where


def everything(state: TrainState) -> dict[str, Any]:
    """Return all that a resume must give back, for :func:`same_bits`."""
    return {
        "model": dict(bare_network(state.model).state_dict()),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict() if state.scheduler is not None else None,
        "ema": dict(bare_network(state.ema).state_dict()),
        "extra": state.extra,
    }


def files_below(root: Path) -> list[Path]:
    """Return every file below ``root``."""
    return sorted(path for path in root.rglob("*") if path.is_file())


Damage = Callable[[Path], None]


def dcp_contents(*files: str, size_bytes: int = 3000, overlap: bool = False) -> dict[str, bytes]:
    """A ``.metadata`` that describes one vector in these files of zeros, and the files.

    Args:
        files: Their names.
        size_bytes: The size of each: four bytes for each value.
        overlap: Whether each piece after the first starts one value early, so that values overlap and the last ones
            are missing.
    """
    count = size_bytes // 4
    starts = [number * count - (overlap and number > 0) for number in range(len(files))]
    chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([count])) for start in starts]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([count * len(files)]), chunks)
    storage = {
        MetadataIndex("model.w", [start]): _StorageInfo(name, 0, size_bytes)
        for start, name in zip(starts, files, strict=True)
    }
    described = Metadata({"model.w": tensor}, {"model.w": ("model", "w")}, storage)
    return {".metadata": pickle.dumps(described)} | dict.fromkeys(files, bytes(size_bytes))
