"""Pytest fixtures for users' own tests: ``from ckptmirror.testing.fixtures import gcs_server``.

Rules:
* pytest is imported here and nowhere else in the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.testing.gcs_process import GcsServerProcess

__all__ = ["GCS_BUCKET", "gcs_server"]

GCS_BUCKET = "test-bucket"


@pytest.fixture
def gcs_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServerProcess]:
    """A server with the bucket ``GCS_BUCKET``, and an environment in which ``gs://`` means this server."""
    with GcsServerProcess(tmp_path / "gcs-server", buckets=[GCS_BUCKET]) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
