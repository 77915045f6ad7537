"""Saves asked for by several threads, or in the middle of another: each holds what its caller gave, or is refused."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState, find_local_checkpoint_steps, load_checkpoint
from ckptmirror.core.errors import CkptMirrorError, RootLocked, UsageError
from ckptmirror.flow.save.handle import TurnLock
from ckptmirror.flow.save.save import Saver
from ckptmirror.local.lock import RootLock
from tests.mirror_place import memory_url
from tests.small_training import faulty, running


class Filled(nn.Module):
    """A model whose every value is the number of its save."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((256, 1024), number))


def test_i9_saves_of_several_threads_hold_what_each_was_given(tmp_path: Path) -> None:
    rounds, callers = 6, 3
    with CheckpointManager(tmp_path, kinds=("model",)) as manager:
        manager.resume(TrainState(Filled(0.0)))
        barrier = threading.Barrier(callers)
        saved: dict[str, float] = {}
        failures: list[BaseException] = []

        def work(number: int) -> None:
            for turn in range(rounds):
                value = float(turn * callers + number + 1)
                barrier.wait(60)
                try:
                    handle = manager.save(turn, TrainState(Filled(value))).wait()
                except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
                    failures.append(error)
                    return
                saved[str(handle.save_id)] = value

        threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert failures == []
    found = {}
    for path in tmp_path.glob("meta_*.json"):
        loaded = load_checkpoint(path)
        (found[loaded.meta.save_id],) = loaded.model["weight"].unique().tolist()
    assert found == saved
    assert len(found) == rounds * callers


def test_a_save_in_the_middle_of_a_save_of_the_same_thread_is_refused_and_spoils_nothing(tmp_path: Path) -> None:
    refused: list[UsageError] = []
    with running(tmp_path, kinds=("model",)) as manager:
        manager.resume(TrainState(Filled(0.0)))

        class Interrupted(Filled):
            def state_dict(self, *arguments: object, **more: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
                signal.raise_signal(signal.SIGUSR1)
                return super().state_dict(*arguments, **more)  # type: ignore[misc,return-value,arg-type]

        def again(*_: object) -> None:
            with pytest.raises(UsageError, match="by a signal handler") as error:
                manager.save(2, TrainState(Filled(9.0)))
            refused.append(error.value)

        before = signal.signal(signal.SIGUSR1, again)
        try:
            manager.save(1, TrainState(Interrupted(1.0))).wait()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert refused
        assert "StopRequest" in refused[0].hint
        manager.save(2, TrainState(Filled(2.0))).wait()
    assert [load_checkpoint(tmp_path / f"model_00000{n}.pt").model["weight"].unique().tolist() for n in (1, 2)] == [
        [1.0],
        [2.0],
    ]


class Held:
    """Keeps the writing of saves from going on, as a slow disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        honest = Saver._write_all

        def write_all(saver: Saver, *arguments: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(60)
            return honest(saver, *arguments)

        monkeypatch.setattr(Saver, "_write_all", write_all)


@pytest.mark.parametrize("mirrored", [True, False])
def test_i3_an_interrupt_in_close_neither_ends_the_save_in_flight_nor_frees_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirrored: bool
) -> None:
    manager = CheckpointManager(tmp_path, [memory_url()] if mirrored else [], kinds=("model",))
    mirrors = faulty(manager)
    manager.resume(TrainState(Filled(0.0)))
    for mirror in mirrors:
        mirror.go_down()  # what is pending then does not hide the interrupt, and nobody waits for it
    held = Held(monkeypatch)
    handle = manager.save(1, TrainState(Filled(1.0)))
    assert held.begun.wait(30)
    threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    with pytest.raises(RootLocked):
        RootLock(tmp_path).acquire({"verb": "test"})
    held.go_on.set()
    handle.wait()
    manager_state = load_checkpoint(tmp_path)
    assert manager_state.model["weight"].unique().tolist() == [1.0]
    with suppress(CkptMirrorError):
        manager.close()
    lock = RootLock(tmp_path)
    lock.acquire({"verb": "test"})
    lock.release()


def test_a_save_that_waits_for_its_turn_is_saved_or_refused_when_the_manager_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, kinds=("model",))
    manager.resume(TrainState(Filled(0.0)))
    held = Held(monkeypatch)
    manager.save(1, TrainState(Filled(1.0)))
    assert held.begun.wait(30)
    accepted: list[str] = []
    refused: list[UsageError] = []

    def save_again() -> None:
        try:
            accepted.append(str(manager.save(2, TrainState(Filled(2.0))).step))
        except UsageError as error:
            refused.append(error)

    thread = threading.Thread(target=save_again)
    thread.start()
    threading.Timer(0.3, held.go_on.set).start()
    manager.close()
    thread.join(30)
    assert len(accepted) + len(refused) == 1
    assert find_local_checkpoint_steps(tmp_path) == ([1, 2] if accepted else [1])
    with pytest.raises(UsageError, match="closed"):
        manager.save(3, TrainState(Filled(3.0)))


def test_a_turn_that_was_left_by_an_error_is_free(tmp_path: Path) -> None:
    line = TurnLock()
    with pytest.raises(ZeroDivisionError):
        line.run("first", lambda: 1 // 0)
    done: list[bool] = []

    thread = threading.Thread(target=lambda: line.run("second", lambda: done.append(True)))
    thread.start()
    thread.join(30)
    assert done == [True]
