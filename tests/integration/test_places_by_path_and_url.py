"""A mirror on this machine and a trainer's root mean the same by their path and by their URL."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import (
    CheckpointManager,
    find_local_checkpoint_steps,
    list_checkpoints,
    load_checkpoint,
    resolve_checkpoint_reference,
    resolve_resume_path,
    stage_checkpoint_step,
)
from ckptmirror.core.errors import CheckpointNotFound, CkptMirrorError, NoTable, UsageError
from tests.kit.cli import run
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "nfs").mkdir()
    return f"file://{tmp_path}/nfs/run"


def save_step_2_twice(folder: Path, url: str) -> None:
    """Two starts, the second on another disk: the mirror has the current save of step 2 under names with its id."""
    saved_run(folder / "first", (1, 2), url)
    with running(folder / "second", url) as manager:
        manager.resume(state := new_state(), policy=1)
        train(state, 1)
        manager.save(2, state).wait("mirrored")


@pytest.mark.parametrize("spelled", [str, lambda path: f"file://{path}"], ids=["path", "url"])
@pytest.mark.parametrize("place", ["root", "nfs/run"])
def test_what_a_rewind_left_behind_is_nowhere_the_newest(
    place: str, spelled: Callable[[Path], str], tmp_path: Path, url: str
) -> None:
    states = saved_run(tmp_path / "root", (1, 2, 3), url)
    assert run("rewind", "--root", tmp_path / "root", "--step", "1").returncode == 0
    given = spelled(tmp_path / place)
    standing = {1: "current", 2: "superseded", 3: "superseded"}
    assert {line.step: line.standing for line in list_checkpoints(given)} == standing
    assert resolve_checkpoint_reference(given).step == 1
    assert load_checkpoint(given).meta.step == 1
    with CheckpointManager(tmp_path / "other") as manager:
        manager.resume(state := new_state())
        loaded = manager.load(state, given)
        assert loaded.step == 1
        assert same(everything(state), states[1])
    assert stage_checkpoint_step(given, step="latest", dest=tmp_path / "staged").step == 1
    with pytest.raises(CheckpointNotFound, match=r"Step 3 of .* is superseded"):
        stage_checkpoint_step(given, step=3, dest=tmp_path / "staged")
    assert load_checkpoint(f"{given}/model_000003.pt").meta.step == 3  # by its name it is there


def test_the_steps_of_a_mirror_are_those_of_its_own_list(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "root", (1, 2, 3), url)
    run("rewind", "--root", tmp_path / "root", "--step", "1")
    mirror = tmp_path / "nfs" / "run"
    assert find_local_checkpoint_steps(mirror) == find_local_checkpoint_steps(tmp_path / "root") == [1]
    with pytest.raises(NoTable, match="is a mirror"):
        resolve_resume_path(mirror)


def test_what_a_listing_names_is_the_save_that_it_lists(tmp_path: Path, url: str) -> None:
    """It named the superseded save of a step for the current one, and what was loaded by that name had its values."""
    save_step_2_twice(tmp_path, url)
    for place in (url, str(tmp_path / "nfs/run")):
        lines = list_checkpoints(place)
        assert [(line.step, line.standing) for line in lines] == [(1, "current"), (2, "superseded"), (2, "current")]
        for line in lines:
            assert load_checkpoint(f"{place}/{line.place}").meta.save_id == line.save_id
    for line in list_checkpoints(tmp_path / "second"):
        assert load_checkpoint(line.place).meta.save_id == line.save_id


def test_verify_takes_the_directory_of_a_mirror_as_a_root_for_the_mirror_that_it_is(tmp_path: Path, url: str) -> None:
    """It called the meta of a current save damaged, and the command that it named deleted it."""
    save_step_2_twice(tmp_path, url)
    for given in (["--root", str(tmp_path / "nfs/run")], ["--mirror", url], [str(tmp_path / "nfs/run")]):
        ended = run("verify", *given)
        assert ended.returncode == 0
        assert "3 of 3 saves are whole" in ended.stderr
    both = run("verify", "--root", tmp_path / "nfs/run", "--mirror", url)
    assert "3 of 3 saves are whole" in both.stderr


def test_the_steps_of_a_kind_that_there_is_not_are_asked_for_by_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no kind 'pt'"):
        find_local_checkpoint_steps(tmp_path, kind="pt")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["DCP", "emergency", ("dcp",)])
def test_nobody_waits_for_a_kind_that_no_save_on_a_mirror_has(kind: Any, tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "root", (1,), url)
    with pytest.raises(UsageError, match="There is no kind") as refused:
        stage_checkpoint_step(url, step=1, dest=tmp_path / "copy", require_kind=kind, wait_s=1e9)
    assert refused.value.hint == "The kinds are dcp, model."


@pytest.mark.parametrize("given", [{"step": "1"}, {"step": True}, {"wait_s": "10"}, {"wait_s": float("nan")}])
def test_a_step_and_a_time_to_wait_are_numbers(given: dict[str, Any], tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(given))} is "):
        stage_checkpoint_step(url, dest=tmp_path / "copy", **{"step": 1, **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"exclude": "optimizer"}, "exclude is 'optimizer'; it must be a tuple"),
        ({"exclude": None}, "exclude is None"),
        ({"exclude": ["model"]}, "exclude is "),
        ({"new_config_keys": "bias"}, "it must be a dict"),
    ],
)
def test_what_a_load_is_given_in_another_form_is_named(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        load_checkpoint(tmp_path, **given)


def test_a_reference_of_a_kind_that_there_is_not_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no kind"):
        resolve_checkpoint_reference(tmp_path, require_kind=("dcp",))  # type: ignore[arg-type]


def test_the_objects_of_a_mirror_may_have_other_names_than_the_files_of_their_save(tmp_path: Path, url: str) -> None:
    save_step_2_twice(tmp_path, url)
    mirror = tmp_path / "nfs" / "run"
    (tagged,) = mirror.glob("dcp_000002-*")
    for name in ("", f"/{tagged.name}"):
        found = load_checkpoint(f"{mirror}{name}")
        assert found.meta.save_id.startswith(tagged.name.partition("-")[2])


def test_a_copy_of_a_root_has_the_list_of_the_root(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "root", (1, 2, 3), url)
    run("rewind", "--root", tmp_path / "root", "--step", "1")
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    assert stage_checkpoint_step(f"file://{tmp_path}/copy", step="latest", dest=tmp_path / "staged").step == 1


@pytest.mark.parametrize(("code", "says"), [(errno.EIO, "I/O error"), (errno.ESTALE, "Stale file handle")])
def test_a_disk_that_does_not_answer_has_not_nothing(
    code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    saved_run(root, (1,))
    honest = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path == root:
            raise OSError(code, os.strerror(code), str(path))
        return honest(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    for call in (resolve_resume_path, find_local_checkpoint_steps, load_checkpoint, list_checkpoints):
        with pytest.raises(CkptMirrorError, match=says):
            call(root)
