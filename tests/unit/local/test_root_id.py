"""What a root knows of its identity, and of the jobs that it was one of: a copy of it knows nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.local.root_id import RootId, keep_root_id, note_job, read_root_id


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / names.CONTROL_DIR).mkdir(parents=True)
    (root / names.LOCK_NAME).touch()
    return root


def test_a_root_remembers_the_jobs_that_it_was_one_of_and_a_copy_of_it_none(root: Path) -> None:
    own = keep_root_id(root)
    for job in ("", own.id, "job 1", "job 2", "job 1"):
        note_job(root, job)
    assert read_root_id(root) == keep_root_id(root) == RootId(own.id, True, ("job 1", "job 2"))
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    note_job(copy, "job 3")
    assert read_root_id(copy) == RootId("", False)
    assert keep_root_id(copy).jobs == ()


def test_a_root_remembers_its_newest_jobs(root: Path) -> None:
    keep_root_id(root)
    jobs = [f"{number:032}" for number in range(200)]
    for job in jobs:
        note_job(root, job)
    assert read_root_id(root).jobs == tuple(jobs[-32:])


def test_a_note_of_which_a_bit_flipped_is_unknown(root: Path) -> None:
    """Or it still names an id: that of another root."""
    own = keep_root_id(root)
    path = root / names.CONTROL_DIR / "root.json"
    note = path.read_bytes()
    start = note.index(own.id.encode())
    for bit in range(8 * start, 8 * (start + len(own.id))):
        flipped = bytearray(note)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        kept = keep_root_id(root)
        note_job(root, "job 1")
        assert read_root_id(root) == RootId(kept.id, kept.is_first, ("job 1",))
        assert kept.id != own.id


@pytest.mark.parametrize("note", [b"[" * 4000, b"[]", b"{}", b'{"id": "' + b"1" * 32 + b'"}', b"\xff", b"9" * 5000])
def test_a_note_that_is_broken_is_unknown(note: bytes, root: Path) -> None:
    keep_root_id(root)
    (root / names.CONTROL_DIR / "root.json").write_bytes(note)
    assert read_root_id(root) == RootId("", False)
    assert not keep_root_id(root).is_first


def test_a_note_of_a_version_that_knew_no_jobs_is_read(root: Path) -> None:
    own = keep_root_id(root)
    path = root / names.CONTROL_DIR / "root.json"
    note = json.loads(path.read_text())
    del note["jobs"]
    path.write_text(json.dumps(note))
    assert read_root_id(root) == own
