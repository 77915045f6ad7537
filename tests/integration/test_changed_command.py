"""The command of a run has changed since the save: what does not fit is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import TrainState
from ckptmirror.core.errors import UsageError
from tests.kit.processes import run_ranks
from tests.kit.training import everything, new_state, running, same, saved_run, train

optim = torch.optim
schedulers = optim.lr_scheduler


def other_optimizer(build: Callable[..., Any]) -> TrainState:
    state = new_state(seed=1)
    state.optimizer = build(state.model.parameters(), lr=0.1)
    state.scheduler = schedulers.LinearLR(state.optimizer, start_factor=0.1, total_iters=50)
    return state


def refused(root: Path, state: TrainState, **arguments: Any) -> UsageError:
    """Resume into ``state``, which is refused and stays as it is."""

    def values() -> dict[str, Any]:
        plain = {key: value for key, value in state.extra.items() if key != "critic"}
        return everything(replace(state, extra=plain))

    before = values()
    with running(root) as manager, pytest.raises(UsageError) as error:
        manager.resume(state, **arguments)
    assert same(values(), before)
    return error.value


@pytest.mark.parametrize("kind", ["dcp", "model"])
@pytest.mark.parametrize("build", [optim.Adam, optim.SGD, optim.Adagrad, optim.NAdam])
def test_the_state_of_an_optimizer_of_another_class_is_refused_with_both_and_their_settings(
    tmp_path: Path, kind: str, build: Any
) -> None:
    saved_run(tmp_path, (3,), kinds=(kind,))
    error = refused(tmp_path, other_optimizer(build))
    assert "In the save: optimizer AdamW (lr=" in str(error)
    assert f"Here: optimizer {build.__name__} (lr=" in str(error)
    assert "betas=(0.9, 0.999)" in str(error)
    assert 'exclude=("optimizer",)' in error.hint


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_the_state_of_a_scheduler_of_another_class_is_refused(tmp_path: Path, kind: str) -> None:
    saved_run(tmp_path, (3,), kinds=(kind,))
    state = new_state(seed=1)
    state.scheduler = schedulers.OneCycleLR(state.optimizer, max_lr=0.1, total_steps=50)
    error = refused(tmp_path, state)
    assert "In the save: scheduler LinearLR. Here: scheduler OneCycleLR." in str(error)
    with running(tmp_path) as manager:
        assert manager.resume(state, exclude=("scheduler",)) is not None


def test_schedulers_inside_a_scheduler_count_too(tmp_path: Path) -> None:
    def in_turn(state: TrainState, second: Any) -> TrainState:
        first = schedulers.LinearLR(state.optimizer, total_iters=2)
        state.scheduler = schedulers.SequentialLR(state.optimizer, [first, second(state.optimizer)], milestones=[2])
        return state

    state = in_turn(new_state(), lambda one: schedulers.CosineAnnealingLR(one, T_max=10))
    with running(tmp_path) as manager:
        manager.resume(state)
        train(state, 3)
        manager.save(3, state).wait()
    other = in_turn(new_state(seed=1), lambda one: schedulers.ExponentialLR(one, gamma=0.9))
    assert "SequentialLR(LinearLR, CosineAnnealingLR)" in str(refused(tmp_path, other))


def test_an_optimizer_in_extra_counts_too(tmp_path: Path) -> None:
    def with_extra(state: TrainState, build: Any) -> TrainState:
        state.extra["critic"] = build(nn.Linear(2, 2).parameters(), lr=0.1)
        return state

    state = with_extra(new_state(), optim.AdamW)
    with running(tmp_path) as manager:
        manager.resume(state)
        manager.save(1, state).wait()
    assert "extra.critic AdamW" in str(refused(tmp_path, with_extra(new_state(), optim.RMSprop)))


def test_an_emergency_snapshot_knows_the_classes(tmp_path: Path) -> None:
    state = new_state()
    with running(tmp_path) as manager:
        manager.resume(state)
        train(state)
        manager.save_emergency_checkpoint(1, state)
    assert "AdamW" in str(refused(tmp_path, other_optimizer(optim.Adam)))


def test_two_optimizers_in_another_order_are_not_another_class(tmp_path: Path) -> None:
    def both(seed: int, *, swapped: bool = False) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        made = [optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), optim.AdamW(model[1].parameters())]
        return TrainState(model, made[::-1] if swapped else made)

    state = both(0)
    with running(tmp_path) as manager:
        manager.resume(state)
        state.model(torch.ones(2, 3)).sum().backward()
        for one in state.optimizer:
            one.step()
        manager.save(1, state).wait()
    fresh = both(1, swapped=True)
    with running(tmp_path) as manager:
        start = manager.resume(fresh)
    assert start is not None
    assert "optimizer" in start.loaded
    assert same(fresh.optimizer[1].state_dict()["state"], state.optimizer[0].state_dict()["state"])


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_of_another_model_the_error_names_the_model_and_not_its_optimizer(tmp_path: Path, kind: str) -> None:
    saved_run(tmp_path, (3,), kinds=(kind,))
    state = new_state(seed=1)
    state.model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 6), nn.Linear(6, 6))
    state.optimizer = optim.SGD(state.model.parameters(), lr=0.1)
    state.scheduler = schedulers.LinearLR(state.optimizer)
    assert "The checkpoint does not match the model. Missing in the checkpoint: 3.weight" in str(
        refused(tmp_path, state)
    )


def resumed_as_another_class(rank: int, root: str) -> tuple[str, bool]:
    from ckptmirror import CheckpointManager

    state = other_optimizer(optim.Adam) if rank == 0 else other_optimizer(optim.Adagrad)
    before = everything(state)
    manager = CheckpointManager(root, timeout_s=60.0)
    try:
        manager.resume(state)
    except UsageError as error:
        return str(error), same(everything(state), before)
    finally:
        manager.close()
    return "loaded", False


def test_every_rank_refuses_another_class(tmp_path: Path) -> None:
    saved_run(tmp_path, (3,))
    for text, is_unchanged in run_ranks(2, resumed_as_another_class, str(tmp_path)):
        assert "is of another class than the one that was saved" in text
        assert is_unchanged
