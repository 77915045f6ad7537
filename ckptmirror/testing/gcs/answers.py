"""What the server says: error bodies, partial responses, times.

Rules:
* A request for JSON gets a JSON error; a request for an object's bytes gets the message as plain text.
* Every deliberate failure is an ``ApiError``; anything else that escapes is a bug of the server and answers 500.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

__all__ = ["ApiError", "bad_request", "json_answer", "not_found", "not_served", "rfc3339", "select"]

_REASONS = {
    304: "notModified",
    400: "invalid",
    401: "authError",
    403: "forbidden",
    404: "notFound",
    405: "methodNotAllowed",
    408: "requestTimeout",
    409: "conflict",
    410: "gone",
    411: "required",
    412: "conditionNotMet",
    413: "uploadTooLarge",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    500: "backendError",
    501: "notImplemented",
    502: "backendError",
    503: "backendError",
    504: "backendError",
}
_LOCATIONS = {401: "Authorization", 412: "If-Match"}  # the header that the service blames


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, *, reason: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason or _REASONS.get(status, "invalid")
        self.headers = headers or {}

    def answer(self, *, as_text: bool = False) -> web.Response:
        """The response; ``as_text`` for requests that asked for an object's bytes."""
        if self.status == 304:
            return web.Response(status=304, headers=self.headers)
        if as_text:
            return web.Response(
                status=self.status, text=self.message, content_type="text/html", charset="UTF-8", headers=self.headers
            )
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        if self.status in _LOCATIONS:
            detail |= {"locationType": "header", "location": _LOCATIONS[self.status]}
        body = {"error": {"code": self.status, "message": self.message, "errors": [detail]}}
        return json_answer(body, status=self.status, headers=self.headers)


def bad_request(message: str, *, reason: str = "invalid") -> ApiError:
    """400."""
    return ApiError(400, message, reason=reason)


def not_found(message: str) -> ApiError:
    """404."""
    return ApiError(404, message)


def not_served(what: str) -> ApiError:
    """501: part of the real service, not of this server."""
    return ApiError(501, f"This test server does not serve {what}.")


def json_answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response as the service formats it."""
    text = json.dumps(body, indent=2, ensure_ascii=False)
    response = web.Response(status=status, text=text, content_type="application/json", charset="UTF-8")
    response.headers.update({"Cache-Control": "no-cache, no-store, max-age=0, must-revalidate", **(headers or {})})
    return response


def rfc3339(time_us: int) -> str:
    """Microseconds since 1970 as the service writes a time, in milliseconds."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def select(resource: Any, fields: str | None) -> Any:
    """Leave of a resource what the ``fields`` parameter names (``a,b/c,d(e,f)``); all of it without one.

    Raises:
        ApiError: 400 for a selection that cannot be read.
    """
    if fields is None or fields == "":
        return resource
    tree, rest = _parse_fields(fields)
    if rest:
        raise bad_request(f"Invalid field selection {fields}", reason="invalidParameter")
    return _prune(resource, tree)


def _parse_fields(text: str) -> tuple[dict[str, Any], str]:
    tree: dict[str, Any] = {}
    while True:
        length = next((i for i, letter in enumerate(text) if letter in ",()/"), len(text))
        name, text = text[:length].strip(), text[length:]
        if not name:
            raise bad_request("Invalid field selection", reason="invalidParameter")
        branch: dict[str, Any] = {}
        if text.startswith("/"):
            length = next((i for i, letter in enumerate(text) if letter in ",)"), len(text))
            paren = text.find("(")
            if 0 <= paren < length:
                length = text.index(")", paren) + 1 if ")" in text[paren:] else len(text)
            branch, rest = _parse_fields(text[1:length])
            text = rest + text[length:]
        elif text.startswith("("):
            branch, text = _parse_fields(text[1:])
            if not text.startswith(")"):
                raise bad_request("Invalid field selection", reason="invalidParameter")
            text = text[1:]
        tree.setdefault(name, {}).update(branch)
        if not text.startswith(","):
            return tree, text
        text = text[1:]


def _prune(value: Any, tree: dict[str, Any]) -> Any:
    if not tree or "*" in tree:
        return value
    if isinstance(value, list):
        return [_prune(item, tree) for item in value]
    if isinstance(value, dict):
        return {key: _prune(item, tree[key]) for key, item in value.items() if key in tree}
    return value
