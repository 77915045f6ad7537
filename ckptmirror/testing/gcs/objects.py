"""Objects: get, list, patch, update, delete.

Sources: https://cloud.google.com/storage/docs/json_api/v1/objects/get, …/list, …/patch, …/update, …/delete
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer, not_served, select
from ckptmirror.testing.gcs.checks import Preconditions, integer
from ckptmirror.testing.gcs.download import send_media
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.resources import etag, object_resource, settable
from ckptmirror.testing.gcs.state import State, StoredObject

__all__ = ["delete_object", "get_object", "list_objects", "patch_object"]

_MAX_PAGE = 1000


def _live(exchange: Exchange, state: State, bucket: str, name: str) -> StoredObject:
    item = state.live(bucket, name, integer(exchange.query, "generation"))
    Preconditions.of(exchange.query).check(item.generation, item.metageneration)
    return item


async def get_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """The resource, or with ``alt=media`` the bytes."""
    await exchange.identify(name)
    item = _live(exchange, state, bucket, name)
    _check_etags(exchange, etag(item.generation, item.metageneration))
    if exchange.operation == "object.media":
        return await send_media(exchange, state, item)
    resource = object_resource(item, exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")), headers={"ETag": resource["etag"]})


def _check_etags(exchange: Exchange, current: str) -> None:
    def names(header: str) -> list[str]:
        return [item.strip().strip('"') for item in exchange.request.headers.get(header, "").split(",") if item.strip()]

    wanted, unwanted = names("If-Match"), names("If-None-Match")
    if wanted and current not in wanted and "*" not in wanted:
        raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
    if current in unwanted or "*" in unwanted:
        raise ApiError(304, "Not Modified")


async def delete_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """204 without a body."""
    await exchange.identify(name)
    state.delete(_live(exchange, state, bucket, name))
    return web.Response(status=204)


async def patch_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """Change metadata: PATCH merges, PUT (update) replaces. The metageneration rises."""
    await exchange.identify(name)
    change = await exchange.json_body()
    item = _live(exchange, state, bucket, name)
    earlier = item.metadata if exchange.request.method == "PATCH" else None
    resource = object_resource(state.change_metadata(item, settable(change, earlier)), exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")))


async def list_objects(exchange: Exchange, state: State, bucket: str) -> web.StreamResponse:
    """One page of names in UTF-8 order, at most 1,000 items and prefixes together."""
    await exchange.identify("")
    query = exchange.query
    for unserved in ("matchGlob", "softDeleted", "filter"):
        if query.get(unserved, "false") not in ("", "false"):
            raise not_served(unserved)
    limit = integer(query, "maxResults")
    if limit is not None and limit < 0:
        raise bad_request(f"Invalid value for maxResults: {limit}", reason="invalidParameter")
    state.bucket(bucket)
    items, prefixes, token = _page(state, bucket, query, min(limit or _MAX_PAGE, _MAX_PAGE))
    body: dict[str, Any] = {"kind": "storage#objects"}
    if token is not None:
        body["nextPageToken"] = token
    if prefixes:
        body["prefixes"] = prefixes
    if items:
        body["items"] = [object_resource(item, exchange.host) for item in items]
    return json_answer(select(body, query.get("fields")))


def _page(
    state: State, bucket: str, query: dict[str, str], limit: int
) -> tuple[list[StoredObject], list[str], str | None]:
    prefix, delimiter, end = query.get("prefix", ""), query.get("delimiter", ""), query.get("endOffset", "")
    trailing = query.get("includeTrailingDelimiter") == "true"
    start = max(query.get("startOffset", ""), prefix, _read_token(query.get("pageToken", "")), key=str.encode)
    items: list[StoredObject] = []
    prefixes: list[str] = []
    while True:
        found = state.names_from(bucket, start, end, limit + 1)
        for item in found:
            if not item.name.startswith(prefix):
                return items, prefixes, None
            if len(items) + len(prefixes) >= limit:
                return items, prefixes, _write_token(item.name)
            cut = item.name.find(delimiter, len(prefix)) if delimiter else -1
            if cut < 0:
                items.append(item)
                start = item.name + "\0"
                continue
            folded = item.name[: cut + len(delimiter)]
            if item.name == folded and trailing:
                items.append(item)
            prefixes.append(folded)
            start = _after_prefix(folded)
            break
        else:
            if len(found) <= limit:
                return items, prefixes, None


def _after_prefix(prefix: str) -> str:
    """The first name, in UTF-8 order, after all that begin with ``prefix``."""
    last = ord(prefix[-1]) + 1
    if 0xD800 <= last <= 0xDFFF:
        last = 0xE000
    return prefix[:-1] + chr(last) if last <= 0x10FFFF else _after_prefix(prefix[:-1])


def _write_token(name: str) -> str:
    return base64.urlsafe_b64encode(b"\x0a" + name.encode()).decode()


def _read_token(token: str) -> str:
    if not token:
        return ""
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
        if raw[:1] != b"\x0a":
            raise ValueError(token)
        return raw[1:].decode()
    except (ValueError, binascii.Error) as error:
        raise bad_request(f"Invalid value for pageToken: {token}", reason="invalid") from error
