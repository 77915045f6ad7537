"""Copies that the service makes: rewrite with its tokens, copy, move."""

import contextlib
import json
import sqlite3

import pytest
from google.api_core import exceptions

from ckptmirror.testing import GcsServerProcess

MIB = 1024 * 1024


def _rewrite(raw, source, target, query="", body="", bucket=None):
    path = f"{raw.object_path(source)}/rewriteTo/b/{bucket or raw.bucket}/o/{target}{query}"
    return raw("POST", path, body)


@pytest.fixture
def far(raw):
    """A bucket in another location, to which a rewrite moves bytes."""
    name = f"{raw.bucket}-far"
    raw.server.create_bucket(name, location="EU")
    return name


def test_the_client_copies_an_object_with_its_metadata(bucket, crc32c):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/copy."""
    blob = bucket.blob("dir/a")
    blob.metadata = {"k": "v"}
    blob.upload_from_string(b"data", content_type="a/b")
    bucket.copy_blob(blob, bucket, "dir/b")
    again = bucket.get_blob("dir/b")
    assert (again.metadata, again.content_type, again.crc32c) == ({"k": "v"}, "a/b", crc32c(b"data"))
    assert again.md5_hash == blob.md5_hash
    assert again.generation > blob.generation
    assert again.metageneration == 1
    blob.delete()
    assert bucket.blob("dir/b").download_as_bytes() == b"data"


def test_a_rewrite_in_one_place_is_done_at_once_however_large(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    bucket.blob("a").upload_from_string(bytes(5 * MIB))
    assert bucket.blob("b").rewrite(bucket.blob("a")) == (None, 5 * MIB, 5 * MIB)
    assert bucket.get_blob("b").size == 5 * MIB


def test_a_rewrite_into_another_location_takes_as_many_calls_as_its_limit_wants(raw, far):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    raw.put("a", b"x" * (2 * MIB + 5))
    seen, query = [], f"?maxBytesRewrittenPerCall={MIB}"
    while not seen or not seen[-1]["done"]:
        token = f"&rewriteToken={seen[-1]['rewriteToken']}" if seen else ""
        seen.append(_rewrite(raw, "a", "b", query + token, bucket=far).json())
        assert len(seen) <= 3
    assert [int(answer["totalBytesRewritten"]) for answer in seen] == [MIB, 2 * MIB, 2 * MIB + 5]
    assert {answer["objectSize"] for answer in seen} == {str(2 * MIB + 5)}
    assert [answer["kind"] for answer in seen] == ["storage#rewriteResponse"] * 3
    assert seen[-1]["resource"]["bucket"] == far
    assert "rewriteToken" not in seen[-1]
    assert len(raw("GET", f"/storage/v1/b/{far}/o/b?alt=media").body) == 2 * MIB + 5


def test_the_client_follows_the_tokens_also_over_a_kill(tmp_path, connect):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    from raw_http import Raw

    options = ["--rewrite-bytes-per-call", "1000"]
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=options) as server:
        bucket = connect(Raw(server, "bucket-1"))
        bucket.blob("a").upload_from_string(b"x" * 2500)
        target = bucket.blob("b")
        token, rewritten, total = target.rewrite(bucket.blob("a"))
        assert (rewritten, total) == (1000, 2500)
        assert bucket.get_blob("b") is None
        server.kill()
        server.restart()
        token, rewritten, total = target.rewrite(bucket.blob("a"), token=token)
        assert rewritten == 2000
        assert target.rewrite(bucket.blob("a"), token=token) == (None, 2500, 2500)
        assert bucket.blob("b").download_as_bytes() == b"x" * 2500


def test_a_token_belongs_to_its_request(raw, far):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    raw.put("a", b"x" * (2 * MIB))
    limit = f"?maxBytesRewrittenPerCall={MIB}"
    token = _rewrite(raw, "a", "b", limit, bucket=far).json()["rewriteToken"]
    again = f"{limit}&rewriteToken={token}"
    assert _rewrite(raw, "a", "other", again, bucket=far).status == 400
    assert (
        _rewrite(raw, "a", "b", f"?maxBytesRewrittenPerCall={2 * MIB}&rewriteToken={token}", bucket=far).status == 400
    )
    assert _rewrite(raw, "a", "b", again, '{"contentType": "a/b"}', bucket=far).status == 400
    assert _rewrite(raw, "a", "b", f"{limit}&rewriteToken=nonsense", bucket=far).status == 400
    raw.put("a", b"y" * (2 * MIB))
    assert _rewrite(raw, "a", "b", again, bucket=far).status == 400
    assert raw("GET", f"/storage/v1/b/{far}/o/b").status == 404


def test_a_token_expires_after_a_week(own_server, own_raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    own_server.create_bucket("bucket-far", location="EU")
    own_raw.put("a", b"x" * (2 * MIB))
    limit = f"?maxBytesRewrittenPerCall={MIB}"
    token = _rewrite(own_raw, "a", "b", limit, bucket="bucket-far").json()["rewriteToken"]
    own_server.stop()
    with contextlib.closing(sqlite3.connect(own_server.directory / "index.db")) as db, db:
        db.execute("UPDATE rewrites SET started_us = started_us - 7 * 86400 * 1000000")
    own_server.restart()
    assert _rewrite(own_raw, "a", "b", f"{limit}&rewriteToken={token}", bucket="bucket-far").status == 410
    assert own_raw("GET", "/storage/v1/b/bucket-far/o/b").status == 404


@pytest.mark.parametrize("limit", ["0", "-1", "1000", "1048577", "x"])
def test_a_limit_is_a_multiple_of_1_mib(raw, limit):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    raw.put("a", b"x")
    assert _rewrite(raw, "a", "b", f"?maxBytesRewrittenPerCall={limit}").status == 400


def test_a_body_replaces_the_metadata(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite."""
    raw.put("a", b"x")
    raw("PATCH", raw.object_path("a"), '{"metadata": {"k": "v"}}')
    kept = _rewrite(raw, "a", "b").json()["resource"]
    assert (kept["metadata"], kept["contentType"]) == ({"k": "v"}, "x/y")
    replaced = _rewrite(raw, "a", "c", "", '{"contentType": "a/b"}').json()["resource"]
    assert replaced["contentType"] == "a/b"
    assert "metadata" not in replaced


def test_a_storage_class_is_changed_by_rewriting_and_by_nothing_else(bucket, raw):
    """Documented at https://cloud.google.com/storage/docs/changing-storage-classes."""
    blob = bucket.blob("a")
    blob.upload_from_string(b"x")
    first = blob.generation
    blob.update_storage_class("NEARLINE")
    again = bucket.get_blob("a")
    assert again.storage_class == "NEARLINE"
    assert again.generation > first
    assert raw("PATCH", raw.object_path("a"), '{"storageClass": "COLDLINE"}').status == 400


def test_preconditions_hold_on_both_sides(bucket):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    source, target = bucket.blob("a"), bucket.blob("b")
    source.upload_from_string(b"x")
    right, wrong = source.generation, source.generation + 1
    for conditions in (
        {"if_source_generation_match": wrong},
        {"if_source_metageneration_match": 2},
        {"if_generation_match": wrong},
        {"if_metageneration_match": 3},
    ):
        with pytest.raises(exceptions.PreconditionFailed):
            target.rewrite(source, **conditions)
    assert bucket.get_blob("b") is None
    target.rewrite(source, if_generation_match=0, if_source_generation_match=right)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.copy_blob(source, bucket, "b", if_generation_match=0)
    with pytest.raises(exceptions.NotModified):
        target.rewrite(source, if_source_generation_not_match=right)


def test_what_is_missing_on_either_side_answers_404(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    generation = int(raw.put("a", b"x").json()["generation"])
    assert _rewrite(raw, "absent", "b").status == 404
    assert _rewrite(raw, "a", "b", bucket="no-such-bucket").status == 404
    assert _rewrite(raw, "a", "b", f"?sourceGeneration={generation + 1}").status == 404
    assert _rewrite(raw, "a", "b", f"?sourceGeneration={generation}").status == 200
    assert _rewrite(raw, "a", "%0A").status == 400


def test_a_composite_object_is_copied_with_its_count(raw):
    """Documented at https://cloud.google.com/storage/docs/composite-objects."""
    raw.put("a", b"x")
    raw("POST", f"{raw.object_path('two')}/compose", json.dumps({"sourceObjects": [{"name": "a"}] * 2}))
    copied = _rewrite(raw, "two", "copy").json()["resource"]
    assert copied["componentCount"] == 2
    assert "md5Hash" not in copied


def test_a_move_gives_another_name_and_the_old_one_is_gone(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/move."""
    blob = bucket.blob("a/old")
    blob.metadata = {"k": "v"}
    blob.upload_from_string(b"data")
    moved = bucket.move_blob(blob, "b/new")
    assert moved.name == "b/new"
    assert bucket.get_blob("a/old") is None
    assert bucket.get_blob("b/new").metadata == {"k": "v"}
    assert bucket.blob("b/new").download_as_bytes() == b"data"
    with pytest.raises(exceptions.NotFound):
        bucket.move_blob(blob, "b/other")


def test_a_move_obeys_preconditions_and_needs_another_name(bucket, raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/move."""
    raw.put("a", b"1")
    raw.put("b", b"2")
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.move_blob(bucket.blob("a"), "b", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.move_blob(bucket.blob("a"), "c", if_source_generation_match=1)
    assert raw("POST", f"{raw.object_path('a')}/moveTo/o/a").status == 400
    assert bucket.blob("a").download_as_bytes() == b"1"
    bucket.move_blob(bucket.blob("a"), "b", if_generation_match=bucket.get_blob("b").generation)
    assert bucket.blob("b").download_as_bytes() == b"1"
