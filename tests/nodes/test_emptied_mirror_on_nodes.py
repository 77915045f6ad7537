"""A mirror is emptied after one of the nodes deleted its part of a save: what the end of the run says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, Retention
from ckptmirror.core.errors import DeadlinePassed
from tests.kit.processes import outcome
from tests.nodes.jobs import WAIT_S, Job, built, train

pytestmark = pytest.mark.long

CLOSE_S = 8.0


def lose_the_mirror(rank: int, job: Job) -> tuple[int, str, str]:
    """Save twice; rank 1's node keeps one save, rank 0's two. Then empty the mirror, and close.

    Returns:
        The exit code, the message and the hint.
    """
    manager = CheckpointManager(
        job.base / job.nodes[rank], [job.url], retention=Retention(keep_last=2 - rank), timeout_s=WAIT_S
    )
    state = built(job.wrapped)
    manager.resume(state)
    for step in job.steps:
        train(state, rank, step)
        manager.save(step, state)
    manager.wait("mirrored", timeout_s=WAIT_S)
    manager.rotate()
    manager.ranks.exchange(None, what="rotated")
    if rank == 0:
        assert not (job.base / "b" / "meta_000001.json").exists()
        for kept in (job.base / "mirror").iterdir():
            if not kept.name.startswith("."):
                shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    manager.ranks.exchange(None, what="emptied")
    try:
        manager.close(timeout_s=CLOSE_S)
    except DeadlinePassed as error:
        return error.exit_code, error.message, error.hint
    return 0, "", ""


def start_again(rank: int, job: Job) -> tuple[int, int]:
    """Continue, and close; return the step, and the exit code."""
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], timeout_s=WAIT_S)
    start = manager.resume(built(job.wrapped))
    assert start is not None
    _, _, code = outcome(lambda: manager.close(timeout_s=WAIT_S))
    return start.step, code


def test_close_says_which_save_it_waits_for_and_which_node_has_not_sent_its_part(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2))
    (code, message, hint), other = job.run(lose_the_mirror)
    assert (code, other) == (8, (0, "", ""))
    assert f"step 1 on {job.url}: " in message
    assert "node 1 of 2 (from 0) has still to upload what it saved" in message
    assert "run `ckptmirror drain` on the node that is named" in hint
    assert "the next start does not wait for it" in hint
    assert job.run(start_again) == [(2, 0), (2, 0)]
