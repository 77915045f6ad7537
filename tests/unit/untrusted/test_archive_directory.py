"""Each field of an archive's directory that lies is refused by itself."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest

from ckptmirror.core.errors import IntegrityError
from ckptmirror.untrusted import archives
from ckptmirror.untrusted.tensor_files import load_bytes, load_pt
from tests.kit.hostile_files import Record, archive, number, pickled, pt

HONEST = pt(number(1), s0=b"1234")
WIDE = archive(Record("data.pkl", pickled(number(1))), Record("data/0", b"1", claims_size=1 << 33))
NUMBERS = struct.pack("<HHQQ", 1, 16, 1 << 33, 1 << 33)
MANY = archive(Record("data.pkl", pickled(number(7))), *(Record(f"x/{i}", b"") for i in range(70_000)))


def changed(data: bytes, mark: bytes, at: int, form: str, value: int, *, last: bool = False) -> bytes:
    """An archive with one number written over, so far behind a mark."""
    place = (data.rindex if last else data.index)(mark) + at
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def entry(at: int, form: str, value: int) -> bytes:
    return changed(HONEST, b"PK\1\2", at, form, value)


def end(at: int, form: str, value: int) -> bytes:
    return changed(HONEST, b"PK\5\6", at, form, value)


def end_64(at: int, form: str, value: int) -> bytes:
    return changed(MANY, b"PK\6\6", at, form, value)


def with_a_gap() -> bytes:
    """Something between the directory and its end."""
    at = HONEST.index(b"PK\5\6")
    return HONEST[:at] + b"\0" * 8 + HONEST[at:]


LIES = {
    "an entry that begins otherwise": (entry(0, "<I", 0), "directory of the archive is broken"),
    "an entry on another disk": (entry(34, "<H", 1), "directory of the archive is broken"),
    "an entry that is longer than the directory": (entry(32, "<H", 60_000), "directory of the archive is broken"),
    "a method": (entry(10, "<H", 8), "compressed or encrypted"),
    "encryption": (entry(8, "<H", 1), "compressed or encrypted"),
    "another size than it takes": (entry(20, "<I", 1), "compressed or encrypted"),
    "no record where one begins": (entry(42, "<I", 1), "a place where no record begins"),
    "a size in 64 bits that is not there": (
        changed(entry(20, "<I", 0xFFFFFFFF), b"PK\1\2", 24, "<I", 0xFFFFFFFF),
        "in one place",
    ),
    "no size in 64 bits where one should be": (
        changed(WIDE, NUMBERS, 2, "<H", 0),
        "directory of the archive is broken",
    ),
    "one of two in 64 bits": (changed(WIDE, NUMBERS, 2, "<H", 8), "directory of the archive is broken"),
    "a comment": (end(20, "<H", 4), "not an archive as torch.save writes it"),
    "an end on another disk": (end(4, "<H", 1), "not an archive as torch.save writes it"),
    "a directory on another disk": (end(6, "<H", 1), "not an archive as torch.save writes it"),
    "other entries here than in all": (end(8, "<H", 1), "not an archive as torch.save writes it"),
    "fewer entries than there are": (
        changed(end(8, "<H", 1), b"PK\5\6", 10, "<H", 1),
        "holds more than it says",
    ),
    "a directory that is not at its end": (with_a_gap(), "is not at its end"),
    "a wide end that begins otherwise": (end_64(0, "<I", 0), "directory of the archive is broken"),
    "a wide end of another length": (end_64(4, "<Q", 45), "directory of the archive is broken"),
    "a wide end on another disk": (end_64(16, "<I", 1), "directory of the archive is broken"),
    "a wide directory on another disk": (end_64(20, "<I", 1), "directory of the archive is broken"),
    "other entries here than in all, wide": (end_64(24, "<Q", 1), "directory of the archive is broken"),
    "a locator that points elsewhere": (changed(MANY, b"PK\6\7", 8, "<Q", 0), "is not at its end"),
    "a name without the archive's directory": (
        archive(Record("data.pkl", pickled(number(1))), top=""),
        "is not in the archive's directory",
    ),
    "names in two directories": (
        archive(Record("data.pkl", pickled(number(1))), Record("version", b"3", top="b/")),
        "is not in the archive's directory",
    ),
    "a name that is no text": (HONEST.replace(b"archive/version", b"archive/versio\xff"), "not a whole archive"),
    "a record that reaches into the directory": (
        changed(changed(HONEST, b"PK\1\2", 20, "<I", 40, last=True), b"PK\1\2", 24, "<I", 40, last=True),
        "past the end of the archive",
    ),
    "no data.pkl": (archive(Record("version", b"3")), "without data.pkl"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_directory_that_lies_is_refused(what: str) -> None:
    data, why = LIES[what]
    assert data not in (HONEST, MANY)
    with pytest.raises(IntegrityError, match=why):
        load_bytes(data, "here")


def test_what_they_were_made_of_is_let_through() -> None:
    load_bytes(HONEST, "here")
    load_bytes(MANY, "here")


def test_records_that_share_some_bytes_are_refused() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickled(number(1)))
        file.writestr("archive/data/0", pickled(number(1)))
    data = stream.getvalue()
    first, second = data.index(b"PK\1\2"), data.rindex(b"PK\1\2")
    longer = struct.pack("<II", 40, 40)  # the first reaches into the second
    data = data[: first + 20] + longer + data[first + 28 :]
    assert second > first
    with pytest.raises(IntegrityError, match="are in one place"):
        load_bytes(data, "here")


def test_a_directory_is_not_read_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MAX_DIRECTORY_BYTES", 100)
    with pytest.raises(IntegrityError, match="too large"):
        load_bytes(HONEST, "here")


def test_a_file_that_becomes_shorter_meanwhile_is_refused() -> None:
    def read_at(offset: int, count: int) -> bytes:
        data = HONEST[offset : offset + count]
        return data[:-3] if data.startswith(b"PK\1\2") else data

    with pytest.raises(IntegrityError, match="not a whole archive"):
        archives.records_of(read_at, len(HONEST))


def test_bytes_in_front_of_an_archive_are_refused() -> None:
    """Another reader may take them for the file: an older torch reads a pickle that begins there."""
    data = b"0123" + HONEST
    for mark, at in ((b"PK\1\2", 42), (b"PK\5\6", 16)):
        place = 0
        while (place := data.find(mark, place)) >= 0:
            (number_,) = struct.unpack_from("<I", data, place + at)
            data = data[: place + at] + struct.pack("<I", number_ + 4) + data[place + at + 4 :]
            place += 4
    with pytest.raises(IntegrityError, match="in front of the archive"):
        load_bytes(data, "here")


def test_a_link_is_not_followed_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(HONEST)
    (tmp_path / "link.pt").symlink_to("x.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    load_pt(tmp_path / "x.pt")
    for name in ("link.pt", "pipe.pt"):
        with pytest.raises((OSError, IntegrityError)):
            load_pt(tmp_path / name)
