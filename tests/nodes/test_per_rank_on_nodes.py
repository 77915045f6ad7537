"""What ranks on several nodes had of their own is merged where the number of ranks has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Kind
from tests.integration.per_rank_job import MERGED, WAIT_S, expected, fails, held, new_state, step
from tests.kit.processes import run_ranks
from tests.kit.training import same

pytestmark = pytest.mark.long


def saves(rank: int, base: Path, nodes: str, kinds: tuple[Kind, ...]) -> list[Any]:
    state = new_state(rank)
    manager = CheckpointManager(base / nodes[rank], kinds=kinds, timeout_s=WAIT_S)
    manager.resume(state)
    step(state, rank, 1)
    manager.save(1, state).wait("committed")
    at_1 = held(state)
    step(state, rank, 2)
    manager.save_emergency_checkpoint(2, state)
    manager.close()
    return [at_1, held(state)]


def starts(rank: int, base: Path, nodes: str, kinds: tuple[Kind, ...], policy: Any, merge: Any) -> Any:
    state = new_state(rank, {**MERGED, "experts.0.*": merge or MERGED["experts.0.*"]})
    before = held(state)
    manager = CheckpointManager(base / nodes[rank], kinds=kinds, timeout_s=WAIT_S)
    try:
        info = manager.resume(state, policy=policy)
    except CkptMirrorError as error:
        return type(error).__name__, str(error), same(before, held(state))
    finally:
        manager.close()
    assert info is not None
    return info.step, info.kind, held(state)


@pytest.mark.parametrize(("kinds", "there"), [(("dcp",), "aab"), (("model",), "aba")])
def test_another_number_of_ranks_on_the_nodes_merges_what_each_had(
    tmp_path: Path, kinds: tuple[Kind, ...], there: str
) -> None:
    of_ranks = run_ranks(2, saves, tmp_path, "ab", kinds)
    outcomes = run_ranks(3, starts, tmp_path, there, kinds, "auto", fails)
    assert [kind for kind, *_ in outcomes] == ["RankFailed", "RankFailed", "UsageError"]
    assert all(is_unchanged and "nobody knows how" in why for _, why, is_unchanged in outcomes)
    for number, (policy, kind) in ((1, ("auto", "emergency")), (0, (1, kinds[0]))):
        for rank, found in enumerate(run_ranks(3, starts, tmp_path, there, kinds, policy, None)):
            assert found[:2] == (number + 1, kind)
            for name, value in found[2]["model"].items():
                assert same(value, expected(name, [one[number]["model"][name] for one in of_ranks], rank)), name
