"""Resuming after damage: flipped bits, missing files, crashes, a second writer, lost tables and lists."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, list_checkpoints
from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    IntegrityError,
    RefusedOnlyCopy,
    RootLocked,
)
from ckptmirror.flow.fetch.load import load_checkpoint
from ckptmirror.stores import memory, open_store
from tests.kit.cli import assert_tells, run
from tests.kit.faults import flip_bit
from tests.kit.processes import killed_at
from tests.kit.roots import artifact, control, leftovers, whole
from tests.kit.training import everything, new_state, running, same, saved_run

pytestmark = pytest.mark.long

MIRROR = "memory://test-resume/run"


@pytest.fixture(autouse=True)
def _fresh_memory() -> Iterator[None]:
    memory.drop("test-resume")
    yield
    memory.drop("test-resume")


def test_a_broken_list_here_does_not_make_the_mirrors_copy_a_broken_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2), MIRROR, kinds=("dcp",))
    flip_bit(artifact(root, whole(root)[2], ".metadata"), offset=-40)
    broken = root / names.ATTEMPTS_NAME
    broken.write_bytes(broken.read_bytes()[:-20])
    with running(root, MIRROR) as manager:
        start = manager.resume(new_state(seed=4))
    assert start is not None
    assert (start.step, start.place) == (2, MIRROR)


def test_a_verb_at_a_broken_list_names_the_file_and_the_start_that_it_promises_rebuilds_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2), f"file://{tmp_path}/mirror", kinds=("model",))
    broken = root / names.ATTEMPTS_NAME
    broken.write_bytes(broken.read_bytes()[:-20])
    for verb in ("status", "ls", "verify"):
        assert_tells(run(verb, "--root", root), 6, f"{broken} is broken", "The next start of the trainer rebuilds it")
    with running(root, f"file://{tmp_path}/mirror") as manager:
        manager.resume(new_state(seed=4))
    assert run("verify", "--root", root).returncode == 0


# -- broken and incomplete --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extra_"])
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


@pytest.mark.parametrize("name", ["model_", "optim_", "extra_"])
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


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_what_a_save_lost_on_the_mirror_is_not_made_up_for_by_another_of_the_step(tmp_path: Path, kind: str) -> None:
    mirror = tmp_path / "mirror"
    saved_run(tmp_path / "first", (1, 2), f"file://{mirror}", kinds=(kind,))
    (mirror / names.SaveName(2).extra(0)).unlink()
    states = saved_run(tmp_path / "second", (2, 3), f"file://{mirror}", kinds=(kind,))
    lines = [(line.step, line.standing) for line in list_checkpoints(f"file://{mirror}")]
    assert lines == [(1, "current"), (2, "incomplete"), (2, "current"), (3, "current")]
    (mirror / names.SaveName(3).meta).unlink()
    with running(tmp_path / "third", f"file://{mirror}") as manager:
        state = new_state(seed=4)
        start = manager.resume(state)
    assert start is not None
    assert start.step == 2
    assert same(everything(state), states[2])


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
    assert killed_at(crash_at, saved_run, tmp_path, (2,))
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
        if not killed_at(f"file.write:after@{number}", saved_run, root, (2,)):
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
        with pytest.raises(AttemptFenced):
            old._wait_mirrored(zombie.save_id, 30.0)
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
    with running(root, url, uploads=False) as manager:
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


def test_i4_an_explicit_kind_is_never_replaced_by_another(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    flip_bit(artifact(tmp_path, whole(tmp_path)[1], "distcp"))
    with pytest.raises(IntegrityError):
        load_checkpoint(tmp_path / "dcp_000001")
    assert load_checkpoint(tmp_path / "model_000001.pt").meta.step == 1
