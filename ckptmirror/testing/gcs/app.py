"""The server: each operation to who performs it, and the admin's own paths (``/_faults``, ``/_log``).

Rules:
* Admin paths need no token and suffer no fault.
* A caller needs the operation's permission before it is performed; what else it needs is asked where it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs import buckets, compose, folders, listing, objects, policies, rewrite, uploads
from ckptmirror.testing.gcs.access import NEEDED, Caller
from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer
from ckptmirror.testing.gcs.auth import Gate
from ckptmirror.testing.gcs.batch import Part, part_bytes, perform_batch
from ckptmirror.testing.gcs.checks import check_bucket_name
from ckptmirror.testing.gcs.exchange import Broken, Exchange, body_of
from ckptmirror.testing.gcs.faults import Dropped, Script
from ckptmirror.testing.gcs.resumable import ResumableUploads
from ckptmirror.testing.gcs.state import State
from ckptmirror.testing.gcs.targets import Target, read_target

__all__ = ["GcsServer", "Options"]

_LOG_ENTRIES = 100_000
_UNIFORM = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"}}


@dataclass(frozen=True, slots=True)
class Options:
    """How a server is set up.

    Attributes:
        directory: Where everything is kept.
        buckets: Created with uniform bucket-level access if they are missing.
        bucket_settings: Fields of a bucket resource for those (``{"versioning": {"enabled": true}}``).
        tokens: Bearer tokens that may do everything.
        denied_tokens: Bearer tokens that may do nothing.
        callers: Who may do what, by token; an anonymous caller under ``""``.
        custom_roles: Permissions of the projects' own roles, for the policies of buckets.
        require_auth: Only tokens get in, from here or from ``POST /token``.
        token_lifetime_s: Of tokens from ``POST /token``.
        session_lifetime_s: Of resumable uploads.
        md5: Objects get an md5, as the service's do unless they are composite; off, large uploads are three times as
            fast and every client must manage with crc32c.
        mutations_per_s: How often one object may change; None for as often as one likes.
        rewrite_bytes_per_call: What a rewrite moves in one call; None for all where it stays in its place.
        day_s: How long a day of a soft delete policy takes.
    """

    directory: Path
    buckets: tuple[str, ...] = ()
    bucket_settings: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    denied_tokens: tuple[str, ...] = ()
    callers: Mapping[str, Caller] = field(default_factory=dict)
    custom_roles: Mapping[str, frozenset[str]] = field(default_factory=dict)
    require_auth: bool = False
    token_lifetime_s: float = 3600.0
    session_lifetime_s: float = 7 * 86400.0
    md5: bool = True
    mutations_per_s: float | None = None
    rewrite_bytes_per_call: int | None = None
    day_s: float = 86400.0


class GcsServer:
    """One server over one directory; ``app`` is what aiohttp runs."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._state = State(options.directory, mutations_per_s=options.mutations_per_s, day_s=options.day_s)
        self._script = Script()
        self._entries: deque[dict[str, Any]] = deque(maxlen=_LOG_ENTRIES)
        self._sessions = ResumableUploads(self._state, md5=options.md5, lifetime_s=options.session_lifetime_s)
        self._gate = Gate(
            self._state,
            tokens=options.tokens,
            denied=options.denied_tokens,
            callers=options.callers,
            required=options.require_auth,
            lifetime_s=options.token_lifetime_s,
            custom_roles=options.custom_roles,
        )
        known = {bucket.name for bucket in self._state.buckets()}
        settings = buckets.read_settings({**_UNIFORM, **options.bucket_settings})
        for name in options.buckets:
            if name not in known:
                self._state.insert_bucket(check_bucket_name(name), settings)
        self.app = web.Application()
        self.app.router.add_get("/_log", self._show_log)
        self.app.router.add_delete("/_log", self._clear_log)
        self.app.router.add_get("/_faults", self._show_faults)
        self.app.router.add_post("/_faults", self._add_faults)
        self.app.router.add_delete("/_faults", self._clear_faults)
        self.app.router.add_route("*", r"/{path:[\s\S]*}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            target = read_target(request)
        except ApiError as error:
            return self._refuse(request, error)
        exchange = Exchange(request, target.operation, target.query, self._script)
        try:
            response = await self._answer(exchange, target)
        except (Dropped, Broken, ConnectionError):
            return exchange.drop()
        return await exchange.send(response)

    def _refuse(self, request: web.Request, error: ApiError) -> web.Response:
        """The answer to a request that is not an operation; it is logged too."""
        exchange = Exchange(request, "", {}, self._script)
        exchange.entry["status"] = error.status
        self._entries.append(exchange.entry)
        return error.answer()

    async def _answer(self, exchange: Exchange, target: Target) -> web.StreamResponse:
        """The answer to one operation.

        Raises:
            Dropped: The connection should be cut.
            Broken: It is.
        """
        self._entries.append(exchange.entry)
        try:
            if target.operation != "token":
                self._gate.admit(exchange, on_session=bool(target.upload_id))
            needed = NEEDED.get(target.operation)
            if needed is not None:
                exchange.caller.require(needed, target.bucket)
            return await self._perform(exchange, target)
        except ApiError as error:
            return error.answer(as_text=exchange.as_text)

    async def _perform(self, exchange: Exchange, target: Target) -> web.StreamResponse:
        family = target.operation.partition(".")[0]
        if family == "bucket":
            return await self._perform_bucket(exchange, target)
        if family == "object":
            return await self._perform_object(exchange, target)
        if family == "folder":
            return await self._perform_folder(exchange, target)
        if family == "upload":
            return await self._perform_upload(exchange, target)
        if family == "batch":
            return await perform_batch(exchange, lambda part: self._perform_part(exchange, part))
        return await self._gate.token(exchange)

    async def _perform_bucket(self, exchange: Exchange, target: Target) -> web.StreamResponse:
        state, bucket = self._state, target.bucket
        match target.operation:
            case "bucket.list":
                return await buckets.list_buckets(exchange, state)
            case "bucket.insert":
                return await buckets.insert_bucket(exchange, state)
            case "bucket.get":
                return await buckets.get_bucket(exchange, state, bucket)
            case "bucket.patch":
                return await buckets.change_bucket(exchange, state, bucket)
            case "bucket.delete":
                return await buckets.delete_bucket(exchange, state, bucket)
            case "bucket.layout":
                return await buckets.get_layout(exchange, state, bucket)
            case "bucket.policy":
                return await policies.get_policy(exchange, state, bucket)
            case "bucket.set_policy":
                return await policies.set_policy(exchange, state, bucket, self._options.custom_roles)
            case _:
                return await buckets.held_permissions(exchange, state, bucket)

    async def _perform_object(self, exchange: Exchange, target: Target) -> web.StreamResponse:
        state, bucket, name = self._state, target.bucket, target.name
        match target.operation:
            case "object.list":
                return await listing.list_objects(exchange, state, bucket)
            case "object.get" | "object.media":
                return await objects.get_object(exchange, state, bucket, name)
            case "object.delete":
                return await objects.delete_object(exchange, state, bucket, name)
            case "object.patch":
                return await objects.patch_object(exchange, state, bucket, name)
            case "object.restore":
                return await objects.restore_object(exchange, state, bucket, name)
            case "object.compose":
                return await compose.compose_objects(exchange, state, bucket, name)
            case "object.copy":
                return await rewrite.copy_object(exchange, state, (bucket, name), target.to)
            case "object.move":
                return await rewrite.move_object(exchange, state, (bucket, name), target.to)
            case _:
                limit = self._options.rewrite_bytes_per_call
                return await rewrite.rewrite_object(exchange, state, (bucket, name), target.to, limit)

    async def _perform_folder(self, exchange: Exchange, target: Target) -> web.StreamResponse:
        state, bucket = self._state, target.bucket
        match target.operation:
            case "folder.list":
                return await folders.list_folders(exchange, state, bucket)
            case "folder.insert":
                return await folders.insert_folder(exchange, state, bucket)
            case "folder.get":
                return await folders.get_folder(exchange, state, bucket, target.name)
            case _:
                return await folders.delete_folder(exchange, state, bucket, target.name)

    async def _perform_upload(self, exchange: Exchange, target: Target) -> web.StreamResponse:
        state, bucket, md5 = self._state, target.bucket, self._options.md5
        match target.operation:
            case "upload.media":
                return await uploads.upload_media(exchange, state, bucket, md5=md5)
            case "upload.multipart":
                return await uploads.upload_multipart(exchange, state, bucket, md5=md5)
            case "upload.start":
                return await self._sessions.start(exchange, bucket)
            case "upload.cancel":
                return await self._sessions.cancel(exchange, target.upload_id)
            case _:
                return await self._sessions.put(exchange, target.upload_id)

    async def _perform_part(self, batch: Exchange, part: Part) -> bytes:
        """One call of a batch."""
        try:
            request = part.request_in(batch.request)
            target = read_target(request)
            if (refusal := part.refusal(target.operation)) is not None:
                raise refusal
        except ApiError as error:
            answer = self._refuse(batch.request, error)
            return part_bytes(answer, body_of(answer))
        exchange = Exchange(request, target.operation, target.query, self._script, part_body=part.body)
        response = await self._answer(exchange, target)
        cut_at = await exchange.suffer_answer(response)
        return part_bytes(response, body_of(response)[:cut_at])

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
