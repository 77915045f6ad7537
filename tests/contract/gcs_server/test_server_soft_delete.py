"""Soft deletion as the service documents it: what is deleted is kept for a time, listed apart, and can be restored."""

import json

import pytest
from google.api_core import exceptions
from raw_http import Raw

from ckptmirror.testing import GcsServerProcess

WEEK_S = 7 * 86400
POLICY = {"softDeletePolicy": {"retentionDurationSeconds": str(WEEK_S)}}


@pytest.fixture
def soft(raw):
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps(POLICY)).status == 200
    return raw


def _deleted(bucket, name="x", text="one"):
    """The generation of an object that was written and deleted."""
    blob = bucket.blob(name)
    blob.upload_from_string(text)
    bucket.delete_blob(name)  # blob.delete() would name the generation
    return blob.generation


def _soft_deleted(bucket):
    return [(blob.name, blob.generation) for blob in bucket.client.list_blobs(bucket, soft_deleted=True)]


def test_the_client_sees_the_policy_of_a_bucket(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/soft-delete."""
    bucket.reload()
    assert bucket.soft_delete_policy.retention_duration_seconds == WEEK_S
    bucket.soft_delete_policy.retention_duration_seconds = 0
    bucket.patch()
    again = bucket.client.get_bucket(bucket.name)
    assert again.soft_delete_policy.retention_duration_seconds == 0
    assert _deleted(bucket)
    assert _soft_deleted(bucket) == []


@pytest.mark.parametrize("seconds", [1, WEEK_S - 1, 90 * 86400 + 1, "x", None])
def test_a_retention_is_0_or_between_7_and_90_days(raw, seconds):
    """Documented at https://cloud.google.com/storage/docs/soft-delete."""
    body = json.dumps({"softDeletePolicy": {"retentionDurationSeconds": seconds}})
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", body).status == 400


def test_a_deleted_object_is_listed_and_seen_only_by_who_asks_for_it(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/use-soft-deleted-objects."""
    generation = _deleted(bucket)
    assert list(bucket.client.list_blobs(bucket)) == []
    assert list(bucket.client.list_blobs(bucket, versions=True)) == []
    assert bucket.get_blob("x") is None
    assert bucket.get_blob("x", generation=generation) is None
    assert _soft_deleted(bucket) == [("x", generation)]
    found = bucket.get_blob("x", generation=generation, soft_deleted=True)
    assert found.soft_delete_time is not None
    assert (found.hard_delete_time - found.soft_delete_time).total_seconds() == pytest.approx(WEEK_S, abs=1)
    with pytest.raises(exceptions.NotFound):
        bucket.blob("x", generation=generation).download_as_bytes()


def test_a_replaced_object_is_kept_too(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/soft-delete."""
    blob = bucket.blob("x")
    blob.upload_from_string("one")
    first = blob.generation
    blob.upload_from_string("two")
    assert _soft_deleted(bucket) == [("x", first)]
    assert bucket.blob("x").download_as_bytes() == b"two"


def test_a_restored_object_is_live_again_under_another_generation(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/restore."""
    blob = bucket.blob("x")
    blob.metadata = {"k": "v"}
    blob.upload_from_string("one")
    blob.metadata = {"k": "w"}
    blob.patch()
    generation = blob.generation
    blob.delete()
    restored = bucket.restore_blob("x", generation=generation)
    assert (restored.generation > generation, restored.metageneration) == (True, 1)
    assert restored.soft_delete_time is None
    assert restored.hard_delete_time is None
    again = bucket.get_blob("x")
    assert (again.metadata, again.download_as_bytes()) == ({"k": "w"}, b"one")
    assert _soft_deleted(bucket) == [("x", generation)]


def test_restoring_replaces_a_live_object_unless_a_precondition_forbids_it(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/restore."""
    generation = _deleted(bucket)
    bucket.blob("x").upload_from_string("two")
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.restore_blob("x", generation=generation, if_generation_match=0)
    bucket.restore_blob("x", generation=generation)
    assert bucket.blob("x").download_as_bytes() == b"one"
    assert len(_soft_deleted(bucket)) == 2


def test_what_was_not_deleted_cannot_be_restored(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/restore."""
    blob = bucket.blob("x")
    blob.upload_from_string("one")
    with pytest.raises(exceptions.NotFound):
        bucket.restore_blob("x", generation=blob.generation)
    path = soft.object_path("x")
    assert soft("POST", f"{path}/restore").status == 400
    assert soft("GET", f"{path}?softDeleted=true").status == 400
    assert soft("GET", f"{path}?softDeleted=maybe&generation=1").status == 400
    assert soft("GET", f"/storage/v1/b/{soft.bucket}/o?softDeleted=true&versions=true").status == 400


def test_of_a_versioned_bucket_noncurrent_versions_are_deleted_softly(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/soft-delete."""
    soft("PATCH", f"/storage/v1/b/{soft.bucket}", json.dumps({"versioning": {"enabled": True}}))
    generation = _deleted(bucket)
    assert _soft_deleted(bucket) == []
    bucket.blob("x", generation=generation).delete()
    assert _soft_deleted(bucket) == [("x", generation)]
    assert list(bucket.client.list_blobs(bucket, versions=True)) == []
    assert bucket.restore_blob("x", generation=generation).generation > generation


def test_a_bucket_with_nothing_but_soft_deleted_objects_is_empty(soft, bucket):
    """Documented at https://cloud.google.com/storage/docs/soft-delete."""
    _deleted(bucket)
    bucket.delete()
    assert bucket.client.lookup_bucket(bucket.name) is None
    bucket.client.create_bucket(bucket.name)
    assert _soft_deleted(bucket) == []


def test_soft_deleted_objects_survive_a_kill_and_go_when_their_time_is_over(tmp_path, connect):
    """Documented at https://cloud.google.com/storage/docs/soft-delete; ``--day-s`` shortens the time for the test."""
    settings = ["--bucket-settings", json.dumps(POLICY)]
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], options=settings) as server:
        bucket = connect(Raw(server, "bucket-1"))
        generation = _deleted(bucket)
        server.kill()
        server.restart()
        assert _soft_deleted(bucket) == [("x", generation)]
        assert bucket.restore_blob("x", generation=generation).download_as_bytes() == b"one"
    with GcsServerProcess(tmp_path / "2", buckets=["bucket-1"], options=[*settings, "--day-s", "0"]) as server:
        bucket = connect(Raw(server, "bucket-1"))
        generation = _deleted(bucket)
        assert _soft_deleted(bucket) == []
        with pytest.raises(exceptions.NotFound):
            bucket.restore_blob("x", generation=generation)
        assert list((server.directory / "data").iterdir()) == []
