"""On several nodes, too, values of extra are merged only if the number of ranks has changed, and then those of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager
from tests.kit.processes import run_ranks
from tests.nodes.jobs import WAIT_S, built

pytestmark = pytest.mark.long


def take_part(rank: int, base: Path, nodes: str, wrapped: str, how: str) -> tuple[int, list[list[int]]]:
    """Resume, and save (``how``) once; return what the rank then counts from, and what was merged."""
    calls: list[list[int]] = []

    def merge(values: Sequence[Any], at: int, world_size: int) -> int:
        calls.append(list(values))
        return sum(values) // world_size + at

    state = built(wrapped)
    state.extra, state.merge_extra = {"tokens": 100 + rank}, {"tokens": merge}
    with CheckpointManager(base / nodes[rank], kinds=("dcp", "model"), timeout_s=WAIT_S) as manager:
        manager.resume(state)
        if how == "save":
            manager.save(1, state).wait("committed", timeout_s=WAIT_S)
        elif how == "snapshot":
            manager.save_emergency_checkpoint(1, state)
    return state.extra["tokens"], calls


@pytest.mark.parametrize("wrapped", ["fsdp", "ddp"])
@pytest.mark.parametrize("how", ["save", "snapshot"])
def test_each_rank_has_its_own_value_until_the_number_of_ranks_changes(how: str, wrapped: str, tmp_path: Path) -> None:
    run_ranks(3, take_part, tmp_path, "aab", wrapped, how)
    for nodes in ("aab", "baa"):
        found = run_ranks(3, take_part, tmp_path, nodes, wrapped, "")
        assert found == [(100 + rank, []) for rank in range(3)]
    for value, calls in run_ranks(2, take_part, tmp_path, "ab", wrapped, ""):
        assert value in (303 // 2, 303 // 2 + 1)
        assert calls
        assert all(values == [100, 101, 102] for values in calls)
