"""Buckets with hierarchical namespace: folders are there by themselves, and listings fold as elsewhere."""

import json

import pytest
from google.api_core import exceptions
from raw_http import Raw

UNIFORM = {"uniformBucketLevelAccess": {"enabled": True}}


@pytest.fixture
def folders(raw):
    """A bucket with hierarchical namespace."""
    name = f"{raw.bucket}-h"
    raw.server.create_bucket(name, hierarchicalNamespace={"enabled": True}, iamConfiguration=UNIFORM)
    return Raw(raw.server, name)


def _folders(raw, query=""):
    body = raw("GET", f"/storage/v1/b/{raw.bucket}/folders{query}").json()
    return [item["name"] for item in body.get("items", [])]


def _insert(raw, name, query=""):
    return raw("POST", f"/storage/v1/b/{raw.bucket}/folders{query}", json.dumps({"name": name}))


def _folder(raw, method, name):
    return raw(method, f"/storage/v1/b/{raw.bucket}/folders/{name.replace('/', '%2F')}")


def test_the_client_makes_such_a_bucket_and_sees_what_it_is(bucket, connect):
    """Documented at https://cloud.google.com/storage/docs/create-hns-bucket."""
    made = bucket.client.bucket(f"{bucket.name}-h")
    made.hierarchical_namespace_enabled = True
    made.iam_configuration.uniform_bucket_level_access_enabled = True
    made.create()
    assert bucket.client.get_bucket(made.name).hierarchical_namespace_enabled is True
    assert bucket.client.get_bucket(bucket.name).hierarchical_namespace_enabled is None


def test_the_layout_of_a_bucket_is_told(folders, raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/getStorageLayout."""
    layout = folders("GET", f"/storage/v1/b/{folders.bucket}/storageLayout").json()
    assert layout["hierarchicalNamespace"] == {"enabled": True}
    assert (layout["kind"], layout["bucket"]) == ("storage#storageLayout", folders.bucket)
    assert "hierarchicalNamespace" not in raw("GET", f"/storage/v1/b/{raw.bucket}/storageLayout").json()


def test_it_wants_uniform_access_and_no_versions_and_is_decided_once(raw, folders):
    """Documented at https://cloud.google.com/storage/docs/hns-overview."""
    create, on = "/storage/v1/b?project=p", {"enabled": True}
    assert raw("POST", create, json.dumps({"name": "h-1", "hierarchicalNamespace": on})).status == 400
    body = {"name": "h-1", "hierarchicalNamespace": on, "iamConfiguration": UNIFORM, "versioning": on}
    assert raw("POST", create, json.dumps(body)).status == 400
    assert raw("GET", "/storage/v1/b/h-1").status == 404
    for bucket, settings in (
        (folders.bucket, {"versioning": on}),
        (folders.bucket, {"hierarchicalNamespace": {"enabled": False}}),
        (raw.bucket, {"hierarchicalNamespace": on, "iamConfiguration": UNIFORM}),
    ):
        assert raw("PATCH", f"/storage/v1/b/{bucket}", json.dumps(settings)).status == 400


def test_an_object_makes_the_folders_above_it_and_they_stay(folders, connect):
    """Documented at https://cloud.google.com/storage/docs/folders-overview."""
    bucket = connect(folders)
    bucket.blob("a/b/x").upload_from_string(b"data")
    assert _folders(folders) == ["a/", "a/b/"]
    bucket.blob("a/b/x").delete()
    assert _folders(folders) == ["a/", "a/b/"]
    bucket.blob("y").upload_from_string(b"data")
    assert _folders(folders) == ["a/", "a/b/"]


def test_a_listing_folds_as_in_any_bucket_and_shows_empty_folders_only_on_request(folders, connect):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    bucket = connect(folders)
    for name in ("a/x", "b/c/y", "z"):
        bucket.blob(name).upload_from_string(b"data")
    assert _insert(folders, "empty/").status == 200

    def prefixes(**query):
        found = bucket.client.list_blobs(bucket, delimiter="/", page_size=2, **query)
        return [blob.name for blob in found], sorted(found.prefixes)

    assert prefixes() == (["z"], ["a/", "b/"])
    assert prefixes(include_folders_as_prefixes=True) == (["z"], ["a/", "b/", "empty/"])
    assert prefixes(include_folders_as_prefixes=True, prefix="b/") == ([], ["b/c/"])
    bucket.blob("b/c/y").delete()
    assert prefixes() == (["z"], ["a/"])
    assert prefixes(include_folders_as_prefixes=True, prefix="b/") == ([], ["b/c/"])
    with pytest.raises(exceptions.BadRequest):
        list(bucket.client.list_blobs(bucket, include_folders_as_prefixes=True))


def test_folders_are_made_found_and_deleted_when_empty(folders, connect):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/folders."""
    resource = _insert(folders, "a/").json()
    assert (resource["kind"], resource["name"], resource["bucket"]) == ("storage#folder", "a/", folders.bucket)
    assert _folder(folders, "GET", "a/").json() == resource
    connect(folders).blob("a/x").upload_from_string(b"data")
    assert _folder(folders, "DELETE", "a/").status == 409
    connect(folders).blob("a/x").delete()
    assert _insert(folders, "a/b/").status == 200
    assert _folder(folders, "DELETE", "a/").status == 409
    assert _folder(folders, "DELETE", "a/b/").status == 204
    assert _folder(folders, "DELETE", "a/").status == 204
    assert _folder(folders, "GET", "a/").status == 404
    assert _folder(folders, "DELETE", "a/").status == 404


def test_a_folder_needs_the_one_above_it_unless_recursive(folders):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/folders/insert."""
    assert _insert(folders, "a/b/c/").status == 404
    assert _folders(folders) == []
    assert _insert(folders, "a/b/c/", "?recursive=true").status == 200
    assert _folders(folders) == ["a/", "a/b/", "a/b/c/"]
    assert _insert(folders, "a/").status == 409
    assert _insert(folders, "no-slash").status == 400


def test_folders_are_listed_by_prefix_level_and_page(folders):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/folders/list."""
    for name in ("a/1/deep/", "a/2/", "b/"):
        _insert(folders, name, "?recursive=true")
    assert _folders(folders, "?prefix=a/") == ["a/", "a/1/", "a/1/deep/", "a/2/"]
    assert _folders(folders, "?prefix=a/&delimiter=/") == ["a/", "a/1/", "a/2/"]
    assert _folders(folders, "?delimiter=/") == ["a/", "b/"]
    assert _folders(folders, "?startOffset=a/2/&endOffset=b/") == ["a/2/"]
    page = folders("GET", f"/storage/v1/b/{folders.bucket}/folders?maxResults=2").json()
    assert _folders(folders, f"?pageToken={page['nextPageToken']}") == ["a/1/deep/", "a/2/", "b/"]
    assert folders("GET", f"/storage/v1/b/{folders.bucket}/folders?delimiter=x").status == 400
    assert folders("GET", f"/storage/v1/b/{folders.bucket}/folders?prefix=a").status == 400


def test_other_buckets_have_no_folders(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/folders."""
    raw.put("a/x", b"data")
    assert raw("GET", f"/storage/v1/b/{raw.bucket}/folders").status == 400
    assert _insert(raw, "a/").status == 400


def test_what_is_not_modelled_is_refused(folders):
    """Documented at https://cloud.google.com/storage/docs/hns-overview."""
    _insert(folders, "a/")
    assert folders("POST", f"/storage/v1/b/{folders.bucket}/folders/a%2F/renameTo/folders/b%2F").status == 501
    assert folders("GET", f"/storage/v1/b/{folders.bucket}/managedFolders").status == 501
    assert folders.put("a/marker/", b"").status == 501
    folders.put("x", b"")
    assert folders("POST", f"{folders.object_path('x')}/rewriteTo/b/{folders.bucket}/o/y%2F").status == 501
    assert folders("POST", f"{folders.object_path('x')}/moveTo/o/y%2F").status == 501


def test_folders_survive_a_kill(own_server):
    """Documented at https://cloud.google.com/storage/docs/consistency."""
    own_server.create_bucket("bucket-h", hierarchicalNamespace={"enabled": True}, iamConfiguration=UNIFORM)
    raw = Raw(own_server, "bucket-h")
    raw.put("a/b/x", b"data")
    own_server.kill()
    own_server.restart()
    assert _folders(raw) == ["a/", "a/b/"]
