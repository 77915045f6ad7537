"""`make test-gcs BUCKET=`: the contract of a store, asked of a bucket that someone has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptmirror.stores import open_store
from ckptmirror.testing import GcsServerProcess

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]


def make_test_gcs(bucket: str, environment: Mapping[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    """What the target runs, with this interpreter."""
    asked = ["make", "-n", "--no-print-directory", "test-gcs", "VENV=VENV", f"BUCKET={bucket}"]
    said = subprocess.run(asked, capture_output=True, text=True, cwd=HOME, check=True)
    last = said.stdout.splitlines()[-1].replace("'", "")
    assert last.startswith("VENV/bin/python -m tests.contract.in_bucket")
    command = [sys.executable, *last.split()[1:], *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=HOME, env=dict(environment), check=False)


def environment(server: GcsServerProcess | None, **more: str) -> dict[str, str]:
    import os

    names = ("CKPTMIRROR_", "STORAGE_", "GOOGLE_", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    return kept | (server.environment if server else {}) | more


def test_the_contract_runs_in_a_bucket_that_others_use_and_leaves_nothing_there(tmp_path: Path, monkeypatch) -> None:
    with GcsServerProcess(tmp_path / "gcs", buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gs://bucket")
        theirs = store.write("theirs", b"1", if_generation=0)
        for bucket, which in (("bucket", ["-k", "list"]), ("gs://bucket/below/it", [])):
            done = make_test_gcs(bucket, environment(server), *which)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "passed" in done.stdout
            assert "failed" not in done.stdout
            assert list(store.list()) == [theirs]


def test_without_a_bucket_it_says_so_and_is_no_failure() -> None:
    done = make_test_gcs("", environment(None))
    assert done.returncode == 0
    assert done.stdout.startswith("Skipped: no bucket is named.")


def test_what_keeps_it_from_the_bucket_is_said_once(tmp_path: Path) -> None:
    access = {"tokens": {}, "anonymous": {"permissions": ["storage.objects.get"], "buckets": ["bucket"]}}
    with GcsServerProcess(tmp_path / "gcs", buckets=["bucket"], access=access) as server:
        done = make_test_gcs("bucket", environment(server))
        assert done.returncode == 12
        assert "wants credentials" in done.stderr
        assert len(done.stderr.splitlines()) == 2
    with GcsServerProcess(tmp_path / "other", buckets=["bucket"]) as server:
        done = make_test_gcs("no-such-bucket", environment(server))
        assert done.returncode == 10
        assert "does not exist" in done.stderr
