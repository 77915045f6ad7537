"""A disk that is full or read-only: an error with what, why and a hint, and nothing half-done left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core.errors import LocalStorageFull, LocalStorageUnwritable
from ckptmirror.local import checksummed_writer, directories, files, trash
from ckptmirror.local.range_file import RangeFile

SAVE_ID = "1f0c9a2e" + "0" * 24


def save(place: Path, size_bytes: int) -> None:
    with checksummed_writer.ArtifactWriter(place / "model_000200.pt", SAVE_ID) as writer:
        for _ in range(size_bytes // 100_000):
            writer.write(bytes(100_000))
        writer.publish()


@pytest.mark.parametrize("size", [1_500_000, 20_000_000])
def test_no_space_removes_the_temporary_and_says_what_why_and_what_to_do(mounted: Callable[..., Path], size: int):
    place = mounted("size=1m")
    files.write_bytes(place / "meta_000100.json", b"{}", save_id=SAVE_ID)
    why = r"Cannot write .*model_000200\.pt.*: no space is left \(\d+ bytes free\)"
    with pytest.raises(LocalStorageFull, match=why) as caught:
        save(place, size)
    assert caught.value.hint
    assert caught.value.temporary
    assert os.listdir(place) == ["meta_000100.json"]
    files.write_bytes(place / "meta_000200.json", b"{}", save_id=SAVE_ID)


def test_a_serializer_does_not_hide_that_the_disk_is_full(mounted: Callable[..., Path]):
    import torch

    place = mounted("size=1m")

    def serialize() -> None:
        with checksummed_writer.ArtifactWriter(place / "model_000200.pt", SAVE_ID) as writer:
            torch.save({"weight": torch.zeros(20_000_000, dtype=torch.uint8)}, writer)  # type: ignore[arg-type]
            writer.publish()

    with pytest.raises(LocalStorageFull):
        serialize()
    assert os.listdir(place) == []


def test_a_serializer_that_raises_an_error_of_its_own_hides_nothing_either(mounted: Callable[..., Path]):
    place = mounted("size=1m")

    def serialize() -> None:
        with checksummed_writer.ArtifactWriter(place / "model_000200.pt", SAVE_ID) as writer:
            try:
                for _ in range(400):
                    writer.write(bytes(100_000))
            except LocalStorageFull:
                raise RuntimeError("unexpected position") from None

    with pytest.raises(LocalStorageFull):
        serialize()
    assert os.listdir(place) == []


def test_a_small_file_on_a_full_disk_leaves_the_old_one(mounted: Callable[..., Path]):
    place = mounted("size=1m")
    files.write_bytes(place / "status.json", b"old", save_id=SAVE_ID, replace=True)
    with pytest.raises(LocalStorageFull):
        files.write_bytes(place / "status.json", bytes(2_000_000), save_id=SAVE_ID, replace=True)
    assert (place / "status.json").read_bytes() == b"old"
    assert os.listdir(place) == ["status.json"]


def test_no_inodes_is_told_apart_from_no_space(mounted: Callable[..., Path]):
    place = mounted("size=1m,nr_inodes=4")

    def fill() -> None:
        for number in range(9):
            files.write_bytes(place / f"model_{number:06d}.pt", b"x", save_id=SAVE_ID)

    with pytest.raises(LocalStorageFull, match="no inodes are left"):
        fill()
    with pytest.raises(LocalStorageFull, match="no inodes are left"):
        directories.make_dirs(place / "a")
    assert not [name for name in os.listdir(place) if name.endswith(".tmp")]


def test_a_read_only_root_says_so(mounted: Callable[..., Path]):
    place = mounted("size=1m")
    files.write_bytes(place / "meta_000100.json", b"{}", save_id=SAVE_ID)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    attempts: list[Callable[[], object]] = [
        lambda: checksummed_writer.ArtifactWriter(place / "model_000200.pt", SAVE_ID),
        lambda: files.write_bytes(place / "f", b"", save_id=SAVE_ID),
        lambda: directories.make_dirs(place / "a"),
        lambda: trash.move_to_trash(place, place / "meta_000100.json"),
        lambda: directories.replace_link(place / "latest", "x"),
        lambda: RangeFile(place / "f.tmp", 10),
        lambda: directories.rename_noreplace(place / "meta_000100.json", place / "g"),
    ]
    for attempt in attempts:
        with pytest.raises(LocalStorageUnwritable, match="mounted read-only"):
            attempt()
    assert os.listdir(place) == ["meta_000100.json"]


def test_a_disk_that_becomes_read_only_while_writing_hides_nothing(mounted: Callable[..., Path]):
    place = mounted("size=1m")

    def save_while_it_changes() -> None:
        with checksummed_writer.ArtifactWriter(place / "model_000200.pt", SAVE_ID) as writer:
            writer.write(b"x")
            writer.seal()
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            writer.publish()

    with pytest.raises(LocalStorageUnwritable, match="mounted read-only"):
        save_while_it_changes()
    assert not (place / "model_000200.pt").exists()
