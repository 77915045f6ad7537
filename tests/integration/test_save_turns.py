"""Saves asked for by several threads, or in the middle of another: each holds what its caller gave, or is refused."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState, load_checkpoint
from ckptmirror.core.errors import UsageError
from ckptmirror.flow.handle import Line
from tests.small_training import running


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


def test_a_turn_that_was_left_by_an_error_is_free(tmp_path: Path) -> None:
    line = Line()
    with pytest.raises(ZeroDivisionError):
        line.run("first", lambda: 1 // 0)
    done: list[bool] = []

    thread = threading.Thread(target=lambda: line.run("second", lambda: done.append(True)))
    thread.start()
    thread.join(30)
    assert done == [True]
