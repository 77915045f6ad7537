"""Token services that answer whatever they like, through google-auth and our own transport."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from ckptmirror.core.errors import NotAuthorised, StoreTemporary
from ckptmirror.stores.gs_auth import GoogleTokens
from tests.kit.servers import credential_files
from tests.kit.servers.hostile_server import MIB, Asked, HostileServer, Script, answer, endless, hostile_server

_DEEP = b"[" * 200_000 + b"]" * 200_000
ANSWERS: dict[str, bytes] = {
    "nested deep": answer(200, b'{"access_token":"a","expires_in":1,"x":' + _DEEP + b"}"),
    "an error nested deep": answer(400, b'{"error":' + _DEEP + b"}"),
    "text": answer(200, b"x"),
    "a list": answer(200, b"[]"),
    "an error that is a list": answer(400, b"[]"),
    "empty": answer(200, b"{}"),
    "not UTF-8": answer(200, b'{"access_token":"\xff"}'),
    "a token with a line feed": answer(200, b'{"access_token":"a\\r\\nX: y","expires_in":3600}'),
    "a token beyond ASCII": answer(200, b'{"access_token":"\\u2603","expires_in":3600}'),
    "a token in a list": answer(200, b'{"access_token":["a"],"expires_in":3600}'),
    "a token of 900 kB": answer(200, b'{"access_token":"' + b"a" * 900_000 + b'","expires_in":3600}'),
    "valid until soon": answer(200, b'{"access_token":"a","expires_in":"soon"}'),
    "valid for ever": answer(200, b'{"access_token":"a","expires_in":1e400}'),
    "valid for 10^20 s": answer(200, b'{"access_token":"a","expires_in":100000000000000000000}'),
    "encoded": answer(200, b"{}", Content_Encoding="gzip"),
}
ENDLESS = {
    "a body": (answer(200, Content_Length=""), b" " * 65536),
    "an error's body": (answer(500, Content_Length=""), b" " * 65536),
    "promises to continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2048),
}


def tokens_of(server: HostileServer, folder: Path, kind: str) -> GoogleTokens:
    """The tokens of a credentials file that names the server."""
    key = credential_files.service_account(server.url)
    subject = {"url": f"{server.url}/subject"}
    found = {"service account": key, "workload": credential_files.workload(server.url, subject)}[kind]
    (folder / "key.json").write_text(json.dumps(found))
    return GoogleTokens()


@pytest.fixture(autouse=True)
def _credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _s: None)


@pytest.mark.parametrize("kind", ["service account", "workload"])
@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_is_no_token_is_one_sentence_without_it(what: str, kind: str, tmp_path: Path) -> None:
    with hostile_server(lambda _asked: [ANSWERS[what]]) as server:
        tokens = tokens_of(server, tmp_path, kind)
        for _ in range(2):  # and nothing of it is kept
            with pytest.raises((StoreTemporary, NotAuthorised)) as caught:
                tokens.headers()
            assert len(str(caught.value)) < 1000
            assert "aaaa" not in str(caught.value)


@pytest.mark.parametrize("kind", ["service account", "workload"])
@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_without_end_to_a_request_for_a_token_is_ended(what: str, kind: str, tmp_path: Path) -> None:
    head, piece = ENDLESS[what]
    with hostile_server(lambda _asked: endless(head, piece)) as server:
        tokens = tokens_of(server, tmp_path, kind)
        with pytest.raises(StoreTemporary):
            tokens.headers()
        assert server.sent_bytes < 16 * MIB


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_token_service_redirects_nobody(status: int, tmp_path: Path) -> None:
    with hostile_server(lambda _asked: [answer(200, b'{"access_token":"a","expires_in":3600}')]) as elsewhere:

        def script(_asked: Asked) -> Iterable[bytes]:
            return [answer(status, Location=f"{elsewhere.url}/token")]

        redirects: Script = script
        with hostile_server(redirects) as server:
            with pytest.raises((StoreTemporary, NotAuthorised)):
                tokens_of(server, tmp_path, "service account").headers()
            assert elsewhere.asked == []
