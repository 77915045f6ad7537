"""Lists of objects, page by page (https://cloud.google.com/storage/docs/json_api/v1/objects/list).

Rules:
* Names come in the order of their UTF-8 bytes, the versions of one name by rising generation.
* A page has at most 1,000 items and prefixes together; the next page continues exactly where it ended.
* ``versions`` lists live and noncurrent versions, ``softDeleted`` those that can be restored and no others. Both at
  once are refused: the page does not say what the service answers.
* Folders of a bucket with hierarchical namespace show only with ``includeFoldersAsPrefixes``, which wants the
  delimiter ``/``.

Not modelled: ``matchGlob``, ``filter``, managed folders.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.answers import bad_request, json_answer
from ckptmirror.testing.gcs.checks import flag, integer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.fields import select
from ckptmirror.testing.gcs.records import Folder, StoredObject
from ckptmirror.testing.gcs.resources import object_resource
from ckptmirror.testing.gcs.state import State
from ckptmirror.testing.gcs.versions import VersionTable

__all__ = ["list_objects", "page_token", "read_page_token"]

_MAX_PAGE = 1000


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a listing asks for; ``start`` is (name, generation)."""

    bucket: str
    prefix: str
    delimiter: str
    start: tuple[str, int]
    end: str
    limit: int
    trailing: bool
    kept: str
    with_folders: bool

    @classmethod
    def of(cls, bucket: str, query: dict[str, str]) -> _Wanted:
        limit = integer(query, "maxResults")
        if limit is not None and limit < 0:
            raise bad_request(f"Invalid value for maxResults: {limit}", reason="invalidParameter")
        versions, soft, folders = (
            flag(query, name) for name in ("versions", "softDeleted", "includeFoldersAsPrefixes")
        )
        if versions and soft:
            raise bad_request("versions and softDeleted cannot both be true.", reason="invalidParameter")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if folders and delimiter != "/":
            raise bad_request("includeFoldersAsPrefixes requires the delimiter '/'.", reason="invalidParameter")
        starts = [(query.get("startOffset", ""), 0), (prefix, 0), read_page_token(query.get("pageToken", ""))]
        return cls(
            bucket,
            prefix,
            delimiter,
            max(starts, key=lambda start: (start[0].encode(), start[1])),
            query.get("endOffset", ""),
            min(limit or _MAX_PAGE, _MAX_PAGE),
            flag(query, "includeTrailingDelimiter"),
            "soft-deleted" if soft else "versions" if versions else "live",
            folders,
        )


@dataclass(slots=True)
class _Page:
    """What a page holds, and the name and generation with which the next one begins."""

    items: list[StoredObject]
    prefixes: list[str]
    next_start: tuple[str, int] | None = None


async def list_objects(exchange: Exchange, state: State, bucket: str) -> web.StreamResponse:
    """One page."""
    await exchange.identify("")
    wanted = _Wanted.of(bucket, exchange.query)
    has_folders = state.bucket(bucket).hierarchical and wanted.with_folders
    state.objects.purge()
    page = _collect(state.objects, wanted, has_folders)
    body: dict[str, Any] = {"kind": "storage#objects"}
    if page.next_start is not None:
        body["nextPageToken"] = page_token(*page.next_start)
    if page.prefixes:
        body["prefixes"] = page.prefixes
    if page.items:
        body["items"] = [object_resource(item, exchange.host) for item in page.items]
    return json_answer(select(body, exchange.query.get("fields")))


def _collect(table: VersionTable, wanted: _Wanted, has_folders: bool) -> _Page:
    page, start = _Page([], []), wanted.start
    while True:
        found = _rows(table, wanted, start, has_folders)
        for row in found:
            if not row.name.startswith(wanted.prefix):
                return page
            if len(page.items) + len(page.prefixes) >= wanted.limit:
                page.next_start = (row.name, _generation(row))
                return page
            cut = row.name.find(wanted.delimiter, len(wanted.prefix)) if wanted.delimiter else -1
            if cut < 0:
                if isinstance(row, StoredObject):
                    page.items.append(row)
                start = _behind(row, wanted.kept)
                continue
            folded = row.name[: cut + len(wanted.delimiter)]
            if wanted.trailing:
                page.items += _versions_of(table, wanted, folded)
            page.prefixes.append(folded)
            start = (_after_prefix(folded), 0)
            break
        else:
            if len(found) <= wanted.limit:
                return page


def _rows(
    table: VersionTable, wanted: _Wanted, start: tuple[str, int], has_folders: bool
) -> list[StoredObject | Folder]:
    rows: list[StoredObject | Folder] = []
    rows += table.rows_from(wanted.bucket, start, wanted.end, wanted.limit + 1, wanted.kept)
    if has_folders:
        rows += table.folders_from(wanted.bucket, start[0], wanted.end, wanted.limit + 1)
        rows.sort(key=lambda row: (row.name.encode(), _generation(row)))
    return rows[: wanted.limit + 1]


def _versions_of(table: VersionTable, wanted: _Wanted, name: str) -> list[StoredObject]:
    return table.rows_from(wanted.bucket, (name, 0), name + "\0", _MAX_PAGE, wanted.kept)


def _generation(row: StoredObject | Folder) -> int:
    return row.generation if isinstance(row, StoredObject) else 0


def _behind(row: StoredObject | Folder, kept: str) -> tuple[str, int]:
    """Where a listing goes on after a row: live versions are one a name."""
    return (row.name + "\0", 0) if kept == "live" else (row.name, _generation(row) + 1)


def _after_prefix(prefix: str) -> str:
    """The first name, in UTF-8 order, after all that begin with ``prefix``."""
    last = ord(prefix[-1]) + 1
    if 0xD800 <= last <= 0xDFFF:
        last = 0xE000
    return prefix[:-1] + chr(last) if last <= 0x10FFFF else _after_prefix(prefix[:-1])


def page_token(name: str, generation: int = 0) -> str:
    """A token for the page that begins there."""
    return base64.urlsafe_b64encode(f"\x0a{generation}:{name}".encode()).decode()


def read_page_token(token: str) -> tuple[str, int]:
    """What ``page_token`` wrote; the beginning of all for no token.

    Raises:
        ApiError: 400.
    """
    if not token:
        return "", 0
    try:
        text = base64.b64decode(token, altchars=b"-_", validate=True).decode()
        generation, _, name = text.removeprefix("\x0a").partition(":")
        if not text.startswith("\x0a"):
            raise ValueError(token)
        return name, int(generation)
    except (ValueError, binascii.Error) as error:
        raise bad_request(f"Invalid value for pageToken: {token}", reason="invalid") from error
