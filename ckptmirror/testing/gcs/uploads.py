"""Uploads in one request: media and multipart; and what every kind of upload shares: its declaration and its commit.

Sources: https://cloud.google.com/storage/docs/uploading-objects and
https://cloud.google.com/storage/docs/json_api/v1/objects/insert

Rules:
* An object appears only when all its bytes are in their file and every declared checksum agrees.
* Preconditions are those of the moment of the commit, not of the start.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request
from ckptmirror.testing.gcs.checks import Checksums, Preconditions, check_object_name, declared_checksums
from ckptmirror.testing.gcs.exchange import Broken, Exchange, parse_object
from ckptmirror.testing.gcs.faults import Dropped
from ckptmirror.testing.gcs.intake import Intake, invert_byte
from ckptmirror.testing.gcs.objects import answer_object
from ckptmirror.testing.gcs.params import check_predefined_acl
from ckptmirror.testing.gcs.records import Bucket, StoredObject
from ckptmirror.testing.gcs.resources import settable
from ckptmirror.testing.gcs.state import State

__all__ = ["checksums_to_json", "commit", "declare", "preconditions_to_json", "upload_media", "upload_multipart"]

_MAX_HEAD_BYTES = 1024 * 1024


def declare(
    exchange: Exchange, bucket: Bucket, resource: dict[str, Any], content_type: str | None
) -> tuple[str, dict[str, Any]]:
    """The object's name and the resource fields that an upload sets.

    Raises:
        ApiError: 400 for a bad or missing name, or an access list that the bucket does not take.
    """
    query_name, name = exchange.query.get("name"), resource.get("name")
    if query_name is not None and name is not None and name != query_name:
        raise bad_request(f"Value '{name}' in content does not agree with value '{query_name}'.")
    check_predefined_acl(bucket, exchange.query.get("predefinedAcl"))
    metadata = settable(resource)
    if "contentType" not in metadata and content_type:
        metadata["contentType"] = content_type
    if exchange.query.get("contentEncoding"):
        metadata["contentEncoding"] = exchange.query["contentEncoding"]
    return check_object_name(str(query_name or name or ""), hierarchical=bucket.hierarchical), metadata


async def commit(
    exchange: Exchange,
    state: State,
    target: tuple[str, str, str],
    metadata: dict[str, Any],
    intake: Intake,
    checksums: Checksums,
    preconditions: Preconditions,
    *,
    no_replacing: str | None,
    upload_id: str | None = None,
) -> StoredObject:
    """Make the bytes of ``intake`` the live object of ``target`` (bucket, name, file).

    Raises:
        ApiError: 400 for a wrong checksum, 412 or 304 for a precondition, 403 for an object that the caller may not
            replace (``no_replacing`` says why), 429 for one that changes too often; nothing changed.
    """
    await intake.finish()
    md5 = intake.md5
    if checksums.md5 is not None and md5 is None:
        md5 = await asyncio.to_thread(intake.md5_of_file)
    checksums.check(intake.crc32c, md5)
    bucket, name, file = target
    new = StoredObject(bucket, name, 0, 1, intake.kept_bytes, intake.crc32c, intake.md5, 0, 0, file, metadata)
    done = state.objects.put(state.bucket(bucket), new, preconditions, no_replacing=no_replacing, upload_id=upload_id)
    rotten_at = exchange.fault.corrupt_byte_at if exchange.fault is not None else None
    if rotten_at is not None and invert_byte(state.path(file), rotten_at):
        exchange.suffered("corrupt_byte_at")
    return done


async def upload_media(exchange: Exchange, state: State, bucket: str, *, md5: bool) -> web.StreamResponse:
    """``uploadType=media``: the body is the object, the name is in the query."""
    headers = exchange.request.headers
    name, metadata = declare(exchange, state.bucket(bucket), {}, headers.get("Content-Type"))
    await exchange.identify(name)
    checksums = declared_checksums({}, headers.get("X-Goog-Hash"), headers.get("Content-MD5"))
    return await _receive(exchange, state, (bucket, name), metadata, checksums, exchange.body(), md5)


async def upload_multipart(exchange: Exchange, state: State, bucket: str, *, md5: bool) -> web.StreamResponse:
    """``uploadType=multipart``: the resource as JSON, then the object."""
    place = state.bucket(bucket)
    parts = _RelatedParts(exchange.request.headers.get("Content-Type", ""), exchange.body())
    try:
        head, media_headers = await parts.read_head()
    except Broken as error:
        raise Dropped from error
    resource = parse_object(head)
    name, metadata = declare(exchange, place, resource, media_headers.get("content-type"))
    await exchange.identify(name)
    checksums = declared_checksums(resource, exchange.request.headers.get("X-Goog-Hash"), None)
    return await _receive(exchange, state, (bucket, name), metadata, checksums, parts.media(), md5)


async def _receive(
    exchange: Exchange,
    state: State,
    target: tuple[str, str],
    metadata: dict[str, Any],
    checksums: Checksums,
    stream: AsyncIterator[bytes],
    md5: bool,
) -> web.StreamResponse:
    preconditions = Preconditions.of(exchange.query)
    refusal = exchange.caller.no_replacing(target[0])
    file = state.new_file()
    intake = Intake(state.path(file), md5=md5)
    done: StoredObject | None = None
    try:
        async for chunk in exchange.object_bytes(stream):
            await intake.add(chunk)
        place = (*target, file)
        done = await commit(exchange, state, place, metadata, intake, checksums, preconditions, no_replacing=refusal)
    except Broken as error:
        raise Dropped from error
    finally:
        await intake.settle()
        intake.close()
        if done is None:
            state.remove_file(file)
    return answer_object(exchange, done)


class _RelatedParts:
    """A ``multipart/related`` body of exactly two parts, its lines ended by CRLF or by bare LF."""

    def __init__(self, content_type: str, stream: AsyncIterator[bytes]) -> None:
        match = re.search(r'boundary=(?:"([^"]+)"|([^\s;"]+))', content_type)
        if not content_type.lower().startswith("multipart/related") or match is None:
            raise bad_request("Bad Content-Type: multipart/related with a boundary is required", reason="badContent")
        boundary = (match[1] or match[2]).encode()
        self._separator = re.compile(rb"(?:\A|\r?\n)--" + re.escape(boundary) + rb"[ \t]*\r?\n")
        self._end = re.compile(rb"\r?\n--" + re.escape(boundary) + rb"--\s*\Z")
        self._held_bytes = len(boundary) + 64
        self._stream = stream
        self._buffer = bytearray()

    async def read_head(self) -> tuple[bytes, dict[str, str]]:
        """The first part's body and the second part's headers."""
        first = await self._find(self._separator, 0)
        _, start = await self._part_headers(first.end())
        second = await self._find(self._separator, max(start - 2, 0))
        resource = bytes(self._buffer[start : second.start()])
        headers, start = await self._part_headers(second.end())
        del self._buffer[:start]
        return resource, headers

    async def _find(self, pattern: re.Pattern[bytes], start: int) -> re.Match[bytes]:
        while True:
            match = pattern.search(self._buffer, start)
            if match is not None:
                return match
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ApiError(413, "The metadata part is too large.")
            chunk = await anext(self._stream, b"")
            if not chunk:
                raise bad_request("Missing end boundary in multipart body.", reason="badContent")
            self._buffer += chunk

    async def _part_headers(self, start: int) -> tuple[dict[str, str], int]:
        blank = await self._find(re.compile(rb"(?:\A|\r?\n)\r?\n"), max(start - 1, 0))
        headers = {}
        for line in bytes(self._buffer[start : blank.start()]).splitlines():
            key, _, value = line.decode("latin-1").partition(":")
            headers[key.strip().lower()] = value.strip()
        return headers, blank.end()

    async def media(self) -> AsyncIterator[bytes]:
        """The second part's body in pieces."""
        held = bytes(self._buffer)
        async for chunk in self._stream:
            held += chunk
            if len(held) > self._held_bytes:
                yield held[: -self._held_bytes]
                held = held[-self._held_bytes :]
        # Longer than the held tail only when all of the body came with the head.
        match = self._end.search(held)
        if match is None:
            raise bad_request("Missing end boundary in multipart body.", reason="badContent")
        if match.start():
            yield held[: match.start()]


def preconditions_to_json(preconditions: Preconditions) -> list[int | None]:
    """For a session that waits on disk."""
    return [
        preconditions.generation_match,
        preconditions.generation_not_match,
        preconditions.metageneration_match,
        preconditions.metageneration_not_match,
    ]


def checksums_to_json(checksums: Checksums) -> dict[str, str]:
    """For a session that waits on disk: the form in which a client would have declared them."""
    found = {"crc32c": checksums.crc32c, "md5Hash": checksums.md5}
    return {key: base64.b64encode(value).decode() for key, value in found.items() if value is not None}
