"""A user's test that a resume is exact: it passes where it is, and says what went wrong where it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import tests.kit.processes  # noqa: F401 - the process that forks the ranks has imported torch by then
from ckptmirror import TrainState, errors
from ckptmirror.testing import assert_exact_resume
from tests.integration import exact_resume_job as job

pytestmark = pytest.mark.long


@pytest.mark.short
def test_a_training_that_was_killed_and_resumed_equals_one_that_was_not() -> None:
    assert_exact_resume(job.one_rank, job.one_step)


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
def test_every_kind_is_exact(kind: str) -> None:
    assert_exact_resume(job.one_rank, job.one_step, steps=3, kinds=(kind,))


WRONG: dict[str, tuple[Callable[[], TrainState], Callable[[TrainState], object], str]] = {
    "a step that differs each time": (
        job.one_rank,
        job.step_by_the_clock,
        r"not deterministic[^\n]*step 1[^\n]*\n  extra.best",
    ),
    "a part that a load leaves as it is": (
        job.state_that_forgets,
        job.one_step,
        r"load is not exact[^\n]*resume\(\)[^\n]*\n  dataloader.position is 0, not 2",
    ),
    "a save that changes the training": (job.state_that_draws, job.one_step, r"save of step 2 changes the training"),
    "a value outside the state": (
        job.one_rank,
        job.step_that_counts_outside_the_state,
        r"exact and the trajectory is not[^\n]*after step 3[^!]*decay",
    ),
    "a step that fails": (job.one_rank, job.step_that_raises, r"Rank 0 failed in the undisturbed[^!]*no step today"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_named(what: str) -> None:
    make_state, step, says = WRONG[what]
    with pytest.raises(AssertionError, match=says):
        assert_exact_resume(make_state, step, steps=4)


def test_what_may_differ_is_left_out_by_name() -> None:
    assert_exact_resume(job.one_rank, job.step_by_the_clock, steps=2, ignore=("extra.best",))


def test_arguments_that_cannot_work_are_refused_with_a_way_out() -> None:
    with pytest.raises(errors.UsageError, match="cannot be sent") as refused:
        assert_exact_resume(lambda: job.one_rank(), job.one_step)
    assert "top level of a module" in refused.value.hint
    with pytest.raises(errors.UsageError, match="at least 2"):
        assert_exact_resume(job.one_rank, job.one_step, steps=1)


def test_ddp_on_three_ranks_without_a_recipe_loads_exactly_and_differs_a_step_later() -> None:
    """If this ever passes without an error, torch has changed, and the recipes are not needed any more."""
    with pytest.raises(AssertionError, match=r"load of step 3 is exact and the trajectory is not[^!]*integrations.ddp"):
        assert_exact_resume(partial(job.ddp, "none"), job.ddp_step, world_size=3)


@pytest.mark.parametrize("recipe", [pytest.param("rebuilt buckets", marks=pytest.mark.short), "fixed buckets"])
def test_ddp_on_three_ranks_with_a_recipe_takes_the_same_steps(recipe: str) -> None:
    assert_exact_resume(partial(job.ddp, recipe), job.ddp_step, world_size=3)


def test_the_loop_to_copy_from_is_exact_on_three_ranks() -> None:
    assert_exact_resume(job.loop, job.loop_step, steps=4, world_size=3)
