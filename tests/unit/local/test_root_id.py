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


def test_a_note_of_a_version_that_knew_no_jobs_is_read(root: Path) -> None:
    own = keep_root_id(root)
    path = root / names.CONTROL_DIR / "root.json"
    note = json.loads(path.read_text())
    del note["jobs"]
    path.write_text(json.dumps(note))
    assert read_root_id(root) == own
