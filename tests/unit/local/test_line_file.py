"""A file of lines: several writers do not mix, a torn line costs itself alone, and the size has a limit."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core.errors import LocalStorageFull, LocalStorageUnwritable
from ckptmirror.local.line_file import _make_older, append_line, read_lines

LIMIT = 10_000


def append(folder: Path, text: str, limit_bytes: int = LIMIT) -> None:
    append_line(folder / "lines", text.encode() + b"\n", older=folder / "older", limit_bytes=limit_bytes)


def lines(folder: Path, limit_bytes: int = LIMIT) -> list[str]:
    found, problems = read_lines(folder / "lines", older=folder / "older", limit_bytes=limit_bytes)
    assert problems == []
    return [line.decode() for line in found]


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    assert lines(tmp_path) == []
    for number in range(5):
        append(tmp_path, f"line {number}")
    assert lines(tmp_path) == [f"line {number}" for number in range(5)]


def test_after_a_torn_line_the_next_begins_on_its_own(tmp_path: Path) -> None:
    append(tmp_path, "whole")
    with (tmp_path / "lines").open("ab") as file:
        file.write(b"tor")
    append(tmp_path, "next")
    assert lines(tmp_path) == ["whole", "tor", "next"]


def test_past_the_limit_one_older_file_is_kept(tmp_path: Path) -> None:
    for number in range(1000):
        append(tmp_path, f"{number:096}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "older"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * LIMIT
    kept = [int(line) for line in lines(tmp_path)]
    assert kept == list(range(kept[0], 1000))
    assert len(kept) >= LIMIT // 97


def _append_many(folder: Path, who: int, count: int) -> None:
    for number in range(count):
        append(folder, f"{who} {number} {'x' * 80}", 45_000)


def test_several_processes_lose_no_line_while_the_file_becomes_the_older_one(tmp_path: Path) -> None:
    """It does so once in the middle: a second rename by another process would throw the fresh file away."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(tmp_path, who, 300)) for who in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = [line.split() for line in lines(tmp_path, 100_000)]
    assert (tmp_path / "older").stat().st_size >= 45_000
    for who in range(3):
        assert [int(number) for mine, number, _ in found if int(mine) == who] == list(range(300))
    assert all(text == "x" * 80 for _, _, text in found)


def test_who_still_has_the_older_file_open_does_not_rename_once_more(tmp_path: Path) -> None:
    append(tmp_path, "x" * 50, 1000)
    with (tmp_path / "lines").open("rb") as slow:
        append(tmp_path, "y", 40)
        append(tmp_path, "fresh", 1000)
        _make_older(slow.fileno(), tmp_path / "lines", tmp_path / "older")
    assert lines(tmp_path) == ["x" * 50, "y", "fresh"]


def test_who_cannot_have_the_lock_leaves_the_renaming_to_the_next_line(tmp_path: Path) -> None:
    append(tmp_path, "first")
    with (tmp_path / "lines").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        append(tmp_path, "x" * 50, 40)
        assert not (tmp_path / "older").exists()
    append(tmp_path, "y", 40)
    assert lines(tmp_path) == ["first", "x" * 50, "y"]
    assert (tmp_path / "older").exists()


def test_nothing_is_written_through_a_link_into_a_pipe_or_where_the_directory_is_gone(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "lines").symlink_to(tmp_path / "target")
    with pytest.raises(LocalStorageUnwritable, match="link"):
        append(tmp_path, "a")
    (tmp_path / "lines").unlink()
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(LocalStorageUnwritable, match="regular"):
        append(tmp_path, "a")
    with pytest.raises(LocalStorageUnwritable, match="does not exist"):
        append(tmp_path / "gone", "a")
    assert (tmp_path / "target").stat().st_size == 0
    assert not (tmp_path / "gone").exists()


def test_nothing_is_written_into_a_file_with_a_second_name_or_through_a_linked_directory(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "lines").hardlink_to(tmp_path / "target")
    with pytest.raises(LocalStorageUnwritable, match="hard link"):
        append(tmp_path, "a")
    assert (tmp_path / "target").read_bytes() == b"precious"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        append(tmp_path / "folder", "a")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_cannot_be_read_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    append(tmp_path, "here")
    (tmp_path / "older").write_bytes(b"x" * 3 * LIMIT)
    found, problems = read_lines(tmp_path / "lines", older=tmp_path / "older", limit_bytes=LIMIT)
    assert found == [b"here"]
    assert len(problems) == 1
    assert "older" in problems[0]


def test_a_full_disk_is_an_error_and_the_lines_before_stay(mounted: Callable[..., Path]) -> None:
    place = mounted("size=64k")
    append(place, "before", 10**6)
    with (place / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(b"x" * 4096):
            pass
    with pytest.raises(LocalStorageFull):
        append(place, "x" * 5000, 10**6)
    assert lines(place, 10**6)[0] == "before"
