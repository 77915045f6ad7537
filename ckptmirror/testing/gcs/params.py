"""Which query parameters each operation takes (https://cloud.google.com/storage/docs/json_api/v1/parameters).

Rules:
* A parameter that the operation does not have is refused with 400. The service overlooks some; a test should not.
* One that the service has and this server does not serve is refused with 501, unless its value is the one that changes
  nothing.
* ``userProject`` is taken and bills nobody; ``quotaUser``, ``userIp`` and ``key`` are taken and do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptmirror.testing.gcs.answers import bad_request, not_served
from ckptmirror.testing.gcs.fields import check_fields
from ckptmirror.testing.gcs.records import Bucket

__all__ = ["check_parameters", "check_predefined_acl"]

_STANDARD = frozenset(
    {
        "alt",
        "fields",
        "key",
        "prettyPrint",
        "quotaUser",
        "userIp",
        "userProject",
        "projection",
        "provisionalUserProject",
        "$alt",
        "$prettyPrint",
    }
)
_GENERATIONS = "ifGenerationMatch ifGenerationNotMatch ifMetagenerationMatch ifMetagenerationNotMatch"
_SOURCES = " ".join(name.replace("if", "ifSource", 1) for name in _GENERATIONS.split())
_BUCKETS = "ifMetagenerationMatch ifMetagenerationNotMatch"
_LISTING = "delimiter endOffset includeTrailingDelimiter maxResults pageToken prefix startOffset"
_UPLOAD = f"name uploadType contentEncoding predefinedAcl {_GENERATIONS}"

_TAKEN: Mapping[str, frozenset[str]] = {
    operation: frozenset(names.split())
    for operation, names in {
        "token": "",
        "batch": "",
        "bucket.get": _BUCKETS,
        "bucket.insert": "project predefinedAcl predefinedDefaultObjectAcl enableObjectRetention",
        "bucket.list": "project prefix maxResults pageToken",
        "bucket.delete": _BUCKETS,
        "bucket.patch": _BUCKETS,
        "bucket.layout": "prefix",
        "bucket.permissions": "permissions",
        "bucket.policy": "optionsRequestedPolicyVersion",
        "bucket.set_policy": "",
        "object.get": f"generation softDeleted {_GENERATIONS}",
        "object.media": f"generation {_GENERATIONS}",
        "object.list": f"{_LISTING} versions softDeleted includeFoldersAsPrefixes",
        "object.delete": f"generation {_GENERATIONS}",
        "object.patch": f"generation predefinedAcl {_GENERATIONS}",
        "object.compose": "destinationPredefinedAcl ifGenerationMatch ifMetagenerationMatch",
        "object.rewrite": "destinationPredefinedAcl sourceGeneration rewriteToken maxBytesRewrittenPerCall "
        f"{_GENERATIONS} {_SOURCES}",
        "object.copy": f"destinationPredefinedAcl sourceGeneration {_GENERATIONS} {_SOURCES}",
        "object.move": f"{_GENERATIONS} {_SOURCES}",
        "object.restore": f"generation copySourceAcl {_GENERATIONS}",
        "upload.media": _UPLOAD,
        "upload.multipart": _UPLOAD,
        "upload.start": _UPLOAD,
        "upload.put": f"upload_id {_UPLOAD}",
        "upload.status": f"upload_id {_UPLOAD}",
        "upload.cancel": f"upload_id {_UPLOAD}",
        "folder.get": _BUCKETS,
        "folder.list": "delimiter endOffset maxResults pageToken prefix startOffset",
        "folder.insert": "recursive",
        "folder.delete": _BUCKETS,
    }.items()
}
_NOT_SERVED: Mapping[str, tuple[str, ...]] = {  # parameter: values that change nothing
    "matchGlob": ("",),
    "filter": ("",),
    "kmsKeyName": ("",),
    "destinationKmsKeyName": ("",),
    "dropContextGroups": ("",),
    "restoreToken": ("",),
    "softDeleted": ("false",),
    "generation": (),
    "overrideUnlockedRetention": ("false",),
    "enableObjectRetention": ("false",),
    "copySourceAcl": ("false", "False"),
    "returnPartialSuccess": ("false",),
}
_TAKEN_IF_TRIVIAL = ("enableObjectRetention", "copySourceAcl")
_OF_THE_PROJECT = ("private", "projectPrivate", "bucketOwnerFullControl", "bucketOwnerRead")


def check_parameters(operation: str, query: Mapping[str, str]) -> None:
    """Refuse what an operation does not take.

    Raises:
        ApiError: 400 or 501.
    """
    check_fields(operation, query.get("fields"))
    taken = _TAKEN[operation]
    for name, value in query.items():
        if name in _STANDARD or (name in taken and name not in _TAKEN_IF_TRIVIAL):
            continue
        if name in taken and value in _NOT_SERVED[name]:
            continue
        if name not in _NOT_SERVED:
            raise bad_request(f"Unknown parameter: {name}", reason="invalidParameter")
        if value not in _NOT_SERVED[name]:
            raise not_served(f"the parameter {name} of {operation}")


def check_predefined_acl(bucket: Bucket, value: str | None) -> None:
    """Whether an object, or the bucket itself, may come with a predefined access list.

    With uniform bucket-level access no list is taken, not even the default one. Without it, a list that opens the
    object to nobody outside the project changes nothing here, as all callers are of the project; another is not served
    (https://cloud.google.com/storage/docs/uniform-bucket-level-access).

    Raises:
        ApiError: 400 or 501.
    """
    if value is None:
        return
    if bucket.uniform_access:
        raise bad_request(
            "Cannot insert legacy ACL for an object when uniform bucket-level access is enabled. "
            "Read more at https://cloud.google.com/storage/docs/uniform-bucket-level-access"
        )
    if value in ("publicRead", "publicReadWrite", "authenticatedRead"):
        raise not_served(f"the predefined access list {value}")
    if value not in _OF_THE_PROJECT:
        raise bad_request(f"Invalid value for predefinedAcl: {value}", reason="invalidParameter")
