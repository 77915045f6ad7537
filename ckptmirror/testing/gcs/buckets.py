"""Buckets: insert, get, list, patch, update, delete, and what a caller may do with one.

Source: https://cloud.google.com/storage/docs/json_api/v1/buckets

Rules:
* A field that this server does not serve is refused with 501; one that makes no sense with 400.
* A bucket made here has no soft delete policy unless it asks for one: the service's default is seven days, with which a
  test's disk would fill up.
* Hierarchical namespace is decided when the bucket is made, wants uniform bucket-level access and no versioning
  (https://cloud.google.com/storage/docs/hns-overview).
* Lifecycle rules are checked and kept, and never happen.

Not modelled: buckets that are deleted softly, retention policies, locks, notifications.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from ckptmirror.testing.gcs.access import PERMISSIONS
from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer, not_served
from ckptmirror.testing.gcs.checks import Preconditions, check_bucket_name, integer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.fields import select
from ckptmirror.testing.gcs.lifecycle import read_lifecycle
from ckptmirror.testing.gcs.params import check_predefined_acl
from ckptmirror.testing.gcs.records import Bucket
from ckptmirror.testing.gcs.resources import bucket_resource
from ckptmirror.testing.gcs.state import State

__all__ = [
    "change_bucket",
    "delete_bucket",
    "get_bucket",
    "get_layout",
    "held_permissions",
    "insert_bucket",
    "list_buckets",
    "read_settings",
]

_SOFT_DELETE_S = range(7 * 86400, 90 * 86400 + 1)
_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE")
_READ_ONLY = frozenset(
    {
        "kind",
        "id",
        "selfLink",
        "name",
        "projectNumber",
        "generation",
        "metageneration",
        "locationType",
        "etag",
        "timeCreated",
        "updated",
        "acl",
        "defaultObjectAcl",
        "owner",
        "satisfiesPZS",
        "satisfiesPZI",
    }
)
_FIXED = ("location", "hierarchicalNamespace")
_MAX_PAGE = 1000


def read_settings(resource: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings that a resource asks for, merged over ``earlier`` as a patch is: null removes.

    Raises:
        ApiError: 400 or 501.
    """
    kept = dict(earlier or {})
    for name, value in resource.items():
        if name in _READ_ONLY:
            continue
        if name not in _READERS:
            if value not in (None, {}, []):
                raise not_served(f"the field {name} of a bucket")
        elif value is None:
            kept.pop(name, None)
        else:
            kept[name] = _READERS[name](name, value, kept.get(name))
    if _is_on(kept, "hierarchicalNamespace"):
        access = kept.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {})
        if not access.get("enabled"):
            raise bad_request("Hierarchical namespace requires uniform bucket-level access to be enabled.")
        if _is_on(kept, "versioning"):
            raise bad_request("Object Versioning is not supported for buckets with hierarchical namespace enabled.")
    return kept


def _is_on(settings: dict[str, Any], name: str) -> bool:
    return bool(settings.get(name, {}).get("enabled"))


def _switch(name: str, value: Any, _earlier: Any) -> dict[str, bool]:
    if not isinstance(value, dict) or not isinstance(value.get("enabled", False), bool) or set(value) - {"enabled"}:
        raise bad_request(f"Invalid value for {name}: {value}")
    return {"enabled": value.get("enabled", False)}


def _soft_delete(name: str, value: Any, _earlier: Any) -> dict[str, str]:
    text = str(value.get("retentionDurationSeconds", "")) if isinstance(value, dict) else ""
    if not text.isdecimal() or (int(text) and int(text) not in _SOFT_DELETE_S):
        raise bad_request(f"Invalid value for {name}: the retention is 0 or between 7 and 90 days: {value}")
    return {"retentionDurationSeconds": text}


def _labels(name: str, value: Any, earlier: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_request(f"Invalid value for {name}: {value}")
    return {key: text for key, text in {**(earlier or {}), **value}.items() if text is not None}


def _location(name: str, value: Any, earlier: Any) -> str:
    if not isinstance(value, str) or not value or earlier not in (None, value.upper()):
        raise bad_request(f"Invalid value for {name}: {value}")
    return value.upper()


def _storage_class(name: str, value: Any, _earlier: Any) -> str:
    if value not in _CLASSES:
        raise bad_request(f"Invalid value for {name}: {value}")
    return str(value)


def _access(name: str, value: Any, earlier: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"Invalid value for {name}: {value}")
    merged = {**(earlier or {}), **value}
    uniform = merged.get("uniformBucketLevelAccess", {})
    prevention = merged.get("publicAccessPrevention", "inherited")
    if not isinstance(uniform, dict) or prevention not in ("inherited", "enforced"):
        raise bad_request(f"Invalid value for {name}: {value}")
    enabled = bool(uniform.get("enabled", False))
    return {"uniformBucketLevelAccess": {"enabled": enabled}, "publicAccessPrevention": prevention}


def _nothing_else(name: str, value: Any, _earlier: Any) -> Any:
    """A field of which only the value that the service gives by itself is served."""
    if value not in (_DEFAULTS[name], {}):
        raise not_served(f"the field {name} of a bucket")
    return value


_DEFAULTS: dict[str, Any] = {"rpo": "DEFAULT", "billing": {"requesterPays": False}, "autoclass": {"enabled": False}}
_READERS = {
    "versioning": _switch,
    "hierarchicalNamespace": _switch,
    "softDeletePolicy": _soft_delete,
    "labels": _labels,
    "location": _location,
    "storageClass": _storage_class,
    "iamConfiguration": _access,
    "lifecycle": read_lifecycle,
    **{name: _nothing_else for name in _DEFAULTS},
}


def _checked(exchange: Exchange, bucket: Bucket) -> Bucket:
    """The bucket, if the preconditions on its metageneration hold."""
    conditions = Preconditions.of({key: text for key, text in exchange.query.items() if "Metageneration" in key})
    conditions.check(0, bucket.metageneration)
    return bucket


async def insert_bucket(exchange: Exchange, state: State) -> web.StreamResponse:
    """Create a bucket; 409 where there is one."""
    resource = await exchange.json_body()
    await exchange.identify(str(resource.get("name", "")))
    if "project" not in exchange.query:
        raise ApiError(400, "Required parameter: project", reason="required")
    if not isinstance(resource.get("name"), str):
        raise ApiError(400, "Required parameter: name", reason="required")
    settings = read_settings(resource)
    for parameter in ("predefinedAcl", "predefinedDefaultObjectAcl"):
        check_predefined_acl(Bucket("", 0, 0, 1, settings), exchange.query.get(parameter))
    bucket = state.insert_bucket(check_bucket_name(resource["name"]), settings)
    return json_answer(select(bucket_resource(bucket, exchange.host), exchange.query.get("fields")))


async def get_bucket(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """The bucket's resource."""
    await exchange.identify(name)
    resource = bucket_resource(_checked(exchange, state.bucket(name)), exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")))


async def change_bucket(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """PATCH merges settings, PUT (update) replaces them; the bucket's location and layout stay."""
    await exchange.identify(name)
    change = await exchange.json_body()
    bucket = _checked(exchange, state.bucket(name))
    fixed: dict[str, Any] = {key: bucket.settings[key] for key in _FIXED if key in bucket.settings}
    earlier = bucket.settings if exchange.request.method == "PATCH" else fixed
    settings = read_settings(change, earlier)
    if _is_on(settings, "hierarchicalNamespace") != bucket.hierarchical:
        raise bad_request("Hierarchical namespace can only be set when the bucket is created.")
    resource = bucket_resource(state.change_bucket(bucket, {**settings, **fixed}), exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")))


async def list_buckets(exchange: Exchange, state: State) -> web.StreamResponse:
    """A page of buckets; the page token is the name of the next one."""
    await exchange.identify("")
    query = exchange.query
    limit = min(integer(query, "maxResults") or _MAX_PAGE, _MAX_PAGE)
    start, prefix = query.get("pageToken", ""), query.get("prefix", "")
    found = [bucket for bucket in state.buckets() if bucket.name.startswith(prefix) and bucket.name >= start]
    body: dict[str, Any] = {"kind": "storage#buckets"}
    if len(found) > limit:
        body["nextPageToken"] = found[limit].name
    if found:
        body["items"] = [bucket_resource(bucket, exchange.host) for bucket in found[:limit]]
    return json_answer(select(body, query.get("fields")))


async def delete_bucket(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """204; 409 while live or noncurrent objects are in it."""
    await exchange.identify(name)
    state.delete_bucket(_checked(exchange, state.bucket(name)))
    return web.Response(status=204)


async def get_layout(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """How the bucket is built (https://cloud.google.com/storage/docs/json_api/v1/buckets/getStorageLayout)."""
    await exchange.identify(name)
    resource = bucket_resource(state.bucket(name), exchange.host)
    body = {"kind": "storage#storageLayout", "bucket": name}
    body |= {key: resource[key] for key in ("location", "locationType", "hierarchicalNamespace") if key in resource}
    return json_answer(select(body, exchange.query.get("fields")))


async def held_permissions(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """Which of the permissions named the caller has.

    Source: https://cloud.google.com/storage/docs/json_api/v1/buckets/testIamPermissions
    """
    await exchange.identify(name)
    state.bucket(name)
    text = exchange.request.raw_path.partition("?")[2]
    asked = [value for key, value in parse_qsl(text) if key == "permissions"]
    if not asked:
        raise ApiError(400, "Required parameter: permissions", reason="required")
    unknown = sorted(set(asked) - PERMISSIONS)
    if unknown:
        raise not_served(f"the permission {unknown[0]}")
    body: dict[str, Any] = {"kind": "storage#testIamPermissionsResponse"}
    if held := [permission for permission in asked if exchange.caller.may(permission, name)]:
        body["permissions"] = held
    return json_answer(select(body, exchange.query.get("fields")))
