"""A trainer whose lock file was taken away: another may lead the root by now, so it commits nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core import events, names
from ckptmirror.core.errors import AttemptFenced, CkptMirrorError
from tests.kit.roots import leftovers, whole
from tests.kit.training import new_state, running


def taken_away(root: Path, how: str) -> None:
    lock = root / names.LOCK_NAME
    lock.unlink()
    if how == "replaced":
        lock.write_text("{}")


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_i11_a_trainer_whose_lock_file_went_commits_nothing_more(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        taken_away(root, how)
        for step in (2, 3):
            with pytest.raises(AttemptFenced, match=r"lock was deleted or replaced") as caught:
                manager.save(step, state)
            assert caught.value.exit_code == 7
        assert sorted(whole(root)) == [1]


def test_i11_a_save_in_flight_is_not_committed_either(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state)
        manager.events.subscribe(
            lambda event: taken_away(root, "deleted") if isinstance(event, events.HostCopied) else None
        )
        handle = manager.save(1, state)
        with pytest.raises(CkptMirrorError, match=r"lock was deleted or replaced"):
            handle.wait()
        assert sorted(whole(root)) == []
        assert leftovers(root) == []


def test_i11_of_two_trainers_on_a_root_the_one_without_the_lock_stops_and_the_other_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running(root, kinds=("model",)) as first:
        state = new_state()
        first.resume(state)
        first.save(1, state).wait()
        taken_away(root, "deleted")
        with CheckpointManager(root, kinds=("model",)) as second:
            again = new_state()
            start = second.resume(again)
            assert start is not None
            assert start.step == 1
            with pytest.raises(AttemptFenced):
                first.save(9, state)
            second.save(2, again).wait()
        assert sorted(whole(root)) == [1, 2]
        assert whole(root)[2].attempt.number > whole(root)[1].attempt.number
