"""Too many requests: the rate of changes of one object, and 429 by script with the time to wait."""

import json

import pytest
from google.api_core import exceptions
from google.cloud.storage.retry import DEFAULT_RETRY
from raw_http import Raw

from ckptmirror.testing import Fault, GcsServerProcess


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A server on which one object changes once an hour."""
    options = ["--mutations-per-s", str(1 / 3600)]
    with GcsServerProcess(tmp_path_factory.mktemp("pace"), buckets=["bucket-1"], options=options) as server:
        yield Raw(server, "bucket-1")
        assert server.stderr_path.read_text() == ""


def test_a_second_change_of_an_object_within_its_time_is_429_and_does_nothing(slow):
    """Documented at https://cloud.google.com/storage/quotas#objects; see https://cloud.google.com/storage/docs/gcs429."""
    assert slow.put("a", b"one").status == 200
    for attempt in (
        lambda: slow.put("a", b"two"),
        lambda: slow("DELETE", slow.object_path("a")),
        lambda: slow("PATCH", slow.object_path("a"), '{"metadata": {"k": "v"}}'),
        lambda: slow("POST", f"{slow.object_path('a')}/compose", json.dumps({"sourceObjects": [{"name": "a"}]})),
        lambda: slow("POST", f"{slow.object_path('a')}/rewriteTo/b/bucket-1/o/a"),
    ):
        answer = attempt()
        assert answer.status == 429
        assert answer.json()["error"]["errors"][0]["reason"] == "rateLimitExceeded"
    assert slow("GET", slow.object_path("a") + "?alt=media").body == b"one"


def test_other_objects_and_reads_are_not_slowed(slow):
    """Documented at https://cloud.google.com/storage/docs/request-rate."""
    for number in range(20):
        assert slow.put(f"b/{number}", b"x").status == 200
        assert slow("GET", slow.object_path(f"b/{number}")).status == 200


def test_a_refused_change_costs_nothing(slow):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    assert slow.put("c", b"x", ifGenerationMatch="5").status == 412
    assert slow.put("c", b"x", ifGenerationMatch="0").status == 200


def test_a_resumable_upload_that_ends_too_early_is_ended_again_later(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/performing-resumable-uploads."""
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=["--mutations-per-s", "2"]) as server:
        raw = Raw(server, "bucket-1")
        too_early = False
        while not too_early:  # a slow machine may need some tries to come back within half a second
            session = raw.start("a")
            raw.put("a", b"first")
            answer = raw.chunk(session, b"data", "0-3/4")
            too_early = answer.status == 429
        while answer.status == 429:
            answer = raw.ask(session, 4)
        assert answer.status == 200
        assert raw("GET", raw.object_path("a") + "?alt=media").body == b"data"


def test_the_client_waits_out_a_429_and_goes_on(bucket, server):
    """Documented at https://cloud.google.com/storage/docs/retry-strategy."""
    bucket.blob("x").upload_from_string(b"data")
    server.faults([Fault(operation="object.get", status=429, retry_after_s=2, times=2)])
    server.clear_log()
    bucket.blob("x").reload(retry=DEFAULT_RETRY.with_delay(initial=0.01, maximum=0.02))
    assert [entry["status"] for entry in server.log("object.get")] == [429, 429, 200]
    server.faults([Fault(operation="object.get", status=429, times=0)])
    with pytest.raises(exceptions.TooManyRequests):
        bucket.blob("x").reload(retry=None)


def test_a_429_by_script_says_how_long_to_wait(raw, server):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    server.faults([Fault(operation="upload.media", status=429, retry_after_s=7)])
    answer = raw.put("x", b"data")
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["errors"][0]["reason"] == "rateLimitExceeded"
    assert raw.put("x", b"data").status == 200
