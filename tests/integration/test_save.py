"""Saving, in one process: what is on disk when, what a failure leaves behind, and who hears of it."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, Retention, StopRequest
from ckptmirror.core import events
from ckptmirror.core.errors import (
    BackgroundSaveFailed,
    DeadlinePassed,
    LocalStorageFull,
    RootLocked,
    StepBehind,
    UsageError,
    WaitTimeout,
)
from ckptmirror.flow.mirrors import MirrorSpec
from ckptmirror.flow.resolve import find_local_checkpoint_steps
from ckptmirror.local import crashpoints
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import memory
from ckptmirror.stores.faulty import StoreFault
from tests.small_training import (
    artifact,
    everything,
    faulty,
    killed_at,
    leftovers,
    new_state,
    refusing,
    running,
    same,
    saved_run,
    train,
    whole,
)

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


def test_no_tmp_files_after_save(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(10, state).wait()
        assert leftovers(tmp_path) == []
        assert sorted(whole(tmp_path)) == [10]


def test_a_save_returns_before_it_is_committed_and_says_when_it_is(tmp_path: Path) -> None:
    gate = threading.Event()
    with running(tmp_path) as manager:
        manager.events.subscribe(lambda event: isinstance(event, events.SaveCommitted) and gate.set())
        state = new_state()
        manager.resume(state)
        handle = manager.save(1, state)
        assert handle.done("copied")
        assert handle.wait("committed").save_id == whole(tmp_path)[1].save_id
        assert gate.wait(10)


def test_blocking_mode_returns_after_the_commit(tmp_path: Path) -> None:
    with running(tmp_path, mode="blocking") as manager:
        state = new_state()
        manager.resume(state)
        assert manager.save(1, state).done("committed")


def test_snapshot_is_isolated_from_inplace_update_of_the_next_steps(tmp_path: Path) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        before = everything(state)["model"]
        handle = manager.save(1, state)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.fill_(7.0)
        handle.wait()
        saved = torch.load(artifact(tmp_path, whole(tmp_path)[1], "model_"), weights_only=True)
    assert same(dict(before), saved)


def test_i3_a_save_is_committed_only_after_files_records_and_meta_are_durable_in_this_order(tmp_path: Path) -> None:
    with running(tmp_path, f"file://{tmp_path}/mirror", workers_per_mirror=0) as manager:
        state = new_state()
        manager.resume(state)
        crashpoints.arm()
        try:
            manager.save(1, state).wait()
            passed = crashpoints.passed()
        finally:
            crashpoints.disarm()
    added, released = passed.index("table.add_save:after"), passed.index("table.release_save:before")
    published = [n for n, name in enumerate(passed) if name == "save.publish:before"]
    last_published = max(n for n, name in enumerate(passed) if name == "save.publish:after")
    sealed = [n for n, name in enumerate(passed) if name == "file.fsync:after" and n < added]
    assert len(sealed) >= len(whole(tmp_path)[1].artifacts)
    assert added < min(published)
    meta = passed.index("file.publish:after", last_published)
    assert "dir.fsync:after" in passed[last_published:meta]
    assert "file.fsync:after" in passed[added : min(published)]  # the meta is sealed before anything is published
    assert "dir.fsync:after" in passed[meta:released]
    assert released < passed.index("link.replace:before")


def test_latest_never_names_an_uncommitted_step(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def look() -> None:
        while not stop.is_set():
            try:
                target = os.readlink(tmp_path / "latest")
            except FileNotFoundError:
                continue
            seen.append((target, (tmp_path / f"meta_{target.removeprefix('dcp_')}.json").exists()))

    stop = threading.Event()
    watcher = threading.Thread(target=look)
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        watcher.start()
        try:
            for step in range(1, 6):
                manager.save(step, state).wait()
                assert os.readlink(tmp_path / "latest") == f"dcp_{step:06d}"
        finally:
            stop.set()
            watcher.join()
    assert seen
    assert all(committed for _, committed in seen)


def test_a_thing_in_the_way_of_latest_does_not_make_a_committed_save_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        manager.save(2, state).wait()
    assert sorted(whole(tmp_path)) == [1, 2]
    assert "latest does not name it" in caplog.text


def test_watcher_sees_only_committed(tmp_path: Path) -> None:
    stop = threading.Event()
    broken: list[Any] = []

    def look() -> None:
        while not stop.is_set():
            for step in find_local_checkpoint_steps(tmp_path):
                meta = whole(tmp_path)[step]
                try:
                    for one in meta.artifacts:
                        verify_file(tmp_path / one.path, one.digest)
                except Exception as error:  # noqa: BLE001 - reported by the test
                    broken.append((step, error))

    watcher = threading.Thread(target=look)
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        watcher.start()
        try:
            for step in range(1, 6):
                manager.save(step, state)
            manager.wait("committed")
        finally:
            stop.set()
            watcher.join()
    assert broken == []


def test_same_step_redo(tmp_path: Path) -> None:
    """Saving a step again is another save under another name; the later one is resumed, the earlier one stays."""
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        first = manager.save(5, state).wait().save_id
        train(state)
        second = manager.save(5, state).wait().save_id
        after = everything(state)
    assert first != second
    assert (tmp_path / f"dcp_000005-{second[:8]}" / ".metadata").exists()
    assert (tmp_path / "dcp_000005" / ".metadata").exists()
    with running(tmp_path) as manager:
        state = new_state(seed=9)
        start = manager.resume(state)
        assert start is not None
        assert start.save_id == second
        assert same(everything(state), after)


def test_a_redo_after_a_crash_in_the_first_try_works(tmp_path: Path) -> None:
    assert killed_at("save.publish:before@2", lambda: saved_run(tmp_path, (1,)))
    states = saved_run(tmp_path, (1,))
    assert sorted(whole(tmp_path)) == [1]
    assert leftovers(tmp_path) == []
    assert states


def test_adding_a_kind_to_a_step_is_another_save_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, kinds=("dcp",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(3, state).wait()
        manager.save(3, state, kinds=("model",)).wait()
    assert "holds exactly the tensors" not in caplog.text
    with running(tmp_path) as manager:
        start = manager.resume(new_state(1))
        assert start is not None
        assert (start.step, start.kind) == (3, "dcp")


def test_identical_consecutive_saves_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        train(state)
        manager.save(2, state).wait()
        assert "holds exactly the tensors" not in caplog.text
        manager.save(3, state).wait()
    assert "step 3 holds exactly the tensors of the save before it" in caplog.text


def test_a_lower_step_is_a_rewind_and_refused_and_the_next_save_works(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(5, state)
        with pytest.raises(StepBehind):
            manager.save(4, state)
        manager.save(6, state).wait()
    assert sorted(whole(tmp_path)) == [5, 6]


def test_a_capture_that_fails_leaves_the_manager_usable(tmp_path: Path) -> None:
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


def test_completion_is_bound_to_save_id(tmp_path: Path) -> None:
    done: list[events.SaveCommitted] = []
    with running(tmp_path) as manager:
        both = threading.Event()

        def note(event: object) -> None:
            if isinstance(event, events.SaveCommitted):
                done.append(event)
                if len(done) == 2:
                    both.set()

        manager.events.subscribe(note)
        state = new_state()
        manager.resume(state)
        first = manager.save(1, state)
        second = manager.save(2, state)
        second.wait()
        assert first.done("committed")
        assert both.wait(10)
    assert [(event.step, event.save_id) for event in done] == [(1, first.save_id), (2, second.save_id)]
    assert {step: meta.save_id for step, meta in whole(tmp_path).items()} == {1: first.save_id, 2: second.save_id}


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


def test_a_failed_save_that_nobody_waited_for_is_raised_by_the_next_save_once(tiny_disk: Path) -> None:
    root = tiny_disk / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        state.extra["large"] = torch.zeros(MIB)
        manager.save(1, state)
        with pytest.raises(BackgroundSaveFailed, match="step 1"):
            manager.save(2, state)
        del state.extra["large"]
        manager.save(2, state).wait()
    assert sorted(whole(root)) == [2]


def test_a_root_that_vanishes_fails_the_save_and_is_heard_of(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        root.rename(tmp_path / "moved")
        handle = manager.save(2, state)
        with pytest.raises(BackgroundSaveFailed):
            handle.wait()
        (tmp_path / "moved").rename(root)
        manager.save(3, state).wait()
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
    started = time.monotonic()
    with pytest.raises(DeadlinePassed, match="not verified on their mirrors"):
        manager.close(timeout_s=1.0)
    assert time.monotonic() - started < 20
    assert sorted(whole(tmp_path / "root")) == [1]


def test_next_process_continues_the_queue(tmp_path: Path) -> None:
    """What one process could not send, the next one sends without being told."""
    mirror = tmp_path / "mirror"
    url = f"file://{mirror}"
    manager = CheckpointManager(tmp_path / "root", [url], workers_per_mirror=0)
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


def test_saving_before_resume_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with running(tmp_path) as manager, pytest.raises(UsageError, match="resume"):
        manager.save(1, new_state())


def test_metrics_that_are_not_finite_do_not_stop_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state, metrics={"loss": float("nan"), "lr": 0.5}, fields={"tracker": "abc"}).wait()
    meta = whole(tmp_path)[1]
    assert (dict(meta.metrics), meta.fields["tracker"]) == ({"lr": 0.5}, "abc")
    assert meta.training_config == {"width": 6}


def test_rss_flat_over_50_saves(tmp_path: Path) -> None:
    """The memory of the process does not grow with the number of saves."""
    with running(tmp_path, kinds=("model",), mode="blocking", retention=Retention()) as manager:
        state = new_state()
        state.extra["large"] = torch.zeros(MIB)
        manager.resume(state)
        for step in range(1, 11):
            manager.save(step, state)
        before = _rss_bytes()
        for step in range(11, 61):
            manager.save(step, state)
            for path in tmp_path.glob("*.pt"):
                path.unlink()
        grown = _rss_bytes() - before
    assert grown < 12 * MIB  # less than three states; fifty would be 200 MiB


def test_i5_no_save_replaces_a_file_that_somebody_put_there(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        (tmp_path / "model_000007.pt").write_bytes(b"a person's own")
        save_id = manager.save(7, state).wait().save_id
    assert (tmp_path / "model_000007.pt").read_bytes() == b"a person's own"
    assert save_id is not None
    assert whole(tmp_path)[7].tag == save_id[:8]


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
        started = time.monotonic()
        manager.close(stop=stop)
        assert time.monotonic() - started < 10
        alive.set()
    assert sorted(whole(tmp_path / "root")) == [1, 2, 3, 4]


def test_table_records_exist_for_every_artifact_and_mirror(tmp_path: Path) -> None:
    with running(tmp_path / "r", f"file://{tmp_path}/a", f"file://{tmp_path}/b", workers_per_mirror=0) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
    table = UploadsTable.open(tmp_path / "r/.ckptmirror/uploads.db", read_only=True)
    recorded = {(record.mirror, record.path) for record in table.records()}
    table.close()
    paths = {one.path for one in whole(tmp_path / "r")[1].artifacts} | {"meta_000001.json"}
    assert recorded == {(f"file://{tmp_path}/{m}", path) for m in ("a", "b") for path in paths}


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
