"""The formats with real ranks: DDP and FSDP2 over gloo, and other numbers of ranks on the way back."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror.core.model import Kind
from ckptmirror.formats import get_format
from ckptmirror.formats.capture import capture
from ckptmirror.formats.sidecars import write_sidecars
from tests.integration import formats_worker as worker
from tests.kit import processes
from tests.kit.formats import files_below, same_bits

pytestmark = pytest.mark.long

KINDS: tuple[Kind, ...] = worker.KINDS


def run_ranks(scenario: str, directory: Path) -> list[dict[str, Any]]:
    """Run a scenario on two ranks and return each rank's result."""
    processes.run_ranks(2, worker.play, scenario, directory)
    return [pickle.loads((directory / f"rank{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_save_and_load_every_kind_and_one_process_reads_it(how: str, tmp_path: Path) -> None:
    results = run_ranks(f"roundtrip-{how}", tmp_path)
    for result in results:
        for kind in KINDS:
            expected, found = dict(result["expected"]), dict(result["found"][kind])
            expected["model"] = results[0]["expected"]["model"]  # running averages are rank 0's
            same_bits(expected, found, kind)
    assert [path.name for path in files_below(tmp_path) if path.name.endswith(".tmp")] == []
    _check_files(how, tmp_path)

    expected = results[0]["expected"]
    for kind in KINDS:
        state = worker.make_state("plain", seed=1)
        report = worker.load(tmp_path, kind, results[0]["meta"], state, rank=0, world_size=1)
        found = worker.whole(state)
        same_bits({part: expected[part] for part in found}, found, f"{kind} in one process")
        assert report.missing == ()

    plain = torch.load(tmp_path / "model_000200.pt", weights_only=True)
    worker.Network().load_state_dict(plain)
    same_bits(expected["model"], plain)


def _check_files(how: str, root: Path) -> None:
    names = {str(path.relative_to(root)) for path in files_below(root)}
    everyone = {
        f"{role}_000200_rank{rank}.{end}" for role, end in (("extra", "pt"), ("tensors", "json")) for rank in (0, 1)
    }
    assert everyone | {"model_000200.pt", "optim_000200_rank0.pt", "dcp_000200/.metadata"} <= names
    assert ("optim_000200_rank1.pt" in names) == (how == "fsdp")
    ema = [(root / f"extra_000200_rank{rank}.pt").stat().st_size for rank in (0, 1)]
    if how == "ddp":
        assert ema[1] < ema[0]  # rank 0 alone holds the EMA


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_one_process_saves_and_two_ranks_load(how: str, tmp_path: Path) -> None:
    state = worker.make_state("plain")
    worker.train(state, 3, 0)
    expected = worker.whole(state)
    here = worker.WriteContext(tmp_path, worker.SaveName(200), worker.SAVE_ID, KINDS, 0, 1, is_leader=True)
    snapshot = capture(state, step=200, kinds=KINDS, rank=0, world_size=1)
    artifacts = [artifact for kind in KINDS for artifact in get_format(kind).write(snapshot, here)]
    artifacts += write_sidecars(snapshot, here)[0]
    for name in sorted({artifact.path.partition("/")[0] for artifact in artifacts}):
        worker.rename_noreplace(tmp_path / worker.tmp_name(name, worker.SAVE_ID), tmp_path / name)
    meta = worker.meta_of(KINDS, artifacts, snapshot.architecture)
    (tmp_path / "meta.pickle").write_bytes(pickle.dumps(meta))
    for rank, result in enumerate(run_ranks(f"foreign-{how}", tmp_path)):
        for kind in KINDS:
            found = dict(result["found"][kind])
            missing = found.pop("missing")
            same_bits(expected, found, f"{kind} on rank {rank}")
            assert [line.partition(":")[0] for line in missing] == (["rng"] if rank == 1 else [])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_an_emergency_snapshot_needs_no_collective(how: str, tmp_path: Path) -> None:
    results = run_ranks(f"emergency-{how}", tmp_path)
    for result in results:
        expected = dict(result["expected"])
        if how == "ddp":
            expected["model"] = results[0]["expected"]["model"]
        same_bits(expected, result["found"])
        assert result["missing"] == ()
    alone = worker.make_state("plain", seed=1)
    worker.load(tmp_path, "emergency", results[0]["meta"], alone, 0, 1)
    same_bits(results[0]["expected"], worker.whole(alone))


def test_a_full_disk_on_one_rank_is_the_error_of_all(tmp_path: Path) -> None:
    for result in run_ranks("fulldisk-fsdp", tmp_path):
        assert result["error"] == "LocalStorageFull"
        assert "rank 1: writing kind dcp: no space left" in result["message"]
    assert not any(path.name == ".metadata" for path in files_below(tmp_path))


def test_every_node_gets_the_same_metadata(tmp_path: Path) -> None:
    first, second = run_ranks("twodisks-fsdp", tmp_path)
    metadata = [
        [(path, rank, crc) for path, rank, crc in result["paths"] if path.endswith(".metadata")]
        for result in (first, second)
    ]
    assert metadata[0] == metadata[1]
    assert [rank for _, rank, _ in metadata[0]] == [None]
    for rank in (0, 1):
        names = {path.name for path in files_below(tmp_path / f"node{rank}")}
        of_all = {"__0_small0.distcp"} if rank == 0 else set()
        assert names == {".metadata", f"__{rank}_0.distcp", *of_all}


def test_sharded_values_of_the_users_own_come_back_sharded_and_in_place(tmp_path: Path) -> None:
    results = run_ranks("extra-fsdp", tmp_path)
    for result in results:
        for kind in (*KINDS, "emergency"):
            found = result["found"][kind]
            same_bits(result["expected"], found["tensors"], kind)
            assert found["in_place"], kind
            assert found["missing"] == (), kind
        told = [line for line in result["whole"] if "so every rank holds all of it" in line]
        assert {line.split(" ")[0] for line in told} >= {"extra.dict", "extra.list[0]", "extra.tuple"}
        refused = result["refused"]
        assert refused["lazy"].startswith("extra.object.weights.embed.weight was saved sharded, and the state here")
        assert refused["set"].startswith("extra.here is a set that holds a DTensor")
        assert refused["partial"].startswith("extra.here[0] is a DTensor whose ranks hold parts of a sum")
        assert refused["elsewhere"].startswith("extra.critic.state.0.factors[0] is a DTensor of shape (2,)")
        assert refused["moment"].startswith("optimizer.state.embed.weight.factors[0] is a DTensor of shape (2,)")
    for kind in KINDS:
        alone = worker.make_state("plain", seed=1)
        alone.extra = {}
        worker.load(tmp_path, kind, results[0]["meta"], alone, rank=0, world_size=1)
        same_bits(results[0]["expected"][:5], list(alone.extra["dict"].values())[:5], f"{kind} in one process")
        assert isinstance(alone.extra["deque"][0], torch.Tensor)
