"""One object: get, patch, update, delete, restore.

Sources: https://cloud.google.com/storage/docs/json_api/v1/objects/get, …/patch, …/update, …/delete, …/restore

Rules:
* Without a generation the live version is meant; with one, the live or noncurrent version that has it.
* A soft-deleted version is seen only by who says ``softDeleted=true`` and its generation. Its bytes cannot be read.
* A restored object is a new version; the soft-deleted one stays until its time is over.
"""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer, not_served
from ckptmirror.testing.gcs.checks import Preconditions, flag, integer
from ckptmirror.testing.gcs.download import send_media
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.fields import select
from ckptmirror.testing.gcs.params import check_predefined_acl
from ckptmirror.testing.gcs.records import StoredObject
from ckptmirror.testing.gcs.resources import check_custom_time, etag, object_resource, settable
from ckptmirror.testing.gcs.state import State

__all__ = ["answer_object", "delete_object", "get_object", "patch_object", "restore_object"]


def answer_object(exchange: Exchange, item: StoredObject) -> web.StreamResponse:
    """200 with the object's resource."""
    resource = object_resource(item, exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")), headers={"ETag": resource["etag"]})


def _wanted(exchange: Exchange, state: State, bucket: str, name: str, *, kept: str = "versions") -> StoredObject:
    state.bucket(bucket)
    item = state.objects.version(bucket, name, integer(exchange.query, "generation"), kept)
    Preconditions.of(exchange.query).check(item.generation, item.metageneration)
    return item


async def get_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """The resource, or with ``alt=media`` the bytes."""
    await exchange.identify(name)
    is_soft = flag(exchange.query, "softDeleted")
    if is_soft and "generation" not in exchange.query:
        raise ApiError(400, "Required parameter: generation", reason="required")
    item = _wanted(exchange, state, bucket, name, kept="soft-deleted" if is_soft else "versions")
    _check_etags(exchange, etag(item.generation, item.metageneration))
    if exchange.operation == "object.media":
        _check_transcoding(exchange, item)
        return await send_media(exchange, state, item)
    return answer_object(exchange, item)


def _check_transcoding(exchange: Exchange, item: StoredObject) -> None:
    """Refuse to unpack a gzip-encoded object for a client that does not take gzip; the service would.

    Source: https://cloud.google.com/storage/docs/transcoding
    """
    takes_gzip = "gzip" in exchange.request.headers.get("Accept-Encoding", "")
    is_fixed = "no-transform" in item.metadata.get("cacheControl", "")
    if item.metadata.get("contentEncoding") == "gzip" and not takes_gzip and not is_fixed:
        raise not_served("gzip-encoded objects to a client that does not take gzip")


def _check_etags(exchange: Exchange, current: str) -> None:
    def names(header: str) -> list[str]:
        return [item.strip().strip('"') for item in exchange.request.headers.get(header, "").split(",") if item.strip()]

    wanted, unwanted = names("If-Match"), names("If-None-Match")
    if wanted and current not in wanted and "*" not in wanted:
        raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
    if current in unwanted or "*" in unwanted:
        raise ApiError(304, "Not Modified")


async def delete_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """204 without a body; with a generation, that version goes and does not become noncurrent."""
    await exchange.identify(name)
    item = _wanted(exchange, state, bucket, name)
    state.objects.delete(state.bucket(bucket), item, for_good="generation" in exchange.query)
    return web.Response(status=204)


async def patch_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """Change metadata: PATCH merges, PUT (update) replaces. The metageneration rises."""
    await exchange.identify(name)
    exchange.caller.require("storage.objects.get", bucket)
    change = await exchange.json_body()
    item = _wanted(exchange, state, bucket, name)
    check_predefined_acl(state.bucket(bucket), exchange.query.get("predefinedAcl"))
    storage_class = item.metadata.get("storageClass", "STANDARD")
    if change.get("storageClass", storage_class) != storage_class:
        raise bad_request("The storage class of an object is changed by rewriting it.")
    fixed = {key: value for key, value in item.metadata.items() if key == "storageClass"}
    earlier = item.metadata if exchange.request.method == "PATCH" else fixed
    metadata = settable(change, earlier)
    check_custom_time(item.metadata.get("customTime"), metadata.get("customTime"))
    return answer_object(exchange, state.objects.change_metadata(item, metadata))


async def restore_object(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """Make a soft-deleted version the live object again, under a new generation."""
    await exchange.identify(name)
    generation = integer(exchange.query, "generation")
    if generation is None:
        raise ApiError(400, "Required parameter: generation", reason="required")
    place = state.bucket(bucket)
    exchange.caller.require("storage.objects.create", bucket)
    item = state.objects.version(bucket, name, generation, "soft-deleted")
    again = replace(item, metageneration=1, deleted_us=None, soft_deleted_us=None, hard_delete_us=None)
    conditions = Preconditions.of(exchange.query)
    refusal = exchange.caller.no_replacing(bucket)
    return answer_object(exchange, state.objects.put(place, again, conditions, no_replacing=refusal))
