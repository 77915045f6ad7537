"""The command of a run built other settings than the save has: each is named, and it is said whose win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import ResumeInfo, TrainState
from ckptmirror.core.errors import CkptMirrorError, UsageError
from tests.kit.processes import run_ranks
from tests.kit.training import running

schedulers = torch.optim.lr_scheduler


def state_of(lr: float = 0.1, schedule: Any = None, **settings: Any) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": lr}, {"params": model[1].parameters(), "lr": lr / 10}]
    adam = torch.optim.AdamW(groups, **settings)
    return TrainState(model, adam, scheduler=schedule(adam) if schedule is not None else None)


def step(state: TrainState, count: int = 1) -> None:
    for _ in range(count):
        state.model(torch.ones(2, 2)).sum().backward()
        state.optimizer.step()
        if state.scheduler is not None:
            state.scheduler.step(*([1.0] if isinstance(state.scheduler, schedulers.ReduceLROnPlateau) else []))


def start(root: Path, state: TrainState, steps: int = 2, **arguments: Any) -> ResumeInfo | None:
    """Resume, train and save."""
    with running(root, kinds=("model",)) as manager:
        info = manager.resume(state, **arguments)
        step(state, steps)
        manager.save((info.step if info else 0) + steps, state).wait()
    return info


def changed(root: Path, state: TrainState, **arguments: Any) -> tuple[str, ...]:
    info = start(root, state, **arguments)
    assert info is not None
    return info.changed


def test_settings_of_an_optimizer_that_differ_are_reported_and_the_saves_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, state_of(betas=(0.9, 0.95)))
    other = state_of(0.3, weight_decay=0.5, betas=(0.9, 0.99))
    lines = changed(tmp_path, other)
    assert lines == (
        "optimizer group 0: lr 0.1 in the save, 0.3 in this command: the save's is used",
        "optimizer group 1: lr 0.01 in the save, 0.03 in this command: the save's is used",
        "optimizer: betas (0.9, 0.95) in the save, (0.9, 0.99) in this command: the save's is used",
        "optimizer: weight_decay 0.01 in the save, 0.5 in this command: the save's is used",
    )
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.01]
    event = next(record for record in caplog.records if getattr(record, "event", None) == "CommandChanged")
    assert event.getMessage().startswith("step 2: the command has changed since this save: " + "; ".join(lines))
    assert "command_wins" in event.getMessage()


def test_the_same_command_reports_nothing_wherever_its_schedule_is(tmp_path: Path) -> None:
    def build() -> TrainState:
        return state_of(schedule=lambda adam: schedulers.CosineAnnealingWarmRestarts(adam, T_0=3))

    start(tmp_path, build(), steps=5)
    assert changed(tmp_path, build(), steps=5) == ()
    assert changed(tmp_path, build()) == ()


def test_a_change_is_reported_at_each_start_until_the_command_is_as_it_was(tmp_path: Path) -> None:
    start(tmp_path, state_of())
    first = changed(tmp_path, state_of(weight_decay=0.5))
    assert changed(tmp_path, state_of(weight_decay=0.5)) == first != ()
    assert changed(tmp_path, state_of()) == ()


def test_a_rate_under_a_scheduler_is_compared_as_it_was_built(tmp_path: Path) -> None:
    def build(lr: float) -> TrainState:
        return state_of(lr, lambda adam: schedulers.LinearLR(adam, start_factor=0.1, total_iters=8))

    start(tmp_path, build(0.1))
    assert [line for line in changed(tmp_path, build(0.4)) if "group 0" in line] == [
        "optimizer group 0: lr 0.1 in the save, 0.4 in this command: the save's is used"
    ]


@pytest.mark.parametrize(
    ("name", "build", "old", "new"),
    [
        ("T_max", schedulers.CosineAnnealingLR, 10, 20),
        ("step_size", schedulers.StepLR, 3, 4),
        ("gamma", schedulers.ExponentialLR, 0.9, 0.8),
        ("milestones", schedulers.MultiStepLR, [3, 5, 5], [3, 6]),
        ("total_iters", schedulers.PolynomialLR, 10, 12),
        ("T_0", schedulers.CosineAnnealingWarmRestarts, 3, 4),
        ("patience", schedulers.ReduceLROnPlateau, 3, 4),
    ],
)
def test_settings_of_a_scheduler_count_too(tmp_path: Path, name: str, build: Any, old: Any, new: Any) -> None:
    def with_schedule(value: Any) -> TrainState:
        return state_of(schedule=lambda adam: build(adam, **{name: value}))

    start(tmp_path, with_schedule(old))
    texts = [repr(tuple(value) if isinstance(value, list) else value) for value in (old, new)]
    assert changed(tmp_path, with_schedule(new)) == (
        f"scheduler: {name} {texts[0]} in the save, {texts[1]} in this command: the save's is used",
    )


def test_schedulers_inside_a_scheduler_count_too(tmp_path: Path) -> None:
    def build(t_max: int, milestone: int) -> TrainState:
        def in_turn(adam: Any) -> Any:
            inner = [schedulers.LinearLR(adam, total_iters=2), schedulers.CosineAnnealingLR(adam, T_max=t_max)]
            return schedulers.SequentialLR(adam, inner, milestones=[milestone])

        return state_of(schedule=in_turn)

    start(tmp_path, build(10, 2))
    assert changed(tmp_path, build(20, 3)) == (
        "scheduler.schedulers[1]: T_max 10 in the save, 20 in this command: the save's is used",
        "scheduler: milestones (2,) in the save, (3,) in this command: the save's is used",
    )


def test_of_a_part_that_is_left_out_nothing_is_reported(tmp_path: Path) -> None:
    start(tmp_path, state_of())
    assert changed(tmp_path, state_of(0.5), exclude=("optimizer",)) == ()
    assert changed(tmp_path, state_of(0.5)) == (), "the excluded optimizer kept its own settings, which the save has"


def test_groups_in_another_order_are_compared_by_their_parameters(tmp_path: Path) -> None:
    start(tmp_path, state_of())
    state = state_of()
    state.optimizer = torch.optim.AdamW(
        [
            {"params": state.model[1].parameters(), "lr": 0.01, "weight_decay": 0.2},
            {"params": state.model[0].parameters(), "lr": 0.1},
        ]
    )
    assert changed(tmp_path, state) == (
        "optimizer group 0: weight_decay 0.01 in the save, 0.2 in this command: the save's is used",
    )


def test_values_of_the_training_config_that_differ_are_reported(tmp_path: Path) -> None:
    def build(config: dict[str, Any]) -> TrainState:
        state = state_of()
        state.training_config = config
        return state

    start(tmp_path, build({"width": 2, "data": {"name": "a", "seed": 1}, "old": 1}))
    assert changed(tmp_path, build({"width": 3, "data": {"name": "b", "seed": 1}})) == (
        "training_config.data: name 'a' in the save, 'b' in this command",
        "training_config: old 1 in the save, nothing in this command",
        "training_config: width 2 in the save, 3 in this command",
    )


def resumed_on_a_rank(rank: int, root: str) -> tuple[str, ...]:
    state = state_of(0.3)
    with running(Path(root), timeout_s=60.0) as manager:
        info = manager.resume(state)
    assert info is not None
    return info.changed


def test_every_rank_has_the_changes(tmp_path: Path) -> None:
    start(tmp_path, state_of())
    first, second = run_ranks(2, resumed_on_a_rank, str(tmp_path))
    assert first == second
    assert len(first) == 2


def rates(state: TrainState) -> list[float]:
    return [group["lr"] for group in state.optimizer.param_groups]


def test_settings_that_win_are_the_commands_and_the_rest_is_the_saves(tmp_path: Path) -> None:
    start(tmp_path, state_of(betas=(0.9, 0.95)))
    other = state_of(0.3, weight_decay=0.5, betas=(0.9, 0.99))
    lines = changed(tmp_path, other, command_wins=("lr", "betas"))
    assert [line.rpartition(": ")[2] for line in lines] == ["this command's is used"] * 3 + ["the save's is used"]
    assert rates(other) == [0.3, 0.03]
    assert [group["betas"] for group in other.optimizer.param_groups] == [(0.9, 0.99)] * 2
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.01] * 2


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (schedulers.LinearLR, {"start_factor": 0.1, "total_iters": 8}),
        (schedulers.CosineAnnealingLR, {"T_max": 8}),
        (schedulers.StepLR, {"step_size": 2}),
        (schedulers.ExponentialLR, {"gamma": 0.9}),
        (schedulers.LambdaLR, {"lr_lambda": lambda at: 1 / (1 + at)}),
        (schedulers.CosineAnnealingWarmRestarts, {"T_0": 3}),
    ],
)
def test_a_rate_that_wins_goes_on_from_the_same_place_in_its_schedule(
    tmp_path: Path, build: Any, settings: dict[str, Any]
) -> None:
    def scheduled(lr: float) -> TrainState:
        return state_of(lr, lambda adam: build(adam, **settings))

    straight = scheduled(0.4)
    step(straight, 7)
    start(tmp_path, scheduled(0.1), steps=5)
    for wins in (("lr",), ("lr",), ()):  # a command that is restarted with it, and once without
        with running(tmp_path) as manager:
            state = scheduled(0.4)
            info = manager.resume(state, command_wins=wins)
            assert info is not None
            if info.step == 5:
                assert state.scheduler.base_lrs == [0.4, 0.04]
                step(state, 1)
                manager.save(6, state).wait()
    assert info.changed == ()
    step(state, 1)
    assert rates(state) == pytest.approx(rates(straight), rel=1e-12)
    assert state.scheduler.get_last_lr() == rates(state)


def test_a_rate_wins_under_a_scheduler_that_has_no_base(tmp_path: Path) -> None:
    def scheduled(lr: float) -> TrainState:
        return state_of(lr, lambda adam: schedulers.ReduceLROnPlateau(adam, patience=1, factor=0.5))

    start(tmp_path, scheduled(0.1), steps=4)
    start(tmp_path, state := scheduled(0.4), steps=0, command_wins=("lr",))
    assert rates(state) == pytest.approx([0.2, 0.02])


def test_a_rate_in_a_tensor_keeps_its_memory(tmp_path: Path) -> None:
    start(tmp_path, state_of(torch.tensor(0.1)))
    state = state_of(torch.tensor(0.3))
    start(tmp_path, state, steps=0, command_wins=("lr",))
    assert [float(rate) for rate in rates(state)] == pytest.approx([0.3, 0.03])


def test_a_setting_of_a_scheduler_wins(tmp_path: Path) -> None:
    def in_turn(milestones: list[int], t_max: int) -> TrainState:
        def build(adam: Any) -> Any:
            inner = [schedulers.MultiStepLR(adam, milestones), schedulers.CosineAnnealingLR(adam, T_max=t_max)]
            return schedulers.SequentialLR(adam, inner, milestones=[t_max])

        return state_of(schedule=build)

    start(tmp_path, in_turn([3, 5], 10))
    state = in_turn([4, 6, 6], 20)
    lines = changed(tmp_path, state, command_wins=("milestones", "T_max"))
    assert len(lines) == 3
    assert all("this command's is used" in line for line in lines)
    first, second = state.scheduler._schedulers
    assert (first.milestones, second.T_max, state.scheduler._milestones) == ({4: 1, 6: 2}, 20, [20])
    assert changed(tmp_path, in_turn([4, 6, 6], 20)) == ()


@pytest.mark.parametrize("excluded", ["optimizer", "scheduler"])
def test_a_rate_wins_where_a_part_is_left_out(tmp_path: Path, excluded: str) -> None:
    def scheduled(lr: float) -> TrainState:
        return state_of(lr, lambda adam: schedulers.ExponentialLR(adam, gamma=0.5))

    start(tmp_path, scheduled(0.1), steps=2)
    state = scheduled(0.4)
    start(tmp_path, state, steps=0, command_wins=("lr",), exclude=(excluded,))
    assert state.scheduler.base_lrs == [0.4, 0.04]
    assert rates(state) == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize("wrong", ["lr", None, ("lr", "learning_rate"), ("initial_lr",)])
def test_a_name_that_is_no_setting_is_refused_and_nothing_is_loaded(tmp_path: Path, wrong: Any) -> None:
    start(tmp_path, state_of())
    state = state_of(0.3, lambda adam: schedulers.StepLR(adam, step_size=3))
    before = state.model[0].weight.clone()
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match=r"command_wins (holds|is)") as refused:
            manager.resume(state, command_wins=wrong)
        if isinstance(wrong, tuple):
            assert "gamma, lr, maximize, step_size, weight_decay" in str(refused.value)
        assert torch.equal(state.model[0].weight, before)


def refused_on_a_rank(rank: int, root: str) -> str:
    state = state_of()
    if rank:  # its optimizer has this setting
        state = replace(state, optimizer=torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9))
    with running(Path(root), timeout_s=60.0) as manager:
        try:
            manager.resume(state, command_wins=("momentum",))
        except CkptMirrorError as error:
            return str(error)
    return "resumed"


def test_every_rank_refuses_a_name_that_one_does_not_know(tmp_path: Path) -> None:
    start(tmp_path, state_of())
    assert all("command_wins holds 'momentum'" in text for text in run_ranks(2, refused_on_a_rank, str(tmp_path)))
