"""What the server says: error bodies, times.

Rules:
* A request for JSON gets a JSON error; a request for an object's bytes gets the message as plain text.
* Every deliberate failure is an ``ApiError``; anything else that escapes is a bug of the server and answers 500.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

__all__ = ["ApiError", "bad_request", "json_answer", "not_found", "not_served", "rfc3339"]

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
