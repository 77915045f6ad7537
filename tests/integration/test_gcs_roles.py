"""The permissions that docs/guide/gcs.md grants are enough for each use, and none of them is too much."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptmirror.core.errors import NotAuthorised
from ckptmirror.testing import GcsServerProcess
from ckptmirror.testing.gcs.access import ROLES
from tests.integration.test_docs import rows
from tests.kit.cli import clean_environment

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
ROLE_IDS = {"Storage Object User": "roles/storage.objectUser", "Storage Object Viewer": "roles/storage.objectViewer"}
PAGE = (HOME / "docs" / "guide" / "gcs.md").read_text()
SECTION = PAGE.partition("\n## Who may do what\n")[2].partition("\n## ")[0]
TABLE = {role: sorted(re.findall(r"`(storage\.[\w.]+)`", cell)) for _, role, cell in rows(SECTION)}
WRITE, READ = TABLE["Storage Object User"], TABLE["Storage Object Viewer"]
TRAIN = """
import sys, torch
from ckptmirror import CheckpointManager, TrainState
state = TrainState(model=torch.nn.Linear(2, 2))
manager = CheckpointManager(sys.argv[1], mirrors=["gs://bucket/run"], kinds=("model",))
start = manager.resume(state)
manager.save(start.step + 1 if start else 1, state)
manager.close(timeout_s=float(sys.argv[2]))
"""


@contextmanager
def bucket(folder: Path, permissions: list[str]) -> Iterator[dict[str, str]]:
    """The environment of a process that may do this and nothing else in the bucket."""
    access = {"tokens": {}, "anonymous": {"permissions": permissions}}
    with GcsServerProcess(folder / "gcs", buckets=["bucket"], access=access) as server:
        yield clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(HOME), **server.environment)


def run(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


def test_the_roles_of_the_page_hold_what_it_says_that_they_hold():
    assert set(TABLE) == {*ROLE_IDS, "none"}
    assert TABLE["none"] == []
    for name, role in ROLE_IDS.items():
        assert set(TABLE[name]) <= ROLES[role]


def test_a_run_starts_twice_and_is_staged_with_exactly_these_permissions(tmp_path: Path):
    with bucket(tmp_path, WRITE) as env:
        for _ in range(2):
            done = run(env, "-c", TRAIN, tmp_path / "root", 60)
            assert done.returncode == 0, done.stderr
        root = ("--root", tmp_path / "root")
        for verb in (
            ("drain", *root),
            ("rotate", *root, "--keep-last", 1),
            ("push", *root, "--mirror", "gs://bucket/copy"),
        ):
            done = run(env, "-m", "ckptmirror", *verb)
            assert done.returncode == 0, done.stderr
    stage = ("stage", "--step", "latest", "--mirror", "gs://bucket/run", "--dest", tmp_path / "eval")
    for verb in (("ls", "gs://bucket/run"), stage):
        for missing in READ:
            with bucket(tmp_path, [one for one in READ if one != missing]) as env:
                assert run(env, "-m", "ckptmirror", *verb).returncode == NotAuthorised.exit_code
        with bucket(tmp_path, READ) as env:
            done = run(env, "-m", "ckptmirror", *verb)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", WRITE)
def test_a_run_goes_nowhere_without_one_of_them(missing: str, tmp_path: Path):
    with bucket(tmp_path, [one for one in WRITE if one != missing]) as env:
        done = run(env, "-c", TRAIN, tmp_path / "root", 2)
        if missing == "storage.objects.delete":  # which replacing an object needs: the list, by the second start
            assert done.returncode == 0, done.stderr
            done = run(env, "-c", TRAIN, tmp_path / "root", 2)
        assert done.returncode != 0
        assert re.search("NotAuthorised|DeadlinePassed", done.stderr), done.stderr
