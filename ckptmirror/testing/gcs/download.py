"""``alt=media``: an object's bytes, whole or a range (https://cloud.google.com/storage/docs/json_api/v1/objects/get).

Rules:
* The file is opened before the first byte leaves: an object that is deleted or replaced meanwhile is still sent whole.
* Without a fault the kernel copies (sendfile); with one, the bytes pass through our hands.
"""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO

from aiohttp import web

from ckptmirror.testing.fault import Fault
from ckptmirror.testing.gcs.checks import ByteRange, parse_range
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.faults import Dropped
from ckptmirror.testing.gcs.records import StoredObject
from ckptmirror.testing.gcs.resources import object_headers
from ckptmirror.testing.gcs.state import State

__all__ = ["send_media"]

_PIECE_BYTES = 64 * 1024


async def send_media(exchange: Exchange, state: State, item: StoredObject) -> web.StreamResponse:
    """Answer with the bytes of a live object.

    Raises:
        ApiError: 416.
    """
    wanted = parse_range(exchange.request.headers.get("Range"), item.size_bytes)
    part = wanted or ByteRange(0, item.size_bytes)
    response = web.StreamResponse(status=206 if wanted else 200, headers=object_headers(item))
    response.content_type = item.metadata.get("contentType", "application/octet-stream")
    response.content_length = part.size_bytes
    if wanted:
        last = part.offset + part.size_bytes - 1
        response.headers["Content-Range"] = f"bytes {part.offset}-{last}/{item.size_bytes}"
    for field, header in (("contentEncoding", "Content-Encoding"), ("contentDisposition", "Content-Disposition")):
        if field in item.metadata:
            response.headers[header] = item.metadata[field]
    exchange.entry["status"] = response.status
    await exchange.before_answer()
    with state.path(item.file).open("rb") as file:
        await response.prepare(exchange.request)
        fault = exchange.fault
        if fault is None:
            sent_bytes = await _send_by_kernel(exchange, file, part)
        else:
            sent_bytes = await _send_by_hand(exchange, response, file, part, fault)
    exchange.entry["response_bytes"] = sent_bytes
    if sent_bytes < part.size_bytes:
        exchange.end_connection()
    else:
        await response.write_eof()
    return response


async def _send_by_kernel(exchange: Exchange, file: BinaryIO, part: ByteRange) -> int:
    transport = exchange.request.transport
    if transport is None:
        raise Dropped
    if part.size_bytes == 0:
        return 0
    try:
        return await asyncio.get_running_loop().sendfile(transport, file, part.offset, part.size_bytes)
    except RuntimeError as error:  # the transport closed before the first byte
        raise Dropped from error


async def _send_by_hand(
    exchange: Exchange, response: web.StreamResponse, file: BinaryIO, part: ByteRange, fault: Fault
) -> int:
    position = 0
    stops = [
        stop for stop in (fault.after_bytes, fault.reset_after_bytes, fault.truncate_after_bytes) if stop is not None
    ]
    while True:
        if fault.reset_after_bytes == position:
            await _let_go(response)
            exchange.suffered("reset_after_bytes")
            raise Dropped
        if fault.after_bytes == position:
            await exchange.strike()
        if position == part.size_bytes:
            break
        if fault.truncate_after_bytes == position:
            exchange.suffered("truncate_after_bytes")
            break
        limit = min([stop - position for stop in stops if stop > position], default=_PIECE_BYTES)
        size_bytes = min(limit, _PIECE_BYTES, part.size_bytes - position)
        chunk = os.pread(file.fileno(), size_bytes, part.offset + position)
        if not chunk:
            break
        await exchange.take_time(len(chunk))
        await response.write(exchange.inverted(chunk, part.offset + position, "corrupt_byte_at"))
        position += len(chunk)
    return position


async def _let_go(response: web.StreamResponse) -> None:
    """Wait until the socket has taken what was written: a reset would discard it."""
    transport = response._req.transport if response._req is not None else None
    for _ in range(500):
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() == 0:
            return
        await asyncio.sleep(0.01)
