"""A place that shows traces of training is no place for a silent start at step 0."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror import stage_checkpoint_step
from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError, RefusedOnlyCopy, StoreTemporary
from ckptmirror.stores import open_store
from tests.kit.faults import faulty, refusing
from tests.kit.processes import killed_at
from tests.kit.roots import artifact, whole
from tests.kit.training import new_state, running, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "nfs").mkdir()
    return f"file://{tmp_path}/nfs/run"


def refused(root: Path, *mirrors: object, match: str) -> None:
    """A start refuses, again and again, until a person decides; and that is not asked a second time."""
    for _ in range(2):
        with running(root, *mirrors) as manager, pytest.raises(RefusedOnlyCopy, match=match):
            manager.resume(new_state())
    with running(root, *mirrors) as manager:
        with pytest.raises(RefusedOnlyCopy, match=match):
            manager.resume(new_state(), policy="scratch")
        assert manager.resume(new_state(), policy="scratch", force=True) is None


def emptied(root: Path, *but: str) -> None:
    for path in root.iterdir():
        if path.name not in (names.CONTROL_DIR, *but):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# -- what counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dist_ckpt_000002", "extra_000002.pt", "extra_state.pt"])
def test_a_checkpoint_of_an_older_layout_forbids_step_0(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if "dist" in name else (tmp_path / name).write_bytes(b"x")
    refused(tmp_path, match=f"{name}: of an older layout")


def test_files_that_no_meta_explains_forbid_step_0(tmp_path: Path) -> None:
    saved_run(tmp_path / "lost", (1, 2))
    for path in (tmp_path / "lost").glob("meta_*.json"):
        path.unlink()
    shutil.copytree(tmp_path / "lost", tmp_path / "moved", ignore=shutil.ignore_patterns(names.CONTROL_DIR))
    refused(tmp_path / "lost", match=r"dcp_000001: no valid meta names it \(nor 4 more of step 1\).*dcp_000002")
    refused(tmp_path / "moved", match=r"dcp_000001: no valid meta names it")
    assert (tmp_path / "lost" / "dcp_000002").is_dir()


def test_files_whose_metas_went_before_they_were_uploaded_forbid_step_0(tmp_path: Path, url: str) -> None:
    with running(tmp_path / "root", url) as manager:
        faulty(manager, refusing())
        state = new_state()
        manager.resume(state)
        train(state, 1)
        manager.save(1, state).wait()
    for path in (tmp_path / "root").glob("meta_*.json"):
        path.unlink()
    refused(tmp_path / "root", url, match="dcp_000001")


def test_saves_that_the_table_knows_and_that_are_gone_forbid_step_0(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    emptied(tmp_path)
    refused(tmp_path, match=r"meta_000001\.json: the table knows it")


def test_a_required_mirror_that_the_table_alone_knows_forbids_step_0(tmp_path: Path, url: str) -> None:
    root, other = tmp_path / "root", f"file://{tmp_path}/nfs/other"
    saved_run(root, (1,), url)
    emptied(root)
    (root / names.ATTEMPTS_NAME).unlink()
    with running(root, other) as manager, pytest.raises(StoreTemporary, match="is no longer configured") as refusal:
        manager.resume(new_state())
    assert f"ckptmirror forget-mirror --root {root} --url {url}" in refusal.value.hint
    with running(root, other, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1


def test_saves_that_were_removed_before_they_were_uploaded_forbid_step_0_at_every_later_start(
    tmp_path: Path, url: str
) -> None:
    with running(tmp_path / "root", url) as manager:
        faulty(manager, refusing())
        state = new_state()
        manager.resume(state)
        train(state, 1)
        manager.save(1, state).wait()
    emptied(tmp_path / "root")
    refused(tmp_path / "root", url, match=r"meta_000001\.json: the table knows it")


def test_saves_of_another_run_forbid_step_0(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    saved_run(old, (1, 2))
    with running(new) as manager:
        assert manager.resume(new_state()) is None
    shutil.copytree(old, new, ignore=shutil.ignore_patterns(names.CONTROL_DIR, "latest"), dirs_exist_ok=True)
    refused(new, match="meta_000001.json: a save of another run")
    assert sorted(whole(new)) == [1, 2]


def test_a_copy_staged_for_evaluation_forbids_step_0_where_no_mirror_is_given(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "one", (1,), url)
    for root in (tmp_path / "own", tmp_path / "bare"):
        if root.name == "own":
            shutil.copytree(tmp_path / "one" / names.CONTROL_DIR, root / names.CONTROL_DIR)
            for path in (root / names.CONTROL_DIR).glob("uploads.db*"):
                path.unlink()
        stage_checkpoint_step(url, step=1, dest=root, require_kind="model")
        told = f"{url} is no longer configured" if root.name == "own" else "lacks files of the save"
        with running(root) as manager, pytest.raises((RefusedOnlyCopy, StoreTemporary), match=told):
            manager.resume(new_state())


def test_a_partial_copy_of_a_newer_save_is_not_passed_by_in_silence(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "one", (1,), url)
    with running(tmp_path / "two", url) as manager:
        manager.resume(new_state())
    saved_run(tmp_path / "one", (5,), url)
    stage_checkpoint_step(url, step=5, dest=tmp_path / "two", require_kind="model")
    shutil.copy(tmp_path / "one" / names.ATTEMPTS_NAME, tmp_path / "two" / names.ATTEMPTS_NAME)
    with running(tmp_path / "two") as manager, pytest.raises(StoreTemporary, match=r"lacks files.*may be there"):
        manager.resume(new_state())
    with running(tmp_path / "two", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 5


def test_a_mirror_whose_metas_are_lost_forbids_step_0(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "one", (1, 2), url)
    for path in (tmp_path / "nfs" / "run").glob("meta_*.json"):
        path.unlink()
    with running(tmp_path / "two", url) as manager, pytest.raises(RefusedOnlyCopy, match=rf"{url}/dcp_000001"):
        manager.resume(new_state())


def test_the_objects_of_a_save_that_was_never_finished_there_forbid_step_0_on_another_machine(
    tmp_path: Path, url: str
) -> None:
    """Its only copy may lie on the disk of the first machine."""
    saved_run(tmp_path / "one", (1,), url)
    (tmp_path / "nfs" / "run" / "meta_000001.json").unlink()
    with running(tmp_path / "two", url) as manager, pytest.raises(RefusedOnlyCopy, match="dcp_000001"):
        manager.resume(new_state())
    with running(tmp_path / "one", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1


def test_a_whole_save_of_an_attempt_that_no_list_tells_of_forbids_step_0(tmp_path: Path, url: str) -> None:
    with running(tmp_path / "one", url) as manager:
        assert manager.resume(new_state()) is None  # ends before its first save
    kept = open_store(url).read(names.WRITER_NAME, limit_bytes=1 << 20)[0]
    saved_run(tmp_path / "two", (3,), url)
    store = open_store(url)
    info = store.stat(names.WRITER_NAME)
    assert info is not None
    store.write(names.WRITER_NAME, kept, if_generation=info.generation)  # somebody restored the old list
    with running(tmp_path / "one", url) as manager, pytest.raises(RefusedOnlyCopy, match="no list names"):
        manager.resume(new_state())


# -- what does not ----------------------------------------------------------------------------------------------------


def _notes(root: Path) -> None:
    for name in ("notes.txt", "train.log", "model_final.pt", "model_200.pt"):
        (root / name).write_bytes(b"a person's own")
    (root / "plots").mkdir()


def _unfinished(root: Path) -> None:
    (root / names.tmp_name("model_000001.pt", "1f0c9a2e" * 4)).write_bytes(b"x")
    (root / "dcp_000001").mkdir()
    trash = root / names.TRASH_DIR
    trash.mkdir(parents=True)
    (trash / "model_000001.pt").write_bytes(b"x")
    (root / "latest").symlink_to("dcp_000001")


@pytest.mark.parametrize("leave", [_notes, _unfinished])
def test_what_is_no_trace_of_a_save_lets_a_run_begin(tmp_path: Path, leave: Callable[[Path], None]) -> None:
    leave(tmp_path)
    with running(tmp_path) as manager:
        assert manager.resume(new_state()) is None


@pytest.mark.parametrize("crash_at", ["save.publish:before@3", "table.add_save:after", "file.publish:before@3"])
@pytest.mark.parametrize("mirrored", [True, False])
def test_what_a_crash_left_of_the_first_save_lets_the_run_begin(
    tmp_path: Path, url: str, crash_at: str, mirrored: bool
) -> None:
    mirrors = (url,) if mirrored else ()
    assert killed_at(crash_at, saved_run, tmp_path / "root", (1,), *mirrors)
    with running(tmp_path / "root", *mirrors) as manager:
        assert manager.resume(new_state()) is None


def test_a_recorded_decision_lets_a_run_begin_beside_superseded_saves_whole_or_not(tmp_path: Path, url: str) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2), url)
    artifact(root, whole(root)[2], "extra_").unlink()
    (tmp_path / "nfs" / "run" / "meta_000002.json").unlink()
    with running(root, url) as manager:
        assert manager.resume(new_state(), policy="scratch", force=True) is None
    with running(root, url) as manager:  # killed before its first save
        assert manager.resume(new_state()) is None


def test_an_emergency_snapshot_that_is_not_whole_is_listed_once(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        train(state, 1)
        manager.save_emergency_checkpoint(1, state)
    (snapshot,) = tmp_path.glob("emergency_step_000001_*")
    (snapshot / "rank0.pt").unlink()
    with running(tmp_path) as manager, pytest.raises(RefusedOnlyCopy) as found:
        manager.resume(new_state())
    assert str(found.value).count("emergency_step_000001") == 2, "where it lies, and what of it is missing"
    meta = snapshot / names.emergency_meta_name(0)
    meta.write_bytes(meta.read_bytes()[:-9])
    with running(tmp_path) as manager, pytest.raises(CkptMirrorError) as found_again:
        manager.resume(new_state())
    assert str(found_again.value).count("emergency_step_000001") == 1
