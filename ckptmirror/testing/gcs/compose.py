"""Several objects put together as one (https://cloud.google.com/storage/docs/json_api/v1/objects/compose).

Sources: the page above and https://cloud.google.com/storage/docs/composite-objects

Rules:
* 1 to 32 sources of the same bucket, in the order given, the same one more than once if wanted, and the destination
  may be one of them.
* The composite has a crc32c and a component count (the sum of its sources'), and no md5.
* Its metadata is what the request gives; nothing comes from the sources. A composition that gives no content type has
  none (the page does not say which one the service would put).
* A source whose generation and precondition contradict each other fails as the precondition does, with 412; the page
  says that it fails, not how.
* The bytes are those of the generations that were live when the request came, whatever happens to the sources while
  they are copied; the preconditions on the destination are those of the end.

Not modelled: ``deleteSourceObjects``, encryption keys, sources of another storage class.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, bad_request, not_found, not_served
from ckptmirror.testing.gcs.checks import Preconditions, check_object_name, integer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.objects import answer_object
from ckptmirror.testing.gcs.params import check_predefined_acl
from ckptmirror.testing.gcs.records import StoredObject
from ckptmirror.testing.gcs.resources import settable
from ckptmirror.testing.gcs.state import State

__all__ = ["compose_objects"]

_MOST_SOURCES = 32
_PIECE_BYTES = 1024 * 1024
_FIELDS = frozenset({"kind", "destination", "sourceObjects"})
_SOURCE_FIELDS = frozenset({"name", "generation", "objectPreconditions"})


async def compose_objects(exchange: Exchange, state: State, bucket: str, name: str) -> web.StreamResponse:
    """Put the sources together and answer with the composite object."""
    await exchange.identify(name)
    request = await exchange.json_body()
    place = state.bucket(bucket)
    check_predefined_acl(place, exchange.query.get("destinationPredefinedAcl"))
    sources, metadata = _read(state, bucket, request)
    exchange.caller.require("storage.objects.get", bucket)
    conditions = Preconditions.of(exchange.query)
    check_object_name(name, hierarchical=place.hierarchical)
    file = state.new_file()
    done: StoredObject | None = None
    try:
        opened = [os.open(state.path(source.file), os.O_RDONLY) for source in sources]
        size_bytes, crc32c = await asyncio.to_thread(_join, opened, state.path(file))
        components = sum(source.components or 1 for source in sources)
        new = StoredObject(bucket, name, 0, 1, size_bytes, crc32c, None, 0, 0, file, metadata, components)
        refusal = exchange.caller.no_replacing(bucket)
        done = state.objects.put(place, new, conditions, no_replacing=refusal)
    finally:
        if done is None:
            state.remove_file(file)
    return answer_object(exchange, done)


def _read(state: State, bucket: str, request: dict[str, Any]) -> tuple[list[StoredObject], dict[str, Any]]:
    """The sources and the destination's metadata.

    Raises:
        ApiError: 400, 404, 412 or 501.
    """
    for unknown in sorted(set(request) - _FIELDS):
        raise not_served(f"the field {unknown} of a composition")
    sources, destination = request.get("sourceObjects"), request.get("destination", {})
    if not isinstance(sources, list) or not sources or not isinstance(destination, dict):
        raise bad_request("You must provide at least one source component.", reason="required")
    if len(sources) > _MOST_SOURCES:
        raise bad_request(
            f"The number of source components provided ({len(sources)}) exceeds the maximum ({_MOST_SOURCES})"
        )
    return [_source(state, bucket, source) for source in sources], settable(destination)


def _source(state: State, bucket: str, source: Any) -> StoredObject:
    if not isinstance(source, dict) or not isinstance(source.get("name"), str):
        raise bad_request("A source component needs a name.", reason="required")
    for unknown in sorted(set(source) - _SOURCE_FIELDS):
        raise not_served(f"the field {unknown} of a source component")
    conditions = source.get("objectPreconditions") or {}
    if not isinstance(conditions, dict) or set(conditions) - {"ifGenerationMatch"}:
        raise bad_request("A source component's only precondition is ifGenerationMatch.")
    texts = {key: str(value) for key, value in {**source, **conditions}.items() if value is not None}
    generation, wanted = integer(texts, "generation"), integer(texts, "ifGenerationMatch")
    try:
        found = state.objects.version(bucket, source["name"], generation)
    except ApiError as error:
        raise not_found(f"Object {source['name']} ({bucket}) not found.") from error
    Preconditions(generation_match=wanted).check(found.generation, found.metageneration)
    return found


def _join(sources: Sequence[int], target: Path) -> tuple[int, bytes]:
    """Copy open files one after the other, and close them; the size and the crc32c. Runs in a thread."""
    size_bytes, crc32c = 0, 0
    try:
        with target.open("wb") as file:
            for source in sources:
                offset = 0
                while piece := os.pread(source, _PIECE_BYTES, offset):
                    file.write(piece)
                    crc32c = google_crc32c.extend(crc32c, piece)
                    offset += len(piece)
                size_bytes += offset
    finally:
        for source in sources:
            os.close(source)
    return size_bytes, crc32c.to_bytes(4, "big")
