"""What the server does not serve, or the service forbids, is refused and never ignored."""

import gzip
import json

import pytest
from google.api_core import exceptions


def _upload(raw, resource):
    body = f"--b\r\n\r\n{json.dumps(resource)}\r\n--b\r\n\r\ndata\r\n--b--"
    return raw("POST", raw.upload_path("multipart"), body, {"Content-Type": "multipart/related; boundary=b"})


def test_what_is_not_served_is_refused_and_not_ignored(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects."""
    raw.put("x", b"data")
    for sub in ("acl", "acl/allUsers", "iam"):
        assert raw("GET", f"{raw.object_path('x')}/{sub}").status == 501
    assert raw("GET", f"/storage/v1/b/{raw.bucket}/o?matchGlob=*").status == 501
    assert raw.put("y", b"data", kmsKeyName="projects/p/k").status == 501
    assert raw("GET", raw.object_path("y")).status == 404


def test_a_parameter_that_an_operation_does_not_have_is_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/parameters."""
    raw.put("x", b"data")
    for method, path in (
        ("GET", f"{raw.object_path('x')}?ifGenerationMach=1"),
        ("GET", f"/storage/v1/b/{raw.bucket}/o?recursive=true"),
        ("DELETE", f"{raw.object_path('x')}?force=true"),
        ("POST", f"{raw.object_path('x')}/compose?ifGenerationNotMatch=1"),
        ("GET", f"/storage/v1/b/{raw.bucket}?generations=1"),
    ):
        answer = raw(method, path, b"{}")
        assert (answer.status, answer.json()["error"]["errors"][0]["reason"]) == (400, "invalidParameter"), path
    assert raw("GET", raw.object_path("x")).status == 200


@pytest.mark.parametrize("hold", ["temporary_hold", "event_based_hold"])
def test_what_is_held_is_neither_replaced_nor_deleted(bucket, hold):
    """Documented at https://cloud.google.com/storage/docs/object-holds."""
    blob = bucket.blob("x")
    blob.upload_from_string(b"data")
    setattr(blob, hold, True)
    blob.patch()
    for attempt in (
        lambda: bucket.blob("x").upload_from_string(b"new"),
        lambda: bucket.blob("x").delete(),
        lambda: bucket.move_blob(bucket.blob("x"), "y"),
        lambda: bucket.blob("x").compose([bucket.blob("x")]),
    ):
        with pytest.raises(exceptions.Forbidden, match="hold"):
            attempt()
    setattr(blob, hold, False)
    blob.patch()
    bucket.blob("x").delete()


@pytest.mark.parametrize(
    ("resource", "status"),
    [
        ({"contentTyp": "a/b"}, 400),
        ({"storageClass": "FAST"}, 400),
        ({"acl": [{"entity": "allUsers", "role": "READER"}]}, 501),
        ({"retention": {"mode": "Locked", "retainUntilTime": "2999-01-01T00:00:00Z"}}, 501),
        ({"acl": [], "id": "ignored", "size": "7"}, 200),
    ],
)
def test_a_field_that_is_unknown_or_not_served_is_refused_and_not_ignored(raw, resource, status):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects#resource."""
    assert _upload(raw, {"name": "x", **resource}).status == status
    raw.put("y", b"data")
    assert raw("PATCH", raw.object_path("y"), json.dumps(resource)).status == status


def test_a_predefined_access_list_is_taken_only_without_uniform_access(raw):
    """Documented at https://cloud.google.com/storage/docs/uniform-bucket-level-access."""
    assert raw.put("x", b"data", predefinedAcl="private").status == 200
    assert raw.put("x", b"data", predefinedAcl="publicRead").status == 501
    assert raw.put("x", b"data", predefinedAcl="everybody").status == 400
    uniform = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
    assert raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps(uniform)).status == 200
    assert raw.put("x", b"data", predefinedAcl="private").status == 400
    assert raw.put("x", b"data").status == 200


def test_customers_keys_are_refused_and_not_ignored(bucket):
    """Documented at https://cloud.google.com/storage/docs/encryption/customer-supplied-keys."""
    for attempt in (
        lambda: bucket.blob("x", encryption_key=b"0" * 32).upload_from_string(b"data"),
        lambda: bucket.blob("x", kms_key_name="projects/p/locations/l/keyRings/r/cryptoKeys/k").upload_from_string(b""),
    ):
        with pytest.raises(exceptions.MethodNotImplemented):
            attempt()
    assert bucket.get_blob("x") is None


def test_the_xml_api_and_projects_are_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    raw.put("x", b"data")
    for path in (f"/{raw.bucket}/x", f"/b/{raw.bucket}/o", "/storage/v1/projects/p/hmacKeys"):
        assert raw("GET", path).status == 501
    assert raw("GET", "/storage/v1/nonsense").status == 404


def test_a_gzip_encoded_object_goes_to_who_takes_gzip(bucket, raw):
    """Documented at https://cloud.google.com/storage/docs/transcoding."""
    blob = bucket.blob("x")
    blob.content_encoding = "gzip"
    blob.upload_from_string(gzip.compress(b"data"))
    assert bucket.blob("x").download_as_bytes() == b"data"
    assert gzip.decompress(bucket.blob("x").download_as_bytes(raw_download=True)) == b"data"
    assert raw("GET", f"{raw.object_path('x')}?alt=media").status == 501
    blob.cache_control = "no-transform"
    blob.patch()
    assert gzip.decompress(raw("GET", f"{raw.object_path('x')}?alt=media").body) == b"data"
