"""I1, clause by clause: nothing is deleted that is not provably elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes, tombstone_to_bytes
from ckptmirror.core.errors import NotAuthorised
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta, Tombstone
from ckptmirror.flow.retention.reconcile import reconcile
from ckptmirror.local.inventory import read_inventory
from tests.kit.faults import flip_bit
from tests.kit.faulty_store import StoreFault
from tests.kit.mirrors import memory_url, object_names
from tests.kit.roots import MirroredRoot, assert_refused, two_saves
from tests.kit.saves import digest_of

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
    assert_refused(place, old, "model_000100.pt is missing")
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
def test_i1_other_bytes_under_the_name_keep_the_save_until_the_meta_names_what_was_sent_again(
    place: MirroredRoot, data: bytes
) -> None:
    old, _ = two_saves(place)
    place.upload()
    replace_object(place, "model_000100.pt", data)
    assert_refused(place, old, "model_000100.pt")
    meta = next(record for record in place.records(save_id=old.save_id) if record.role == "meta")
    assert meta.state is RecordState.PENDING, "what it names is not there any more"
    place.upload()  # goes to the other name, and the mirror's meta of this save names it then
    assert place.rotate().deleted == ((100, old.save_id),)


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
