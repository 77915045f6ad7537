"""A checkpoint is loaded straight from a mirror: only the bytes that are read leave it, each once and verified."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState, load_checkpoint
from ckptmirror.core.errors import (
    CheckpointNotFound,
    IntegrityError,
    LoadDiffers,
    LocalStorageFull,
    LocalStorageUnwritable,
    UsageError,
)
from ckptmirror.core.model import Kind
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.faults import flip_bit
from tests.kit.processes import run_ranks
from tests.kit.roots import leftovers

BUCKET = "load-from-mirror"
MIB = 1 << 20


@pytest.fixture
def saved(server: GcsServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, TrainState]:
    """A save on the mirror in both kinds, of 16 MiB of model and twice as much of its optimizer; its root is gone."""
    url = f"gs://{BUCKET}/{tmp_path.name}"
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({f"part{n}": torch.nn.Linear(1024, 1024, bias=False) for n in range(4)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer, extra={"note": "here"})
    with CheckpointManager(tmp_path / "root", [url], kinds=("dcp", "model")) as manager:
        manager.resume(state)
        manager.save(7, state).wait("mirrored")
    server.clear_log()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return url, state


def sent(server: GcsServerProcess, files: str = "/(model|optim|extra|dcp|tensors)_", *, nodes: int = 1) -> int:
    """How many bytes of objects of these names have left the mirror, none of them to a node twice."""
    reads = [entry for entry in server.log("object.media") if re.search(files, entry["object"] or "")]
    times = Counter((entry["object"], entry["range"]) for entry in reads)
    assert max(times.values()) <= nodes
    return sum(int(entry["response_bytes"]) for entry in reads)


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_of_a_save_without_its_optimizer_only_the_model_leaves_the_mirror(
    kind: Kind, saved: tuple[str, TrainState], server: GcsServerProcess, tmp_path: Path
) -> None:
    url, state = saved
    reference = f"{url}/{'dcp_000007' if kind == 'dcp' else 'model_000007.pt'}"
    loaded = load_checkpoint(reference, exclude=("optimizer",))
    assert (loaded.kind, loaded.meta.step, loaded.optimizer) == (kind, 7, None)
    assert loaded.extra is not None
    assert loaded.extra["extra"]["note"] == "here"
    for name, value in state.model.state_dict().items():
        assert loaded.model[name].equal(value)
    assert 16 * MIB <= sent(server) <= (16 + 3 * 4) * MIB, "the blocks that begin and end it hold other bytes too"
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_the_whole_of_a_save_leaves_the_mirror_once_and_is_what_the_disk_has(
    kind: Kind, saved: tuple[str, TrainState], server: GcsServerProcess, tmp_path: Path
) -> None:
    name = "dcp_000007" if kind == "dcp" else "model_000007.pt"
    loaded = load_checkpoint(f"{saved[0]}/{name}")
    there = load_checkpoint(tmp_path / "root" / name)
    assert sent(server) < 1.01 * sum(one.digest.size_bytes for one in there.meta.artifacts_of(kind))
    assert loaded.optimizer is not None
    assert there.optimizer is not None
    assert loaded.meta.save_id == there.meta.save_id
    for key, value in there.optimizer["state"].items():
        assert all(
            torch.as_tensor(loaded.optimizer["state"][key][n]).equal(torch.as_tensor(v)) for n, v in value.items()
        )


def test_a_part_that_is_left_out_is_not_read_from_the_disk_either(
    saved: tuple[str, TrainState], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    flip_bit(root / "optim_000007_rank0.pt", 5 * MIB)
    loaded = load_checkpoint(root / "model_000007.pt", exclude=("optimizer", "extra"))
    assert (loaded.optimizer, loaded.extra) == (None, None)
    with pytest.raises(IntegrityError, match="block 1"):
        load_checkpoint(root / "model_000007.pt")


def test_bytes_that_broke_on_the_mirror_are_refused_if_they_are_read(
    saved: tuple[str, TrainState], server: GcsServerProcess, tmp_path: Path
) -> None:
    server.faults([Fault("object.media", object="distcp", corrupt_byte_at=5 * MIB, times=0)])
    with pytest.raises(IntegrityError, match=r"is damaged: the crc32c of block \d+"):
        load_checkpoint(f"{saved[0]}/dcp_000007")
    assert os.listdir(tmp_path / "temporary") == []


def test_what_is_not_there_and_what_cannot_be_left_out_is_said(saved: tuple[str, TrainState]) -> None:
    with pytest.raises(CheckpointNotFound):
        load_checkpoint(f"{saved[0]}/model_000009.pt")
    with pytest.raises(UsageError, match="'model'"):
        load_checkpoint(saved[0], exclude=("model",))
    with pytest.raises(UsageError, match="map_location is 'gpu'"):  # a sound save is not blamed for it
        load_checkpoint(f"{saved[0]}/dcp_000007", map_location="gpu")


@pytest.mark.parametrize("inodes", range(3, 9))
def test_a_full_directory_for_temporary_files_is_said(
    inodes: int,
    saved: tuple[str, TrainState],
    mounted: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(mounted(f"size=64m,nr_inodes={inodes}")))
    with contextlib.suppress(LocalStorageFull):
        load_checkpoint(f"{saved[0]}/dcp_000007", exclude=("optimizer",))


def test_no_directory_for_temporary_files_is_said(
    saved: tuple[str, TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(LocalStorageUnwritable, match=r"gone"):
        load_checkpoint(f"{saved[0]}/dcp_000007")


# -- into live objects -----------------------------------------------------------------------------------------------


def fresh(optimizer: bool = True) -> TrainState:
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({f"part{n}": torch.nn.Linear(1024, 1024, bias=False) for n in range(4)})
    adam = torch.optim.AdamW(model.parameters()) if optimizer else None
    return TrainState(model=model, optimizer=adam, extra={"note": ""})


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_state_is_loaded_from_a_mirror_whole_or_without_the_optimizer(
    kind: Kind, saved: tuple[str, TrainState], server: GcsServerProcess, tmp_path: Path
) -> None:
    url, state = saved
    reference = f"{url}/{'dcp_000007' if kind == 'dcp' else 'model_000007.pt'}"
    with CheckpointManager(tmp_path / "other") as manager:
        weights = fresh(optimizer=False)
        start = manager.load(weights, reference, exclude=("optimizer",))
        assert (start.step, start.kind, weights.extra) == (7, kind, {"note": "here"})
        assert sent(server) <= (16 + 3 * 4) * MIB
        everything = fresh()
        assert "optimizer" in manager.load(everything, reference).loaded
    for loaded in (weights, everything):
        for name, value in state.model.state_dict().items():
            assert loaded.model.state_dict()[name].equal(value)
    now, then = (one.optimizer.state_dict()["state"] for one in (everything, state))
    assert all(now[key]["exp_avg"].equal(then[key]["exp_avg"]) for key in then)
    assert os.listdir(tmp_path / "temporary") == []


def test_what_is_loaded_from_a_mirror_is_proved_too(saved: tuple[str, TrainState], tmp_path: Path) -> None:
    class Deaf(torch.nn.Linear):
        def _load_from_state_dict(self, *_: object, **__: object) -> None:
            torch.nn.init.zeros_(self.weight)

    state = fresh()
    state.model["part2"].__class__ = Deaf
    with CheckpointManager(tmp_path / "other") as manager, pytest.raises(LoadDiffers, match=r"model\.part2\.weight"):
        manager.load(state, saved[0])


def two_ranks(rank: int, base: Path) -> tuple[int, bool]:
    tempfile.tempdir = str(base / "of another host")  # what one host has there, the other does not see
    state = fresh()
    for layer in state.model.values():
        fully_shard(layer)
    with CheckpointManager(base / "together", timeout_s=60.0) as manager:
        start = manager.load(state, f"file://{base}/mirror")
    whole = torch.load(base / "root" / "model_000003.pt", weights_only=True)
    return start.step, all(p.full_tensor().equal(whole[name]) for name, p in state.model.named_parameters())


def test_ranks_load_from_a_mirror_together(tmp_path: Path) -> None:
    state = fresh(optimizer=False)
    with CheckpointManager(tmp_path / "root", [f"file://{tmp_path}/mirror"]) as manager:
        manager.resume(state)
        manager.save(3, state).wait("mirrored")
    assert run_ranks(2, two_ranks, tmp_path) == [(3, True), (3, True)]
    assert leftovers(tmp_path / "together") == []


def sharded(optimizer: bool = True) -> TrainState:
    state = fresh(optimizer=False)
    for layer in state.model.values():
        fully_shard(layer)
    adam = torch.optim.AdamW(state.model.parameters()) if optimizer else None
    return TrainState(model=state.model, optimizer=adam)


def save_shards(rank: int, base: Path, url: str) -> list[torch.Tensor]:
    """Save, on two nodes, 16 MiB of model and twice as much of its optimizer; return this rank's shards."""
    state = sharded()
    for parameter in state.model.parameters():
        parameter.grad = torch.rand_like(parameter)
    state.optimizer.step()
    with CheckpointManager(base / "ab"[rank], [url], timeout_s=60.0) as manager:
        manager.resume(state)
        manager.save(3, state).wait("mirrored")
    return [value.to_local().detach() for value in state.model.parameters()]


def load_shards(rank: int, base: Path, url: str, nodes: str, exclude: tuple[str, ...]) -> list[torch.Tensor]:
    state = sharded(optimizer=not exclude)
    with CheckpointManager(base / f"other-{nodes[rank]}", timeout_s=60.0) as manager:
        manager.load(state, f"{url}/dcp_000003", exclude=exclude)
    return [value.to_local().detach() for value in state.model.parameters()]


@pytest.mark.parametrize("nodes", [pytest.param("a", marks=pytest.mark.long), "ab"])
@pytest.mark.parametrize(
    ("exclude", "wanted_mib"), [pytest.param((), 48, marks=pytest.mark.long), (("optimizer",), 16)]
)
def test_each_node_fetches_the_shards_of_its_ranks_alone(
    exclude: tuple[str, ...], wanted_mib: int, nodes: str, server: GcsServerProcess, tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/{tmp_path.name}"
    held = run_ranks(2, save_shards, tmp_path, url)
    server.clear_log()
    found = run_ranks(2, load_shards, tmp_path, url, nodes * (2 // len(nodes)), exclude)
    assert all(a.equal(b) for mine, there in zip(held, found, strict=True) for a, b in zip(mine, there, strict=True))
    more_mib = 2 * 2 * 4 if exclude else 1  # the blocks at the ends of what is wanted hold other bytes too
    assert wanted_mib * MIB <= sent(server, r"\.distcp$", nodes=len(nodes)) <= (wanted_mib + more_mib) * MIB
