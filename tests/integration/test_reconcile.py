"""A start after a crash: what was half made goes, what was made stays and is carried on, all else is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.model import Artifact, Meta, new_id
from ckptmirror.flow.places.mirrors import mirror_specs
from ckptmirror.flow.retention.reconcile import add_missing_records, reconcile
from ckptmirror.flow.save.commit import SaveCommit, commit_save
from ckptmirror.local import directories
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.table_place import open_table
from ckptmirror.testing import GcsServerProcess
from tests.kit.faults import flip_bit
from tests.kit.mirrors import memory_url, object_names
from tests.kit.roots import MirroredRoot
from tests.kit.saves import make_save

BUCKET = "reconcile"


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file outside the control directory."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and names.CONTROL_DIR not in path.relative_to(root).parts
    }


def seal(place: MirroredRoot, step: int) -> Meta:
    """What ranks leave before the leader commits: every top name still under its temporary."""
    meta = make_save(place.root, step, ("dcp", "model"), number=step, write_meta=False)
    for top in dict.fromkeys(artifact.path.partition("/")[0] for artifact in meta.artifacts):
        (place.root / top).rename(place.root / names.tmp_name(top, meta.save_id))
    return meta


def start(place: MirroredRoot) -> None:
    reconcile(place.root, place.table, place.mirrors)


def assert_nothing_left_of(place: MirroredRoot, meta: Meta) -> None:
    assert [name for name in snapshot(place.root) if f"{meta.step:06d}" in name] == []
    assert place.records(save_id=meta.save_id) == []
    assert place.table.saves() == [] or all(save.save_id != meta.save_id for save in place.table.saves())


# -- crash leftovers, stage by stage of a commit ---------------------------------------------------------------


def test_sealed_temporaries_without_records_go(place: MirroredRoot) -> None:
    meta = seal(place, 100)
    start(place)
    assert_nothing_left_of(place, meta)


def test_sealed_temporaries_with_unreleased_records_go(place: MirroredRoot) -> None:
    meta = seal(place, 100)
    place.add(meta)
    start(place)
    assert_nothing_left_of(place, meta)


@pytest.mark.parametrize("name", ["thesis.txt", "notes/thesis.txt", "meta_000300.json", "latest"])
def test_a_row_of_the_table_that_names_a_file_of_the_users_removes_nothing(place: MirroredRoot, name: str) -> None:
    """Somebody wrote it into the table, with the size and the checksum of the file."""
    file = place.root / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"years of work")
    digest = digest_file(file)
    place.table.add_save("f" * 32, 300, ("model",), [Artifact(name, ("model",), None, digest)], [place.store.url])
    start(place)
    assert file.read_bytes() == b"years of work"


@pytest.mark.parametrize("published", range(1, 6))
def test_files_published_before_the_meta_go(place: MirroredRoot, published: int) -> None:
    meta = seal(place, 100)
    place.add(meta)
    tops = list(dict.fromkeys(artifact.path.partition("/")[0] for artifact in meta.artifacts))
    for top in tops[:published]:
        (place.root / names.tmp_name(top, meta.save_id)).rename(place.root / top)
    start(place)
    assert_nothing_left_of(place, meta)


def test_a_meta_with_unreleased_records_is_a_save_and_is_carried_on(place: MirroredRoot) -> None:
    meta = place.commit(100, release=False)
    assert place.upload() == 0
    start(place)
    place.upload()
    assert place.states() == {"verified"}
    assert place.has(meta)


def test_a_temporary_meta_is_no_meta(place: MirroredRoot) -> None:
    meta = place.commit(100, release=False)
    (place.root / "meta_000100.json").rename(place.root / names.tmp_name("meta_000100.json", meta.save_id))
    start(place)
    assert_nothing_left_of(place, meta)


def test_a_meta_that_cannot_be_read_deletes_nothing_and_is_named(place: MirroredRoot) -> None:
    """The disk lost a block of it: its files may be the only copy, and nobody waits for uploads that never begin."""
    meta = place.commit(100, release=False)
    flip_bit(place.root / "meta_000100.json", 40)
    before = snapshot(place.root)
    start(place)
    assert snapshot(place.root) == before
    place.upload()
    failed = [record for record in place.records(save_id=meta.save_id) if record.role == "artifact"]
    assert {record.state.value for record in failed} == {"failed"}
    assert all("meta_000100.json cannot be used" in str(record.last_error) for record in failed)
    assert list(object_names(place.store)) == []
    assert snapshot(place.root) == before


def test_an_incomplete_save_keeps_its_files_and_its_records(place: MirroredRoot) -> None:
    place.commit(100, release=False)
    (place.root / "optim_000100_rank0.pt").unlink()
    before = snapshot(place.root)
    start(place)
    assert snapshot(place.root) == before
    place.upload()
    assert "failed" in place.states()
    assert "meta_000100.json" not in object_names(place.store)


def test_leftover_tmp_is_retried(place: MirroredRoot) -> None:
    """What a crash left under a temporary name is never taken for the file: the step is saved again, whole."""
    seal(place, 100)
    start(place)
    again = seal(place, 100)
    commit_save(place.root, place.table, [], again)
    assert [save.meta.save_id for save in read_inventory(place.root).saves] == [again.save_id]
    assert again.tag == ""


def test_a_part_that_is_withdrawn_leaves_no_record_even_if_these_were_released(place: MirroredRoot) -> None:
    """Whoever repairs records between a node's publish and the others' answer takes the part for a save to upload."""
    before = snapshot(place.root)
    part = seal(place, 100)
    commit = SaveCommit(place.root, place.table, mirror_specs([mirror.url for mirror in place.mirrors]), part)
    commit.prepare()
    commit.publish()
    add_missing_records(place.table, place.mirrors, [part])
    assert place.table.claim("worker", place.mirrors[0].url, lease_s=60.0) is not None
    commit.withdraw()
    assert place.records() == []
    assert snapshot(place.root) == before


def test_reconcile_twice_is_reconcile_once(place: MirroredRoot) -> None:
    place.commit(100)
    place.commit(200, release=False)
    seal(place, 300)
    start(place)
    before, records = snapshot(place.root), place.records()
    start(place)
    assert snapshot(place.root) == before
    assert place.records() == records


# -- what is not ours ------------------------------------------------------------------------------------------


def test_never_delete_an_unknown_directory(place: MirroredRoot) -> None:
    """A checkpoint copied in by hand, without a meta; tools' own layouts; a person's files of any name."""
    strangers = {
        "dcp_000400/.metadata": b"copied without its meta",
        "dcp_000400/__0_0.distcp": b"shard",
        "model_000500.pt": b"copied",
        "step-100/model.pt": b"another tool's",
        "checkpoint-7/trainer_state.json": b"{}",
        "notes.tmp": b"mine",
        "model_final.pt.tmp": b"mine too",
        "dist_ckpt_000200/.metadata": b"older layout",
        "emergency_step_000300_20260101T000000Z/anything": b"x",
        "meta_000600.json": b"not a meta",
    }
    for name, data in strangers.items():
        (place.root / name).parent.mkdir(parents=True, exist_ok=True)
        (place.root / name).write_bytes(data)
    place.commit(100)
    start(place)
    place.upload()
    place.commit(200)
    place.upload()
    place.rotate()
    start(place)
    found = snapshot(place.root)
    assert {name: found.get(name) for name in strangers} == strangers


def test_what_someone_put_under_a_name_of_a_save_that_never_was_stays(place: MirroredRoot) -> None:
    meta = seal(place, 100)
    place.add(meta)
    (place.root / "model_000100.pt").write_bytes(b"a person's model")
    (place.root / "dcp_000100").mkdir()
    (place.root / "dcp_000100" / ".metadata").write_bytes(b"a person's checkpoint")
    start(place)
    assert snapshot(place.root) == {
        "dcp_000100/.metadata": b"a person's checkpoint",
        "model_000100.pt": b"a person's model",
    }


def test_a_strangers_file_inside_a_directory_of_a_save_that_never_was_stays(place: MirroredRoot) -> None:
    meta = seal(place, 100)
    place.add(meta)
    (place.root / names.tmp_name("dcp_000100", meta.save_id)).rename(place.root / "dcp_000100")
    (place.root / "dcp_000100" / "notes.txt").write_bytes(b"mine")
    start(place)
    assert snapshot(place.root)["dcp_000100/notes.txt"] == b"mine"


# -- the table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["deleted", "garbage", "zeros inside"])
def test_i12_a_lost_table_is_filled_again_and_verified_without_sending_bytes_again(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GcsServerProcess(tmp_path / "gcs", buckets=[BUCKET]) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = MirroredRoot(tmp_path / "root", [f"gs://{BUCKET}/run"])
        metas = [place.commit(step, ("dcp", "model"), sizes={"model": 1}) for step in (100, 200)]
        place.upload()
        path = place.root / names.TABLE_NAME
        place.table.close()
        if loss == "deleted":
            for file in path.parent.glob("uploads.db*"):
                file.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[:] = b"garbage" * 1000 if loss == "garbage" else data[:4096] + bytes(len(data) - 4096)
            path.write_bytes(data)
        server.clear_log()
        place.table = open_table(place.root)
        place.table.set_mirrors([(mirror.url, True) for mirror in place.mirrors])
        start(place)
        place.upload()
        assert {(r.save_id, r.state.value) for r in place.records()} == {(m.save_id, "verified") for m in metas}
        sent = [entry for entry in server.log() if entry["operation"].startswith("upload.") and entry["status"] < 400]
        assert sent == []
        assert [step for step, _ in place.rotate().deleted] == [100]
        place.close()


def test_a_broken_row_is_added_anew_as_pending(place: MirroredRoot) -> None:
    import sqlite3

    place.commit(100)
    place.upload()
    place.table.close()
    with sqlite3.connect(place.root / names.TABLE_NAME) as raw:
        raw.execute("UPDATE records SET state = 'verified', crc32c = 7 WHERE path = 'model_000100.pt'")
    raw.close()
    place.table = place.open_table()
    start(place)
    assert {r.path: r.state.value for r in place.records()}["model_000100.pt"] == "pending"
    place.upload()
    assert place.states() == {"verified"}


def test_a_mirror_added_later_gets_every_save(open_root: Callable[..., MirroredRoot], tmp_path: Path) -> None:
    first, second = memory_url(), memory_url()
    place = open_root(first)
    place.commit(100)
    place.commit(200)
    place.upload()
    place.close()
    again = open_root(first, second)
    start(again)
    assert len(again.records(mirror=second)) == len(again.records(mirror=first))
    again.upload()
    assert [n for n in object_names(again.stores[second]) if n.startswith("meta")] == [
        "meta_000100.json",
        "meta_000200.json",
    ]


def test_a_meta_that_contradicts_the_table_changes_no_record(place: MirroredRoot) -> None:
    meta = place.commit(100)
    place.upload()
    other = make_save(place.root.parent / "other", 100, ("model",), save_id=meta.save_id, size_bytes=10)
    for artifact in other.artifacts:
        (place.root / artifact.path).write_bytes((place.root.parent / "other" / artifact.path).read_bytes())
    (place.root / "meta_000100.json").write_bytes(meta_to_bytes(other))
    place.commit(200)
    records = place.records(save_id=meta.save_id)
    start(place)
    assert place.records(save_id=meta.save_id) == records
    place.upload()
    report = place.rotate()
    assert report.deleted == ()
    assert (place.root / "model_000100.pt").read_bytes()[:10] == (
        place.root.parent / "other" / "model_000100.pt"
    ).read_bytes()


def test_trash_of_a_crashed_deletion_is_removed(place: MirroredRoot) -> None:
    directories.make_dirs(place.root / names.TRASH_DIR)
    (place.root / names.TRASH_DIR / f"model_000100.pt.{new_id()[:16]}").write_bytes(b"x" * 1000)
    start(place)
    assert list((place.root / names.TRASH_DIR).iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_a_start_is_not_held_up_by_what_somebody_put_in_place_of_a_file_of_a_cut_short_save(
    place: MirroredRoot, kind: str
) -> None:
    meta = make_save(place.root, 100, ("model",), write_meta=False)
    place.add(meta)
    file = place.root / "model_000100.pt"
    file.rename(place.root / "moved.pt")
    if kind == "link":
        file.symlink_to("moved.pt")
    else:
        file.mkdir()
    start(place)
    assert file.is_symlink() or file.is_dir()
    assert (place.root / "moved.pt").exists()
    assert place.table.saves() == []


def test_i3_a_cut_short_save_leaves_alone_what_the_meta_of_another_names(place: MirroredRoot) -> None:
    whole = place.commit(100)
    cut_short = replace(whole, save_id=new_id(), save_number=whole.save_number + 1)
    place.add(cut_short)  # the same names and bytes; it never came to its meta
    start(place)
    assert place.has(whole)
    assert [save.save_id for save in place.table.saves()] == [whole.save_id]
