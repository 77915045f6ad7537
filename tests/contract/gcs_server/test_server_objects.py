"""Objects as the service documents them: create, read, ranges, preconditions, metadata, names, errors."""

import base64
import hashlib
import json
import os

import pytest
from google.api_core import exceptions

CRLF = b"\r\n"


def test_a_small_upload_is_stored_with_its_checksums_and_a_generation(bucket, crc32c):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects#resource."""
    blob = bucket.blob("a/b.bin")
    blob.metadata = {"run": "r1", "ünï": "çödé"}
    blob.upload_from_string(b"hello", content_type="application/x-test")
    again = bucket.get_blob("a/b.bin")
    assert again.size == 5
    assert again.crc32c == crc32c(b"hello")
    assert again.md5_hash == base64.b64encode(hashlib.md5(b"hello").digest()).decode()
    assert again.generation > 1_600_000_000_000_000
    assert again.metageneration == 1
    assert again.metadata == {"run": "r1", "ünï": "çödé"}
    assert again.content_type == "application/x-test"
    assert again.etag
    assert again.id == f"{bucket.name}/a/b.bin/{again.generation}"
    assert again.time_created == again.updated
    assert again.download_as_bytes() == b"hello"


def test_an_upload_above_8_mib_by_the_client_is_resumable_and_arrives_whole(server, bucket, tmp_path, crc32c):
    """Documented at https://cloud.google.com/storage/docs/resumable-uploads."""
    data = os.urandom(9 * 1024 * 1024 + 17)
    (tmp_path / "big").write_bytes(data)
    blob = bucket.blob("big")
    blob.chunk_size = 1024 * 1024
    blob.upload_from_filename(str(tmp_path / "big"), if_generation_match=0)
    assert blob.size == len(data)
    assert blob.crc32c == crc32c(data)
    assert bucket.blob("big").download_as_bytes() == data
    chunks = [entry["status"] for entry in server.log("upload.put") if entry["object"] == "big"]
    assert chunks == [308] * 9 + [200]


def test_an_empty_object_is_an_object(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/insert."""
    bucket.blob("empty").upload_from_string(b"")
    assert bucket.get_blob("empty").size == 0
    assert bucket.blob("empty").download_as_bytes() == b""


def test_generations_rise_when_a_name_is_written_again_or_after_its_deletion(bucket):
    """Documented at https://cloud.google.com/storage/docs/metadata."""
    seen = []
    for _ in range(3):
        blob = bucket.blob("x")
        blob.upload_from_string(b"same")
        seen.append(blob.generation)
        blob.delete()
    assert seen == sorted(set(seen))


def test_generation_0_creates_only(bucket):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    bucket.blob("x").upload_from_string(b"first", if_generation_match=0)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").upload_from_string(b"second", if_generation_match=0)
    assert bucket.blob("x").download_as_bytes() == b"first"


def test_a_generation_replaces_only_itself(bucket):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    blob = bucket.blob("x")
    blob.upload_from_string(b"first")
    first = blob.generation
    blob.upload_from_string(b"second", if_generation_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").upload_from_string(b"third", if_generation_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("absent").upload_from_string(b"third", if_generation_match=first)
    assert bucket.blob("x").download_as_bytes() == b"second"


def test_preconditions_hold_for_reads_patches_and_deletions_too(bucket):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    blob = bucket.blob("x")
    blob.upload_from_string(b"data")
    wrong = blob.generation + 1
    for attempt in (
        lambda: bucket.blob("x").reload(if_generation_match=wrong),
        lambda: bucket.blob("x").download_as_bytes(if_generation_match=wrong),
        lambda: bucket.blob("x").delete(if_generation_match=wrong),
        lambda: bucket.blob("x").delete(if_metageneration_match=2),
        lambda: bucket.blob("x").patch(if_generation_match=wrong),
    ):
        with pytest.raises(exceptions.PreconditionFailed):
            attempt()
    bucket.blob("x").delete(if_generation_match=blob.generation)
    assert bucket.get_blob("x") is None


def test_a_generation_that_must_not_match_and_does_answers_304(raw):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    generation = raw.put("x", b"data").json()["generation"]
    for alt in ("json", "media"):
        path = f"{raw.object_path('x')}?alt={alt}"
        assert raw("GET", f"{path}&ifGenerationNotMatch={generation}").status == 304
        assert raw("GET", f"{path}&ifGenerationNotMatch=1").status == 200
        assert raw("GET", f"{path}&ifMetagenerationNotMatch=1").status == 304


def test_an_etag_is_a_condition_too(bucket):
    """Documented at https://cloud.google.com/storage/docs/request-preconditions."""
    blob = bucket.blob("x")
    blob.upload_from_string(b"data")
    bucket.blob("x").reload(if_etag_match=blob.etag)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.blob("x").reload(if_etag_match="other")
    with pytest.raises(exceptions.NotModified):
        bucket.blob("x").reload(if_etag_not_match=blob.etag)


def test_a_precondition_that_is_no_number_is_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    assert raw.put("x", b"data", ifGenerationMatch="abc").status == 400
    assert raw("GET", raw.object_path("x")).status == 404


def test_an_old_generation_is_not_found_in_a_bucket_without_versions(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/get."""
    blob = bucket.blob("x")
    blob.upload_from_string(b"first")
    old = blob.generation
    blob.upload_from_string(b"second")
    assert bucket.blob("x", generation=blob.generation).download_as_bytes() == b"second"
    with pytest.raises(exceptions.NotFound):
        bucket.blob("x", generation=old).download_as_bytes()
    with pytest.raises(exceptions.NotFound):
        bucket.blob("x", generation=old).delete()


@pytest.mark.parametrize(
    ("header", "expected", "content_range"),
    [
        ("bytes=0-0", b"0", "bytes 0-0/10"),
        ("bytes=3-5", b"345", "bytes 3-5/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=7-99", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=-99", b"0123456789", "bytes 0-9/10"),
    ],
)
def test_a_range_answers_206_with_exactly_those_bytes(raw, header, expected, content_range):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/parameters."""
    raw.put("digits", b"0123456789")
    for path in (raw.object_path("digits"), "/download" + raw.object_path("digits")):
        answer = raw("GET", f"{path}?alt=media", headers={"Range": header})
        assert (answer.status, answer.body) == (206, expected)
        assert answer.headers["content-range"] == content_range
        assert answer.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-12", "bytes=-0"])
def test_a_range_after_the_end_answers_416(raw, header):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    raw.put("digits", b"0123456789")
    answer = raw("GET", raw.object_path("digits") + "?alt=media", headers={"Range": header})
    assert answer.status == 416
    assert answer.headers["content-range"] == "bytes */10"


def test_the_client_reads_a_range(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/parameters."""
    bucket.blob("digits").upload_from_string(b"0123456789")
    assert bucket.blob("digits").download_as_bytes(start=2, end=4) == b"234"
    with pytest.raises(exceptions.RequestRangeNotSatisfiable):
        bucket.blob("digits").download_as_bytes(start=10)


def test_a_download_carries_hashes_generation_and_stored_length(raw, crc32c):
    """Documented at https://cloud.google.com/storage/docs/xml-api/reference-headers."""
    resource = raw.put("x", b"data").json()
    answer = raw("GET", "/download" + raw.object_path("x") + "?alt=media")
    assert answer.headers["x-goog-generation"] == resource["generation"]
    assert answer.headers["x-goog-metageneration"] == "1"
    assert answer.headers["x-goog-stored-content-length"] == "4"
    assert f"crc32c={crc32c(b'data')}" in answer.headers["x-goog-hash"]
    assert "md5=" in answer.headers["x-goog-hash"]
    assert answer.headers["etag"] == resource["etag"]
    assert answer.headers["content-type"] == "x/y"


@pytest.mark.parametrize(
    ("field", "value", "message"), [("crc32c", "AAAAAA==", "CRC32C"), ("md5Hash", "A" * 22 + "==", "MD5")]
)
def test_a_multipart_upload_with_a_wrong_checksum_is_refused_and_not_stored(raw, field, value, message):
    """Documented at https://cloud.google.com/storage/docs/data-validation."""
    answer = _multipart(raw, {"name": "x", field: value}, b"data", CRLF)
    assert answer.status == 400
    assert message in answer.json()["error"]["message"]
    assert raw("GET", raw.object_path("x")).status == 404


def test_a_wrong_checksum_in_a_header_is_refused_and_a_right_one_taken(raw, crc32c):
    """Documented at https://cloud.google.com/storage/docs/data-validation."""
    path = raw.upload_path("media", name="x")
    for header in (
        {"x-goog-hash": "crc32c=AAAAAA=="},
        {"Content-MD5": "A" * 22 + "=="},
        {"x-goog-hash": "crc32c=oops"},
    ):
        assert raw("POST", path, b"data", header).status == 400
    assert raw("GET", raw.object_path("x")).status == 404
    md5 = base64.b64encode(hashlib.md5(b"data").digest()).decode()
    assert raw("POST", path, b"data", {"x-goog-hash": f"crc32c={crc32c(b'data')},md5={md5}"}).status == 200


def test_a_wrong_checksum_leaves_the_object_that_was_there(raw):
    """Documented at https://cloud.google.com/storage/docs/data-validation."""
    raw.put("x", b"old")
    assert _multipart(raw, {"name": "x", "crc32c": "AAAAAA=="}, b"new", CRLF).status == 400
    assert raw("GET", raw.object_path("x") + "?alt=media").body == b"old"


@pytest.mark.parametrize("newline", [b"\r\n", b"\n"], ids=["crlf", "lf"])
@pytest.mark.parametrize("data", [b"", b"data", b"\n--sep\r\nnot the end\n", os.urandom(300_000)])
def test_a_multipart_body_is_read_with_either_line_end(raw, newline, data, crc32c):
    """Documented at https://cloud.google.com/storage/docs/uploading-objects."""
    answer = _multipart(raw, {"name": "x", "metadata": {"k": "v"}, "crc32c": crc32c(data)}, data, newline)
    assert answer.status == 200, answer.body
    assert answer.json()["metadata"] == {"k": "v"}
    assert answer.json()["contentType"] == "x/y"
    assert raw("GET", raw.object_path("x") + "?alt=media").body == data


def test_a_multipart_body_without_its_end_is_refused(raw):
    """Documented at https://cloud.google.com/storage/docs/uploading-objects."""
    answer = _multipart(raw, {"name": "x"}, b"data", CRLF, end=b"")
    assert answer.status == 400
    assert raw("GET", raw.object_path("x")).status == 404


def _multipart(raw, resource, data, newline, end=None):
    mark = b"==a b=="
    head = [b"--" + mark, b"content-type: application/json; charset=UTF-8", b"", json.dumps(resource).encode()]
    media = [b"--" + mark, b"content-type: x/y", b"", data]
    end = newline + b"--" + mark + b"--" if end is None else end
    body = newline.join(head + media) + end
    headers = {"Content-Type": f'multipart/related; boundary="{mark.decode()}"'}
    return raw("POST", raw.upload_path("multipart"), body, headers)


def test_a_patch_merges_custom_metadata_and_raises_the_metageneration(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/patch."""
    blob = bucket.blob("x")
    blob.metadata = {"a": "1", "b": "2"}
    blob.upload_from_string(b"data")
    generation = blob.generation
    blob.metadata = {"b": None, "c": "3"}
    blob.patch(if_metageneration_match=1)
    again = bucket.get_blob("x")
    assert again.metadata == {"a": "1", "c": "3"}
    assert (again.generation, again.metageneration) == (generation, 2)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.patch(if_metageneration_match=1)


def test_an_update_replaces_custom_metadata(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/update."""
    blob = bucket.blob("x")
    blob.metadata = {"a": "1"}
    blob.upload_from_string(b"data")
    blob.metadata = {"b": "2"}
    blob.update()
    assert bucket.get_blob("x").metadata == {"b": "2"}


def test_the_custom_time_only_moves_later(raw):
    """Documented at https://cloud.google.com/storage/docs/metadata#custom-time."""

    def change(method, **fields):
        return raw(method, raw.object_path("x"), json.dumps(fields), {"Content-Type": "application/json"}).status

    assert _multipart(raw, {"name": "x", "customTime": "2026-05-01T00:00:00Z"}, b"", CRLF).status == 200
    assert change("PATCH", customTime="2026-05-01T01:59:59+02:00") == 400
    assert change("PATCH", customTime=None) == 400
    assert change("PUT", metadata={"k": "v"}) == 400
    assert change("PATCH", metadata={"k": "v"}) == 200
    assert change("PATCH", customTime="2026-05-01T02:00:00+02:00") == 200
    assert change("PUT", customTime="2026-05-01T00:00:00.5Z") == 200
    assert raw("GET", raw.object_path("x")).json()["customTime"] == "2026-05-01T00:00:00.5Z"
    assert _multipart(raw, {"name": "x"}, b"", CRLF).status == 200, "another upload is another object"
    assert change("PATCH", customTime="2020-01-01T00:00:00Z") == 200


@pytest.mark.parametrize("text", ["yesterday", "2026-05-01", "2026-05-01T00:00:00", "2026-13-01T00:00:00Z"])
def test_a_custom_time_is_a_time_with_its_zone(raw, text):
    """Documented at https://cloud.google.com/storage/docs/metadata#custom-time."""
    assert _multipart(raw, {"name": "x", "customTime": text}, b"", CRLF).status == 400


def test_custom_metadata_is_text_of_at_most_8_kib(raw):
    """Documented at https://cloud.google.com/storage/docs/metadata."""
    assert _multipart(raw, {"name": "x", "metadata": {"k": "v" * 9000}}, b"", CRLF).status == 400
    assert _multipart(raw, {"name": "x", "metadata": {"k": 1}}, b"", CRLF).status == 400
    assert _multipart(raw, {"name": "x", "metadata": {"k": "v" * 8000}}, b"", CRLF).status == 200


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "a/b/c",
        "a b",
        "a+b",
        "ü/日本/🚀",
        "100%",
        "%2F",
        "a?b&c=d#e",
        "dir/",
        "../up",
        "x" * 1024,
        "ü" * 512,
        "'\"\\",
    ],
)
def test_any_legal_name_is_written_listed_read_and_deleted(bucket, name):
    """Documented at https://cloud.google.com/storage/docs/objects."""
    bucket.blob(name).upload_from_string(b"data", if_generation_match=0)
    assert [blob.name for blob in bucket.client.list_blobs(bucket)] == [name]
    assert bucket.blob(name).download_as_bytes() == b"data"
    bucket.blob(name).delete()
    assert bucket.get_blob(name) is None


@pytest.mark.parametrize("name", ["", "x" * 1025, "ü" * 513, "a\nb", "a\rb", ".", "..", ".well-known/acme-challenge/x"])
def test_an_illegal_name_is_refused(raw, name):
    """Documented at https://cloud.google.com/storage/docs/objects."""
    assert raw.put(name, b"data").status == 400


def test_a_slash_in_a_path_must_be_encoded(raw):
    """Documented at https://cloud.google.com/storage/docs/request-endpoints."""
    raw.put("a/b", b"data")
    assert raw("GET", f"/storage/v1/b/{raw.bucket}/o/a%2Fb").status == 200
    assert raw("GET", f"/storage/v1/b/{raw.bucket}/o/a/b").status == 404


def test_what_is_missing_answers_404_with_the_json_error_body(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    answer = raw("GET", raw.object_path("absent"))
    assert answer.status == 404
    error = answer.json()["error"]
    assert (error["code"], error["errors"][0]["reason"]) == (404, "notFound")
    assert raw("GET", raw.object_path("absent") + "?alt=media").status == 404
    assert raw("DELETE", raw.object_path("absent")).status == 404
    assert raw("GET", "/storage/v1/b/no-such-bucket/o").status == 404
    assert raw("POST", "/upload/storage/v1/b/no-such-bucket/o?uploadType=media&name=x", b"d").status == 404
    assert raw("POST", "/upload/storage/v1/b/no-such-bucket/o?uploadType=resumable&name=x", b"").status == 404


def test_a_partial_response_has_only_the_fields_asked_for(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api."""
    raw.put("x", b"data")
    assert set(raw("GET", raw.object_path("x") + "?fields=name,size").json()) == {"name", "size"}
    listing = raw("GET", f"/storage/v1/b/{raw.bucket}/o?fields=items(name,crc32c),nextPageToken").json()
    assert [set(item) for item in listing["items"]] == [{"name", "crc32c"}]
    assert set(listing) == {"items"}
    assert raw("GET", f"/storage/v1/b/{raw.bucket}/o?fields=items/name").json() == {"items": [{"name": "x"}]}
    assert raw("GET", raw.object_path("x") + "?fields=name(").status == 400


@pytest.mark.parametrize("fields", ["nmae", "name,sise", "items", "name/x", "owner/name", "owner(entity,x)", "size(*)"])
def test_a_field_that_an_object_has_not_is_refused(raw, fields):
    """Documented at https://cloud.google.com/storage/docs/json_api."""
    raw.put("x", b"data")
    answer = raw("GET", raw.object_path("x") + f"?fields={fields}")
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["errors"][0]["reason"] == "invalidParameter"


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        ("/o", "items(nmae)", "items(name,metadata/any),prefixes,nextPageToken,kind"),
        ("", "bucket", "name,labels/any,iamConfiguration/uniformBucketLevelAccess(enabled,lockedTime),lifecycle"),
        ("?project=p", "items/nmae", "items(name,location),nextPageToken"),
        ("/storageLayout", "name", "location,hierarchicalNamespace/enabled"),
        ("/iam", "roles", "bindings(role,members),etag"),
        ("/iam/testPermissions?permissions=storage.objects.get", "permission", "permissions"),
    ],
)
def test_each_answer_has_fields_of_its_own(raw, path, wrong, right):
    """Documented at https://cloud.google.com/storage/docs/json_api."""
    place = "/storage/v1/b" + path if path.startswith("?") else f"/storage/v1/b/{raw.bucket}{path}"
    for fields, status in ((wrong, 400), (right, 200), ("*", 200)):
        answer = raw("GET", f"{place}{'&' if '?' in place else '?'}fields={fields}")
        assert answer.status == status, (fields, answer.body)


def test_a_wrong_selection_is_refused_before_anything_is_done(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api."""
    upload = f"/upload/storage/v1/b/{raw.bucket}/o?name=x&fields=nmae&uploadType="
    assert raw("POST", upload + "media", b"data").status == 400
    assert raw("POST", upload + "resumable", b"{}").status == 400
    assert raw("GET", raw.object_path("x")).status == 404


def test_a_reader_gets_all_of_the_object_it_began_to_read(raw):
    """Documented at https://cloud.google.com/storage/docs/consistency."""
    import http.client

    data = os.urandom(32 * 1024 * 1024)
    raw.put("x", data)
    connection = http.client.HTTPConnection("127.0.0.1", raw.server.port, timeout=30)
    connection.request("GET", raw.object_path("x") + "?alt=media")
    response = connection.getresponse()
    start = response.read(1000)
    raw.put("x", b"other")
    assert raw("DELETE", raw.object_path("x")).status == 204
    assert start + response.read() == data
    connection.close()


def test_a_generation_that_must_not_match_wants_a_live_object(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/insert."""
    assert raw.put("x", b"data", ifGenerationNotMatch="5").status == 304
    assert raw.put("x", b"data", ifGenerationNotMatch="0").status == 304
    raw.put("x", b"data")
    assert raw.put("x", b"more", ifGenerationNotMatch="0").status == 200
