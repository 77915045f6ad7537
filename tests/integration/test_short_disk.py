"""A disk that is short of space: safe saves go early, on small disks for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, Retention
from ckptmirror.core import events, names
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.retention import rotation
from ckptmirror.local.free_space import free_bytes, room_bytes
from tests.kit.mirrors import memory_url
from tests.kit.roots import MirroredRoot, whole
from tests.kit.training import everything, new_state, running, same, train

SMALL = 1_000


@pytest.fixture
def short(mounted: Callable[..., Path]) -> Callable[[int], MirroredRoot]:
    """Four saves of 800 KB, on the mirror, on a disk that has so much more room."""

    def make(left_bytes: int, *, uploaded: bool = True) -> MirroredRoot:
        place = MirroredRoot(mounted("size=16m") / "run", [memory_url()])
        for step in (100, 200, 300, 400):
            place.commit(step, sizes={f"model_{step:06d}.pt": 800_000}, size_bytes=SMALL)
        if uploaded:
            place.upload()
        leave_free(place.root.parent, left_bytes)
        return place

    return make


def leave_free(disk: Path, left_bytes: int) -> None:
    """Fill a disk but for so much."""
    with (disk / "filler").open("ab") as filler:
        filler.write(bytes(free_bytes(disk) - left_bytes))


def steps_of(place: MirroredRoot) -> list[int]:
    return sorted(whole(place.root))


def test_the_oldest_safe_saves_go_early_until_the_next_one_fits_and_no_others(
    short: Callable[[int], MirroredRoot], caplog: pytest.LogCaptureFixture
) -> None:
    place = short(300_000)
    report = place.rotate(keep_last=4, make_room=True)
    assert [step for step, _ in report.deleted] == [100, 200]
    assert steps_of(place) == [300, 400]
    assert set(report.plan.keep) == {meta.save_id for meta in mirror_catalog(place.mirrors[0]).saves.values()}
    told = [event for event in place.events if isinstance(event, events.SaveRotated)]
    assert [event.step for event in told] == [100, 200]
    assert all("the next save needs 1" in event.reason for event in told)
    assert all("every required mirror has it" in event.reason for event in told)
    assert "saves that the retention keeps were deleted early" in caplog.text
    assert place.rotate(keep_last=4, make_room=True).deleted == ()
    place.close()


def test_i1_nothing_goes_early_that_is_not_on_the_mirror_or_no_longer_there(
    short: Callable[[int], MirroredRoot],
) -> None:
    place = short(300_000, uploaded=False)
    assert place.rotate(keep_last=4, make_room=True).deleted == ()
    place.upload()
    gone = mirror_catalog(place.mirrors[0])
    first = next(meta for meta in gone.saves.values() if meta.step == 100)
    info = place.store.stat("model_000100.pt")
    assert info is not None
    place.store.delete("model_000100.pt", generation=info.generation)
    report = place.rotate(keep_last=4, make_room=True)
    assert "model_000100.pt is missing" in report.refused[first.save_id]
    assert [step for step, _ in report.deleted] == [200, 300]
    assert steps_of(place) == [100, 400]
    place.close()


def test_what_the_policy_does_not_keep_goes_first_and_may_be_room_enough(
    short: Callable[[int], MirroredRoot],
) -> None:
    place = short(1_100_000)
    assert [step for step, _ in place.rotate(keep_last=3, make_room=True).deleted] == [100]
    assert steps_of(place) == [200, 300, 400]
    place.close()


def test_what_a_save_in_flight_has_written_is_room_for_it(short: Callable[[int], MirroredRoot]) -> None:
    """Else the save in flight on a disk that has just room for it would push out one that is kept."""
    place = short(2_000_000)
    in_flight = place.root / names.tmp_name("dcp_000500", "1f0c9a2e" * 4)
    in_flight.mkdir()
    (in_flight / "__0_0.distcp").write_bytes(bytes(1_200_000))
    (place.root / names.tmp_name("model_000500.pt", "1f0c9a2e" * 4)).write_bytes(bytes(600_000))
    assert free_bytes(place.root) + 1_800_000 <= room_bytes(place.root)
    assert place.rotate(keep_last=4, make_room=True).deleted == ()
    in_flight.rename(place.root / "somebody's")
    assert [step for step, _ in place.rotate(keep_last=4, make_room=True).deleted] == [100, 200]
    place.close()


def test_a_trainer_on_a_disk_too_small_for_its_retention_skips_no_save_while_the_mirror_keeps_up(
    mounted: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, url = mounted("size=6m") / "run", f"file://{tmp_path}/mirror"
    told: list[events.Event] = []
    state = new_state()
    with CheckpointManager(root, [url], kinds=("model",), retention=Retention(keep_last=9, keep_every=1)) as manager:
        manager.events.subscribe(told.append)
        manager.resume(state)
        state.extra["large"] = "x" * 700_000
        for step in range(1, 13):
            train(state)
            manager.save(step, state).wait("mirrored", timeout_s=60)
            manager.rotate()
        assert not [event for event in told if isinstance(event, events.SaveSkipped)]
        went = [event.step for event in told if isinstance(event, events.SaveRotated)]
        assert went == list(range(1, len(went) + 1))
        assert sorted(whole(root)) == list(range(len(went) + 1, 13))
        assert 1 < len(whole(root)) < 9
    expected = everything(state)
    found = new_state()
    with running(root, url, kinds=("model",)) as manager:
        start = manager.resume(found)
    assert start is not None
    assert (start.step, start.place) == (12, "disk")
    assert same(everything(found), expected)


def test_a_trainer_that_keeps_every_step_deletes_none_however_full_the_disk_is(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    root, url = mounted("size=4m") / "run", f"file://{tmp_path}/mirror"
    with running(root, url, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        state.extra["large"] = "x" * 700_000
        for step in (1, 2, 3):
            manager.save(step, state).wait("mirrored", timeout_s=60)
            report = manager.rotate()
            assert report is not None
            assert report.deleted == ()
    assert sorted(whole(root)) == [1, 2, 3]


def test_a_start_that_makes_room_deletes_nothing_early(
    short: Callable[[int], MirroredRoot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be about to continue from what would go."""
    place = short(300_000)
    asked: list[bool] = []
    real = rotation.rotate

    def noted(*given: object, **more: object) -> object:
        asked.append(bool(more["make_room"]))
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("ckptmirror.flow.start.leader.rotate", noted)
    place.close()
    with running(place.root, retention=Retention(keep_last=4)) as manager:
        manager.rotate()
    assert asked == [False]
