"""Saves that fail, in one process: a full disk, a mirror that refuses or hangs, an end before all is done."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, StopRequest, TrainState
from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    AttemptFenced,
    BackgroundSaveFailed,
    CheckpointNotFound,
    DeadlinePassed,
    LocalStorageFull,
    RootLocked,
    StepBehind,
    UsageError,
    WaitTimeout,
)
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.save import commit
from ckptmirror.local.status_file import read_status_file
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import memory
from tests.integration.save_ranks_job import no_large_files
from tests.kit.faults import DiskFault, failing, faulty, refusing
from tests.kit.faulty_store import StoreFault
from tests.kit.roots import leftovers, whole
from tests.kit.training import new_state, running, saved_run, without_workers

MIB = 1024 * 1024
MIRROR = "memory://test-save/run"


@pytest.fixture(autouse=True)
def _fresh_memory() -> Iterator[None]:
    memory.drop("test-save")
    yield
    memory.drop("test-save")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_capture_that_fails_leaves_the_manager_usable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state)
        state.extra["bad"] = object()
        for _ in range(2):
            with pytest.raises(UsageError, match=r"extra\.bad"):
                manager.save(2, state)
        del state.extra["bad"]
        manager.save(2, state).wait()
        manager.wait("committed")
    assert sorted(whole(tmp_path)) == [1, 2]
    assert leftovers(tmp_path) == []
    assert "step 2 is still being written" not in caplog.text


def test_a_full_disk_fails_the_save_and_leaves_nothing_and_the_next_save_works(tiny_disk: Path) -> None:
    root = tiny_disk / "root"
    with running(root, kinds=("dcp", "model")) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        names_before = sorted(path.name for path in root.iterdir())
        filler = tiny_disk / "filler"
        with filler.open("wb") as file:
            free = os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize
            file.write(bytes(max(0, free - 48 * 1024)))
        state.extra["large"] = torch.zeros(64 * 1024)
        handle = manager.save(2, state)
        with pytest.raises(BackgroundSaveFailed) as failed:
            handle.wait()
        assert isinstance(failed.value.__cause__, LocalStorageFull)
        assert sorted(path.name for path in root.iterdir()) == names_before
        assert leftovers(root) == []
        assert os.readlink(root / "latest") == "dcp_000001"
        filler.unlink()
        manager.save(3, state).wait()
    assert sorted(whole(root)) == [1, 3]


def fail_unseen(manager: CheckpointManager, step: int, state: TrainState) -> None:
    """A save that fails, not for lack of room, and that nobody waits for."""
    with no_large_files(600):
        manager.save(step, state).wait_over()


def test_a_failed_save_that_nobody_waited_for_is_raised_by_the_next_save_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        fail_unseen(manager, 1, state)
        with pytest.raises(BackgroundSaveFailed, match="step 1"):
            manager.save(2, state)
        manager.save(2, state).wait()
    assert sorted(whole(root)) == [2]
    first, second = (one for one in caplog.messages if "the save failed" in one)
    assert first.endswith("; it left nothing behind")
    assert second.startswith("step 2: the save failed: it was not begun: The save of step 1 failed: ")
    assert "nothing behind" not in second


def test_the_records_of_a_failed_save_that_a_read_only_disk_keeps_delay_no_close(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    root = tmp_path / "run"
    manager = CheckpointManager(root, [url], kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait("mirrored", timeout_s=60)
    with failing(DiskFault(1, lasting=True, code=errno.EROFS, prefix=("save.publish", "trash."))):
        with pytest.raises(BackgroundSaveFailed, match="read-only"):
            manager.save(2, state).wait()
        with UploadsTable.open(root / names.TABLE_NAME, read_only=True) as table:
            assert [save.released for save in table.saves()] == [True, False]
        manager.wait("mirrored", timeout_s=20)
        manager.close(timeout_s=20)
    assert drain(root, timeout_s=20).is_verified
    with running(root, url) as manager:  # this one can remove them
        start = manager.resume(state)
        assert start is not None
        assert start.step == 1
        manager.save(2, state).wait("mirrored", timeout_s=60)
    assert leftovers(root) == []


def test_a_root_that_vanishes_fails_the_save_and_is_heard_of(tmp_path: Path) -> None:
    """Its lock goes with it, so another process may write there by now: only the next start goes on."""
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        root.rename(tmp_path / "moved")
        with pytest.raises((BackgroundSaveFailed, AttemptFenced)):
            manager.save(2, state).wait()
        (tmp_path / "moved").rename(root)
        with pytest.raises((BackgroundSaveFailed, AttemptFenced)):
            manager.save(3, state).wait()
        manager.close()
    assert saved_run(root, (3,), kinds=("model",))
    assert sorted(whole(root)) == [1, 3]


def test_exit_nonzero_if_last_save_not_durable(tmp_path: Path, tiny_disk: Path) -> None:
    state = new_state()
    state.extra["large"] = torch.zeros(MIB)
    manager = CheckpointManager(tiny_disk / "root")
    manager.resume(state)
    manager.save(1, state)
    with pytest.raises(BackgroundSaveFailed, match="step 1"):
        manager.close()
    manager = CheckpointManager(tmp_path / "root", [MIRROR])
    faulty(manager, refusing())
    manager.resume(new_state())
    manager.save(1, new_state())
    with pytest.raises(DeadlinePassed) as pending:
        manager.close()
    assert pending.value.exit_code == 8


def test_close_with_deadline_reports_unsent(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "root", [MIRROR])
    faulty(manager, StoreFault("upload", when="before", times=0))
    state = new_state()
    manager.resume(state)
    manager.save(1, state)
    with pytest.raises(DeadlinePassed, match="not verified on their mirrors"):
        manager.close(timeout_s=1.0)  # the mirror never answers
    assert sorted(whole(tmp_path / "root")) == [1]


def test_closing_again_raises_again_until_everything_is_verified(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    manager = without_workers(CheckpointManager(tmp_path / "root", [url]))
    manager.resume(new_state())
    manager.save(1, new_state()).wait()
    for _ in range(2):
        with pytest.raises(DeadlinePassed, match="not verified on their mirrors"):
            manager.close(timeout_s=0.0)
    assert drain(tmp_path / "root", timeout_s=30.0).is_verified
    manager.close()


def test_next_process_continues_the_queue(tmp_path: Path) -> None:
    """What one process could not send, the next one sends without being told."""
    mirror = tmp_path / "mirror"
    url = f"file://{mirror}"
    manager = without_workers(CheckpointManager(tmp_path / "root", [url]))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=0.0)
    assert not (mirror / "meta_000001.json").exists()
    with CheckpointManager(tmp_path / "root", [url]) as manager:
        assert manager.resume(new_state()) is not None
        manager.wait("mirrored", timeout_s=30)
    assert (mirror / "meta_000001.json").exists()


def test_the_handle_of_a_mirrored_save_says_so_after_close_and_of_another_that_it_will_not_be(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root", [f"file://{tmp_path}/mirror"]) as manager:
        manager.resume(state := new_state())
        mirrored = manager.save(1, state)
    assert mirrored.done("mirrored")
    assert mirrored.wait("mirrored") is mirrored
    manager = CheckpointManager(tmp_path / "root", [f"file://{tmp_path}/mirror"])
    faulty(manager, StoreFault("upload", when="before", times=0))
    manager.resume(state)
    waiting = manager.save(2, state)
    waiting.wait("committed")
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=0.0)
    assert not waiting.done("mirrored")
    with pytest.raises(DeadlinePassed, match="closed its manager"):
        waiting.wait("mirrored")


@pytest.mark.parametrize("asked_in", ["wait_mirrored", "_ask_once_more"])
def test_a_stop_request_that_comes_while_close_waits_for_a_mirror_ends_the_wait(asked_in: str, tmp_path: Path) -> None:
    """A finished job is preempted: without that, it would wait on until it is killed."""
    hold = threading.Event()
    stop = StopRequest()
    manager = CheckpointManager(tmp_path / "root", [f"file://{tmp_path}/mirror"])
    (store,) = faulty(manager)
    state = new_state()
    manager.resume(state)
    handle = manager.save(1, state)
    if asked_in == "_ask_once_more":
        handle.wait("mirrored")
    fault = StoreFault(times=0, when="before", hold=hold, hold_limit_s=60.0)
    store.script(fault)
    node = manager._node
    assert node is not None
    wait = getattr(node, asked_in)

    def waiting(*given: Any, **named: Any) -> Any:
        stop.request("preempted")
        return wait(*given, **named)

    setattr(node, asked_in, waiting)
    stopped: list[events.Event] = []
    manager.events.subscribe(lambda event: stopped.append(event) if isinstance(event, events.StopRequested) else None)
    ended = threading.Timer(30.0, hold.set)
    ended.start()
    try:
        manager.close(stop=stop)
        assert not hold.is_set(), "it waited for the mirror"
    finally:
        ended.cancel()
        hold.set()
    assert len(stopped) == 1
    assert read_status_file(tmp_path / "root")["status"] == "stopped"


@pytest.mark.parametrize(("stops", "snapshot"), [(True, 3), (True, None), (False, 3)])
def test_a_failed_save_does_not_count_if_the_run_was_stopped_and_a_snapshot_followed(
    stops: bool, snapshot: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, state, stop = CheckpointManager(tmp_path / "root", kinds=("dcp",)), new_state(), StopRequest()
    manager.resume(state)
    with no_large_files(600):
        manager.save(2, state).wait_over()
    if stops:
        stop.request("the test")
    if snapshot is not None:
        manager.save_emergency_checkpoint(snapshot, state)
    if stops and snapshot is not None:
        manager.close(stop=stop)
        assert "; step 3 followed, and the run was asked to stop" in caplog.text
    else:
        with pytest.raises(BackgroundSaveFailed, match="The save of step 2 failed"):
            manager.close(stop=stop)


@pytest.mark.parametrize(
    ("snapshot", "failed", "back_to", "then", "counts"),
    [
        (5, None, 1, 2, True),  # a snapshot of the attempt before does not follow
        (None, 10, 1, 3, False),  # steps of two attempts are not compared
        (None, 10, 1, None, True),
        (6, 5, 6, None, False),  # the attempt continued from what followed
    ],
)
def test_what_follows_a_failed_save_is_of_its_attempt_or_of_a_later_one(
    snapshot: int | None, failed: int | None, back_to: int, then: int | None, counts: bool, tmp_path: Path
) -> None:
    manager, state, stop = CheckpointManager(tmp_path / "root", kinds=("dcp",)), new_state(), StopRequest()
    manager.resume(state)
    manager.save(1, state).wait()

    def fail(step: int) -> None:
        with no_large_files(600):
            manager.save(step, state).wait_over()

    if failed is not None:
        fail(failed)
    if snapshot is not None:
        manager.save_emergency_checkpoint(snapshot, state)
    manager.resume(state, policy=back_to)
    if failed is None:
        fail(2)
    elif then is not None:
        manager.save_emergency_checkpoint(then, state)
    stop.request("the test")
    if counts:
        with pytest.raises(BackgroundSaveFailed, match=f"The save of step {failed or 2} failed"):
            manager.close(stop=stop)
    else:
        manager.close(stop=stop)


def test_a_failing_optional_mirror_never_stops_a_run_nor_its_end(tmp_path: Path) -> None:
    optional = MirrorSpec(MIRROR, required=False)
    with CheckpointManager(tmp_path / "root", [f"file://{tmp_path}/good", optional]) as manager:
        faulty(manager)[1].script(refusing())
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait("mirrored", timeout_s=30)


def test_leaving_by_an_error_still_commits_the_save_in_flight(tmp_path: Path) -> None:
    def train_and_fail() -> None:
        with CheckpointManager(tmp_path) as manager:
            state = new_state()
            manager.resume(state)
            manager.save(1, state)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_and_fail()
    assert sorted(whole(tmp_path)) == [1]


def test_i8_training_goes_on_while_the_mirror_refuses_and_the_status_says_so(tmp_path: Path) -> None:
    with running(tmp_path / "root", MIRROR) as manager:
        faulty(manager, refusing())
        failed = threading.Event()
        manager.events.subscribe(lambda event: failed.set() if isinstance(event, events.RecordFailed) else None)
        state = new_state()
        manager.resume(state)
        for step in (1, 2, 3):
            manager.save(step, state).wait()
        assert failed.wait(30)
        status = manager.status()
        assert (status.newest_step, status.newest_safe_step) == (3, None)
        assert status.unsafe_files > 0


def test_dead_mirror_does_not_slow_training(tmp_path: Path) -> None:
    """A mirror that takes every call and never answers holds up no save, and not the end of a stopped run."""
    alive = threading.Event()
    with running(tmp_path / "root", MIRROR) as manager:
        (store,) = faulty(manager)
        state = new_state()
        manager.resume(state)
        store.script(StoreFault(times=0, hold=alive))
        for step in range(1, 5):
            manager.save(step, state).wait()
        stop = StopRequest()
        stop.request("the test")
        manager.close(stop=stop)
        alive.set()
    assert sorted(whole(tmp_path / "root")) == [1, 2, 3, 4]


def test_an_emergency_without_room_is_an_error_and_touches_no_save(tiny_disk: Path) -> None:
    root = tiny_disk / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        state.extra["large"] = torch.zeros(MIB)
        with pytest.raises(LocalStorageFull):
            manager.save_emergency_checkpoint(2, state)
        del state.extra["large"]
        manager.save_emergency_checkpoint(3, state)
    assert sorted(whole(root)) == [1, 3]
    with running(root) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.kind) == (3, "emergency")


def test_a_close_that_runs_out_while_a_save_is_in_flight_keeps_the_lock(tmp_path: Path) -> None:
    """Another writer is let in only when the save's thread is done."""
    held, go_on = threading.Event(), threading.Event()

    class HeldTable:
        def __init__(self, table: UploadsTable) -> None:
            self._table = table

        def __getattr__(self, name: str) -> Any:
            return getattr(self._table, name)

        def add_save(self, *args: Any, **more: Any) -> Any:
            held.set()
            assert go_on.wait(30)
            return self._table.add_save(*args, **more)

    manager = CheckpointManager(tmp_path)
    state = new_state()
    manager.resume(state)
    leader = manager._saver._leader  # type: ignore[union-attr]
    assert leader is not None
    leader.table = HeldTable(leader.table)  # type: ignore[assignment]
    handle = manager.save(1, state)
    assert held.wait(30)
    with pytest.raises(WaitTimeout):
        manager.close(timeout_s=0.1)
    with pytest.raises(RootLocked):
        CheckpointManager(tmp_path)
    go_on.set()
    handle.wait()
    assert sorted(whole(tmp_path)) == [1]


def test_a_resume_after_a_failed_save_goes_back_and_one_that_fails_ends_the_attempt(tmp_path: Path) -> None:
    with running(tmp_path / "root", kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        fail_unseen(manager, 2, state)
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
        with pytest.raises(CheckpointNotFound):
            manager.resume(new_state(), policy=9)
        with pytest.raises(UsageError, match="resume"):
            manager.save(3, new_state())
        manager.resume(new_state())
        with pytest.raises(BackgroundSaveFailed, match="step 2"):  # heard of after all, once
            manager.save(3, new_state())
        manager.save(3, new_state()).wait()
    assert sorted(whole(tmp_path / "root")) == [1, 3]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_failed_save_that_nobody_saw_outlives_a_resume_and_is_raised_by_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resumed: bool
) -> None:
    manager = CheckpointManager(tmp_path / "root", kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    fail_unseen(manager, 2, state)
    manager.resume(new_state())
    assert "step 2 was not saved" in caplog.text
    if not resumed:
        with pytest.raises(CheckpointNotFound):
            manager.resume(new_state(), policy=9)
    with pytest.raises(BackgroundSaveFailed, match="step 2"):
        manager.close()


def test_a_save_that_failed_does_not_make_lower_steps_a_rewind(tmp_path: Path) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(5, state).wait()
        state.extra["bad"] = torch.zeros(4)
        with no_large_files(600), pytest.raises(BackgroundSaveFailed):
            manager.save(100_000, state).wait()
        with pytest.raises(StepBehind, match="before step 5"):
            manager.save(4, state)
        manager.save(6, state).wait()
    assert sorted(whole(tmp_path)) == [5, 6]


def test_a_save_that_exists_although_its_commit_failed_keeps_lower_steps_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = commit.SaveCommit.publish

    def publish_and_fail(this: commit.SaveCommit) -> None:
        honest(this)
        raise OSError(5, "after the meta has its name (the test's)")

    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        monkeypatch.setattr(commit.SaveCommit, "publish", publish_and_fail)
        with pytest.raises(BackgroundSaveFailed):
            manager.save(5, state).wait()
        monkeypatch.undo()
        with pytest.raises(StepBehind):
            manager.save(4, state)
    assert sorted(whole(tmp_path)) == [5]
