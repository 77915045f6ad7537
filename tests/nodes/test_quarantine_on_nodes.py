"""Jobs of several nodes that fail from one save: the next job goes back to the one before it, on all ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, StopRequest, list_checkpoints
from ckptmirror.core.errors import CkptMirrorError
from tests.nodes.jobs import WAIT_S, Found, Job, built

pytestmark = pytest.mark.long


def fail(rank: int, job: Job, *, diverges: tuple[int, ...]) -> int:
    """Resume, report a step, and diverge (on some ranks), or end with an error; return where the rank began."""
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], timeout_s=WAIT_S)
    with contextlib.suppress(ZeroDivisionError), manager:
        info = manager.resume(built(job.wrapped))
        assert info is not None
        manager.report(info.step + 1, float("nan") if rank in diverges else 0.5)
        raise ZeroDivisionError
    return info.step


def jobs_that_fail(base: Path, *nodes: str, diverges: tuple[int, ...] = ()) -> None:
    for one in nodes:
        assert Job(base, one).run(partial(fail, diverges=diverges)) == [2] * len(one)


def next_job(base: Path, nodes: str) -> list[Found]:
    found = Job(base, nodes).run()
    assert [one.failed for one in found] == [""] * len(nodes)
    return found


def die(rank: int, job: Job, *, who: int, kills: bool) -> str:
    """Resume, report a step, and end on one rank; the others hear of it from a save. Return what they heard.

    As torchrun does, the others are asked to stop then.
    """
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], timeout_s=WAIT_S)
    try:
        with StopRequest() as stop, contextlib.ExitStack() as ends:
            ends.callback(lambda: manager.close(stop=stop))
            state = built(job.wrapped)
            info = manager.resume(state)
            assert info is not None
            manager.report(info.step + 1, 0.5)
            manager.ranks.exchange(None, what="have all reported")
            if rank != who:
                with contextlib.suppress(CkptMirrorError):
                    manager.save(info.step + 1, state).wait()
                os.kill(os.getpid(), signal.SIGTERM)
                manager.save(info.step + 1, state).wait()
            elif kills:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise ZeroDivisionError
    except (CkptMirrorError, ZeroDivisionError) as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(("nodes", "who", "kills"), [("ab", 0, True), ("ab", 1, True), ("aa", 1, False)])
def test_that_another_rank_died_is_no_end_in_order(nodes: str, who: int, kills: bool, tmp_path: Path) -> None:
    Job(tmp_path, nodes, (1, 2)).run()
    for _ in range(3):
        said = Job(tmp_path, nodes).run(partial(die, who=who, kills=kills), dead=(who,) if kills else ())
        assert said[1 - who] in ("RankFailed", "BackgroundSaveFailed")
    assert [one.step for one in next_job(tmp_path, nodes)] == [1, 1]


def cannot_save(rank: int, job: Job, *, who: int, reports_first: bool) -> str:
    """Resume, report a step, and save what cannot be saved on one rank; the leaders are killed when they hear of it."""
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], timeout_s=WAIT_S)
    state = built(job.wrapped)
    info = manager.resume(state)
    assert info is not None
    if reports_first:
        manager.report(info.step + 1, 0.5)
    if rank == who:
        state.extra = {"fn": len}
    try:
        manager.save(info.step + 1, state).wait()
    except CkptMirrorError as error:
        if not reports_first:
            manager.report(info.step + 1, 0.5)
        if manager._node is not None:
            for note in manager._node._notes:
                note.result(WAIT_S)
            os.kill(os.getpid(), signal.SIGKILL)
        return str(error)
    return ""


@pytest.mark.parametrize("reports_first", [True, False])
def test_a_save_that_ckptmirror_refused_is_not_the_fault_of_the_one_before_it(
    reports_first: bool, tmp_path: Path
) -> None:
    Job(tmp_path, "aab", (1, 2)).run()
    for _ in range(3):
        part = partial(cannot_save, who=1, reports_first=reports_first)
        _, said, _ = Job(tmp_path, "aab").run(part, dead=(0, 2))
        assert "extra.fn" in said
    assert [one.step for one in next_job(tmp_path, "aab")] == [2, 2, 2]


@pytest.mark.parametrize("diverges", [(), (0,), (1,)], ids=["died", "diverged on node 0", "diverged on node 1"])
def test_all_ranks_of_the_fourth_job_go_back_together(diverges: tuple[int, ...], tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    jobs_that_fail(tmp_path, "ab", "ab", "ab", diverges=diverges)
    for node in "ab":
        (part,) = [line for line in list_checkpoints(tmp_path / node) if line.step == 2]
        assert part.quarantined
        assert part.why.startswith("node ")
        assert "; quarantined: 3 starts in a row failed from it" in part.why
    found = next_job(tmp_path, "ab")
    assert [one.step for one in found] == [1, 1]
    assert all("step 2 (save " in one.passed_over and "is quarantined" in one.passed_over for one in found)
    assert [one.step for one in next_job(tmp_path, "cd")] == [1, 1]  # which knows only what the mirror lists


def test_a_job_that_died_does_not_count_if_the_next_one_was_on_other_nodes(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    jobs_that_fail(tmp_path, "ab", "ac", "ab")
    assert [one.step for one in next_job(tmp_path, "ab")] == [2, 2]
    jobs_that_fail(tmp_path, "ac", "ab", diverges=(0,))  # and the last that died, after which the same nodes came back
    assert [one.step for one in next_job(tmp_path, "ab")] == [1, 1]


@pytest.mark.parametrize("diverges", [(), (0,)], ids=["died", "diverged"])
def test_of_jobs_whose_node_is_lost_only_those_that_diverged_count(diverges: tuple[int, ...], tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    jobs_that_fail(tmp_path, "ab", "ab", "ab", diverges=diverges)
    shutil.rmtree(tmp_path / "a")
    assert [one.step for one in next_job(tmp_path, "ab")] == [1 if diverges else 2] * 2
