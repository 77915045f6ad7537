"""Which request is which operation (https://cloud.google.com/storage/docs/request-endpoints).

Rules:
* A path is cut at its slashes before it is decoded: a slash in a name is sent as ``%2F``.
* What the service has and this server does not serve is 501, what nobody has is 404.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from ckptmirror.testing.gcs.answers import bad_request, not_found, not_served
from ckptmirror.testing.gcs.params import check_parameters
from ckptmirror.testing.gcs.resumable import is_status_query

__all__ = ["Target", "read_target"]

_SUBS = {"compose": "object.compose", "restore": "object.restore"}
_COPIES = {"rewriteTo": "object.rewrite", "copyTo": "object.copy"}
_NOT_SERVED = frozenset(
    {
        "acl",
        "defaultObjectAcl",
        "iam",
        "watch",
        "bulkRestore",
        "notificationConfigs",
        "lockRetentionPolicy",
        "relocate",
        "operations",
        "managedFolders",
        "anywhereCaches",
        "restore",
        "renameTo",
    }
)


_KEY_HEADERS = ("x-goog-encryption-", "x-goog-copy-source-encryption-")
_ROOTS = ("storage", "upload", "download", "batch", "token")


@dataclass(frozen=True, slots=True)
class Target:
    """What a path and a query name; ``to`` is the destination of a copy."""

    operation: str
    bucket: str = ""
    name: str = ""
    upload_id: str = ""
    query: dict[str, str] = field(default_factory=dict)
    to: tuple[str, str] = ("", "")


def read_target(request: web.Request) -> Target:
    """The operation that a request asks for, its parameters checked.

    Raises:
        ApiError: 400, 404 or 501.
    """
    path, _, text = request.raw_path.partition("?")
    try:
        query = dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
        parts = [unquote(part, errors="strict") for part in path.split("/")[1:]]
    except ValueError as error:
        raise bad_request("The path or the query is not UTF-8.") from error
    for header in request.headers:
        if header.lower().startswith(_KEY_HEADERS):
            raise not_served(f"customers' keys: the header {header}")
    target = _read(request, parts, query)
    check_parameters(target.operation, query)
    return target


def _read(request: web.Request, parts: list[str], query: dict[str, str]) -> Target:
    method = request.method
    match parts:
        case ["token"] if method == "POST":
            return Target("token", query=query)
        case ["batch", "storage", "v1"] if method == "POST":
            return Target("batch", query=query)
        case ["upload", "storage", "v1", "b", bucket, "o"]:
            return _read_upload(request, bucket, query)
        case ["resumable", "upload", *_]:
            raise not_served("this old form of a resumable upload")
        case ["download", "storage", "v1", "b", bucket, "o", name]:
            if query.get("alt") != "media":
                raise bad_request("A download needs alt=media.")
            return Target(_by_method(method, {"GET": "object.media"}), bucket, name, query=query)
        case ["storage", "v1", "b"]:
            return Target(_by_method(method, {"GET": "bucket.list", "POST": "bucket.insert"}), query=query)
        case ["storage", "v1", "b", bucket, *rest]:
            return _read_below(method, bucket, rest, query)
        case ["storage", "v1", "projects", *_]:
            raise not_served("what belongs to a project")
    if parts[0] not in _ROOTS:
        raise not_served("the XML API; the JSON API is below /storage/v1/")
    raise not_found("Not Found")


def _read_below(method: str, bucket: str, rest: list[str], query: dict[str, str]) -> Target:
    """The part of a path below a bucket."""
    match rest:
        case []:
            operations = {
                "GET": "bucket.get",
                "DELETE": "bucket.delete",
                "PATCH": "bucket.patch",
                "PUT": "bucket.patch",
            }
            return Target(_by_method(method, operations), bucket, query=query)
        case ["storageLayout"]:
            return Target(_by_method(method, {"GET": "bucket.layout"}), bucket, query=query)
        case ["iam"]:
            return Target(_by_method(method, {"GET": "bucket.policy", "PUT": "bucket.set_policy"}), bucket, query=query)
        case ["iam", "testPermissions"]:
            return Target(_by_method(method, {"GET": "bucket.permissions"}), bucket, query=query)
        case ["o"]:
            return Target(_by_method(method, {"GET": "object.list"}), bucket, query=query)
        case ["o", name]:
            return Target(_of_object(method, query), bucket, name, query=query)
        case ["o", name, sub] if sub in _SUBS:
            return Target(_by_method(method, {"POST": _SUBS[sub]}), bucket, name, query=query)
        case ["o", name, sub, "b", other, "o", new] if sub in _COPIES:
            return Target(_by_method(method, {"POST": _COPIES[sub]}), bucket, name, query=query, to=(other, new))
        case ["o", name, "moveTo", "o", new]:
            return Target(_by_method(method, {"POST": "object.move"}), bucket, name, query=query, to=(bucket, new))
        case ["folders"]:
            operations = {"GET": "folder.list", "POST": "folder.insert"}
            return Target(_by_method(method, operations), bucket, query=query)
        case ["folders", name]:
            operations = {"GET": "folder.get", "DELETE": "folder.delete"}
            return Target(_by_method(method, operations), bucket, name, query=query)
    for sub in rest[0:1] + rest[2:3]:
        if sub in _NOT_SERVED:
            raise not_served(sub)
    raise not_found("Not Found")


def _by_method(method: str, operations: Mapping[str, str]) -> str:
    if method not in operations:
        raise not_served(f"{method} here")
    return operations[method]


def _of_object(method: str, query: dict[str, str]) -> str:
    operations = {"GET": "object.get", "DELETE": "object.delete", "PATCH": "object.patch", "PUT": "object.patch"}
    operation = _by_method(method, operations)
    return "object.media" if operation == "object.get" and query.get("alt") == "media" else operation


def _read_upload(request: web.Request, bucket: str, query: dict[str, str]) -> Target:
    upload_id, kind = query.get("upload_id", ""), query.get("uploadType")
    if upload_id:
        put = "upload.status" if is_status_query(request) else "upload.put"
        operation = _by_method(request.method, {"PUT": put, "POST": put, "DELETE": "upload.cancel"})
        return Target(operation, bucket, upload_id=upload_id, query=query)
    if kind not in ("media", "multipart", "resumable"):
        raise bad_request("uploadType must be media, multipart or resumable.")
    operation = _by_method(request.method, {"POST": "upload.start" if kind == "resumable" else f"upload.{kind}"})
    return Target(operation, bucket, query=query)
