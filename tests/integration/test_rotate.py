"""Rotation: nothing is deleted that is not provably elsewhere, and what is begun is finished."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes, tombstone_to_bytes
from ckptmirror.core.errors import NotAuthorised, StorePermanent
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta, Tombstone
from ckptmirror.core.retention import Retention
from ckptmirror.flow.mirrors import MirrorSpec
from ckptmirror.flow.node import Node
from ckptmirror.flow.reconcile import carry_on, reconcile
from ckptmirror.flow.rotate import finish_interrupted, rotate_root
from ckptmirror.local import crashpoints
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores.faulty import StoreFault
from tests.factory import digest_of, flip_bit, make_attempt, put_attempts
from tests.mirror_place import MirroredRoot, memory_url, object_names


@pytest.fixture
def open_root(tmp_path: Path) -> Iterator[Callable[..., MirroredRoot]]:
    opened: list[MirroredRoot] = []

    def open_one(*urls: str, optional: tuple[str, ...] = (), name: str = "root") -> MirroredRoot:
        opened.append(MirroredRoot(tmp_path / name, urls, optional=optional))
        return opened[-1]

    yield open_one
    for place in opened:
        place.close()


@pytest.fixture
def place(open_root: Callable[..., MirroredRoot]) -> MirroredRoot:
    """A root with one mirror and two saves, of which policy does not want the older."""
    return open_root(memory_url())


def two_saves(place: MirroredRoot, kinds: tuple[str, ...] = ("dcp", "model")) -> tuple[Meta, Meta]:
    return place.commit(100, kinds), place.commit(200, kinds)  # type: ignore[arg-type]


def assert_refused(place: MirroredRoot, meta: Meta, *words: str) -> None:
    report = place.rotate()
    assert report.deleted == ()
    assert place.has(meta)
    for word in words:
        assert word in report.refused[meta.save_id]
    assert any(isinstance(e, events.RotationRefused) and e.save_id == meta.save_id for e in place.events)


# -- I1, clause by clause --------------------------------------------------------------------------------------


def test_i1_a_save_that_is_verified_and_committed_and_confirmed_goes(place: MirroredRoot) -> None:
    old, new = two_saves(place)
    place.upload()
    report = place.rotate()
    assert report.deleted == ((100, old.save_id),)
    assert [path.name for path in place.root.iterdir() if "000100" in path.name] == []
    assert place.has(new)
    assert place.records(save_id=old.save_id) == []
    assert list((place.root / names.TRASH_DIR).iterdir()) == []


def test_i1_a_record_that_is_not_verified_keeps_the_save(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    claim = place.table.claim("w", place.mirrors[0].url, lease_s=300)
    assert claim is not None
    place.upload(worker="other", patient=False)
    assert_refused(place, old, "not verified", claim.record.path)


def test_i1_verified_files_without_a_committed_meta_keep_the_save(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.store.script(StoreFault("write", "meta_000100", times=0, when="before"))
    place.upload(limit=20)
    artifacts = [record for record in place.records(save_id=old.save_id) if record.role == "artifact"]
    assert {record.state for record in artifacts} == {RecordState.VERIFIED}
    assert_refused(place, old, "meta is not committed")


@pytest.mark.parametrize("operation", ["read", "stat", ""])
def test_i1_a_mirror_that_cannot_be_asked_keeps_the_save(place: MirroredRoot, operation: str) -> None:
    old, _ = two_saves(place)
    place.upload()
    place.store.script(StoreFault(operation, times=0, when="before"))
    assert_refused(place, old, "does not answer")
    place.store.script(StoreFault(operation, times=0, when="before", error=lambda: NotAuthorised("403")))
    assert_refused(place, old, "403")
    place.store.script()
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_an_object_that_is_gone_keeps_the_save_and_is_sent_again(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    info = place.store.stat("model_000100.pt")
    assert info is not None
    place.store.delete("model_000100.pt", generation=info.generation)
    assert_refused(place, old, "model_000100.pt is gone")
    place.upload()
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_an_object_that_went_behind_the_meta_goes_first_is_seen_at_deletion_time(place: MirroredRoot) -> None:
    """The mirror is asked for this deletion: what was verified an hour ago proves nothing."""
    old, _ = two_saves(place)
    place.upload()
    held = threading.Event()
    place.store.script(StoreFault("stat", "model_000100", hold=held))
    report: list[object] = []
    thread = threading.Thread(target=lambda: report.append(place.rotate()))
    thread.start()
    info = next(info for info in place.store.list("model_000100"))
    place.store.delete(info.name, generation=info.generation)
    held.set()
    thread.join()
    assert place.has(old)


def replace_object(place: MirroredRoot, name: str, data: bytes) -> None:
    info = place.store.stat(name)
    assert info is not None
    place.store.write(name, data, if_generation=info.generation, metadata=info.metadata)


def test_i1_the_same_bytes_at_another_generation_keep_the_save(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    replace_object(place, "model_000100.pt", (place.root / "model_000100.pt").read_bytes())
    assert_refused(place, old, "model_000100.pt", "generation")
    place.upload()  # asks again, finds its own object, and believes it
    assert place.rotate().deleted == ((100, old.save_id),)


@pytest.mark.parametrize("data", [b"another size", b"x" * 3000])
def test_i1_other_bytes_under_the_name_keep_the_save_for_good(place: MirroredRoot, data: bytes) -> None:
    old, _ = two_saves(place)
    place.upload()
    replace_object(place, "model_000100.pt", data)
    assert_refused(place, old, "model_000100.pt")
    place.upload()  # goes to the other name, but the mirror's meta, which is never replaced, names the first
    assert_refused(place, old, "its meta there names model_000100.pt")


def test_i1_an_object_with_another_crc32c_keeps_it(open_root: Callable[..., MirroredRoot], tmp_path: Path) -> None:
    """On a mirror that keeps no checksums the bytes are read back."""
    place = open_root(f"file://{tmp_path}/mirror")
    old, _ = two_saves(place)
    place.upload()
    path = tmp_path / "mirror" / "model_000100.pt"
    found = path.stat()
    flip_bit(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert_refused(place, old, "crc32c")


def test_i1_another_saves_meta_under_our_name_keeps_the_save(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    data, _ = place.store.read("meta_000200.json", limit_bytes=1 << 20)
    replace_object(place, "meta_000100.json", data)
    assert_refused(place, old, "another save's meta")


@pytest.mark.parametrize("change", ["unnamed", "other_digest", "part", "garbage"])
def test_i1_a_meta_that_does_not_lead_to_the_objects_keeps_the_save(place: MirroredRoot, change: str) -> None:
    old, _ = two_saves(place)
    place.upload()
    meta = meta_from_bytes(place.store.read("meta_000100.json", limit_bytes=1 << 20)[0])
    first, *rest = meta.artifacts
    changed = {
        "unnamed": replace(meta, artifacts=tuple(rest)),
        "other_digest": replace(meta, artifacts=(replace(first, digest=digest_of(b"other")), *rest)),
        "part": replace(meta, world_size=2, nodes=2, node=0),
    }
    data = meta_to_bytes(changed[change]) if change in changed else b"{}"
    info = place.store.stat("meta_000100.json")
    assert info is not None
    there = place.store.write("meta_000100.json", data, if_generation=info.generation)
    (record,) = (r for r in place.records(save_id=old.save_id) if r.role == "meta")
    place.table.unverify(old.save_id, record.path, record.mirror, "test")
    claim = place.table.claim("w", record.mirror, lease_s=60)
    assert claim is not None
    crc = there.crc32c
    assert crc is not None
    place.table.verify(claim, object_name=record.path, generation=there.generation, size_bytes=len(data), crc32c=crc)
    assert_refused(place, old)


def put_tombstone(place: MirroredRoot, meta: Meta, name: str) -> None:
    data = tombstone_to_bytes(Tombstone(meta.save_id, meta.step, meta.kinds, "old", "2026-01-01T00:00:00Z"))
    info = place.store.stat(name)
    place.store.write(name, data, if_generation=info.generation if info else 0)


def test_i1_a_tombstone_of_this_save_is_accepted(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    put_tombstone(place, old, "meta_000100.json")
    for artifact in old.artifacts:
        info = place.store.stat(artifact.path)
        assert info is not None
        place.store.delete(artifact.path, generation=info.generation)
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_a_tombstone_that_the_uploader_meets_is_accepted_too(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    put_tombstone(place, old, "meta_000100.json")
    place.upload()
    assert place.states(old.save_id) == {"removed"}
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_a_tombstone_of_another_save_is_not(place: MirroredRoot) -> None:
    old, new = two_saves(place)
    place.upload()
    put_tombstone(place, new, "meta_000100.json")
    assert_refused(place, old, "another save's meta")


def test_i1_two_required_mirrors_both_count(open_root: Callable[..., MirroredRoot]) -> None:
    here, there = memory_url(), memory_url()
    place = open_root(here, there)
    old, _ = two_saves(place)
    place.stores[there].go_down()
    place.upload(limit=60)
    assert_refused(place, old, there)
    place.stores[there].script()
    place.upload()
    place.stores[here].script(StoreFault("stat", times=0, when="before"))
    assert_refused(place, old, here)
    place.stores[here].script()
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_a_mirror_that_is_not_required_neither_allows_nor_forbids(open_root: Callable[..., MirroredRoot]) -> None:
    required, optional = memory_url(), memory_url()
    place = open_root(required, optional=(optional,))
    old, _ = two_saves(place)
    place.stores[required].go_down()
    place.upload(limit=60)
    assert_refused(place, old, required)
    place.stores[required].script()
    place.stores[optional].go_down()
    place.upload(limit=60)
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_without_a_mirror_nothing_goes(open_root: Callable[..., MirroredRoot]) -> None:
    place = open_root()
    old, _ = two_saves(place)
    assert_refused(place, old, "no required mirror")


def test_i1_a_broken_row_keeps_its_save_and_no_other(place: MirroredRoot) -> None:
    import sqlite3

    first, second, _ = place.commit(50), place.commit(100), place.commit(200)
    place.upload()
    place.table.close()
    with sqlite3.connect(place.root / names.TABLE_NAME) as raw:
        raw.execute("UPDATE records SET generation = generation + 1 WHERE path = 'model_000050.pt'")
        raw.execute("UPDATE saves SET artifact_count = artifact_count - 1 WHERE step = 100")
    raw.close()
    place.table = place.open_table()
    third = place.commit(300)
    place.upload()
    report = place.rotate()
    assert {step for step, _ in report.deleted} == {200}
    assert place.has(first)
    assert place.has(second)
    assert place.has(third)
    reconcile(place.root, place.table, place.mirrors)
    place.upload()
    assert {step for step, _ in place.rotate().deleted} == {50, 100}


def test_i1_a_lost_table_keeps_everything_until_the_mirror_was_asked_again(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    place.lose_table()
    assert_refused(place, old, "not in the table")
    reconcile(place.root, place.table, place.mirrors)
    assert_refused(place, old, "not verified")
    place.upload()
    assert place.rotate().deleted == ((100, old.save_id),)


def test_partial_upload_blocks_rotation_including_dotfiles(place: MirroredRoot) -> None:
    old, _ = two_saves(place, ("dcp",))
    place.store.script(StoreFault("upload", r"dcp_000100/\.metadata", times=0, when="before"))
    place.upload(limit=40)
    assert_refused(place, old, "dcp_000100/.metadata")
    place.store.script()
    place.upload()
    assert place.rotate().deleted == ((100, old.save_id),)


def test_i1_a_rotation_and_an_upload_may_race(place: MirroredRoot) -> None:
    """Two rotations run all the while that saves are uploaded; at no moment is a save on neither side."""
    metas = [place.commit(step) for step in range(100, 700, 100)]
    over = threading.Event()
    lost: list[int] = []

    def rotate_on() -> None:
        while not over.is_set():
            place.rotate()
            whole = {name for name in object_names(place.store) if name.startswith("meta_")}
            here = {save.meta.step for save in read_inventory(place.root).saves}
            lost.extend(m.step for m in metas if m.step not in here and f"meta_{m.step:06d}.json" not in whole)

    threads = [threading.Thread(target=rotate_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    place.upload(limit=1000)
    over.set()
    for thread in threads:
        thread.join()
    place.rotate()
    assert lost == []
    assert [save.meta.step for save in read_inventory(place.root).saves] == [600]


# -- slow and failed uploads -----------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(url: str, keep_last: int = 1) -> Node:
        node = Node(tmp_path / "trained", [MirrorSpec(url)], Retention(keep_last=keep_last), events.EventBus())
        nodes.append(node)
        node.start_claim()
        node.decide(None)
        return node

    yield start
    for node in nodes:
        node.close()


def commit_on(node: Node, step: int) -> Meta:
    from tests.factory import make_save

    claim = node.claim
    assert claim is not None
    meta = make_save(node.root, step, ("model",), claim.attempt, step, run_id=claim.run_id)
    urls = [mirror.url for mirror in node.mirrors]
    node.table.add_save(meta.save_id, step, meta.kinds, meta.artifacts, urls)
    node.table.release_save(meta.save_id)
    node.on_commit(meta)
    return meta


def test_rotation_waits_for_a_slow_upload(tmp_path: Path, node: Callable[..., Node]) -> None:
    """The mirror's directory cannot be written until the rotation has begun to wait."""
    mirror = tmp_path / "nfs" / "mirror"
    mirror.parent.mkdir()
    running = node(f"file://{mirror}")
    blocked = mirror / "model_000100.pt"
    blocked.mkdir()  # neither an object nor free
    first = commit_on(running, 100)
    commit_on(running, 200)
    report: list[object] = []
    thread = threading.Thread(target=lambda: report.append(running.rotate_now(60.0)))
    thread.start()
    blocked.rmdir()
    running.table.retry_failed()
    assert running._workers is not None
    running._workers.notify()
    thread.join(90.0)
    assert not thread.is_alive()
    assert not (running.root / "meta_000100.json").exists()
    assert (mirror / "meta_000100.json").exists()
    assert first.step == 100


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
    assert renames[-1] < forgotten < deleted[0]
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
    scratch = make_attempt(1)
    put_attempts(place.root, [old.attempt, scratch])
    report = place.rotate()
    assert {save_id for _, save_id in report.deleted} == {old.save_id, new.save_id}
    assert not os.path.lexists(place.root / "latest")


def test_superseded_saves_of_a_rewind_go_and_what_training_continued_from_stays(place: MirroredRoot) -> None:
    first, second, third = place.commit(100), place.commit(200), place.commit(300)
    place.upload()
    put_attempts(place.root, [first.attempt, make_attempt(1, first)])
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
