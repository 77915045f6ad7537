"""Every field of a fault, on every operation: it happens, or the script is refused; it is never ignored."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptmirror.testing import Fault
from ckptmirror.testing.fault import OPERATIONS

pytestmark = pytest.mark.long

KIB256 = 256 * 1024
DATA = os.urandom(2 * KIB256)
AT = 100_003
BATCH = b"--b\r\nContent-Type: application/http\r\n\r\nGET /storage/v1/b/absent-bucket HTTP/1.1\r\n\r\n\r\n--b--"
RELATED = {"Content-Type": "multipart/related; boundary=b"}
MATCHERS = {"operation", "method", "object", "nth", "times"}

ALL = set(OPERATIONS)
UPLOADS = {"upload.media", "upload.multipart", "upload.put"}
BYTES = {*UPLOADS, "object.media"}
EFFECTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "status": ({"status": 503, "body": "busy", "retry_after_s": 3}, ALL),
    "status in the middle": ({"status": 503, "after_bytes": AT}, UPLOADS),
    "unauthorised": ({"unauthorised_after_s": 0.0}, ALL - {"token"}),
    "unauthorised in the middle": ({"unauthorised_after_s": 0.0, "after_bytes": AT}, UPLOADS),
    "reset at once": ({"reset_after_bytes": 0}, ALL),
    "reset in the middle": ({"reset_after_bytes": AT}, BYTES),
    "kept in part": ({"keep_bytes": KIB256}, {"upload.put"}),
    "stall": ({"stall_s": 0.3}, ALL),
    "stall in the middle": ({"stall_s": 0.3, "after_bytes": AT}, BYTES),
    "stall of the answer": ({"stall_answer_s": 0.3}, ALL),
    "slow": ({"slow_bytes_per_s": len(DATA) / 0.3}, BYTES),
    "truncated": (
        {"truncate_after_bytes": 5},
        ALL - {"bucket.delete", "object.delete", "folder.delete", "upload.start", "upload.cancel"},
    ),
    "corrupt": ({"corrupt_byte_at": AT}, {*BYTES, "upload.status"}),
    "corrupt on the way in": ({"corrupt_received_byte_at": AT}, UPLOADS),
    "answer lost": ({"lose_answer": True}, ALL),
    "killed before": ({"kill": "before_work"}, ALL),
    "killed in the middle": ({"kill": "before_work", "after_bytes": AT}, BYTES),
    "killed after": ({"kill": "after_work"}, ALL),
}
CASES = [(effect, operation) for effect in EFFECTS for operation in OPERATIONS]
HAPPENS = [(effect, operation) for effect, operation in CASES if operation in EFFECTS[effect][1]]
REFUSED = [(effect, operation) for effect, operation in CASES if operation not in EFFECTS[effect][1]]


def multipart(data: bytes) -> bytes:
    """An upload of ``x`` whose envelope is much longer than the offsets that the tests strike at."""
    head = json.dumps({"name": "x", "metadata": {"long": "m" * 7000}}).encode()
    return b"--b\r\n\r\n" + b" " * 150_000 + head + b"\r\n--b\r\n\r\n" + data + b"\r\n--b--"


def folder_request_of(raw, operation: str) -> tuple[Any, ...]:
    """A request for a folder, which is there unless it is to be inserted."""
    bucket, uniform = f"{raw.bucket}-folders", {"uniformBucketLevelAccess": {"enabled": True}}
    resource = {"name": bucket, "hierarchicalNamespace": {"enabled": True}, "iamConfiguration": uniform}
    assert raw("POST", "/storage/v1/b?project=p", json.dumps(resource)).status == 200
    folders = f"/storage/v1/b/{bucket}/folders"
    insert = ("POST", folders, '{"name": "a/"}')
    if operation != "folder.insert":
        assert raw(*insert).status == 200
    requests = {"insert": insert, "list": ("GET", folders)}
    requests |= {"get": ("GET", f"{folders}/a%2F"), "delete": ("DELETE", f"{folders}/a%2F")}
    return requests[operation.partition(".")[2]]


def restore_request_of(raw) -> tuple[Any, ...]:
    """A request to restore ``x``."""
    policy = {"softDeletePolicy": {"retentionDurationSeconds": 7 * 86400}}
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps(policy)).status == 200
    generation = raw.put("x", DATA).json()["generation"]
    assert raw("DELETE", raw.object_path("x")).status == 204
    return ("POST", f"{raw.object_path('x')}/restore?generation={generation}")


def copy_request_of(raw, operation: str) -> tuple[Any, ...]:
    """A request that makes ``y`` of ``x``."""
    raw.put("x", DATA)
    if operation == "object.compose":
        return ("POST", f"{raw.object_path('y')}/compose", '{"sourceObjects": [{"name": "x"}]}')
    if operation == "object.move":
        return ("POST", f"{raw.object_path('x')}/moveTo/o/y")
    word = {"object.rewrite": "rewriteTo", "object.copy": "copyTo"}[operation]
    return ("POST", f"{raw.object_path('x')}/{word}/b/{raw.bucket}/o/y")


def request_of(raw, operation: str) -> Callable[[], Any]:
    """Prepare a request of that operation, which succeeds on a healthy server, and return what sends it."""
    path, media = raw.object_path("x"), {"Content-Type": "x/y"}
    if operation == "object.restore":
        made = restore_request_of(raw)
        return lambda: raw(*made)
    if operation.startswith("folder."):
        made = folder_request_of(raw, operation)
        return lambda: raw(*made)
    if operation in ("object.compose", "object.rewrite", "object.copy", "object.move"):
        made = copy_request_of(raw, operation)
        return lambda: raw(*made)
    if operation in ("object.get", "object.media", "object.delete", "object.patch"):
        raw.put("x", DATA)
    session = raw.start("x") if operation in ("upload.put", "upload.status", "upload.cancel") else ""
    if operation == "upload.status":  # all the bytes, of which nobody has said yet that they are all
        assert raw.chunk(session, DATA, f"0-{len(DATA) - 1}/*").status == 308
    arguments: dict[str, tuple[Any, ...]] = {
        "bucket.get": ("GET", f"/storage/v1/b/{raw.bucket}"),
        "bucket.insert": ("POST", "/storage/v1/b?project=p", json.dumps({"name": f"{raw.bucket}-2"})),
        "bucket.list": ("GET", "/storage/v1/b?project=p"),
        "bucket.delete": ("DELETE", f"/storage/v1/b/{raw.bucket}"),
        "bucket.patch": ("PATCH", f"/storage/v1/b/{raw.bucket}", '{"labels": {"a": "b"}}'),
        "bucket.layout": ("GET", f"/storage/v1/b/{raw.bucket}/storageLayout"),
        "bucket.permissions": (
            "GET",
            f"/storage/v1/b/{raw.bucket}/iam/testPermissions?permissions=storage.objects.get",
        ),
        "bucket.policy": ("GET", f"/storage/v1/b/{raw.bucket}/iam"),
        "bucket.set_policy": ("PUT", f"/storage/v1/b/{raw.bucket}/iam", '{"bindings": []}'),
        "batch": ("POST", "/batch/storage/v1", BATCH, {"Content-Type": "multipart/mixed; boundary=b"}),
        "object.get": ("GET", path),
        "object.media": ("GET", f"{path}?alt=media"),
        "object.list": ("GET", f"/storage/v1/b/{raw.bucket}/o"),
        "object.delete": ("DELETE", path),
        "object.patch": ("PATCH", path, '{"metadata": {"k": "v"}}'),
        "upload.media": ("POST", raw.upload_path("media", name="x"), DATA, media),
        "upload.multipart": ("POST", raw.upload_path("multipart"), multipart(DATA), RELATED),
        "upload.start": ("POST", raw.upload_path("resumable"), '{"name": "x"}'),
        "upload.put": ("PUT", session, DATA, {"Content-Range": f"bytes 0-{len(DATA) - 1}/{len(DATA)}"}),
        "upload.status": ("PUT", session, b"", {"Content-Range": f"bytes */{len(DATA)}"}),
        "upload.cancel": ("DELETE", session),
        "token": ("POST", "/token", "grant_type=refresh_token"),
    }
    return lambda: raw(*arguments[operation])


def inverted(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]


def media_of(raw) -> bytes:
    return raw("GET", f"{raw.object_path('x')}?alt=media").body


def assert_happens(effect: str, operation: str, raw, send: Callable[[], Any], crc32c) -> None:
    """The client sees what the words of the fault say."""
    began_s = time.monotonic()
    if effect in ("reset at once", "reset in the middle", "answer lost"):
        with pytest.raises(ConnectionError):
            send()
    elif effect == "truncated":
        with pytest.raises(http.client.IncompleteRead) as caught:
            send()
        assert len(caught.value.partial) == 5
    elif effect.startswith(("status", "unauthorised")):
        assert send().status == (503 if effect.startswith("status") else 401)
    elif effect == "kept in part":
        answer = send()
        assert (answer.status, answer.headers["range"]) == (308, f"bytes=0-{KIB256 - 1}")
    elif effect in ("corrupt", "corrupt on the way in"):
        arrived = inverted(DATA, AT) if effect == "corrupt on the way in" else DATA
        answer = send()
        if operation != "object.media":
            assert answer.json()["crc32c"] == crc32c(arrived)
        assert (answer.body if operation == "object.media" else media_of(raw)) == inverted(DATA, AT)
    else:
        assert send().status < 300 or operation == "upload.cancel"
        assert time.monotonic() - began_s >= 0.29
    if operation in UPLOADS and effect.endswith("in the middle") and not effect.startswith("stall"):
        assert raw("GET", raw.object_path("x")).status == 404


def test_these_are_all_fields_and_operations() -> None:
    tried = {name for words, _ in EFFECTS.values() for name in words}
    assert tried == {field.name for field in dataclasses.fields(Fault)} - MATCHERS


@pytest.mark.parametrize(("effect", "operation"), [case for case in HAPPENS if not case[0].startswith("killed")])
def test_each_fault_happens_to_each_operation_that_takes_it(server, raw, crc32c, effect: str, operation: str) -> None:
    send = request_of(raw, operation)
    server.faults([Fault(operation=operation, **EFFECTS[effect][0])])
    assert_happens(effect, operation, raw, send, crc32c)
    assert [fault["fired"] for fault in server.faults_seen()] == [1]


@pytest.mark.parametrize("effect", [effect for effect in EFFECTS if effect.startswith("killed")])
def test_each_operation_can_kill_the_server(own_server, own_raw, effect: str) -> None:
    """Every third operation, from one that the seed of the run chooses: each time a server has to start again."""
    words, operations = EFFECTS[effect]
    for number, operation in enumerate(sorted(operations)[int(os.environ["CKPTMIRROR_CAMPAIGN_SEED"]) % 3 :: 3]):
        raw = type(own_raw)(own_server, f"bucket-{number}")
        own_server.create_bucket(raw.bucket)
        send = request_of(raw, operation)
        own_server.faults([Fault(operation=operation, **words)])
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            send()
        own_server.wait_killed()
        own_server.start()


@pytest.mark.parametrize(("effect", "operation"), REFUSED)
def test_a_fault_that_can_do_nothing_to_its_operation_is_refused_with_the_reason(
    server, raw, effect: str, operation: str
) -> None:
    words = EFFECTS[effect][0]
    answer = raw("POST", "/_faults", json.dumps([{"operation": operation, **words}]))
    assert answer.status == 400
    reason = answer.json()["error"]["message"]
    assert operation in reason
    assert any(name in reason for name in words)
    assert server.faults_seen() == []
    with pytest.raises(ValueError, match=operation.replace(".", r"\.")):
        Fault(operation=operation, **words)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"after_bytes": 5},
        {"after_bytes": 5, "kill": "after_work"},
        {"body": "busy"},
        {"retry_after_s": 5},
        {"unauthorised_after_s": 0.0, "status": 403},
        {"unauthorised_after_s": 0.0, "body": "no"},
        {"status": 99},
        {"status": 503, "lose_answer": True},
        {"status": 503, "kill": "before_work"},
        {"status": 503, "slow_bytes_per_s": 5.0},
        {"status": 503, "after_bytes": 5, "stall_answer_s": 1.0},
        {"status": 503, "after_bytes": 5, "corrupt_byte_at": 1},
        {"kill": "before_work", "corrupt_received_byte_at": 5},
        {"reset_after_bytes": 5, "truncate_after_bytes": 5},
        {"reset_after_bytes": 5, "corrupt_byte_at": 5},
        {"keep_bytes": KIB256, "corrupt_byte_at": 5},
        {"keep_bytes": KIB256, "truncate_after_bytes": 5},
        {"operation": "object.media", "lose_answer": True, "slow_bytes_per_s": 5.0},
        {"slow_bytes_per_s": 0},
        {"reset_after_bytes": -1},
        {"corrupt_byte_at": "1"},
    ],
)
def test_words_that_cannot_all_come_true_are_refused(server, raw, words: dict[str, Any]) -> None:
    answer = raw("POST", "/_faults", json.dumps([{"operation": "upload.put", **words}]))
    assert answer.status == 400, answer
    assert server.faults_seen() == []


@pytest.mark.parametrize("offset", [0, 1, 65_535, 65_536, KIB256, len(DATA) - 1])
def test_of_a_multipart_upload_the_bytes_of_the_object_are_counted(server, raw, offset: int) -> None:
    server.faults([Fault(operation="upload.multipart", corrupt_received_byte_at=offset)])
    assert raw("POST", raw.upload_path("multipart"), multipart(DATA), RELATED).status == 200
    assert media_of(raw) == inverted(DATA, offset)


def test_a_byte_of_a_small_upload_that_changes_on_its_way_in_fails_its_declared_checksum(server, raw, crc32c) -> None:
    body = b'--b\r\n\r\n{"name": "x", "crc32c": "%s"}\r\n--b\r\n\r\ndata\r\n--b--' % crc32c(b"data").encode()
    server.faults([Fault(operation="upload.multipart", corrupt_received_byte_at=2)])
    refused = raw("POST", raw.upload_path("multipart"), body, RELATED)
    assert refused.status == 400
    assert "CRC32C" in refused.json()["error"]["message"]
    assert raw("GET", raw.object_path("x")).status == 404
    assert raw("POST", raw.upload_path("multipart"), body, RELATED).status == 200


@pytest.mark.parametrize("operation", sorted(UPLOADS))
def test_a_fault_strikes_at_the_very_end_of_a_body_too(server, raw, operation: str) -> None:
    send = request_of(raw, operation)
    server.faults([Fault(operation=operation, status=503, after_bytes=len(DATA))])
    assert send().status == 503
    assert raw("GET", raw.object_path("x")).status == 404


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        *[(operation, {"corrupt_received_byte_at": len(DATA)}) for operation in sorted(UPLOADS)],
        *[(operation, {"corrupt_byte_at": len(DATA)}) for operation in sorted(BYTES)],
        *[(operation, {"reset_after_bytes": len(DATA) + 1}) for operation in sorted(BYTES)],
        *[(operation, {"status": 503, "after_bytes": len(DATA) + 1}) for operation in sorted(UPLOADS)],
        *[(operation, {"truncate_after_bytes": len(DATA)}) for operation in sorted(BYTES)],
        ("object.media", {"stall_s": 0.1, "corrupt_byte_at": len(DATA)}),
    ],
)
def test_a_fault_whose_byte_never_comes_has_not_fired(server, raw, operation: str, words: dict[str, Any]) -> None:
    send = request_of(raw, operation)
    server.faults([Fault(operation=operation, **words)])
    assert send().status == 200
    assert media_of(raw) == DATA
    (fault,) = server.faults_seen()
    assert fault["seen"] >= 1
    assert fault["fired"] == 0


def test_a_fault_of_the_answer_has_not_fired_on_a_request_that_was_refused(server, raw) -> None:
    server.faults([Fault(operation="object.delete", lose_answer=True)])
    assert raw("DELETE", raw.object_path("absent")).status == 404
    assert [(fault["seen"], fault["fired"]) for fault in server.faults_seen()] == [(1, 0)]


def test_a_pattern_meets_only_operations_to_which_the_fault_can_happen(server, raw) -> None:
    server.faults([Fault(operation="upload.*", truncate_after_bytes=5)])
    session = raw.start("x")  # its answer has no body to truncate
    with pytest.raises(http.client.IncompleteRead):
        raw.chunk(session, b"data", "0-3/4")
    assert [(fault["seen"], fault["fired"]) for fault in server.faults_seen()] == [(1, 1)]
