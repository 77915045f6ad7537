"""Two ranks that save and resume together: one rank's failure is everyone's, and the next save works."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError, LocalStorageUnwritable
from ckptmirror.formats import dcp
from ckptmirror.local import crashpoints
from ckptmirror.local.lock import RankLock
from ckptmirror.ranks.gloo import GlooRanks
from tests.integration.save_ranks_job import everything_that_happens
from tests.kit.faults import flip_bit
from tests.kit.processes import LIMIT_S, outcome, run_ranks
from tests.kit.roots import artifact, whole
from tests.kit.training import everything, new_state, running, same, saved_run

Found = list[dict[str, Any]]


class Job:
    """What both ranks found, and what lay where they began."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.single = {kind: saved_run(base / f"single-{kind}", (1, 2), kinds=(kind,)) for kind in ("dcp", "model")}
        self.ranks: Found = run_ranks(2, everything_that_happens, str(base))

    def expected(self, found: dict[str, Any], name: str) -> dict[str, Any]:
        """What a rank gets back: its own generators, data and extra, and rank 0's model, which all replicas share."""
        return {**self.ranks[0][name], **{part: found[name][part] for part in ("rng", "data", "extra")}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("ranks"))


def test_background_thread_issues_no_collective_on_training_group_while_saving(job: Job) -> None:
    assert [found["collectives"] for found in job.ranks] == [0, 0]


def test_a_capture_that_fails_on_one_rank_fails_the_save_on_all(job: Job) -> None:
    zero, one = job.ranks
    assert one["capture"][0] == "UsageError"
    assert "extra.bad" in one["capture"][1]
    assert zero["capture"][0] == "BackgroundSaveFailed"
    assert "rank 1 failed" in zero["capture"][1]
    assert [found["after capture"] for found in job.ranks] == [([1], [])] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_the_save_on_all_and_leaves_nothing(job: Job, victim: int) -> None:
    for found in job.ranks:
        assert found[f"write {victim}"][0] == "BackgroundSaveFailed"
        assert found[f"after write {victim}"] == ([1, 2], [])
    assert f"rank {victim}" in job.ranks[1 - victim][f"write {victim}"][1]


def test_a_commit_that_fails_on_the_leader_fails_the_save_on_all_and_leaves_nothing(job: Job) -> None:
    for found in job.ranks:
        assert found["commit"][0] == "BackgroundSaveFailed"
        assert "The disk is full" in found["commit"][1]
        assert found["after commit"] == ([1, 2, 3], [])


def test_different_steps_on_two_ranks_are_an_error_on_both(job: Job) -> None:
    for found in job.ranks:
        assert found["different steps"][0] == "BackgroundSaveFailed"
        assert found["after different steps"] == ([1, 2, 3, 4], [])


def test_a_failure_that_one_rank_alone_was_told_of_does_not_put_the_ranks_out_of_step(job: Job) -> None:
    for found in job.ranks:
        assert found["different knowledge"][0] == "BackgroundSaveFailed"
        assert found["next after that"][0] == "value"


def test_fast_rank_cannot_delete_a_slow_ranks_files(job: Job) -> None:
    zero, one = job.ranks
    assert one["slow rank"][1] == [True]
    assert zero["slow rank"][0][0] == one["slow rank"][0][0] == "BackgroundSaveFailed"
    assert zero["after slow rank"] == ([1, 2, 3, 4, 6, 7], [])


def test_save_numbers_agree_and_the_locks_are_free_at_the_end(job: Job) -> None:
    for found in job.ranks:
        assert found["numbers"] == sorted(found["numbers"])
        assert found["locks"][0] == "value"
    assert job.ranks[0]["numbers"] == job.ranks[1]["numbers"]


def test_an_emergency_newer_than_the_last_save_is_resumed_by_all_ranks(job: Job) -> None:
    for found in job.ranks:
        start, state = found["resume emergency"]
        assert start[:3] == (10, "emergency", "disk")
        assert same(state, job.expected(found, "state of 10"))
    assert job.ranks[0]["emergency"] == job.ranks[1]["emergency"]
    assert not same(job.ranks[0]["state of 10"]["rng"], job.ranks[1]["state of 10"]["rng"])


def test_wreck_is_skipped_on_resume(job: Job) -> None:
    """One rank's part of an emergency snapshot is missing."""
    for found in job.ranks:
        start, state = found["resume wreck"]
        assert start[:2] == (9, "dcp")
        assert same(state, job.expected(found, "state of 9"))


def test_resume_choice_is_one_vote_of_all_ranks(job: Job) -> None:
    """Only rank 1 sees the broken bytes; both go to the same older save."""
    for found in job.ranks:
        start, _ = found["resume broken"]
        assert start[:2] == (7, "dcp")
        assert any("rank 1" in line for line in start[3])
    assert job.ranks[0]["resume broken"][0] == job.ranks[1]["resume broken"][0]


def test_a_requested_step_is_loaded_or_an_error_on_every_rank(job: Job) -> None:
    for found in job.ranks:
        assert found["resume missing step"][0][2] == 3
        assert "no save of step 77" in found["resume missing step"][0][1]
        assert found["resume step"][0][0] == 3


def test_a_silent_required_mirror_and_an_empty_disk_are_a_temporary_error_on_all_ranks(job: Job) -> None:
    for found in job.ranks:
        assert found["resume silent mirror"][0][2] == 5
        assert "does not answer" in found["resume silent mirror"][0][1]


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_one_rank_saved_and_two_resume(job: Job, kind: str) -> None:
    saved = job.single[kind][2]
    for rank, found in enumerate(job.ranks):
        start, state = found[f"one to two {kind}"]
        assert start[:2] == (2, kind)
        for part in ("model", "optimizer", "scheduler", "ema", "scaler", "extra"):
            assert same(state[part], saved[part]), part
        assert same(state["rng"], saved["rng"]) == (rank == 0)


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_two_ranks_saved_and_one_resumes(job: Job, kind: str) -> None:
    root = job.base / "root"
    if kind == "model":
        flip_bit(artifact(root, whole(root)[2], ".metadata"))
    with running(root) as manager:
        state = new_state(seed=77)
        start = manager.resume(state, policy=2)
        assert start is not None
        assert (start.step, start.kind) == (2, kind)
    assert same(everything(state), job.ranks[0]["state of 2"])


def test_a_sharded_capture_that_fails_on_one_rank_hangs_nobody(job: Job) -> None:
    zero, one = job.ranks
    assert one["sharded capture"][0] == "UsageError"
    assert zero["sharded capture"][0] == "RankFailed"
    assert "extra.bad" in zero["sharded capture"][1]


@pytest.mark.parametrize("what", ["knowledge", "fence", "behind", "different steps"])
def test_what_fails_on_one_rank_before_its_collectives_fails_one_sharded_save_on_all(job: Job, what: str) -> None:
    for found in job.ranks:
        assert found[f"sharded {what}"][0] != "value"
        assert found[f"sharded after {what}"][0] == "value"


def test_who_was_behind_or_fenced_says_so_and_the_other_rank_names_it(job: Job) -> None:
    zero, one = job.ranks
    assert (zero["sharded fence"][0], one["sharded fence"][0]) == ("AttemptFenced", "RankFailed")
    assert (zero["sharded behind"][0], one["sharded behind"][0]) == ("StepBehind", "RankFailed")
    assert "rank 0 failed: a newer attempt" in one["sharded fence"][1]


def test_a_failure_that_one_rank_did_not_see_before_a_resume_is_raised_on_all_once(job: Job) -> None:
    for found in job.ranks:
        assert found["unseen resume"] == 1
        assert found["unseen next"][0] == "BackgroundSaveFailed"
        assert found["unseen after"][0] == "value"


def test_a_sharded_emergency_is_resumed_by_as_many_ranks(job: Job) -> None:
    for found in job.ranks:
        assert found["sharded resume"][0] == (3, "emergency")
        assert same(found["sharded resume"][1], found["sharded emergency state"])


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
def test_a_sharded_average_beside_a_whole_model_comes_back_on_every_rank(job: Job, kind: str) -> None:
    for found in job.ranks:
        loaded, (saved, fresh) = found[f"sharded ema {kind}"]
        assert {"model", "optimizer", "ema"} <= set(loaded)
        assert same(fresh, saved)


def test_another_world_size_joins_a_sharded_emergency(job: Job) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1), extra={})
    with running(job.base / "sharded") as manager:
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind) == (3, "emergency")
        assert same(dict(model.state_dict()), job.ranks[0]["sharded emergency state"])
        start = manager.resume(state, policy=2)
        assert start is not None
        assert (start.step, start.kind) == (2, "dcp")
    assert same(dict(model.state_dict()), job.ranks[0]["sharded saved"])


def sharded_state() -> TrainState:
    model = nn.Linear(6, 8)
    fully_shard(model)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def snapshot_of_two(_rank: int, root: str) -> None:
    with CheckpointManager(root, timeout_s=60.0) as manager:
        state = sharded_state()
        manager.resume(state)
        manager.save(1, state).wait()
        manager.save_emergency_checkpoint(2, state)


def where_it_goes_on(_rank: int, root: str) -> tuple[int, str]:
    with CheckpointManager(root, timeout_s=60.0) as manager:
        start = manager.resume(sharded_state())
        assert start is not None
        return start.step, start.kind


def test_a_sharded_emergency_outlives_starts_with_another_world_size(tmp_path: Path) -> None:
    run_ranks(2, snapshot_of_two, str(tmp_path))
    for _ in range(2):
        assert where_one_rank_goes_on(tmp_path)[:2] == (2, "emergency")
    assert run_ranks(2, where_it_goes_on, str(tmp_path)) == [(2, "emergency")] * 2
    flip_bit(next(tmp_path.glob("emergency_*/rank1.pt")))
    step, kind, skipped = where_one_rank_goes_on(tmp_path)
    assert (step, kind) == (1, "dcp")
    assert "rank1.pt" in skipped


def where_one_rank_goes_on(root: Path) -> tuple[int, str, str]:
    model = nn.Linear(6, 8)
    with running(root) as manager:
        start = manager.resume(TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    assert start is not None
    return start.step, start.kind, "; ".join(start.passed_over)


def save_until_killed(rank: int, root: str, dies: int) -> tuple[str, str, int]:
    """One of four ranks: a save, and another in which a rank is killed before its first fsync."""
    manager = CheckpointManager(root, kinds=("dcp",), timeout_s=10 * LIMIT_S)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 5))
    fully_shard(model)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.resume(state)
    manager.save(1, state).wait()
    if rank == dies:
        crashpoints.arm("file.fsync:before")
    found = outcome(lambda: manager.save(2, state).wait())
    with suppress(CkptMirrorError):  # which is that error again
        manager.close(timeout_s=0.0)
    return found


@pytest.mark.long
@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_rank_that_is_killed_in_a_save_of_kind_dcp_ends_that_save_on_the_others_at_once(
    dies: int, tmp_path: Path
) -> None:
    """Not at the limit of a wait, which is longer than this test's: ranks wait in torch's collectives for live ones."""
    found = run_ranks(4, save_until_killed, str(tmp_path), dies, dead=(dies,))
    for kind, message, _ in found[:dies] + found[dies + 1 :]:
        assert kind == "BackgroundSaveFailed"
        assert f"rank {dies} is gone" in message
    assert sorted(whole(tmp_path)) == [1]


def save_while_the_groups_go(rank: int, root: str, when: str, who: tuple[int, ...]) -> tuple[str, str, int]:
    """Ranks destroy all groups before torch's collectives, or while rank 1 waits in one for rank 0, which plans."""
    are_gone = threading.Event()
    where, name = (dcp, "_save") if when == "before" else (dcp._Planner, "create_global_plan")
    go_on = getattr(where, name)

    def late(*arguments: Any) -> Any:
        are_gone.wait()
        return go_on(*arguments)

    setattr(where, name, late)
    manager = CheckpointManager(root, kinds=("dcp",), timeout_s=600.0)
    state = new_state()
    manager.resume(state)
    handle = manager.save(1, state)
    if rank in who:
        destroy, dist.destroy_process_group = dist.destroy_process_group, lambda _group=None: None
        destroy()
    are_gone.set()
    found = outcome(lambda: handle.wait(timeout_s=600.0))
    with suppress(CkptMirrorError):  # which is that error again
        manager.close(timeout_s=0.0)
    return found


@pytest.mark.parametrize("who", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_save_whose_groups_the_training_destroys_fails_at_once_and_says_what_to_do(
    when: str, who: tuple[int, ...], tmp_path: Path
) -> None:
    """Not at the limit of a wait, which is longer than this test's."""
    found = run_ranks(2, save_while_the_groups_go, str(tmp_path), when, who)
    for kind, message, _ in [found[rank] for rank in who]:
        assert kind == "BackgroundSaveFailed"
        assert "the process groups were destroyed before kind dcp was written: call close() before" in message
    assert all(kind == "BackgroundSaveFailed" for kind, *_ in found)
    assert whole(tmp_path) == {}


def save_without_groups(rank: int, root: str) -> list[tuple[str, str, int]]:
    """Saves after the training destroyed all groups, the last after it made them again; one has what nothing saves."""
    manager = CheckpointManager(root, kinds=("model",), timeout_s=LIMIT_S)
    state = new_state()
    manager.resume(state)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    found = []
    for step, kinds in enumerate([("model",), ("model",), ("model",), ("dcp",), ("dcp",), ("model",), ("dcp",)], 1):
        if step == 7:
            again = dist.PrefixStore("again", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
        state.extra = {"own": threading.Lock()} if (rank, step) == (1, 2) else {}
        found.append(outcome(lambda step=step, kinds=kinds: manager.save(step, state, kinds=kinds).wait().step))  # type: ignore[misc]
    with suppress(CkptMirrorError):
        manager.close()
    return found


def test_saves_of_kind_model_go_on_without_groups_and_those_of_kind_dcp_say_what_they_lack(tmp_path: Path) -> None:
    for found in run_ranks(2, save_without_groups, str(tmp_path)):
        kinds, messages, _ = zip(*found, strict=True)
        assert [at for at, kind in enumerate(kinds, 1) if kind == "value"] == [1, 3, 6]
        assert all("the process groups were destroyed" in messages[at - 1] for at in (4, 5, 7))


def begin_and_save_without_groups(rank: int, root: str, who: tuple[int, ...]) -> list[tuple[str, str, int]]:
    """Two saves of kind dcp and another start on two nodes, after some ranks have destroyed all groups."""
    manager = CheckpointManager(f"{root}/{rank}", kinds=("dcp",), timeout_s=600.0)
    state = new_state()
    manager.resume(state)
    found = [outcome(lambda: manager.save(1, state).wait().step)]
    if rank in who:
        destroy, dist.destroy_process_group = dist.destroy_process_group, lambda _group=None: None
        destroy()
    found += [outcome(lambda step=step: manager.save(step, state).wait(timeout_s=600.0).step) for step in (2, 3)]  # type: ignore[misc]
    found.append(outcome(lambda: manager.resume(state)))
    with suppress(CkptMirrorError):
        manager.close(timeout_s=0.0)
    return found


@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_without_groups_on_a_rank_saves_of_kind_dcp_and_starts_fail_at_once_on_all(
    who: tuple[int, ...], tmp_path: Path
) -> None:
    for rank, found in enumerate(run_ranks(2, begin_and_save_without_groups, str(tmp_path), who)):
        kinds, messages, _ = zip(*found, strict=True)
        assert kinds[0] == "value"
        assert kinds[1:] == ("BackgroundSaveFailed",) * 2 + ("UsageError" if rank in who else "RankFailed",)
        assert all("the process groups were destroyed" in message for message in messages[2:])
        assert ("process groups were destroyed" in messages[1]) == (rank in who)


def save_with_a_late_rank(rank: int, root: str) -> tuple[list[tuple[str, str, int]], int]:
    """Three saves; in the second, rank 1 comes to the first collective only after rank 0 has given it up."""
    gave_up = dist.distributed_c10d._get_default_store()
    write, cut = dcp._save, GlooRanks._break_torch_group

    def late(*arguments: Any) -> Any:
        gave_up.wait(["gave up"], timedelta(seconds=LIMIT_S))
        return write(*arguments)

    def told(ranks: GlooRanks) -> None:
        gave_up.set("gave up", "")
        cut(ranks)

    GlooRanks._break_torch_group = told  # type: ignore[method-assign]
    manager = CheckpointManager(root, kinds=("dcp",), timeout_s=5.0)
    state = new_state()
    manager.resume(state)
    found = []
    for step in (1, 2, 3):
        dcp._save = late if (rank, step) == (1, 2) else write
        found.append(outcome(lambda step=step: manager.save(step, state).wait().step))  # type: ignore[misc]
    manager.close()
    again = CheckpointManager(root, kinds=("dcp",), timeout_s=LIMIT_S)
    start = again.resume(new_state())
    again.close()
    return found, start.step if start is not None else 0


@pytest.mark.long
def test_a_save_whose_collective_came_to_its_limit_does_not_fail_the_next(tmp_path: Path) -> None:
    for (first, second, third), step in run_ranks(2, save_with_a_late_rank, str(tmp_path)):
        assert (first, third) == (("value", "1", 0), ("value", "3", 0))
        assert second[0] == "BackgroundSaveFailed"
        assert step == 3


def save_without_a_lock(rank: int, root: str) -> tuple[str, str, int | None]:
    """Rank 1 cannot take its lock again before its second save; then both leave a snapshot."""
    is_refused = False

    def refused(_lock: RankLock) -> None:
        if is_refused:
            raise LocalStorageUnwritable("Cannot open the lock file: no permission.")

    RankLock.retake = refused  # type: ignore[method-assign]
    state = new_state()
    with CheckpointManager(root, kinds=("model",), timeout_s=LIMIT_S) as manager:
        manager.resume(state)
        manager.save(1, state).wait("committed", timeout_s=LIMIT_S)
        is_refused = rank == 1
        try:
            manager.save(2, state).wait("committed", timeout_s=LIMIT_S)
            told = ("", "")
        except CkptMirrorError as error:
            told = (type(error).__name__, error.message)
        manager.save_emergency_checkpoint(3, state)
    with CheckpointManager(root, kinds=("model",), timeout_s=LIMIT_S) as manager:
        start = manager.resume(state)
        return *told, start.step if start is not None else None


def test_a_rank_that_cannot_take_its_lock_again_fails_the_save_on_all_at_once_and_tears_no_snapshot(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, save_without_a_lock, str(tmp_path))
    assert first == ("BackgroundSaveFailed", first[1], 3)
    assert "rank 1 failed" in first[1]
    assert "no permission" in first[1]
    assert second == ("LocalStorageUnwritable", "Cannot open the lock file: no permission.", 3)


def test_a_lock_file_that_cannot_be_looked_at_is_not_taken_for_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RankLock(tmp_path)
    lock.acquire()

    def refused(path: object, **_more: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refused)
        lock.retake()
    assert lock.held
    lock.release()
