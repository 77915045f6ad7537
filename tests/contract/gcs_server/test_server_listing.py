"""Listing as the service documents it, and buckets."""

import pytest
from google.api_core import exceptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def _names(raw, **query):
    text = "&".join(f"{key}={value}" for key, value in query.items())
    body = raw("GET", f"/storage/v1/b/{raw.bucket}/o?{text}").json()
    return [item["name"] for item in body.get("items", [])], body.get("prefixes", []), body.get("nextPageToken")


@pytest.fixture
def filled(raw):
    for name in ("a", "b/1", "b/2", "b/c/3", "b0", "c/", "ü"):
        assert raw.put(name, b"x").status == 200
    return raw


def test_names_come_in_utf8_order(filled):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    assert _names(filled)[0] == ["a", "b/1", "b/2", "b/c/3", "b0", "c/", "ü"]


def test_prefix_and_offsets_cut_the_listing(filled):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    assert _names(filled, prefix="b/")[0] == ["b/1", "b/2", "b/c/3"]
    assert _names(filled, startOffset="b/2")[0] == ["b/2", "b/c/3", "b0", "c/", "ü"]
    assert _names(filled, endOffset="b/2")[0] == ["a", "b/1"]
    assert _names(filled, prefix="b", startOffset="b/2", endOffset="b0")[0] == ["b/2", "b/c/3"]


def test_a_delimiter_folds_names_into_prefixes(filled):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    assert _names(filled, delimiter="/")[:2] == (["a", "b0", "ü"], ["b/", "c/"])
    assert _names(filled, delimiter="/", prefix="b/")[:2] == (["b/1", "b/2"], ["b/c/"])
    assert _names(filled, delimiter="/", includeTrailingDelimiter="true")[:2] == (["a", "b0", "c/", "ü"], ["b/", "c/"])


@pytest.mark.parametrize("page", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("delimiter", ["", "/"])
def test_pages_of_any_size_add_up_to_the_whole(filled, page, delimiter):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    whole = _names(filled, delimiter=delimiter)
    names, prefixes, token = [], [], ""
    while token is not None:
        found = _names(filled, delimiter=delimiter, maxResults=page, pageToken=token)
        assert len(found[0]) + len(found[1]) <= page
        names, prefixes, token = names + found[0], prefixes + found[1], found[2]
    assert (names, prefixes) == whole[:2]


def test_a_page_has_at_most_1000_and_the_client_follows_the_tokens(raw, bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", raw.server.port)
    for number in range(1003):
        connection.request("POST", raw.upload_path("media", name=f"n/{number:05d}"), b"")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()
    names, _, token = _names(raw, maxResults=5000)
    assert len(names) == 1000
    assert token
    assert [blob.name for blob in bucket.client.list_blobs(bucket, prefix="n/")] == [f"n/{i:05d}" for i in range(1003)]


def test_a_listing_is_of_now(bucket):
    """Documented at https://cloud.google.com/storage/docs/consistency."""
    for name in ("a", "b"):
        bucket.blob(name).upload_from_string(b"")
        assert name in [blob.name for blob in bucket.client.list_blobs(bucket)]
    bucket.blob("a").delete()
    assert [blob.name for blob in bucket.client.list_blobs(bucket)] == ["b"]


def test_a_bad_page_token_is_refused(filled):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    assert filled("GET", f"/storage/v1/b/{filled.bucket}/o?pageToken=nonsense!").status == 400


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.sampled_from(["", "b", "b/", "c", "ü", "zz"]),
    delimiter=st.sampled_from(["", "/", "c"]),
    start=st.sampled_from(["", "a", "b/2", "b/c", "c/"]),
    end=st.sampled_from(["", "b/c", "c", "ü"]),
    page=st.integers(1, 8),
)
def test_every_combination_lists_what_the_definition_says(filled, prefix, delimiter, start, end, page):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/list."""
    items, prefixes = [], set()
    for name in ("a", "b/1", "b/2", "b/c/3", "b0", "c/", "ü"):
        if name.startswith(prefix) and name >= start and (not end or name < end):
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                items.append(name)
            else:
                prefixes.add(name[: cut + len(delimiter)])
    query = {"prefix": prefix, "delimiter": delimiter, "startOffset": start, "endOffset": end, "maxResults": page}
    from urllib.parse import quote

    quoted = {key: quote(str(value)) for key, value in query.items() if value != ""}
    found_items, found_prefixes, token = [], [], ""
    while token is not None:
        found = _names(filled, **quoted, pageToken=token)
        found_items, found_prefixes, token = found_items + found[0], found_prefixes + found[1], found[2]
    assert (found_items, found_prefixes) == (items, sorted(prefixes))


def test_buckets_are_created_found_listed_and_deleted_when_empty(bucket):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets."""
    client = bucket.client
    name = f"{bucket.name}-more"
    client.create_bucket(name)
    assert client.get_bucket(name).name == name
    assert client.lookup_bucket("no-such-bucket") is None
    assert name in [found.name for found in client.list_buckets()]
    with pytest.raises(exceptions.Conflict):
        client.create_bucket(name)
    client.bucket(name).blob("x").upload_from_string(b"")
    with pytest.raises(exceptions.Conflict):
        client.bucket(name).delete()
    client.bucket(name).blob("x").delete()
    client.bucket(name).delete()
    assert client.lookup_bucket(name) is None


@pytest.mark.parametrize(
    "name",
    ["ab", "Upper", "-a-", "goog-x", "1.2.3.4", "a" * 64, "sp ace", "my-google-runs", "g00gle-runs", "runs-go0g1e"],
)
def test_an_illegal_bucket_name_is_refused(raw, name):
    """Documented at https://cloud.google.com/storage/docs/buckets."""
    import json

    assert raw("POST", "/storage/v1/b?project=p", json.dumps({"name": name})).status == 400


@pytest.mark.parametrize("name", ["12345", "2026.05.01", "1.2.3.4.5", "my-goog", "goggles", "a.b_c-d"])
def test_a_legal_bucket_name_is_taken(raw, name):
    """Documented at https://cloud.google.com/storage/docs/buckets."""
    import json

    assert raw("POST", "/storage/v1/b?project=p", json.dumps({"name": name})).status == 200


@pytest.mark.parametrize(("value", "status"), [("projectPrivate", 200), ("publicReadWrite", 501), ("nonsense", 400)])
def test_a_bucket_is_not_opened_to_all_in_silence(raw, value, status):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/insert."""
    import json

    body = json.dumps({"name": f"{raw.bucket}-acl"})
    assert raw("POST", f"/storage/v1/b?project=p&predefinedAcl={value}", body).status == status
    assert raw("GET", f"/storage/v1/b/{raw.bucket}-acl").status == (200 if status == 200 else 404)


def test_buckets_come_in_pages(raw):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/list."""
    for number in range(3):
        raw.server.create_bucket(f"{raw.bucket}-p{number}")
    path = f"/storage/v1/b?project=p&prefix={raw.bucket}-p&maxResults=2"
    page = raw("GET", path).json()
    assert [item["name"] for item in page["items"]] == [f"{raw.bucket}-p0", f"{raw.bucket}-p1"]
    rest = raw("GET", f"{path}&pageToken={page['nextPageToken']}").json()
    assert [item["name"] for item in rest["items"]] == [f"{raw.bucket}-p2"]
    assert "nextPageToken" not in rest
