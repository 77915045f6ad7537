"""Tokens: who is let in, and how a token ends."""

import http.client
import json
import urllib.request
from urllib.parse import urlencode

import pytest
from raw_http import Raw

from ckptmirror.testing import Fault, GcsServerProcess


def _bearer(token):
    return {"Authorization": f"Bearer {token}"}


def _issue(server, grant="refresh_token"):
    data = urlencode({"grant_type": grant, "refresh_token": "r"}).encode()
    with urllib.request.urlopen(f"{server.url}/token", data) as answer:
        return json.loads(answer.read())


@pytest.fixture
def guarded(tmp_path):
    options = ["--token", "good", "--denied-token", "poor"]
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=options) as server:
        yield Raw(server, "bucket-1")


def test_no_token_and_a_wrong_one_answer_401_a_denied_one_403(guarded):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    path = "/storage/v1/b/bucket-1/o"
    assert guarded("GET", path).status == 401
    assert guarded("GET", path, headers=_bearer("wrong")).status == 401
    assert "www-authenticate" in guarded("GET", path, headers=_bearer("wrong")).headers
    assert guarded("GET", path, headers=_bearer("poor")).status == 403
    assert guarded("GET", path, headers=_bearer("good")).status == 200


def test_a_session_uri_is_its_own_credential(guarded):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads."""
    path = guarded.upload_path("resumable", name="x")
    assert guarded("POST", path, b"").status == 401
    session = guarded("POST", path, b"", _bearer("good")).headers["location"]
    assert guarded("PUT", session, b"data", _bearer("wrong")).status == 401
    assert guarded("PUT", session, b"data").status == 200


def test_the_token_endpoint_issues_tokens_that_expire(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/authentication."""
    options = ["--require-auth", "--token-lifetime-s", "0"]
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=options) as server:
        token = _issue(server)
        assert token["expires_in"] == 0
        raw = Raw(server, "bucket-1")
        assert raw("GET", "/storage/v1/b/bucket-1/o", headers=_bearer(token["access_token"])).status == 401
    with GcsServerProcess(tmp_path, options=["--require-auth"]) as server:
        token = _issue(server)["access_token"]
        raw = Raw(server, "bucket-1")
        assert raw("GET", "/storage/v1/b/bucket-1/o", headers=_bearer(token)).status == 200
        server.kill()
        server.restart()
        assert raw("GET", "/storage/v1/b/bucket-1/o", headers=_bearer(token)).status == 200


def test_the_real_client_of_a_service_account_signs_in_and_again_after_a_401(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/authentication."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from google.cloud import storage
    from google.oauth2 import service_account

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=["--require-auth"]) as server:
        info = {"client_email": "a@b.c", "private_key": pem, "token_uri": f"{server.url}/token"}
        credentials = service_account.Credentials.from_service_account_info(
            info, scopes=["https://www.googleapis.com/auth/devstorage.read_write"]
        )
        client = storage.Client(project="test", credentials=credentials, client_options={"api_endpoint": server.url})
        bucket = client.bucket("bucket-1")
        bucket.blob("x").upload_from_string(b"data")
        server.faults([Fault(unauthorised_after_s=0.0, times=0)])
        assert bucket.blob("x").download_as_bytes() == b"data"
        statuses = [(entry["operation"], entry["status"]) for entry in server.log()]
        assert statuses[-3:] == [("object.media", 401), ("token", 200), ("object.media", 200)]


def test_401_begins_at_its_time_and_ends_with_a_fresh_token(raw, server):
    token = _issue(server)["access_token"]
    path = f"/storage/v1/b/{raw.bucket}/o"
    server.faults([Fault(unauthorised_after_s=3600.0, times=0)])
    assert raw("GET", path, headers=_bearer(token)).status == 200
    server.clear_faults()
    server.faults([Fault(unauthorised_after_s=0.0, times=0)])
    assert raw("GET", path, headers=_bearer(token)).status == 401
    assert raw("GET", path, headers=_bearer(token)).status == 401
    assert raw("GET", path, headers=_bearer(_issue(server)["access_token"])).status == 200


def test_an_unknown_grant_is_refused(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/token", "grant_type=nonsense")
    assert connection.getresponse().status == 400
    connection.close()
