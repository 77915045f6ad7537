"""Uploading: what arrives is what was saved, nothing is replaced, the meta comes last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import AttemptFenced
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.upload.workers import UploadWorkers, still_moving, upload_save
from ckptmirror.testing import GcsServerProcess
from tests.kit.claiming import claim_run
from tests.kit.faults import flip_bit
from tests.kit.mirrors import bucket_url, memory_url, object_names
from tests.kit.roots import MirroredRoot, assert_arrived, no_confirm
from tests.kit.saves import make_save, put_object

MIB = 1024 * 1024
BUCKET = "uploads"


# -- what goes right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
def test_i9_a_save_arrives_byte_for_byte(
    store: str, server: GcsServerProcess, open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    place = open_root({"gs": bucket_url(BUCKET), "file": f"file://{tmp_path}/mirror", "memory": memory_url()}[store])
    sizes = {"model_000100.pt": 3 * MIB + 17, "__0_0.distcp": 0}
    meta = place.commit(100, ("dcp", "model"), sizes=sizes)
    place.upload()
    assert place.states() == {"verified"}
    assert_arrived(place, meta)
    assert any(isinstance(event, events.MirrorCommitted) and event.save_id == meta.save_id for event in place.events)


def test_i6_the_meta_is_created_after_every_artifact_was_verified(server: GcsServerProcess, gs: MirroredRoot) -> None:
    """Six workers on three saves; the server's own log says in what order objects came to be."""
    metas = [gs.commit(step, ("dcp", "model"), ranks=3) for step in (100, 200, 300)]
    workers = UploadWorkers(gs.root, gs.table, gs.mirrors, gs.bus, no_confirm, workers_per_mirror=6)
    workers.start()
    urls = [mirror.url for mirror in gs.mirrors]
    assert workers.wait_until_verified(lambda: not still_moving(gs.table, urls), 60.0)
    assert workers.stop(30.0)
    log = server.log()
    for meta in metas:
        prefix = gs.mirrors[0].url.removeprefix(f"gs://{BUCKET}/")
        meta_name = f"{prefix}/meta_{meta.step:06d}.json"
        made = next(i for i, e in enumerate(log) if e["object"] == meta_name and e["operation"].startswith("upload"))
        for artifact in meta.artifacts:
            asked = [i for i, e in enumerate(log) if e["object"] == f"{prefix}/{artifact.path}" and e["status"] == 200]
            assert asked, artifact.path
            verified = [i for i in asked if log[i]["operation"] == "object.get"]
            assert verified[0] < made, artifact.path
        assert_arrived(gs, meta)


def test_i5_every_create_carries_generation_zero(server: GcsServerProcess, gs: MirroredRoot) -> None:
    gs.commit(100, sizes={"model_000100.pt": 2 * MIB})
    gs.upload()
    creates = [e for e in server.log() if e["operation"] in ("upload.start", "upload.multipart", "upload.media")]
    assert creates
    assert all(str(e["query"]["ifGenerationMatch"]) == "0" for e in creates)


# -- who may send ----------------------------------------------------------------------------------------------


def test_i11_an_attempt_that_was_superseded_after_its_first_save_sends_no_file_of_its_second(
    open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    place = open_root(memory_url())
    (mirror,) = place.mirrors
    claim = claim_run(place.root, mirror)
    context = place.context(confirm=claim.confirm)
    first, second = (
        place.commit(step, attempt=claim.attempt, run_id=claim.run_id, number=number)
        for number, step in enumerate((100, 200), start=1)
    )
    upload_save(context, first.save_id)
    assert_arrived(place, first)
    claim_run(tmp_path / "successor", mirror)
    with pytest.raises(AttemptFenced, match="has started"):
        upload_save(context, second.save_id)
    assert not [name for name in object_names(place.store) if "000200" in name]


def test_a_mirror_is_asked_once_for_the_files_of_a_save_and_once_for_its_meta(
    open_root: Callable[..., MirroredRoot],
) -> None:
    place = open_root(memory_url())
    asked: list[int | None] = []
    context = place.context(confirm=lambda _mirror, meta, **_: asked.append(meta and meta.step))
    for step in (100, 200):
        meta = place.commit(step, sizes={f"model_{step:06d}.pt": 10, f"optim_{step:06d}.pt": 10})
        upload_save(context, meta.save_id)
        assert_arrived(place, meta)
    assert asked == [None, 100, None, 200]


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
def test_i5_another_saves_objects_are_left_alone_and_the_other_name_is_used(
    store: str, server: GcsServerProcess, open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    url = {"gs": bucket_url(BUCKET), "file": f"file://{tmp_path}/mirror", "memory": memory_url()}[store]
    place = open_root(url)
    other_root = tmp_path / "other"
    other = make_save(other_root, 100, ("dcp", "model"))
    for path in ("model_000100.pt", "dcp_000100/.metadata"):
        put_object(place.store, path, (other_root / path).read_bytes(), other)
    meta = place.commit(100, ("dcp", "model"))
    place.upload()
    assert place.states() == {"verified"}
    assert place.store.read("model_000100.pt", limit_bytes=MIB)[0] == (other_root / "model_000100.pt").read_bytes()
    there = meta_from_bytes(place.store.read("meta_000100.json", limit_bytes=MIB)[0])
    named = {artifact.path: artifact.object_name for artifact in there.artifacts}
    assert named["model_000100.pt"] == f"model_000100-{meta.save_id[:8]}.pt"
    assert named["dcp_000100/.metadata"] == f"dcp_000100-{meta.save_id[:8]}/.metadata"
    assert named["optim_000100_rank0.pt"] == "optim_000100_rank0.pt"
    assert_arrived(place, meta)


def test_i5_another_saves_meta_is_left_alone(place: MirroredRoot) -> None:
    other = make_save(place.root.parent / "other", 100, ("model",))
    data = (place.root.parent / "other" / "meta_000100.json").read_bytes()
    place.store.write("meta_000100.json", data, if_generation=0)
    meta = place.commit(100)
    place.upload()
    assert place.store.read("meta_000100.json", limit_bytes=MIB)[0] == data
    assert f"meta_000100-{meta.save_id[:8]}.json" in object_names(place.store)
    assert_arrived(place, meta)
    assert other.save_id != meta.save_id


@pytest.mark.parametrize("left", ["meta_000100.json", "a part", "a broken meta"])
def test_no_file_takes_a_name_that_another_save_of_the_step_has_lost(left: str, place: MirroredRoot) -> None:
    """Else that save would seem to be whole again: where a listing has no checksums, sizes are all that is compared."""
    other = make_save(place.root.parent / "other", 100)
    data = (place.root.parent / "other" / "meta_000100.json").read_bytes()
    name = names.part_name(100, other.save_id, 1, 2) if left == "a part" else "meta_000100.json"
    place.store.write(name, b"{" if left == "a broken meta" else data, if_generation=0)
    meta = place.commit(100)
    place.upload()
    assert_arrived(place, meta)
    there = [one for one in object_names(place.store) if one not in (name, "meta_000100.json")]
    assert there
    assert [one for one in there if names.untagged(one) == one] == []


def test_its_own_part_and_a_mirror_that_the_start_has_read_leave_a_save_its_names(place: MirroredRoot) -> None:
    first = place.commit(100)
    data = (place.root / "meta_000100.json").read_bytes()
    place.store.write(names.part_name(100, first.save_id, 1, 2), data, if_generation=0)
    place.upload()
    place.store.write("meta_000200.json", data, if_generation=0)
    second = place.commit(200)
    upload_save(replace(place.context(), read_by=second.attempt.id), second.save_id)
    for meta in (first, second):
        assert {artifact.path for artifact in meta.artifacts} <= {*object_names(place.store)}


def test_when_both_names_are_taken_the_upload_fails_and_says_so(place: MirroredRoot) -> None:
    meta = place.commit(100)
    other = make_save(place.root.parent / "other", 100, ("model",))
    for name in ("model_000100.pt", f"model_000100-{meta.save_id[:8]}.pt"):
        put_object(place.store, name, b"theirs", other)
    place.upload()
    (failed,) = place.records(state=RecordState.FAILED)
    assert "Every name" in str(failed.last_error)
    assert "meta_000100.json" not in object_names(place.store)


def test_what_was_staged_under_a_tag_finds_its_own_objects(place: MirroredRoot) -> None:
    """A save comes back beside another one's files: nothing is sent, and the mirror's meta fits."""
    meta = place.commit(100)
    place.upload()
    elsewhere = MirroredRoot(place.root.parent / "elsewhere", [place.mirrors[0].url])
    (elsewhere.root / "model_000100.pt").write_bytes(b"in the way")
    there = mirror_catalog(place.mirrors[0]).saves[meta.save_id]
    staged = stage_save(place.mirrors[0], there, elsewhere.root, kinds=("model",), full=True)
    assert staged.tag
    elsewhere.add(staged)
    elsewhere.table.release_save(staged.save_id)
    before = object_names(place.store)
    elsewhere.upload()
    assert elsewhere.states() == {"verified"}
    assert object_names(place.store) == before
    newer = elsewhere.commit(200)
    elsewhere.upload()
    assert elsewhere.rotate().deleted == ((100, meta.save_id),)
    assert elsewhere.has(newer)
    elsewhere.close()


# -- faults of the local disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["gs", "file", "memory"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "gone"])
def test_i9_a_file_that_changed_since_the_commit_fails_loudly(
    store: str, damage: str, server: GcsServerProcess, open_root: Callable[..., MirroredRoot], tmp_path: Path
) -> None:
    place = open_root({"gs": bucket_url(BUCKET), "file": f"file://{tmp_path}/mirror", "memory": memory_url()}[store])
    meta = place.commit(100, sizes={"model_000100.pt": 2 * MIB})
    path = place.root / "model_000100.pt"
    if damage == "flipped":
        flip_bit(path, MIB)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "truncated" else path.read_bytes() + b"x")
    place.upload()
    (failed,) = place.records(state=RecordState.FAILED)
    assert failed.path == "model_000100.pt"
    assert any(isinstance(event, events.RecordFailed) and event.path == failed.path for event in place.events)
    assert "meta_000100.json" not in object_names(place.store)
    assert "model_000100.pt" not in object_names(place.store)
    assert mirror_catalog(place.mirrors[0]).saves == {}
    place.commit(200)
    place.upload()
    assert {step for step, _ in place.rotate().deleted} == set()
    assert meta.save_id in place.table.saves()[0].save_id


def test_no_file_is_sent_through_a_link_that_took_the_place_of_a_saves_directory(
    place: MirroredRoot, tmp_path: Path
) -> None:
    """The mirror's readers would see the first bytes of a file that only this user may read."""
    meta = place.commit(100, kinds=("dcp",))
    directory = place.root / "dcp_000100"
    shutil.move(directory, tmp_path / "home")
    directory.symlink_to(tmp_path / "home")
    place.upload()
    failed = place.records(state=RecordState.FAILED)
    assert {record.path for record in failed} >= {a.path for a in meta.artifacts if "/" in a.path}
    assert all("symbolic link" in record.reason for record in failed if "/" in record.path)
    assert not [name for name in object_names(place.store) if name.startswith("dcp_")]


def test_a_lost_local_meta_fails_its_records(place: MirroredRoot) -> None:
    place.commit(100)
    (place.root / "meta_000100.json").unlink()
    place.upload()
    assert place.states() == {"failed", "pending"}
    assert object_names(place.store) == []


def test_an_unreadable_local_file_is_tried_again(place: MirroredRoot) -> None:
    """EIO and the like are nobody's fault that we know of: the record waits, and says why."""
    place.commit(100, sidecars=False)
    path = place.root / "model_000100.pt"
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    place.upload(limit=3)
    (record,) = [r for r in place.records() if r.role == "artifact"]
    assert record.last_error
    path.rmdir()
    path.write_bytes(data)
    place.table.retry_failed()
    place.upload()
    assert place.states() == {"verified"}
