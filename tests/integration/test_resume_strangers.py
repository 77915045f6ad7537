"""Saves of attempts that no list tells of: a person who names one gets it, and the run stays one run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import CheckpointNotFound, IntegrityError
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.local import files, inventory
from ckptmirror.stores import open_store
from tests.kit.faults import flip_bit
from tests.kit.roots import whole
from tests.kit.training import new_state, running, saved_run

pytestmark = pytest.mark.long


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "nfs").mkdir()
    return f"file://{tmp_path}/nfs/run"


def older_list_restored(tmp_path: Path, url: str) -> dict[int, str]:
    """Steps 1 and 2 of one attempt, 3 of the next; then the mirror's list is what it was before that. By step: ids."""
    saved_run(tmp_path / "one", (1, 2), url)
    data, _ = open_store(url).read(names.WRITER_NAME, limit_bytes=10_000)
    saved_run(tmp_path / "one", (3,), url)
    store = open_store(url)
    info = store.stat(names.WRITER_NAME)
    assert info is not None
    store.write(names.WRITER_NAME, data, if_generation=info.generation)
    return {step: meta.save_id for step, meta in whole(tmp_path / "one").items()}


def test_i11_a_save_named_by_its_id_is_the_lineage_from_then_on_even_if_nothing_is_saved_after(
    tmp_path: Path, url: str
) -> None:
    ids = older_list_restored(tmp_path, url)
    with running(tmp_path / "two", url) as manager:
        start = manager.resume(new_state(), policy=ids[3])
        assert start is not None
        assert start.step == 3
    for root in ("two", "three"):
        with running(tmp_path / root, url) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 3
    with running(tmp_path / "four", url) as manager:
        start = manager.resume(new_state(), policy=2)
        assert start is not None
        assert start.step == 2


def test_i11_the_machine_whose_branch_was_continued_elsewhere_goes_on_from_there(tmp_path: Path, url: str) -> None:
    ids = older_list_restored(tmp_path, url)
    for _ in range(2):
        saved_run(tmp_path / "one", ())  # starts of which the mirror was not told
    with running(tmp_path / "two", url) as manager:
        assert manager.resume(new_state(), policy=ids[3]) is not None
    saved_run(tmp_path / "two", (7,), url)
    for root in ("one", "two", "three"):
        with running(tmp_path / root, url) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 7


def test_what_the_lineage_cannot_place_is_found_by_whoever_names_it(tmp_path: Path, url: str) -> None:
    """The mirror's list is lost, and the attempt between two saves left nothing to rebuild it from."""
    root = tmp_path / "one"
    saved_run(root, (2,), url)
    with running(root, url) as manager:
        state = new_state()
        manager.resume(state)
        manager.save_emergency_checkpoint(3, state)
    saved_run(root, (5,), url)
    (tmp_path / "nfs" / "run" / names.WRITER_NAME).unlink()
    early = whole(root)[2].save_id
    with pytest.raises(CheckpointNotFound) as hidden:
        stage_checkpoint_step(url, step=2, dest=tmp_path / "eval")
    assert "superseded" in hidden.value.hint
    assert stage_checkpoint_step(url, step=2, dest=tmp_path / "eval", superseded=True).step == 2
    with running(tmp_path / "two", url) as manager:
        with pytest.raises(CheckpointNotFound) as aside:
            manager.resume(new_state(), policy=2)
        assert early[:8] in aside.value.hint
        start = manager.resume(new_state(), policy=early)
        assert start is not None
        assert start.step == 2


@pytest.mark.parametrize("damage", ["bad sector", "flipped bit"])
def test_a_meta_that_rots_is_mended_once_and_stands_in_no_starts_way(
    tmp_path: Path, url: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "one"
    saved_run(root, (2, 4), url)
    broken = root / "meta_000004.json"
    if damage == "flipped bit":
        flip_bit(broken)
    read = files.read_limited

    def fail(path: Path, limit_bytes: int) -> bytes:
        if path == broken and damage == "bad sector":
            error = OSError(errno.EIO, os.strerror(errno.EIO))
            raise IntegrityError(f"{path} cannot be read: {error.strerror}.") from error
        return read(path, limit_bytes)

    monkeypatch.setattr(files, "read_limited", fail)
    monkeypatch.setattr(inventory, "read_limited", fail)
    for _ in range(3):
        with running(root, url) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 4


def test_a_snapshot_that_was_cut_short_before_any_save_keeps_no_job_from_starting_over(tmp_path: Path) -> None:
    with running(tmp_path) as manager:
        state = new_state()
        manager.resume(state)
        manager.save_emergency_checkpoint(1, state)
    (snapshot,) = tmp_path.glob("emergency_step_000001_*")
    (snapshot / names.emergency_meta_name(0)).unlink()
    with running(tmp_path) as manager:
        assert manager.resume(new_state()) is None


@pytest.mark.parametrize("mirrored", [False, True])
def test_where_a_list_is_lost_a_newer_save_that_is_not_whole_is_named(
    tmp_path: Path, url: str, mirrored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its meta is all that still names its attempt."""
    mirrors = [url] if mirrored else []
    for step in (1, 2):
        saved_run(tmp_path / "one", (step,), *mirrors)
    place = tmp_path / "nfs" / "run" if mirrored else tmp_path / "one"
    (place / (names.WRITER_NAME if mirrored else names.ATTEMPTS_NAME)).unlink()
    (place / "extra_000002_rank0.pt").unlink()
    with running(tmp_path / ("two" if mirrored else "one"), *mirrors) as manager:
        start = manager.resume(new_state())
    assert start is not None
    assert start.step == 1
    assert any(line.startswith("step 2 ") for line in start.passed_over)
    assert "skipped step 2 " in caplog.text


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_decision_that_went_with_a_lost_list_is_missed_loudly(
    tmp_path: Path, url: str, mirrored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A rewind after which nothing was saved stands in the lists alone."""
    mirrors = [url] if mirrored else []
    saved_run(tmp_path / "one", (1, 2, 3), *mirrors)
    with running(tmp_path / "one", *mirrors) as manager:
        assert manager.resume(new_state(), policy=1) is not None
    lost = tmp_path / "nfs" / "run" / names.WRITER_NAME if mirrored else tmp_path / "one" / names.ATTEMPTS_NAME
    lost.unlink()
    caplog.clear()
    with running(tmp_path / ("two" if mirrored else "one"), *mirrors) as manager:
        start = manager.resume(new_state())
    assert start is not None
    assert any("had no list of attempts" in line for line in start.passed_over)
    assert "had no list of attempts" in caplog.text
