"""The server: which request is which operation, and the admin's own paths (``/_faults``, ``/_log``).

Rules:
* A path is cut at its slashes before it is decoded: a slash in a name is sent as ``%2F``.
* Admin paths need no token and suffer no fault.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from ckptmirror.testing.gcs import buckets, objects, uploads
from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer, not_found, not_served
from ckptmirror.testing.gcs.auth import Gate
from ckptmirror.testing.gcs.checks import check_bucket_name
from ckptmirror.testing.gcs.exchange import Broken, Exchange
from ckptmirror.testing.gcs.faults import Dropped, Script
from ckptmirror.testing.gcs.resumable import ResumableUploads, is_status_query
from ckptmirror.testing.gcs.state import State

__all__ = ["GcsServer", "Options"]

_log = logging.getLogger(__name__)
_LOG_ENTRIES = 100_000


@dataclass(frozen=True, slots=True)
class Options:
    """How a server is set up.

    Attributes:
        md5: Objects get an md5, as the service's do unless they are composite; off, large uploads are three times as
            fast and every client must manage with crc32c.
    """

    directory: Path
    buckets: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    denied_tokens: tuple[str, ...] = ()
    require_auth: bool = False
    token_lifetime_s: float = 3600.0
    session_lifetime_s: float = 7 * 86400.0
    md5: bool = True


@dataclass(frozen=True, slots=True)
class _Target:
    """What a path and a query name."""

    operation: str
    bucket: str = ""
    name: str = ""
    upload_id: str = ""
    query: dict[str, str] = field(default_factory=dict)


class GcsServer:
    """One server over one directory; ``app`` is what aiohttp runs."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._state = State(options.directory)
        self._script = Script()
        self._entries: deque[dict[str, Any]] = deque(maxlen=_LOG_ENTRIES)
        self._sessions = ResumableUploads(self._state, md5=options.md5, lifetime_s=options.session_lifetime_s)
        self._gate = Gate(
            self._state,
            tokens=options.tokens,
            denied=options.denied_tokens,
            required=options.require_auth,
            lifetime_s=options.token_lifetime_s,
        )
        known = {bucket.name for bucket in self._state.buckets()}
        for name in options.buckets:
            if name not in known:
                self._state.insert_bucket(check_bucket_name(name))
        self.app = web.Application()
        self.app.router.add_get("/_log", self._show_log)
        self.app.router.add_delete("/_log", self._clear_log)
        self.app.router.add_get("/_faults", self._show_faults)
        self.app.router.add_post("/_faults", self._add_faults)
        self.app.router.add_delete("/_faults", self._clear_faults)
        self.app.router.add_route("*", "/{path:.*}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            target = _read_target(request)
        except ApiError as error:
            return error.answer()
        exchange = Exchange(request, target.operation, target.query, self._script)
        self._entries.append(exchange.entry)
        try:
            if target.operation != "token":
                self._gate.admit(exchange, on_session=bool(target.upload_id))
            response = await self._perform(exchange, target)
        except (Dropped, Broken):
            return exchange.drop()
        except ApiError as error:
            response = error.answer(as_text=exchange.as_text)
        except ConnectionError:
            return exchange.drop()
        return await exchange.send(response)

    async def _perform(self, exchange: Exchange, target: _Target) -> web.StreamResponse:
        state, bucket, name = self._state, target.bucket, target.name
        match target.operation:
            case "token":
                return await self._gate.token(exchange)
            case "bucket.list":
                return await buckets.list_buckets(exchange, state)
            case "bucket.insert":
                return await buckets.insert_bucket(exchange, state)
            case "bucket.get":
                return await buckets.get_bucket(exchange, state, bucket)
            case "bucket.delete":
                return await buckets.delete_bucket(exchange, state, bucket)
            case "object.list":
                return await objects.list_objects(exchange, state, bucket)
            case "object.get" | "object.media":
                return await objects.get_object(exchange, state, bucket, name)
            case "object.delete":
                return await objects.delete_object(exchange, state, bucket, name)
            case "object.patch":
                return await objects.patch_object(exchange, state, bucket, name)
            case "upload.media":
                return await uploads.upload_media(exchange, state, bucket, md5=self._options.md5)
            case "upload.multipart":
                return await uploads.upload_multipart(exchange, state, bucket, md5=self._options.md5)
            case "upload.start":
                return await self._sessions.start(exchange, bucket)
            case "upload.cancel":
                return await self._sessions.cancel(exchange, target.upload_id)
            case _:
                return await self._sessions.put(exchange, target.upload_id)

    async def _show_log(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(list(self._entries))

    async def _clear_log(self, _request: web.Request) -> web.StreamResponse:
        self._entries.clear()
        return web.Response(status=204)

    async def _show_faults(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response([armed.to_json() for armed in self._script.faults])

    async def _add_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            self._script.extend(await request.json())
        except ApiError as error:
            return error.answer()
        except ValueError:
            return bad_request("a fault script is JSON").answer()
        return json_answer({"faults": len(self._script.faults)})

    async def _clear_faults(self, _request: web.Request) -> web.StreamResponse:
        self._script.faults.clear()
        return web.Response(status=204)

    def close(self) -> None:
        self._state.close()


def _read_target(request: web.Request) -> _Target:
    path, _, text = request.raw_path.partition("?")
    try:
        query = dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
        parts = [unquote(part, errors="strict") for part in path.split("/")[1:]]
    except ValueError as error:
        raise bad_request("The path or the query is not UTF-8.") from error
    method = request.method
    match parts:
        case ["token"] if method == "POST":
            return _Target("token", query=query)
        case ["upload", "storage", "v1", "b", bucket, "o"]:
            return _read_upload(request, bucket, query)
        case ["batch", *_]:
            raise not_served("batch requests")
        case ["download", "storage", "v1", "b", bucket, "o", name] | ["storage", "v1", "b", bucket, "o", name]:
            return _read_object(method, parts[0], bucket, name, query)
        case ["storage", "v1", "b"]:
            return _Target(_by_method(method, {"GET": "bucket.list", "POST": "bucket.insert"}), query=query)
        case ["storage", "v1", "b", bucket]:
            operations = {"GET": "bucket.get", "DELETE": "bucket.delete"}
            return _Target(_by_method(method, operations), bucket, query=query)
        case ["storage", "v1", "b", bucket, "o"]:
            return _Target(_by_method(method, {"GET": "object.list"}), bucket, query=query)
        case ["storage", "v1", "b", _, "o", _, sub, *_] if sub in ("compose", "rewriteTo", "copyTo", "acl", "restore"):
            raise not_served(sub)
    raise not_found("Not Found")


def _by_method(method: str, operations: Mapping[str, str]) -> str:
    if method not in operations:
        raise not_served(f"{method} here")
    return operations[method]


def _read_object(method: str, first: str, bucket: str, name: str, query: dict[str, str]) -> _Target:
    operations = {"GET": "object.get", "DELETE": "object.delete", "PATCH": "object.patch", "PUT": "object.patch"}
    operation = _by_method(method, operations)
    if operation == "object.get" and query.get("alt") == "media":
        operation = "object.media"
    elif first == "download":
        raise bad_request("A download needs alt=media.")
    return _Target(operation, bucket, name, query=query)


def _read_upload(request: web.Request, bucket: str, query: dict[str, str]) -> _Target:
    upload_id, kind = query.get("upload_id", ""), query.get("uploadType")
    if upload_id:
        put = "upload.status" if is_status_query(request) else "upload.put"
        operation = _by_method(request.method, {"PUT": put, "POST": put, "DELETE": "upload.cancel"})
        return _Target(operation, bucket, upload_id=upload_id, query=query)
    if kind not in ("media", "multipart", "resumable"):
        raise bad_request("uploadType must be media, multipart or resumable.")
    operation = _by_method(request.method, {"POST": "upload.start" if kind == "resumable" else f"upload.{kind}"})
    return _Target(operation, bucket, query=query)
