"""The IAM policy of a bucket, and its lifecycle rules: set by the real client, and what they let whom do."""

import json

import pytest
from google.api_core import exceptions
from google.cloud import storage
from google.oauth2.credentials import Credentials
from raw_http import Raw

from ckptmirror.testing import GcsServerProcess

OWN_ROLE = "projects/p/roles/reader"
ACCESS = {
    "tokens": {
        "admin": {"name": "admin@p.example", "roles": ["roles/storage.admin"]},
        "reader": {"name": "reader@p.iam.gserviceaccount.com", "permissions": []},
        "all-but-get": {"name": "a@p.example", "permissions": ["storage.buckets.get", "storage.buckets.setIamPolicy"]},
        "all-but-set": {"name": "a@p.example", "permissions": ["storage.buckets.get", "storage.buckets.getIamPolicy"]},
    },
    "roles": {OWN_ROLE: ["storage.objects.get"]},
}
READER = "serviceAccount:reader@p.iam.gserviceaccount.com"


@pytest.fixture
def guarded(tmp_path):
    with GcsServerProcess(tmp_path, buckets=["bucket-1"], access=ACCESS) as server:
        yield Raw(server, "bucket-1")
        assert server.stderr_path.read_text() == ""


def bucket_of(raw, token="admin"):
    client = storage.Client(
        project="p", credentials=Credentials(token=token), client_options={"api_endpoint": raw.server.url}
    )
    return client.bucket(raw.bucket)


def give(raw, role, *members):
    bucket = bucket_of(raw)
    policy = bucket.get_iam_policy(requested_policy_version=3)
    policy.bindings.append({"role": role, "members": set(members)})
    return bucket.set_iam_policy(policy)


def test_a_new_bucket_belongs_to_the_projects_owners_editors_and_viewers(guarded):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam."""
    policy = bucket_of(guarded).get_iam_policy(requested_policy_version=3)
    assert {binding["role"]: binding["members"] for binding in policy.bindings} == {
        "roles/storage.legacyBucketOwner": {"projectEditor:p", "projectOwner:p"},
        "roles/storage.legacyBucketReader": {"projectViewer:p"},
    }
    assert policy.etag


@pytest.mark.parametrize(
    ("role", "may"), [(OWN_ROLE, ["get"]), ("roles/storage.objectViewer", ["get", "list"]), (None, [])]
)
def test_who_is_bound_to_a_role_may_what_the_role_may_and_no_more(guarded, role, may):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-roles."""
    bucket_of(guarded).blob("x").upload_from_string(b"data")
    if role is not None:
        give(guarded, role, READER)
    bucket = bucket_of(guarded, "reader")
    calls = {
        "get": lambda: bucket.blob("x").download_as_bytes(),
        "list": lambda: list(bucket.list_blobs()),
        "create": lambda: bucket.blob("y").upload_from_string(b"data"),
    }
    for name, call in calls.items():
        if name in may:
            call()
        else:
            with pytest.raises(exceptions.Forbidden):
                call()
    assert bucket.test_iam_permissions([f"storage.objects.{name}" for name in calls]) == [
        f"storage.objects.{name}" for name in calls if name in may
    ]


def test_a_policy_outlives_a_kill_and_ends_with_its_bucket(guarded):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/setIamPolicy."""
    give(guarded, OWN_ROLE, READER)
    guarded.server.kill()
    guarded.server.restart()
    bucket = bucket_of(guarded)
    assert any(binding["role"] == OWN_ROLE for binding in bucket.get_iam_policy(requested_policy_version=3).bindings)
    bucket.delete()
    guarded.server.create_bucket("bucket-1", token="admin")
    assert not any(binding["role"] == OWN_ROLE for binding in bucket.get_iam_policy().bindings)


def test_a_policy_that_changed_meanwhile_is_not_replaced(guarded):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/setIamPolicy."""
    bucket = bucket_of(guarded)
    stale = bucket.get_iam_policy(requested_policy_version=3)
    give(guarded, OWN_ROLE, READER)
    with pytest.raises(exceptions.PreconditionFailed):
        bucket.set_iam_policy(stale)
    stale.etag = None  # who says nothing replaces blindly
    assert bucket.set_iam_policy(stale).bindings == stale.bindings


@pytest.mark.parametrize(("token", "call"), [("all-but-get", "get_iam_policy"), ("all-but-set", "set_iam_policy")])
def test_each_of_the_two_calls_needs_its_permission(guarded, token, call):
    """Documented at https://cloud.google.com/storage/docs/access-control/iam-json."""
    policy = bucket_of(guarded).get_iam_policy()
    bucket = bucket_of(guarded, token)
    with pytest.raises(exceptions.Forbidden, match=r"storage\.buckets\.[gs]etIamPolicy"):
        getattr(bucket, call)(*([policy] if call == "set_iam_policy" else []))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"bindings": [{"role": "roles/storage.objectViewer", "members": ["user:a@b"]}]}, 200),
        ({"bindings": [{"role": "roles/nothing", "members": ["user:a@b"]}]}, 400),
        ({"bindings": [{"role": "projects/p/roles/unknown", "members": ["user:a@b"]}]}, 400),
        ({"bindings": [{"role": OWN_ROLE, "members": ["a@b"]}]}, 400),
        ({"bindings": [{"role": OWN_ROLE, "members": []}]}, 400),
        ({"bindings": [{"role": OWN_ROLE, "member": "user:a@b"}]}, 400),
        ({"bindings": [{"role": OWN_ROLE, "members": ["user:a@b"], "condition": {"expression": "1"}}]}, 501),
        ({"binding": []}, 400),
        ({"bindings": [], "version": 2}, 400),
        ({"bindings": [], "etag": "bm8="}, 412),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_and_not_ignored(guarded, body, status):
    """Documented at https://cloud.google.com/storage/docs/json_api/v1/buckets/setIamPolicy."""
    bearer = {"Authorization": "Bearer admin"}
    assert guarded("PUT", "/storage/v1/b/bucket-1/iam", json.dumps(body), bearer).status == status
    assert guarded("GET", "/storage/v1/b/bucket-1/iam?optionsRequestedPolicyVersion=2", None, bearer).status == 400


def test_nobody_opens_a_bucket_to_everybody_where_that_is_prevented(guarded):
    """Documented at https://cloud.google.com/storage/docs/public-access-prevention."""
    bucket = bucket_of(guarded)
    give(guarded, "roles/storage.objectViewer", "allUsers")
    bucket.blob("x").upload_from_string(b"data")
    assert bucket_of(guarded, "reader").blob("x").download_as_bytes() == b"data"
    policy = bucket.get_iam_policy(requested_policy_version=3)
    bucket.reload()
    bucket.iam_configuration.public_access_prevention = "enforced"
    bucket.patch()
    with pytest.raises(exceptions.PreconditionFailed, match="public access prevention"):
        bucket.set_iam_policy(policy)


RULE = {"action": {"type": "Delete"}, "condition": {"age": 30}}


@pytest.mark.parametrize(
    ("rule", "status"),
    [
        (RULE, 200),
        (
            {"action": {"type": "SetStorageClass", "storageClass": "COLDLINE"}, "condition": {"matchesPrefix": ["a/"]}},
            200,
        ),
        ({"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}, 200),
        ({"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"isLive": True}}, 400),
        ({"action": {"type": "SetStorageClass"}, "condition": {"age": 1}}, 400),
        ({"action": {"type": "Burn"}, "condition": {"age": 1}}, 400),
        ({"action": {"type": "Delete"}, "condition": {}}, 400),
        ({"action": {"type": "Delete"}, "condition": {"age": "30"}}, 400),
        ({"action": {"type": "Delete"}, "condition": {"days": 30}}, 400),
        ({"action": {"type": "Delete"}}, 400),
    ],
)
def test_lifecycle_rules_are_checked_and_kept(raw, rule, status):
    """Documented at https://cloud.google.com/storage/docs/lifecycle."""
    answer = raw("PATCH", f"/storage/v1/b/{raw.bucket}", json.dumps({"lifecycle": {"rule": [rule]}}))
    assert answer.status == status
    if status == 200:
        assert raw("GET", f"/storage/v1/b/{raw.bucket}").json()["lifecycle"] == {"rule": [rule]}


def test_the_client_sets_and_clears_lifecycle_rules(bucket):
    """Documented at https://cloud.google.com/storage/docs/managing-lifecycles."""
    bucket.add_lifecycle_delete_rule(days_since_noncurrent_time=30, is_live=False)
    bucket.patch()
    bucket.reload()
    assert len(list(bucket.lifecycle_rules)) == 1
    bucket.clear_lifecycle_rules()
    bucket.patch()
    bucket.reload()
    assert list(bucket.lifecycle_rules) == []
