"""``persistent_dir``: the copy of an emergency snapshot on a disk that outlives the machine, and its way back."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmirror import CheckpointManager, Retention
from ckptmirror.cli._human_text import on_no_mirror
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.errors import (
    CkptMirrorError,
    ConfigError,
    DestinationOccupied,
    IntegrityError,
    LocalStorageFull,
    LocalStorageUnwritable,
    Temporary,
)
from ckptmirror.core.model import Digest, Meta
from ckptmirror.core.names import TRASH_DIR, emergency_meta_name
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.retention import rotation
from ckptmirror.flow.save import emergency, persistent_dir
from ckptmirror.flow.save.emergency import emergency_save_id
from ckptmirror.flow.save.persistent_dir import snapshots_in
from ckptmirror.flow.start import bring as bringing
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import read_status
from ckptmirror.local import files, trash
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import read_inventory
from tests.kit.cli import run as cli
from tests.kit.faults import DiskFault, failing, flip_bit, of_a_later_version
from tests.kit.processes import killed_at, run_ranks
from tests.kit.roots import leftovers
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


class Place:
    """A root, a mirror and a persistent directory."""

    def __init__(self, path: Path) -> None:
        self.root, self.kept, self.mirror = path / "root", path / "kept", f"file://{path}/mirror"

    def snapshot(self, step: int, *mirrors: str) -> tuple[Path, dict[str, Any]]:
        """Resume, train to ``step``, leave an emergency snapshot; return its directory and the state."""
        with running(self.root, *mirrors, persistent_dir=self.kept) as manager:
            state = new_state()
            start = manager.resume(state)
            train(state, step - (start.step if start is not None else 0))
            return manager.save_emergency_checkpoint(step, state), everything(state)

    def start(self, *mirrors: str) -> tuple[int, str, dict[str, Any]]:
        """Start again; return step, kind and state."""
        with running(self.root, *mirrors, persistent_dir=self.kept) as manager:
            state = new_state(seed=9)
            info = manager.resume(state)
            assert info is not None
            return info.step, info.kind, everything(state)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_snapshot_is_resumed_from_its_copy_where_the_disk_was_lost(place: Place) -> None:
    directory, left = place.snapshot(5)
    shutil.rmtree(place.root)
    step, kind, state = place.start()
    assert (step, kind) == (5, "emergency")
    assert same(state, left)
    assert (place.root / directory.name).is_dir()
    assert not list(place.kept.rglob("*.tmp"))


def test_a_copy_that_is_newer_than_all_on_the_mirror_is_resumed_and_goes_when_a_newer_save_is_safe(
    place: Place,
) -> None:
    saved_run(place.root, (3,), place.mirror)
    place.snapshot(5, place.mirror)
    shutil.rmtree(place.root)
    with CheckpointManager(
        place.root, [place.mirror], persistent_dir=place.kept, retention=Retention(keep_last=1)
    ) as manager:
        state = new_state()
        info = manager.resume(state)
        assert info is not None
        assert (info.step, info.kind) == (5, "emergency")
        assert list(snapshots_in(place.kept))
        train(state)
        manager.save(6, state).wait("mirrored")
        manager.rotate()
    assert not snapshots_in(place.kept)
    assert not list(place.kept.glob("emergency_*"))
    assert not list(place.root.glob("emergency_*"))


def test_a_copy_whose_snapshot_never_came_back_goes_too(place: Place) -> None:
    """The disk was lost, and the mirror has a newer save: nothing brings the snapshot back, and it fills no disk."""
    place.snapshot(5, place.mirror)
    saved_run(place.root, (6,), place.mirror)
    shutil.rmtree(place.root)
    saved_run(place.root, (7,), place.mirror, persistent_dir=place.kept)
    assert snapshots_in(place.kept)
    assert not list(place.root.glob("emergency_*"))
    saved_run(place.root, (8,), place.mirror, persistent_dir=place.kept, retention=Retention(keep_last=1))
    assert not snapshots_in(place.kept)


def test_a_copy_that_another_node_deletes_while_it_is_looked_at_keeps_nothing_here(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_look = rotation.why_not_ours

    def look(home: Path, meta: Meta) -> str | None:
        if home == place.kept:
            (found,) = place.kept.glob("emergency_*/rank0.pt")
            found.parent.rename(place.kept / "elsewhere")
        return really_look(home, meta)

    monkeypatch.setattr(rotation, "why_not_ours", look)
    place.snapshot(5, place.mirror)
    saved_run(place.root, (6,), place.mirror, persistent_dir=place.kept, retention=Retention(keep_last=1))
    assert not list(place.root.glob("emergency_*"))


def test_a_copy_stays_where_the_newer_save_is_on_no_mirror(place: Place) -> None:
    place.snapshot(5)
    saved_run(place.root, (6,), persistent_dir=place.kept, retention=Retention(keep_last=1))
    assert snapshots_in(place.kept)


@pytest.mark.parametrize("planted", ["root", "kept"])
def test_a_link_in_place_of_a_snapshots_directory_is_not_written_through(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, planted: str
) -> None:
    """Somebody reads the name in the note, and is faster."""
    elsewhere, note = tmp_path / "elsewhere", emergency.write_note
    elsewhere.mkdir()

    def write_note(root: Path, save_id: str, directory: str, persistent: Path | None) -> None:
        note(root, save_id, directory, persistent)
        (getattr(place, planted) / directory).symlink_to(elsewhere)

    monkeypatch.setattr(emergency, "write_note", write_note)
    directory, _ = place.snapshot(5)
    assert directory.parent == (place.kept if planted == "root" else place.root)
    assert (directory / "meta_rank0.json").is_file()
    assert "symbolic link" in caplog.text
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("planted", ["", "[]", '{"directory": "../x"}', '{"directory": "dcp_000005"}', "a pipe"])
def test_a_note_that_somebody_planted_costs_no_snapshot(
    place: Place, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    note = emergency.write_note

    def write_note(root: Path, save_id: str, directory: str, persistent: Path | None) -> None:
        path = emergency.note_path(root, save_id)
        os.mkfifo(path) if planted == "a pipe" else path.write_text(planted)
        note(root, save_id, directory, persistent)

    monkeypatch.setattr(emergency, "write_note", write_note)
    directory, left = place.snapshot(5)
    assert directory.parent == place.root
    monkeypatch.undo()
    step, _, state = place.start()
    assert step == 5
    assert same(state, left)


def test_a_persistent_directory_that_cannot_be_listed_stops_no_rotation(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    place.snapshot(5, place.mirror)
    with running(place.root, place.mirror, retention=Retention(keep_last=1), persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        shutil.rmtree(place.kept)
        place.kept.write_text("no directory any more")
        manager.save(6, state).wait("mirrored")
        manager.rotate(30.0)
        assert [save.meta.step for save in read_inventory(place.root).saves] == [6]


def test_a_snapshot_of_which_the_rest_came_back_after_the_start_stays(tmp_path: Path) -> None:
    """The start found a part, since the mount was late; a person may still continue from the whole."""
    saved_run(tmp_path / "root", (3,))
    run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    root, kept, away = (tmp_path / name for name in ("root", "kept", "away"))
    for gone in root.glob("emergency_*/*rank1*"):
        gone.unlink()
    kept.rename(away)
    kept.mkdir()
    with running(root, f"file://{tmp_path}/mirror", retention=Retention(keep_last=1), persistent_dir=kept) as manager:
        state = new_state()
        assert manager.resume(state).step == 3  # type: ignore[union-attr]
        for path in away.iterdir():
            path.rename(kept / path.name)
        manager.save(6, state).wait("mirrored")
        refused = manager.rotate(30.0).refused  # type: ignore[union-attr]
    assert any("now all are here" in why for why in refused.values())
    assert (len(list(root.glob("emergency_*"))), len(list(kept.glob("emergency_*/meta_*")))) == (1, 2)


def test_a_directory_that_holds_another_snapshot_too_is_not_deleted(place: Place) -> None:
    """Two runs that share a directory may stop at the same step in the same second."""
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    path = place.kept / directory.name / "meta_rank0.json"
    meta = meta_from_bytes(path.read_bytes())
    (artifact,) = (one for one in meta.artifacts if one.path.endswith(".pt"))
    foreign = replace(artifact, path=artifact.path.replace("rank0", "rank1"), rank=1)
    of_another = replace(meta, save_id="f" * 32, run_id="e" * 32, world_size=2, artifacts=(foreign,))
    path.with_name("meta_rank1.json").write_bytes(meta_to_bytes(of_another))
    shutil.copy(place.kept / artifact.path, place.kept / foreign.path)
    with running(place.root, place.mirror, retention=Retention(keep_last=1), persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(6, state).wait("mirrored")
        refused = manager.rotate(30.0).refused  # type: ignore[union-attr]
    assert any("belongs to another snapshot" in why for why in refused.values())
    assert (place.kept / foreign.path).exists()


def test_a_copy_is_not_rotated_through_a_link(place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place.snapshot(5, place.mirror)
    shutil.rmtree(place.kept / ".ckptmirror", ignore_errors=True)
    (place.kept / ".ckptmirror").symlink_to(tmp_path / "elsewhere")
    saved_run(place.root, (6, 7), place.mirror, persistent_dir=place.kept, retention=Retention(keep_last=1))
    assert snapshots_in(place.kept)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_bits_that_rotted_on_this_disk_come_back_from_the_copy(place: Place) -> None:
    saved_run(place.root, (3,))
    directory, left = place.snapshot(5)
    flip_bit(directory / "rank0.pt")
    step, kind, state = place.start()
    assert (step, kind) == (5, "emergency")
    assert same(state, left)


def test_a_snapshot_of_which_a_file_is_gone_comes_back_whole(place: Place) -> None:
    directory, left = place.snapshot(5)
    (directory / "meta_rank0.json").unlink()
    step, _, state = place.start()
    assert step == 5
    assert same(state, left)


def test_i9_a_copy_with_a_flipped_bit_is_passed_over_and_said(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    flip_bit(place.kept / directory.name / "rank0.pt")
    shutil.rmtree(place.root)
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state())
    assert info is not None
    assert (info.step, info.kind) == (3, "dcp")
    assert "crc32c" in next(line for line in info.passed_over if line.startswith("step 5"))
    assert any("skipped step 5" in record.message for record in caplog.records)


def test_of_two_copies_the_newer_comes_back_and_the_older_where_it_is_broken(place: Place) -> None:
    place.snapshot(5)
    newest, _ = place.snapshot(7)
    shutil.rmtree(place.root)
    assert place.start()[0] == 7
    shutil.rmtree(place.root)
    flip_bit(place.kept / newest.name / "rank0.pt")
    assert place.start()[0] == 5


def test_a_start_follows_the_lineage_and_not_the_newest_copy(place: Place) -> None:
    """A person went back from 9 to 5; then the disk was lost: 9 stays superseded."""
    saved_run(place.root, (3,), place.mirror)
    place.snapshot(5, place.mirror)
    place.snapshot(9, place.mirror)
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        assert manager.resume(new_state(), policy=5) is not None
    assert place.start(place.mirror)[0] == 5
    shutil.rmtree(place.root)
    assert place.start(place.mirror)[0] == 5
    assert not list(place.root.glob("emergency_step_000009_*"))


def test_superseded_saves_on_this_disk_do_not_hide_the_copy(place: Place) -> None:
    saved_run(place.root, (3,))
    directory, _ = place.snapshot(5)
    saved_run(place.root, (6, 7))
    with running(place.root, persistent_dir=place.kept) as manager:
        assert manager.resume(new_state(), policy=5) is not None
    flip_bit(directory / "rank0.pt")
    assert place.start()[:2] == (5, "emergency")
    shutil.rmtree(directory)
    assert place.start()[:2] == (5, "emergency")


def test_a_newer_save_that_has_rotted_does_not_hide_the_copy(place: Place) -> None:
    saved_run(place.root, (3,))
    directory, _ = place.snapshot(5)
    saved_run(place.root, (6,))
    shutil.rmtree(directory)
    for file in (place.root / "model_000006.pt", place.root / "dcp_000006/__0_0.distcp"):
        flip_bit(file)
    assert place.start()[:2] == (5, "emergency")


def test_a_copy_is_resumed_from_by_its_step(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    place.snapshot(5, place.mirror)
    place.snapshot(9, place.mirror)
    shutil.rmtree(place.root)
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state(), policy=5)
    assert info is not None
    assert (info.step, info.kind, info.place) == (5, "emergency", str(place.kept))


def test_a_strangers_file_in_a_broken_snapshot_is_not_deleted_and_nothing_older_is_taken(place: Place) -> None:
    saved_run(place.root, (3,))
    directory, _ = place.snapshot(5)
    flip_bit(directory / "rank0.pt")
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(DestinationOccupied, match=r"notes\.txt"):
        place.start()
    assert (directory / "notes.txt").read_text() == "mine"
    (directory / "notes.txt").rename(place.root.with_name("notes.txt"))
    assert place.start()[:2] == (5, "emergency")


def test_another_snapshot_of_the_same_name_is_not_replaced(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emergency, "_utc_second", lambda: "20260102T030405Z")  # both within one second
    directory, _ = place.snapshot(5)
    other = Place(tmp_path / "other")
    other.snapshot(5)
    (meta,) = snapshots_in(other.kept).values()
    flip_bit(directory / "rank0.pt")
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(DestinationOccupied, match="belongs to another snapshot"):
        persistent_dir.bring_snapshot(place.root, other.kept, meta)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_an_old_snapshot_that_cannot_be_read_keeps_no_start(place: Place) -> None:
    directory, _ = place.snapshot(5)
    saved_run(place.root, (6,), place.mirror)
    meta = place.kept / directory.name / "meta_rank0.json"
    meta.write_bytes(of_a_later_version(meta.read_bytes()))
    assert place.start(place.mirror)[0] == 6


def test_a_person_may_go_back_past_a_copy_that_cannot_be_read(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    meta = place.kept / directory.name / "meta_rank0.json"
    meta.write_bytes(of_a_later_version(meta.read_bytes()))
    shutil.rmtree(place.root)
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state(), policy=3)
    assert info is not None
    assert info.step == 3


def test_a_copy_that_was_cut_short_before_any_meta_is_said(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    (place.kept / directory.name / "meta_rank0.json").unlink()
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state())
    assert info is not None
    assert (info.step, info.passed_over) == (5, ())
    shutil.rmtree(place.root)
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state())
    assert info is not None
    assert info.step == 3
    assert any("step 5" in line and "copy was not finished" in line for line in info.passed_over)


def test_a_meta_that_names_no_files_is_no_snapshot(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    path = place.kept / directory.name / "meta_rank0.json"
    path.write_bytes(meta_to_bytes(replace(meta_from_bytes(path.read_bytes()), artifacts=())))
    shutil.rmtree(place.root)
    assert place.start(place.mirror)[0] == 3


def test_a_disk_without_room_is_rotated_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.snapshot(5, place.mirror)
    shutil.rmtree(place.root)
    rotated: list[set[str]] = []
    bring = persistent_dir.bring_snapshot

    def bring_once_there_is_room(*given: Any) -> None:
        if not rotated:
            raise LocalStorageFull("no room")
        bring(*given)

    def rotate(_: Node, in_use: set[str]) -> Any:
        rotated.append(in_use)
        return SimpleNamespace(deleted=((1, "a save"),))

    monkeypatch.setattr(bringing, "bring_snapshot", bring_once_there_is_room)
    monkeypatch.setattr(Node, "rotate", rotate)
    assert place.start(place.mirror)[0] == 5
    (meta,) = snapshots_in(place.kept).values()
    assert rotated == [{meta.save_id}]


def test_a_directory_that_was_not_there_any_more_is_said(place: Place) -> None:
    """A file system that is not mounted, for example."""
    saved_run(place.root, (3,), place.mirror)
    place.snapshot(5, place.mirror)
    shutil.rmtree(place.root)
    place.kept.rename(place.kept.with_name("elsewhere"))
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state())
    assert info is not None
    assert info.step == 3
    assert any("is a mount missing?" in line for line in info.passed_over)


def test_nothing_comes_back_where_this_disk_has_something_newer(place: Place) -> None:
    directory, _ = place.snapshot(5)
    saved_run(place.root, (6,))
    shutil.rmtree(directory)
    step, kind, _ = place.start()
    assert (step, kind) == (6, "dcp")
    assert not directory.exists()


def test_what_cannot_be_read_now_is_an_error_and_no_older_save(place: Place) -> None:
    """A later version wrote it, say: it may be the newest state of the run."""
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    shutil.rmtree(place.root)
    meta = place.kept / directory.name / "meta_rank0.json"
    whole = meta.read_bytes()
    meta.write_bytes(of_a_later_version(whole))
    with pytest.raises(Temporary, match="cannot be read now"):
        place.start(place.mirror)
    meta.write_bytes(whole)
    assert place.start(place.mirror)[0] == 5


@pytest.mark.parametrize("has_disk", [True, False])
def test_a_snapshot_of_another_run_is_left_alone(
    place: Place, caplog: pytest.LogCaptureFixture, has_disk: bool
) -> None:
    place.snapshot(5)
    place.root = place.root.with_name("another")
    saved_run(place.root, (2,), place.mirror)
    if not has_disk:
        shutil.rmtree(place.root)
    assert place.start(place.mirror)[0] == 2
    assert "snapshots of another run" in caplog.text
    assert snapshots_in(place.kept)
    assert not list(place.root.glob("emergency_*"))


def test_a_run_that_has_saved_nothing_yet_takes_no_snapshot_of_another(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.snapshot(5)
    place.root = place.root.with_name("another")
    saved_run(place.root, (), place.mirror)  # it has an id since
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        assert manager.resume(new_state()) is None
    assert "snapshots of another run" in caplog.text


def test_i8_a_persistent_directory_that_fails_takes_nothing_from_the_snapshot(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with running(place.root, persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        place.kept.rmdir()
        place.kept.write_text("in the way")
        manager.save_emergency_checkpoint(5, state)
    assert [save.meta.step for save in read_inventory(place.root).saves] == [5]
    assert any("only on this disk" in r.message and r.levelno == logging.ERROR for r in caplog.records)
    assert read_status(place.root).emergency_copy is None


@pytest.mark.parametrize("planted", ["too deep to delete", "a link in place of the trash"])
def test_a_snapshot_goes_to_the_persistent_directory_whatever_is_in_the_trash_of_a_full_disk(
    planted: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_bytes

    def full(path: Path, data: bytes, **given: Any) -> None:
        if path.name == emergency_meta_name(0) and path.is_relative_to(place.root):
            raise LocalStorageFull("Cannot write: no space is left.")
        write(path, data, **given)

    with running(place.root, persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        train(state, 5)
        trash = place.root / TRASH_DIR
        if planted == "too deep to delete":
            trash.joinpath("planted", *["d"] * 70).mkdir(parents=True)
        else:
            trash.rmdir()
            (tmp_path / "home").mkdir()
            trash.symlink_to(tmp_path / "home")
        monkeypatch.setattr(files, "write_bytes", full)
        directory = manager.save_emergency_checkpoint(5, state)
    assert directory.parent == place.kept
    assert [meta.step for meta in snapshots_in(place.kept).values()] == [5]


FAILURES = [
    LocalStorageFull("Cannot write: no space is left."),
    LocalStorageUnwritable("Cannot write: the file system is mounted read-only."),
    IntegrityError("Cannot write: the device reported an I/O error."),
]
NO_FILE, NO_DIRECTORY, NO_NOTE = "write_bytes", "make_own_dir", "write_note"  # where a disk fails, from the last change


def fail_below(root: Path, at: str, error: CkptMirrorError, set_to: Callable[[Any, str, Any], None]) -> None:
    """Let every change of the root fail that a snapshot makes before ``at``, and ``at`` itself."""
    module: Any = files if at == NO_FILE else emergency
    real = getattr(module, at)

    def fails(path: Path, *args: Any, **given: Any) -> Any:
        if path.is_relative_to(root) and (at != NO_FILE or path.name.startswith("meta_rank")):
            raise error
        return real(path, *args, **given)

    set_to(module, at, fails)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", [(NO_FILE,), (NO_DIRECTORY,), (NO_DIRECTORY, NO_NOTE)], ids=lambda at: at[-1])
def test_a_snapshot_that_this_disk_does_not_take_is_resumed_from_the_persistent_directory(
    at: tuple[str, ...], error: CkptMirrorError, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place.root, persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        train(state, 5)
        for change in at:
            fail_below(place.root, change, error, monkeypatch.setattr)
        assert manager.save_emergency_checkpoint(5, state).parent == place.kept
        left = everything(state)
    monkeypatch.undo()
    place.root = tmp_path / "another disk"
    step, kind, found = place.start()
    assert (step, kind) == (5, "emergency")
    assert same(found, left)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_disk_that_fails_without_a_persistent_directory_is_an_error(
    error: CkptMirrorError, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(place.root) as manager:
        state = new_state()
        manager.resume(state)
        fail_below(place.root, NO_FILE, error, monkeypatch.setattr)
        with pytest.raises(type(error), match=str(error.message)):
            manager.save_emergency_checkpoint(5, state)
    assert list(place.root.glob("emergency_*")) == []


def leave_snapshot(rank: int, base: str, at: tuple[str, ...], planted: str) -> str:
    """One rank of two leaves its part of a snapshot on a disk that fails."""
    place = Place(Path(base))
    with running(place.root, persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        train(state, 5)
        for change in at:
            fail_below(place.root, change, FAILURES[1], setattr)
        if planted and rank == 0:
            save_id = emergency_save_id(manager._started().attempt, 1, 5)
            emergency.note_path(place.root, save_id).write_text(planted)
        manager.ranks.exchange(None, what="both are ready")
        return str(manager.save_emergency_checkpoint(5, state).relative_to(base))


def resume_snapshot(rank: int, base: str) -> tuple[int, str]:
    """Start again, without the disk if it failed."""
    place = Place(Path(base))
    root = place.root if list(place.root.glob("emergency_*/meta_rank*")) else place.root.with_name("another disk")
    with running(root, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state())
        return (info.step, info.kind) if info is not None else (0, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "planted", "home"),
    [((NO_NOTE,), "", "root"), ((NO_DIRECTORY, NO_NOTE), "", "kept"), ((), "[]", "root")],
    ids=["no room for the note", "read-only", "a planted note"],
)
def test_ranks_that_cannot_note_a_name_leave_one_snapshot(
    at: tuple[str, ...], planted: str, home: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, leave_snapshot, str(tmp_path), at, planted)
    assert first == second
    assert Path(first).parent == Path(home)
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(5, "emergency")] * 2


def bring_part(base: str) -> None:
    """Mend rank 0's part from the copy, as the node of rank 0 does."""
    (meta,) = snapshots_in(Path(base) / "kept").values()
    persistent_dir.bring_snapshot(Path(base) / "root", Path(base) / "kept", meta, [0])


def test_i12_a_part_that_is_whole_on_this_disk_alone_is_there_whenever_the_start_that_mends_another_dies(
    tmp_path: Path,
) -> None:
    """The copy of rank 1's part is damaged, and rank 0's on the disk."""
    first, _ = run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    place, name = Place(tmp_path), Path(first).name
    flip_bit(place.root / name / "rank0.pt")
    flip_bit(place.kept / name / "rank1.pt")
    shutil.copytree(place.root / name, tmp_path / "before")
    whole = (place.root / name / "rank1.pt").read_bytes()
    died = 0
    while killed_at(str(died + 1), bring_part, str(tmp_path)):
        died += 1
        assert (place.root / name / "rank1.pt").read_bytes() == whole
        empty_trash(place.root)
        if died % 5 == 0:
            assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(5, "emergency")] * 2, died
        shutil.rmtree(place.root / name)
        shutil.copytree(tmp_path / "before", place.root / name)
    assert died > 4
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(5, "emergency")] * 2


def cannot_be_read(monkeypatch: pytest.MonkeyPatch, failing: Path) -> None:
    def verify(path: Path, digest: Digest) -> None:
        if path == failing:
            raise IntegrityError(f"{path} cannot be read.") from OSError(errno.EIO, os.strerror(errno.EIO))
        verify_file(path, digest)

    monkeypatch.setattr(persistent_dir, "verify_file", verify)


@pytest.mark.parametrize("wanted", [[0], [0, 1]])
def test_i12_a_part_that_cannot_be_read_now_stays_while_another_comes_back(
    wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's part is in the persistent directory alone, and rank 1's on the disk alone, or there damaged."""
    first, _ = run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    place, name = Place(tmp_path), Path(first).name
    (place.root / name / "rank0.pt").unlink()
    flip_bit(place.kept / name / "rank1.pt")
    whole = (place.root / name / "rank1.pt").read_bytes()
    (meta,) = snapshots_in(place.kept).values()
    with monkeypatch.context() as patched:
        cannot_be_read(patched, place.root / name / "rank1.pt")
        if wanted == [0]:
            persistent_dir.bring_snapshot(place.root, place.kept, meta, wanted)
        else:
            with pytest.raises(Temporary, match=r"rank1\.pt cannot be read now"):
                persistent_dir.bring_snapshot(place.root, place.kept, meta, wanted)
    assert (place.root / name / "rank1.pt").read_bytes() == whole
    assert leftovers(place.root) == []
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(5, "emergency")] * 2


def test_i12_a_damaged_part_for_which_none_is_brought_stays(tmp_path: Path) -> None:
    first, _ = run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    place, name = Place(tmp_path), Path(first).name
    (place.root / name / "rank0.pt").unlink()
    flip_bit(place.root / name / "rank1.pt")
    (meta,) = snapshots_in(place.kept).values()
    persistent_dir.bring_snapshot(place.root, place.kept, meta, [0])
    assert {path.name for path in (place.root / name).glob("*.pt")} == {"rank0.pt", "rank1.pt"}


def test_a_rank_gets_back_its_meta_from_the_place_that_has_it_good(tmp_path: Path) -> None:
    """Rank 0's file is damaged on the disk, its meta in the persistent directory, and rank 1's part is there alone."""
    first, _ = run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    place, name = Place(tmp_path), Path(first).name
    flip_bit(place.root / name / "rank0.pt")
    flip_bit(place.kept / name / "meta_rank0.json")
    good = (place.root / name / "meta_rank0.json").read_bytes()
    for gone in (place.root / name).glob("*rank1*"):
        gone.unlink()
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(5, "emergency")] * 2
    assert (place.root / name / "meta_rank0.json").read_bytes() == good
    shutil.rmtree(place.kept)
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(5, "emergency")] * 2


def test_what_came_of_a_damaged_copy_takes_no_room(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    directory, _ = place.snapshot(5, place.mirror)
    flip_bit(place.kept / directory.name / "rank0.pt")
    shutil.rmtree(directory)
    with running(place.root, place.mirror, persistent_dir=place.kept) as manager:
        info = manager.resume(new_state())
        assert list(place.root.glob("emergency_*")) == []
    assert info is not None
    assert info.step == 3
    assert not any("is whole and superseded" in line for line in info.passed_over)


def test_a_rotation_finishes_what_a_kill_left_of_a_deletion_in_the_persistent_directory(place: Place) -> None:
    directory, _ = place.snapshot(5, place.mirror)
    trashed = trash.move_to_trash(place.kept, place.kept / directory.name)
    with running(place.root, place.mirror, retention=Retention(keep_last=1), persistent_dir=place.kept) as manager:
        manager.resume(new_state())
        manager.rotate(30.0)
    assert not trashed.exists()


def test_parts_under_two_names_are_passed_over(tmp_path: Path) -> None:
    """A rank that found no room for the agreed name wrote under its own, elsewhere."""
    saved_run(tmp_path / "root", (3,))
    first, _ = run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    place, name = Place(tmp_path), Path(first).name
    for gone in (*(place.root / name).glob("*rank1*"), *(place.kept / name).glob("*rank0*")):
        gone.unlink()
    (path,) = (place.kept / name).glob("meta_rank1.json")
    other, meta = "emergency_step_000005_19700101T000000Z", meta_from_bytes(path.read_bytes())
    moved = [replace(one, path=one.path.replace(name, other)) for one in meta.artifacts]
    path.write_bytes(meta_to_bytes(replace(meta, artifacts=tuple(moved))))
    (place.kept / name).rename(place.kept / other)
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(3, "dcp")] * 2


def test_a_second_call_for_one_step_changes_nothing_and_blames_no_copy(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with running(place.root, persistent_dir=place.kept) as manager:
        state = new_state()
        manager.resume(state)
        first = manager.save_emergency_checkpoint(5, state)
        assert manager.save_emergency_checkpoint(5, state) == first
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert len(snapshots_in(place.kept)) == 1


def save_at_the_second_try(rank: int, base: str, goes_on: bool) -> str:
    """Rank 0 finds the disk full, makes room, and calls again; then training may go on."""
    with running(Path(base) / "root") as manager:
        state = new_state()
        manager.resume(state)
        train(state, 5)
        if rank == 0:
            with failing(DiskFault(at=2, lasting=True, prefix="file.create")), pytest.raises(LocalStorageFull):
                manager.save_emergency_checkpoint(5, state)
        path = manager.save_emergency_checkpoint(5, state)
        assert manager.save_emergency_checkpoint(5, state) == path
        manager.ranks.exchange(None, what="both have a part")
        if goes_on:
            train(state)
            manager.save(6, state).wait()
            assert manager.save_emergency_checkpoint(6, state) != path
        return str(path)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_tries_again_makes_its_part_of_the_same_snapshot(tmp_path: Path, goes_on: bool) -> None:
    first, second = run_ranks(2, save_at_the_second_try, str(tmp_path), goes_on)
    assert first == second
    assert run_ranks(2, resume_snapshot, str(tmp_path)) == [(6 if goes_on else 5, "emergency")] * 2


def test_a_snapshot_without_which_the_run_went_on_elsewhere_is_not_the_newest_state(tmp_path: Path) -> None:
    """Another machine took the run on from the mirror; this one learns it from the mirror, or from its next start."""
    root, other, url = tmp_path / "root", tmp_path / "other", f"file://{tmp_path}/mirror"
    saved_run(root, (2, 4), url)
    with running(root, url) as manager:
        state = new_state()
        manager.resume(state)
        manager.save_emergency_checkpoint(5, state)
    assert read_status(root).emergency_step == 5
    saved_run(other, (6, 8), url)
    assert read_status(root).emergency_step == 5  # it asks no mirror
    now = read_status(root, mirrors=[url])
    assert (now.emergency_step, now.newest_step) == (None, 4)
    assert drain(root).emergency_step is None
    with running(root, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 8
        manager.close()
    assert read_status(root).emergency_step is None
    assert cli("status", "--root", root, "--exit-code").returncode == 0


@pytest.mark.parametrize("inside", ["root/kept", "."])
def test_a_persistent_directory_that_goes_with_the_root_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(ConfigError, match="are the same directory, or one is inside the other"):
        CheckpointManager(tmp_path / "root", persistent_dir=tmp_path / inside)


def test_a_start_without_room_for_the_snapshot_says_so_and_the_next_has_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, left = place.snapshot(5)
    shutil.rmtree(place.root)
    bring = persistent_dir.bring_snapshot

    def bring_to_a_full_disk(*given: Any) -> None:
        with failing(DiskFault(at=2, lasting=True, prefix="file.create")):
            bring(*given)

    state = new_state(seed=9)
    with running(place.root, persistent_dir=place.kept) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(bringing, "bring_snapshot", bring_to_a_full_disk)
            with pytest.raises(LocalStorageFull):
                manager.resume(state)
        assert manager.resume(state) is not None  # the same manager: nothing of the first try is in its way
        assert same(everything(state), left)
    assert directory.is_dir()


def test_status_and_drain_say_that_the_newest_state_is_in_the_persistent_directory_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk was full when the snapshot was taken."""
    saved_run(place.root, (3,), place.mirror)
    make = emergency.make_own_dir

    def no_room(directory: Path) -> None:
        if directory.parent == place.root:
            raise LocalStorageFull("no space is left")
        make(directory)

    monkeypatch.setattr(emergency, "make_own_dir", no_room)
    directory, _ = place.snapshot(5, place.mirror)
    monkeypatch.undo()
    assert directory.parent == place.kept
    assert f"snapshot of rank 0 is in {place.kept}, and on no mirror" in caplog.text
    status = cli("status", "--root", place.root)
    assert f"step 5, is an emergency snapshot only in {place.kept}; a start with that persistent_dir" in status.stdout
    assert "newest step 5, newest safe step 3" in " ".join(status.stdout.split())
    facts = json.loads(cli("status", "--root", place.root, "--json").stdout)
    assert (facts["emergency_step"], facts["emergency_copy"], facts["emergency_here"]) == (5, str(place.kept), False)
    assert f"only in {place.kept}" in cli("drain", "--root", place.root).stderr
    assert place.start(place.mirror)[:2] == (5, "emergency")


@pytest.mark.parametrize(
    ("lacks", "is_lost"),
    [("root/*rank0* kept/*rank1*", False), ("root/*rank1* kept/*", True), ("root/* kept/*rank0*", True)],
)
def test_a_snapshot_that_no_place_has_whole_is_never_called_safe_nor_the_newest_state_where_it_is_lost(
    lacks: str, is_lost: bool, tmp_path: Path
) -> None:
    """The ranks of one node have no other places."""
    run_ranks(2, leave_snapshot, str(tmp_path), (), "")
    root = tmp_path / "root"
    for place, _, names in (one.partition("/") for one in lacks.split()):
        for gone in tmp_path.glob(f"{place}/emergency_*/{names}"):
            gone.unlink()
    found = read_status(root)
    assert (found.emergency_step, found.emergency_copy) == (None if is_lost else 5, None)
    assert found.emergency_whole == is_lost
    part = "of which this disk has a part; a start that finds the other ranks' parts continues from it"
    assert is_lost or part in on_no_mirror(5, found.emergency_copy, found.emergency_here, found.emergency_whole)
    if list(root.glob("emergency_*/meta*")):
        checked = cli("verify", root)
        assert checked.returncode == (6 if is_lost else 0)
        assert "1 of 2 ranks left nothing of it here" in checked.stdout + checked.stderr


def test_status_and_drain_say_where_the_copy_is(place: Place) -> None:
    saved_run(place.root, (3,), place.mirror)
    place.snapshot(5, place.mirror)
    status = cli("status", "--root", place.root)
    assert f"an emergency snapshot on this disk and in {place.kept}" in status.stdout
    assert status.stdout.startswith("NOT SAFE: "), "it is the same disk"
    facts = json.loads(cli("status", "--root", place.root, "--json").stdout)
    assert (facts["emergency_step"], facts["emergency_copy"]) == (5, str(place.kept))
    assert f"in {place.kept}" in cli("drain", "--root", place.root).stderr
    shutil.rmtree(place.kept)
    assert cli("status", "--root", place.root).stdout.startswith("NOT SAFE: the newest state, step 5")


def test_a_start_where_nothing_is_mounted_makes_no_directory_that_hides_it_from_the_mirror_beside(
    tmp_path: Path,
) -> None:
    nfs = tmp_path / "nfs"
    nfs.mkdir()
    saved_run(tmp_path / "one", (1, 2), f"file://{nfs}/run-17")
    nfs.rename(tmp_path / "away")
    with (
        pytest.raises(ConfigError, match=r"cannot be created: there is no .*/nfs") as refused,
        CheckpointManager(tmp_path / "two", [f"file://{nfs}/run-17"], persistent_dir=nfs / "snapshots") as manager,
    ):
        manager.resume(new_state())
    assert "Mount its file system" in refused.value.hint
    assert not nfs.exists()
