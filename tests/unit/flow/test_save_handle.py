"""What the caller of save can wait for."""

from __future__ import annotations

import threading

import pytest

from ckptmirror.core.errors import (
    BackgroundSaveFailed,
    LocalStorageFull,
    LocalStorageUnwritable,
    UsageError,
    WaitTimeout,
)
from ckptmirror.flow.save.handle import SaveHandle, raise_skipped


def test_phases_come_in_order_and_a_later_one_includes_the_earlier() -> None:
    handle = SaveHandle(1, ("dcp",))
    assert not handle.done("copied")
    handle.reach("committed")
    handle.reach("copied")
    assert handle.done("copied")
    assert handle.done("committed")
    assert not handle.done("mirrored")


def test_a_wait_ends_when_another_thread_reaches_the_phase() -> None:
    handle = SaveHandle(1, ("dcp",))
    threading.Thread(target=lambda: handle.reach("committed")).start()
    assert handle.wait("committed", timeout_s=10) is handle


def test_a_wait_that_runs_out_says_for_what() -> None:
    with pytest.raises(WaitTimeout, match="Step 1 was not committed within 0 s"):
        SaveHandle(1, ("dcp",)).wait("committed", timeout_s=0)


def test_an_unknown_phase_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="never 'done'"):
        SaveHandle(1, ("dcp",)).wait("done")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="never 'verified'"):
        SaveHandle(1, ("dcp",)).done("verified")  # type: ignore[arg-type]


def test_a_failure_keeps_its_cause_and_hint_and_frees_every_wait() -> None:
    handle = SaveHandle(7, ("dcp",))
    handle.fail(LocalStorageUnwritable("no permission"))
    for phase in ("copied", "committed", "mirrored"):
        with pytest.raises(BackgroundSaveFailed, match="step 7 failed: no permission") as failed:
            handle.wait(phase, timeout_s=0)  # type: ignore[arg-type]
        assert isinstance(failed.value.__cause__, LocalStorageUnwritable)
        assert failed.value.hint == LocalStorageUnwritable.hint
    handle.wait_over(timeout_s=0)


def test_skipped_saves_are_raised_together_and_once_and_only_those_that_nobody_saw() -> None:
    skipped = [SaveHandle(step, ("dcp",)) for step in range(15)]
    for handle in skipped:
        handle.fail(LocalStorageFull("no room"))
        handle.raise_unobserved()
    with pytest.raises(BackgroundSaveFailed, match="step 14 was skipped: no room"):
        skipped[14].wait()
    with pytest.raises(BackgroundSaveFailed, match=r"steps 4, 5, .*13, and 4 before them, were skipped") as all_of:
        raise_skipped(skipped)
    assert isinstance(all_of.value.__cause__, LocalStorageFull)
    raise_skipped(skipped)


def test_a_failure_that_nobody_saw_is_raised_once() -> None:
    handle = SaveHandle(7, ("dcp",))
    handle.raise_unobserved()
    handle.fail(OSError("gone"))
    with pytest.raises(BackgroundSaveFailed):
        handle.raise_unobserved()
    handle.raise_unobserved()


def test_a_failure_that_was_seen_is_not_raised_again() -> None:
    waited, told = SaveHandle(7, ("dcp",)), SaveHandle(7, ("dcp",))
    waited.fail(OSError("gone"))
    with pytest.raises(BackgroundSaveFailed):
        waited.wait()
    waited.raise_unobserved()
    told.observed()
    told.fail(OSError("gone"))
    told.raise_unobserved()


def test_mirrored_is_asked_with_what_is_left_of_the_limit() -> None:
    asked: list[tuple[str, float]] = []

    def ask(save_id: str, timeout_s: float) -> bool:
        asked.append((save_id, timeout_s))
        return timeout_s > 0

    handle = SaveHandle(1, ("dcp",))
    handle.on_mirrored(ask)
    handle.save_id = "id"
    handle.reach("committed")
    assert not handle.done("mirrored")
    handle.wait("mirrored", timeout_s=5)
    assert handle.done("mirrored")
    assert [save_id for save_id, _ in asked] == ["id"] * 3
    assert 4 < asked[-1][1] <= 5
