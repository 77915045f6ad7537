"""Checkpoints of older writers are looked at, resolved and loaded, and never taken for whole saves of ours."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from ckptmirror import (
    CheckpointReference,
    TrainState,
    find_local_checkpoint_steps,
    list_checkpoints,
    load_checkpoint,
    resolve_checkpoint_reference,
    resolve_resume_path,
    stage_checkpoint_step,
)
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    IntegrityError,
    KindMismatch,
    RefusedOnlyCopy,
    UnsafePickle,
    UsageError,
)
from ckptmirror.flow.drain import push
from ckptmirror.local.legacy_listing import find_older
from ckptmirror.stores import open_store
from tests.kit.cli import run
from tests.kit.legacy import make_training, named, save_dcp, save_legacy, write_meta
from tests.kit.roots import make_mirrored
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts
from tests.kit.training import running, same


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def about_older(told: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in told.messages if "is a legacy checkpoint and has no checksums" in line]


# -- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["dist_ckpt_000200", "dcp_000200"])
def test_an_older_dcp_directory_is_found_resolved_and_loaded(
    name: str, inside: bool, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    saved = save_legacy(tmp_path, 200, name, inside=inside)
    expected = CheckpointReference(tmp_path, 200, "dcp")
    meta = tmp_path / name / "meta.json" if inside else tmp_path / "meta.json"
    for reference in (tmp_path / name, tmp_path, meta):
        told.clear()
        assert resolve_checkpoint_reference(reference) == expected
        assert len(about_older(told)) == 1
    assert find_local_checkpoint_steps(tmp_path) == find_local_checkpoint_steps(tmp_path, "dcp") == [200]
    assert find_local_checkpoint_steps(tmp_path, "model") == []
    told.clear()
    loaded = load_checkpoint(tmp_path)
    assert len(about_older(told)) == 1
    assert same(loaded.model, dict(saved["model"]))
    assert loaded.optimizer is not None
    assert same(loaded.optimizer["state"], saved["optimizer"]["state"])
    assert loaded.extra is not None
    assert (loaded.extra["scheduler"], loaded.extra["epoch"]) == (saved["scheduler"], 7)
    assert (loaded.meta.step, loaded.kind, dict(loaded.meta.training_config)) == (200, "dcp", {"width": 6})
    assert (dict(loaded.meta.metrics), loaded.meta.fields["run"]) == ({"val_loss": 1.5}, "old")


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_older_model_file_with_its_meta_is_loaded(wrapped: bool, tmp_path: Path) -> None:
    model, optimizer, _ = make_training()
    state = model.state_dict()
    torch.save(
        {"model": state, "optimizer": optimizer.state_dict()} if wrapped else state, tmp_path / "model_000300.pt"
    )
    torch.save({"epoch": 2}, tmp_path / "extra_000300.pt")
    write_meta(tmp_path, global_step=300)
    loaded = load_checkpoint(tmp_path / "model_000300.pt")
    assert same(loaded.model, dict(state))
    assert (loaded.optimizer is not None, loaded.extra, loaded.kind) == (wrapped, {"epoch": 2}, "model")
    assert find_local_checkpoint_steps(tmp_path, "model") == [300]
    with pytest.raises(KindMismatch):
        resolve_checkpoint_reference(tmp_path, require_kind="dcp")


def test_a_directory_of_tensors_alone_is_a_model_and_one_entry_around_all_is_taken_off(tmp_path: Path) -> None:
    model, optimizer, _ = make_training()
    save_dcp(tmp_path / "dist_ckpt_000100", model.state_dict())
    save_dcp(tmp_path / "dist_ckpt_000200", {"app": named(model, optimizer)})
    for step in (100, 200):
        write_meta(tmp_path / f"dist_ckpt_{step:06d}")
        assert same(load_checkpoint(tmp_path / f"dist_ckpt_{step:06d}").model, dict(model.state_dict()))
    assert find_local_checkpoint_steps(tmp_path) == [100, 200]
    save_dcp(tmp_path / "dist_ckpt_000300", {"weights": {"a": torch.zeros(1)}, "n": 1})
    write_meta(tmp_path / "dist_ckpt_000300")
    with pytest.raises(UsageError, match="it holds weights, n"):
        load_checkpoint(tmp_path / "dist_ckpt_000300")


def test_what_lies_inside_a_directory_comes_before_what_lies_beside_it(tmp_path: Path) -> None:
    save_legacy(tmp_path, 200)
    torch.save({"epoch": 1}, tmp_path / "extra_000200.pt")
    write_meta(tmp_path, step=200, config={"width": 1})
    loaded = load_checkpoint(tmp_path)
    assert loaded.extra is not None
    assert (loaded.extra["epoch"], loaded.meta.training_config["width"]) == (7, 6)


def test_of_several_steps_the_meta_beside_them_speaks_for_the_one_that_it_names(tmp_path: Path) -> None:
    for step in (100, 200):
        save_legacy(tmp_path, step, inside=False)  # the second meta.json replaces the first
    assert find_local_checkpoint_steps(tmp_path) == [200]
    assert resolve_checkpoint_reference(tmp_path).step == 200
    earlier = load_checkpoint(tmp_path / "dist_ckpt_000100")  # named by its path: by a person's decision
    assert (earlier.meta.step, dict(earlier.meta.training_config)) == (100, {})
    (tmp_path / "meta.json").write_text("{}")
    assert find_local_checkpoint_steps(tmp_path) == []


# -- what is not ------------------------------------------------------------------------------------------------------


def test_a_step_without_metadata_or_without_a_meta_is_not_advertised(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save_legacy(tmp_path, step)
    (tmp_path / "dist_ckpt_000100" / ".metadata").unlink()
    (tmp_path / "dist_ckpt_000200" / "meta.json").unlink()
    (tmp_path / "dist_ckpt_000300" / ".metadata").write_bytes(b"")  # as after a loss of power
    assert find_local_checkpoint_steps(tmp_path) == [400]
    refused = [(100, CheckpointNotFound, "no .metadata"), (200, CheckpointNotFound, "no meta.json")]
    for step, kind, why in (*refused, (300, BrokenMeta, "is empty")):
        with pytest.raises(kind, match=why):
            resolve_checkpoint_reference(tmp_path / f"dist_ckpt_{step:06d}")
    listed = {line.step: (line.standing, line.kinds) for line in list_checkpoints(tmp_path)}
    assert listed == {step: ("older" if step == 400 else "incomplete", ("dcp",)) for step in (100, 200, 300, 400)}


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "not JSON"), ("[]", "not a JSON object"), ('{"step": "200"}', "its step"), ('{"step": 7}', "7")],
)
def test_a_meta_that_is_broken_or_of_another_step_is_refused(text: str, why: str, tmp_path: Path) -> None:
    save_legacy(tmp_path, 200)
    (tmp_path / "dist_ckpt_000200" / "meta.json").write_text(text)
    with pytest.raises(BrokenMeta, match=why):
        load_checkpoint(tmp_path / "dist_ckpt_000200")
    assert find_local_checkpoint_steps(tmp_path) == []
    with pytest.raises(CheckpointNotFound, match="holds no checkpoint"):
        resolve_checkpoint_reference(tmp_path)


def test_a_newer_one_that_is_not_whole_is_not_passed_by_in_silence(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    for step in (100, 200):
        save_legacy(tmp_path, step)
    (tmp_path / "dist_ckpt_000200" / ".metadata").unlink()
    assert resolve_checkpoint_reference(tmp_path).step == 100
    assert any("skipped" in line and "dist_ckpt_000200" in line for line in told.messages)


def test_i2_what_ckptmirror_left_without_its_meta_is_never_an_older_writers(tmp_path: Path) -> None:
    make_save(tmp_path / "eval", 200)
    (tmp_path / "eval" / "meta_000200.json").unlink()  # sidecars tell whose it was
    make_save(tmp_path / "root", 200, sidecars=False)
    (tmp_path / "root" / "meta_000200.json").unlink()
    put_attempts(tmp_path / "root", [FIRST_ATTEMPT])
    for place in (tmp_path / "eval", tmp_path / "root"):
        write_meta(place, step=200)
        assert find_local_checkpoint_steps(place) == []
        for name in ("dcp_000200", "model_000200.pt"):
            with pytest.raises(CheckpointNotFound, match="no meta file names it"):
                resolve_checkpoint_reference(place / name)


def test_a_missing_file_of_tensors_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    save_legacy(tmp_path, 200)
    (tmp_path / "dist_ckpt_000200" / "__0_0.distcp").unlink()
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp"):
        load_checkpoint(tmp_path)


class _Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("owned",)


def test_i10_nothing_of_an_older_writer_is_unpickled_without_the_allow_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_legacy(tmp_path / "extra", 200)
    torch.save({"epoch": _Hostile()}, tmp_path / "extra" / "dist_ckpt_000200" / "extra_state.pt")
    save_legacy(tmp_path / "metadata", 200)
    (tmp_path / "metadata" / "dist_ckpt_000200" / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    (tmp_path / "model").mkdir()
    torch.save({"w": _Hostile()}, tmp_path / "model" / "model_000200.pt")
    write_meta(tmp_path / "model", step=200)
    for place in ("extra", "metadata", "model"):
        with pytest.raises(UnsafePickle):
            load_checkpoint(tmp_path / place)
    assert capsys.readouterr().out == ""


def test_no_link_of_an_older_writers_folder_is_followed(tmp_path: Path) -> None:
    save_legacy(tmp_path / "elsewhere", 200)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "dist_ckpt_000200").symlink_to(tmp_path / "elsewhere" / "dist_ckpt_000200")
    assert find_local_checkpoint_steps(tmp_path / "here") == []
    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(tmp_path / "here" / "dist_ckpt_000200")
    (tmp_path / "elsewhere" / "dist_ckpt_000200" / ".metadata").rename(tmp_path / "m")
    (tmp_path / "elsewhere" / "dist_ckpt_000200" / ".metadata").symlink_to(tmp_path / "m")
    assert find_local_checkpoint_steps(tmp_path / "elsewhere") == []
    torch.save({"w": torch.zeros(1)}, tmp_path / "elsewhere" / "w.pt")
    (tmp_path / "elsewhere" / "model_000300.pt").symlink_to("w.pt")
    write_meta(tmp_path / "elsewhere", step=300)
    assert find_local_checkpoint_steps(tmp_path / "elsewhere") == []
    with pytest.raises(BrokenMeta, match="not a regular file"):
        load_checkpoint(tmp_path / "elsewhere" / "model_000300.pt")


# -- beside saves of ours, on mirrors, and by the verbs ----------------------------------------------------------------


def test_directories_within_directories_of_an_older_writers_folder_end_no_listing(tmp_path: Path) -> None:
    """1,500 of them were a RecursionError of every verb that names the folder."""
    save_legacy(tmp_path, 200)
    depth = 1500
    here = os.open(tmp_path / "dist_ckpt_000200", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    try:
        assert load_checkpoint(tmp_path).meta.step == 200
        assert find_local_checkpoint_steps(tmp_path) == [200]
    finally:
        for _ in range(depth):  # what deletes the folder afterwards goes no deeper than Python does
            above = os.open("..", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = above
            os.rmdir("d", dir_fd=here)
        os.close(here)


def test_a_meta_of_an_older_writer_is_not_worth_gigabytes(tmp_path: Path) -> None:
    """JSON of 6 MiB was 150 MiB of empty lists; 64 MiB are read."""
    save_legacy(tmp_path, 200, inside=False)
    (tmp_path / "meta.json").write_text('{"step": 200, "config": {"it": [' + "[]," * 2_000_001 + "[]]}}")
    (found,) = find_older(tmp_path)
    assert "too many values" in found.why


def test_a_save_of_ours_comes_before_any_of_an_older_writer(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    save_legacy(tmp_path, 900)
    make_save(tmp_path, 100)
    assert resolve_checkpoint_reference(tmp_path).step == 100
    assert resolve_resume_path(tmp_path) == tmp_path / "dcp_000100"
    assert find_local_checkpoint_steps(tmp_path) == [100, 900]
    standings = [(line.step, line.standing) for line in list_checkpoints(tmp_path)]
    assert standings == [(100, "current"), (900, "older")]


def test_a_stage_of_the_same_step_leaves_an_older_writers_directory_as_it_is(tmp_path: Path) -> None:
    _, url, (meta,) = make_mirrored(tmp_path, 200, kinds=("dcp",))
    saved = save_legacy(tmp_path / "eval", 200, "dcp_000200")
    staged = stage_checkpoint_step(url, step=200, dest=tmp_path / "eval")
    assert staged.path.name == f"dcp_000200-{meta.save_id[:8]}"
    assert same(load_checkpoint(tmp_path / "eval" / "dcp_000200").model, dict(saved["model"]))
    assert resolve_checkpoint_reference(tmp_path / "eval").save_id == meta.save_id


def test_a_start_never_continues_from_an_older_writer_by_itself(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    save_legacy(tmp_path, 200)
    assert resolve_resume_path(tmp_path) is None
    assert any("nothing to resume" in line and "dist_ckpt_000200" in line for line in told.messages)
    model, optimizer, _ = make_training()
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy):
        manager.resume(TrainState(model=model, optimizer=optimizer))


def test_push_and_ls_and_verify_say_what_it_is(tmp_path: Path) -> None:
    save_legacy(tmp_path / "old", 200)
    with pytest.raises(CheckpointNotFound, match="dist_ckpt_000200 is a legacy checkpoint") as refused:
        push(tmp_path / "old", f"file://{tmp_path}/mirror")
    assert "manager.load" in refused.value.hint
    assert not (tmp_path / "old" / ".ckptmirror").exists()
    listed = run("ls", tmp_path / "old")
    assert "older" in listed.stdout
    assert "without checksums" in listed.stdout
    verified = run("verify", tmp_path / "old" / "dist_ckpt_000200")
    assert (verified.returncode, "has no meta with checksums" in verified.stderr) == (3, True)


def test_on_a_mirror_it_is_listed_and_not_brought(tmp_path: Path) -> None:
    save_legacy(tmp_path / "old", 200)
    url = f"file://{tmp_path}/mirror"
    open_store(url).identity()
    shutil.copytree(tmp_path / "old" / "dist_ckpt_000200", tmp_path / "mirror" / "dist_ckpt_000200")
    assert [(line.step, line.standing) for line in list_checkpoints(url)] == [(200, "older")]
    for reference in (url, f"{url}/dist_ckpt_000200"):
        with pytest.raises(CheckpointNotFound, match="a legacy checkpoint"):
            resolve_checkpoint_reference(reference)
