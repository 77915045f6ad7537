"""IAM permissions per token: what each call needs, and the words of a refusal."""

import json
import re

import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.oauth2.credentials import Credentials
from raw_http import Raw

from ckptmirror.testing import GcsServerProcess

ALL = [
    "storage.buckets.get",
    "storage.buckets.list",
    "storage.buckets.update",
    "storage.buckets.delete",
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.objects.list",
    "storage.objects.move",
    "storage.objects.restore",
    "storage.objects.update",
]
ACCESS = {
    "tokens": {
        "admin": {"name": "admin@p.example", "roles": ["roles/storage.admin"]},
        "viewer": {"name": "viewer@p.example", "roles": ["roles/storage.objectViewer"]},
        "creator": {"name": "creator@p.example", "roles": ["roles/storage.objectCreator"]},
        "elsewhere": {"name": "other@p.example", "roles": ["roles/storage.admin"], "buckets": ["bucket-2"]},
        **{
            f"all-but-{name}": {"name": "some@p.example", "permissions": [one for one in ALL if one != name]}
            for name in ALL
        },
    },
    "anonymous": {"permissions": ["storage.objects.get"]},
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("access")
    with GcsServerProcess(directory, buckets=["bucket-1", "bucket-2"], access=ACCESS) as server:
        yield Raw(server, "bucket-1")
        assert server.stderr_path.read_text() == ""


def _bucket(raw, token=None):
    credentials = Credentials(token=token) if token else AnonymousCredentials()
    client = storage.Client(project="p", credentials=credentials, client_options={"api_endpoint": raw.server.url})
    return client.bucket(raw.bucket)


@pytest.fixture
def admin(guarded):
    bucket = _bucket(guarded, "admin")
    for name in ("x", "y"):
        bucket.blob(name).upload_from_string(b"data")
    yield bucket
    bucket.delete_blobs(list(bucket.list_blobs()))


def test_a_reader_reads_and_lists_and_changes_nothing(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-roles."""
    viewer = _bucket(guarded, "viewer")
    assert viewer.blob("x").download_as_bytes() == b"data"
    assert [blob.name for blob in viewer.list_blobs()] == ["x", "y"]
    for attempt in (
        lambda: viewer.blob("z").upload_from_string(b"data"),
        lambda: viewer.blob("x").delete(),
        lambda: viewer.blob("x").patch(),
        lambda: viewer.reload(),
        lambda: viewer.copy_blob(viewer.blob("x"), viewer, "z"),
    ):
        with pytest.raises(exceptions.Forbidden):
            attempt()
    assert [blob.name for blob in admin.list_blobs()] == ["x", "y"]


def test_a_refusal_names_the_caller_and_the_permission(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    answer = guarded("DELETE", guarded.object_path("x"), headers={"Authorization": "Bearer viewer"})
    assert answer.status == 403
    error = answer.json()["error"]
    assert error["errors"][0]["reason"] == "forbidden"
    assert "viewer@p.example does not have storage.objects.delete access" in error["message"]
    assert "Permission 'storage.objects.delete' denied on resource (or it may not exist)." in error["message"]


def test_who_may_create_but_not_delete_replaces_nothing_by_any_kind_of_upload(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/objects/insert."""
    creator = _bucket(guarded, "creator")
    creator.blob("new").upload_from_string(b"mine")
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.delete"):
        creator.blob("x").upload_from_string(b"mine")
    bearer = {"Authorization": "Bearer creator"}
    media = guarded("POST", guarded.upload_path("media", name="x"), b"mine", bearer)
    assert media.status == 403
    session = guarded.start("x", headers=bearer)
    assert guarded("PUT", session, b"mine").status == 403
    assert guarded("PUT", guarded.start("newer", headers=bearer), b"mine").status == 200
    assert admin.blob("x").download_as_bytes() == b"data"
    with pytest.raises(exceptions.Forbidden):
        creator.blob("new").download_as_bytes()


def test_grants_hold_in_their_buckets_only(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam."""
    with pytest.raises(exceptions.Forbidden):
        _bucket(guarded, "elsewhere").blob("x").download_as_bytes()
    other = _bucket(Raw(guarded.server, "bucket-2"), "elsewhere")
    other.blob("x").upload_from_string(b"there")
    assert other.blob("x").download_as_bytes() == b"there"


def test_an_anonymous_caller_has_grants_of_its_own_and_its_refusal_is_401(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/access-public-data."""
    assert _bucket(guarded).blob("x").download_as_bytes() == b"data"
    answer = guarded("DELETE", guarded.object_path("x"))
    assert answer.status == 401
    assert answer.json()["error"]["message"].startswith("Anonymous caller does not have storage.objects.delete access")
    assert answer.json()["error"]["errors"][0]["location"] == "Authorization"


def test_an_unknown_token_is_401_whatever_anonymous_may(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/status-codes."""
    for scheme in ("Bearer nobody", "Basic eDp5", "Bearer"):
        assert guarded("GET", guarded.object_path("x"), headers={"Authorization": scheme}).status == 401


def test_the_client_asks_what_it_may(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/testIamPermissions."""
    assert _bucket(guarded, "viewer").test_iam_permissions(ALL) == ["storage.objects.get", "storage.objects.list"]
    assert _bucket(guarded, "admin").test_iam_permissions(ALL) == ALL
    assert _bucket(guarded, "creator").test_iam_permissions(["storage.objects.get"]) == []
    assert guarded("GET", f"/storage/v1/b/{guarded.bucket}/iam/testPermissions").status == 400


def _uploads(bucket):
    bucket.blob("new").upload_from_string(b"data")


CALLS = {
    "get": ("storage.objects.get", lambda b: b.blob("x").reload()),
    "download": ("storage.objects.get", lambda b: b.blob("x").download_as_bytes()),
    "list": ("storage.objects.list", lambda b: list(b.list_blobs())),
    "upload": ("storage.objects.create", _uploads),
    "replace": ("storage.objects.delete", lambda b: b.blob("x").upload_from_string(b"data")),
    "delete": ("storage.objects.delete", lambda b: b.blob("x").delete()),
    "patch": ("storage.objects.update", lambda b: b.blob("x").patch()),
    "patch what it reads": ("storage.objects.get", lambda b: b.blob("x").patch()),
    "compose": ("storage.objects.create", lambda b: b.blob("new").compose([b.blob("x")])),
    "compose what it reads": ("storage.objects.get", lambda b: b.blob("new").compose([b.blob("x")])),
    "compose over another": ("storage.objects.delete", lambda b: b.blob("y").compose([b.blob("x")])),
    "rewrite what it reads": ("storage.objects.get", lambda b: b.blob("new").rewrite(b.blob("x"))),
    "rewrite": ("storage.objects.create", lambda b: b.blob("new").rewrite(b.blob("x"))),
    "rewrite over another": ("storage.objects.delete", lambda b: b.blob("y").rewrite(b.blob("x"))),
    "copy": ("storage.objects.create", lambda b: b.copy_blob(b.blob("x"), b, "new")),
    "move": ("storage.objects.move", lambda b: b.move_blob(b.blob("x"), "new")),
    "move to": ("storage.objects.create", lambda b: b.move_blob(b.blob("x"), "new")),
    "move over another": ("storage.objects.delete", lambda b: b.move_blob(b.blob("x"), "y")),
    "restore": ("storage.objects.restore", lambda b: b.restore_blob("x", generation=1)),
    "bucket": ("storage.buckets.get", lambda b: b.reload()),
    "buckets": ("storage.buckets.list", lambda b: list(b.client.list_buckets())),
    "bucket patch": ("storage.buckets.update", lambda b: b.patch()),
    "bucket delete": ("storage.buckets.delete", lambda b: b.delete()),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_call_needs_its_permission_and_with_all_others_is_refused(guarded, admin, call):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-json."""
    permission, attempt = CALLS[call]
    with pytest.raises(exceptions.Forbidden, match=permission.replace(".", r"\.")):
        attempt(_bucket(guarded, f"all-but-{permission}"))
    assert {blob.name: blob.download_as_bytes() for blob in admin.list_blobs()} == {"x": b"data", "y": b"data"}


def test_parts_of_a_batch_are_judged_one_by_one(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    bucket = _bucket(guarded, "viewer")
    with bucket.client.batch(raise_exception=False) as batch:
        bucket.blob("x").reload()
        bucket.blob("x").delete()
    assert [answer.status_code for answer in batch._responses] == [200, 403]


def test_a_part_of_a_batch_may_have_a_token_of_its_own(guarded, admin):
    """Documented at https://cloud.google.com/storage/docs/batch."""
    head = "Content-Type: application/http\r\n\r\n"
    path = guarded.object_path("x")
    body = f"--b\r\n{head}DELETE {path} HTTP/1.1\r\nAuthorization: Bearer viewer\r\n\r\n\r\n"
    body += f"--b\r\n{head}GET {path} HTTP/1.1\r\n\r\n\r\n--b--"
    headers = {"Content-Type": "multipart/mixed; boundary=b", "Authorization": "Bearer admin"}
    answer = guarded("POST", "/batch/storage/v1", body, headers)
    assert re.findall(r"HTTP/1\.1 (\d+)", answer.body.decode()) == ["403", "200"]
    assert guarded("POST", "/batch/storage/v1", body, {**headers, "Authorization": "Bearer nobody"}).status == 401


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "a tokens file has the keys"),
        ('{"people": {}}', "a tokens file has the keys"),
        ('{"tokens": {"t": {"roles": []}}}', "needs a name"),
        ('{"tokens": {"t": {"name": "n", "roles": ["roles/owner"]}}}', "there is no role"),
        ('{"tokens": {"t": {"name": "n", "permissions": ["storage.objects.fly"]}}}', "there is no permission"),
        ('{"tokens": {"t": {"name": "n", "prefix": "a/"}}}', "grants have no prefix"),
    ],
)
def test_a_tokens_file_that_makes_no_sense_stops_the_start(tmp_path, content, reason):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-roles; the file is this server's own."""
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(OSError, match=reason):
        GcsServerProcess(tmp_path / "s", options=["--tokens-file", str(tmp_path / "tokens.json")]).start()


def test_a_token_may_the_same_after_a_restart(tmp_path):
    """Documented at https://cloud.google.com/storage/docs/authentication."""
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], access=ACCESS) as server:
        server.kill()
        server.restart()
        raw = Raw(server, "bucket-1")
        body = json.dumps({"name": "bucket-9"})
        assert raw("POST", "/storage/v1/b?project=p", body, {"Authorization": "Bearer viewer"}).status == 403
        server.create_bucket("bucket-9", token="admin")
