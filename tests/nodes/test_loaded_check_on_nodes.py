"""On several nodes, too, each rank's memory is compared after a load with what was saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CheckpointNotFound, LoadDiffers
from ckptmirror.core.model import Kind
from ckptmirror.flow.start import resume
from tests.kit.processes import run_ranks
from tests.nodes.jobs import WAIT_S, built, train

pytestmark = pytest.mark.long
Told = dict[int, tuple[str, ...] | str]


def open_manager(base: Path, node: str, kind: Kind, *, mirrored: bool) -> CheckpointManager:
    mirrors = [f"file://{base}/mirror"] if mirrored else []
    kinds: tuple[Kind, ...] = ("dcp",) if kind == "emergency" else (kind,)
    return CheckpointManager(base / node, mirrors, kinds=kinds, timeout_s=WAIT_S)


def save_one(rank: int, base: Path, nodes: str, kind: Kind, mirrored: bool) -> None:
    state = built("fsdp")
    with open_manager(base, nodes[rank], kind, mirrored=mirrored) as manager:
        manager.resume(state)
        train(state, rank, 1)
        if kind == "emergency":
            manager.save_emergency_checkpoint(1, state)
        else:
            manager.save(1, state).wait("mirrored" if mirrored else "committed", timeout_s=WAIT_S)


def load_with_faults(rank: int, base: Path, nodes: str, kind: Kind, mirrored: bool, wrapped: str = "fsdp") -> Told:
    """Resume once for each rank that loads a wrong value, and last without any."""
    told: Told = {}
    load = resume.load_kind
    for victim in (*range(len(nodes)), -1):
        state = built(wrapped)

        def wrong(*args: Any, victim: int = victim, state: TrainState = state) -> Any:
            report = load(*args)
            if rank == victim:
                spoil(state.model)
            return report

        resume.load_kind = wrong
        with open_manager(base, nodes[rank], kind, mirrored=mirrored) as manager:
            try:
                start = manager.resume(state)
                assert start is not None
                told[victim] = tuple(line for line in start.missing if line.startswith("tensors"))
            except LoadDiffers as error:
                told[victim] = error.message
    return told


def spoil(model: torch.nn.Module) -> None:
    for value in model.state_dict().values():
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.numel():
            with torch.no_grad():
                local.flatten()[0] += 1.0
            return


@pytest.mark.parametrize(
    ("before", "after", "lost", "kind", "mirrored"),
    [
        ("aabb", "aabb", "", "dcp", False),
        ("aabb", "aabb", "b", "dcp", True),
        ("aabb", "aabb", "ab", "model", True),
        ("aabb", "bbaa", "", "dcp", False),
        ("aabb", "ab", "", "dcp", False),
        ("abc", "aab", "", "dcp", True),
        ("ab", "aabb", "", "model", False),
        ("aab", "cdd", "", "dcp", True),
        ("aabb", "bbaa", "", "emergency", False),
        ("ab", "abc", "", "emergency", False),
        ("aabb", "ab", "", "emergency", False),
    ],
)
def test_a_wrong_value_on_any_rank_of_any_node_is_named_on_all(
    before: str, after: str, lost: str, kind: Kind, mirrored: bool, tmp_path: Path
) -> None:
    run_ranks(len(before), save_one, tmp_path, before, kind, mirrored, limit_s=3 * WAIT_S)
    for node in lost:
        shutil.rmtree(tmp_path / node)
    found = run_ranks(len(after), load_with_faults, tmp_path, after, kind, mirrored, limit_s=3 * WAIT_S)
    for told in found:
        assert told.pop(-1) == ()
        assert told.keys() == set(range(len(after)))
        for victim, message in told.items():
            assert "memory does not hold what was saved: model." in message
            assert len(before) != len(after) or f"(rank {victim})" in message


@pytest.mark.parametrize(
    ("kind", "lost", "mirrored"),
    [("dcp", "", False), ("model", "", False), ("dcp", "b", True), ("emergency", "", False)],
)
def test_a_wrong_value_is_named_where_the_same_ranks_cut_it_otherwise(
    kind: Kind, lost: str, mirrored: bool, tmp_path: Path
) -> None:
    """Rank 0 needs the lists of the other nodes then."""
    run_ranks(2, save_one, tmp_path, "ab", kind, mirrored, limit_s=3 * WAIT_S)
    for node in lost:
        shutil.rmtree(tmp_path / node)
    for told in run_ranks(2, load_with_faults, tmp_path, "ab", kind, mirrored, "ddp", limit_s=3 * WAIT_S):
        assert told.pop(-1) == ()
        assert all("memory does not hold what was saved: model." in message for message in told.values())


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_list_that_no_node_has_whole_stops_no_start_and_that_is_said(how: str, tmp_path: Path) -> None:
    run_ranks(4, save_one, tmp_path, "aabb", "dcp", False, limit_s=3 * WAIT_S)
    path = tmp_path / "b" / "tensors_000001_rank3.json"
    path.unlink()
    if how == "damaged":
        path.write_bytes(b"[]")
    found = run_ranks(4, load_with_faults, tmp_path, "aabb", "dcp", False, limit_s=3 * WAIT_S)
    for told in found:
        (line,) = told.pop(-1)
        assert "tensors_000001_rank3.json" in line
        assert all("memory does not hold what was saved" in told[victim] for victim in (0, 1, 2))


def load_from(rank: int, base: Path) -> list[tuple[str, str]]:
    found = []
    with open_manager(base, "ab"[rank], "dcp", mirrored=True) as manager:
        manager.resume(built("fsdp"))
        for reference in ("latest", 1, f"file://{base}/mirror/dcp_000001"):
            try:
                loaded = manager.load(built("fsdp"), reference)
                found.append((loaded.place, ""))
            except CheckpointNotFound as error:
                found.append((error.message, error.hint))
    return found


def test_a_load_of_a_root_that_has_one_nodes_part_says_what_to_give_instead(tmp_path: Path) -> None:
    run_ranks(2, save_one, tmp_path, "ab", "dcp", True, limit_s=3 * WAIT_S)
    for latest, step, mirror in run_ranks(2, load_from, tmp_path, limit_s=3 * WAIT_S):
        for _, hint in (latest, step):
            assert "Give the URL of a mirror" in hint
        assert mirror == (f"file://{tmp_path}/mirror", "")
