"""Objects copied and moved by the service: rewrite, copy, move.

Sources: https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite, …/copy, …/move

Rules:
* A rewrite within one location and storage class is done in one call. Any other rewrite moves at most
  ``maxBytesRewrittenPerCall`` bytes per call, and answers with a token until all are moved. With
  ``--rewrite-bytes-per-call`` the server does so for every rewrite.
* A token belongs to its request: source, its generation, destination, limit and metadata; with another one it is 400,
  after a week 410. It survives the server.
* An object that is moved is treated as deleted under its old name: in a versioned bucket it becomes noncurrent, with a
  soft delete policy it can be restored. The page on moving does not say so.
* Preconditions on the source are judged at each call, those on the destination at the last one.
* An empty body copies the metadata, another one replaces it; the storage class is the one given or else the bucket's.
  The bytes, the checksums and the component count stay the same (whether the service recounts the components of a
  composite when it moves bytes is not modelled).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer
from ckptmirror.testing.gcs.checks import Preconditions, check_object_name, integer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.fields import select
from ckptmirror.testing.gcs.objects import answer_object
from ckptmirror.testing.gcs.params import check_predefined_acl
from ckptmirror.testing.gcs.records import Rewrite, StoredObject
from ckptmirror.testing.gcs.resources import object_resource, settable
from ckptmirror.testing.gcs.state import State

__all__ = ["copy_object", "move_object", "rewrite_object"]

_MIB = 1024 * 1024
_LIFETIME_S = 7 * 86400.0
_Name = tuple[str, str]


def _source(exchange: Exchange, state: State, source: _Name) -> StoredObject:
    state.bucket(source[0])
    item = state.objects.version(*source, integer(exchange.query, "sourceGeneration"))
    Preconditions.of(exchange.query, "Source").check(item.generation, item.metageneration)
    return item


def _copy_of(item: StoredObject, target: _Name, resource: dict[str, Any]) -> StoredObject:
    """The new version, which shares the file of bytes with the old one."""
    inherited = {key: value for key, value in item.metadata.items() if key != "storageClass"}
    metadata = settable(resource) or inherited
    bucket, name = target
    return replace(item, bucket=bucket, name=name, metageneration=1, metadata=metadata, deleted_us=None)


def _class_of(item: StoredObject, place: tuple[str, str]) -> str:
    return str(item.metadata.get("storageClass", place[1]))


def _check_target(exchange: Exchange, state: State, target: _Name) -> None:
    place = state.bucket(target[0])
    check_object_name(target[1], hierarchical=place.hierarchical)
    check_predefined_acl(place, exchange.query.get("destinationPredefinedAcl"))
    exchange.caller.require("storage.objects.create", target[0])


def _put(exchange: Exchange, state: State, new: StoredObject, move_from: StoredObject | None = None) -> StoredObject:
    bucket = state.bucket(new.bucket)
    refusal = exchange.caller.no_replacing(new.bucket)
    conditions = Preconditions.of(exchange.query)
    return state.objects.put(bucket, new, conditions, no_replacing=refusal, move_from=move_from)


async def copy_object(exchange: Exchange, state: State, source: _Name, target: _Name) -> web.StreamResponse:
    """``copyTo``: the whole copy in one call."""
    await exchange.identify(source[1])
    resource = await exchange.json_body()
    _check_target(exchange, state, target)
    return answer_object(exchange, _put(exchange, state, _copy_of(_source(exchange, state, source), target, resource)))


async def move_object(exchange: Exchange, state: State, source: _Name, target: _Name) -> web.StreamResponse:
    """``moveTo``: another name in the same bucket; the old name is removed atomically."""
    await exchange.identify(source[1])
    _check_target(exchange, state, target)
    item = _source(exchange, state, source)
    if source == target:
        raise bad_request("The source and destination object names must be different.")
    moved = replace(_copy_of(item, target, {}), metadata=item.metadata)
    return answer_object(exchange, _put(exchange, state, moved, move_from=item))


async def rewrite_object(
    exchange: Exchange, state: State, source: _Name, target: _Name, bytes_per_call: int | None
) -> web.StreamResponse:
    """``rewriteTo``: one call of a rewrite, the last of which answers with the object."""
    await exchange.identify(source[1])
    resource = await exchange.json_body()
    _check_target(exchange, state, target)
    limit = integer(exchange.query, "maxBytesRewrittenPerCall")
    if limit is not None and (limit <= 0 or limit % _MIB):
        raise bad_request("maxBytesRewrittenPerCall must be a multiple of 1 MiB.", reason="invalidParameter")
    item = _source(exchange, state, source)
    new = _copy_of(item, target, resource)
    here, there = state.bucket(source[0]).place, state.bucket(target[0]).place
    if here[0] != there[0] or _class_of(item, here) != _class_of(new, there):
        bytes_per_call = min([size for size in (limit, bytes_per_call) if size], default=None)
    request = {"source": [*source, item.generation], "target": list(target), "limit": limit, "body": resource}
    unfinished = _progress(exchange, state, request, item.size_bytes, bytes_per_call)
    body: dict[str, Any] = {"kind": "storage#rewriteResponse", "objectSize": str(item.size_bytes)}
    if unfinished is not None:
        body |= {"totalBytesRewritten": str(unfinished.done_bytes), "done": False, "rewriteToken": unfinished.token}
    else:
        done = object_resource(_put(exchange, state, new), exchange.host)
        body |= {"totalBytesRewritten": str(item.size_bytes), "done": True, "resource": done}
    return json_answer(select(body, exchange.query.get("fields")))


def _progress(
    exchange: Exchange, state: State, request: dict[str, Any], size_bytes: int, bytes_per_call: int | None
) -> Rewrite | None:
    """Move as many bytes as a call may; return the rewrite to continue, or None when all are moved.

    Raises:
        ApiError: 400 or 410 for a token.
    """
    token, rewrite = exchange.query.get("rewriteToken", ""), None
    if token:
        rewrite = state.rewrite(token)
        if rewrite is None or rewrite.request != request:
            raise bad_request("The rewrite token is invalid for this request.", reason="invalidParameter")
        if time.time() > rewrite.started_us / 1e6 + _LIFETIME_S:
            raise ApiError(410, "The rewrite token has expired.")
    done_bytes = (rewrite.done_bytes if rewrite else 0) + (bytes_per_call or size_bytes)
    if done_bytes >= size_bytes:
        return None
    if rewrite is None:
        return state.start_rewrite(done_bytes, request)
    return state.advance_rewrite(rewrite, done_bytes)
