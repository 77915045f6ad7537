"""Composition as the service documents it: several objects become one."""

import json
import os

import pytest
from google.api_core import exceptions


def _compose(raw, target, *sources, query="", **fields):
    body = {"sourceObjects": [{"name": s} if isinstance(s, str) else s for s in sources], **fields}
    return raw("POST", f"{raw.object_path(target)}/compose{query}", json.dumps(body))


def test_the_client_puts_objects_together_in_the_order_given(bucket, crc32c):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/compose."""
    data = [os.urandom(700_000), b"", b"tail"]
    for number, part in enumerate(data):
        bucket.blob(f"part/{number}").upload_from_string(part)
    whole = bucket.blob("whole")
    whole.content_type = "application/x-whole"
    whole.metadata = {"k": "v"}
    whole.compose([bucket.blob(f"part/{number}") for number in range(3)])
    again = bucket.get_blob("whole")
    assert again.download_as_bytes() == b"".join(data)
    assert again.crc32c == crc32c(b"".join(data))
    assert (again.size, again.content_type, again.metadata) == (700_004, "application/x-whole", {"k": "v"})
    assert bucket.get_blob("part/0") is not None


def test_a_composite_object_has_a_component_count_and_no_md5(bucket):
    """Documented at https://cloud.google.com/storage/docs/composite-objects."""
    bucket.blob("a").upload_from_string(b"1")
    bucket.blob("two").compose([bucket.blob("a"), bucket.blob("a")])
    two = bucket.get_blob("two")
    assert (two.component_count, two.md5_hash) == (2, None)
    bucket.blob("five").compose([bucket.blob("two"), bucket.blob("a"), bucket.blob("two")])
    five = bucket.get_blob("five")
    assert (five.component_count, five.download_as_bytes()) == (5, b"11111")
    assert bucket.get_blob("a").component_count is None


def test_an_object_is_appended_to_by_composing_it_with_itself(bucket):
    """Documented at https://cloud.google.com/storage/docs/composite-objects."""
    bucket.blob("log").upload_from_string(b"one")
    generation = bucket.get_blob("log").generation
    bucket.blob("more").upload_from_string(b" two")
    bucket.blob("log").compose([bucket.blob("log"), bucket.blob("more")], if_generation_match=generation)
    assert bucket.blob("log").download_as_bytes() == b"one two"
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("log").compose([bucket.blob("log"), bucket.blob("more")], if_generation_match=generation)
    assert bucket.blob("log").download_as_bytes() == b"one two"


def test_generation_0_composes_only_what_is_not_there(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/compose."""
    bucket.blob("a").upload_from_string(b"1")
    bucket.blob("b").compose([bucket.blob("a")], if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("b").compose([bucket.blob("a")], if_generation_match=0)


def test_each_source_may_have_a_precondition(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/compose."""
    sources = [bucket.blob("a"), bucket.blob("b")]
    for source in sources:
        source.upload_from_string(b"x")
    right = [source.generation for source in sources]
    bucket.blob("ok").compose(sources, if_source_generation_match=right)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("no").compose(sources, if_source_generation_match=[right[0], right[1] + 1])
    assert bucket.get_blob("no") is None


def test_at_most_32_sources_are_taken_and_at_least_one(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/compose."""
    raw.put("a", b"1")
    assert _compose(raw, "most", *["a"] * 32).json()["componentCount"] == 32
    assert _compose(raw, "none").status == 400
    answer = _compose(raw, "more", *["a"] * 33)
    assert (answer.status, answer.json()["error"]["errors"][0]["reason"]) == (400, "invalid")
    assert raw("GET", raw.object_path("more")).status == 404


def test_a_source_that_is_missing_answers_404_and_changes_nothing(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    generation = raw.put("a", b"1").json()["generation"]
    assert _compose(raw, "b", "a", "absent").status == 404
    assert _compose(raw, "b", {"name": "a", "generation": str(int(generation) + 1)}).status == 404
    assert raw("GET", raw.object_path("b")).status == 404
    assert _compose(raw, "b", {"name": "a", "generation": generation}).status == 200


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"name": 1},
        {"name": "a", "generation": "x"},
        {"name": "a", "objectPreconditions": {"ifMetagenerationMatch": "1"}},
        "a",
    ],
)
def test_a_source_that_makes_no_sense_is_refused(raw, source):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/compose."""
    raw.put("a", b"1")
    body = json.dumps({"sourceObjects": [source]})
    assert raw("POST", f"{raw.object_path('b')}/compose", body).status == 400


def test_a_field_of_the_request_that_is_not_served_is_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/compose."""
    raw.put("a", b"1")
    assert _compose(raw, "b", "a", deleteSourceObjects=True).status == 501
    assert _compose(raw, "b", "a", query="?kmsKeyName=k").status == 501
    assert raw("GET", raw.object_path("b")).status == 404


def test_a_composition_survives_a_kill(own_server, own_raw, crc32c):
    """Documented at https://cloud.google.com/storage/docs/consistency."""
    own_raw.put("a", b"1")
    done = _compose(own_raw, "b", "a", "a").json()
    own_server.kill()
    own_server.restart()
    assert own_raw("GET", own_raw.object_path("b")).json() == done
    assert own_raw("GET", own_raw.object_path("b") + "?alt=media").body == b"11"
    assert done["crc32c"] == crc32c(b"11")
