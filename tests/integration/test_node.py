"""What the leader of a node owns when it changes under it: the table, the lock, a person, an earlier claim."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    CkptMirrorError,
    DeadlinePassed,
    ForeignTable,
    LocalStorageFull,
    RootLocked,
)
from ckptmirror.core.model import Meta
from ckptmirror.core.names import ROTATE_LOCK_NAME
from ckptmirror.core.retention import Retention
from ckptmirror.flow import drain as drain_verb
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.catalog import local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.start import leader
from ckptmirror.flow.start.claim import RunClaim
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import is_mirrored, read_status
from ckptmirror.local.lock import RootLock, exclusive
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from tests.kit.claiming import start_node
from tests.kit.mirrors import memory_url, object_names
from tests.kit.roots import MirroredRoot, assert_sound
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts
from tests.kit.training import new_state


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(*urls: str, root: str = "root", state_dir: Path | None = None) -> Node:
        specs = [MirrorSpec(url) for url in urls]
        nodes.append(Node(tmp_path / root, specs, Retention(), events.EventBus(), state_dir=state_dir))
        return nodes[-1]

    yield start
    for one in nodes:
        if one.lock.held:
            one.close()


def trained(root: Path, *steps: int) -> list[Meta]:
    """A root as a training left it, without a table."""
    metas = [make_save(root, step, ("model",), number=step) for step in steps]
    put_attempts(root, [FIRST_ATTEMPT])
    return metas


def begin(node: Node, parent: Meta | None = None) -> None:
    start_node(node, parent=parent)


def damage_rows(table: UploadsTable, name: str = "records") -> None:
    """Change rows behind the back of their checksums."""
    with table._database.change("damage") as connection:
        connection.execute(f"UPDATE {name} SET row_crc = row_crc + 1")


# -- what is not durable is not reported as durable ------------------------------------------------------------


@pytest.mark.parametrize("loss", ["broken records", "broken save", "no rows at all", "one record less"])
def test_i12_what_has_no_sound_record_is_not_reported_as_mirrored(place: MirroredRoot, loss: str) -> None:
    meta = place.commit(100)
    place.upload()
    assert is_mirrored(place.root, meta.save_id)
    assert is_mirrored(place.root, None)
    if loss == "no rows at all":
        place.table.forget_save(meta.save_id)
        with place.table._database.change("damage") as connection:
            connection.execute("DELETE FROM transitions")
    elif loss == "one record less":
        with place.table._database.change("damage") as connection:
            connection.execute("DELETE FROM records WHERE path = 'model_000100.pt'")
    else:
        damage_rows(place.table, "saves" if loss == "broken save" else "records")
    status = read_status(place.root)
    assert not status.is_mirrored(meta.save_id)
    assert not status.is_mirrored(None)
    assert not is_mirrored(place.root, meta.save_id)
    assert [(line.safe, bool(line.waiting)) for line in status.saves] == [(False, True)]
    assert status.newest_safe_step is None


@pytest.mark.parametrize("name", ["records", "saves"])
def test_i12_a_node_sends_again_what_has_no_sound_record_before_it_says_mirrored(
    tmp_path: Path, node: Callable[..., Node], name: str
) -> None:
    url = memory_url()
    (meta,) = trained(tmp_path / "root", 100)
    running = node(url)
    damage_rows(running.table, name)
    begin(running)
    assert running.wait_mirrored(meta.save_id, 30.0)
    assert set(mirror_catalog(Mirror(url, True, open_store(url))).saves) == {meta.save_id}


def test_a_run_that_lost_a_saves_records_does_not_end_as_if_it_were_mirrored(
    tmp_path: Path, node: Callable[..., Node]
) -> None:
    url = memory_url()
    (meta,) = trained(tmp_path / "root", 100)
    running = node(url)
    begin(running)
    assert running.wait_mirrored(None, 30.0)
    assert running._workers is not None
    assert running._workers.stop(10.0)
    running.table.forget_save(meta.save_id)
    lost = make_save(tmp_path / "root", 200, ("model",), number=200)  # committed, and its records went
    with pytest.raises(DeadlinePassed):
        running.finish(5.0, is_stopped=lambda: False)
    assert lost.step == 200


def test_a_save_that_rotation_deleted_counts_as_mirrored_and_one_that_a_person_deleted_does_not(
    place: MirroredRoot,
) -> None:
    rotated, _ = place.commit(100), place.commit(200)
    place.upload()
    assert place.rotate().deleted == ((100, rotated.save_id),)
    assert is_mirrored(place.root, rotated.save_id)
    never = place.commit(300)
    place.table.forget_save(never.save_id, "somebody thought so")
    (place.root / "meta_000300.json").unlink()
    assert not is_mirrored(place.root, never.save_id)
    assert not is_mirrored(place.root, "ab" * 16)


def test_a_drain_reports_a_save_without_records_as_pending(place: MirroredRoot) -> None:
    meta = place.commit(100)
    place.upload()
    lock = RootLock(place.root)
    lock.acquire({"verb": "train"})  # so that the drain does not reconcile
    place.table.forget_save(meta.save_id)
    assert drain(place.root, timeout_s=0.1).pending > 0
    lock.release()
    assert drain(place.root, timeout_s=30.0).pending == 0


# -- a save that somebody removed ------------------------------------------------------------------------------


def test_a_save_that_a_person_removed_is_forgotten_loudly_and_the_run_ends_well(
    tmp_path: Path, node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    url = memory_url()
    first, second = trained(tmp_path / "root", 100, 200)
    node(url).close()
    for path in (tmp_path / "root").glob("*000100*"):
        path.unlink()
    told: list[events.Event] = []
    bus = events.EventBus()
    bus.subscribe(told.append)
    running = Node(tmp_path / "root", [MirrorSpec(url)], Retention(), bus)
    assert [(e.step, e.save_id) for e in told if isinstance(e, events.SaveGone)] == [(100, first.save_id)]
    assert "the save of step 100 was removed before it was mirrored" in caplog.text
    begin(running, second)
    running.finish(30.0, is_stopped=lambda: False)
    assert object_names(open_store(url))


def test_a_save_of_which_a_file_is_left_is_not_forgotten(tmp_path: Path, node: Callable[..., Node]) -> None:
    (meta,) = trained(tmp_path / "root", 100)
    node(memory_url()).close()
    (tmp_path / "root" / "meta_000100.json").unlink()
    again = node(memory_url())
    assert again.reconciled.gone == ()
    assert again.table.records(save_id=meta.save_id)
    assert (tmp_path / "root" / "model_000100.pt").exists()


# -- the table breaks under a running training -----------------------------------------------------------------


def fork_once() -> None:
    """Whatever forks closes the table's connection: the next use opens the file anew."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("loss", ["zeroed header", "removed"])
def test_i12_a_table_that_breaks_under_a_training_costs_no_save(tmp_path: Path, loss: str) -> None:
    url = memory_url()
    root = tmp_path / "root"
    manager = CheckpointManager(root, [url], kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait("mirrored", 30.0)
    fork_once()
    path = root / names.TABLE_NAME
    if loss == "removed":
        for part in path.parent.glob(f"{path.name}*"):
            part.unlink()
    else:
        path.write_bytes(bytes(100) + path.read_bytes()[100:])
    fork_once()
    for step in (2, 3):
        manager.save(step, state).wait("mirrored", 30.0)
    manager.close(30.0)
    assert {meta.step for meta in mirror_catalog(Mirror(url, True, open_store(url))).saves.values()} == {1, 2, 3}
    assert bool(list(path.parent.glob("uploads.db.broken-*"))) == (loss == "zeroed header")
    assert is_mirrored(root, None)


def test_a_closed_table_is_not_recreated(tmp_path: Path, node: Callable[..., Node]) -> None:
    running = node(memory_url())
    running.close()
    with pytest.raises(CkptMirrorError, match="closed"):
        running.table.recreate()


def test_a_claim_of_the_table_before_is_lost(place: MirroredRoot) -> None:
    from ckptmirror.core.errors import ClaimLost

    meta = place.commit(100)
    claim = place.table.claim("worker", place.mirrors[0].url, lease_s=60)
    assert claim is not None
    place.table.recreate()
    place.table.set_mirrors([(place.mirrors[0].url, True)])
    place.add(meta)
    place.table.release_save(meta.save_id)
    with pytest.raises(ClaimLost):
        place.table.put_back(claim, "late")


# -- whose table, whose lock -----------------------------------------------------------------------------------


def test_a_table_of_another_root_is_refused_before_anything_in_it_changes(
    tmp_path: Path, node: Callable[..., Node]
) -> None:
    state_dir = tmp_path / "state"
    ours, theirs = memory_url(), memory_url()
    first = node(ours, state_dir=state_dir)
    begin(first)
    meta = make_save(tmp_path / "elsewhere", 100, ("model",))
    first.table.add_save(meta.save_id, 100, meta.kinds, meta.artifacts, [ours])  # a save in flight
    with pytest.raises(ForeignTable):
        node(theirs, root="other", state_dir=state_dir)
    for verb in (
        lambda: drain(tmp_path / "other", state_dir=state_dir),
        lambda: rotate_root(tmp_path / "other", Retention(keep_last=1), state_dir=state_dir),
    ):
        with pytest.raises(ForeignTable):
            verb()
    assert [row.url for row in first.table.mirrors()] == [ours]
    first.table.release_save(meta.save_id)


def test_a_root_that_was_moved_keeps_its_table(tmp_path: Path, node: Callable[..., Node]) -> None:
    url = memory_url()
    first = node(url)
    begin(first)
    first.close()
    (tmp_path / "root").rename(tmp_path / "moved")
    begin(node(url, root="moved"))


def test_a_start_waits_for_a_drain_to_let_go_of_the_root(tmp_path: Path, node: Callable[..., Node]) -> None:
    (tmp_path / "root").mkdir()
    drains = RootLock(tmp_path / "root")
    drains.acquire({"verb": "drain"})
    timer = threading.Timer(0.8, drains.release)  # longer than a start looks who holds it
    timer.start()
    assert node(memory_url()).lock.held
    timer.join()


def test_a_start_does_not_wait_for_another_trainer(tmp_path: Path, node: Callable[..., Node]) -> None:
    held = node(memory_url())
    with pytest.raises(RootLocked):
        node(memory_url())
    assert held.lock.held


def test_a_drain_asks_mirrors_without_the_roots_lock(
    tmp_path: Path, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = memory_url()
    trained(tmp_path / "root", 100)
    node(url).close()
    honest = drain_verb.carry_on
    started: list[bool] = []

    def carry_on(root: Path, table: UploadsTable, mirrors: list[Mirror], audit: MirrorAudit) -> bool:
        with suppress(RootLocked):
            node(url).close()
            started.append(True)
        return honest(root, table, mirrors, audit)

    monkeypatch.setattr(drain_verb, "carry_on", carry_on)
    drain(tmp_path / "root", timeout_s=30.0)
    assert started == [True]


# -- fences, forks, disks --------------------------------------------------------------------------------------


def test_a_worker_of_an_earlier_claim_does_not_speak_for_the_new_attempt(
    tmp_path: Path, node: Callable[..., Node]
) -> None:
    running = node(memory_url())
    begin(running)
    earlier = running._workers
    assert earlier is not None
    assert isinstance(running.claim, RunClaim)
    begin(running)
    earlier._on_fenced("the earlier attempt met a newer one")
    assert read_status(tmp_path / "root").trainer["status"] == "running"
    assert running._workers is not None
    running._workers._on_fenced("the attempt met a newer one")
    assert read_status(tmp_path / "root").trainer["status"] == "fenced"


def test_i7_a_fork_waits_for_a_change_that_does_not_end_only_so_long(tmp_path: Path) -> None:
    table = UploadsTable.open(tmp_path / "uploads.db", create=True, busy_timeout_s=0.05)
    inside, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        with table._database.reading():
            inside.set()
            go_on.wait(60.0)

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(30.0)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if table.mirrors() == [] else 1)  # a connection of its own
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    go_on.set()
    thread.join()
    table.set_mirrors([("file:///x", True)])
    assert_sound(table)
    table.close()


def test_a_root_that_cannot_say_who_holds_it_is_locked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmirror.local import lock as locks

    def full(_self: object, _facts: object) -> None:
        raise LocalStorageFull("no space")

    monkeypatch.setattr(locks._LockFile, "write", full)
    held = RootLock(tmp_path)
    held.acquire({"verb": "train"})
    with pytest.raises(RootLocked):
        RootLock(tmp_path).acquire({})
    held.release()


def test_a_save_whose_records_cannot_be_released_is_committed_and_mirrored_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = memory_url()
    manager = CheckpointManager(tmp_path / "root", [url], kinds=("model",))
    state = new_state()
    manager.resume(state)
    honest = UploadsTable.release_save
    refused: list[str] = []

    def release(self: UploadsTable, save_id: str) -> None:
        if not refused:
            refused.append(save_id)
            raise LocalStorageFull("no space for a change of uploads.db")
        honest(self, save_id)

    monkeypatch.setattr(UploadsTable, "release_save", release)
    handle = manager.save(1, state)
    handle.wait("committed", 30.0)
    assert refused == [handle.save_id]
    assert set(local_catalog(tmp_path / "root").saves) == {handle.save_id}
    manager.close(30.0)
    assert set(mirror_catalog(Mirror(url, True, open_store(url))).saves) == {handle.save_id}


def test_a_wait_that_meets_its_own_rotation_says_nothing_of_it_and_names_another(
    node: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lacking then is repaired at the next wait or start."""
    rotates, may_end = threading.Event(), threading.Event()

    def rotation(_root: Path, *_: object) -> bool:
        with exclusive(tmp_path / "root" / ROTATE_LOCK_NAME, timeout_s=60.0):
            rotates.set()
            return may_end.wait(60.0)

    monkeypatch.setattr(leader, "carry_on", rotation)
    one = node(memory_url())
    start_node(one)
    assert rotates.wait(60.0)
    one.repair_records(0.0)
    assert "no record is repaired now" not in caplog.text
    may_end.set()
    one._stop_services()
    with exclusive(tmp_path / "root" / ROTATE_LOCK_NAME, timeout_s=60.0):
        one.repair_records(0.0)
    assert "no record is repaired now" in caplog.text
