"""After a load, schedulers, scalers and groups have what was saved, or it is refused; other objects are a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError, LoadDiffers
from tests.kit.processes import run_ranks

STEP = 3


class Tracker:
    """An object of the user's, with a counter, a rate and a tensor."""

    def __init__(self) -> None:
        self.seen, self.rate, self.mean = 0, 1.0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "rate": self.rate, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.rate, self.mean = state["seen"], state["rate"], state["mean"]


class Deaf(Tracker):
    """One whose load leaves something out."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self.mean = state["rate"], state["mean"]


class Lazy(Tracker):
    """A loader that takes its position when it begins."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state

    def __iter__(self) -> Any:
        self.seen = self.given["seen"]
        return iter(())


class Clock(Tracker):
    """One that counts how often it is asked."""

    def state_dict(self) -> dict[str, Any]:
        self.seen += 1
        return super().state_dict()


class DeafScheduler(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "last_epoch"})


class DeafScaler(torch.amp.GradScaler):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "scale": 2.0})


class DeafOptimizer(torch.optim.AdamW):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        decay = self.param_groups[0]["weight_decay"]
        super().load_state_dict(state_dict)
        self.param_groups[0]["weight_decay"] = decay


def new_state(
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    scheduler: Callable[..., Any] = torch.optim.lr_scheduler.StepLR,
    scaler: Callable[..., Any] = torch.amp.GradScaler,
    tracker: Callable[[], Any] = Tracker,
    **how: Any,
) -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    adam = optimizer(model.parameters(), **{"lr": 0.01, **how})
    return TrainState(
        model=model,
        optimizer=adam,
        scheduler=[scheduler(adam, step_size=2)],
        scaler=scaler("cpu", init_scale=8.0),
        extra={"tracker": tracker(), "own": {"generator": torch.Generator()}},
    )


def saved(root: Path, **how: Any) -> None:
    state = new_state(**how)
    for _ in range(STEP):
        state.scaler.scale(state.model(torch.ones(2, 4)).sum()).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.scheduler[0].step()
        state.extra["tracker"].seen += 1
    with CheckpointManager(root) as manager:
        manager.resume(state)
        manager.save(STEP, state).wait()


def resume(root: Path, state: TrainState, **how: Any) -> None:
    with CheckpointManager(root) as manager:
        start = manager.resume(state, **how)
        assert start is not None
        assert start.step == STEP


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        ({"scheduler": DeafScheduler}, "scheduler[0].last_epoch is 0, 3 was loaded"),
        ({"scaler": DeafScaler}, "scaler.scale is 2.0, 8.0 was loaded"),
        (
            {"optimizer": DeafOptimizer, "weight_decay": 0.5},
            "optimizer.param_groups[0].weight_decay is 0.5, 0.01 was loaded",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_an_object_of_torch_does_not_take_is_refused_and_leaves_no_trace(
    tmp_path: Path, planted: dict[str, Any], named: str
) -> None:
    classes = {part: type(part, (one,), {}) for part, one in planted.items() if isinstance(one, type)}
    bases = {part: type(part, (one.__mro__[1],), {}) for part, one in planted.items() if isinstance(one, type)}
    saved(tmp_path, **bases)
    more = {part: one for part, one in planted.items() if part not in classes}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(LoadDiffers) as refused:
            manager.load(new_state(**classes, **more))
        with pytest.raises(LoadDiffers) as again:
            manager.resume(new_state(**classes, **more))
    assert named in refused.value.message
    assert refused.value.message == again.value.message
    assert "verify_loaded=False" in refused.value.hint
    resume(tmp_path, new_state(**classes, **more), verify_loaded=False)
    resume(tmp_path, new_state(**bases))


def test_an_object_of_the_user_that_does_not_return_what_it_got_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    resume(tmp_path, new_state(tracker=Deaf))
    assert "extra.tracker (Deaf) does not return what was loaded into it: extra.tracker.seen is 0, 3 was" in caplog.text


@pytest.mark.parametrize("tracker", [Tracker, Lazy, Clock])
def test_an_object_that_has_reasons_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tracker: Callable[[], Any]
) -> None:
    saved(tmp_path, tracker=tracker)
    resume(tmp_path, new_state(tracker=tracker))
    assert "does not return" not in caplog.text


def test_an_object_that_gives_no_state_after_a_load_stops_no_start(tmp_path: Path) -> None:
    for _ in range(2):
        state = TrainState(model=nn.Linear(2, 2), scheduler=FailsAfterLoad())
        with CheckpointManager(tmp_path) as manager:
            if manager.resume(state) is None:
                state.scheduler.seen = STEP
                manager.save(STEP, state).wait()
    assert state.scheduler.is_loaded


class FailsAfterLoad(Tracker):
    """One whose state_dict() raises once it was loaded."""

    is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_loaded:
            raise ValueError("not now")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_loaded = True


def fails_on_one_rank(rank: int, root: Path, part: str) -> list[tuple[str, str]]:
    def build(one: Any) -> TrainState:
        parts = {part: {"own": [one]} if part == "extra" else one}
        return TrainState(nn.Linear(2, 2), **parts)

    torch.manual_seed(0)
    with CheckpointManager(root) as manager:
        state = build(Tracker())
        manager.resume(state)
        manager.save(STEP, state).wait()
    outcomes = []
    for how in ("resume", "load"):
        with CheckpointManager(root) as manager:
            try:
                getattr(manager, how)(build(FailsAfterLoad() if rank == 1 else Tracker()))
            except CkptMirrorError as error:
                outcomes.append((type(error).__name__, error.message))
    return outcomes


@pytest.mark.parametrize(
    ("part", "where"), [("extra", "extra.own[0]"), pytest.param("ema", "ema", marks=pytest.mark.long)]
)
def test_an_object_whose_state_dict_fails_after_a_load_is_named_on_every_rank(
    tmp_path: Path, part: str, where: str
) -> None:
    first, second = run_ranks(2, fails_on_one_rank, tmp_path, part)
    why = f"{where} (FailsAfterLoad) gives no state: its state_dict() raised ValueError: not now"
    assert second == [("UsageError", why)] * 2
    assert [kind for kind, _ in first] == ["RankFailed"] * 2
    assert all("rank 1" in message and why in message for _, message in first)


def test_a_save_names_the_object_whose_state_dict_fails(tmp_path: Path) -> None:
    one = FailsAfterLoad()
    one.is_loaded = True
    with CheckpointManager(tmp_path) as manager:
        manager.resume(TrainState(nn.Linear(2, 2)))
        for part in ("scheduler", "scaler", "ema", "dataloader", "extra"):
            state = TrainState(nn.Linear(2, 2), **{part: {"own": one} if part == "extra" else one})
            with pytest.raises(CkptMirrorError, match=rf"{part}.* \(FailsAfterLoad\) gives no state: .*not now"):
                manager.save(1, state).wait()


def test_what_the_command_wins_or_leaves_out_is_no_difference(tmp_path: Path) -> None:
    saved(tmp_path)
    resume(tmp_path, new_state(lr=0.5, weight_decay=0.3), command_wins=("lr", "weight_decay"))
    resume(tmp_path, new_state(lr=0.5), command_wins=("lr", "step_size"))
    resume(tmp_path, new_state(scheduler=DeafScheduler), exclude=("scheduler",))
    resume(tmp_path, new_state(), exclude=("optimizer",))
    cold = new_state()
    resume(
        tmp_path,
        TrainState(model=cold.model, scheduler=cold.scheduler, scaler=cold.scaler, extra=cold.extra),
        allow_cold_optimizer=True,
    )


def test_an_emergency_snapshot_is_asked_too(tmp_path: Path) -> None:
    base = type("scheduler", (torch.optim.lr_scheduler.StepLR,), {})
    state = new_state(scheduler=base)
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        state.optimizer.step()
        state.scheduler[0].step()
        manager.save_emergency_checkpoint(STEP, state)
    deaf = type("scheduler", (DeafScheduler,), {})
    with CheckpointManager(tmp_path) as manager, pytest.raises(LoadDiffers, match=r"scheduler\[0\]\.last_epoch"):
        manager.resume(new_state(scheduler=deaf))
    resume(tmp_path, new_state(scheduler=base))


def deaf_on_one_rank(rank: int, root: Path) -> str:
    scheduler = type("scheduler", (DeafScheduler if rank == 1 else torch.optim.lr_scheduler.StepLR,), {})
    with CheckpointManager(root) as manager:
        try:
            manager.resume(new_state(scheduler=scheduler))
        except CkptMirrorError as error:
            return error.message
    return "resumed"


def test_every_rank_raises_if_one_object_of_one_rank_differs(tmp_path: Path) -> None:
    saved(tmp_path, scheduler=type("scheduler", (torch.optim.lr_scheduler.StepLR,), {}))
    for message in run_ranks(2, deaf_on_one_rank, tmp_path):
        assert "scheduler[0].last_epoch is 0, 3 was loaded" in message
