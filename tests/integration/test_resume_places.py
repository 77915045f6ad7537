"""Resume where the places disagree: partial copies, branches apart, half answers, loads that fail half-way."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from ckptmirror import (
    CheckpointManager,
    Retention,
    list_checkpoints,
    load_checkpoint,
    resolve_resume_path,
    stage_checkpoint_step,
)
from ckptmirror.core import names
from ckptmirror.core.errors import IntegrityError, RefusedOnlyCopy, StoreTemporary, UsageError
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.attempt_lists import read_local_attempts
from ckptmirror.flow.retention.reconcile import BRINGING_NAME, note_brought
from ckptmirror.flow.start import bring, resume
from ckptmirror.formats.base import LoadReport
from ckptmirror.ranks import meeting
from ckptmirror.stores import open_store
from tests.kit.faults import faulty
from tests.kit.faulty_store import StoreFault
from tests.kit.roots import leftovers, whole
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "nfs").mkdir()
    return f"file://{tmp_path}/nfs/run"


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_copy_staged_for_evaluation_is_completed_before_training_continues_from_it(
    tmp_path: Path, url: str, kind: str
) -> None:
    states = saved_run(tmp_path / "first", (3,), url, kinds=(kind,))
    root = tmp_path / "second"
    stage_checkpoint_step(url, step=3, dest=root, require_kind=kind)  # type: ignore[arg-type]
    state = new_state(seed=9)
    with running(root, url) as manager:
        start = manager.resume(state)
    assert start is not None
    assert start.missing == ()
    assert same(everything(state), states[3])


def test_i6_a_partial_copy_never_passes_for_the_save_on_a_mirror_that_lacks_it(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "first", (3,), url)
    other = f"file://{tmp_path}/nfs/other"
    root = tmp_path / "second"
    stage_checkpoint_step(url, step=3, dest=root, require_kind="model")
    with CheckpointManager(root, [url, other]) as manager:
        manager.resume(new_state())
        manager.wait("mirrored", timeout_s=30)
    kinds = {listed.kinds for listed in _metas(other)}
    assert kinds == {("dcp", "model")}
    assert len(_metas(other)[0].artifacts) == len(_metas(url)[0].artifacts)


def _metas(url: str) -> list[Meta]:
    from ckptmirror.flow.places.catalog import mirror_catalog
    from ckptmirror.flow.places.mirrors import Mirror

    return list(mirror_catalog(Mirror(url, True, open_store(url))).saves.values())


def test_the_longer_branch_on_the_mirror_is_not_lost_to_a_start_that_ran_apart_from_it(
    tmp_path: Path, url: str
) -> None:
    saved_run(tmp_path / "one", (2,), url)
    shutil.copytree(tmp_path / "one", tmp_path / "kept")
    saved_run(tmp_path / "two", (6, 8), url)  # another machine goes on from the mirror
    with running(tmp_path / "one", url) as manager:  # the first, which cannot reach it, goes on from its disk
        faulty(manager, StoreFault(when="before", times=0))
        state = new_state()
        start = manager.resume(state)
        assert start is not None
        assert start.step == 2
        train(state, 1)
        manager.save(3, state).wait()
    for machine in ("one", "three"):
        with running(tmp_path / machine, url) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 8, "what ran apart must not outrank what the mirror lists"


def test_every_reader_of_a_root_sees_that_a_start_set_its_branch_aside(tmp_path: Path, url: str) -> None:
    root = tmp_path / "one"
    saved_run(root, (2,), url)
    for step in (9, 10):  # twice, so that its attempt has a higher number than the other machine's
        with running(root, url) as manager:
            faulty(manager, StoreFault(when="before", times=0))
            manager.resume(state := new_state())
            train(state, 1)
            manager.save(step, state).wait()
    states = saved_run(tmp_path / "two", (6, 8), url)
    with running(root, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 8
        loaded = manager.load(state := new_state(), "latest")
        assert loaded.step == 8
        assert same(everything(state), states[8])
    assert load_checkpoint(root).meta.save_id == start.save_id
    found = resolve_resume_path(root)
    assert found is not None
    assert found.name == "dcp_000008"
    standing = {line.step: line.standing for line in list_checkpoints(root)}
    assert standing == {2: "current", 8: "current", 9: "superseded", 10: "superseded"}


def test_a_mirror_that_answers_the_claim_but_not_the_listing_is_an_error_that_may_pass(
    tmp_path: Path, url: str
) -> None:
    saved_run(tmp_path / "one", (2,), url)
    saved_run(tmp_path / "two", (6,), url)
    with running(tmp_path / "one", url) as manager:
        faulty(manager, StoreFault("list", when="before", times=0))
        with pytest.raises(StoreTemporary):
            manager.resume(new_state())
    attempts = read_local_attempts(tmp_path / "one")
    assert attempts is not None
    assert sum(attempt.decided for attempt in attempts.attempts) <= 2, "no fork was recorded"


def test_an_emptied_mirror_whose_list_proves_that_there_were_saves_is_no_start_at_step_0(
    tmp_path: Path, url: str
) -> None:
    saved_run(tmp_path / "one", (2,), url)
    saved_run(tmp_path / "one", (4,), url)
    store = open_store(url)
    for info in list(store.list()):
        if info.name != names.WRITER_NAME:
            store.delete(info.name, generation=info.generation)
    with running(tmp_path / "new", url) as manager:
        with pytest.raises(RefusedOnlyCopy, match="continued from step 2"):
            manager.resume(new_state())
        assert manager.resume(new_state(), "scratch", force=True) is None


def test_after_a_half_load_only_another_copy_of_the_same_save_is_tried(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "root", (2, 4), url)
    tried: list[int] = []

    def load_half(root: Path, meta: Meta, *_: object) -> LoadReport:
        tried.append(meta.step)
        raise IntegrityError("a file broke under the load")

    monkeypatch.setattr(resume, "load_kind", load_half)
    with running(tmp_path / "root", url) as manager, pytest.raises(IntegrityError, match="could be loaded"):
        manager.resume(new_state())
    assert set(tried) == {4}


def test_other_ranks_hear_of_a_leader_that_brings_a_copy_for_longer_than_any_limit(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "first", (2,), url)
    monkeypatch.setattr(meeting, "_SIGN_OF_LIFE_S", 0.01)
    signs: list[str] = []
    heard_twice = threading.Event()
    stage_save = bring.stage_save

    def slow(*arguments: object, **more: object) -> Meta:
        assert heard_twice.wait(30)
        return stage_save(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bring, "stage_save", slow)
    with running(tmp_path / "second", url) as manager:
        exchange = manager.ranks.exchange

        def count(value: object, *, what: str, error: BaseException | None = None) -> list[object]:
            signs.append(what)
            if signs.count("propose a save") == 2:
                heard_twice.set()
            return exchange(value, what=what, error=error)

        monkeypatch.setattr(manager.ranks, "exchange", count)
        assert manager.resume(new_state()) is not None
    assert signs.count("propose a save") > 2


def test_a_start_that_was_killed_while_it_brought_a_copy_is_continued_by_the_next(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "first", (2,), url)
    (save,) = whole(tmp_path / "first").values()
    root = tmp_path / "second"
    (root / names.CONTROL_DIR).mkdir(parents=True)
    (root / BRINGING_NAME).write_text(json.dumps({"save_id": save.save_id}))
    mine = root / names.tmp_name("dcp_000002", save.save_id)
    stray = root / names.tmp_name("model_000009.pt", "9" * 32)
    mine.mkdir()
    stray.write_bytes(b"of a save that died")
    with running(root, url) as manager:
        assert mine.exists(), "what is being brought is continued"
        assert not stray.exists(), "what nobody continues is removed"
        assert manager.resume(new_state()) is not None
    assert not mine.exists()
    assert not (root / BRINGING_NAME).exists()


def test_what_a_killed_start_had_brought_goes_once_another_save_is_brought(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "first", (1, 2), url)
    saves = {save.step: save for save in whole(tmp_path / "first").values()}
    root = tmp_path / "second"
    (root / names.CONTROL_DIR).mkdir(parents=True)
    note_brought(root, saves[2].save_id, beside=False)
    mine = root / names.tmp_name("dcp_000002", saves[2].save_id)
    mine.mkdir()
    with running(root, url) as manager:
        assert mine.exists()
        start = manager.resume(new_state(), policy=1)
        assert start is not None
        assert start.step == 1
    assert leftovers(root) == []
    assert not mine.exists()


def test_a_broken_list_on_an_optional_mirror_does_not_stop_a_start(tmp_path: Path, url: str) -> None:
    from ckptmirror import MirrorSpec

    saved_run(tmp_path / "root", (2,), url)
    (tmp_path / "nfs" / "extra").mkdir()
    (tmp_path / "nfs" / "extra" / names.WRITER_NAME).write_bytes(b"not a list")
    with running(tmp_path / "root", url, MirrorSpec(f"file://{tmp_path}/nfs/extra", required=False)) as manager:
        start = manager.resume(new_state())
    assert start is not None
    assert start.step == 2


def test_a_save_of_a_branch_apart_is_resumed_by_its_id_and_then_by_every_start(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "one", (2,), url)
    shutil.copytree(tmp_path / "one", tmp_path / "kept")
    saved_run(tmp_path / "two", (6,), url)
    with running(tmp_path / "one", url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        state = new_state()
        manager.resume(state)
        train(state, 1)
        manager.save(3, state).wait()
    apart = whole(tmp_path / "one")[3].save_id
    with running(tmp_path / "one", url) as manager:
        start = manager.resume(new_state(), apart[:12])  # and dies before its first save
        assert start is not None
        assert start.step == 3
    with running(tmp_path / "one", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3


def test_a_drain_of_a_root_that_a_start_failed_on_fences_nobody(tmp_path: Path, url: str) -> None:
    from ckptmirror.flow.drain import drain

    saved_run(tmp_path / "one", (2,), url)
    before = (tmp_path / "one" / names.ATTEMPTS_NAME).read_bytes()
    with running(tmp_path / "one", url) as manager, pytest.raises(UsageError):
        manager.resume(new_state(), "mistyped")
    assert (tmp_path / "one" / names.ATTEMPTS_NAME).read_bytes() == before, "a start that fails leaves no trace"
    with running(tmp_path / "two", url) as live:
        state = new_state()
        live.resume(state)
        train(state, 1)
        live.save(3, state).wait("mirrored", timeout_s=30)
        drain(tmp_path / "one", timeout_s=30)
        train(state, 1)
        live.save(4, state).wait("mirrored", timeout_s=30)


def test_a_lost_list_is_rebuilt_from_this_disk_without_setting_its_newest_save_aside(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "one", (2,), url)
    with running(tmp_path / "one", url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        state = new_state()
        manager.resume(state)
        train(state, 3)
        manager.save(5, state).wait()
    (tmp_path / "one" / names.ATTEMPTS_NAME).unlink()
    with running(tmp_path / "one", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 5


def test_i1_which_place_a_mirror_is_outlives_the_table(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "root", (2,), url)
    for path in (tmp_path / "root" / names.CONTROL_DIR).glob("uploads.db*"):
        path.unlink()
    (tmp_path / "nfs").rename(tmp_path / "mounted elsewhere")
    (tmp_path / "nfs").mkdir()
    with running(tmp_path / "root", url) as manager:
        assert manager.resume(new_state()) is not None, "the disk serves"
        assert not manager.status().saves[0].safe
    assert not (tmp_path / "nfs" / "run").exists(), "no fresh mirror is begun in the place of the one that is gone"


def test_a_disk_that_is_full_of_safe_saves_makes_room_for_the_one_that_is_brought(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmirror.core.errors import LocalStorageFull

    saved_run(tmp_path / "one", (2, 4), url)
    shutil.copytree(tmp_path / "one", tmp_path / "kept")
    saved_run(tmp_path / "one", (6,), url)
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "kept").rename(tmp_path / "one")
    stage_save, calls = bring.stage_save, []

    def full_at_first(*arguments: object, **more: object) -> Meta:
        calls.append(1)
        if len(calls) == 1:
            raise LocalStorageFull
        return stage_save(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bring, "stage_save", full_at_first)
    with running(tmp_path / "one", url, retention=Retention(keep_last=1)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 6
    assert 2 not in whole(tmp_path / "one")


@pytest.mark.parametrize("is_table_there", [True, False])
def test_i12_a_broken_note_of_which_place_a_mirror_is_is_not_taken_for_nothing(
    tmp_path: Path, url: str, is_table_there: bool
) -> None:
    root = tmp_path / "root"
    saved_run(root, (2,), url)
    (note,) = (root / names.CONTROL_DIR).glob("mirror-*.json")
    before = note.read_bytes()
    note.write_bytes(before.replace(b'"identity":"', b'"identity":"x', 1))
    if not is_table_there:
        for path in root.glob(f"{names.TABLE_NAME}*"):
            path.unlink()
    with running(root, url) as manager:
        start = manager.resume(new_state())
    assert start is not None, "the disk serves"
    assert any("does not answer" in line for line in start.passed_over) is not is_table_there
    assert (note.read_bytes() == before) is is_table_there, "what the table knows is noted anew"
