"""Resuming, in one process: which save is chosen, that it comes back exactly, and what is never guessed."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptmirror import CheckpointManager
from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    CheckpointNotFound,
    IntegrityError,
    RefusedOnlyCopy,
    RootLocked,
    StoreTemporary,
    UsageError,
)
from ckptmirror.core.model import Meta
from ckptmirror.flow.load import load_checkpoint
from ckptmirror.flow.mirrors import MirrorSpec
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import memory, open_store
from ckptmirror.stores.faulty import StoreFault
from ckptmirror.testing import GcsServerProcess
from ckptmirror.testing.fixtures import GCS_BUCKET, gcs_server
from tests.factory import flip_bit
from tests.small_training import (
    artifact,
    control,
    dead,
    everything,
    faulty,
    killed_at,
    leftovers,
    new_state,
    running,
    same,
    saved_run,
    train,
    whole,
)

__all__ = ["gcs_server"]
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
        start = manager.resume(fresh)
        assert start is not None
        assert any(part.startswith("optimizer") for part in start.missing)
    assert same(before, fresh.optimizer.state_dict())
    assert "no optimizer" in caplog.text


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


# -- which one is chosen ----------------------------------------------------------------------------------------------


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


def test_fresh_start_does_not_need_an_optional_mirror(tmp_path: Path) -> None:
    with running(tmp_path / "root", MIRROR, MirrorSpec(f"file://{tmp_path}/other", required=False)) as manager:
        faulty(manager)[1].script(dead())
        assert manager.resume(new_state()) is None


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
        start = manager.resume(new_state(), policy=1)  # a person decides
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


# -- broken and incomplete --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extra_", "tensors_"])
def test_a_flipped_bit_on_disk_falls_to_the_mirrors_copy_of_the_same_save(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    states = saved_run(root, (1, 2), MIRROR, kinds=("dcp",))
    flip_bit(artifact(root, whole(root)[2], name), offset=-40)
    with running(root, MIRROR) as manager:
        state = new_state(seed=4)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.place) == (2, MIRROR)
        assert len(start.passed_over) == 1
        assert "step 2" in start.passed_over[0]
        assert same(everything(state), states[2])
    with running(root, MIRROR) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place, start.passed_over) == (2, "disk", ())


@pytest.mark.parametrize("name", ["model_", "optim_", "extra_", "tensors_"])
def test_a_flipped_bit_everywhere_falls_to_the_next_older_save_and_says_so(tmp_path: Path, name: str) -> None:
    states = saved_run(tmp_path, (1, 2), kinds=("model",))
    flip_bit(artifact(tmp_path, whole(tmp_path)[2], name))
    with running(tmp_path) as manager:
        state = new_state(seed=4)
        start = manager.resume(state)
        assert start is not None
        assert start.step == 1
        assert any("step 2" in line and "disk" in line for line in start.passed_over)
        assert same(everything(state), states[1])


def test_a_broken_kind_falls_to_the_other_kind_of_the_same_save(tmp_path: Path) -> None:
    states = saved_run(tmp_path, (1, 2))
    flip_bit(artifact(tmp_path, whole(tmp_path)[2], "distcp"))
    with running(tmp_path) as manager:
        state = new_state(seed=4)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.kind) == (2, "model")
        assert same(everything(state), states[2])


def test_load_corrupt_model_file_raises(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,), kinds=("model",))
    flip_bit(artifact(tmp_path, whole(tmp_path)[1], "model_"), offset=200)
    with pytest.raises(IntegrityError):
        load_checkpoint(tmp_path / "model_000001.pt")
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy, match="model_000001"):
        manager.resume(new_state())


def test_a_broken_meta_alone_forbids_a_fresh_start(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    flip_bit(tmp_path / "meta_000001.json", offset=30)
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy, match="meta_000001"):
        manager.resume(new_state())


def test_an_incomplete_save_is_skipped(tmp_path: Path) -> None:
    saved_run(tmp_path, (1, 2))
    artifact(tmp_path, whole(tmp_path)[2], "extra_").unlink()
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1


def test_i2_a_directory_that_no_meta_names_is_never_resumed(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    shutil.copytree(tmp_path / "dcp_000001", tmp_path / "dcp_000009")
    shutil.copy(tmp_path / "meta_000001.json", tmp_path / "meta_000009.json")  # and a meta that names another step
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
    assert (tmp_path / "dcp_000009").is_dir()


@pytest.mark.parametrize("crash_at", ["save.publish:before@3", "table.add_save:after", "file.publish:before@3"])
def test_crash_during_save_leaves_no_final_file(tmp_path: Path, crash_at: str) -> None:
    """The DCP twin: SIGKILL in the middle of a save of both kinds."""
    saved_run(tmp_path, (1,))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert killed_at(crash_at, lambda: saved_run(tmp_path, (2,)))
    assert sorted(whole(tmp_path)) == [1]
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert leftovers(tmp_path) == []


def test_crash_in_a_sidecars_tmp_leaves_no_final_file(tmp_path: Path) -> None:
    crashed_in = set()
    for number in range(7, 14):  # the writes of the second run: the lists first, then one artifact after the other
        root = tmp_path / f"run{number}"
        saved_run(root, (1,))
        if not killed_at(f"file.write:after@{number}", lambda root=root: saved_run(root, (2,))):
            break
        crashed_in |= {path.name.partition("_")[0] for path in root.glob("*.tmp")}
        assert [path.name for path in root.glob("*000002*") if path.suffix != ".tmp"] == []
        with running(root) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 1
            assert leftovers(root) == []
        if "tensors" in crashed_in:
            break
    assert {"extra", "tensors"} <= crashed_in


# -- I11: one writer --------------------------------------------------------------------------------------------------


def test_i11_a_second_writer_is_refused_also_when_the_first_is_stopped(tmp_path: Path) -> None:
    code = f"from ckptmirror import *; manager = CheckpointManager({str(tmp_path)!r}); print(1, flush=True); input()"
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline()
    try:
        with pytest.raises(RootLocked, match=f"pid {first.pid}") as refused:
            CheckpointManager(tmp_path)
        assert refused.value.exit_code == 11
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(RootLocked):
            CheckpointManager(tmp_path)
    finally:
        first.kill()
        first.communicate()
    with running(tmp_path) as manager:
        assert manager.resume(new_state()) is None


def test_i11_a_fenced_attempt_commits_nothing_more(tmp_path: Path) -> None:
    with running(tmp_path / "old", MIRROR) as old, running(tmp_path / "new", MIRROR) as new:
        state = new_state()
        old.resume(state)
        old.save(1, state).wait("mirrored", timeout_s=30)
        start = new.resume(new_state())
        assert start is not None
        assert start.step == 1
        zombie = old.save(2, state).wait()  # committed on its disk; it does not know yet
        new.save(2, state).wait("mirrored", timeout_s=30)
        assert not old._wait_mirrored(zombie.save_id, 30.0)
        with pytest.raises(AttemptFenced) as fenced:
            old.save(3, state)
        assert fenced.value.exit_code == 7
        assert sorted(whole(tmp_path / "old")) == [1, 2]
        listed = [info.name for info in open_store(MIRROR).list("meta_")]
        assert listed == ["meta_000001.json", "meta_000002.json"]
    with running(tmp_path / "third", MIRROR) as third:
        start = third.resume(new_state())
        assert start is not None
        assert start.save_id == whole(tmp_path / "new")[2].save_id


# -- I12: what may be lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", ["table", "table_rotten", "attempts", "attempts_rotten", "writer", "all_lists", "control"]
)
def test_i12_the_next_start_carries_on_after_a_loss(tmp_path: Path, loss: str) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    url = f"file://{mirror}"
    with running(root, url) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait("mirrored", timeout_s=30)
    with running(root, url, workers_per_mirror=0) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(2, state).wait()  # committed, and never sent by this process
    run_id = whole(root)[2].run_id
    if loss == "table":
        for path in (root / ".ckptmirror").glob("uploads.db*"):
            path.unlink()
    elif loss == "table_rotten":
        control(root, "uploads.db").write_bytes(b"\xff" * 9000)
    elif loss == "attempts_rotten":
        flip_bit(control(root, "attempts.json"), offset=40)
    elif loss == "control":
        shutil.rmtree(root / ".ckptmirror")
    if loss in ("attempts", "all_lists"):
        control(root, "attempts.json").unlink()
    if loss in ("writer", "all_lists"):
        (mirror / names.WRITER_NAME).unlink()
    with CheckpointManager(root, [url]) as manager:
        state = new_state()
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.place) == (2, "disk")
        manager.wait("mirrored", timeout_s=30)
        manager.save(3, state)
    assert sorted(path.name for path in mirror.glob("meta_*")) == [f"meta_00000{n}.json" for n in (1, 2, 3)]
    attempts = attempts_from_bytes((mirror / names.WRITER_NAME).read_bytes())
    assert attempts.run_id == run_id
    assert max(attempt.number for attempt in attempts.attempts) == 2


def test_a_mirror_of_another_run_is_refused(tmp_path: Path) -> None:
    from ckptmirror.core.errors import ConfigError

    saved_run(tmp_path / "one", (1,), MIRROR)
    saved_run(tmp_path / "two", (1,))
    with running(tmp_path / "two", MIRROR) as manager, pytest.raises(ConfigError, match="holds run"):
        manager.resume(new_state())


def test_reference_root_is_read_only(tmp_path: Path) -> None:
    """Reading a checkpoint of another run changes nothing in its root."""
    saved_run(tmp_path, (1,))
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    loaded = load_checkpoint(tmp_path / "dcp_000001")
    assert loaded.model
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


def _forget_locally(root: Path, meta: Meta) -> None:
    """Remove a save from the disk as a rotation would."""
    (root / names.SaveName(meta.step, meta.tag).meta).unlink()
    for path in dict.fromkeys(one.path.partition("/")[0] for one in meta.artifacts):
        shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def test_i4_an_explicit_kind_is_never_replaced_by_another(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    flip_bit(artifact(tmp_path, whole(tmp_path)[1], "distcp"))
    with pytest.raises(IntegrityError):
        load_checkpoint(tmp_path / "dcp_000001")
    assert load_checkpoint(tmp_path / "model_000001.pt").meta.step == 1


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
