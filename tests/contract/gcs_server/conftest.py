"""One server for the suite, one bucket per test; the real client, and a bare HTTP connection for what it hides."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from raw_http import Raw

from ckptmirror.testing import GcsServerProcess
from ckptmirror.testing.fixtures import gcs_server  # noqa: F401 - a fixture

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(tmp_path_factory.mktemp("gcs")) as server:
        yield server
        assert server.stderr_path.read_text() == "", "the server had a bug"


@pytest.fixture
def server(shared_server: GcsServerProcess) -> Iterator[GcsServerProcess]:
    yield shared_server
    shared_server.clear_faults()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[GcsServerProcess]:
    """One that a test may kill."""
    with GcsServerProcess(tmp_path / "gcs") as server:
        yield server
        assert server.stderr_path.read_text() == "", "the server had a bug"


@pytest.fixture
def raw(server: GcsServerProcess) -> Raw:
    name = f"bucket-{next(_numbers)}"
    server.create_bucket(name)
    return Raw(server, name)


@pytest.fixture
def own_raw(own_server: GcsServerProcess) -> Raw:
    own_server.create_bucket("bucket-own")
    return Raw(own_server, "bucket-own")


def _client(server: GcsServerProcess) -> storage.Client:
    return storage.Client(
        project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": server.url}
    )


@pytest.fixture
def connect() -> Callable[[Raw], Any]:
    """The real client's bucket for a ``Raw``."""
    return lambda raw: _client(raw.server).bucket(raw.bucket)


@pytest.fixture
def bucket(raw: Raw) -> Any:
    return _client(raw.server).bucket(raw.bucket)


def crc32c_text(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


@pytest.fixture
def crc32c() -> Callable[[bytes], str]:
    """The base64 crc32c of some bytes."""
    return crc32c_text
