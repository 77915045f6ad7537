"""The answers of a Cloud Storage service, read by our code and by google-cloud-storage.

Rules:
* The connections are pairs of sockets in one process: nothing listens, and nothing connects.
* One input holds the answers to all requests of a call, one after another.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.stores.base import Upload
from ckptmirror.stores.gs import GsStore
from ckptmirror.stores.gs_auth import GoogleTokens
from ckptmirror.stores.gs_endpoint import Endpoint, Limits
from ckptmirror.stores.locations import BucketLocation
from tests.fuzz.fuzzing import Reader
from tests.kit.saves import BytesSource, digest_of

__all__ = ["readers_of_answers"]

_CONTENT = b"0123456789"
_OBJECT = {
    "name": "run/meta_000200.json",
    "size": "10",
    "generation": "7",
    "crc32c": "KAwGng==",
    "metadata": {"a": "b"},
}
_SENDING = frozenset({"socket.__new__", "_thread.start_new_thread", "http.client.send"})
_BETWEEN = b"\r\n--next--\r\n"


def readers_of_answers() -> Iterator[Reader]:
    """Return a reader for each call to a bucket, with the answers that one gives."""
    one, many = _answer(200, _OBJECT), _answer(200, {"items": [_OBJECT, _OBJECT], "nextPageToken": "x"})
    failures = [
        _answer(status, {"error": {"message": "storage.objects.get"}}) for status in (400, 401, 403, 404, 412, 503)
    ]
    content = _http(206, _CONTENT, **{"Content-Range": "bytes 0-9/10"})
    for what, seeds, ask in (
        ("stat", [one, *failures], lambda store: store.stat("meta_000200.json")),
        ("list", [many + _BETWEEN + _answer(200, {}), *failures[:3]], lambda store: list(store.list("meta"))),
        ("read", [one + _BETWEEN + content], lambda store: store.read("meta_000200.json", limit_bytes=1 << 20)),
        ("download", [content, _http(200, _CONTENT), *failures[:3]], _download),
        ("upload", [_http(308, b"", Range="bytes=0-4") + _BETWEEN + one, *failures], _upload),
        ("write", [one, *failures], lambda store: store.write("meta_000200.json", _CONTENT, if_generation=0)),
        ("delete", [_http(204, b""), *failures], lambda store: store.delete("meta_000200.json", generation=7)),
    ):
        yield Reader(
            f"answers to a {what}",
            seeds,
            ask,
            (CkptMirrorError,),
            prepare=_answering,
            events=_SENDING,
        )
    token = _answer(200, {"access_token": "a", "expires_in": 3600, "scope": "b", "id_token": "c"})
    refusals = [_answer(status, {"error": "e", "error_description": "d"}) for status in (400, 401, 503)]
    yield Reader(
        "answers of a token service",
        [token, *refusals],
        lambda tokens: tokens.headers(),
        (CkptMirrorError,),
        prepare=_tokens,
        events=_SENDING,
    )


def _answer(status: int, document: Mapping[str, Any]) -> bytes:
    return _http(status, json.dumps(document).encode(), **{"Content-Type": "application/json"})


def _http(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class _Canned(http.client.HTTPConnection):
    """A connection whose other end sends the next answer when it is asked for, and closes after the last."""

    answers: list[bytes]

    def connect(self) -> None:
        self.sock, self._other = socket.socketpair()
        self._other.setblocking(False)

    def getresponse(self) -> http.client.HTTPResponse:
        with suppress(OSError):  # the last answer was sent
            self._other.send(self.answers.pop(0)[:100_000] if self.answers else b"")
            if not self.answers:
                self._other.shutdown(socket.SHUT_WR)
        return super().getresponse()

    def close(self) -> None:
        super().close()
        if hasattr(self, "_other"):
            self._other.close()


def _answer_with(data: bytes) -> None:
    _Canned.answers = data.split(_BETWEEN)
    Endpoint._connection = lambda self, *_, **__: _Canned(self.host, self.port)  # type: ignore[method-assign]


@cache
def _store() -> GsStore:
    location, endpoint = BucketLocation("gs", "bucket", "run"), Endpoint("http", "127.0.0.1", 9)
    return GsStore(location, endpoint=endpoint, limits=Limits(0.05, 0.05))


def _answering(data: bytes) -> GsStore:
    _answer_with(data)
    _store()._transport.close()
    return _store()


def _tokens(data: bytes) -> GoogleTokens:
    from google.oauth2.credentials import Credentials

    _answer_with(data)
    time.sleep = lambda _: None  # google.auth waits before it asks a busy service again
    given = {name: "x" for name in ("refresh_token", "client_id", "client_secret")}
    return GoogleTokens(Credentials(token=None, token_uri="http://127.0.0.1:9/token", **given))


def _download(store: GsStore) -> None:
    store.download("meta_000200.json", generation=7, offset=0, buffer=memoryview(bytearray(len(_CONTENT))))


def _upload(store: GsStore) -> None:
    upload = Upload(
        name="meta_000200.json",
        source=BytesSource(_CONTENT),
        digest=digest_of(_CONTENT),
        metadata={},
        session="http://127.0.0.1/x?upload_id=1",
    )
    store.upload(upload)
