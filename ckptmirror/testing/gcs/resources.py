"""How buckets and objects look in JSON and in headers.

Source: https://cloud.google.com/storage/docs/json_api/v1/objects#resource and
https://cloud.google.com/storage/docs/json_api/v1/buckets#resource
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any
from urllib.parse import quote

from ckptmirror.testing.gcs.answers import bad_request, not_served, rfc3339
from ckptmirror.testing.gcs.records import Bucket, Folder, StoredObject

__all__ = [
    "bucket_resource",
    "check_custom_time",
    "etag",
    "folder_resource",
    "object_headers",
    "object_resource",
    "settable",
]

_SETTABLE_TEXT = (
    "cacheControl",
    "contentDisposition",
    "contentEncoding",
    "contentLanguage",
    "contentType",
    "customTime",
    "storageClass",
)
_SETTABLE_FLAGS = ("eventBasedHold", "temporaryHold")
_READ_ONLY = frozenset(
    {
        "kind", "id", "selfLink", "mediaLink", "name", "bucket", "generation", "metageneration", "size", "crc32c",
        "md5Hash", "etag", "timeCreated", "updated", "timeStorageClassUpdated", "timeFinalized", "timeDeleted",
        "softDeleteTime", "hardDeleteTime", "componentCount", "retentionExpirationTime", "owner",
    }
)  # fmt: skip
_NOT_SERVED = ("acl", "retention", "customerEncryption", "kmsKeyName", "contexts", "restoreToken")
_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE")
_MAX_CUSTOM_METADATA_BYTES = 8192


def etag(generation: int, metageneration: int) -> str:
    """Changes with every generation and metageneration."""
    return base64.b64encode(f"{generation}/{metageneration}".encode()).decode()


def settable(resource: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a resource that a client may set, merged over ``earlier`` as a patch is: null removes.

    Raises:
        ApiError: 400 for a field that there is not or of the wrong type, or more custom metadata than 8 KiB; 501 for a
            field that is not served.
    """
    kept = dict(earlier or {})
    for name in resource.keys() - _READ_ONLY - {*_SETTABLE_TEXT, *_SETTABLE_FLAGS, "metadata"}:
        if name not in _NOT_SERVED:
            raise bad_request(f"An object has no field {name}.")
        if resource[name] not in (None, [], {}):
            raise not_served(f"the field {name} of an object")
    if resource.get("storageClass", "STANDARD") not in (*_CLASSES, None):
        raise bad_request(f"Invalid value for storageClass: {resource['storageClass']}")
    for name in (*_SETTABLE_TEXT, *_SETTABLE_FLAGS):
        if name not in resource:
            continue
        value = resource[name]
        if value is None:
            kept.pop(name, None)
        elif isinstance(value, bool if name in _SETTABLE_FLAGS else str):
            kept[name] = value
        else:
            raise bad_request(f"Invalid value for {name}: {value}")
    if isinstance(resource.get("customTime"), str):
        _time(resource["customTime"])
    if "metadata" in resource:
        kept["metadata"] = _custom(resource["metadata"], kept.get("metadata", {}))
        if not kept["metadata"]:
            del kept["metadata"]
    return kept


def check_custom_time(before: str | None, after: str | None) -> None:
    """Of one version of an object the custom time is never removed, and only moves later.

    Source: https://cloud.google.com/storage/docs/metadata#custom-time

    Raises:
        ApiError: 400.
    """
    if before is not None and (after is None or _time(after) < _time(before)):
        raise bad_request(f"The custom time of the object is {before}: it can only be set to a later time.")


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = datetime.min
    if found.tzinfo is None:
        raise bad_request(f"Invalid value for customTime: {text}")
    return found


def _custom(patch: Any, earlier: dict[str, str]) -> dict[str, str]:
    if patch is None:
        return {}
    if not isinstance(patch, dict):
        raise bad_request("Invalid value for metadata: it is not a set of keys and values")
    merged: dict[str, Any] = {**earlier, **patch}
    custom = {key: value for key, value in merged.items() if value is not None}
    if not all(isinstance(value, str) for value in custom.values()):
        raise bad_request("Invalid value for metadata: a value is not a string")
    if sum(len(key.encode()) + len(value.encode()) for key, value in custom.items()) > _MAX_CUSTOM_METADATA_BYTES:
        raise bad_request("The total size of the custom metadata exceeds the maximum of 8192 bytes.")
    return custom


def object_resource(item: StoredObject, host: str) -> dict[str, Any]:
    """The JSON of an object, as seen under ``host`` (``http://127.0.0.1:1234``)."""
    place = f"/storage/v1/b/{quote(item.bucket, safe='')}/o/{quote(item.name, safe='')}"
    created = rfc3339(item.created_us)
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{item.bucket}/{item.name}/{item.generation}",
        "selfLink": f"{host}{place}",
        "mediaLink": f"{host}/download{place}?generation={item.generation}&alt=media",
        "name": item.name,
        "bucket": item.bucket,
        "generation": str(item.generation),
        "metageneration": str(item.metageneration),
        "storageClass": "STANDARD",
        "size": str(item.size_bytes),
        "crc32c": base64.b64encode(item.crc32c).decode(),
        "etag": etag(item.generation, item.metageneration),
        "timeCreated": created,
        "updated": rfc3339(item.updated_us),
        "timeStorageClassUpdated": created,
        "timeFinalized": created,
    }
    if item.md5 is not None:
        resource["md5Hash"] = base64.b64encode(item.md5).decode()
    if item.components:
        resource["componentCount"] = item.components
    times = {
        "timeDeleted": item.deleted_us if item.soft_deleted_us is None else None,
        "softDeleteTime": item.soft_deleted_us,
        "hardDeleteTime": item.hard_delete_us,
    }
    resource |= {key: rfc3339(time_us) for key, time_us in times.items() if time_us is not None}
    return {**resource, **item.metadata}


def object_headers(item: StoredObject) -> dict[str, str]:
    """The headers that accompany an object's bytes."""
    hashes = f"crc32c={base64.b64encode(item.crc32c).decode()}"
    if item.md5 is not None:
        hashes += f",md5={base64.b64encode(item.md5).decode()}"
    return {
        "Accept-Ranges": "bytes",
        "Cache-Control": item.metadata.get("cacheControl", "no-cache, no-store, max-age=0, must-revalidate"),
        "ETag": etag(item.generation, item.metageneration),
        "X-Goog-Generation": str(item.generation),
        "X-Goog-Metageneration": str(item.metageneration),
        "X-Goog-Hash": hashes,
        "X-Goog-Storage-Class": "STANDARD",
        "X-Goog-Stored-Content-Encoding": item.metadata.get("contentEncoding", "identity"),
        "X-Goog-Stored-Content-Length": str(item.size_bytes),
    }


def bucket_resource(bucket: Bucket, host: str) -> dict[str, Any]:
    """The JSON of a bucket."""
    access = {"uniformBucketLevelAccess": {"enabled": False}, "publicAccessPrevention": "inherited"}
    location = bucket.place[0]
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "selfLink": f"{host}/storage/v1/b/{bucket.name}",
        "name": bucket.name,
        "projectNumber": "1",
        "generation": str(bucket.created_us),
        "metageneration": str(bucket.metageneration),
        "location": location,
        "locationType": "multi-region" if location in ("US", "EU", "ASIA") else "region",
        "storageClass": "STANDARD",
        "etag": etag(bucket.created_us, bucket.metageneration),
        "timeCreated": rfc3339(bucket.created_us),
        "updated": rfc3339(bucket.updated_us),
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
        **bucket.settings,
        "iamConfiguration": {**access, **bucket.settings.get("iamConfiguration", {})},
    }


def folder_resource(folder: Folder, host: str) -> dict[str, Any]:
    """The JSON of a folder (https://cloud.google.com/storage/docs/json_api/v1/folders#resource-representations)."""
    created = rfc3339(folder.created_us)
    return {
        "kind": "storage#folder",
        "id": f"{folder.bucket}/{folder.name}",
        "selfLink": f"{host}/storage/v1/b/{folder.bucket}/folders/{quote(folder.name, safe='')}",
        "name": folder.name,
        "bucket": folder.bucket,
        "createTime": created,
        "updateTime": created,
        "metageneration": "1",
    }
