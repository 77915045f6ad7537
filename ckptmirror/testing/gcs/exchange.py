"""One request: what it asks for, the fault that it suffers, and how it is answered.

Rules:
* A handler calls ``identify`` once, when it knows the object's name and before it does any work.
* Bodies are read through ``body`` alone, the object's bytes in them pass through ``object_bytes``, answers leave
  through ``send`` alone, so that faults strike everywhere alike.
* Every request leaves one line in the log; tokens never do.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from ckptmirror.testing.fault import Fault
from ckptmirror.testing.gcs.access import ANYONE, CHALLENGE, Caller
from ckptmirror.testing.gcs.answers import ApiError, bad_request
from ckptmirror.testing.gcs.faults import ArmedFault, Dropped, Script, kill_self, reset_connection, throttle

__all__ = ["Broken", "Exchange", "body_of", "parse_object"]

_MAX_JSON_BYTES = 4 * 1024 * 1024
_PIECE_BYTES = 64 * 1024
_BYTES_OPERATIONS = ("upload.media", "upload.multipart", "upload.put", "object.media")
_Inverts = Literal["corrupt_byte_at", "corrupt_received_byte_at"]
_CANCELLED = 499  # what a cancel that did its work answers


class Broken(Exception):
    """The client's connection ended within the body."""


class Exchange:
    """A request on its way through the server.

    Attributes:
        caller: Who sends it.
        operation: One of ``OPERATIONS``.
        query: Its parameters.
        fault: What it suffers.
        entry: Its line in the log.
    """

    def __init__(
        self,
        request: web.Request,
        operation: str,
        query: dict[str, str],
        script: Script,
        *,
        part_body: bytes | None = None,
    ) -> None:
        self.request = request
        self.caller: Caller = ANYONE
        self.operation = operation
        self.query = query
        self.fault: Fault | None = None
        self.token_issued_s: float | None = None
        self.as_text = operation == "object.media"
        self._script = script
        self._part_body = part_body
        self._armed: ArmedFault | None = None
        self._suffered: set[str] = set()
        self.entry: dict[str, Any] = {
            "time_s": time.time(),
            "method": request.method,
            "path": request.raw_path.partition("?")[0],
            "query": query,
            "operation": operation,
            "object": None,
            "status": None,
            "request_bytes": 0,
            "response_bytes": 0,
            "range": request.headers.get("Range"),
            "content_range": request.headers.get("Content-Range"),
            "fault": None,
        }

    @property
    def host(self) -> str:
        """How the client calls this server."""
        return f"{self.request.scheme}://{self.request.headers.get('Host', 'localhost')}"

    async def identify(self, name: str) -> None:
        """The object's name (or a bucket's, or nothing) is known: suffer what the script has for it."""
        self.entry["object"] = name
        armed = self._script.choose(self.operation, self.request.method, name, self.token_issued_s)
        if armed is None:
            return
        self._armed, self.fault = armed, armed.fault
        self.entry["fault"] = armed.fault.to_json()
        if self.fault.after_bytes is None:
            await self.strike()
        if self.fault.reset_after_bytes is not None and self.operation not in _BYTES_OPERATIONS:
            self.suffered("reset_after_bytes")
            raise Dropped

    def suffered(self, *effects: str) -> None:
        """So much of the fault happens now; with the last of it, the fault has fired."""
        assert self._armed is not None
        wanted = self._armed.fault.effects
        complete = self._suffered >= wanted
        self._suffered.update(effects)
        if not complete and self._suffered >= wanted:
            self._armed.fired += 1

    async def strike(self) -> None:
        """What a fault does at its moment."""
        fault = self.fault
        assert fault is not None
        if fault.stall_s:
            self.suffered("stall_s")
            await asyncio.sleep(fault.stall_s)
        if fault.kill == "before_work":
            kill_self()
        if fault.unauthorised_after_s is not None:
            self.suffered("unauthorised_after_s", "status")
            raise ApiError(401, "Invalid Credentials", headers=CHALLENGE)
        if fault.status is not None:
            self.suffered("status")
            raise ScriptedError(fault)

    async def take_time(self, size_bytes: int) -> None:
        """Let so many bytes pass as slowly as the script wants."""
        if self.fault is not None and self.fault.slow_bytes_per_s is not None:
            self.suffered("slow_bytes_per_s")
            await throttle(size_bytes, self.fault.slow_bytes_per_s)

    def inverted(self, chunk: bytes, position: int, effect: _Inverts) -> bytes:
        """``chunk``, which begins at ``position``, with the byte inverted that the script names, if it is in there."""
        offset: int | None = getattr(self.fault, effect, None)
        if offset is None or not position <= offset < position + len(chunk):
            return chunk
        self.suffered(effect)
        index = offset - position
        return chunk[:index] + bytes([chunk[index] ^ 0xFF]) + chunk[index + 1 :]

    async def body(self) -> AsyncIterator[bytes]:
        """The request's body in pieces.

        Raises:
            Broken: It ended before its announced length.
        """
        if self._part_body is not None:
            yield self._part_body
            return
        try:
            while chunk := await self.request.content.readany():
                self.entry["request_bytes"] += len(chunk)
                yield chunk
        except (ConnectionError, aiohttp.ClientError, BadHttpMessage, EOFError) as error:
            raise Broken from error

    async def object_bytes(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The object's bytes out of the body, with what the script does to them: it counts them from 0 here."""
        fault = self.fault
        if fault is None:
            async for chunk in stream:
                yield chunk
            return
        position = 0
        marks = [mark for mark in (fault.after_bytes, fault.reset_after_bytes) if mark is not None]
        await self._reach(position)
        async for chunk in stream:
            start = 0
            while start < len(chunk):
                limit = min([mark - position for mark in marks if mark > position], default=_PIECE_BYTES)
                piece = chunk[start : start + min(limit, _PIECE_BYTES)]
                await self.take_time(len(piece))
                yield self.inverted(piece, position, "corrupt_received_byte_at")
                start += len(piece)
                position += len(piece)
                await self._reach(position)

    async def _reach(self, position: int) -> None:
        fault = self.fault
        assert fault is not None
        if fault.reset_after_bytes == position:
            self.suffered("reset_after_bytes")
            raise Dropped
        if fault.after_bytes == position:
            await self.strike()

    async def json_body(self) -> dict[str, Any]:
        """The request's body as a JSON object; empty if there is none."""
        return parse_object(await self.whole_body())

    async def whole_body(self, limit_bytes: int = _MAX_JSON_BYTES) -> bytes:
        """The request's body at once; 413 for one that is too long."""
        raw = bytearray()
        async for chunk in self.body():
            raw += chunk
            if len(raw) > limit_bytes:
                raise ApiError(413, "The request is too large.")
        return bytes(raw)

    async def send(self, response: web.StreamResponse) -> web.StreamResponse:
        """Let the answer go, or what the script leaves of it."""
        if response.prepared:
            return response
        try:
            cut_at = await self.suffer_answer(response)
        except Dropped:
            return self.drop()
        return response if cut_at is None else await self._truncated(response, body_of(response), cut_at)

    async def suffer_answer(self, response: web.StreamResponse) -> int | None:
        """Note the answer, and suffer what the script has for it: how much of its body may leave, None for all.

        Raises:
            Dropped: The answer is lost.
        """
        self.entry["status"] = response.status
        self.entry["response_bytes"] = len(body_of(response))
        if self.fault is None or (response.status >= 400 and response.status != _CANCELLED):
            return None
        await self.before_answer()
        cut_at = self.fault.truncate_after_bytes
        if cut_at is None or cut_at >= len(body_of(response)):
            return None
        self.suffered("truncate_after_bytes")
        return cut_at

    async def before_answer(self) -> None:
        """What a fault does when the work is done and nothing of the answer has left.

        Raises:
            Dropped: The answer is lost.
        """
        fault = self.fault
        if fault is None:
            return
        if fault.stall_answer_s:
            self.suffered("stall_answer_s")
            await asyncio.sleep(fault.stall_answer_s)
        if fault.kill == "after_work":
            kill_self()
        if fault.lose_answer:
            self.suffered("lose_answer")
            raise Dropped

    async def _truncated(self, response: web.StreamResponse, body: bytes, size_bytes: int) -> web.StreamResponse:
        headers = {key: value for key, value in response.headers.items() if key != "Content-Length"}
        cut = web.StreamResponse(status=response.status, headers=headers)
        cut.content_length = len(body)
        await cut.prepare(self.request)
        await cut.write(body[:size_bytes])
        self.end_connection()
        return cut

    def end_connection(self) -> None:
        """Close in order (FIN) after what was written."""
        if self.request.transport is not None:
            self.request.transport.close()

    def drop(self) -> web.Response:
        """Cut the connection with RST; the response goes nowhere."""
        self.entry["dropped"] = True
        reset_connection(self.request)
        return web.Response()


class ScriptedError(ApiError):
    """The status that a fault wants."""

    def __init__(self, fault: Fault) -> None:
        headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
        super().__init__(fault.status or 500, fault.body or f"status {fault.status} by script", headers=headers)
        self._text = fault.body

    def answer(self, *, as_text: bool = False) -> web.Response:
        if self._text is not None:
            return web.Response(status=self.status, text=self._text, headers=self.headers)
        return super().answer(as_text=as_text)


def body_of(response: web.StreamResponse) -> bytes:
    """What an answer says, if it is not a stream."""
    return response.body if isinstance(response, web.Response) and isinstance(response.body, bytes) else b""


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object, or 400; nothing at all, and ``null``, is an empty one."""
    if raw.strip() in (b"", b"null"):
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise bad_request("Parse Error", reason="parseError") from error
    if not isinstance(value, dict):
        raise bad_request("Parse Error", reason="parseError")
    return value
