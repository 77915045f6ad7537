"""A snapshot that not every rank took, and training goes on: the saves and snapshots after it are those of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local.inventory import read_inventory
from tests.kit.processes import run_ranks
from tests.nodes.jobs import WAIT_S, built, train

pytestmark = pytest.mark.long


class CannotBeSaved:
    def __reduce__(self) -> str:
        raise RuntimeError("not now")


def train_on(
    rank: int,
    base: str,
    nodes: str,
    snapshots: dict[int, tuple[int, ...]],
    steps: tuple[int, ...],
    fails_at: int = 0,
) -> None:
    """Train five steps, with snapshots of some ranks, and saves, of which one fails on rank 1."""
    state = built("ddp")
    with CheckpointManager(Path(base) / nodes[rank], [], kinds=("dcp",), timeout_s=WAIT_S) as manager:
        manager.resume(state)
        for step in range(1, 6):
            train(state, rank, step)
            if rank in snapshots.get(step, ()):
                manager.save_emergency_checkpoint(step, state)
            if step == fails_at and rank == 1:
                state.extra["bad"] = CannotBeSaved()
            if step in steps:
                try:
                    manager.save(step, state).wait("committed", WAIT_S)
                except CkptMirrorError:
                    assert step == fails_at


def resumed(rank: int, base: str, nodes: str) -> tuple[int, str]:
    state = built("ddp")
    with CheckpointManager(Path(base) / nodes[rank], [], kinds=("dcp",), timeout_s=WAIT_S) as manager:
        start = manager.resume(state)
        assert start is not None
        return start.step, start.kind


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_saves_go_on_after_a_snapshot_that_one_rank_took_alone(nodes: str, tmp_path: Path) -> None:
    run_ranks(2, train_on, str(tmp_path), nodes, {2: (0,), 3: (1,)}, (1, 2, 4, 5))
    assert run_ranks(2, resumed, str(tmp_path), nodes) == [(5, "dcp")] * 2
    found = [save.meta for save in read_inventory(tmp_path / "a").saves] if nodes == "aa" else []
    numbers = [meta.save_number for meta in sorted(found, key=lambda meta: meta.step) if meta.kinds == ("dcp",)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("nodes", ["aa", "ab"])
@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_snapshot_of_all_ranks_is_one_after_one_that_a_rank_took_alone(
    fails_at: int, nodes: str, tmp_path: Path
) -> None:
    steps = (1, 2, fails_at) if fails_at else (1, 2)
    run_ranks(2, train_on, str(tmp_path), nodes, {2: (0,), 4: (0, 1)}, steps, fails_at)
    assert run_ranks(2, resumed, str(tmp_path), nodes) == [(4, "emergency")] * 2
