"""A save for which the disk has no room is skipped, loudly, and training goes on (I8), on small disks for real."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptmirror import CheckpointManager, Retention, StopRequest, errors
from ckptmirror.core import events, names
from ckptmirror.flow.save.handle import SaveHandle
from ckptmirror.local import crashpoints
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.uploads import UploadsTable
from tests.kit.cli import run
from tests.kit.processes import run_ranks
from tests.kit.roots import leftovers, whole
from tests.kit.training import everything, new_state, running, same, train

SMALL = 300_000


class Heard:
    """Keeps the events of a manager, and says when one of a class has come."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.events: list[events.Event] = []
        self._more = threading.Condition()
        manager.events.subscribe(self)

    def __call__(self, event: events.Event) -> None:
        with self._more:
            self.events.append(event)
            self._more.notify_all()

    def of(self, cls: type[events.Event]) -> list[events.Event]:
        return [event for event in self.events if isinstance(event, cls)]

    def wait_for(self, cls: type[events.Event], count: int = 1) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.of(cls)) >= count, 120)


def test_i8_a_loop_goes_on_while_the_mirror_is_away_and_the_disk_is_full_and_saves_again_when_there_is_room(
    mounted: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CKPTMIRROR_RETRY_S", "0.5")
    caplog.set_level(logging.INFO)
    root, nfs = mounted("size=3m") / "run", tmp_path / "nfs"
    nfs.mkdir()
    manager = CheckpointManager(root, [f"file://{nfs}/run"], kinds=("model",), retention=Retention(keep_last=1))
    heard = Heard(manager)
    state = new_state()
    manager.resume(state)
    state.extra["large"] = "x" * SMALL
    manager.save(1, state).wait("mirrored", timeout_s=60)
    nfs.rename(tmp_path / "away")
    step = 1
    while len(heard.of(events.SaveSkipped)) < 3:  # the loop of the README: nobody waits for a handle
        step += 1
        assert step < 40
        train(state)
        manager.save(step, state)
    manager._started()._wait_for_earlier()
    skipped = [event.step for event in heard.of(events.SaveSkipped)]  # type: ignore[attr-defined]
    assert skipped == [*range(skipped[0], step + 1)]
    assert sorted(whole(root)) == [*range(1, skipped[0])]
    assert leftovers(root) == []
    assert not read_inventory(root).foreign
    with UploadsTable.open(root / names.TABLE_NAME, read_only=True) as table:
        assert {save.step for save in table.saves()} == set(range(1, skipped[0]))
    assert f"step {skipped[0]}: SKIPPED" in caplog.text
    assert [skip["step"] for skip in manager.status().trainer["skipped"]] == skipped
    ended = run("status", "--root", root)
    assert f"NOT SAVED: steps {', '.join(map(str, skipped))} were skipped" in ended.stdout

    (tmp_path / "away").rename(nfs)
    heard.wait_for(events.SaveRotated, skipped[0] - 2)
    step += 1
    manager.save(step, state).wait(timeout_s=60)
    assert max(whole(root)) == step
    with pytest.raises(errors.BackgroundSaveFailed, match=f"steps {skipped[0]}, .* were skipped") as caught:
        manager.close(timeout_s=60)
    assert isinstance(caught.value.__cause__, errors.LocalStorageFull)
    facts = json.loads((root / names.STATUS_NAME).read_text())
    assert (facts["status"], facts["pending"]) == ("finished", 0)
    again = CheckpointManager(root, [f"file://{nfs}/run"], kinds=("model",))
    start = again.resume(new_state())
    assert start is not None
    assert start.step == step
    again.close()


def test_the_handle_of_a_skipped_save_raises_and_what_its_caller_heard_is_not_raised_again(
    mounted: Callable[..., Path],
) -> None:
    root = mounted("size=2m") / "run"
    for mode in ("async", "blocking"):
        with CheckpointManager(root, kinds=("model",), mode=mode) as manager:  # type: ignore[arg-type]
            state = new_state()
            manager.resume(state)
            state.extra["large"] = "x" * 2_000_000
            handle = manager.save(1, state)
            with pytest.raises(errors.BackgroundSaveFailed) as caught:
                handle.wait(timeout_s=60)
            assert handle.skipped
            assert isinstance(caught.value.__cause__, errors.LocalStorageFull)
            assert "ckptmirror rotate --dry-run" in caught.value.hint
            manager.wait("committed")
    assert whole(root) == {}


def test_a_skipped_save_outlives_a_resume_and_an_explicit_wait_raises_it_once(
    mounted: Callable[..., Path],
) -> None:
    with running(mounted("size=2m") / "run", kinds=("model",)) as manager:
        manager.resume(new_state())
        state = new_state()
        state.extra["large"] = "x" * 2_000_000
        manager.save(1, state)
        manager.save(2, state)
        manager.resume(new_state())
        manager.save(3, new_state())
        with pytest.raises(errors.BackgroundSaveFailed, match="steps 1, 2 were skipped"):
            manager.wait("committed")
        manager.wait("committed")
        manager.close()


def test_a_stop_with_a_snapshot_newer_than_the_skipped_saves_ends_well(
    mounted: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = mounted("size=2m") / "run"
    manager = CheckpointManager(root, kinds=("model",))
    state = new_state()
    manager.resume(state)
    state.extra["large"] = "x" * 2_000_000
    manager.save(1, state)
    stop = StopRequest()
    stop.request("the test")
    del state.extra["large"]
    manager.save_emergency_checkpoint(2, state)
    manager.close(stop=stop)
    assert "step 1: SKIPPED" in caplog.text
    assert json.loads((root / names.STATUS_NAME).read_text())["status"] == "stopped"


@pytest.mark.parametrize("once_more", [False, True])
@pytest.mark.parametrize("followed", ["snapshot", "save"])
def test_a_stop_after_a_way_back_does_not_raise_what_was_skipped_before_it(
    followed: str, once_more: bool, mounted: Callable[..., Path]
) -> None:
    root = mounted("size=2m") / "run"
    manager = CheckpointManager(root, kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state)
    state.extra["large"] = "x" * 2_000_000
    manager.save(10, state).wait_over()
    del state.extra["large"]
    manager.resume(state, policy=1)
    stop = StopRequest()
    stop.request("the test")
    if followed == "save":
        manager.save(2, state)
    else:
        manager.save_emergency_checkpoint(2, state)
    if once_more:
        manager.resume(state)
    manager.close(stop=stop)
    assert json.loads((root / names.STATUS_NAME).read_text())["status"] == "stopped"


def test_a_stop_names_only_the_skipped_saves_that_nothing_followed(mounted: Callable[..., Path]) -> None:
    manager = CheckpointManager(mounted("size=2m") / "run", kinds=("model",))
    state = new_state()
    manager.resume(state)
    for step, size in ((1, 2_000_000), (2, 1), (3, 2_000_000)):
        state.extra["large"] = "x" * size
        manager.save(step, state).wait_over()
    stop = StopRequest()
    stop.request("the test")
    with pytest.raises(errors.BackgroundSaveFailed, match="The save of step 3 was skipped"):
        manager.close(stop=stop)


def test_a_snapshot_that_finds_no_room_waits_for_the_save_in_flight_and_takes_the_room_that_it_frees(
    mounted: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The save does not fit; the snapshot does, once what the save wrote is gone again."""
    place = mounted("size=4m")
    manager = CheckpointManager(place / "run", kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    state.extra["large"] = "x" * 700_000
    leave_free(place, 1_000_000)
    is_full, has_failed = threading.Event(), threading.Event()
    point, wait_over = crashpoints.point, SaveHandle.wait_over

    def hold(name: str) -> None:
        """Holds the save where its largest file is written."""
        point(name)
        if (
            threading.current_thread().name == "ckptmirror-save-2"
            and not is_full.is_set()
            and free_bytes(place) < 400_000
        ):
            leave_free(place, 0)
            is_full.set()
            assert has_failed.wait(60)

    def wait_and_let_go(handle: SaveHandle, timeout_s: float) -> None:
        has_failed.set()
        wait_over(handle, timeout_s)

    monkeypatch.setattr(crashpoints, "point", hold)
    handle = manager.save(2, state)
    assert is_full.wait(60)
    monkeypatch.setattr(SaveHandle, "wait_over", wait_and_let_go)
    state.extra["large"] = "x" * 600_000
    manager.save_emergency_checkpoint(3, state)
    with pytest.raises(errors.BackgroundSaveFailed):
        handle.wait()
    manager.close()
    assert sorted(whole(place / "run")) == [1, 3]


def free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def leave_free(place: Path, size_bytes: int) -> None:
    """Fill a file system but for so much."""
    with (place / "filler").open("ab") as filler:
        filler.write(bytes(free_bytes(place) - size_bytes))


def test_a_snapshot_without_room_goes_to_the_second_place_alone_and_the_next_start_brings_it(
    mounted: Callable[..., Path],
    tmp_path: Path,
) -> None:
    place, kept = mounted("size=4m"), tmp_path / "kept"
    root = place / "run"
    manager = CheckpointManager(root, kinds=("model",), persistent_dir=kept)
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    train(state)
    state.extra["large"] = "x" * 700_000
    leave_free(place, 400_000)
    stop = StopRequest()
    stop.request("the test")
    left = manager.save_emergency_checkpoint(2, state)
    manager.close(stop=stop)
    assert left.parent == kept
    expected = everything(state)
    assert sorted(whole(root)) == [1]
    assert leftovers(root) == []
    assert list(root.glob("emergency_step_*")) == []
    assert leftovers(kept) == []
    with running(root, persistent_dir=kept) as manager, pytest.raises(errors.LocalStorageFull):
        manager.resume(new_state())
    (place / "filler").unlink()
    with running(root, persistent_dir=kept) as manager:
        found = new_state()
        start = manager.resume(found)
        assert start is not None
        assert (start.step, start.kind) == (2, "emergency")
        assert same(everything(found), expected)


def skips_on_one_rank(rank: int, root: str) -> dict[str, Any]:
    """Rank 1 alone finds no room; then there is some."""
    manager = CheckpointManager(root, kinds=("model",), timeout_s=60.0)
    heard = Heard(manager)
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    if rank == 1:
        state.extra["large"] = "x" * 4_000_000
    manager.save(2, state)
    manager.save(3, state)
    state.extra.pop("large", None)
    manager.save(4, state)
    dist.barrier()
    try:
        manager.close()
        ended = ""
    except errors.BackgroundSaveFailed as error:
        ended = str(error)
    return {"skipped": [event.step for event in heard.of(events.SaveSkipped)], "ended": ended}  # type: ignore[attr-defined]


def test_a_save_that_one_rank_has_no_room_for_is_skipped_by_all(
    mounted: Callable[..., Path],
) -> None:
    root = mounted("size=3m") / "run"
    for found in run_ranks(2, skips_on_one_rank, str(root)):
        assert found["skipped"] == [2, 3]
        assert "steps 2, 3 were skipped" in found["ended"]
    assert sorted(whole(root)) == [1, 4]
    assert leftovers(root) == []
    assert not read_inventory(root).foreign
