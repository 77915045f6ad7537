"""What a resume loaded is still there before the first step and in the first save, or it is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError, LoadDiffers
from tests.kit.processes import run_ranks

STEP = 3


class Net(nn.Module):
    """A layer, one whose statistics a forward pass changes, and a head; more cannot be asked of a first step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.body(values)))
        return out


def new_state(seed: int, optimizer: Callable[..., Any] = torch.optim.AdamW, **more: Any) -> TrainState:
    torch.manual_seed(seed)
    model = Net()
    return TrainState(model=model, optimizer=optimizer(model.parameters(), lr=0.01, **more))


def backward(state: TrainState) -> None:
    state.model(torch.rand(8, 16)).square().sum().backward()


def train(state: TrainState, steps: int = 1, optimizer: Any = None) -> None:
    for _ in range(steps):
        backward(state)
        (optimizer or state.optimizer).step()
        state.model.zero_grad()


def saved(root: Path, state: TrainState | None = None) -> None:
    state = state or new_state(0)
    train(state, STEP)
    with CheckpointManager(root) as manager:
        manager.resume(state)
        manager.save(STEP, state).wait()


@pytest.fixture
def resumed(tmp_path: Path) -> Any:
    """A manager and a state that have just resumed."""
    saved(tmp_path)
    state = new_state(5)
    manager = CheckpointManager(tmp_path)
    assert manager.resume(state) is not None
    yield manager, state
    manager.close()


def refused(act: Callable[[], object]) -> LoadDiffers:
    with pytest.raises(LoadDiffers) as found:
        act()
    assert "verify_loaded=False" in found.value.hint
    return found.value


# -- before the first step -------------------------------------------------------------------------------------------


def test_a_training_that_goes_on_as_it_should_hears_nothing_and_leaves_no_hook(
    resumed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager, state = resumed
    hooks = len(_global_optimizer_pre_hooks)
    with torch.no_grad():
        state.model(torch.rand(8, 16))  # moves the statistics of the norm
    backward(state)
    train(state, 2)
    manager.save(STEP + 2, state).wait()
    assert len(_global_optimizer_pre_hooks) == hooks - 1
    assert "changed" not in caplog.text


def initialise(state: TrainState) -> None:
    state.model.head.reset_parameters()


def load_other_weights(state: TrainState) -> None:
    state.model.load_state_dict({**new_state(7).model.state_dict(), **state.model.norm.state_dict(prefix="norm.")})


def drop_moments(state: TrainState) -> None:
    state.optimizer.state.clear()


def load_other_moments(state: TrainState) -> None:
    other = new_state(7)
    train(other)
    state.optimizer.load_state_dict(other.optimizer.state_dict())


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (initialise, "model.head.weight, model.head.bias changed"),
        (load_other_weights, "model.body.weight, model.body.bias, model.head.weight, model.head.bias changed"),
        (drop_moments, "optimizer.state.body.weight.step, optimizer.state.body.weight.exp_avg,"),
        (load_other_moments, "optimizer.state.body.weight.step, optimizer.state.body.weight.exp_avg,"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_changed_after_a_resume_is_named_before_the_first_step_and_is_not_saved(
    resumed: Any, mistake: Callable[[TrainState], None], named: str
) -> None:
    manager, state = resumed
    mistake(state)
    backward(state)
    before = state.model.body.weight.detach().clone()
    error = refused(state.optimizer.step)
    assert named in error.message
    assert f"resume(), which loaded step {STEP}, and the first step" in error.message
    assert torch.equal(before, state.model.body.weight)
    again = refused(lambda: manager.save(STEP + 1, state))  # if the loop goes on all the same
    assert again.message == error.message
    refused(lambda: manager.save(STEP + 1, state))


def test_an_optimizer_that_is_built_after_a_resume_is_named_before_its_first_step(resumed: Any) -> None:
    _, state = resumed
    other = torch.optim.AdamW(state.model.parameters(), lr=0.01)
    backward(state)
    error = refused(other.step)
    assert "AdamW that makes the first step is not the one that resume() filled from step 3" in error.message
    assert "body.weight" in error.message


def test_the_optimizer_of_another_model_is_no_first_step(resumed: Any) -> None:
    _, state = resumed
    train(new_state(8))
    initialise(state)
    backward(state)
    refused(state.optimizer.step)


def test_an_optimizer_inside_another_may_step_first(tmp_path: Path) -> None:
    """As one in Lookahead or SAM, which restores the weights before the inner one steps."""

    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr=lr, momentum=0.9)
            self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    saved(tmp_path, new_state(0, Outer))
    state = new_state(5, Outer)
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        for of_parameter in state.optimizer.state.values():
            of_parameter["momentum_buffer"].add_(1.0)
        train(state, 1, state.optimizer.inner)
        manager.save(STEP + 1, state).wait()


def test_a_step_in_the_backward_pass_of_each_parameter_is_one_first_step(tmp_path: Path) -> None:
    def with_many(seed: int) -> TrainState:
        state = new_state(seed)
        state.optimizer = [torch.optim.AdamW([one], lr=0.01) for one in state.model.parameters()]
        for parameter, optimizer in zip(state.model.parameters(), state.optimizer, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, of=optimizer: of.step())
        return state

    def pass_once(state: TrainState) -> None:
        backward(state)
        state.model.zero_grad()

    first = with_many(0)
    pass_once(first)
    with CheckpointManager(tmp_path) as manager:
        manager.resume(first)
        manager.save(STEP, first).wait()
    for mistake in (None, initialise):
        state = with_many(5)
        with CheckpointManager(tmp_path) as manager:
            manager.resume(state)
            if mistake is None:
                pass_once(state)
            else:
                mistake(state)
                assert "model.head.weight" in refused(lambda s=state: pass_once(s)).message


# -- in the first save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", [initialise, load_other_weights], ids=lambda one: one.__name__)
def test_what_is_changed_and_saved_without_a_step_is_named_by_the_save(
    resumed: Any, mistake: Callable[[TrainState], None]
) -> None:
    manager, state = resumed
    mistake(state)
    error = refused(lambda: manager.save(STEP + 1, state))
    assert "model.head.weight" in error.message
    assert "while the optimizer made no step" in error.message
    refused(lambda: manager.save(STEP + 1, state))


def test_an_optimizer_that_never_stepped_and_has_no_state_is_named_by_the_save(resumed: Any) -> None:
    manager, state = resumed
    state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)
    error = refused(lambda: manager.save(STEP + 1, state))
    assert "was built after the resume" in error.message


def test_a_save_without_a_step_is_taken(resumed: Any) -> None:
    manager, state = resumed
    state.model(torch.rand(8, 16))
    manager.save(STEP + 1, state).wait()


def test_steps_that_cannot_be_seen_are_no_change(resumed: Any) -> None:
    """Compiled steps, and optimizers that are not torch's."""
    manager, state = resumed
    backward(state)
    type(state.optimizer).step.__wrapped__(state.optimizer)
    manager.save(STEP + 1, state).wait()


def test_a_compiled_step_is_left_alone(resumed: Any) -> None:
    manager, state = resumed
    initialise(state)
    backward(state)
    torch.compile(lambda: state.optimizer.step(), backend="eager")()
    manager.save(STEP + 1, state).wait()


def test_another_model_in_the_first_save_is_a_warning(resumed: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager, _ = resumed
    other = new_state(9)
    train(other)
    manager.save(STEP + 1, other).wait()
    assert "the model of this save is not the one that resume() loaded step 3 into" in caplog.text


def test_a_wrapper_around_the_model_is_no_other_model(resumed: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager, state = resumed
    wrapped = TrainState(model=torch.compile(state.model, backend="eager"), optimizer=state.optimizer)
    manager.save(STEP + 1, wrapped).wait()
    assert "is not the one" not in caplog.text


# -- what may change -------------------------------------------------------------------------------------------------


def normalise(state: TrainState) -> None:
    """As layers that do so in their forward pass: by what the last step has moved the weights."""
    state.model.head.weight.data.mul_(1.01)


def move_frozen(state: TrainState) -> None:
    """As a teacher that follows the model, before the first step."""
    state.model.head.requires_grad_(False)
    state.model.head.weight.data.zero_()


@pytest.mark.parametrize("change", [normalise, move_frozen], ids=lambda one: one.__name__)
def test_a_change_as_training_makes_it_is_a_warning(
    resumed: Any, caplog: pytest.LogCaptureFixture, change: Callable[[TrainState], None]
) -> None:
    manager, state = resumed
    change(state)
    with caplog.at_level(logging.WARNING):
        train(state)
    assert "model.head.weight changed (rank 0) between resume()" in caplog.text
    manager.save(STEP + 1, state).wait()


def test_an_optimizer_that_moves_the_weights_to_train_is_not_compared(tmp_path: Path) -> None:
    """As those of schedule-free learning."""

    class Switched(torch.optim.AdamW):
        def train(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(3.0)

    saved(tmp_path, new_state(0, Switched))
    for steps in (0, 1):
        state = new_state(5, Switched)
        with CheckpointManager(tmp_path) as manager:
            manager.resume(state)
            state.optimizer.train()
            train(state, steps)
            manager.save(STEP + 1, state).wait()


def test_code_that_changes_values_on_purpose_can_say_so(tmp_path: Path) -> None:
    saved(tmp_path)
    for mistake in (initialise, drop_moments):
        state = new_state(5)
        with CheckpointManager(tmp_path) as manager:
            manager.resume(state, verify_loaded=False)
            mistake(state)
            train(state)


def test_what_a_load_gives_may_be_changed(tmp_path: Path) -> None:
    saved(tmp_path)
    state = new_state(5)
    with CheckpointManager(tmp_path / "other") as manager:
        manager.load(state, tmp_path)
        manager.resume(state)
        initialise(state)
        train(state)
        manager.save(1, state).wait()


def test_parameters_of_another_dtype_are_not_compared(resumed: Any) -> None:
    _, state = resumed
    state.model.double()
    for of_parameter in state.optimizer.state.values():
        of_parameter.update((key, one.double()) for key, one in of_parameter.items() if key != "step")
    state.model(torch.rand(8, 16, dtype=torch.float64)).sum().backward()
    state.optimizer.step()


def test_a_flaw_of_the_check_stops_no_training(resumed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_tensors: object, **_: object) -> object:
        raise ValueError("of somebody's tensor class")

    _, state = resumed
    monkeypatch.setattr("ckptmirror.formats.live_sums.fingerprints_of", cannot)
    initialise(state)
    train(state)


# -- shards ----------------------------------------------------------------------------------------------------------


def sharded(seed: int, rows: int = 4) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, rows))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def save_shards(_rank: int, root: Path, rows: int = 4) -> None:
    state = sharded(0, rows)
    with CheckpointManager(root) as manager:
        manager.resume(state)
        train(state, STEP)
        manager.save(STEP, state).wait()


def change_one_shard(rank: int, root: Path) -> list[str]:
    """Change a shard of one rank before the first step, and then before the first save; return what each rank gets."""
    found = []
    for save in (False, True):
        state = sharded(5)
        with CheckpointManager(root) as manager:
            manager.resume(state)
            if rank == 1:
                state.model[1].weight.to_local().detach().normal_()
            try:
                if save:
                    manager.save(STEP + 1, state).wait()
                else:
                    backward(state)
                    state.optimizer.step()
            except CkptMirrorError as error:
                found.append(f"{type(error).__name__}: {error.message}")
            else:
                found.append("nothing")
    return found


def go_on(_rank: int, root: Path, rows: int = 4) -> int:
    state = sharded(5, rows)
    with CheckpointManager(root) as manager:
        start = manager.resume(state)
        assert start is not None
        with torch.no_grad():
            state.model(torch.rand(8, 16))  # leaves the outermost layers whole
        train(state, 2)
        manager.save(STEP + 2, state).wait()
        return start.step


def test_each_rank_compares_its_own_shards_and_asks_no_other(tmp_path: Path) -> None:
    run_ranks(2, save_shards, tmp_path)
    other, mine = run_ranks(2, change_one_shard, tmp_path)
    assert other[0] == "nothing"
    assert "model.1.weight changed (rank 1)" in mine[0]
    assert "model.1.weight changed (rank 1)" in mine[1]
    assert "rank 1" in other[1]  # a save fails on every rank
    assert run_ranks(2, go_on, tmp_path) == [STEP, STEP]


def test_a_rank_that_has_nothing_of_a_parameter_has_its_state_all_the_same(tmp_path: Path) -> None:
    run_ranks(3, save_shards, tmp_path, 2)
    assert run_ranks(3, go_on, tmp_path, 2) == [STEP] * 3
