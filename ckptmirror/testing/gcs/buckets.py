"""Buckets: insert, get, list, delete (https://cloud.google.com/storage/docs/json_api/v1/buckets)."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, json_answer, select
from ckptmirror.testing.gcs.checks import check_bucket_name
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.resources import bucket_resource
from ckptmirror.testing.gcs.state import State

__all__ = ["delete_bucket", "get_bucket", "insert_bucket", "list_buckets"]


async def insert_bucket(exchange: Exchange, state: State) -> web.StreamResponse:
    """Create a bucket; 409 where there is one."""
    resource = await exchange.json_body()
    await exchange.identify(str(resource.get("name", "")))
    if "project" not in exchange.query:
        raise ApiError(400, "Required parameter: project", reason="required")
    if not isinstance(resource.get("name"), str):
        raise ApiError(400, "Required parameter: name", reason="required")
    bucket = state.insert_bucket(check_bucket_name(resource["name"]))
    return json_answer(select(bucket_resource(bucket, exchange.host), exchange.query.get("fields")))


async def get_bucket(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """The bucket's resource."""
    await exchange.identify(name)
    resource = bucket_resource(state.bucket(name), exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")))


async def list_buckets(exchange: Exchange, state: State) -> web.StreamResponse:
    """All buckets on one page."""
    await exchange.identify("")
    found = [bucket for bucket in state.buckets() if bucket.name.startswith(exchange.query.get("prefix", ""))]
    body: dict[str, Any] = {"kind": "storage#buckets"}
    if found:
        body["items"] = [bucket_resource(bucket, exchange.host) for bucket in found]
    return json_answer(select(body, exchange.query.get("fields")))


async def delete_bucket(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """204; 409 while objects are in it."""
    await exchange.identify(name)
    state.delete_bucket(name)
    return web.Response(status=204)
