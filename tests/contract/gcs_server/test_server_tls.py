"""TLS: the same server behind a certificate."""

import http.client
import ssl
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from raw_http import Raw

from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.servers.certificates import make_certificate

_PROGRAM = """
import os
from google.cloud import storage
bucket = storage.Client.create_anonymous_client().bucket("bucket-1")
data = os.urandom(9 * 1024 * 1024 + 1)
blob = bucket.blob("dir/x", chunk_size=1024 * 1024)
blob.upload_from_string(data)
assert blob.self_link.startswith("https://127.0.0.1:")
assert bucket.blob("dir/x").download_as_bytes() == data
assert [found.name for found in bucket.list_blobs()] == ["dir/x"]
with bucket.client.batch():
    bucket.blob("dir/x").delete()
print("done")
"""


def _run(server, environment, program=_PROGRAM):
    keep = {"PATH": "/usr/bin:/bin", "HOME": str(server.directory)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**keep, **environment})


@pytest.fixture
def secure(tmp_path):
    certificate = make_certificate(tmp_path / "tls.pem")
    with GcsServerProcess(tmp_path / "gcs", buckets=["bucket-1"], certificate=certificate) as server:
        yield server
        assert server.stderr_path.read_text() == "", "the server had a bug"


def test_the_client_does_over_tls_what_it_does_without(secure):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    assert secure.url.startswith("https://")
    done = _run(secure, secure.environment)
    assert done.stdout == "done\n", done.stderr
    assert [entry["status"] for entry in secure.log("upload.put")] == [308] * 9 + [200]


def test_who_does_not_trust_the_certificate_gets_nothing(secure):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    trusting = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
    environment = {key: value for key, value in secure.environment.items() if key not in trusting}
    impatient = _PROGRAM.replace("blob.upload_from_string(data)", "blob.reload(retry=None)")
    done = _run(secure, environment, impatient)
    assert done.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    assert secure.log() == []


def test_faults_reset_and_cut_over_tls_too(secure):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints; faults are this server's own."""
    environment = secure.environment
    secure.faults(
        [
            Fault(operation="object.media", reset_after_bytes=1_000_000),
            Fault(operation="object.media", truncate_after_bytes=70_000),
            Fault(operation="upload.put", reset_after_bytes=500_000, nth=2),
            Fault(operation="object.list", status=503),
        ]
    )
    done = _run(secure, environment)
    assert done.stdout == "done\n", done.stderr
    assert [fault["fired"] for fault in secure.faults_seen()] == [1, 1, 1, 1]


def test_a_certificate_that_is_none_stops_the_start(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    (tmp_path / "tls.pem").write_text("nonsense")
    with pytest.raises(OSError, match="does not start"):
        GcsServerProcess(tmp_path / "gcs", certificate=tmp_path / "tls.pem").start()


def test_it_does_not_answer_without_tls(secure):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        Raw(secure, "bucket-1")("GET", "/_log")
    with pytest.raises(urllib.error.URLError) as caught:
        urllib.request.urlopen(f"{secure.url}/_log", timeout=10)
    assert isinstance(caught.value.reason, ssl.SSLCertVerificationError)
