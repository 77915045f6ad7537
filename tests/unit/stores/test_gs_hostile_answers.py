"""The gs:// store against a service that answers whatever it likes: what may be received, from whom, and how slowly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials, Credentials

from ckptmirror.core.errors import CkptMirrorError, NotAuthorised, StorePermanent, StoreTemporary
from ckptmirror.stores.base import Store
from ckptmirror.stores.gs import GsStore
from ckptmirror.stores.gs_answer import ANSWER_BYTES, LEAST_BYTES_PER_S, AnswerRefusedError, Pace
from ckptmirror.stores.gs_endpoint import Endpoint, Limits
from ckptmirror.stores.locations import BucketLocation
from tests.contract.stores_under_test import pattern_bytes, upload_of
from tests.kit.saves import BytesSource
from tests.kit.servers.hostile_server import MIB, Asked, HostileServer, Script, answer, endless, hostile_server

pytestmark = pytest.mark.long

DATA = pattern_bytes(3 * MIB)
PIECE = b" " * 65536
ASKS: dict[str, Callable[[Store], object]] = {
    "stat": lambda store: store.stat("x"),
    "list": lambda store: list(store.list()),
    "download": lambda store: store.download("x", generation=1, offset=0, buffer=memoryview(bytearray(100))),
    "delete": lambda store: store.delete("x", generation=1),
    "write": lambda store: store.write("x", b"1", if_generation=0),
    "large write": lambda store: store.write("x", bytes(9 * MIB), if_generation=0),
    "upload, its start": lambda store: store.upload(upload_of("x", DATA)),
    "upload, a part": lambda store: store.upload(upload_of("x", DATA, session="/u?upload_id=1")),
}
STATUSES = (200, 206, 302, 308, 400, 401, 404, 412, 429, 503)
ENDLESS = {
    "until the connection ends": ({"Content_Length": ""}, PIECE),
    "as long as 2^60 bytes": ({"Content_Length": str(2**60)}, PIECE),
    "in chunks": ({"Content_Length": "", "Transfer_Encoding": "chunked"}, b"10000\r\n" + PIECE + b"\r\n"),
    "in chunks of one byte": ({"Content_Length": "", "Transfer_Encoding": "chunked"}, b"1\r\n \r\n" * 8192),
}
BEFORE_A_STATUS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 8192),
    "one header": (b"HTTP/1.1 200 OK\r\nX: ", PIECE),
    "a status line": (b"HTTP/1.1 200 ", PIECE),
    "promises to continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2048),
    "trailers": (answer(200, Content_Length="", Transfer_Encoding="chunked") + b"2\r\n{}\r\n0\r\n", b"X: y\r\n" * 8192),
    "a chunk's length": (answer(200, Content_Length="", Transfer_Encoding="chunked"), b"0" * 65536),
}


def store_on(server: HostileServer, limits: Limits | None = None, credentials: Any = None) -> Store:
    location = BucketLocation("gs", "contract", "p")
    endpoint = Endpoint.parse(server.url)
    return GsStore(location, endpoint=endpoint, limits=limits or Limits(5.0, 20.0), credentials=credentials)


def ask(script: Script, operation: str, limits: Limits | None = None) -> tuple[CkptMirrorError | None, int]:
    """Return the error, and how many bytes the server could send."""
    with hostile_server(script) as server:
        store, error = store_on(server, limits), None
        try:
            ASKS[operation](store)
        except CkptMirrorError as caught:
            error = caught
        store.close()
        return error, server.sent_bytes


@pytest.mark.parametrize("operation", ASKS)
def test_an_answer_without_end_is_ended_whatever_its_status(operation: str) -> None:
    for status in STATUSES:
        for how, (headers, piece) in ENDLESS.items():
            head = answer(status, **headers)
            _, sent_bytes = ask(lambda _asked, head=head, piece=piece: endless(head, piece), operation)
            assert sent_bytes < 24 * MIB, (status, how)  # two pages of a listing, and the buffers of the connection


@pytest.mark.parametrize("what", BEFORE_A_STATUS)
def test_nothing_around_a_body_is_without_end(what: str) -> None:
    head, piece = BEFORE_A_STATUS[what]
    for operation in ASKS:
        error, sent_bytes = ask(lambda _asked: endless(head, piece), operation)
        assert isinstance(error, StoreTemporary)
        assert sent_bytes < 24 * MIB, operation


def test_the_answer_of_a_proxy_has_an_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for operation, call in ASKS.items():
        with hostile_server(lambda _asked: endless(*BEFORE_A_STATUS["headers"])) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            store = GsStore(
                BucketLocation("gs", "contract", "p"),
                endpoint=Endpoint.parse("https://storage.example"),
                credentials=AnonymousCredentials(),
            )
            with pytest.raises(StoreTemporary, match="through the proxy"):
                call(store)
            assert {asked.method for asked in proxy.asked} == {"CONNECT"}
            assert proxy.sent_bytes < 16 * MIB, operation


def test_a_refused_token_whose_answers_have_no_end_is_replaced_no_more_than_once() -> None:
    class Always(Credentials):  # type: ignore[misc]
        refreshed = 0

        def refresh(self, request: object) -> None:
            del request
            self.refreshed += 1
            self.token = f"t{self.refreshed}"

    for operation, call in ASKS.items():
        credentials = Always()
        with hostile_server(lambda _asked: endless(answer(401, Content_Length=""))) as server:
            with pytest.raises((StoreTemporary, NotAuthorised)):
                call(store_on(server, credentials=credentials))
            assert credentials.refreshed <= 3, operation
            assert server.sent_bytes < 24 * MIB, operation


def test_of_a_range_no_more_than_the_range_is_received() -> None:
    def script(asked: Asked) -> Iterable[bytes]:
        if not asked.target.startswith("/download"):
            return [answer(404)]
        return endless(answer(206, Content_Length=str(2**60), Content_Range="bytes 5-104/1000"), b"x" * 65536)

    with hostile_server(script) as server:
        store, around = store_on(server), bytearray(300)
        store.download("x", generation=1, offset=5, buffer=memoryview(around)[100:200])
        assert around == bytes(100) + b"x" * 100 + bytes(100)
        assert store.stat("x") is None  # what came after the range is no other request's answer
        assert server.sent_bytes < 16 * MIB


@pytest.mark.parametrize("said_bytes", [5, 99])
def test_a_range_whose_length_lies_is_not_taken_as_whole(said_bytes: int) -> None:
    head = answer(206, b"x" * 100, Content_Length=str(said_bytes), Content_Range="bytes 0-99/1000")
    error, _ = ask(lambda _asked: [head], "download")
    assert isinstance(error, StoreTemporary)


def test_bytes_after_an_answer_are_not_taken_for_the_next_one() -> None:
    first_is_read, more_is_sent = threading.Event(), threading.Event()

    def described(name: str) -> bytes:
        fields = {"name": f"p/{name}", "size": "1", "generation": "5", "crc32c": "AAAAAA=="}
        return answer(200, json.dumps(fields).encode())

    def script(asked: Asked) -> Iterable[bytes]:
        if "x?" not in asked.target:
            yield answer(404)
            return
        yield described("x")
        assert first_is_read.wait(60)
        yield described("y")
        more_is_sent.set()

    with hostile_server(script) as server:
        store = store_on(server)
        assert store.stat("x") is not None
        first_is_read.set()
        assert more_is_sent.wait(60)
        assert store.stat("y") is None


@pytest.mark.parametrize("over_bytes", [0, 1])
@pytest.mark.parametrize("form", ["Content-Length", "chunked", "until the connection ends"])
def test_an_answer_may_have_its_limit_and_no_byte_more(form: str, over_bytes: int) -> None:
    fields = {"name": "p/x", "size": "1", "generation": "5", "crc32c": "AAAAAA=="}
    body = json.dumps(fields).encode().ljust(ANSWER_BYTES + over_bytes)

    def script(_asked: Asked) -> Iterable[bytes]:
        if form == "Content-Length":
            yield answer(200, body)
        elif form == "chunked":
            yield answer(200, Content_Length="", Transfer_Encoding="chunked")
            yield b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            yield answer(200, Content_Length="") + body
            raise ConnectionError

    error, _ = ask(script, "stat")
    assert (error is None) == (over_bytes == 0), error


class _ByteASecond:
    """A clock that goes on by a second at each look, and lets the server send the next byte then."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turn = threading.Semaphore(1)
        self.free_bytes = 0

    def __call__(self) -> float:
        self.now_s += 1.0
        self.turn.release()
        return self.now_s

    def pieces(self, data: bytes) -> Iterable[bytes]:
        for at in range(len(data)):
            if not self.turn.acquire(timeout=5):  # nobody looks at the clock
                self.free_bytes += len(data) - at
                yield data[at:]
                return
            yield data[at : at + 1]


@pytest.mark.parametrize("operation", ASKS)
@pytest.mark.parametrize("status", [200, 206, 308, 401, 503])
def test_a_byte_a_second_is_too_slow_for_any_answer(operation: str, status: int) -> None:
    clock = _ByteASecond()
    body = json.dumps({"name": "p/x", "size": "0", "generation": "5", "crc32c": "AAAAAA=="}).encode()
    said = answer(status, body + b" " * 400, Content_Range="bytes 0-99/1000")
    error, sent_bytes = ask(lambda _asked: clock.pieces(said), operation, Limits(5.0, 60.0, clock))
    assert isinstance(error, StoreTemporary)
    assert "too slowly" in str(error)
    assert (sent_bytes < 100, clock.free_bytes) == (True, 0)


def test_an_answer_may_wait_for_its_first_byte_and_then_needs_the_least_speed_in_every_window() -> None:
    now_s = 50.0
    pace = Pace(60.0, lambda: now_s)
    pace.received(1)
    for _ in range(100):  # exactly the least speed
        now_s += 10.0
        pace.received(10 * LEAST_BYTES_PER_S)
    now_s += 60.0
    pace.received(10**9)
    now_s += 59.0
    pace.received(1)  # what came quickly before does not pay for it
    now_s += 2.0
    with pytest.raises(AnswerRefusedError, match="2 bytes in 61 s"):
        pace.received(1)


@pytest.mark.parametrize("operation", ASKS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_no_token_travels(operation: str, status: int) -> None:
    class Given(Credentials):  # type: ignore[misc]
        def refresh(self, request: object) -> None:
            del request
            self.token = "secret"

    with hostile_server(lambda _asked: [answer(200, b"{}")]) as elsewhere:
        location = f"{elsewhere.url}/u?upload_id=1"
        with hostile_server(lambda _asked: [answer(status, Location=location)]) as server:
            with pytest.raises((StorePermanent, StoreTemporary)) as caught:
                ASKS[operation](store_on(server, credentials=Given()))
            assert elsewhere.asked == []
            if status != 308 or not operation.startswith("upload, a part"):
                assert "redirect" in str(caught.value)
                assert "CKPTMIRROR_GCS_ENDPOINT" in caught.value.hint


@pytest.mark.parametrize("size_mib", [3, 9])
def test_a_session_elsewhere_gets_neither_bytes_nor_token(size_mib: int) -> None:
    with hostile_server(lambda _asked: [answer(404)]) as elsewhere:

        def script(asked: Asked) -> Iterable[bytes]:
            if asked.method == "POST":
                return [answer(200, Location=f"{elsewhere.url}/u?upload_id=1")]
            return [answer(503)]

        with hostile_server(script) as server:
            with pytest.raises(StoreTemporary):
                store_on(server).write("x", bytes(size_mib * MIB), if_generation=0)
            with pytest.raises(StoreTemporary):
                store_on(server).upload(upload_of("x", bytes(size_mib * MIB)))
            assert elsewhere.asked == []
            assert server.asked[-1].line == "PUT /u?upload_id=1"


@pytest.mark.parametrize(
    "session", ["@other/u?upload_id=1", "/u", "/ü?upload_id=1", "/u v?upload_id=1", "/" + "u" * 9000]
)
def test_a_session_that_is_no_path_with_an_id_is_not_used(session: str) -> None:
    with hostile_server(lambda _asked: [answer(200, Location=session)]) as server:
        with pytest.raises(StoreTemporary, match="gone for the second time"):
            store_on(server).upload(upload_of("x", DATA))
        assert {asked.method for asked in server.asked} == {"POST"}


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip", "GZIP"])
@pytest.mark.parametrize("operation", ASKS)
def test_an_encoded_answer_is_refused_and_none_is_asked_for(operation: str, encoding: str) -> None:
    with hostile_server(lambda _asked: [answer(200, b"{}", Content_Encoding=encoding)]) as server:
        with pytest.raises(StoreTemporary, match="encoded"):
            ASKS[operation](store_on(server))
        assert all(asked.headers.get_all("Accept-Encoding") == ["identity"] for asked in server.asked)


NOT_OBJECTS = (b"", b"[]", b'"x"', b"5", b"null", b'{"a":1,"a":2}', b"[" * 200_000 + b"]" * 200_000, b"\xff", b"{" * 9)
WRONG_FIELDS: dict[str, Any] = {
    "name": 5,
    "size": "-5",
    "generation": "0",
    "crc32c": "AAAA",
    "metadata": ["a"],
    "metadata of numbers": {"a": 5},
    "size of another kind": [1],
    "size of many digits": "9" * 5000,
    "no name": None,
}


@pytest.mark.parametrize("operation", [name for name in ASKS if name != "download"])
@pytest.mark.parametrize("status", [200, 404, 503])
def test_an_answer_of_another_form_is_one_error(operation: str, status: int) -> None:
    good = {"name": "p/x", "size": "1", "generation": "5", "crc32c": "AAAAAA=="}
    fields = [json.dumps({**good, name.partition(" ")[0]: value}).encode() for name, value in WRONG_FIELDS.items()]
    errors = [b'{"error":5}', b'{"error":[]}', b'{"error":{"message":[' + b"[" * 100_000 + b"]" * 100_000 + b"]}}"]
    for body in (*NOT_OBJECTS, *fields, *errors, b'{"error":{"message":"' + b"x" * 100_000 + b'"}}'):
        with hostile_server(lambda _asked, body=body: [answer(status, body)]) as server:
            try:
                ASKS[operation](store_on(server))  # no error is right too: of a delete
            except CkptMirrorError as error:
                assert len(str(error)) < 3000, body[:50]  # noqa: PT017


@pytest.mark.parametrize("wrong", WRONG_FIELDS)
def test_a_description_with_a_wrong_field_is_no_object(wrong: str) -> None:
    good = {"name": "p/x", "size": "1", "generation": "5", "crc32c": "AAAAAA=="}
    for fields in (good | {wrong.partition(" ")[0]: WRONG_FIELDS[wrong]}, good | {"name": "p/other"}):
        with hostile_server(lambda _asked, fields=fields: [answer(200, json.dumps(fields).encode())]) as server:
            if wrong == "no name" and "no" in fields:
                continue
            with pytest.raises(StoreTemporary):
                store_on(server).stat("x")


def test_links_in_a_description_are_not_followed() -> None:
    with hostile_server(lambda _asked: [answer(200, b"x")]) as elsewhere:
        links = dict.fromkeys(("mediaLink", "selfLink"), f"{elsewhere.url}/x")
        fields = {"name": "p/x", "size": "1", "generation": "5", "crc32c": "2qpPfQ==", **links}

        def script(asked: Asked) -> Iterable[bytes]:
            if asked.target.startswith("/download"):
                return [answer(206, b"1", Content_Range="bytes 0-0/1")]
            return [answer(200, json.dumps(fields).encode())]

        with hostile_server(script) as server:
            store = store_on(server)
            assert store.stat("x") is not None
            with pytest.raises(CkptMirrorError):
                store.read("x", limit_bytes=5)
            store.delete("x", generation=5)
            assert elsewhere.asked == []


@pytest.mark.parametrize("grows_by", [0, 1, 256 * 1024 - 1])
def test_a_service_that_keeps_next_to_nothing_of_each_part_ends_the_upload(grows_by: int) -> None:
    kept = 0

    def script(asked: Asked) -> Iterable[bytes]:
        nonlocal kept
        if asked.method == "POST":
            return [answer(200, Location="/u?upload_id=1")]
        kept += grows_by
        return [answer(308, Range=f"bytes=0-{kept - 1}" if kept else "")]

    with hostile_server(script) as server:
        source = BytesSource(bytes(64 * MIB))
        with pytest.raises(StoreTemporary, match="does not get past"):
            store_on(server).upload(upload_of("x", source.data, source=source, session="/u?upload_id=1"))
        assert len(server.asked) <= 5
        assert source.read_bytes <= 16 * MIB
        kept = 0
        with pytest.raises(StoreTemporary, match="does not get past"):
            store_on(server).write("x", bytes(9 * MIB), if_generation=0)


@pytest.mark.parametrize("said", ["bytes=0-\xb3", "bytes=0-" + "9" * 5000, "bytes=0--1", "bytes=1-5", "0x5", "bytes="])
def test_an_offset_that_is_no_number_is_a_temporary_error(said: str) -> None:
    def script(asked: Asked) -> Iterable[bytes]:
        return [answer(200, Location="/u?upload_id=1") if asked.method == "POST" else answer(308, Range=said)]

    with hostile_server(script) as server, pytest.raises(StoreTemporary, match="says that it has") as told:
        store_on(server).upload(upload_of("x", bytes(MIB), session="/u?upload_id=1"))
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("said", ["bytes 0-\xb3/1000", "bytes 0-99/" + "9" * 5000, "bytes 0-" + "9" * 5000 + "/*"])
def test_a_range_that_is_no_number_is_a_temporary_error(said: str) -> None:
    error, _ = ask(lambda _asked: [answer(206, b"x" * 100, Content_Range=said)], "download")
    assert isinstance(error, StoreTemporary)


def test_a_part_after_one_that_was_kept_in_part_is_no_larger_than_what_was_kept() -> None:
    kept = 0

    def script(asked: Asked) -> Iterable[bytes]:
        nonlocal kept
        kept += min(256 * 1024, len(asked.body))
        return [answer(308, Range=f"bytes=0-{kept - 1}" if kept else "")]

    with hostile_server(script) as server:
        with pytest.raises(StoreTemporary):  # it has everything and does not say so
            store_on(server).upload(upload_of("x", bytes(20 * MIB), session="/u?upload_id=1"))
        assert sum(len(asked.body) for asked in server.asked) < 3 * 20 * MIB
