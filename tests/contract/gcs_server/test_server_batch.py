"""Batches as the service documents them: many calls in one request, each with an answer of its own."""

import http.client
import re

import pytest
from google.api_core import exceptions

from ckptmirror.testing import Fault

MIXED = {"Content-Type": "multipart/mixed; boundary=b"}


def _batch(raw, *calls, headers=None, newline="\r\n"):
    """Each call is its request line, and its body if it has one."""
    body = ""
    for number, call in enumerate(calls):
        line, _, content = call.partition("\n")
        lines = ["--b", "Content-Type: application/http", f"Content-ID: <n{number}>", "", f"{line} HTTP/1.1"]
        body += newline.join([*lines, "Content-Type: application/json", "", content, ""])
    return raw("POST", "/batch/storage/v1", (body + "--b--").encode(), {**MIXED, **(headers or {})})


def _statuses(answer):
    assert answer.status == 200, answer
    return [int(text) for text in re.findall(r"HTTP/1\.1 (\d+)", answer.body.decode())]


def test_the_client_deletes_many_objects_in_one_request(bucket, server):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    for number in range(5):
        bucket.blob(f"dir/{number}").upload_from_string(b"x")
    server.clear_log()
    with bucket.client.batch():
        for number in range(5):
            bucket.blob(f"dir/{number}").delete()
    assert list(bucket.client.list_blobs(bucket)) == []
    assert len(server.log("batch")) == 1
    assert [entry["status"] for entry in server.log("object.delete")] == [204] * 5


def test_one_part_fails_alone(bucket):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    bucket.blob("a").upload_from_string(b"x")
    bucket.blob("c").upload_from_string(b"x")
    with bucket.client.batch(raise_exception=False) as batch:
        for name in ("a", "absent", "c"):
            bucket.blob(name).delete()
    assert [answer.status_code for answer in batch._responses] == [204, 404, 204]
    assert batch._responses[1].json()["error"]["errors"][0]["reason"] == "notFound"
    bucket.blob("d").upload_from_string(b"x")
    batch = bucket.client.batch()
    with pytest.raises(exceptions.NotFound), batch:
        bucket.delete_blobs([bucket.blob("absent"), bucket.blob("d")])
    assert bucket.get_blob("d") is None


def test_metadata_is_changed_in_a_batch(bucket):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    for name in ("a", "b"):
        bucket.blob(name).upload_from_string(b"x")
    with bucket.client.batch():
        for name in ("a", "b"):
            blob = bucket.blob(name)
            blob.metadata = {"from": name}
            blob.patch()
    assert [bucket.get_blob(name).metadata for name in ("a", "b")] == [{"from": "a"}, {"from": "b"}]


@pytest.mark.parametrize("newline", ["\r\n", "\n"], ids=["crlf", "lf"])
def test_answers_come_in_order_with_the_ids_of_their_calls(raw, newline):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    raw.put("a/b", b"x")
    answer = _batch(
        raw,
        f"GET {raw.object_path('a/b')}?fields=name",
        f"PATCH {raw.object_path('a/b')}?fields=metadata\n" + '{"metadata": {"k": "v"}}',
        f"GET {raw.object_path('absent')}",
        "GET /storage/v1/nonsense",
        newline=newline,
    )
    assert _statuses(answer) == [200, 200, 404, 404]
    text = answer.body.decode()
    assert re.findall(r"Content-ID: <(.*?)>", text) == [f"response-n{number}" for number in range(4)]
    assert '"name": "a/b"' in text
    assert '"k": "v"' in text
    assert answer.headers["content-type"].startswith("multipart/mixed; boundary=batch_")


def test_at_most_100_calls_are_taken(raw):
    """Documented at https://cloud.google.com/storage/docs/batch; the status of a 101st is not."""
    raw.put("a", b"x")
    path = raw.object_path("a")
    assert _statuses(_batch(raw, *[f"GET {path}"] * 100)) == [200] * 100
    assert _batch(raw, f"DELETE {path}", *[f"GET {path}"] * 100).status == 400
    assert raw("GET", path).status == 200


def test_uploads_downloads_and_batches_are_not_taken_as_parts(raw):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    raw.put("a", b"x")
    answer = _batch(
        raw,
        f"GET {raw.object_path('a')}?alt=media",
        f"POST {raw.upload_path('media', name='b')}",
        "POST /batch/storage/v1",
        f"GET {raw.object_path('a')}",
    )
    assert _statuses(answer) == [400, 400, 400, 200]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"--b\r\nContent-Type: application/http\r\n\r\nGET /x HTTP/1.1\r\n\r\n", "multipart/mixed; boundary=b"),
        (b"--b--", "multipart/mixed; boundary=b"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\nGET /x HTTP/1.1\r\n\r\n--b--", "multipart/mixed; boundary=b"),
        (b"--b\r\nContent-Type: application/http\r\n\r\nnonsense\r\n\r\n--b--", "multipart/mixed; boundary=b"),
        (b"{}", "application/json"),
        (b"--b--", "multipart/mixed"),
    ],
)
def test_what_is_no_batch_is_refused(raw, body, content_type):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    assert raw("POST", "/batch/storage/v1", body, {"Content-Type": content_type}).status == 400


def test_preconditions_hold_in_a_batch(bucket):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    blob = bucket.blob("a")
    blob.upload_from_string(b"x")
    with pytest.raises(exceptions.PreconditionFailed), bucket.client.batch():
        bucket.blob("a").delete(if_generation_match=blob.generation + 1)
    assert bucket.get_blob("a") is not None


def test_a_part_suffers_its_own_fault(raw, server):
    """Documented at https://cloud.google.com/storage/docs/batch; faults are this server's own."""
    raw.put("a", b"x")
    raw.put("b", b"x")
    server.faults([Fault(operation="object.delete", status=429, retry_after_s=7, object="^a$")])
    answer = _batch(raw, f"DELETE {raw.object_path('a')}", f"DELETE {raw.object_path('b')}")
    assert _statuses(answer) == [429, 204]
    assert "Retry-After: 7" in answer.body.decode()
    server.faults([Fault(operation="object.delete", lose_answer=True)])
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        _batch(raw, f"DELETE {raw.object_path('a')}")
    assert raw("GET", raw.object_path("a")).status == 404
    assert [fault["fired"] for fault in server.faults_seen()] == [1, 1]
