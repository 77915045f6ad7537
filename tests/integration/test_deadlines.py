"""A time limit holds whatever a mirror does: the call that hangs is still hanging when the verb is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import DeadlinePassed, StoreTemporary
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.retention.rotation_thread import RotationThread
from ckptmirror.flow.upload.workers import UploadWorkers
from ckptmirror.stores import memory
from tests.kit.faulty_store import FaultyStore, StoreFault
from tests.kit.mirrors import memory_url
from tests.kit.training import new_state, saved_run, train

pytestmark = pytest.mark.long

LONGEST_S = 6.0  # what the end of a thread may take that a mirror holds up


class Stuck:
    """A mirror that answers, until it holds every call of some sort for longer than any test lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = memory_url()
        self.store = FaultyStore(memory.open(self.url))
        self.released = threading.Event()
        monkeypatch.setattr(memory, "open", lambda _url: self.store)

    def hold(self, operation: str) -> None:
        self.store.script(StoreFault(operation, hold=self.released, hold_limit_s=3600, times=0))

    def assert_still_held(self) -> None:
        assert not self.released.is_set()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    mirror = Stuck(monkeypatch)
    yield mirror
    mirror.released.set()


@pytest.fixture
def limits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long the ends of threads were waited for."""
    found: list[float] = []

    def noted(stop):
        def stop_and_note(self, limit_s: float) -> bool:
            found.append(limit_s)
            return stop(self, limit_s)

        return stop_and_note

    for kind in (RotationThread, UploadWorkers):
        monkeypatch.setattr(kind, "stop", noted(kind.stop))
    return found


def with_one_pending(root: Path, stuck: Stuck) -> None:
    """A root with a save that is verified, and one that is not."""
    saved_run(root, (1,), stuck.url)
    stuck.store.script(StoreFault("upload", when="before", times=0))
    with suppress(DeadlinePassed):
        manager = CheckpointManager(root, [stuck.url])
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save(2, state).wait()
        manager.close(timeout_s=0.0)


@pytest.mark.parametrize("operation", ["list", "read", "stat", "upload"])
def test_i7_a_drain_ends_at_its_deadline_whatever_a_mirror_holds_up(
    tmp_path: Path, stuck: Stuck, operation: str, limits_s: list[float]
) -> None:
    with_one_pending(tmp_path, stuck)
    limits_s.clear()
    stuck.hold(operation)
    report = drain(tmp_path, timeout_s=0.5 if operation == "list" else 3.0)  # on a busy machine a list takes its time
    stuck.assert_still_held()
    assert report.pending > 0
    assert (stuck.url in report.unasked) == (operation == "list")
    assert max(limits_s, default=0.0) <= LONGEST_S


def test_i7_a_push_ends_at_its_deadline_in_the_first_contact_too(tmp_path: Path, stuck: Stuck) -> None:
    saved_run(tmp_path, (1,))
    stuck.hold("read")
    with pytest.raises(StoreTemporary, match=r"did not answer within 0\.5 s"):
        push(tmp_path, stuck.url, timeout_s=0.5)
    stuck.assert_still_held()


@pytest.mark.parametrize("operation", ["list", "read", "stat", "upload"])
def test_i7_close_ends_at_its_deadline_whatever_a_mirror_holds_up(
    tmp_path: Path, stuck: Stuck, operation: str, limits_s: list[float]
) -> None:
    saved_run(tmp_path, (1,), stuck.url)
    manager = CheckpointManager(tmp_path, [stuck.url])
    state = new_state()
    manager.resume(state)
    manager.wait("mirrored")
    limits_s.clear()
    stuck.hold(operation)
    if operation != "list":  # else there is nothing pending, and the mirror is asked whether it still has all
        train(state)
        manager.save(2, state).wait()
        with pytest.raises(DeadlinePassed):
            manager.close(timeout_s=0.5)
    else:
        with pytest.raises(DeadlinePassed, match="it was not asked yet"):
            manager.close(timeout_s=0.5)
    stuck.assert_still_held()
    assert max(limits_s) <= LONGEST_S
