"""Many calls in one request (https://cloud.google.com/storage/docs/batch).

Rules:
* A ``multipart/mixed`` body of at most 10 MB and 100 calls, each a part of type ``application/http`` with a whole HTTP
  request in it; the answer has a part for each, in their order, with ``Content-ID: <response-…>``.
* One part's failure is that part's alone. The batch itself answers 200.
* The headers of the batch, but for Content-…, are those of each call that does not have its own.
* Uploads, downloads of bytes and batches are not taken as parts.
* For the log and for faults each part is a separate operation; a part that cuts the connection cuts that of the batch.

What the service answers to a 101st call is not documented; here the batch is refused with 400 before any call is done.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http.client import responses
from urllib.parse import urlsplit

from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ckptmirror.testing.gcs.answers import ApiError, bad_request
from ckptmirror.testing.gcs.exchange import Exchange

__all__ = ["Part", "part_bytes", "perform_batch"]

_MAX_BYTES = 10 * 1000 * 1000
_MOST_CALLS = 100
_REFUSED = ("upload.", "object.media", "batch", "token")


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a batch."""

    content_id: str
    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes

    def request_in(self, outer: web.Request) -> web.Request:
        """The call as a request of its own, on the connection of the batch."""
        headers = CIMultiDict(
            (key, value)
            for key, value in outer.headers.items()
            if not key.lower().startswith("content-") and key not in self.headers
        )
        headers.extend(self.headers)
        return outer.clone(method=self.method, rel_url=URL(self.path, encoded=True), headers=headers)

    def refusal(self, operation: str) -> ApiError | None:
        """Why an operation is not taken in a batch; None if it is."""
        if operation.startswith(_REFUSED):
            return bad_request(f"{operation} is not supported in a batch request.")
        return None


async def perform_batch(exchange: Exchange, perform: Callable[[Part], Awaitable[bytes]]) -> web.StreamResponse:
    """Perform every call, one after the other; ``perform`` gives the HTTP answer of one.

    Raises:
        ApiError: 400 or 413: this is not a batch, or it is too large.
    """
    await exchange.identify("")
    match = re.search(r'boundary=(?:"([^"]+)"|([^\s;"]+))', exchange.request.headers.get("Content-Type", ""))
    if not exchange.request.content_type.startswith("multipart/mixed") or match is None:
        raise bad_request("The batch content type is multipart/mixed with a boundary.", reason="badContent")
    body = await exchange.whole_body(_MAX_BYTES)
    parts = list(_parts(body, (match[1] or match[2]).encode()))
    if not parts:
        raise bad_request("The batch has no calls.", reason="badRequest")
    if len(parts) > _MOST_CALLS:
        raise bad_request(f"The batch has {len(parts)} calls, more than the maximum of {_MOST_CALLS}.")
    boundary = f"batch_{secrets.token_urlsafe(24)}"
    lines = []
    for part in parts:
        answer = await perform(part)
        head = "Content-Type: application/http\r\n"
        if part.content_id:
            head += f"Content-ID: <response-{part.content_id}>\r\n"
        lines.append(f"--{boundary}\r\n{head}\r\n".encode() + answer + b"\r\n")
    lines.append(f"--{boundary}--\r\n".encode())
    return web.Response(body=b"".join(lines), headers={"Content-Type": f"multipart/mixed; boundary={boundary}"})


def part_bytes(response: web.StreamResponse, body: bytes) -> bytes:
    """An answer in the form of a part."""
    headers = {key: value for key, value in response.headers.items() if key.lower() != "content-length"}
    if body:
        headers["Content-Length"] = str(response.content_length or len(body))
    head = f"HTTP/1.1 {response.status} {responses.get(response.status, 'Unknown')}\r\n"
    head += "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    return head.encode() + b"\r\n" + body


def _parts(body: bytes, boundary: bytes) -> Iterator[Part]:
    """The calls between the boundaries; lines may end in CRLF or in bare LF.

    Raises:
        ApiError: 400.
    """
    pieces = re.split(rb"(?:\A|\r?\n)--" + re.escape(boundary) + rb"(?=--|[ \t]*\r?\n)", body)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise bad_request("Missing end boundary in multipart body.", reason="badContent")
    for piece in pieces[1:-1]:
        outer, call = _cut_headers(piece.lstrip(b" \t").removeprefix(b"\r").removeprefix(b"\n"))
        if not outer.get("Content-Type", "").lower().startswith("application/http"):
            raise bad_request("A part of a batch is of the type application/http.", reason="badContent")
        line, _, rest = call.lstrip(b"\r\n").partition(b"\n")
        words = line.decode("latin-1").split()
        if len(words) < 2:
            raise bad_request("A part of a batch is a whole HTTP request.", reason="badRequest")
        headers, content = _cut_headers(rest)
        target = urlsplit(words[1])
        path = target.path + (f"?{target.query}" if target.query else "")
        yield Part(outer.get("Content-ID", "").strip("<> "), words[0].upper(), path, headers, content)


def _cut_headers(text: bytes) -> tuple[CIMultiDict[str], bytes]:
    """Headers up to the first empty line, and what follows it."""
    blank = re.search(rb"(?:\A|\r?\n)\r?\n", text)
    head, rest = (text, b"") if blank is None else (text[: blank.start()], text[blank.end() :])
    headers: CIMultiDict[str] = CIMultiDict()
    for line in head.splitlines():
        key, _, value = line.decode("latin-1").partition(":")
        if key.strip():
            headers[key.strip()] = value.strip()
    return headers, rest
