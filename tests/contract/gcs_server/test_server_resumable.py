"""Resumable uploads as the service documents them."""

import http.client
import json
import os
import socket
import struct

import pytest
from google.api_core import exceptions
from raw_http import Raw

from ckptmirror.testing import GcsServerProcess

KIB256 = 256 * 1024


def test_chunks_add_up_to_the_object(raw, crc32c):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(2 * KIB256 + 5)
    session = raw.start("x", {"metadata": {"k": "v"}}, {"X-Upload-Content-Type": "a/b"})
    first = raw.chunk(session, data[:KIB256], f"0-{KIB256 - 1}/{len(data)}")
    assert (first.status, first.headers["range"]) == (308, f"bytes=0-{KIB256 - 1}")
    second = raw.chunk(session, data[KIB256 : 2 * KIB256], f"{KIB256}-{2 * KIB256 - 1}/{len(data)}")
    assert (second.status, second.headers["range"]) == (308, f"bytes=0-{2 * KIB256 - 1}")
    assert raw("GET", raw.object_path("x")).status == 404
    last = raw.chunk(session, data[2 * KIB256 :], f"{2 * KIB256}-{len(data) - 1}/{len(data)}")
    assert last.status == 200
    resource = last.json()
    assert (resource["size"], resource["crc32c"]) == (str(len(data)), crc32c(data))
    assert (resource["metadata"], resource["contentType"]) == ({"k": "v"}, "a/b")
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_length_may_stay_unknown_until_the_last_chunk(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(KIB256 + 100)
    session = raw.start("x")
    assert raw.chunk(session, data[:KIB256], f"0-{KIB256 - 1}/*").status == 308
    assert raw.chunk(session, data[KIB256:], f"{KIB256}-{len(data) - 1}/{len(data)}").status == 200
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_an_upload_of_known_bytes_ends_by_saying_its_length(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(KIB256)
    session = raw.start("x")
    assert raw.chunk(session, data, f"0-{KIB256 - 1}/*").status == 308
    answer = raw.ask(session, KIB256)
    assert (answer.status, answer.json()["size"]) == (200, str(KIB256))


def test_the_whole_object_may_come_in_one_put_without_a_content_range(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(KIB256 + 7)
    assert raw("PUT", raw.start("x"), data).status == 200
    assert raw("PUT", raw.start("chunked"), iter([data[:1000], data[1000:]])).status == 200
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data
    assert raw("GET", raw.object_path("chunked") + "?alt=media").body == data


def test_an_empty_object_is_uploaded(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    assert raw.ask(raw.start("x"), 0).json()["size"] == "0"
    assert raw("PUT", raw.start("y"), b"").json()["size"] == "0"


def test_a_fresh_session_answers_308_without_a_range(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads#status-check."""
    session = raw.start("x")
    for total in ("*", 1_000_000):
        answer = raw.ask(session, total)
        assert answer.status == 308
        assert "range" not in answer.headers


def test_a_status_query_tells_what_is_kept(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads#status-check."""
    session = raw.start("x")
    raw.chunk(session, bytes(KIB256), f"0-{KIB256 - 1}/*")
    answer = raw.ask(session)
    assert (answer.status, answer.headers["range"]) == (308, f"bytes=0-{KIB256 - 1}")


def test_a_finished_session_answers_200_with_its_object_even_after_its_deletion(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads#status-check."""
    session = raw.start("x")
    done = raw.chunk(session, b"data", "0-3/4")
    assert raw("DELETE", raw.object_path("x")).status == 204
    for again in (raw.ask(session), raw.ask(session, 4), raw.chunk(session, b"data", "0-3/4")):
        assert again.status == 200
        assert again.json() == done.json()
    assert raw("GET", raw.object_path("x")).status == 404


def test_bytes_that_are_kept_already_are_skipped(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(3 * KIB256)
    session = raw.start("x")
    raw.chunk(session, data[: 2 * KIB256], f"0-{2 * KIB256 - 1}/*")
    again = raw.chunk(session, bytes(KIB256), f"0-{KIB256 - 1}/*")
    assert (again.status, again.headers["range"]) == (308, f"bytes=0-{2 * KIB256 - 1}")
    overlapping = bytes(KIB256) + data[2 * KIB256 :]
    assert raw.chunk(session, overlapping, f"{KIB256}-{3 * KIB256 - 1}/{3 * KIB256}").status == 200
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_length_below_what_is_kept_is_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    session = raw.start("x")
    raw.chunk(session, bytes(2 * KIB256), f"0-{2 * KIB256 - 1}/*")
    assert raw.ask(session, KIB256).status == 400
    assert raw.chunk(session, bytes(KIB256), f"0-{KIB256 - 1}/{KIB256}").status == 400
    assert raw("GET", raw.object_path("x")).status == 404
    assert raw.ask(session, 2 * KIB256).json()["size"] == str(2 * KIB256)


def test_a_gap_is_refused_with_503_and_nothing_is_taken(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    session = raw.start("x")
    raw.chunk(session, bytes(KIB256), f"0-{KIB256 - 1}/*")
    gap = raw.chunk(session, bytes(KIB256), f"{2 * KIB256}-{3 * KIB256 - 1}/*")
    assert gap.status == 503
    assert b"exceeds already uploaded size" in gap.body
    assert raw.ask(session).headers["range"] == f"bytes=0-{KIB256 - 1}"


@pytest.mark.parametrize("size", [1, 1000, KIB256 - 1, KIB256 + 1])
@pytest.mark.parametrize("total", ["*", 10 * KIB256])
def test_a_chunk_that_is_not_the_last_is_a_multiple_of_256_kib(raw, size, total):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    session = raw.start("x")
    assert raw.chunk(session, bytes(size), f"0-{size - 1}/{total}").status == 400
    assert "range" not in raw.ask(session).headers


@pytest.mark.parametrize("header", ["0-3/4", "bytes 4-3/10", "bytes 0-9/4", "bytes a-b/c", "bytes 0-3", "bytes=0-3/4"])
def test_a_content_range_that_makes_no_sense_is_refused(raw, header):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    session = raw.start("x")
    assert raw("PUT", session, b"data", {"Content-Range": header}).status == 400
    assert raw("GET", raw.object_path("x")).status == 404


def test_a_body_shorter_than_its_content_range_is_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    session = raw.start("x")
    assert raw.chunk(session, b"data", "0-9/10").status == 400
    assert raw("GET", raw.object_path("x")).status == 404


def test_the_announced_length_binds(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    session = raw.start("x", headers={"X-Upload-Content-Length": "10"})
    assert raw.chunk(session, b"data", "0-3/4").status == 400
    assert raw.chunk(session, b"0123456789", "0-9/10").status == 200


@pytest.mark.parametrize("where", ["metadata", "header", "md5"])
def test_a_wrong_checksum_is_refused_at_the_end_and_the_object_not_stored(raw, where, crc32c):
    """Documented at https://cloud.google.com/storage/docs/data-validation."""
    raw.put("x", b"old")
    wrong = {"metadata": {"crc32c": crc32c(b"other")}, "md5": {"md5Hash": "A" * 22 + "=="}}.get(where, {})
    headers = {"x-goog-hash": f"crc32c={crc32c(b'other')}"} if where == "header" else {}
    session = raw.start("x", wrong)
    answer = raw.chunk(session, b"data", "0-3/4", **headers)
    assert answer.status == 400
    assert "doesn't match calculated" in answer.json()["error"]["message"]
    assert raw("GET", raw.object_path("x") + "?alt=media").body == b"old"
    assert raw.ask(session).status == 410


def test_a_right_checksum_is_taken_in_metadata_and_header(raw, crc32c):
    """Documented at https://cloud.google.com/storage/docs/data-validation."""
    good = crc32c(b"data")
    session = raw.start("x", {"crc32c": good})
    assert raw.chunk(session, b"data", "0-3/4", **{"x-goog-hash": f"crc32c={good}"}).json()["crc32c"] == good


def test_the_precondition_is_answered_at_the_end(raw):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    raw.put("x", b"old")
    session = raw.start("x", ifGenerationMatch="0")
    assert raw.chunk(session, b"data", "0-3/4").status == 412
    early = raw.start("y", ifGenerationMatch="0")
    raw.put("y", b"came between")
    assert raw.chunk(early, b"data", "0-3/4").status == 412
    assert raw("GET", raw.object_path("y") + "?alt=media").body == b"came between"


def test_of_two_sessions_that_create_a_name_one_wins(raw):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    sessions = [raw.start("x", ifGenerationMatch="0") for _ in range(2)]
    assert [raw.chunk(session, b"data", "0-3/4").status for session in sessions] == [200, 412]


def test_a_cancelled_session_answers_499(raw):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads#cancel-upload."""
    session = raw.start("x")
    raw.chunk(session, bytes(KIB256), f"0-{KIB256 - 1}/*")
    assert raw("DELETE", session, headers={"Content-Length": "0"}).status == 499
    assert raw.ask(session).status == 499
    assert raw.chunk(session, b"data", "0-3/4").status == 499
    assert raw("GET", raw.object_path("x")).status == 404


def test_an_unknown_session_is_not_found(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    assert raw.ask(raw.start("x") + "wrong").status == 404


def test_a_session_ends_with_its_lifetime(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads."""
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=["--session-lifetime-s", "0"]) as server:
        raw = Raw(server, "bucket-1")
        assert raw.ask(raw.start("x")).status == 410


@pytest.mark.parametrize("sent", [0, 1000, KIB256, KIB256 + 1000, 3 * KIB256 - 1])
@pytest.mark.parametrize("ending", ["reset", "closed"])
def test_of_a_chunk_that_breaks_off_multiples_of_256_kib_are_kept(raw, server, sent, ending):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(3 * KIB256)
    session = raw.start("x")
    target = session.removeprefix(server.url)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        head = f"PUT {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n"
        head += f"Content-Range: bytes 0-{len(data) - 1}/{len(data)}\r\nExpect: 100-continue\r\n\r\n"
        sock.sendall(head.encode())
        assert b"100 Continue" in sock.recv(100)
        sock.sendall(data[:sent])
        if ending == "closed":
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1000) == b""
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rest = raw.ask(session)
    start = int(rest.headers.get("range", "bytes=0--1").removeprefix("bytes=0-")) + 1
    assert start % KIB256 == 0
    assert start <= sent
    answer = raw.chunk(session, data[start:], f"{start}-{len(data) - 1}/{len(data)}")
    assert answer.status == 200
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_new_request_takes_the_session_over_from_one_that_hangs(raw, server):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    data = os.urandom(2 * KIB256)
    session = raw.start("x")
    hanging = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    hanging.putrequest("PUT", session.removeprefix(server.url))
    hanging.putheader("Content-Length", str(len(data)))
    hanging.putheader("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")
    hanging.endheaders()
    hanging.send(b"wrong" * 1000)
    assert raw.chunk(session, data, f"0-{len(data) - 1}/{len(data)}").status == 200
    with pytest.raises(ConnectionError):
        hanging.getresponse()
    hanging.close()
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_session_uri_of_the_client_is_continued_by_anyone(bucket, raw, crc32c):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads."""
    blob = bucket.blob("x")
    blob.crc32c = crc32c(b"data")
    session = blob.create_resumable_upload_session(content_type="a/b", size=4, if_generation_match=0)
    assert raw.chunk(session, b"dat!", "0-3/4").status == 400
    session = blob.create_resumable_upload_session(content_type="a/b", size=4, if_generation_match=0)
    assert raw.chunk(session, b"data", "0-3/4").status == 200
    assert bucket.get_blob("x").crc32c == blob.crc32c


def test_the_client_sees_412_at_the_end_of_a_resumable_upload(bucket, tmp_path):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    (tmp_path / "f").write_bytes(bytes(9 * 1024 * 1024))
    bucket.blob("x").upload_from_string(b"old")
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").upload_from_filename(str(tmp_path / "f"), if_generation_match=0)
    assert bucket.blob("x").download_as_bytes() == b"old"


def test_the_name_may_be_in_the_query_but_not_another_one(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/insert."""
    assert raw("POST", raw.upload_path("resumable", name="x"), b"").status == 200
    both = raw("POST", raw.upload_path("resumable", name="x"), json.dumps({"name": "y"}))
    assert both.status == 400
    assert raw("POST", raw.upload_path("resumable"), b"{}").status == 400
    assert raw("POST", raw.upload_path("resumable", name="x"), b"{nonsense").status == 400


def test_a_client_that_wants_no_308_gets_it_in_a_header(raw):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads; the header is the Go client's."""
    data, session = os.urandom(2 * KIB256), raw.start("x")
    no_308 = {"X-GUploader-No-308": "yes"}
    answer = raw.chunk(session, data[:KIB256], f"0-{KIB256 - 1}/{2 * KIB256}", **no_308)
    assert (answer.status, answer.headers["x-http-status-code-override"]) == (200, "308")
    assert answer.headers["range"] == f"bytes=0-{KIB256 - 1}"
    answer = raw.chunk(session, data[KIB256:], f"{KIB256}-{2 * KIB256 - 1}/{2 * KIB256}", **no_308)
    assert answer.status == 200
    assert "x-http-status-code-override" not in answer.headers
    assert answer.json()["size"] == str(2 * KIB256)
