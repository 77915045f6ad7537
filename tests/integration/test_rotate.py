"""Rotation: what is begun is finished, what is not ours stays, and `latest` never dangles."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.errors import StorePermanent
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.core.retention import Retention
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.retention.reconcile import carry_on, reconcile
from ckptmirror.flow.retention.rotation import finish_interrupted, rotate_root
from ckptmirror.flow.start import leader
from ckptmirror.flow.start.leader import Node, still_moving
from ckptmirror.local import crashpoints
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import memory, open_store
from ckptmirror.stores.base import ObjectInfo, Upload
from tests.kit.claiming import start_node
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import memory_url, object_names
from tests.kit.roots import MirroredRoot, assert_refused, two_saves
from tests.kit.saves import make_attempt, put_attempts

# -- slow and failed uploads -----------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(url: str, keep_last: int = 1) -> Node:
        node = Node(tmp_path / "trained", [MirrorSpec(url)], Retention(keep_last=keep_last), events.EventBus())
        nodes.append(node)
        start_node(node)
        return node

    yield start
    for node in nodes:
        node.close()


def commit_on(node: Node, step: int) -> Meta:
    from tests.kit.saves import make_save

    claim = node.claim
    assert claim is not None
    meta = make_save(node.root, step, ("model",), claim.attempt, step, run_id=claim.run_id)
    urls = [mirror.url for mirror in node.mirrors]
    node.table.add_save(meta.save_id, step, meta.kinds, meta.artifacts, urls)
    node.table.release_save(meta.save_id)
    node.on_commit(meta)
    return meta


def test_rotation_waits_for_a_slow_upload(
    tmp_path: Path, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror takes no upload before the rotation has begun to wait."""
    has_begun_to_wait, upload = threading.Event(), memory.MemoryStore.upload

    def slow(store: memory.MemoryStore, one: Upload) -> ObjectInfo:
        assert has_begun_to_wait.wait(60.0)
        return upload(store, one)

    def moving(*asked: Any, **more: Any) -> int:
        found = still_moving(*asked, **more)
        has_begun_to_wait.set()
        return found

    monkeypatch.setattr(memory.MemoryStore, "upload", slow)
    monkeypatch.setattr(leader, "still_moving", moving)
    url = memory_url()
    running = node(url)
    commit_on(running, 100)
    commit_on(running, 200)
    running.rotate_now(60.0)  # the rotation thread may do it a moment earlier
    assert not (running.root / "meta_000100.json").exists()
    assert "meta_000100.json" in object_names(open_store(url))


def test_an_explicit_rotation_gives_up_waiting_at_its_limit_and_keeps_what_is_not_safe(
    tmp_path: Path, node: Callable[..., Node]
) -> None:
    running = node(memory_url())
    assert running._workers is not None
    running._workers.stop(10.0)
    first = commit_on(running, 100)
    commit_on(running, 200)
    report = running.rotate_now(0.05)
    assert report.deleted == ()
    assert first.save_id in report.refused


def test_rotation_keeps_a_file_whose_upload_failed(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    gone_wrong = StoreFault("upload", "model_000100", times=0, when="before", error=lambda: StorePermanent("400: no"))
    place.store.script(gone_wrong)
    place.upload()
    assert [record.path for record in place.records(state=RecordState.FAILED)] == ["model_000100.pt"]
    assert_refused(place, old, "failed")
    place.store.script()
    place.table.retry_failed()
    place.upload()
    assert place.rotate().deleted == ((100, old.save_id),)


# -- the order of a deletion, and its interruptions ------------------------------------------------------------


def crash_in_child(work: Callable[[], object], crash_at: str | None) -> tuple[int, list[str]]:
    """Run ``work`` in a fork, killed at a crash point; return the wait status and the points passed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            crashpoints.arm(crash_at)
            work()
            os.write(writer, "\n".join(crashpoints.passed()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    while piece := os.read(reader, 65536):
        text += piece
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return status, text.decode().splitlines()


def test_the_meta_goes_first_then_the_files_and_trash_is_removed_last(place: MirroredRoot) -> None:
    two_saves(place)
    place.upload()
    crashpoints.arm()
    try:
        place.rotate()
        passed = crashpoints.passed()
    finally:
        crashpoints.disarm()
    renames = [index for index, name in enumerate(passed) if name == "trash.rename:after"]
    deleted = [index for index, name in enumerate(passed) if name.startswith(("trash.unlink", "trash.rmdir"))]
    forgotten = passed.index("table.forget_save:after")
    assert len(renames) == 6
    assert renames[-1] < deleted[0] < deleted[-1] < forgotten  # on a full disk the record needs the room
    assert any("fsync" in name for name in passed[renames[0] : renames[1]]), "the meta's going is durable first"


def test_i12_a_rotation_interrupted_anywhere_is_finished_by_the_next_start(
    open_root: Callable[..., MirroredRoot],
) -> None:
    probe = open_root(memory_url(), name="probe")
    two_saves(probe)
    probe.upload()
    _, points = crash_in_child(lambda: probe.rotate(), None)
    assert len(points) > 40
    wanted = [n for n, name in enumerate(points, 1) if name.startswith(("trash.", "table.", "dir", "fsync", "link"))]
    for number in wanted[:: max(1, len(wanted) // 24)]:
        place = open_root(memory_url(), name=f"root-{number}")
        old, new = two_saves(place)
        place.upload()
        status, _ = crash_in_child(lambda place=place: place.rotate(), str(number))  # type: ignore[misc]
        assert os.WIFSIGNALED(status), points[number - 1]
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert place.has(new), points[number - 1]
        assert (place.root / "latest").exists(), "latest never dangles"
        reconcile(place.root, place.table, place.mirrors)
        carry_on(place.root, place.table, place.mirrors)
        here = {save.meta.save_id for save in read_inventory(place.root).saves}
        if old.save_id in here:
            assert place.has(old), points[number - 1]
            place.rotate()
        left = {path.name for path in place.root.iterdir()}
        assert not {name for name in left if "000100" in name}, points[number - 1]
        assert place.records(save_id=old.save_id) == []
        assert list((place.root / names.TRASH_DIR).glob("*")) == []
        place.close()


def test_an_interrupted_rotation_is_not_finished_while_a_mirror_is_silent(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    (place.root / "meta_000100.json").unlink()
    place.store.go_down()
    assert finish_interrupted(place.root, place.table, place.mirrors) == []
    assert (place.root / "model_000100.pt").exists()
    place.store.script()
    assert finish_interrupted(place.root, place.table, place.mirrors) == [old.save_id]
    assert not (place.root / "model_000100.pt").exists()


def test_i1_an_interrupted_rotation_is_not_finished_on_the_word_of_some_of_the_mirrors(
    open_root: Callable[..., MirroredRoot],
) -> None:
    here, there = memory_url(), memory_url()
    place = open_root(here, there)
    two_saves(place)
    place.stores[there].go_down()
    place.upload(limit=60)
    (place.root / "meta_000100.json").unlink()
    assert finish_interrupted(place.root, place.table, place.mirrors[:1]) == []
    carry_on(place.root, place.table, place.mirrors[:1])
    assert (place.root / "model_000100.pt").exists()


def test_two_rotations_at_once_delete_each_save_once(place: MirroredRoot) -> None:
    for step in range(100, 600, 100):
        place.commit(step)
    place.upload()
    reports: list[tuple[tuple[int, str], ...]] = []
    start = threading.Barrier(3)

    def run() -> None:
        start.wait()
        reports.append(place.rotate().deleted)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(step for deleted in reports for step, _ in deleted) == [100, 200, 300, 400]


# -- what is not ours ------------------------------------------------------------------------------------------


def test_rotation_never_deletes_what_someone_else_put_under_a_name(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    path = place.root / "model_000100.pt"
    mine = bytes(path.stat().st_size)
    path.write_bytes(mine)
    assert_refused(place, old, "model_000100.pt was changed after the save was committed")
    assert path.read_bytes() == mine


def test_a_file_that_was_only_touched_goes(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    os.utime(place.root / "model_000100.pt")
    assert place.rotate().deleted == ((100, old.save_id),)


def test_a_directory_that_holds_a_strangers_file_stays(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    stranger = place.root / "dcp_000100" / "notes.txt"
    stranger.write_text("the good one")
    assert_refused(place, old, "dcp_000100/notes.txt is not part of the save")
    stranger.unlink()
    assert place.rotate().deleted == ((100, old.save_id),)


def test_an_interrupted_rotation_leaves_a_strangers_file(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    (place.root / "meta_000100.json").unlink()
    (place.root / "dcp_000100" / "notes.txt").write_text("the good one")
    (place.root / "model_000100.pt").write_bytes(b"mine now")
    assert finish_interrupted(place.root, place.table, place.mirrors) == [old.save_id]
    assert (place.root / "dcp_000100" / "notes.txt").exists()
    assert (place.root / "model_000100.pt").read_bytes() == b"mine now"
    assert not (place.root / "optim_000100_rank0.pt").exists()


# -- latest ----------------------------------------------------------------------------------------------------


def test_latest_never_dangles_when_what_it_names_is_rotated(place: MirroredRoot) -> None:
    """A person pointed it at an old save; or the run went back, and it still names what is now superseded."""
    two_saves(place)
    place.upload()
    (place.root / "latest").unlink()
    (place.root / "latest").symlink_to("dcp_000100")
    assert len(place.rotate().deleted) == 1
    assert os.readlink(place.root / "latest") == "dcp_000200"


def test_latest_goes_when_nothing_of_the_lineage_is_left(place: MirroredRoot) -> None:
    old, new = two_saves(place)
    place.upload()
    scratch = replace(make_attempt(1), by_person=True)
    put_attempts(place.root, [old.attempt, scratch])
    report = place.rotate()
    assert {save_id for _, save_id in report.deleted} == {old.save_id, new.save_id}
    assert not os.path.lexists(place.root / "latest")


def test_superseded_saves_of_a_rewind_go_and_what_training_continued_from_stays(place: MirroredRoot) -> None:
    first, second, third = place.commit(100), place.commit(200), place.commit(300)
    place.upload()
    put_attempts(place.root, [first.attempt, replace(make_attempt(1, first), by_person=True)])
    report = place.rotate()
    assert {step for step, _ in report.deleted} == {200, 300}
    assert place.has(first)
    assert os.readlink(place.root / "latest") == "model_000100.pt"
    assert {second.step, third.step} == {200, 300}


def test_a_lost_list_of_attempts_keeps_everything(place: MirroredRoot) -> None:
    two_saves(place)
    place.upload()
    (place.root / names.ATTEMPTS_NAME).unlink()
    report = place.rotate()
    assert report.deleted == ()
    assert set(report.plan.keep.values()) == {"its place in the lineage is unknown"}


def test_rotate_from_outside_asks_the_mirrors_that_the_table_names(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    place = MirroredRoot(tmp_path / "root", [url])
    two_saves(place)
    place.upload()
    place.close()
    assert [step for step, _ in rotate_root(place.root, Retention(keep_last=1), dry_run=True).deleted] == []
    assert [step for step, _ in rotate_root(place.root, Retention(keep_last=1)).deleted] == [100]


def test_what_is_on_the_mirror_after_a_rotation_is_what_was_saved(place: MirroredRoot, tmp_path: Path) -> None:
    old, _ = two_saves(place)
    wanted = {artifact.path: (place.root / artifact.path).read_bytes() for artifact in old.artifacts}
    place.upload()
    place.rotate()
    for path, data in wanted.items():
        assert place.store.read(path, limit_bytes=1 << 20)[0] == data


def test_rotate_is_idempotent_and_dry_run_changes_nothing(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    plan = place.rotate(dry_run=True)
    assert old.save_id in plan.plan.delete
    assert place.has(old)
    assert len(place.rotate().deleted) == 1
    assert place.rotate().deleted == ()
