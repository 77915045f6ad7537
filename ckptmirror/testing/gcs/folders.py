"""Folders of a bucket with hierarchical namespace (https://cloud.google.com/storage/docs/json_api/v1/folders).

Sources: the page above and https://cloud.google.com/storage/docs/folders-overview

Rules:
* A folder's name ends in a slash. An object makes the folders above it; they stay when it goes.
* A folder with something below it is not deleted: 409. Whether versions that can be restored count is not documented;
  here they do not.
* In a bucket without hierarchical namespace there are no folders: 400.

Not modelled: renaming a folder, managed folders, soft-deleted folders, objects whose names end in a slash.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer, not_found
from ckptmirror.testing.gcs.checks import Preconditions, check_object_name, flag, integer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.fields import select
from ckptmirror.testing.gcs.listing import page_token, read_page_token
from ckptmirror.testing.gcs.records import Bucket, Folder
from ckptmirror.testing.gcs.resources import folder_resource
from ckptmirror.testing.gcs.state import State

__all__ = ["delete_folder", "get_folder", "insert_folder", "list_folders"]

_MAX_PAGE = 1000


def _place(state: State, bucket: str) -> Bucket:
    place = state.bucket(bucket)
    if not place.hierarchical:
        raise bad_request("The bucket does not support hierarchical namespace.")
    return place


def _folder(exchange: Exchange, state: State, bucket: str, name: str) -> Folder:
    _place(state, bucket)
    found = state.objects.folder(bucket, name)
    if found is None:
        raise not_found("The folder does not exist.")
    conditions = {key: value for key, value in exchange.query.items() if "Metageneration" in key}
    Preconditions.of(conditions).check(0, 1)
    return found


async def insert_folder(exchange: Exchange, state: State, bucket: str) -> web.StreamResponse:
    """Create a folder; the one above it must be there unless ``recursive``."""
    resource = await exchange.json_body()
    name = str(resource.get("name", ""))
    await exchange.identify(name)
    place = _place(state, bucket)
    check_object_name(name)
    if not name.endswith("/"):
        raise bad_request("A folder name ends in a slash.")
    if state.objects.folder(bucket, name) is not None:
        raise ApiError(409, "The folder already exists.")
    above = name[:-1].rpartition("/")[0]
    if above and not flag(exchange.query, "recursive") and state.objects.folder(bucket, f"{above}/") is None:
        raise not_found("The parent folder does not exist.")
    made = folder_resource(state.objects.insert_folder(place, name), exchange.host)
    return json_answer(select(made, exchange.query.get("fields")))


async def get_folder(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """The folder's resource."""
    await exchange.identify(name)
    resource = folder_resource(_folder(exchange, state, bucket, name), exchange.host)
    return json_answer(select(resource, exchange.query.get("fields")))


async def delete_folder(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """204; 409 while objects or folders are below it."""
    await exchange.identify(name)
    folder = _folder(exchange, state, bucket, name)
    objects = state.objects.rows_from(bucket, (name, 0), "", 1, "versions")
    folders = state.objects.folders_from(bucket, name + "\0", "", 1)
    below = [item.name for item in objects] + [other.name for other in folders]
    if any(other.startswith(name) for other in below):
        raise ApiError(409, "The folder you tried to delete is not empty.")
    state.objects.delete_folder(folder)
    return web.Response(status=204)


async def list_folders(exchange: Exchange, state: State, bucket: str) -> web.StreamResponse:
    """One page of folders: all below the prefix, or with the delimiter ``/`` the prefix itself and one level below."""
    await exchange.identify("")
    _place(state, bucket)
    query = exchange.query
    prefix, delimiter, end = query.get("prefix", ""), query.get("delimiter", ""), query.get("endOffset", "")
    if delimiter not in ("", "/"):
        raise bad_request("The only delimiter of folders is '/'.", reason="invalidParameter")
    if prefix and not prefix.endswith("/"):
        raise bad_request("The prefix of folders ends in a slash.", reason="invalidParameter")
    limit = min(integer(query, "maxResults") or _MAX_PAGE, _MAX_PAGE)
    start = max(query.get("startOffset", ""), prefix, read_page_token(query.get("pageToken", ""))[0], key=str.encode)
    found = [folder for folder in state.objects.folders_from(bucket, start, end, -1) if folder.name.startswith(prefix)]
    if delimiter:
        found = [folder for folder in found if folder.name[len(prefix) :].count("/") <= 1]
    body: dict[str, Any] = {"kind": "storage#folders"}
    if len(found) > limit:
        body["nextPageToken"] = page_token(found[limit].name)
    if found:
        body["items"] = [folder_resource(folder, exchange.host) for folder in found[:limit]]
    return json_answer(select(body, query.get("fields")))
