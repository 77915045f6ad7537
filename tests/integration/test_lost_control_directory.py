"""``.ckptmirror`` deleted beside a live trainer: saves go on unless another took the root, snapshots always."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptmirror import CheckpointManager, Retention
from ckptmirror.core import events, names
from ckptmirror.core.errors import AttemptFenced, RootLocked
from ckptmirror.flow.places.attempt_lists import read_local_attempts
from ckptmirror.flow.status import is_mirrored
from ckptmirror.local import files
from ckptmirror.local.lock import RANKS_LOCK_NAME, is_held
from ckptmirror.local.uploads import UploadsTable
from tests.kit.cli import run
from tests.kit.processes import run_ranks
from tests.kit.roots import leftovers, whole
from tests.kit.training import everything, new_state, running, same, train

pytestmark = pytest.mark.long


def delete_control(root: Path) -> None:
    """As a person would, once more where the trainer wrote into it meanwhile."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            shutil.rmtree(root / names.CONTROL_DIR)
            return
    raise AssertionError("it is written to all the time")


def test_saves_are_committed_and_mirrored_after_the_control_directory_was_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    with CheckpointManager(root, [url], kinds=("model",), retention=Retention(keep_last=2)) as manager:
        state = new_state()
        manager.resume(state)
        for step in (1, 2):
            manager.save(step, state).wait("mirrored", timeout_s=60)
        delete_control(root)
        train(state)
        manager.save(3, state).wait()
        expected = everything(state)
        errors = [one.message for one in caplog.records if one.levelno == logging.ERROR]
        lines = {message for message in errors if "recreated" in message}  # a rotation may have failed before it
        assert len(lines) == 1  # said again where the deletion went on after the directory was recreated
        assert str(root / names.CONTROL_DIR) in lines.pop()
        with pytest.raises(RootLocked):
            CheckpointManager(root)
        manager.wait("mirrored", timeout_s=60)
        assert run("status", "--root", root).stdout.startswith("safe: ")
        assert manager.rotate() is not None
        assert sorted(whole(root)) == [2, 3]
        listed = read_local_attempts(root)
        assert listed is not None
        assert [one.id for one in listed.attempts] == [whole(root)[3].attempt.id]
        with UploadsTable.open(root / names.TABLE_NAME, read_only=True) as table:
            assert table.mirror_identity(url) is not None
    assert leftovers(root) == []
    with running(root, url) as manager:
        found = new_state(7)
        start = manager.resume(found)
        assert start is not None
        assert (start.step, start.passed_over) == (3, ())
        assert same(everything(found), expected)


def test_a_deletion_that_still_goes_on_while_the_directory_is_recreated_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, deleted = tmp_path / "root", []
    write_bytes = files.write_bytes

    def deleted_before(path: Path, data: bytes, **more: Any) -> None:
        if path.name == "attempts.json" and len(deleted) < 3:
            deleted.append(path)
            delete_control(root)
        write_bytes(path, data, **more)

    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        delete_control(root)
        monkeypatch.setattr(files, "write_bytes", deleted_before)
        manager.save(1, state).wait()
        assert len(deleted) == 3
    listed = read_local_attempts(root)
    assert listed is not None
    assert [one.id for one in listed.attempts] == [whole(root)[1].attempt.id]


def test_a_save_in_flight_is_committed_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.events.subscribe(
            lambda event: delete_control(root) if isinstance(event, events.HostCopied) and event.step == 1 else None
        )
        manager.save(1, state).wait()
        manager.save(2, state).wait()
        assert sorted(whole(root)) == [1, 2]
        assert leftovers(root) == []


def test_the_end_of_a_run_says_what_is_safe_after_the_control_directory_was_deleted(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    manager = CheckpointManager(root, [url], kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait("mirrored", timeout_s=60)
    delete_control(root)
    manager.close(timeout_s=60)
    assert is_mirrored(root, None)
    assert json.loads((root / names.STATUS_NAME).read_text())["status"] == "finished"


def test_a_snapshot_is_taken_without_a_control_directory_and_resumed_from(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        delete_control(root)
        train(state)
        manager.save_emergency_checkpoint(2, state)
        expected = everything(state)
        delete_control(root)
    with running(root) as manager:
        found = new_state(7)
        start = manager.resume(found)
        assert start is not None
        assert (start.step, start.kind) == (2, "emergency")
        assert same(everything(found), expected)


@pytest.mark.parametrize("other", ["runs", "ended", "ended without a save"])
def test_i11_a_trainer_whose_root_another_took_meanwhile_commits_nothing_more_and_still_leaves_a_snapshot(
    tmp_path: Path, other: str
) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as first:
        state = new_state()
        first.resume(state)
        first.save(1, state).wait()
        delete_control(root)
        with running(root, kinds=("model",)) as second:
            again = new_state()
            start = second.resume(again)
            assert start is not None
            assert start.step == 1
            if other != "ended without a save":
                second.save(2, again).wait()
            if other != "runs":
                second.close()
            for step in (8, 9):
                with pytest.raises(AttemptFenced, match="another process"):
                    first.save(step, state)
            first.save_emergency_checkpoint(9, state)
            if other == "runs":
                second.save(3, again).wait()
                second.close()
    assert sorted(whole(root)) == {"runs": [1, 2, 3, 9], "ended": [1, 2, 9]}.get(other, [1, 9])


def test_i11_a_root_that_is_not_the_directory_any_more_that_was_locked_is_not_taken_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        root.rename(tmp_path / "moved")
        root.mkdir()
        with pytest.raises(AttemptFenced):
            manager.save(2, state)
    assert not (root / names.LOCK_NAME).exists()
    assert whole(root) == {}


def goes_on_after_the_deletion(rank: int, root: str) -> list[bool]:
    manager = CheckpointManager(root, kinds=("model",), timeout_s=60.0)
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    dist.barrier()
    if rank == 0:
        delete_control(Path(root))
    dist.barrier()
    manager.save(2, state).wait()
    held = [is_held(Path(root) / RANKS_LOCK_NAME)] if manager._rank_lock is not None else []
    dist.barrier()
    manager.close()
    return held


def test_all_ranks_go_on_and_hold_their_locks_again(tmp_path: Path) -> None:
    found: list[Any] = run_ranks(2, goes_on_after_the_deletion, str(tmp_path / "root"))
    assert found == [[], [True]]
    assert sorted(whole(tmp_path / "root")) == [1, 2]
