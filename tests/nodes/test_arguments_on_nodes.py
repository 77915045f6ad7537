"""What ``resume`` and ``load`` are given has to be the same on all ranks: each would load another state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager, StopRequest, stage_checkpoint_step
from ckptmirror.core.errors import CkptMirrorError, RankFailed, UsageError
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import WAIT_S, Job, built

pytestmark = pytest.mark.long


def load_with(rank: int, base: str, verb: str, given: list[dict[str, Any]]) -> tuple[Any, bool]:
    """Load on this rank with its own arguments; return what was raised, and whether a load without any then works."""
    root, url = Path(base) / "ab"[rank], f"file://{base}/mirror"
    with CheckpointManager(root, [url], timeout_s=WAIT_S) as manager:
        state = built("fsdp")
        before = [parameter.to_local().clone() for parameter in state.model.parameters()]
        raised = outcome(lambda: getattr(manager, verb)(state, **given[rank]))
        unchanged = all(
            bool((one == parameter.to_local()).all())
            for one, parameter in zip(before, state.model.parameters(), strict=True)
        )
        info = manager.resume(state)
        return raised, unchanged and info is not None and info.step == 2


DIFFER: list[tuple[str, dict[str, Any], str, str]] = [
    ("resume", {"exclude": ("model.0.*", "optimizer")}, "exclude", "model.0.*, optimizer"),
    ("resume", {"policy": 1}, "policy", "1"),
    ("resume", {"verify_loaded": False}, "verify_loaded", "False"),
    ("resume", {"rename": {"old.*": "new.*"}}, "rename", "old.* -> new.*"),
    ("resume", {"command_wins": ("lr",)}, "command_wins", "lr"),
    ("load", {"strict": False}, "strict", "False"),
]


@pytest.mark.parametrize("one", [0, 1])
def test_arguments_that_differ_between_nodes_are_refused_on_all_ranks_before_anything_is_loaded(
    one: int, tmp_path: Path
) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    for verb, given, name, value in DIFFER:
        of_ranks = [given if rank == one else {} for rank in range(2)]
        for (kind, message, code), goes_on in run_ranks(2, load_with, str(tmp_path), verb, of_ranks, limit_s=WAIT_S):
            assert (kind, code) == (UsageError.__name__, UsageError.exit_code), message
            assert f"differ in {name}: rank 0 on node 0 has" in message
            assert f"rank {one} on node {one} has {value}" in message
            assert goes_on


def test_a_wrong_argument_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    given: list[dict[str, Any]] = [{}, {"exclude": ("nonsense",)}]
    (first, first_goes_on), (second, second_goes_on) = run_ranks(
        2, load_with, str(tmp_path), "resume", given, limit_s=WAIT_S
    )
    assert (first[0], second[0]) == (RankFailed.__name__, UsageError.__name__)
    assert "nonsense" in first[1]
    assert first_goes_on
    assert second_goes_on


def go_back_by_path(rank: int, base: str) -> int | None:
    root = Path(base) / "ab"[rank]
    with CheckpointManager(root, [f"file://{base}/mirror"], timeout_s=WAIT_S) as manager:
        info = manager.resume(built("fsdp"), policy=root / "dcp_000001")
        return info.step if info is not None else None


def test_the_path_of_a_save_is_another_on_each_node_and_means_the_same(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    stage_checkpoint_step(f"file://{tmp_path}/mirror", dest=tmp_path / "a", step=1, require_kind="dcp")
    assert run_ranks(2, go_back_by_path, str(tmp_path), limit_s=WAIT_S) == [1, 1]


def save_kinds(rank: int, base: str) -> tuple[Any, str]:
    with CheckpointManager(Path(base) / "ab"[rank], timeout_s=WAIT_S) as manager:
        state = built("fsdp")
        manager.resume(state)
        kinds = ("dcp", "model") if rank == 0 else ("dcp",)
        try:
            manager.save(1, state, kinds=kinds).wait("committed")
        except CkptMirrorError as error:
            return error.message, error.hint
    return None, ""


def test_kinds_that_differ_between_ranks_are_named_with_what_to_do(tmp_path: Path) -> None:
    for message, hint in run_ranks(2, save_kinds, str(tmp_path), limit_s=WAIT_S):
        assert "dcp+model" in message
        assert "the kinds of a save" in hint


def asks_to_stop(rank: int, base: str) -> list[tuple[str, str, Any]]:
    stop = StopRequest()
    with CheckpointManager(Path(base) / "ab"[rank], timeout_s=WAIT_S) as manager:
        wrong = outcome(lambda: stop.check(manager))  # type: ignore[arg-type]
        assert stop.check(manager.ranks) is False
    return [wrong, outcome(lambda: stop.check(manager.ranks))]


def test_a_stop_is_asked_for_with_the_ranks_of_a_manager_that_is_open(tmp_path: Path) -> None:
    for wrong, late in run_ranks(2, asks_to_stop, str(tmp_path)):
        assert wrong[0] == late[0] == UsageError.__name__
        assert "takes the ranks of a manager, not an object of type CheckpointManager" in wrong[1]
        assert "the manager of these ranks is closed" in late[1]
