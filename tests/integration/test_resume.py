"""Resuming, in one process: which save is chosen, that it comes back exactly, and what is never guessed."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState, stage_checkpoint_step
from ckptmirror.core import names
from ckptmirror.core.errors import (
    CheckpointNotFound,
    NotAuthorised,
    RefusedOnlyCopy,
    StoreTemporary,
    UsageError,
)
from ckptmirror.core.model import Meta
from ckptmirror.flow.drain import drain
from ckptmirror.flow.fetch.load import load_checkpoint
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import memory
from ckptmirror.testing import GcsServerProcess
from ckptmirror.testing.fixtures import GCS_BUCKET
from tests.kit.faults import dead, faulty, flip_bit
from tests.kit.faulty_store import StoreFault
from tests.kit.roots import artifact, whole
from tests.kit.training import everything, new_state, running, same, saved_run, train

MIRROR = "memory://test-resume/run"


@pytest.fixture(autouse=True)
def _fresh_memory() -> Iterator[None]:
    memory.drop("test-resume")
    yield
    memory.drop("test-resume")


# -- it comes back exactly (C1-C18) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_resume_weights_exact_match(tmp_path: Path, kind: str) -> None:
    states = saved_run(tmp_path, (3, 6), kinds=(kind,))
    with running(tmp_path) as manager:
        state = new_state(seed=99)
        start = manager.resume(state)
    assert start is not None
    assert (start.step, start.kind, start.place, start.missing) == (6, kind, "disk", ())
    assert same(everything(state), states[6])


def test_resume_preserves_training_step(tmp_path: Path) -> None:
    """The step counts on; it never starts again at 0, and a step below it is a rewind (C12)."""
    saved_run(tmp_path, (4,))
    saved_run(tmp_path, (7,))
    with running(tmp_path) as manager:
        state = new_state()
        start = manager.resume(state)
        assert start is not None
        assert start.step == 7
        assert state.extra["epoch"] == 7
        assert state.dataloader.position == 7
        manager.save(8, state).wait()
    assert sorted(whole(tmp_path)) == [4, 7, 8]


def test_an_interrupted_training_repeats_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Weights, moments, schedule, dropout's numbers and data position together (C1, C13, C14)."""
    undisturbed = new_state()
    losses = train(undisturbed, 9)
    saved_run(tmp_path, (5,))
    with running(tmp_path) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert train(state, 4) == losses[5:]
    assert same(everything(state), everything(undisturbed))


def test_load_missing_optimizer_returns_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as manager:
        state = new_state(optimizer=False)
        manager.resume(state)
        manager.save(1, state).wait()
    for path in (tmp_path / "dcp_000001", tmp_path / "model_000001.pt"):
        assert load_checkpoint(path).optimizer is None
    with running(tmp_path) as manager:
        fresh = new_state()
        before = copy.deepcopy(fresh.optimizer.state_dict())
        with pytest.raises(UsageError, match="The save has no state of an optimizer, and this command has one") as cold:
            manager.resume(fresh)
        assert "allow_cold_optimizer=True" in cold.value.hint
        assert same(before, fresh.optimizer.state_dict())
        start = manager.resume(fresh, allow_cold_optimizer=True)
        assert start is not None
        assert any(part.startswith("optimizer") for part in start.missing)
    assert same(before, fresh.optimizer.state_dict())
    assert "no optimizer" in caplog.text


@pytest.mark.parametrize("kind", ["dcp", "model", "emergency"])
def test_a_command_without_the_optimizer_of_the_save_is_refused_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    state = new_state()
    with running(tmp_path) as manager:
        manager.resume(state)
        train(state)
        if kind == "emergency":
            manager.save_emergency_checkpoint(1, state)
        else:
            manager.save(1, state, kinds=(kind,)).wait()
    fresh = new_state(seed=3, optimizer=False)
    before = copy.deepcopy(fresh.model.state_dict())
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match="The save has the state of an optimizer, and this command has none"):
            manager.resume(fresh)
        assert same(before, fresh.model.state_dict())
        if kind != "emergency":
            assert manager.load(fresh).step == 1, "a load of any checkpoint only warns"
        assert manager.resume(fresh, exclude=("optimizer",)) is not None
        start = manager.resume(fresh, allow_cold_optimizer=True)
    assert start is not None
    assert any(part.startswith("optimizer: the save has state for it") for part in start.missing)


def test_a_state_without_a_part_that_the_save_has_still_resumes(tmp_path: Path) -> None:
    states = saved_run(tmp_path, (2,))
    with running(tmp_path) as manager:
        state = new_state(seed=3)
        state.scaler = state.ema = None
        assert manager.resume(state) is not None
    assert same(dict(state.model.state_dict()), dict(states[2]["model"]))


def test_another_architecture_is_an_error_and_not_an_older_save(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    with running(tmp_path) as manager:
        state = new_state()
        state.model = torch.nn.Linear(3, 3)
        state.optimizer = state.scheduler = state.ema = None
        with pytest.raises(UsageError):
            manager.resume(state)


@pytest.mark.parametrize("wrong", ["policy", "model"])
def test_i11_a_start_that_fails_fences_no_healthy_trainer(tmp_path: Path, wrong: str) -> None:
    state = new_state()
    with running(tmp_path / "healthy", MIRROR) as healthy:
        healthy.resume(state)
        healthy.save(1, state).wait("mirrored", timeout_s=60)
        other, policy = (new_state(), "lastest") if wrong == "policy" else (TrainState(torch.nn.Linear(3, 3)), "auto")
        with running(tmp_path / "second", MIRROR) as second, pytest.raises(UsageError):
            second.resume(other, policy)
        for step in (2, 3):
            train(state)
            healthy.save(step, state).wait("mirrored", timeout_s=60)


# -- which one is chosen ----------------------------------------------------------------------------------------------


def test_i11_an_attempt_that_died_before_its_first_save_supersedes_nothing(tmp_path: Path) -> None:
    """It continued from step 1, all that the mirror had; step 2 of the attempt before it arrives there later."""
    saved_run(tmp_path / "first", (1,), MIRROR)
    with running(tmp_path / "first", MIRROR, uploads=False) as manager:
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save(2, state).wait()
    with running(tmp_path / "second", MIRROR) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
    assert drain(tmp_path / "first", timeout_s=60).is_verified
    assert stage_checkpoint_step(MIRROR, step="latest", dest=tmp_path / "eval").step == 2
    for root in ("third", "second", "first"):
        with running(tmp_path / root, MIRROR) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 2


def test_a_fresh_run_starts_at_step_0_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root", [MIRROR]) as manager:
        state = new_state()
        assert manager.resume(state) is None
        manager.save(1, state)
    with CheckpointManager(tmp_path / "root", [MIRROR]) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1


def test_fresh_start_needs_the_answer_of_every_required_mirror(tmp_path: Path) -> None:
    with running(tmp_path / "root", MIRROR, f"file://{tmp_path}/other") as manager:
        alive, silent = faulty(manager)
        silent.script(dead())
        with pytest.raises(StoreTemporary, match="does not answer") as failed:
            manager.resume(new_state())
        assert failed.value.exit_code == 5
        assert alive.calls
    assert read_inventory(tmp_path / "root").saves == ()


def test_step_0_waits_for_an_optional_mirror_which_may_have_the_whole_run(tmp_path: Path) -> None:
    optional = MirrorSpec(f"file://{tmp_path}/other", required=False)
    saved_run(tmp_path / "lost", (1, 2), optional)
    with running(tmp_path / "root", MIRROR, optional) as manager:
        faulty(manager)[1].script(dead())
        with pytest.raises(StoreTemporary, match="might fork the run"):
            manager.resume(new_state())
    with running(tmp_path / "root", MIRROR, optional) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_mirror_down_resumes_from_the_disk(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1, 2), MIRROR)
    with running(tmp_path / "root", MIRROR) as manager:
        faulty(manager, dead())
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place) == (2, "disk")


def test_a_lost_disk_resumes_from_the_mirror_over_http(tmp_path: Path, gcs_server: GcsServerProcess) -> None:
    url = f"gs://{GCS_BUCKET}/run"
    states = saved_run(tmp_path / "root", (1, 2), url)
    shutil.rmtree(tmp_path / "root")
    with CheckpointManager(tmp_path / "root", [url]) as manager:
        state = new_state(seed=8)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.place) == (2, url)
        assert same(everything(state), states[2])
        train(state)
        manager.save(3, state)
    assert sorted(whole(tmp_path / "root")) == [2, 3]
    with running(tmp_path / "root", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place) == (3, "disk")


def test_a_download_that_fails_for_now_does_not_go_back_to_an_older_save(tmp_path: Path) -> None:
    """A place that does not answer is not broken (training would silently lose the steps between)."""
    saved_run(tmp_path / "root", (1, 2), MIRROR)
    _forget_locally(tmp_path / "root", whole(tmp_path / "root")[2])
    with running(tmp_path / "root", MIRROR) as manager:
        faulty(manager, StoreFault("download", when="before", times=0))
        with pytest.raises(StoreTemporary):
            manager.resume(new_state())
    with running(tmp_path / "root", MIRROR) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place) == (2, MIRROR)


def test_a_broken_newest_copy_does_not_go_back_while_a_required_mirror_is_silent(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1, 2), MIRROR, kinds=("model",))
    flip_bit(artifact(tmp_path / "root", whole(tmp_path / "root")[2], "model_"))
    with running(tmp_path / "root", MIRROR) as manager:
        faulty(manager, dead())
        with pytest.raises(StoreTemporary, match="step 2 is broken"):
            manager.resume(new_state())
    with running(tmp_path / "root", MIRROR) as manager:
        faulty(manager, dead())
        with pytest.raises(StoreTemporary, match="A person's choice is recorded on every required mirror"):
            manager.resume(new_state(), policy=1)
    with running(tmp_path / "root", MIRROR) as manager:
        start = manager.resume(new_state(), policy=1)
        assert start is not None
        assert start.step == 1


def test_requested_step_missing_is_an_error(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2, 12))
    with running(tmp_path) as manager:
        with pytest.raises(CheckpointNotFound, match=r"no save of step 20\. The nearest are 1, 2, 12") as failed:
            manager.resume(new_state(), policy=20)
        assert failed.value.exit_code == 3
        with pytest.raises(CheckpointNotFound):
            manager.resume(new_state(), policy="deadbeef")
        with pytest.raises(UsageError):
            manager.resume(new_state(), policy="newest")
        start = manager.resume(new_state(), policy=2)
        assert start is not None
        assert start.step == 2


@pytest.mark.parametrize("policy", [7.5, True, -7, None, ["latest"]])
def test_what_is_no_policy_is_refused_as_that(tmp_path: Path, policy: Any) -> None:
    saved_run(tmp_path, (1,))
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match="is not a policy") as failed:
            manager.resume(new_state(), policy=policy)
        assert "a step" in failed.value.hint
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1


def test_close_with_something_else_than_a_stop_request_is_refused_and_can_be_called_again(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    manager = CheckpointManager(tmp_path)
    with pytest.raises(UsageError, match="stop=True is not a StopRequest"):
        manager.close(stop=True)  # type: ignore[arg-type]
    manager.close()


def test_a_requested_step_that_a_silent_mirror_may_hold_is_a_temporary_error(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1,), MIRROR)
    with running(tmp_path / "root", MIRROR) as manager:
        faulty(manager, dead())
        with pytest.raises(StoreTemporary, match="no save of step 2"):
            manager.resume(new_state(), policy=2)


def test_latest_of_an_empty_root_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    with running(tmp_path) as manager, pytest.raises(CheckpointNotFound):
        manager.resume(new_state(), policy="latest")


def test_a_rewind_stays_rewound_over_restarts_and_on_another_machine(tmp_path: Path) -> None:
    saved_run(tmp_path / "a", (1, 2, 3), MIRROR)
    with running(tmp_path / "a", MIRROR) as manager:
        start = manager.resume(new_state(), policy=1)
        assert start is not None
        assert start.step == 1
    for root in (tmp_path / "a", tmp_path / "a", tmp_path / "elsewhere"):
        with running(root, MIRROR) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 1
    with running(tmp_path / "a", MIRROR) as manager, pytest.raises(CheckpointNotFound, match="off the lineage"):
        manager.resume(new_state(), policy=3)


def test_a_superseded_save_is_resumed_by_its_id_and_is_then_the_lineage(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    save_id = whole(tmp_path)[2].save_id
    with running(tmp_path) as manager:
        manager.resume(new_state(), policy=1)
    with running(tmp_path) as manager:
        start = manager.resume(new_state(), policy=save_id[:8])
        assert start is not None
        assert start.save_id == save_id
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_training_over_a_rewound_step_leaves_both_and_resumes_the_new_one(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    old = whole(tmp_path)[2].save_id
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state, policy=1)
        train(state)
        state.extra["branch"] = "second"
        new = manager.save(2, state).wait().save_id
    with running(tmp_path) as manager:
        state = new_state()
        start = manager.resume(state)
        assert start is not None
        assert start.save_id == new != old
        assert state.extra["branch"] == "second"
    assert old in {save.meta.save_id for save in read_inventory(tmp_path).saves}


def test_fresh_start_refuses_a_non_empty_root_in_scratch(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy, match="step 1"):
        manager.resume(new_state(), policy="scratch")


def test_scratch_with_force_starts_at_0_and_stays_there_over_restarts(tmp_path: Path) -> None:
    saved_run(tmp_path / "r", (1, 2), MIRROR)
    with running(tmp_path / "r", MIRROR) as manager:
        assert manager.resume(new_state(), policy="scratch", force=True) is None
    with running(tmp_path / "r", MIRROR) as manager:  # killed before the first save
        assert manager.resume(new_state()) is None
        manager.save(1, new_state()).wait()
    with running(tmp_path / "r", MIRROR) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
    assert len(read_inventory(tmp_path / "r").saves) == 3


def test_a_reference_given_to_one_run_never_follows_the_latest_link(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("dcp_000001")
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def _forget_locally(root: Path, meta: Meta) -> None:
    """Remove a save from the disk as a rotation would."""
    (root / names.SaveName(meta.step, meta.tag).meta).unlink()
    for path in dict.fromkeys(one.path.partition("/")[0] for one in meta.artifacts):
        shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def test_a_training_that_went_wrong_is_rewound_within_one_process(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root", [MIRROR]) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait()
        good = everything(state)
        train(state)
        manager.save(2, state)
        start = manager.resume(state, policy=1)
        assert start is not None
        assert same(everything(state), good)
        train(state)
        manager.save(2, state).wait("mirrored", timeout_s=30)
    with running(tmp_path / "root", MIRROR) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2
    numbers = {save.meta.attempt.number for save in read_inventory(tmp_path / "root").saves}
    assert numbers == {0, 1}


def test_a_required_mirror_that_does_not_let_us_list_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1,), MIRROR)
    refused = StoreFault("list", when="before", times=0, error=lambda: NotAuthorised("no (a scripted fault)"))
    with running(tmp_path / "elsewhere", MIRROR) as manager:
        faulty(manager, refused)
        with pytest.raises(NotAuthorised, match="a scripted fault"):
            manager.resume(new_state())
