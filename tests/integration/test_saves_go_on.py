"""A job that catches what ``save`` raises, and never waits: after a failure of one rank its saves go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local.inventory import read_inventory
from tests.kit.processes import run_ranks
from tests.nodes.jobs import WAIT_S, built, train

pytestmark = pytest.mark.long

STEPS = 8
CLOSE = 99


class CannotBeSaved:
    def __reduce__(self) -> str:
        raise RuntimeError("not now")


def train_on(rank: int, base: str, nodes: str, fails: dict[int, int]) -> list[int]:
    """Save each step, in vain where ``fails`` has this rank. Return where ``save`` raised."""
    state, raised = built("ddp"), []
    manager = CheckpointManager(Path(base) / nodes[rank], [], kinds=("dcp",), timeout_s=WAIT_S)
    manager.resume(state)
    for step in range(1, STEPS + 1):
        train(state, rank, step)
        dist.barrier()
        state.extra["bad"] = CannotBeSaved() if fails.get(step) == rank else 0
        try:
            manager.save(step, state)
        except CkptMirrorError:
            raised.append(step)
    try:
        manager.close()
    except CkptMirrorError:
        raised.append(CLOSE)
    return raised


def saved(base: Path) -> list[int]:
    return sorted(save.meta.step for save in read_inventory(base / "a").saves)


@pytest.mark.parametrize("nodes", ["aaa", "aab"])
def test_a_failure_of_one_rank_is_raised_on_each_once_and_costs_two_saves(nodes: str, tmp_path: Path) -> None:
    """Each rank raised the failure that the other's error had made of its save, and no save succeeded again."""
    raised = run_ranks(3, train_on, str(tmp_path), nodes, {3: 1})
    assert raised == [[4], [3], [4]]
    assert saved(tmp_path) == [1, 2, 5, 6, 7, 8]


def test_a_last_save_that_failed_so_is_raised_at_the_end(tmp_path: Path) -> None:
    raised = run_ranks(3, train_on, str(tmp_path), "aab", {STEPS - 1: 1})
    assert raised == [[STEPS], [STEPS - 1, CLOSE], [STEPS]]
    assert saved(tmp_path) == list(range(1, STEPS - 1))
