"""Partial responses: the parameter ``fields`` (``a,b/c,d(e,f)``) leaves of an answer what it names.

Source: https://cloud.google.com/storage/docs/json_api#partial-response, and the resources in the API's reference.

Rules:
* A name that the answer of an operation cannot have is refused with 400, before anything is done. The service knows
  more names than this server fills in, so what an answer may have is written down here.
* Below what is here a ``*``, every name is taken.
"""

from __future__ import annotations

import re
from typing import Any

from ckptmirror.testing.gcs.answers import bad_request

__all__ = ["check_fields", "select"]

_Tree = dict[str, Any]


def check_fields(operation: str, fields: str | None) -> None:
    """Refuse a selection from the answer of an operation.

    Raises:
        ApiError: 400: it cannot be read, or the answer has no such field.
    """
    if fields and (wrong := _unknown(_parse(fields), _ANSWERS.get(operation, _ANYTHING))):
        raise _invalid(wrong)


def select(resource: Any, fields: str | None) -> Any:
    """Leave of a resource what ``fields`` names; all of it without."""
    return _prune(resource, _parse(fields)) if fields else resource


def _invalid(what: str) -> Exception:
    return bad_request(f"Invalid field selection {what}", reason="invalidParameter")


def _parse(fields: str) -> _Tree:
    tree, rest = _parse_list(fields)
    if rest:
        raise _invalid(fields)
    return tree


def _parse_list(text: str) -> tuple[_Tree, str]:
    tree: _Tree = {}
    while True:
        name, below, text = _parse_one(text)
        tree.setdefault(name, {}).update(below)
        if not text.startswith(","):
            return tree, text
        text = text[1:]


def _parse_one(text: str) -> tuple[str, _Tree, str]:
    name = re.split("[,()/]", text, maxsplit=1)[0]
    rest = text[len(name) :]
    if not name.strip():
        raise _invalid(text)
    if rest.startswith("/"):
        inner, below, rest = _parse_one(rest[1:])
        return name.strip(), {inner: below}, rest
    if rest.startswith("("):
        below, rest = _parse_list(rest[1:])
        if not rest.startswith(")"):
            raise _invalid(text)
        return name.strip(), below, rest[1:]
    return name.strip(), {}, rest


def _prune(value: Any, tree: _Tree) -> Any:
    if not tree or "*" in tree:
        return value
    if isinstance(value, list):
        return [_prune(item, tree) for item in value]
    if isinstance(value, dict):
        return {key: _prune(item, tree[key]) for key, item in value.items() if key in tree}
    return value


def _unknown(asked: _Tree, known: _Tree, above: str = "") -> str:
    """Return the first place that is asked for and not known; a leaf knows nothing."""
    for name, below in asked.items() if "*" not in known else ():
        if not known or name not in (*known, "*"):
            return above + name
        if below and (wrong := _unknown(below, known.get(name, known), f"{above}{name}/")):
            return wrong
    return ""


_OWNER = "owner(entity,entityId)"
_ACCESS = "domain,email,entity,entityId,etag,id,kind,projectTeam(projectNumber,team),role,selfLink,bucket"
_OBJECT = (
    f"acl({_ACCESS},generation,object),bucket,cacheControl,componentCount,contentDisposition,contentEncoding,"
    "contentLanguage,contentType,contexts(custom(*)),crc32c,customTime,customerEncryption(encryptionAlgorithm,"
    "keySha256),etag,eventBasedHold,generation,hardDeleteTime,id,kind,kmsKeyName,md5Hash,mediaLink,metadata(*),"
    f"metageneration,name,{_OWNER},restoreToken,retention(mode,retainUntilTime),retentionExpirationTime,selfLink,size,"
    "softDeleteTime,storageClass,temporaryHold,timeCreated,timeDeleted,timeFinalized,timeStorageClassUpdated,updated"
)
_BUCKET = (
    f"acl({_ACCESS}),autoclass(*),billing(requesterPays),cors(*),customPlacementConfig(dataLocations),"
    f"defaultEventBasedHold,defaultObjectAcl({_ACCESS},generation,object),encryption(*),etag,generation,hardDeleteTime,"
    "hierarchicalNamespace(enabled),iamConfiguration(bucketPolicyOnly(enabled,lockedTime),publicAccessPrevention,"
    "uniformBucketLevelAccess(enabled,lockedTime)),id,ipFilter(*),kind,labels(*),lifecycle(rule(action(*),condition(*))),"
    "location,locationType,logging(logBucket,logObjectPrefix),metageneration,name,objectRetention(mode),"
    f"{_OWNER},projectNumber,retentionPolicy(*),rpo,satisfiesPZI,satisfiesPZS,selfLink,softDeletePolicy(effectiveTime,"
    "retentionDurationSeconds),softDeleteTime,storageClass,timeCreated,updated,versioning(enabled),website(*)"
)
_POLICY = "bindings(condition(*),members,role),etag,kind,resourceId,version"
_FOLDER = "bucket,createTime,id,kind,metageneration,name,pendingRenameInfo(*),selfLink,updateTime"
_ANYTHING: _Tree = {"*": {}}
_ANSWERS = {
    operation: _parse(text)
    for operations, text in {
        "bucket.get bucket.insert bucket.patch": _BUCKET,
        "bucket.list": f"items({_BUCKET}),kind,nextPageToken,unreachable",
        "bucket.layout": "bucket,customPlacementConfig(*),hierarchicalNamespace(enabled),kind,location,locationType",
        "bucket.permissions": "kind,permissions",
        "bucket.policy bucket.set_policy": _POLICY,
        "folder.get folder.insert": _FOLDER,
        "folder.list": f"items({_FOLDER}),kind,nextPageToken",
        "object.list": f"items({_OBJECT}),kind,nextPageToken,prefixes",
        "object.rewrite": f"done,kind,objectSize,resource({_OBJECT}),rewriteToken,totalBytesRewritten",
        "object.get object.media object.patch object.compose object.copy object.move object.restore upload.media "
        "upload.multipart upload.start upload.put upload.status": _OBJECT,
    }.items()
    for operation in operations.split()
}
