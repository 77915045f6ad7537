"""The fault script does what its words say: where it says, as often as it says, and nothing else."""

import http.client
import os
import time

import pytest
from google.api_core import exceptions

from ckptmirror.testing import Fault

KIB256 = 256 * 1024
MIB = 1024 * 1024


def test_a_status_strikes_n_times_from_the_nth_request_on(server, raw):
    raw.put("x", b"data")
    server.faults(
        [Fault(operation="object.get", object="^x$", status=503, nth=2, times=2, retry_after_s=7, body="busy")]
    )
    answers = [raw("GET", raw.object_path("x")) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 503, 503, 200]
    assert (answers[1].headers["retry-after"], answers[1].body) == ("7", b"busy")
    assert (server.faults_seen()[0]["seen"], server.faults_seen()[0]["fired"]) == (4, 2)


def test_the_client_retries_what_the_script_breaks(server, raw, bucket):
    raw.put("x", b"data")
    server.faults([Fault(operation="object.media", status=503), Fault(operation="object.media", status=429)])
    assert bucket.blob("x").download_as_bytes() == b"data"
    assert [entry["status"] for entry in server.log("object.media")[-3:]] == [503, 429, 200]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 410, 412, 416, 429, 500, 502, 503, 504])
def test_any_status_is_a_json_error_on_any_operation(server, raw, status):
    server.faults([Fault(operation="object.list", status=status)])
    answer = raw("GET", f"/storage/v1/b/{raw.bucket}/o")
    assert (answer.status, answer.json()["error"]["code"]) == (status, status)


def test_matchers_meet_only_what_they_name(server, raw):
    server.faults([Fault(operation="upload.*", method="POST", object=r"meta_\d+", status=500, times=0)])
    assert raw.put("model_1", b"").status == 200
    assert raw.put("meta_1", b"").status == 500
    assert raw("POST", raw.upload_path("resumable", name="a/meta_22"), b"").status == 500
    assert raw("GET", raw.object_path("meta_1")).status == 404
    server.clear_faults()
    assert raw.put("meta_1", b"").status == 200


def test_an_upload_is_reset_after_n_bytes_and_goes_on_from_what_was_kept(server, raw):
    data = os.urandom(4 * KIB256)
    session = raw.start("x")
    server.faults([Fault(operation="upload.put", reset_after_bytes=2 * KIB256 + 100)])
    with pytest.raises(ConnectionError):
        raw.chunk(session, data, f"0-{len(data) - 1}/{len(data)}")
    assert raw.ask(session).headers["range"] == f"bytes=0-{2 * KIB256 - 1}"
    rest = raw.chunk(session, data[2 * KIB256 :], f"{2 * KIB256}-{len(data) - 1}/{len(data)}")
    assert rest.status == 200
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_status_may_strike_in_the_middle_of_an_upload(server, raw):
    data = os.urandom(4 * KIB256)
    session = raw.start("x")
    server.faults([Fault(operation="upload.put", status=503, after_bytes=KIB256)])
    assert raw.chunk(session, data, f"0-{len(data) - 1}/{len(data)}").status == 503
    assert raw.ask(session).headers["range"] == f"bytes=0-{KIB256 - 1}"


def test_a_chunk_may_be_kept_in_part_and_the_308_says_how_much(server, raw):
    data = os.urandom(4 * KIB256)
    session = raw.start("x")
    server.faults([Fault(operation="upload.put", keep_bytes=2 * KIB256 + 1, times=2)])
    short = raw.chunk(session, data, f"0-{len(data) - 1}/{len(data)}")
    assert (short.status, short.headers["range"]) == (308, f"bytes=0-{2 * KIB256 - 1}")
    rest = raw.chunk(session, data[2 * KIB256 :], f"{2 * KIB256}-{len(data) - 1}/{len(data)}")
    assert (rest.status, rest.headers["range"]) == (308, f"bytes=0-{4 * KIB256 - 1}")
    assert raw.ask(session, len(data)).status == 200
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_download_is_reset_after_n_bytes(server, raw):
    data = os.urandom(MIB)
    raw.put("x", data)
    server.faults([Fault(operation="object.media", reset_after_bytes=100_000)])
    with pytest.raises(ConnectionError):
        raw("GET", raw.object_path("x") + "?alt=media")
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_download_is_truncated_below_its_announced_length(server, raw, size):
    raw.put("x", bytes(MIB))
    server.faults([Fault(operation="object.media", truncate_after_bytes=size)])
    with pytest.raises(http.client.IncompleteRead) as caught:
        raw("GET", raw.object_path("x") + "?alt=media")
    assert len(caught.value.partial) == size


def test_an_answer_is_truncated_after_the_work(server, raw):
    server.faults([Fault(operation="upload.put", truncate_after_bytes=20)])
    with pytest.raises(http.client.IncompleteRead) as caught:
        raw.chunk(raw.start("x"), b"data", "0-3/4")
    assert len(caught.value.partial) == 20
    assert raw("GET", raw.object_path("x")).status == 200


@pytest.mark.parametrize("offset", [0, 99_999, MIB - 1])
def test_one_byte_of_a_download_is_inverted_wherever_the_range_begins(server, raw, offset):
    data = os.urandom(MIB)
    raw.put("x", data)
    server.faults([Fault(operation="object.media", corrupt_byte_at=offset, times=2)])
    expected = data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]
    assert raw("GET", raw.object_path("x") + "?alt=media").body == expected
    start = offset // 2
    part = raw("GET", raw.object_path("x") + "?alt=media", headers={"Range": f"bytes={start}-"})
    assert part.body == expected[start:]
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_stored_byte_rots_under_its_good_checksum(server, raw, bucket, crc32c):
    server.faults([Fault(operation="upload.*", corrupt_byte_at=1)])
    assert raw.put("x", b"data").json()["crc32c"] == crc32c(b"data")
    assert raw("GET", raw.object_path("x") + "?alt=media").body == b"d\x9eta"
    from google.cloud.storage.exceptions import DataCorruption

    with pytest.raises(DataCorruption):
        bucket.blob("x").download_as_bytes(checksum="crc32c")


def test_a_byte_that_changes_on_its_way_in_fails_a_declared_checksum(server, raw, crc32c):
    server.faults([Fault(operation="upload.put", corrupt_received_byte_at=2)])
    session = raw.start("x", {"crc32c": crc32c(b"data")})
    assert raw.chunk(session, b"data", "0-3/4").status == 400
    assert raw("GET", raw.object_path("x")).status == 404


@pytest.mark.parametrize("operation", ["upload.put", "upload.multipart", "object.delete", "object.patch"])
def test_an_answer_is_lost_after_the_work_was_done(server, raw, bucket, operation):
    raw.put("old", b"old")
    server.faults([Fault(operation=operation, lose_answer=True)])
    session = raw.start("x")
    multipart = b'--b\r\n\r\n{"name": "x"}\r\n--b\r\n\r\ndata\r\n--b--'
    related = {"Content-Type": "multipart/related; boundary=b"}
    work = {
        "upload.put": lambda: raw.chunk(session, b"data", "0-3/4"),
        "upload.multipart": lambda: raw("POST", raw.upload_path("multipart"), multipart, related),
        "object.delete": lambda: raw("DELETE", raw.object_path("old")),
        "object.patch": lambda: raw("PATCH", raw.object_path("old"), b'{"metadata": {"k": "v"}}'),
    }
    with pytest.raises(ConnectionError):
        work[operation]()
    if operation.startswith("upload"):
        assert bucket.blob("x").download_as_bytes() == b"data"
    elif operation == "object.delete":
        assert bucket.get_blob("old") is None
    else:
        assert bucket.get_blob("old").metadata == {"k": "v"}


def test_a_lost_answer_to_a_create_only_upload_comes_back_as_412_to_the_client(server, bucket):
    server.faults([Fault(operation="upload.multipart", lose_answer=True)])
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").upload_from_string(b"mine", if_generation_match=0)
    assert bucket.blob("x").download_as_bytes() == b"mine"


def test_a_stall_and_a_slow_body_take_their_time_and_lose_nothing(server, raw):
    raw.put("x", bytes(100_000))
    server.faults(
        [Fault(operation="object.media", slow_bytes_per_s=500_000), Fault(operation="object.get", stall_s=0.2)]
    )
    start_s = time.monotonic()
    assert raw("GET", raw.object_path("x") + "?alt=media").body == bytes(100_000)
    slow_s = time.monotonic() - start_s
    assert raw("GET", raw.object_path("x")).status == 200
    stalled_s = time.monotonic() - start_s - slow_s
    assert slow_s >= 0.19
    assert stalled_s >= 0.19


def test_a_stalled_answer_comes_after_the_work(server, raw):
    server.faults([Fault(operation="upload.media", stall_answer_s=600)])
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", raw.upload_path("media", name="x"), b"data")
    while (answer := raw("GET", raw.object_path("x") + "?alt=media")).status == 404:
        pass
    assert answer.body == b"data"
    connection.close()


def test_a_stalled_upload_does_not_hold_its_session(server, raw):
    session = raw.start("x")
    server.faults([Fault(operation="upload.put", stall_s=20, after_bytes=0)])
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("PUT", session.removeprefix(server.url), b"data", {"Content-Range": "bytes 0-3/4"})
    while not server.faults_seen()[0]["fired"]:
        pass
    assert raw.chunk(session, b"data", "0-3/4").status == 200
    connection.close()


def test_the_log_says_what_was_asked_and_never_a_token(server, raw):
    raw.put("x", bytes(1000))
    server.clear_log()
    raw("GET", raw.object_path("x") + "?alt=media", headers={"Range": "bytes=1-5", "Authorization": "Bearer secret"})
    (entry,) = server.log()
    assert (entry["operation"], entry["object"], entry["method"]) == ("object.media", "x", "GET")
    assert (entry["status"], entry["range"], entry["response_bytes"]) == (206, "bytes=1-5", 5)
    assert "secret" not in str(entry)


@pytest.mark.parametrize(
    "bad", [{"operation": "object.gte"}, {"colour": 1}, {"object": "("}, {"kill": "maybe"}, {"nth": 0}, "x"]
)
def test_a_fault_that_makes_no_sense_is_refused(raw, bad):
    import json

    assert raw("POST", "/_faults", json.dumps([bad])).status == 400


def test_a_fault_survives_its_journey_as_json():
    fault = Fault(operation="upload.put", stall_s=0.5, after_bytes=5, times=0, kill="before_work")
    assert Fault.from_json(fault.to_json()) == fault
