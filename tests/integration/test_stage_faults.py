"""Staging that is interrupted, broken, in the way, hostile, or asked for by many processes at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    DestinationOccupied,
    IntegrityError,
    LocalStorageFull,
    LocalStorageUnwritable,
    StoreTemporary,
)
from ckptmirror.flow.fetch import blocks, staging
from ckptmirror.flow.fetch.stage import stage_checkpoint_step, stage_save
from ckptmirror.flow.fetch.stage_progress import StageProgress
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.resolve import find_local_checkpoint_steps
from ckptmirror.local.trash import move_to_trash
from ckptmirror.stores import open_store
from tests.kit.faults import flip_bit
from tests.kit.mirrors import SpyStore, nothing
from tests.kit.roots import MIB, Place, names_in, whole_saves
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts, put_on_mirror


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- interrupted and broken downloads ------------------------------------------------------------------------


def test_an_interrupted_stage_continues_and_fetches_no_verified_block_again(place: Place) -> None:
    size = 40 * MIB + 5
    place.save(200, ("model",), sizes={"model_000200.pt": size})
    served = iter(range(3))

    def fail_after_three(name: str, offset: int) -> None:
        if next(served, None) is None:
            raise StoreTemporary("gone")

    place.spy.before = fail_after_three
    with pytest.raises(StoreTemporary):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert find_local_checkpoint_steps(place.dest) == []
    assert all(names.is_tmp_name(name) for name in names_in(place.dest))
    place.spy.before = nothing
    place.spy.downloads.clear()
    seen: list[StageProgress] = []
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, on_progress=seen.append)
    whole_saves(place.dest)
    assert place.spy.downloaded_bytes == size - 3 * blocks.RANGE_BYTES
    assert (seen[-1].kept_bytes, seen[-1].total_bytes) == (3 * blocks.RANGE_BYTES, size)


def test_a_block_that_rotted_in_the_temporary_is_fetched_again(place: Place) -> None:
    place.save(200, ("model",), sizes={"model_000200.pt": 24 * MIB})

    def fail_at_the_last_block(name: str, offset: int) -> None:
        if offset == 16 * MIB:
            raise StoreTemporary("gone")

    place.spy.before = fail_at_the_last_block
    with pytest.raises(StoreTemporary):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    (tmp,) = place.dest.glob("*.tmp")
    flip_bit(tmp, 3)
    place.spy.before = nothing
    place.spy.downloads.clear()
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    whole_saves(place.dest)
    assert ("model_000200.pt", 0, 8 * MIB) in place.spy.downloads


def test_a_keyboard_interrupt_leaves_only_temporaries(place: Place) -> None:
    place.save(200, ("dcp",), ranks=8)
    calls = iter(range(4))
    interrupted = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def on_interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def interrupt(name: str, offset: int) -> None:
        if next(calls, None) is None and not interrupted.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            assert interrupted.wait(30)

    place.spy.before = interrupt
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    finally:
        signal.signal(signal.SIGINT, previous)
    for thread in threading.enumerate():
        if thread.name.startswith("ckptmirror-blocks") and thread.is_alive():  # left behind, where the disk is slow
            thread.join(60)
    assert all(names.is_tmp_name(name) for name in names_in(place.dest))
    place.spy.before = nothing
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert names_in(place.dest) == ["dcp_000200", "meta_000200.json"]
    whole_saves(place.dest)


def test_a_corrupt_block_is_asked_for_again(place: Place) -> None:
    place.save(200, ("model",))
    times = iter(range(2))

    def corrupt(name: str, offset: int, buffer: memoryview) -> None:
        if next(times, None) is not None:
            buffer[0] ^= 1

    place.spy.after = corrupt
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert len(place.spy.downloads) == 3
    whole_saves(place.dest)


def test_a_mirror_that_keeps_sending_other_bytes_is_an_integrity_error(place: Place) -> None:
    place.save(200, ("model",))

    def corrupt(name: str, offset: int, buffer: memoryview) -> None:
        buffer[0] ^= 1

    place.spy.after = corrupt
    with pytest.raises(IntegrityError, match="block 0") as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert raised.value.exit_code == 6
    assert find_local_checkpoint_steps(place.dest) == []


def test_an_object_replaced_meanwhile_is_never_mixed_in(place: Place) -> None:
    place.save(200, ("model",), sizes={"model_000200.pt": 12 * MIB})
    replaced = threading.Event()

    def wait_for_it(name: str, offset: int) -> None:
        assert offset == 0 or replaced.wait(60), name

    def replace_it(name: str, offset: int, buffer: memoryview) -> None:
        if offset == 0 and name == "model_000200.pt":
            info = place.spy._store.stat(name)
            assert info is not None
            place.spy._store.delete(name, generation=info.generation)
            replaced.set()

    place.spy.before, place.spy.after = wait_for_it, replace_it
    with pytest.raises(CheckpointNotFound) as raised:
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert raised.value.exit_code == 3
    assert find_local_checkpoint_steps(place.dest) == []


# -- the destination -----------------------------------------------------------------------------------------


def test_a_destination_that_is_a_file_is_refused(place: Place) -> None:
    place.save()
    place.dest.write_text("a file")
    with pytest.raises(LocalStorageUnwritable):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)


def test_a_destination_without_room_is_refused_before_the_download(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.save()
    real = os.statvfs

    def nearly_full(path: object) -> os.statvfs_result:
        found = list(real(path))  # type: ignore[call-overload]
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(staging.os, "statvfs", nearly_full)
    with pytest.raises(LocalStorageFull):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert place.spy.downloads == []


def test_foreign_files_under_our_names_stay_and_the_other_names_are_used(place: Place) -> None:
    meta = place.save(200, ("model",))
    place.dest.mkdir()
    (place.dest / "model_000200.pt").write_bytes(b"precious")
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert staged.path == place.dest / f"model_000200-{meta.save_id[:8]}.pt"
    assert (place.dest / "model_000200.pt").read_bytes() == b"precious"


def test_a_foreign_directory_under_the_name_of_a_file_that_was_to_be_replaced_stays(place: Place) -> None:
    meta = place.save(200, ("model",))
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    move_to_trash(place.dest, place.dest / "meta_000200.json")  # a replacement that was cut short
    (place.dest / "model_000200.pt").unlink()
    (place.dest / "model_000200.pt").mkdir()
    (place.dest / "model_000200.pt" / "mine").write_bytes(b"precious")
    staged = stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert staged.path == place.dest / f"model_000200-{meta.save_id[:8]}.pt"
    assert (place.dest / "model_000200.pt" / "mine").read_bytes() == b"precious"


def test_a_destination_whose_names_are_all_taken_is_occupied(place: Place) -> None:
    meta = place.save(200, ("model",))
    place.dest.mkdir()
    for tag in ("", f"-{meta.save_id[:8]}"):
        (place.dest / f"model_000200{tag}.pt").write_bytes(b"precious")
    before = names_in(place.dest)
    with pytest.raises(DestinationOccupied):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert names_in(place.dest) == before
    assert place.spy.downloads == []


def test_a_copied_file_without_its_meta_is_taken_over_by_its_checksum(place: Place) -> None:
    meta = place.save(200, ("model",))
    place.dest.mkdir()
    (place.dest / "model_000200.pt").write_bytes((place.root / "model_000200.pt").read_bytes())
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest)
    assert place.spy.downloads == []
    assert list(whole_saves(place.dest)) == [meta.save_id]


def test_nothing_is_written_through_a_link(place: Place, tmp_path: Path) -> None:
    meta = place.save(200, ("dcp", "model"))
    outside = tmp_path / "outside"
    outside.mkdir()
    place.dest.mkdir()
    for name in ("dcp_000200", "model_000200.pt"):
        (place.dest / names.tmp_name(name, meta.save_id)).symlink_to(outside / "target")
    (place.dest / names.tmp_name("dcp_000200", meta.save_id)).unlink()
    (place.dest / names.tmp_name("dcp_000200", meta.save_id)).symlink_to(outside)
    stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="dcp")
    with pytest.raises(LocalStorageUnwritable):
        stage_checkpoint_step(place.mirror, step=200, dest=place.dest, require_kind="model")
    assert list(outside.iterdir()) == []
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / names.CONTROL_DIR).symlink_to(outside)
    with pytest.raises(DestinationOccupied):
        stage_checkpoint_step(place.mirror, step=200, dest=tmp_path / "second")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../escape.pt", "/etc/escape", ".ckptmirror/attempts.json", "model_000300.pt", "latest"]
)
def test_a_hostile_path_in_a_meta_is_refused(place: Place, path: str) -> None:
    meta = place.on_mirror(place.save(200, ("model",)))
    hostile = replace(meta, artifacts=(replace(meta.artifacts[0], path=path),))
    with pytest.raises(BrokenMeta):
        stage_save(place.mirror, hostile, place.dest, kinds=("model",), full=True)
    assert not place.dest.exists()


# -- processes -----------------------------------------------------------------------------------------------

_CHILD = """
import sys
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
print("ready", flush=True)
sys.stdin.readline()
print(stage_checkpoint_step(sys.argv[1], step=200, dest=sys.argv[2]).path, flush=True)
"""


@pytest.fixture
def gcs() -> Iterator[object]:
    from ckptmirror.testing import GcsServerProcess

    with GcsServerProcess(buckets=["ckpts"]) as server:
        yield server


@pytest.fixture
def gcs_place(gcs: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)  # type: ignore[attr-defined]
    place = Place(tmp_path)
    place.url = "gs://ckpts/run"
    place.spy = SpyStore(open_store(place.url))
    place.mirror = Mirror(place.spy.url, True, place.spy)  # type: ignore[arg-type]
    put_attempts(place.spy, [FIRST_ATTEMPT])  # type: ignore[arg-type]
    return place


def test_one_download_per_host(gcs: object, gcs_place: Place) -> None:
    meta = gcs_place.save(200, ("dcp",), ranks=4, sizes={"__0_0.distcp": 9 * MIB})
    gcs.clear_log()  # type: ignore[attr-defined]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, gcs_place.url, str(gcs_place.dest)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    answers = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        answers.append(child.communicate(timeout=120)[0].strip())
    assert answers == [str(gcs_place.dest / "dcp_000200")] * 4
    whole_saves(gcs_place.dest)
    media = [e for e in gcs.log("object.media") if "dcp_000200" in e["object"]]  # type: ignore[attr-defined]
    assert len(media) == sum(1 for a in meta.artifacts if a.path.startswith("dcp")) + 1  # one file has two ranges


@pytest.mark.parametrize(
    "fault",
    [
        {"corrupt_byte_at": 100},
        {"reset_after_bytes": 1000},
        {"truncate_after_bytes": 1000},
        {"status": 503},
        {"stall_s": 0.5, "after_bytes": 1000},
    ],
    ids=["corrupt byte", "reset", "truncated", "busy", "stall"],
)
def test_a_fault_in_a_download_is_survived(gcs: object, gcs_place: Place, fault: dict[str, object]) -> None:
    from ckptmirror.testing import Fault

    meta = gcs_place.save(200, ("model",), sizes={"model_000200.pt": 5 * MIB})
    gcs.faults([Fault(operation="object.media", object="model_000200", times=1, **fault)])  # type: ignore[attr-defined, arg-type]
    stage_checkpoint_step(gcs_place.mirror, step=200, dest=gcs_place.dest)
    assert list(whole_saves(gcs_place.dest)) == [meta.save_id]
    (seen,) = gcs.faults_seen()  # type: ignore[attr-defined]
    assert seen["fired"] == 1


def test_a_stage_after_the_server_died_in_mid_download_continues(gcs: object, gcs_place: Place) -> None:
    from ckptmirror.testing import Fault

    size = 32 * MIB
    gcs_place.save(200, ("model",), sizes={"model_000200.pt": size})
    real = gcs_place.mirror
    bare = Mirror(real.url, True, open_store(gcs_place.url, retry=False))
    gcs.faults([Fault(operation="object.media", object="model_", nth=3, status=503, times=0)])  # type: ignore[attr-defined]
    with pytest.raises(StoreTemporary):
        stage_checkpoint_step(bare, step=200, dest=gcs_place.dest)
    gcs.clear_faults()  # type: ignore[attr-defined]
    gcs.clear_log()  # type: ignore[attr-defined]
    stage_checkpoint_step(bare, step=200, dest=gcs_place.dest)
    whole_saves(gcs_place.dest)
    assert len([e for e in gcs.log("object.media") if "model_" in e["object"]]) == 2  # type: ignore[attr-defined]


def test_a_file_mirror_serves_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nfs/run"
    (tmp_path / "nfs").mkdir()
    store = open_store(url)
    put_attempts(store, [FIRST_ATTEMPT])
    meta = make_save(tmp_path / "root", 200)
    put_on_mirror(store, tmp_path / "root", meta)
    staged = stage_checkpoint_step(url, step="latest", dest=tmp_path / "eval")
    assert staged.kind == "dcp"
    assert list(whole_saves(tmp_path / "eval")) == [meta.save_id]
