"""A mirror that lost what it was given is found out, and nobody is told that it is safe there."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, Retention, load_checkpoint
from ckptmirror.core import names
from ckptmirror.core.codec import tombstone_to_bytes
from ckptmirror.core.errors import (
    BucketNotFound,
    CheckpointNotFound,
    ConfigError,
    DeadlinePassed,
    IntegrityError,
    KindMismatch,
    RefusedOnlyCopy,
    StoreTemporary,
    WaitTimeout,
)
from ckptmirror.core.model import Kind, Tombstone
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.flow.places.mirrors import MirrorSpec, open_mirrors
from ckptmirror.flow.retention.durability import why_not_safe
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.status import is_mirrored, read_status
from ckptmirror.local.lock import RootLock
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import run as cli
from tests.kit.faults import faulty
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import memory_url
from tests.kit.roots import Place, whole_saves
from tests.kit.training import new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


def emptied(store: Store) -> None:
    """Somebody, or a lifecycle rule, deleted everything below the prefix."""
    for info in list(store.list()):
        store.delete(info.name, generation=info.generation)


def damaged(store: Store, name: str) -> None:
    """One bit of an object flipped."""
    data, info = store.read(name, limit_bytes=1_000_000)
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    store.write(name, bytes(changed), if_generation=info.generation, metadata=info.metadata)


@pytest.mark.parametrize("verb", ["drain", "push", "start"])
def test_i9_what_an_emptied_mirror_lost_is_sent_again_by_whoever_comes_next(tmp_path: Path, verb: str) -> None:
    url = memory_url()
    store = open_store(url)
    saved_run(tmp_path, (1, 2), url)
    before = {info.name for info in store.list()}
    emptied(store)
    if verb == "drain":
        assert drain(tmp_path, timeout_s=30).pending == 0
    elif verb == "push":
        assert push(tmp_path, url, timeout_s=30).pending == 0
    else:
        with running(tmp_path, url) as manager:
            manager.resume(new_state())
            manager.rotate()  # behind what the start asks
            manager.wait("mirrored", timeout_s=30)
    assert {info.name for info in store.list()} >= before


def test_what_was_moved_with_its_mirror_is_verified_again_and_not_called_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nfs").mkdir()
    mirror = tmp_path / "nfs" / "run"
    saved_run(tmp_path / "root", (1,), f"file://{mirror}", kinds=("model",))
    shutil.copytree(mirror, tmp_path / "nfs" / "copy")  # to another disk
    shutil.rmtree(mirror)
    (tmp_path / "nfs" / "copy").rename(mirror)
    (mirror / "model_000001.pt").unlink()
    caplog.clear()
    assert drain(tmp_path / "root", timeout_s=30).is_verified
    levels = {one.getMessage().replace(f"file://{mirror}", "M"): one.levelname for one in caplog.records}
    assert levels == {
        "4 objects on M were rewritten or moved since they were verified, and are verified again: "
        "extra_000001_rank0.pt …": "WARNING",
        "1 objects that were verified on M are gone or damaged and will be sent again: model_000001.pt …": "ERROR",
    }


def test_what_retention_removed_from_the_mirror_is_not_sent_again(tmp_path: Path) -> None:
    url = memory_url()
    saved_run(tmp_path / "root", (1, 2), url)
    store = open_store(url)
    meta = next(one for one in local_catalog(tmp_path / "root").saves.values() if one.step == 1)
    stone = tombstone_to_bytes(Tombstone(meta.save_id, meta.step, meta.kinds, "old", "2026-01-01T00:00:00Z"))
    _, info = store.read("meta_000001.json", limit_bytes=1_000_000)
    store.write("meta_000001.json", stone, if_generation=info.generation, metadata=info.metadata)
    for info in [info for info in store.list() if info.name in {artifact.path for artifact in meta.artifacts}]:
        store.delete(info.name, generation=info.generation)
    before = {one.name for one in store.list()}
    assert drain(tmp_path / "root").is_verified
    assert {one.name for one in store.list()} == before
    with UploadsTable.open(tmp_path / "root" / names.TABLE_NAME, read_only=True) as table:
        states = {record.step: record.state.value for record in table.records()}
    assert states == {1: "removed", 2: "verified"}


def test_i9_a_drain_beside_a_live_trainer_asks_too(tmp_path: Path) -> None:
    url = memory_url()
    saved_run(tmp_path, (1,), url)
    emptied(open_store(url))
    lock = RootLock(tmp_path)
    lock.acquire({"pid": 1})
    try:
        assert drain(tmp_path, timeout_s=30).pending == 0
    finally:
        lock.release()
    assert "meta_000001.json" in {info.name for info in open_store(url).list()}


def test_i1_refresh_keeps_a_copy_whose_save_is_broken_on_the_mirror(tmp_path: Path) -> None:
    place = Place(tmp_path)
    good = place.save(200, ("dcp",), 1)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp", full=True)
    place.save(200, ("model",), 2)
    damaged(place.mirror.store, "meta_000200.json")
    with pytest.raises(RefusedOnlyCopy, match="it stays"):
        stage_checkpoint_step(
            place.mirror, step=200, dest=place.dest, require_kind="model", refresh=True, superseded=True
        )
    assert good.save_id in whole_saves(place.dest)


def test_i4_an_older_save_of_a_step_is_not_staged_for_the_one_that_stands_and_is_broken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    old, new = place.save(200, ("model",), 1), place.save(200, ("model",), 2)
    lost = place.on_mirror(new).artifacts[0].object_name
    place.mirror.store.delete(lost, generation=place.mirror.store.stat(lost).generation)  # type: ignore[union-attr]
    with pytest.raises(IntegrityError, match=r"step 200 .* is broken") as refused:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert "--superseded" in refused.value.hint
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, superseded=True)
    assert set(whole_saves(place.dest)) == {old.save_id}


@pytest.mark.parametrize("is_twin", [True, False])
def test_a_broken_meta_beside_a_whole_save_of_its_step_is_named_and_keeps_nobody_from_that(
    tmp_path: Path, is_twin: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A mended mirror has it for ever: a damaged object keeps its name, and the meta comes anew under the other one."""
    place = Place(tmp_path)
    meta = place.save(200, ("model",), 1)
    if is_twin:
        data, _ = place.mirror.store.read("meta_000200.json", limit_bytes=1_000_000)
        place.mirror.store.write(f"meta_000200-{meta.save_id[:8]}.json", data, if_generation=0)
    else:
        meta = place.save(200, ("model",), 2)
    damaged(place.mirror.store, "meta_000200.json")
    assert stage_checkpoint_step(place.mirror, step=200, dest=place.dest).step == 200
    assert set(whole_saves(place.dest)) == {meta.save_id}
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "meta_000200.json" in line
    assert "ckptmirror verify" in line
    with pytest.raises(KindMismatch):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")


def test_latest_says_what_it_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(tmp_path)
    place.save(200, ("model",), 1)
    place.save(300, ("model",), 2)
    damaged(place.mirror.store, "meta_000300.json")
    assert stage_checkpoint_step(place.mirror, step="latest", dest=place.dest).step == 200
    assert "skipped" in caplog.text
    assert "meta_000300.json" in caplog.text


# -- who says that all is safe has asked --------------------------------------------------------------------------


def test_i8_a_drain_calls_nothing_verified_on_a_mirror_that_does_not_answer(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nfs/run"
    (tmp_path / "nfs").mkdir()
    saved_run(tmp_path / "root", (1,), url)
    shutil.rmtree(tmp_path / "nfs" / "run")
    report = drain(tmp_path / "root", timeout_s=0.1)
    assert not report.is_verified
    assert isinstance(report.unasked[url], StoreTemporary)
    done = cli("drain", "--root", str(tmp_path / "root"), "--timeout", "0.1", "--json")
    assert done.returncode == DeadlinePassed.exit_code
    facts = json.loads(done.stdout)
    assert facts["verified"] is False
    assert list(facts["unasked"]) == [url]
    assert "could not be asked" in done.stderr


def test_i8_a_drain_of_a_bucket_that_is_gone_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GcsServerProcess(tmp_path / "before", buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        saved_run(tmp_path / "root", (1,), "gs://bucket/run")
    with GcsServerProcess(tmp_path / "after") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        report = drain(tmp_path / "root", timeout_s=60)
        assert isinstance(report.unasked["gs://bucket/run"], BucketNotFound)
        done = cli("drain", "--root", tmp_path / "root", env={"STORAGE_EMULATOR_HOST": server.url})
    assert done.returncode == BucketNotFound.exit_code


def test_i8_a_mirror_that_was_silent_at_the_start_is_asked_when_it_answers(tmp_path: Path) -> None:
    url = memory_url()
    store = open_store(url)
    saved_run(tmp_path, (1, 2), url)
    before = {info.name for info in store.list()}
    with CheckpointManager(tmp_path, [url]) as manager:
        (silent,) = faulty(manager, StoreFault(when="before", times=0))
        state = new_state()
        manager.resume(state)
        with pytest.raises(WaitTimeout):
            manager.wait("mirrored", timeout_s=0.2)
        emptied(store)
        silent.script()
        train(state)
        manager.save(3, state).wait()
        manager.wait("mirrored", timeout_s=60)
    assert {info.name for info in store.list()} > before


def test_i8_a_run_does_not_end_well_while_nobody_asked_a_mirror_for_what_it_had(tmp_path: Path) -> None:
    url = memory_url()
    saved_run(tmp_path, (1,), url)
    manager = CheckpointManager(tmp_path, [url])
    faulty(manager, StoreFault(when="before", times=0))
    manager.resume(new_state())
    with pytest.raises(DeadlinePassed, match="still has what was verified"):
        manager.close(timeout_s=0.2)
    assert json.loads((tmp_path / names.STATUS_NAME).read_text())["status"] == "incomplete"


def test_i8_a_mirror_that_was_emptied_in_mid_run_has_everything_again_at_the_end(tmp_path: Path) -> None:
    url = memory_url()
    store = open_store(url)
    with CheckpointManager(tmp_path, [url]) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait("mirrored", timeout_s=30)
        before = {info.name for info in store.list() if info.name != names.WRITER_NAME}
        for info in list(store.list()):
            if info.name in before:
                store.delete(info.name, generation=info.generation)
    assert {info.name for info in store.list()} >= before


def test_i8_where_no_mirror_is_required_all_of_them_count(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, [MirrorSpec(memory_url(), required=False)])
    (broken,) = faulty(manager)
    state = new_state()
    manager.resume(state)
    broken.go_down()
    handle = manager.save(1, state)
    handle.wait()
    with pytest.raises(WaitTimeout):
        handle.wait("mirrored", timeout_s=0.2)
    assert not is_mirrored(tmp_path, handle.save_id)
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=0.2)


# -- which mirrors there are --------------------------------------------------------------------------------------


def test_i1_a_start_that_is_refused_changes_nothing_about_what_is_safe(tmp_path: Path) -> None:
    ours, behind, strange = memory_url(), memory_url(), memory_url()
    saved_run(tmp_path / "other", (9,), strange)
    root = tmp_path / "root"
    manager = CheckpointManager(root, [ours, behind])
    _, broken = faulty(manager)
    state = new_state()
    manager.resume(state)
    broken.go_down()
    for step in (1, 2):
        train(state)
        manager.save(step, state).wait()
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=1.0)
    before = read_status(root)
    for mirrors in ([ours, strange], [ours, MirrorSpec(strange, required=False)], [f"file://{root}"]):
        with pytest.raises(ConfigError), CheckpointManager(root, mirrors) as refused:
            refused.resume(new_state())
        after = read_status(root)
        assert after.mirrors == before.mirrors == ((ours, True), (behind, True))
        assert after.unsettled == before.unsettled != {}
        assert rotate_root(root, Retention(keep_last=1)).deleted == ()
    manager = CheckpointManager(root, [ours, MirrorSpec(strange, required=False)], retention=Retention(keep_last=1))
    with pytest.raises(ConfigError):
        manager.resume(new_state())
    report = manager.rotate(timeout_s=0.1)
    assert report is not None
    assert report.deleted == ()
    assert any(behind in reason for reason in report.refused.values())
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=0.1)
    assert drain(root, timeout_s=30).is_verified


def test_i8_a_drain_of_a_root_that_lost_its_mirrors_is_an_error_that_counts_what_waits(tmp_path: Path) -> None:
    url = memory_url()
    manager = CheckpointManager(tmp_path, [url])
    (broken,) = faulty(manager)
    state = new_state()
    manager.resume(state)
    broken.go_down()
    manager.save(1, state).wait()
    with pytest.raises(DeadlinePassed):
        manager.close(timeout_s=0.5)
    with CheckpointManager(tmp_path) as without:
        without.resume(new_state())
    with pytest.raises(ConfigError, match=f"has no mirror.*wait for {url}"):
        drain(tmp_path)
    other = memory_url()
    saved_run(tmp_path, (2,), other)
    report = drain(tmp_path, timeout_s=30)
    assert report.is_verified
    assert set(report.left) == {url}


def test_i8_what_is_found_missing_while_the_run_ends_still_counts(tmp_path: Path) -> None:
    """An optional mirror that is slow to list does not keep the required one from being heard."""
    slow, url = memory_url(), memory_url()
    manager = CheckpointManager(tmp_path, [MirrorSpec(slow, required=False), url])
    first, _ = faulty(manager)
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait("mirrored", timeout_s=30)
    emptied(open_store(url))
    listed = threading.Event()
    first.script(StoreFault("list", hold=listed, times=0))
    threading.Timer(1.0, listed.set).start()
    manager.close(timeout_s=60)
    assert drain(tmp_path, timeout_s=30).is_verified
    assert "meta_000001.json" in {info.name for info in open_store(url).list()}


def test_a_start_that_was_refused_does_not_say_that_it_finished(tmp_path: Path) -> None:
    saved_run(tmp_path, (1,))
    manager = CheckpointManager(tmp_path)
    before = (tmp_path / names.STATUS_NAME).read_text()
    with pytest.raises(CheckpointNotFound):
        manager.resume(new_state(), 7)
    manager.close()
    assert (tmp_path / names.STATUS_NAME).read_text() == before


def test_an_emergency_snapshot_is_mirrored_nowhere(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, [memory_url()]) as manager:
        state = new_state()
        manager.resume(state)
        manager.save_emergency_checkpoint(1, state)
    (line,) = read_status(tmp_path).saves
    assert not line.safe
    assert not read_status(tmp_path).is_mirrored(line.save_id)


def test_i8_another_process_is_not_told_that_all_is_mirrored_before_the_leader_has_asked(tmp_path: Path) -> None:
    url = memory_url()
    saved_run(tmp_path, (1,), url)
    assert is_mirrored(tmp_path, None)
    with CheckpointManager(tmp_path, [url]) as manager:
        (silent,) = faulty(manager)
        manager.resume(new_state())
        manager.wait("mirrored", timeout_s=30)
        assert is_mirrored(tmp_path, None)
        silent.go_down()
        manager._node._audit.reopen({url})  # type: ignore[union-attr]
        assert not is_mirrored(tmp_path, None)
        silent.script()
        manager._node._rotation_thread.wake()  # type: ignore[union-attr]
        manager.wait("mirrored", timeout_s=30)
    assert is_mirrored(tmp_path, None)


def test_an_older_note_of_which_mirrors_have_answered_does_not_replace_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that had ended well was said to be not safe: a slow thread noted what it knew before the answer."""
    url = memory_url()
    saved_run(tmp_path, (1,), url)
    with UploadsTable.open(tmp_path / names.TABLE_NAME) as table:
        mirrors = open_mirrors([MirrorSpec(url)], tmp_path, table)
        audit = MirrorAudit(table, mirrors, notes=lambda: True)
        other, honest = threading.Thread(target=audit.ask), table.set_unasked

        def slow(urls: Collection[str]) -> None:
            if urls and not other.ident:
                other.start()
                other.join(0.5)
            honest(urls)

        monkeypatch.setattr(table, "set_unasked", slow)
        audit.reopen([url])
        other.join(60.0)
        assert table.unasked() == set()
        assert not audit.waits_for([url])


def test_i8_a_run_does_not_end_well_when_its_mirror_says_at_the_end_that_there_is_no_bucket(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, [memory_url()])
    (gone,) = faulty(manager)
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait("mirrored", timeout_s=30)
    gone.script(StoreFault("list", when="before", times=0, error=lambda: BucketNotFound("The bucket is gone.")))
    with pytest.raises(DeadlinePassed, match="The bucket is gone"):
        manager.close(timeout_s=60)
    assert json.loads((tmp_path / names.STATUS_NAME).read_text())["status"] == "incomplete"


@pytest.mark.parametrize("kind", ["dcp", "model"])
@pytest.mark.parametrize("who", ["drain", "start", "end", "start without a table"])
def test_i6_what_is_sent_again_beside_a_damaged_object_is_what_the_meta_names(
    tmp_path: Path, kind: Kind, who: str
) -> None:
    url = f"file://{tmp_path}/nfs/run"
    (tmp_path / "nfs").mkdir()
    root = tmp_path / "root"
    states = saved_run(root, (3,), url)
    victim = next((tmp_path / "nfs" / "run").glob("dcp_000003/*.distcp" if kind == "dcp" else "model_000003.pt"))

    def damage() -> None:
        victim.write_bytes(victim.read_bytes()[:-7])

    if who == "end":
        with CheckpointManager(root, [url]) as manager:
            manager.resume(new_state())
            manager.wait("mirrored", timeout_s=30)
            damage()
    else:
        damage()
        if who == "drain":
            assert drain(root, timeout_s=30).is_verified
        else:
            for path in root.glob(f"{names.TABLE_NAME}*" if "table" in who else "none"):
                path.unlink()
            with CheckpointManager(root, [url]) as manager:
                manager.resume(new_state())
                manager.wait("mirrored", timeout_s=30)
    assert not why_open(root, url)
    shutil.rmtree(root)
    staged = stage_checkpoint_step(url, step=3, dest=tmp_path / "eval", require_kind=kind)
    assert same(dict(load_checkpoint(staged.path).model), dict(states[3]["model"]))


def why_open(root: Path, url: str) -> str | None:
    """What rotation would say of the newest save."""
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        mirrors = open_mirrors([MirrorSpec(url)], root, table)
        (save_id,) = local_catalog(root).saves
        return why_not_safe(table, mirrors, save_id)


def test_i8_a_run_whose_second_start_failed_asks_its_mirrors_before_it_ends(tmp_path: Path) -> None:
    url = memory_url()
    manager = CheckpointManager(tmp_path, [url])
    state = new_state()
    manager.resume(state)
    manager.save(3, state).wait("mirrored", timeout_s=30)
    with pytest.raises(CheckpointNotFound):
        manager.resume(new_state(), 99)
    store = open_store(url)
    for info in list(store.list()):
        if info.name != names.WRITER_NAME:
            store.delete(info.name, generation=info.generation)
    with pytest.raises(DeadlinePassed, match="not verified"):
        manager.close(timeout_s=60)
