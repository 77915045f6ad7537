"""Staging beside what is there already: nothing that only lies here goes, however often it is cut short."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import LocalStorageUnwritable, RefusedOnlyCopy
from ckptmirror.core.model import Meta
from ckptmirror.flow.drain import drain
from ckptmirror.flow.fetch.stage import stage_checkpoint_step, stage_save
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.reconcile import reconcile
from ckptmirror.flow.status import read_status
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from tests.kit.faults import flip_bit
from tests.kit.mirrors import memory_url
from tests.kit.processes import killed_at
from tests.kit.roots import MirroredRoot, Place, names_in, whole_saves
from tests.kit.saves import FIRST_ATTEMPT, put_attempts, put_on_mirror

CUT_SHORT = ["trash.rename:before", "trash.rename:after", "file.rename:before", "file.rename:after"]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def stage_model(mirror: Mirror | str, dest: Path, **more: bool) -> None:
    stage_checkpoint_step(mirror, step=200, dest=dest, require_kind="model", **more)


@pytest.mark.parametrize("crash_at", CUT_SHORT)
@pytest.mark.parametrize("damage", [flip_bit, lambda path: os.truncate(path, 10)])
def test_i12_a_stage_of_one_kind_that_is_cut_short_costs_the_trainers_save_nothing(
    tmp_path: Path, crash_at: str, damage: Callable[[Path], object]
) -> None:
    """On one required mirror, pending on another: what else the save has is nowhere else, and must stay."""
    first, second = f"file://{tmp_path}/first", f"file://{tmp_path}/second"
    trained = MirroredRoot(tmp_path / "root", [first])
    put_attempts(trained.store, [FIRST_ATTEMPT])
    meta = trained.commit(200, ("dcp", "model"))
    trained.upload()
    trained.table.set_mirrors([(first, True), (second, True)])
    urls = [first, second]
    trained.table.add_save(meta.save_id, 200, meta.kinds, meta.artifacts, urls, meta_path="meta_000200.json")
    trained.table.close()
    before = names_in(trained.root)
    damage(trained.root / "model_000200.pt")
    mirror = Mirror(first, True, open_store(first))
    killed_at(crash_at, stage_model, first, trained.root, refresh=True)
    with UploadsTable.open(trained.root / names.TABLE_NAME) as table:  # the next start, or a drain, looks first
        reconcile(trained.root, table, [])
    stage_model(mirror, trained.root, refresh=True)
    assert names_in(trained.root) == before
    assert whole_saves(trained.root) == {meta.save_id: meta}
    assert drain(trained.root, timeout_s=30).pending == 0
    assert {info.name for info in open_store(second).list()} >= {artifact.path for artifact in meta.artifacts}


def test_i1_refresh_keeps_an_original_whose_copy_on_the_mirror_has_rotted(place: Place) -> None:
    """Equal sizes do not say that the mirror has it."""
    old, new = place.save(200, ("model",), 1), place.save(200, ("model",), 2)
    url = f"{place.url}-rotten"
    rotten = Mirror(url, True, open_store(url))
    put_attempts(rotten.store, [FIRST_ATTEMPT])
    copied = place.root.parent / "copied"
    shutil.copytree(place.root, copied)
    shutil.rmtree(copied / names.CONTROL_DIR, ignore_errors=True)
    for meta in (old, new):
        put_on_mirror(rotten.store, place.root, meta)
    info = rotten.store.stat("model_000200.pt")
    assert info is not None
    data = bytearray(rotten.store.read(info.name, limit_bytes=10_000)[0])
    data[5] ^= 1
    rotten.store.write(info.name, bytes(data), if_generation=info.generation, metadata=info.metadata)
    with pytest.raises(RefusedOnlyCopy, match="it stays"):
        stage_checkpoint_step(rotten, step=200, dest=copied, refresh=True)
    assert set(whole_saves(copied)) == {old.save_id, new.save_id}
    stage_checkpoint_step(place.mirror, step=200, dest=copied, refresh=True)  # where it is whole, the old one may go
    assert set(whole_saves(copied)) == {new.save_id}


def test_i1_refresh_from_another_mirror_keeps_what_was_staged_from_the_first(place: Place, tmp_path: Path) -> None:
    """The first may be gone by now: then the copy is all there is."""
    mine = place.save(200, ("model",), 1)
    stage_model(place.mirror, place.dest)
    other = Place(tmp_path / "another")
    other.save(200, ("model",), 2)
    with pytest.raises(RefusedOnlyCopy, match="it stays"):
        stage_checkpoint_step(other.mirror, step=200, dest=place.dest, refresh=True)
    assert set(whole_saves(place.dest)) == {mine.save_id}


def test_a_file_that_somebody_put_under_a_replaced_name_stays(tmp_path: Path) -> None:
    place = Place(tmp_path, f"file://{tmp_path}/mirror")
    place.save(200, ("model",), 1)
    stage_model(place.mirror, place.dest)
    new = place.save(200, ("model",), 2)
    assert killed_at("trash.rename:after", stage_model, place.url, place.dest, refresh=True)
    (place.dest / "model_000200.pt").unlink()
    (place.dest / "model_000200.pt").write_bytes(b"a person's own model")
    stage_model(place.mirror, place.dest)
    assert (place.dest / "model_000200.pt").read_bytes() == b"a person's own model"
    assert set(whole_saves(place.dest)) == {new.save_id}


def test_i10_nothing_is_moved_through_a_link_in_place_of_the_trash(place: Place, tmp_path: Path) -> None:
    place.save(200, ("model",))
    stage_model(place.mirror, place.dest)
    shutil.rmtree(place.dest / names.TRASH_DIR, ignore_errors=True)
    (tmp_path / "elsewhere").mkdir()
    (place.dest / names.TRASH_DIR).symlink_to(tmp_path / "elsewhere")
    flip_bit(place.dest / "model_000200.pt")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        stage_model(place.mirror, place.dest, refresh=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- copies and their records ----------------------------------------------------------------------------------


def staged_in_training(tmp_path: Path, *kinds: str) -> tuple[MirroredRoot, Meta, str]:
    """A root on a new machine, into which a save of two kinds was staged from one of its two mirrors."""
    origin, other = memory_url(), memory_url()
    trained = Place(tmp_path / "gone")
    meta = trained.save()
    mirror = Mirror(origin, True, open_store(origin))
    put_attempts(mirror.store, [FIRST_ATTEMPT])
    put_on_mirror(mirror.store, trained.root, meta)
    place = MirroredRoot(tmp_path / "root", [origin, other])
    return place, stage_save(mirror, meta, place.root, kinds=kinds, full=True), other  # type: ignore[arg-type]


def test_i12_a_whole_staged_copy_goes_to_every_mirror_whoever_finds_it(tmp_path: Path) -> None:
    """A start that was killed right after it brought a save: the next one sees a copy on its disk, and no more."""
    place, staged, other = staged_in_training(tmp_path, "dcp", "model")
    assert not staged.partial
    reconcile(place.root, place.table, place.mirrors)
    assert {record.mirror for record in place.records()} == set(place.stores)
    place.upload()
    assert "meta_000200.json" in {info.name for info in place.stores[other].list()}


def test_a_partial_staged_copy_is_not_sent_and_holds_up_no_end_of_a_run(tmp_path: Path) -> None:
    place, staged, other = staged_in_training(tmp_path, "dcp")
    assert staged.partial
    reconcile(place.root, place.table, place.mirrors)
    assert {record.mirror for record in place.records()} == set(place.stores) - {other}
    place.upload()
    assert place.states() == {"verified"}
    assert read_status(place.root).is_mirrored(None)


def test_i12_records_that_a_copy_under_other_names_replaces_are_made_anew_for_every_mirror(tmp_path: Path) -> None:
    place, staged, _ = staged_in_training(tmp_path, "dcp", "model")
    reconcile(place.root, place.table, place.mirrors)
    place.table.forget_save(staged.save_id)
    tagged = [replace(a, path=names.tagged(a.path, staged.save_id)) for a in staged.artifacts]
    meta_path = names.SaveName(200, staged.save_id[:8]).meta
    place.table.add_save(staged.save_id, 200, staged.kinds, tagged, list(place.stores), meta_path=meta_path)
    place.table.release_save(staged.save_id)
    reconcile(place.root, place.table, place.mirrors)
    assert {(r.mirror, r.path) for r in place.records() if r.role == "artifact"} == {
        (url, artifact.path) for url in place.stores for artifact in staged.artifacts
    }
