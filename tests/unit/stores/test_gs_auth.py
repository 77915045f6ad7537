"""Where tokens come from: the application default credentials, through our own small transport."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ckptmirror.core.errors import NotAuthorised, StoreTemporary
from ckptmirror.stores.gs_auth import GoogleTokens
from ckptmirror.testing import Fault, GcsServerProcess
from tests.contract.stores_under_test import gs_store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GcsServerProcess]:
    with GcsServerProcess(tmp_path / "server", options=["--require-auth"]) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "HTTPS_PROXY", "https_proxy", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)


def _service_account(path: Path, token_uri: str) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    info = {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "test@p.iam.gserviceaccount.com",
        "client_id": "1",
        "token_uri": token_uri,
    }
    path.write_text(json.dumps(info))


def test_a_service_account_key_gets_its_token_and_works(
    server: GcsServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _service_account(tmp_path / "key.json", f"{server.url}/token")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    tokens = GoogleTokens()
    first = tokens.headers()
    assert first["Authorization"].startswith("Bearer ya29.")
    assert tokens.headers() == first
    tokens.refresh({"Authorization": "Bearer older"})
    assert tokens.headers() == first
    tokens.refresh(first)
    assert tokens.headers() != first
    server.create_bucket("contract", token=tokens.headers()["Authorization"].removeprefix("Bearer "))
    store = gs_store(server, "run", credentials=tokens._credentials)
    info = store.write("x", b"1", if_generation=0)
    assert store.stat("x") == info


@pytest.mark.parametrize(("status", "error"), [(503, StoreTemporary), (400, NotAuthorised)])
def test_a_token_service_that_fails_is_told_apart_from_one_that_refuses(
    server: GcsServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[Exception]
) -> None:
    _service_account(tmp_path / "key.json", f"{server.url}/token")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _delay_s: None)
    body = json.dumps({"error": "invalid_grant", "error_description": "account disabled"}) if status == 400 else None
    server.faults([Fault(operation="token", status=status, times=0, body=body)])
    with pytest.raises(error):
        GoogleTokens().headers()


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp://me:hush@host/token?hush"])
def test_a_token_service_that_is_no_url_is_said_of_the_credentials(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _service_account(tmp_path / "key.json", url)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(NotAuthorised, match="The credentials name a token service") as caught:
        GoogleTokens().headers()
    assert "hush" not in str(caught.value)


class _Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata service of a virtual machine, as far as credentials need it."""

    def do_GET(self) -> None:
        token = "/token" in self.path
        email = {"email": "vm@p.iam.gserviceaccount.com", "scopes": [], "aliases": ["default"]}
        data = json.dumps(
            {"access_token": "from-metadata", "expires_in": 3000, "token_type": "Bearer"} if token else email
        )
        if "project-id" in self.path:
            data = "p"
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json" if data != "p" else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_a_metadata_service_that_hangs_up_does_not_move_the_random_numbers_of_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a process of its own: what asks there is imported only once it asks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up, args=(server,), daemon=True).start()
        host = f"127.0.0.1:{server.getsockname()[1]}"
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
            monkeypatch.setenv(name, host)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        code = (
            "import random; from ckptmirror.stores.gs_auth import GoogleTokens; before = random.getstate()\n"
            "try: GoogleTokens().headers()\n"
            "except Exception as error: print(type(error).__name__, random.getstate() == before)"
        )
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["NotAuthorised", "True"]


def _hang_up(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def test_a_virtual_machine_gets_its_token_from_the_metadata_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as metadata:
        thread = threading.Thread(target=metadata.serve_forever, daemon=True)
        thread.start()
        from google.auth.compute_engine import _metadata

        host = f"127.0.0.1:{metadata.server_port}"
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.setattr(_metadata, "is_on_gce", lambda **_: True)  # else it asks for 3 s: too short when busy
        monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", host)
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("GCE_METADATA_IP", host)
        monkeypatch.delenv("NO_GCE_CHECK", raising=False)
        monkeypatch.setattr(_metadata, "_METADATA_ROOT", f"http://{host}/computeMetadata/v1/", raising=False)
        monkeypatch.setattr(_metadata, "_METADATA_IP_ROOT", f"http://{host}", raising=False)
        assert GoogleTokens().headers()["Authorization"] == "Bearer from-metadata"
        metadata.shutdown()
        thread.join(30)
