"""Bearer tokens (https://cloud.google.com/storage/docs/authentication).

Rules:
* Without ``--token``, ``--denied-token`` and ``--require-auth`` everybody may do everything.
* No token or an unknown or expired one: 401. A denied one: 403.
* An upload session's URI is its own credential: a request on it needs no token, but a bad one is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from urllib.parse import parse_qs

from aiohttp import web

from ckptmirror.testing.gcs.answers import ApiError, json_answer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.state import State

__all__ = ["Gate"]

_GRANTS = ("urn:ietf:params:oauth:grant-type:jwt-bearer", "refresh_token", "client_credentials")


class Gate:
    """Who may come in."""

    def __init__(
        self,
        state: State,
        *,
        tokens: Iterable[str] = (),
        denied: Iterable[str] = (),
        required: bool = False,
        lifetime_s: float = 3600.0,
    ) -> None:
        self._state = state
        self._tokens = frozenset(tokens)
        self._denied = frozenset(denied)
        self._required = required or bool(self._tokens or self._denied)
        self._lifetime_s = lifetime_s

    def admit(self, exchange: Exchange, *, on_session: bool) -> None:
        """Let a request in, and note when its token was issued.

        Raises:
            ApiError: 401 or 403.
        """
        scheme, _, token = exchange.request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        times_s = self._state.token_times_s(token) if token else None
        exchange.token_issued_s = times_s[0] if times_s else None
        if not self._required or (on_session and not scheme):
            return
        if token in self._denied and token:
            raise ApiError(403, "The caller does not have the storage permission that this request needs.")
        expired = times_s is not None and times_s[1] <= time.time()
        if not token or expired or (times_s is None and token not in self._tokens):
            message = "Invalid Credentials" if token else "Anonymous caller does not have access to this resource."
            challenge = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}
            raise ApiError(401, message, reason="authError" if token else "required", headers=challenge)

    async def token(self, exchange: Exchange) -> web.StreamResponse:
        """``POST /token``: what an OAuth 2.0 token endpoint answers to a service account's or a refresh grant."""
        await exchange.identify("")
        raw = bytearray()
        async for chunk in exchange.body():
            raw += chunk
        grant = parse_qs(raw.decode("utf-8", "replace")).get("grant_type", [""])[0]
        if grant not in _GRANTS:
            return json_answer({"error": "unsupported_grant_type"}, status=400)
        token = self._state.issue_token(self._lifetime_s)
        return json_answer({"access_token": token, "expires_in": int(self._lifetime_s), "token_type": "Bearer"})
