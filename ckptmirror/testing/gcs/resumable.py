"""Resumable uploads (https://cloud.google.com/storage/docs/performing-resumable-uploads).

Rules:
* A chunk that is not the last is a multiple of 256 KiB long; what is kept of a broken one is such a multiple.
* Bytes that are already kept are skipped when they come again; a gap is refused with 503.
* One request at a time feeds a session: the newest. What an older one still brings is dropped.
* Preconditions and checksums are judged at the end; a refused end kills the session (410).
* A session is kept on disk: after a restart of the server it continues where its file ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request, not_found
from ckptmirror.testing.gcs.checks import ContentRange, Preconditions, declared_checksums, parse_content_range
from ckptmirror.testing.gcs.exchange import Broken, Exchange
from ckptmirror.testing.gcs.faults import Dropped, reset_connection
from ckptmirror.testing.gcs.intake import GRANULE_BYTES, Intake
from ckptmirror.testing.gcs.objects import answer_object
from ckptmirror.testing.gcs.records import Session, StoredObject
from ckptmirror.testing.gcs.state import State
from ckptmirror.testing.gcs.uploads import checksums_to_json, commit, declare, preconditions_to_json

__all__ = ["ResumableUploads", "is_status_query"]


_RELEASE_TIMEOUT_S = 2.0


def is_status_query(request: web.BaseRequest) -> bool:
    """Whether a PUT on a session carries no bytes but asks, or says the end."""
    return request.headers.get("Content-Range", "").strip().startswith("bytes */")


class _Done(Exception):
    """The session's upload is complete."""

    def __init__(self, item: StoredObject) -> None:
        super().__init__(item.name)
        self.item = item


@dataclass(slots=True)
class _Feed:
    """The file of an open session and the request that feeds it."""

    intake: Intake
    lock: asyncio.Lock
    owner: Exchange | None = None
    recovered: bool = False
    released: asyncio.Event = field(default_factory=asyncio.Event)


class ResumableUploads:
    """All upload sessions of one server."""

    def __init__(self, state: State, *, md5: bool, lifetime_s: float) -> None:
        self._state = state
        self._md5 = md5
        self._lifetime_s = lifetime_s
        self._feeds: dict[str, _Feed] = {}

    async def start(self, exchange: Exchange, bucket: str) -> web.StreamResponse:
        """POST: a new session; its URI is in the Location header."""
        headers = exchange.request.headers
        resource = await exchange.json_body()
        name, metadata = declare(exchange, self._state.bucket(bucket), resource, headers.get("X-Upload-Content-Type"))
        await exchange.identify(name)
        declared: dict[str, Any] = {
            "metadata": metadata,
            "preconditions": preconditions_to_json(Preconditions.of(exchange.query)),
            "checksums": checksums_to_json(declared_checksums(resource, headers.get("X-Goog-Hash"), None)),
            "no_replacing": exchange.caller.no_replacing(bucket),
        }
        session = self._state.start_session(bucket, name, declared, _length(headers.get("X-Upload-Content-Length")))
        place = f"/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        kept: dict[str, str] = {key: exchange.query[key] for key in ("fields", "projection") if key in exchange.query}
        query: dict[str, str] = {"uploadType": "resumable", "name": name, **kept, "upload_id": session.upload_id}
        text = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
        location = {"Location": f"{exchange.host}{place}?{text}", "X-GUploader-UploadID": session.upload_id}
        return web.Response(status=200, headers=location)

    async def name_of(self, upload_id: str) -> str:
        """The object a session is for; empty if there is no such session."""
        session = self._state.session(upload_id)
        return "" if session is None else session.name

    def _session(self, upload_id: str) -> Session:
        session = self._state.session(upload_id)
        if session is None:
            raise not_found("Upload session not found.")
        if time.time() * 1e6 > session.started_us + self._lifetime_s * 1e6:
            raise ApiError(410, "The upload session has expired.")
        if session.state == "cancelled":
            raise ApiError(499, "The upload was cancelled.")
        if session.state == "dead":
            raise ApiError(410, "The upload session is no longer available.")
        return session

    @asynccontextmanager
    async def _held(self, upload_id: str) -> AsyncIterator[tuple[Session, _Feed]]:
        """An open session with its lock.

        Raises:
            ApiError: 404, 410 or 499: the session does not exist, or no longer.
            _Done: The upload is complete.
        """
        while True:
            session = self._session(upload_id)
            if session.result is not None:
                raise _Done(session.result)
            feed = self._feed(session)
            async with feed.lock:
                if self._feeds.get(upload_id) is feed:
                    yield session, feed
                    return

    async def cancel(self, exchange: Exchange, upload_id: str) -> web.StreamResponse:
        """DELETE: 499, and the session with what it kept is gone."""
        await exchange.identify(await self.name_of(upload_id))
        try:
            async with self._held(upload_id) as (session, feed):
                await self._end(session, feed, "cancelled")
        except _Done as error:
            raise ApiError(410, "The upload is already complete.") from error
        return web.Response(status=499)

    async def _end(self, session: Session, feed: _Feed, state: str) -> None:
        feed.owner = None
        feed.released.set()
        await feed.intake.settle()
        self._close(session, feed)
        if state != "done":
            self._state.end_session(session, state)

    def _close(self, session: Session, feed: _Feed) -> None:
        feed.intake.close()
        if self._feeds.get(session.upload_id) is feed:
            del self._feeds[session.upload_id]

    def _feed(self, session: Session) -> _Feed:
        feed = self._feeds.get(session.upload_id)
        if feed is None:
            intake = Intake(self._state.path(session.file), md5=self._md5)
            feed = self._feeds[session.upload_id] = _Feed(intake, asyncio.Lock())
        return feed

    async def _take_over(self, feed: _Feed, exchange: Exchange) -> None:
        """Become the request that feeds the session. With the lock held."""
        older, feed.owner = feed.owner, exchange
        feed.released.clear()
        if older is not None:
            reset_connection(older.request)
        await self._recover(feed)
        await feed.intake.keep_multiple()

    async def _recover(self, feed: _Feed) -> None:
        if not feed.recovered:
            await asyncio.to_thread(feed.intake.recover)
            feed.recovered = True

    async def put(self, exchange: Exchange, upload_id: str) -> web.StreamResponse:
        """PUT: a chunk, the whole object, or (``bytes */N``) a question."""
        await exchange.identify(await self.name_of(upload_id))
        header = exchange.request.headers.get("Content-Range")
        wanted = parse_content_range(header) if header else ContentRange(0, None, exchange.request.content_length)
        try:
            if wanted.first is None:
                return await self._asked(exchange, upload_id, wanted.total)
            _check_chunk(exchange, wanted)
            return await self._chunk(exchange, upload_id, wanted, wanted.first)
        except _Done as done:
            return answer_object(exchange, done.item)

    async def _chunk(self, exchange: Exchange, upload_id: str, wanted: ContentRange, first: int) -> web.StreamResponse:
        async with self._held(upload_id) as (session, feed):
            _check_total(session, wanted.total)
            await self._take_over(feed, exchange)
            kept_bytes = feed.intake.kept_bytes
        try:
            _check_kept(kept_bytes, wanted.total)
            session = self._with_total(session, wanted.total)
            if kept_bytes < first:
                return _gap(first, kept_bytes)
            return await self._fed(exchange, session, feed, wanted, kept_bytes - first)
        finally:
            if feed.owner is exchange:
                feed.owner = None
                feed.released.set()

    def _with_total(self, session: Session, total: int | None) -> Session:
        """The session, which knows its length from now on."""
        _check_total(session, total)
        return session if total is None or total == session.total else self._state.set_total(session, total)

    async def _asked(self, exchange: Exchange, upload_id: str, total: int | None) -> web.StreamResponse:
        """A status query; with the object's length it also ends an upload whose bytes are all there."""
        await self._wait_for_broken(upload_id)
        async with self._held(upload_id) as (session, feed):
            _check_total(session, total)
            await self._recover(feed)
            await feed.intake.write_multiple()
            kept_bytes = feed.intake.kept_bytes
            _check_kept(kept_bytes, total)
            if total == kept_bytes:
                return await self._finish(exchange, session, feed)
            return _incomplete(exchange, kept_bytes)

    async def _wait_for_broken(self, upload_id: str) -> None:
        """If the feeding request's connection is gone, let it first keep what it had."""
        feed = self._feeds.get(upload_id)
        if feed is not None and feed.owner is not None and feed.owner.request.transport is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(feed.released.wait(), _RELEASE_TIMEOUT_S)

    async def _fed(
        self, exchange: Exchange, session: Session, feed: _Feed, wanted: ContentRange, skip_bytes: int
    ) -> web.StreamResponse:
        first = wanted.first or 0
        try:
            arrived_bytes = await self._pour(exchange, feed, skip_bytes)
        except (Broken, Dropped, ApiError) as error:
            await self._only_if_owner(feed, exchange, feed.intake.keep_multiple)
            if isinstance(error, Broken):
                raise Dropped from error
            raise
        except OSError as error:
            raise self._storage_failed(session, feed, error) from error
        end = wanted.end if wanted.end is not None else first + arrived_bytes
        if first + arrived_bytes != end:
            await self._only_if_owner(feed, exchange, feed.intake.keep_multiple)
            raise bad_request(f"The Content-Range announced {end - first} bytes, {arrived_bytes} came.")
        if wanted.end is None:
            session = self._with_total(session, end)
        short = exchange.fault is not None and exchange.fault.keep_bytes is not None
        if session.total != end or short:
            if short and session.total == end:
                exchange.suffered("keep_bytes")
            await self._only_if_owner(feed, exchange, feed.intake.keep_multiple)
            return _incomplete(exchange, feed.intake.kept_bytes)
        async with feed.lock:
            if feed.owner is not exchange:
                raise Dropped
            return await self._finish(exchange, session, feed)

    def _storage_failed(self, session: Session, feed: _Feed, error: OSError) -> ApiError:
        """The disk is full or broken: forget what is in memory; the next request starts from the file."""
        self._close(session, feed)
        return ApiError(503, f"storage failed: {error.strerror}")

    async def _pour(self, exchange: Exchange, feed: _Feed, skip_bytes: int) -> int:
        arrived_bytes = 0
        limit = exchange.fault.keep_bytes if exchange.fault is not None else None
        async for chunk in exchange.object_bytes(exchange.body()):
            taken = chunk if limit is None else chunk[: max(limit - arrived_bytes, 0)]
            if len(taken) < len(chunk):
                exchange.suffered("keep_bytes")
            arrived_bytes += len(chunk)
            fresh = taken[skip_bytes:] if skip_bytes else taken
            skip_bytes = max(skip_bytes - len(chunk), 0)
            async with feed.lock:
                if feed.owner is not exchange:
                    raise Dropped
                if fresh:
                    await feed.intake.add(fresh)
        return arrived_bytes

    async def _only_if_owner(self, feed: _Feed, exchange: Exchange, action: Callable[[], object]) -> None:
        async with feed.lock:
            if feed.owner is not exchange:
                raise Dropped
            result = action()
            if asyncio.iscoroutine(result):
                await result

    async def _finish(self, exchange: Exchange, session: Session, feed: _Feed) -> web.StreamResponse:
        """All bytes are there: commit, or kill the session. With the lock held."""
        declared = session.declared
        target = (session.bucket, session.name, session.file)
        try:
            checksums = declared_checksums(declared["checksums"], exchange.request.headers.get("X-Goog-Hash"), None)
            preconditions = Preconditions(*declared["preconditions"])
            done = await commit(
                exchange,
                self._state,
                target,
                declared["metadata"],
                feed.intake,
                checksums,
                preconditions,
                no_replacing=declared["no_replacing"],
                upload_id=session.upload_id,
            )
        except ApiError as error:
            if error.status != 429:  # too fast is not a refusal: the bytes stay, and the client may send the end again
                await self._end(session, feed, "dead")
            raise
        except OSError as error:
            raise self._storage_failed(session, feed, error) from error
        await self._end(session, feed, "done")
        return answer_object(exchange, done)


def _length(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise bad_request(f"Invalid X-Upload-Content-Length: {text}")
    return int(text)


def _check_total(session: Session, total: int | None) -> None:
    if None not in (total, session.total) and total != session.total:
        raise bad_request(f"The upload was announced with {session.total} bytes, now with {total}.")


def _check_kept(kept_bytes: int, total: int | None) -> None:
    if total is not None and kept_bytes > total:
        raise bad_request(f"{kept_bytes} bytes are stored already, more than {total}.")


def _check_chunk(exchange: Exchange, wanted: ContentRange) -> None:
    if wanted.first is None or wanted.end is None:
        return
    size_bytes = wanted.end - wanted.first
    announced = exchange.request.content_length
    if announced is not None and announced != size_bytes:
        raise bad_request(
            f"Invalid request.  There were {announced} byte(s) in the request body.  There should have been "
            f"{size_bytes} byte(s) (starting at offset {wanted.first} and ending at offset {wanted.end - 1}) "
            "according to the Content-Range header."
        )
    if wanted.end != wanted.total and size_bytes % GRANULE_BYTES:
        raise bad_request(
            f"Invalid request.  A chunk that is not the last must be a multiple of {GRANULE_BYTES} bytes, "
            f"this one has {size_bytes}."
        )


def _gap(first: int, kept_bytes: int) -> web.Response:
    message = (
        f"Invalid request.  According to the Content-Range header, the upload offset is {first} byte(s), "
        f"which exceeds already uploaded size of {kept_bytes} byte(s)."
    )
    return web.Response(status=503, text=message)


def _incomplete(exchange: Exchange, kept_bytes: int) -> web.Response:
    """308; a client that says ``X-GUploader-No-308`` (Go's) gets 200 and the 308 in a header.

    That header is in the source of Google's Go client (``internal/gensupport/resumable.go``), on no page.
    """
    headers = {"Range": f"bytes=0-{kept_bytes - 1}"} if kept_bytes else {}
    if exchange.request.headers.get("X-GUploader-No-308", "").lower() == "yes":
        return web.Response(status=200, headers={**headers, "X-Http-Status-Code-Override": "308"})
    return web.Response(status=308, headers=headers)
