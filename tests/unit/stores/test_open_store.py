"""Opening a mirror by its URL: which store, what it costs, what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.core.errors import ConfigError, NotAuthorised
from ckptmirror.stores import normalise_url, open_store
from ckptmirror.stores.gs_endpoint import Endpoint
from ckptmirror.stores.retrying import RetryingStore
from ckptmirror.testing import GcsServerProcess
from tests.contract.stores_under_test import server_with_bucket

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServerProcess]:
    with server_with_bucket(tmp_path_factory.mktemp("gcs")) as running:
        yield running


def test_urls_are_normalised() -> None:
    assert normalise_url("GS://bucket/run-17/") == "gs://bucket/run-17"
    assert normalise_url("gs://bucket") == normalise_url("gs://bucket/") == "gs://bucket"
    assert normalise_url("gs://b.c-d_e/ä 100%/x") == "gs://b.c-d_e/ä 100%/x"
    assert normalise_url("memory://name/p") == "memory://name/p"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/run",
        "gs://",
        "gs:///x",
        "gs://Bucket",
        "gs://b//x",
        "gs://bucket/../x",
        "gs://bucket/x?y",
        "nowhere://h/x",
        "/mnt/\udcff",
        "file:///mnt/\ud800",
        "~\0",
        "gs://bucket/a\nb",
        "gs://bucket/\x1b[2J",
    ],
)
def test_urls_that_name_no_mirror_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        normalise_url(url)


def test_a_secret_in_a_url_is_refused_and_not_repeated() -> None:
    for url in (
        *("gs://user:hunter2@bucket/x", "gs://bucket/x?key=hunter2", "file://hunter2@host/x"),
        *("s3://AKIA:hunter2/a+b@bucket/x", "gs://user:hunter2/a@bucket/x", "https://user:hunter2/@host/x"),
        "simplecache::s3://key:hunter2@bucket/x",
    ):
        with pytest.raises(ConfigError) as caught:
            normalise_url(url)
        assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_an_at_sign_in_a_prefix_is_no_secret() -> None:
    assert normalise_url("gs://bucket/me@there/run") == "gs://bucket/me@there/run"
    assert normalise_url("file:///home/me@there/run") == "file:///home/me%40there/run"


def test_a_store_is_opened_with_retries_unless_told_otherwise(tmp_path: Path) -> None:
    assert isinstance(open_store(f"file://{tmp_path}/m"), RetryingStore)
    assert not isinstance(open_store(f"file://{tmp_path}/m", retry=False), RetryingStore)


def test_endpoint_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert Endpoint.from_environment().url == "https://storage.googleapis.com"
    for text, url in [
        ("127.0.0.1:99", "http://127.0.0.1:99"),
        ("https://h", "https://h"),
        ("http://[::1]:7", "http://[::1]:7"),
    ]:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", text)
        assert Endpoint.from_environment().url == url
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "ftp://h")
    with pytest.raises(ConfigError):
        Endpoint.from_environment()


def test_missing_credentials_say_how_to_log_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(NotAuthorised) as caught:
        open_store("gs://bucket/run").stat("x")
    assert "gcloud auth application-default login" in caught.value.hint


def _run(code: str, server: GcsServerProcess) -> str:
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": server.url}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading_a_bucket_imports_no_client_library_and_no_torch(server: GcsServerProcess) -> None:
    code = """
import resource, sys
from ckptmirror.stores import open_store
store = open_store("gs://contract/cost")
assert store.stat("x") is None and list(store.list()) == []
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = {"torch", "google.cloud", "google.auth", "requests", "urllib3", "grpc", "tenacity", "gcsfs", "fsspec", "numpy"}
print(sorted(heavy & set(sys.modules)), used.ru_utime + used.ru_stime < 0.3)
"""
    assert _run(code, server) == "[] True\n"


def test_memory_stays_flat_while_a_large_file_is_uploaded(server: GcsServerProcess) -> None:
    code = """
import resource
from ckptmirror.core.model import Digest
from ckptmirror.local.checksums import BlockDigest
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Upload

SIZE = 192 * 2**20
line = bytes(range(256)) * 4096

class Source:
    size_bytes = SIZE
    def read_into(self, offset, buffer):
        done = 0
        while done < len(buffer):
            piece = memoryview(line)[(offset + done) % len(line):][: len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return done

digest = BlockDigest()
for _ in range(SIZE // len(line)):
    digest.update(line)
store = open_store("gs://contract/flat")
store.write("warm", b"1", if_generation=0)
small = BlockDigest(); small.update(line * 2)
class Small(Source):
    size_bytes = 2 * len(line)
store.upload(Upload("small", Small(), small.digest()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
info = store.upload(Upload("large", Source(), digest.digest()))
assert info.size_bytes == SIZE
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024)
"""
    assert _run(code, server) == "True\n"
