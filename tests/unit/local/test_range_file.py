"""A file filled in any order by many threads has its size from the start and can be continued."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror.core.errors import LocalStorageFull, LocalStorageUnwritable, NameTaken
from ckptmirror.local.direct_io import aligned_buffer
from ckptmirror.local.range_file import RangeFile


def test_ranges_written_by_many_threads_make_the_file(tmp_path: Path):
    data = random.Random(1).randbytes(1_000_003)
    piece = 65536
    with RangeFile(tmp_path / "f.tmp", len(data)) as file:
        assert not file.continued
        assert (tmp_path / "f.tmp").stat().st_size == len(data)
        offsets = list(range(0, len(data), piece))
        random.Random(2).shuffle(offsets)

        def work(mine: list[int]) -> None:
            buffer = aligned_buffer(piece)
            for offset in mine:
                view = buffer[: min(piece, len(data) - offset)]
                view[:] = data[offset : offset + piece]
                file.write_at(offset, view)

        threads = [threading.Thread(target=work, args=(offsets[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        back = bytearray(1000)
        file.read_at(500_001, back)
        assert bytes(back) == data[500_001:501_001]
        file.seal()
    assert (tmp_path / "f.tmp").read_bytes() == data


@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
def test_any_buffer_at_any_offset_is_written(tmp_path: Path, offset: int):
    with RangeFile(tmp_path / "f.tmp", 20_000) as file:
        file.write_at(offset, b"x" * 10_000)
        file.write_at(offset + 10_000, bytearray(b"y" * 100))
        file.seal()
    expected = bytearray(20_000)
    expected[offset : offset + 10_100] = b"x" * 10_000 + b"y" * 100
    assert (tmp_path / "f.tmp").read_bytes() == bytes(expected)


def test_a_file_of_the_same_size_is_continued(tmp_path: Path):
    with RangeFile(tmp_path / "f.tmp", 10_000) as file:
        file.write_at(0, b"a" * 5000)
    with RangeFile(tmp_path / "f.tmp", 10_000) as file:
        assert file.continued
        file.write_at(5000, b"b" * 5000)
        file.seal()
    assert (tmp_path / "f.tmp").read_bytes() == b"a" * 5000 + b"b" * 5000


def test_a_file_of_another_size_is_begun_anew(tmp_path: Path):
    (tmp_path / "f.tmp").write_bytes(b"a" * 9_999)
    with RangeFile(tmp_path / "f.tmp", 10_000) as file:
        assert not file.continued
        file.seal()
    assert (tmp_path / "f.tmp").read_bytes() == bytes(10_000)


def test_a_temporary_that_is_published_already_is_not_written_to(tmp_path: Path):
    (tmp_path / "final").write_bytes(b"a" * 10)
    os.link(tmp_path / "final", tmp_path / "f.tmp")
    with RangeFile(tmp_path / "f.tmp", 10) as file:
        assert not file.continued
        file.write_at(0, b"b" * 10)
        file.seal()
    assert (tmp_path / "final").read_bytes() == b"a" * 10


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_another_users_temporary_is_replaced_and_not_continued(tmp_path: Path):
    (tmp_path / "f.tmp").write_bytes(b"a" * 10)
    os.chown(tmp_path / "f.tmp", 65534, 65534)
    with (tmp_path / "f.tmp").open("r+b") as planted, RangeFile(tmp_path / "f.tmp", 10) as file:
        assert not file.continued
        file.write_at(0, b"b" * 10)
        file.seal()
        planted.write(b"his")
        planted.flush()
    assert (tmp_path / "f.tmp").read_bytes() == b"b" * 10
    assert (tmp_path / "f.tmp").stat().st_uid == os.geteuid()
    os.chown(tmp_path, 65534, 65534)  # the owner of the directory decides what is in it
    os.chown(tmp_path / "f.tmp", 65534, 65534)
    with RangeFile(tmp_path / "f.tmp", 10) as file:
        assert file.continued


def test_an_empty_file_is_made(tmp_path: Path):
    with RangeFile(tmp_path / "f.tmp", 0) as file:
        file.write_at(0, b"")
        file.seal()
    assert (tmp_path / "f.tmp").read_bytes() == b""


def test_nothing_is_written_past_the_end(tmp_path: Path):
    with RangeFile(tmp_path / "f.tmp", 10) as file:
        with pytest.raises(ValueError, match="past the end"):
            file.write_at(5, b"123456")
        with pytest.raises(ValueError, match="past the end"):
            file.read_at(-1, bytearray(2))


def test_two_that_fill_one_file_at_once_are_kept_apart(tmp_path: Path):
    with RangeFile(tmp_path / "f.tmp", 10), pytest.raises(NameTaken):
        RangeFile(tmp_path / "f.tmp", 10)


def test_nothing_is_written_through_a_link(tmp_path: Path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "f.tmp").symlink_to("victim")
    with pytest.raises(LocalStorageUnwritable, match="symbolic link"):
        RangeFile(tmp_path / "f.tmp", 10)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_disk_too_small_says_so_before_the_first_byte(mounted: Callable[..., Path]):
    place = mounted("size=1m")
    with pytest.raises(LocalStorageFull, match="no space is left"):
        RangeFile(place / "f.tmp", 2_000_000)
    assert os.listdir(place) == []
