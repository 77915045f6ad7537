"""Rotation at its edges: equal bytes that are another save's, a full disk, and emergency snapshots."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager, stage_checkpoint_step
from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import LocalStorageFull, LocalStorageUnwritable, NameTaken
from ckptmirror.core.model import Attempt, Meta, new_id, top_names
from ckptmirror.core.retention import Retention
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.retention import rotation as rotate_module
from ckptmirror.flow.retention.reconcile import reconcile
from ckptmirror.flow.retention.rotation import finish_interrupted, rotate_root
from ckptmirror.flow.save.commit import NAMES_LOCK_NAME, commit_save
from ckptmirror.flow.save.emergency import save_emergency
from ckptmirror.flow.save.emergency_files import read_note
from ckptmirror.local import directories, files
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.lock import exclusive
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.ranks import SingleRank
from tests.kit.cli import run
from tests.kit.faults import DiskFault, failing, flip_bit
from tests.kit.mirrors import memory_url
from tests.kit.roots import MirroredRoot, two_saves, whole
from tests.kit.saves import FIRST_ATTEMPT, RUN_ID
from tests.kit.training import new_state, saved_run, train

# -- equal bytes are not one's own -----------------------------------------------------------------------------


def interrupted(place: MirroredRoot, step: int) -> tuple[Meta, dict[str, bytes]]:
    """A rotation that was killed after a save's files were trashed, before the table forgot it; and what it held."""
    meta = place.commit(step)
    place.upload()
    held = {artifact.path: (place.root / artifact.path).read_bytes() for artifact in meta.artifacts}
    for path in (*held, names.SaveName(step).meta):
        (place.root / path).unlink()
    return meta, held


def sealed_again(place: MirroredRoot, meta: Meta, held: dict[str, bytes]) -> Meta:
    """Another save of the same bytes under the same names, as ranks leave it for the leader to commit."""
    again = replace(meta, save_id=new_id(), save_number=meta.save_number + 1)
    for path, data in held.items():
        (place.root / names.tmp_name(path, again.save_id)).write_bytes(data)
    return again


def test_i3_a_rotation_takes_nothing_of_a_save_in_flight_with_the_bytes_of_a_rotated_one(
    place: MirroredRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, held = interrupted(place, 200)
    again = sealed_again(place, old, held)
    honest = directories.rename_noreplace
    seen: list[bool] = []

    def rename(source: Path, target: Path, *, label: str = "file.publish") -> None:
        honest(source, target, label=label)
        finish_interrupted(place.root, place.table, place.mirrors)  # between any two of its names
        seen.append((place.root / target.name).exists())

    monkeypatch.setattr(directories, "rename_noreplace", rename)
    commit_save(place.root, place.table, [MirrorSpec(place.mirrors[0].url)], again)
    monkeypatch.undo()
    assert seen
    assert all(seen)
    assert place.has(again)
    finish_interrupted(place.root, place.table, place.mirrors)
    assert place.has(again)
    assert [save.save_id for save in place.table.saves()] == [again.save_id]


def test_a_rotation_waits_while_a_save_shows_its_names(place: MirroredRoot) -> None:
    """Its records may be broken: then the lock alone tells that the names are not what the rotation left."""
    old, held = interrupted(place, 200)
    for path, data in held.items():
        (place.root / path).write_bytes(data)
    with exclusive(place.root / NAMES_LOCK_NAME, timeout_s=5.0):
        thread = threading.Thread(target=finish_interrupted, args=(place.root, place.table, place.mirrors))
        thread.start()
        thread.join(0.5)
        assert all((place.root / path).exists() for path in held)
        again = replace(old, save_id=new_id(), save_number=old.save_number + 1)
        files.write_bytes(place.root / "meta_000200.json", meta_to_bytes(again), save_id=again.save_id)
    thread.join(60.0)
    assert place.has(again)


def test_a_rotation_takes_nothing_of_a_step_that_is_being_staged(place: MirroredRoot) -> None:
    _, held = interrupted(place, 200)
    for path, data in held.items():
        (place.root / path).write_bytes(data)
    with exclusive(place.root / names.CONTROL_DIR / "stage_000200.lock", timeout_s=5.0):
        assert finish_interrupted(place.root, place.table, place.mirrors) == []
        assert all((place.root / path).exists() for path in held)
    assert len(finish_interrupted(place.root, place.table, place.mirrors)) == 1


def test_a_rotation_keeps_a_save_while_its_step_is_being_staged(place: MirroredRoot) -> None:
    """The stage keeps what the save has on this disk and brings only the rest; it published a meta of missing files."""
    old, _ = two_saves(place)
    place.upload()
    lock = place.root / names.CONTROL_DIR / "stage_000100.lock"
    with exclusive(lock, timeout_s=5.0):
        assert place.rotate().refused == {old.save_id: "it is being staged into this directory"}
        assert place.has(old)
    assert place.rotate().deleted == ((100, old.save_id),)
    assert not lock.exists()


def test_a_rotation_needs_no_room_for_the_lock_of_a_stage(place: MirroredRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = two_saves(place)
    place.upload()
    real = rotate_module.exclusive

    def full(path: Path, **more: Any) -> AbstractContextManager[None]:
        if path.name.startswith("stage_"):
            raise LocalStorageFull(f"Cannot write {path}.")
        return real(path, **more)

    monkeypatch.setattr(rotate_module, "exclusive", full)
    assert place.rotate().deleted == ((100, old.save_id),)


def test_a_save_that_fails_takes_nothing_of_another_with_equal_bytes(place: MirroredRoot) -> None:
    first = place.commit(200)
    again = sealed_again(place, first, {a.path: (place.root / a.path).read_bytes() for a in first.artifacts})
    with pytest.raises(NameTaken):
        commit_save(place.root, place.table, [MirrorSpec(place.mirrors[0].url)], again)
    assert place.has(first)
    assert [save.save_id for save in place.table.saves()] == [first.save_id]


# -- what happens while the mirrors are asked ------------------------------------------------------------------


def while_asked(monkeypatch: pytest.MonkeyPatch, doomed: Meta, meanwhile: Callable[[], None]) -> None:
    """Let something happen after the mirrors said yes to a deletion, before it begins."""
    honest = rotate_module.why_not_safe
    done: list[bool] = []

    def ask(table: UploadsTable, mirrors: Sequence[Mirror], save_id: str, part: str | None = None) -> str | None:
        answer = honest(table, mirrors, save_id, part)
        if save_id == doomed.save_id and answer is None and not done:
            done.append(True)
            meanwhile()
        return answer

    monkeypatch.setattr(rotate_module, "why_not_safe", ask)


def removed_by_hand(place: MirroredRoot, meta: Meta) -> None:
    (place.root / names.SaveName(meta.step, meta.tag).meta).unlink()
    for name in top_names(meta.artifacts):
        path = place.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_i1_a_rotation_deletes_the_save_that_it_asked_about_and_no_other_under_its_names(
    place: MirroredRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = two_saves(place)
    place.upload()
    made: list[Meta] = []

    def meanwhile() -> None:
        removed_by_hand(place, old)
        made.append(place.commit(100, ("dcp", "model"), number=300))

    while_asked(monkeypatch, old, meanwhile)
    report = place.rotate()
    (new,) = made
    assert (new.tag, new.save_id == old.save_id) == ("", False)
    assert report.deleted == ()
    assert "another save" in report.refused[old.save_id]
    assert place.has(new)
    assert os.readlink(place.root / names.LATEST_NAME) == "dcp_000100"
    assert old.save_id not in {save.save_id for save in place.table.saves()}
    monkeypatch.undo()
    place.upload()
    assert place.rotate().deleted == ((100, new.save_id),)  # what was removed by hand is in nobody's way
    assert not list(place.root.glob("*000100*"))


def test_i1_a_rotation_takes_no_name_whose_meta_went_away(place: MirroredRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says then whose the files are; the next rotation compares their bytes."""
    old, _ = two_saves(place)
    place.upload()
    while_asked(monkeypatch, old, (place.root / "meta_000100.json").unlink)
    report = place.rotate()
    assert report.deleted == ()
    assert "disappeared" in report.refused[old.save_id]
    assert (place.root / "model_000100.pt").exists()
    monkeypatch.undo()
    place.rotate()
    assert not list(place.root.glob("*000100*"))


def test_a_file_of_a_save_that_is_gone_already_does_not_keep_the_rest(
    place: MirroredRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = two_saves(place)
    place.upload()
    while_asked(monkeypatch, old, (place.root / "model_000100.pt").unlink)
    assert place.rotate().deleted == ((100, old.save_id),)
    assert not list(place.root.glob("*000100*"))


def test_a_name_that_a_save_in_flight_claims_stays(place: MirroredRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = two_saves(place)
    place.upload()
    again = replace(old, save_id=new_id(), tag="", artifacts=old.artifacts[:1])
    while_asked(monkeypatch, old, lambda: place.add(again))
    assert place.rotate().deleted == ((100, old.save_id),)
    assert {path.name for path in place.root.glob("*000100*")} == set(top_names(again.artifacts))


def test_a_deletion_waits_while_a_save_shows_its_names(place: MirroredRoot) -> None:
    old, _ = two_saves(place)
    place.upload()
    with exclusive(place.root / NAMES_LOCK_NAME, timeout_s=5.0):
        thread = threading.Thread(target=place.rotate)
        thread.start()
        thread.join(0.5)
        assert place.has(old)
    thread.join(60.0)
    assert not place.has(old)


# -- a full disk -----------------------------------------------------------------------------------------------


def test_a_rotation_frees_the_disk_before_it_needs_room(place: MirroredRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = two_saves(place)
    place.upload()
    honest_forget, honest_link = place.table.forget_save, directories.replace_link

    def is_full() -> bool:
        return (place.root / "dcp_000100").exists() or bool(list((place.root / names.TRASH_DIR).iterdir()))

    def forget(save_id: str, *rest: str) -> None:
        if is_full():
            raise LocalStorageFull("no space for a change of uploads.db")
        honest_forget(save_id, *rest)

    def link(path: Path, target: str) -> None:
        if is_full():
            raise LocalStorageFull("no space for a link")
        honest_link(path, target)

    honest_link(place.root / names.LATEST_NAME, "dcp_000100")
    monkeypatch.setattr(place.table, "forget_save", forget)
    monkeypatch.setattr(directories, "replace_link", link)
    assert place.rotate().deleted == ((100, old.save_id),)
    assert os.readlink(place.root / names.LATEST_NAME) == "dcp_000200"
    assert place.table.records(save_id=old.save_id) == []


# -- emergency snapshots ---------------------------------------------------------------------------------------


def snapshot(place: MirroredRoot, step: int, attempt: Attempt = FIRST_ATTEMPT) -> Path:
    """An emergency snapshot of one rank as a trainer leaves it."""
    from tests.kit.training import new_state

    return save_emergency(
        place.root,
        new_state(),
        run_id=RUN_ID,
        attempt=attempt,
        number=step,
        step=step,
        ranks=SingleRank(),
        bus=place.bus,
    )


def test_an_emergency_snapshot_goes_with_its_note_once_a_newer_save_is_mirrored(place: MirroredRoot) -> None:
    place.commit(200)
    directory = snapshot(place, 250)
    notes = place.root / names.CONTROL_DIR
    assert list(notes.glob("emergency-*.json"))
    place.commit(300)
    assert place.rotate().deleted == ()
    place.upload()
    directories.replace_link(place.root / names.LATEST_NAME, directory.name)
    assert sorted(step for step, _ in place.rotate().deleted) == [200, 250]
    assert not directory.exists()
    assert not list(notes.glob("emergency-*.json"))
    assert not list((place.root / names.TRASH_DIR).iterdir())
    assert os.readlink(place.root / names.LATEST_NAME) == "model_000300.pt"


@pytest.mark.parametrize("loss", ["object", "meta", "mirror"])
def test_i1_an_emergency_snapshot_stays_where_the_mirror_does_not_show_the_newer_save(
    place: MirroredRoot, loss: str
) -> None:
    directory = snapshot(place, 250)
    place.commit(300)
    place.upload()
    if loss == "mirror":
        place.store.go_down()
    else:
        name = "model_000300.pt" if loss == "object" else "meta_000300.json"
        info = place.store.stat(name)
        assert info is not None
        place.store.delete(name, generation=info.generation)
    report = place.rotate()
    assert report.deleted == ()
    assert len(report.refused) == 1
    assert (directory / "rank0.pt").exists()


def test_i1_an_emergency_snapshot_that_somebody_added_to_stays(place: MirroredRoot) -> None:
    directory = snapshot(place, 250)
    (directory / "notes.txt").write_text("a person's")
    place.commit(300)
    place.upload()
    assert place.rotate().deleted == ()
    assert directory.exists()


def test_i1_an_emergency_snapshot_whose_successor_retention_removed_stays(place: MirroredRoot) -> None:
    directory = snapshot(place, 250)
    place.commit(300)
    newer = place.commit(300, ("dcp",), number=301)
    place.upload()
    for save in place.table.saves():
        place.table.remove(save.save_id, place.mirrors[0].url, "removed by retention")
    assert place.rotate().deleted == ()
    assert directory.exists()
    assert newer.step == 300


def test_the_notes_of_snapshots_that_are_gone_go_at_the_next_start(place: MirroredRoot) -> None:
    gone, kept = snapshot(place, 250), snapshot(place, 260)
    shutil.rmtree(gone)
    (place.root / names.CONTROL_DIR / "emergency-00000000.json").write_text("not ours")
    reconcile(place.root, place.table, place.mirrors)
    (note,) = (place.root / names.CONTROL_DIR).glob("emergency-*.json")
    assert read_note(note).directory == kept.name


def test_an_emergency_snapshot_is_durable_whatever_stands_in_the_way_of_latest(place: MirroredRoot) -> None:
    (place.root / names.LATEST_NAME).write_text("a person's")
    directory = snapshot(place, 250)
    assert [save.meta.step for save in read_inventory(place.root).saves] == [250]
    assert directory.is_dir()
    assert (place.root / names.LATEST_NAME).read_text() == "a person's"


# -- what cannot be renamed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_i1_a_rotation_that_the_disk_stops_half_way_puts_back_what_it_moved(place: MirroredRoot, at: int) -> None:
    old, _ = two_saves(place)
    place.upload()
    before = sorted(path.name for path in place.root.iterdir())
    with failing(DiskFault(at=at, code=errno.EIO, prefix="trash.rename")):
        report = place.rotate()
    assert report.deleted == ()
    assert "I/O error" in report.refused[old.save_id]
    assert sorted(path.name for path in place.root.iterdir()) == before
    assert place.has(old)
    assert place.rotate().deleted == ((100, old.save_id),)


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Mounts an overlay over a directory, which becomes its lower layer."""
    mounted: list[Path] = []

    def mount(place: Path) -> None:
        for name in ("upper", "work"):
            (tmp_path / name).mkdir()
        options = f"lowerdir={place},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this user may not mount an overlay")
        mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_i1_a_save_in_the_lower_layer_of_an_overlay_is_kept_and_rotation_says_why(
    tmp_path: Path, overlay: Callable[[Path], None]
) -> None:
    """A directory of the lower layer cannot be renamed (EXDEV), the meta can: it is back when rotation refuses."""
    root, url = tmp_path / "root", f"memory://{tmp_path.name}/run"
    saved_run(root, (1, 2), url)
    overlay(root)
    (old,) = [meta for meta in whole(root).values() if meta.step == 1]
    report = rotate_root(root, Retention(keep_last=1))
    assert report.deleted == ()
    assert "lower layers of an overlay" in report.refused[old.save_id]
    assert set(whole(root)) == {1, 2}


def test_what_an_overlay_keeps_from_being_replaced_is_once_the_command_of_the_hint_was_run(
    tmp_path: Path, overlay: Callable[[Path], None]
) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    (saved,) = saved_run(root, (1,), url)
    (meta,) = whole(root).values()
    flip_bit(root / meta.artifacts[0].path)
    overlay(root)
    with pytest.raises(LocalStorageUnwritable, match="lower layers of an overlay") as refused:
        stage_checkpoint_step(url, step=saved, dest=root, refresh=True, full=True)
    subprocess.run(refused.value.hint.partition(": ")[2], shell=True, check=True)
    assert stage_checkpoint_step(url, step=saved, dest=root, refresh=True, full=True).step == saved


def test_a_step_that_was_saved_again_with_equal_bytes_and_brought_back_is_deleted_here(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (1, 2), url, kinds=("model",))
    with CheckpointManager(root, [url], kinds=("model",)) as manager:
        state = new_state()
        manager.resume(state, policy=1)
        train(state, 1)
        manager.save(2, state).wait()
    shutil.rmtree(root)
    saved_run(root, (3,), url, kinds=("model",), retention=Retention(keep_last=9))
    (brought,) = (meta for meta in local_catalog(root).saves.values() if meta.step == 2)
    with open_known_table(root) as table:
        objects = {record.object for record in table.records(save_id=brought.save_id) if record.role == "artifact"}
    assert "model_000002.pt" in objects  # on a mirror without metadata, the other save's object is as good
    assert run("rotate", "--root", root, "--keep-last", "1").returncode == 0
    assert [meta.step for meta in local_catalog(root).saves.values()] == [3]


def test_the_reason_of_a_deletion_names_the_mirror_that_is_left_without_the_save(
    open_root: Callable[..., MirroredRoot],
) -> None:
    first, second = memory_url(), memory_url()
    place = open_root(first, second)
    old, _ = two_saves(place)
    place.table.skip(old.save_id, "no disk of this job has the rest", mirror=second)
    place.upload()
    assert place.rotate().deleted == ((100, old.save_id),)
    (reason,) = [event.reason for event in place.events if isinstance(event, events.SaveRotated)]
    assert reason == f"policy does not keep it; every other required mirror has it; {second} is left without it"


def test_a_rotation_of_a_start_without_room_leaves_what_it_is_about_to_continue_from(
    tmp_path: Path,
) -> None:
    place = MirroredRoot(tmp_path / "root", [f"file://{tmp_path}/mirror"])
    metas = [place.commit(step) for step in (100, 200, 300)]
    place.upload()
    assert place.rotate(in_use={metas[1].save_id}).deleted == ((100, metas[0].save_id),)
    assert place.has(metas[1])
    assert place.rotate().deleted == ((200, metas[1].save_id),)
    place.close()
