"""Buckets with object versioning: what is replaced or deleted stays as a noncurrent version."""

import json

import pytest
from google.api_core import exceptions

VERSIONING = {"versioning": {"enabled": True}}


@pytest.fixture
def versioned(raw):
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps(VERSIONING)).status == 200
    return raw


def _put(bucket, name, *texts):
    found = []
    for text in texts:
        blob = bucket.blob(name)
        blob.upload_from_string(text)
        found.append(blob.generation)
    return found


def test_the_client_switches_versioning_on_and_off(bucket):
    """Documented at https://cloud.google.com/storage/docs/using-object-versioning."""
    bucket.reload()
    assert bucket.versioning_enabled is False
    before = bucket.metageneration
    bucket.versioning_enabled = True
    bucket.patch()
    again = bucket.client.get_bucket(bucket.name)
    assert (again.versioning_enabled, again.metageneration) == (True, before + 1)
    again.versioning_enabled = False
    again.update()
    assert bucket.client.get_bucket(bucket.name).versioning_enabled is False
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.patch(if_metageneration_match=before)


def test_what_is_replaced_becomes_noncurrent_and_is_read_by_its_generation(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/object-versioning."""
    first, second = _put(bucket, "x", "one", "two")
    assert bucket.blob("x").download_as_bytes() == b"two"
    old = bucket.blob("x", generation=first)
    assert old.download_as_bytes() == b"one"
    old.reload()
    assert old.time_deleted is not None
    assert bucket.get_blob("x", generation=second).time_deleted is None


def test_all_versions_are_listed_by_rising_generation(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    generations = {name: _put(bucket, name, "1", "2", "3") for name in ("a", "b")}
    listed = [(blob.name, blob.generation) for blob in bucket.client.list_blobs(bucket, versions=True)]
    assert listed == [(name, generation) for name in ("a", "b") for generation in generations[name]]
    live = [(blob.name, blob.generation) for blob in bucket.client.list_blobs(bucket)]
    assert live == [(name, generations[name][-1]) for name in ("a", "b")]


@pytest.mark.parametrize("page", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("delimiter", [None, "/"])
def test_pages_of_versions_add_up_to_the_whole(versioned, bucket, page, delimiter):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    for name in ("a", "d/b", "d/c"):
        _put(bucket, name, "1", "2")
    listing = bucket.client.list_blobs(bucket, versions=True, page_size=page, delimiter=delimiter)
    names = [blob.name for blob in listing]
    assert names == (["a", "a"] if delimiter else ["a", "a", "d/b", "d/b", "d/c", "d/c"])
    assert listing.prefixes == ({"d/"} if delimiter else set())


def test_a_deleted_object_is_noncurrent_and_no_longer_live(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/object-versioning."""
    (generation,) = _put(bucket, "x", "one")
    bucket.blob("x").delete()
    assert bucket.get_blob("x") is None
    assert bucket.blob("x", generation=generation).download_as_bytes() == b"one"
    with pytest.raises(exceptions.NotFound):
        bucket.blob("x").delete()
    bucket.blob("x").upload_from_string("two", if_generation_match=0)
    assert len(list(bucket.client.list_blobs(bucket, versions=True))) == 2


def test_a_deletion_that_names_a_generation_is_for_good(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/deleting-objects."""
    first, second = _put(bucket, "x", "one", "two")
    bucket.blob("x", generation=second).delete()
    assert bucket.get_blob("x") is None
    assert [blob.generation for blob in bucket.client.list_blobs(bucket, versions=True)] == [first]
    bucket.blob("x", generation=first).delete()
    assert list(bucket.client.list_blobs(bucket, versions=True)) == []
    with pytest.raises(exceptions.NotFound):
        bucket.blob("x", generation=first).delete()


def test_a_noncurrent_version_is_copied_back_and_its_metadata_changed(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/using-versioned-objects."""
    first, _ = _put(bucket, "x", "one", "two")
    bucket.copy_blob(bucket.blob("x"), bucket, "x", source_generation=first)
    assert bucket.blob("x").download_as_bytes() == b"one"
    old = bucket.blob("x", generation=first)
    old.metadata = {"k": "v"}
    old.patch()
    assert bucket.get_blob("x", generation=first).metadata == {"k": "v"}
    assert bucket.get_blob("x").metadata is None


def test_versions_stay_when_versioning_is_switched_off_but_no_new_ones_come(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/object-versioning."""
    first, _ = _put(bucket, "x", "one", "two")
    versioned("PATCH", f"/storage/v1/b/{versioned.bucket}", json.dumps({"versioning": {"enabled": False}}))
    (third,) = _put(bucket, "x", "three")
    assert [blob.generation for blob in bucket.client.list_blobs(bucket, versions=True)] == [first, third]
    bucket.blob("x").delete()
    assert [blob.generation for blob in bucket.client.list_blobs(bucket, versions=True)] == [first]


def test_a_bucket_with_noncurrent_versions_is_not_empty(versioned, bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/delete."""
    (generation,) = _put(bucket, "x", "one")
    bucket.blob("x").delete()
    with pytest.raises(exceptions.Conflict):
        bucket.delete()
    bucket.blob("x", generation=generation).delete()
    bucket.delete()


def test_versions_survive_a_kill_and_bytes_that_nobody_names_go(own_server, own_raw, connect):
    """Documented at https://cloud.google.com/storage/docs/consistency."""
    own_raw("PATCH", f"/storage/v1/b/{own_raw.bucket}", json.dumps(VERSIONING))
    bucket = connect(own_raw)
    generations = _put(bucket, "x", "one", "two", "three")
    bucket.copy_blob(bucket.blob("x"), bucket, "copy")
    bucket.blob("x", generation=generations[1]).delete()
    own_server.kill()
    own_server.restart()
    listed = [(blob.name, blob.generation) for blob in bucket.client.list_blobs(bucket, prefix="x", versions=True)]
    assert listed == [("x", generations[0]), ("x", generations[2])]
    assert bucket.blob("x", generation=generations[0]).download_as_bytes() == b"one"
    assert bucket.blob("copy").download_as_bytes() == b"three"
    assert len(list((own_server.directory / "data").iterdir())) == 2


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"versioning": {"enabled": "yes"}}, 400),
        ({"versioning": True}, 400),
        ({"storageClass": "FAST"}, 400),
        ({"location": "EU"}, 200),
        ({"lifecycle": {"rule": [{"action": {"type": "Delete"}}]}}, 400),
        ({"retentionPolicy": {"retentionPeriod": "1"}}, 501),
        ({"billing": {"requesterPays": True}}, 501),
        ({"labels": {"a": "b"}}, 200),
    ],
)
def test_a_setting_of_a_bucket_is_taken_or_refused(raw, settings, status):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/patch."""
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps(settings)).status == status
