"""Emergency snapshots: SIGTERM to real ranks, what is left in time, and what the next start makes of it."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import StopRequest
from ckptmirror.core.errors import RefusedOnlyCopy
from ckptmirror.core.start.evidence import DISK
from ckptmirror.flow.save.persistent_dir import snapshots_in
from ckptmirror.flow.status import read_status
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import memory
from tests.kit.cli import run as cli
from tests.kit.faults import faulty, flip_bit, refusing
from tests.kit.training import everything, new_state, running, same, saved_run, train

PROJECT = Path(__file__).resolve().parents[2]


class Lines:
    """The lines of JSON that a job writes to a named pipe."""

    def __init__(self, pipe: Path) -> None:
        self._descriptor = os.open(pipe, os.O_RDWR)  # also a writer, so that it never ends
        self._read = b""

    def until(self, event: str, **facts: object) -> dict[str, Any]:
        """Wait for a line of this event with these facts."""
        while True:
            line, found, rest = self._read.partition(b"\n")
            if not found:
                assert select.select([self._descriptor], [], [], 60)[0], f"no {event} {facts} within 60 s"
                self._read += os.read(self._descriptor, 65536)
                continue
            self._read = rest
            said: dict[str, Any] = json.loads(line)
            if said["event"] == event and facts.items() <= said.items():
                return said


def _emergency(root: Path, step: int, *mirrors: str) -> tuple[Path, dict[str, object]]:
    """Resume, train to ``step``, leave an emergency snapshot; return its directory and the state."""
    with running(root, *mirrors) as manager:
        state = new_state()
        start = manager.resume(state)
        train(state, step - (start.step if start is not None else 0))
        return manager.save_emergency_checkpoint(step, state), everything(state)


def test_an_emergency_newer_than_the_last_save_is_resumed_exactly(tmp_path: Path) -> None:
    saved_run(tmp_path, (3,))
    directory, left = _emergency(tmp_path, 5)
    assert directory.name.startswith("emergency_step_000005_")
    assert os.readlink(tmp_path / "latest") == directory.name
    with running(tmp_path) as manager:
        state = new_state(seed=9)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind, start.place) == (5, "emergency", DISK)
        assert same(everything(state), left)
        train(state)
        manager.save(6, state).wait()
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.kind) == (6, "dcp")


def test_of_one_step_an_emergency_that_came_after_the_save_is_resumed_from(tmp_path: Path) -> None:
    """Validation, say, has changed the schedule and the counters since."""
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        handle = manager.save(4, state)
        state.extra["validated"] = True
        manager.save_emergency_checkpoint(4, state)  # while the save is still being written
        handle.wait()
    fresh = new_state()
    with running(tmp_path) as manager:
        start = manager.resume(fresh)
        assert start is not None
        assert (start.step, start.kind) == (4, "emergency")
    assert fresh.extra["validated"] is True


def test_of_one_step_a_save_that_came_after_the_emergency_is_resumed_from(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save_emergency_checkpoint(4, state)
        manager.save(4, state).wait()
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.kind) == (4, "dcp")


def test_two_emergencies_of_one_step_do_not_touch_one_another(tmp_path: Path) -> None:
    first, _ = _emergency(tmp_path, 2)
    second, _ = _emergency(tmp_path, 2)
    whole = [save for save in read_inventory(tmp_path).saves if save.meta.kinds == ("emergency",)]
    assert len(whole) == 2
    assert first != second


@pytest.mark.parametrize("damage", ["flip", "no meta", "no file", "half a file"])
def test_wreck_of_an_emergency_is_passed_over(tmp_path: Path, damage: str) -> None:
    saved_run(tmp_path, (3,))
    directory, _ = _emergency(tmp_path, 5)
    file = directory / "rank0.pt"
    if damage == "flip":
        flip_bit(file)
    elif damage == "no meta":
        (directory / "meta_rank0.json").unlink()
    elif damage == "no file":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:1000])
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.kind) == (3, "dcp")
    assert directory.exists()


def test_a_broken_emergency_alone_forbids_a_fresh_start(tmp_path: Path) -> None:
    directory, _ = _emergency(tmp_path, 5)
    flip_bit(directory / "rank0.pt")
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy, match="step 5"):
        manager.resume(new_state())


def test_an_emergency_stays_where_it_is_and_blocks_no_end_of_the_run(tmp_path: Path) -> None:
    """It has no upload records: a run that finishes later is not held up by it."""
    memory.drop("test-emergency")
    mirror = "memory://test-emergency/run"
    _emergency(tmp_path, 5, mirror)
    saved_run(tmp_path, (6,), mirror)
    assert [path.name for path in tmp_path.glob("emergency_*")]


def test_i8_an_emergency_on_this_disk_alone_is_not_called_safe(tmp_path: Path) -> None:
    memory.drop("test-emergency")
    root, mirror = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (3,), mirror)
    _emergency(root, 5, mirror)
    status = read_status(root)
    assert (status.newest_safe_step, status.emergency_step) == (3, 5)
    assert cli("status", "--root", root).stdout.startswith(
        "NOT SAFE: the newest state, step 5, is an emergency snapshot"
    )
    drained = cli("drain", "--root", root)
    assert drained.returncode == 0
    assert "step 5, is an emergency snapshot only on this disk" in drained.stderr
    pushed = cli("push", "--root", root, "--mirror", f"file://{tmp_path}/another")
    assert pushed.returncode == 0, pushed.stderr
    saved_run(root, (6,), mirror)
    assert read_status(root).emergency_step is None
    assert cli("status", "--root", root).stdout.startswith("safe")


def test_a_stopped_run_ends_in_order_with_uploads_pending(tmp_path: Path) -> None:
    """Exit code 0 and status `stopped`; how much is pending is said."""
    memory.drop("test-emergency")
    with running(tmp_path, "memory://test-emergency/run") as manager:
        faulty(manager, refusing())
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        stop = StopRequest()
        stop.request("the test")
        manager.save_emergency_checkpoint(2, state)
        manager.close(stop=stop)  # does not raise
    status = json.loads((tmp_path / ".ckptmirror/status.json").read_text())
    assert status["status"] == "stopped"
    assert status["pending"] > 0


@pytest.mark.long
@pytest.mark.timeout(120)
def test_local_commit_within_grace_budget(tmp_path: Path) -> None:
    """SIGTERM to one of two ranks of a real job: both stop at the same step, durable, before the launcher kills.

    The job has a mirror that is gone by then: the end waits for no upload.
    """
    (tmp_path / "away").mkdir()
    notes = tmp_path / "notes"
    os.mkfifo(notes)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "ckptmirror.integrations.plain_loop", "--root", str(tmp_path / "root"), "--notes", str(notes)),
        *("--mirror", f"file://{tmp_path}/away/mirror", "--steps", "1000000", "--save-every", "4"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    lines = Lines(notes)
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        pid = lines.until("start")["pid"]
        lines.until("step", step=6)
        (tmp_path / "away").rename(tmp_path / "gone")
        os.kill(pid, signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 0, errors  # a close that waited for the upload would do so for ten minutes
    stopped = lines.until("stopped")
    newest = max(read_inventory(tmp_path / "root").saves, key=lambda save: (save.meta.step, save.meta.save_number))
    assert (newest.meta.step, newest.meta.kinds) == (stopped["step"], ("emergency",))
    assert newest.meta.world_size == 2
    shutil.rmtree(tmp_path / "root")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_ranks_of_a_job_each_copy_their_part(tmp_path: Path) -> None:
    """SIGTERM to a real job of two ranks, then a machine without its disk: the same command goes on from the copy."""
    notes = tmp_path / "notes"
    os.mkfifo(notes)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "ckptmirror.integrations.plain_loop", "--root", str(tmp_path / "root"), "--notes", str(notes)),
        *("--persistent-dir", str(tmp_path / "kept"), "--steps", "1000000", "--save-every", "4"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    lines = Lines(notes)
    found = []
    for _ in range(2):
        job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            said = lines.until("start")
            lines.until("step", step=(said["step"] or 0) + 2)
            os.kill(said["pid"], signal.SIGTERM)
            _, errors = job.communicate(timeout=60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.communicate()
        assert job.returncode == 0, errors
        found.append((said["step"], lines.until("stopped")["step"]))
        shutil.rmtree(tmp_path / "root")
    assert found[1][0] == found[0][1]
    metas = snapshots_in(tmp_path / "kept").values()
    assert {(meta.step, meta.world_size) for meta in metas} == {(stopped, 2) for _, stopped in found}
