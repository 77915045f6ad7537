"""Bearer tokens (https://cloud.google.com/storage/docs/authentication).

Rules:
* Without ``--token``, ``--denied-token``, ``--tokens-file`` and ``--require-auth`` every caller may do everything.
* A missing, unknown or expired token gets 401, a denied one 403. A token of the tokens file may do what the file
  allows.
* An upload session's URI is its own credential: a request on it needs no token, but a bad one is refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from aiohttp import web

from ckptmirror.testing.gcs.access import ANYONE, CHALLENGE, Caller, Grants
from ckptmirror.testing.gcs.answers import ApiError, json_answer
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.policies import bound_permissions
from ckptmirror.testing.gcs.state import State

__all__ = ["Gate", "read_custom_roles", "read_tokens_file"]

_GRANTS = ("urn:ietf:params:oauth:grant-type:jwt-bearer", "refresh_token", "client_credentials")


def read_tokens_file(path: Path) -> dict[str, Caller]:
    """The callers of a tokens file, by token; the one without a token under ``""``.

    The file is JSON: ``{"tokens": {"SECRET": {"name": "a@b", "roles": […], "permissions": […], "buckets": […]}},
    "anonymous": {"roles": […]}, "roles": {"projects/p/roles/R": [permissions]}}``. ``buckets`` limits the grants to
    some buckets; ``roles`` are a project's own, for the policies of buckets.

    Raises:
        ValueError: It is not such a file.
        OSError: It cannot be read.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or set(content) - {"tokens", "anonymous", "roles"}:
        raise ValueError(f"{path}: a tokens file has the keys tokens, anonymous and roles")
    try:
        callers = {token: _caller(token, item) for token, item in content.get("tokens", {}).items()}
        if "anonymous" in content:
            callers[""] = Caller("", Grants.from_json(content["anonymous"]))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return callers


def read_custom_roles(path: Path) -> dict[str, frozenset[str]]:
    """The permissions of the projects' own roles in a tokens file, by the name of the role.

    Raises:
        ValueError: A name is not a role's name, or a permission does not exist.
        OSError: It cannot be read.
    """
    content = json.loads(path.read_text())
    roles: dict[str, frozenset[str]] = {}
    for name, permissions in content.get("roles", {}).items():
        if not re.fullmatch(r"(projects|organizations)/[^/\s]+/roles/[A-Za-z0-9_.]{3,64}", name):
            raise ValueError(f"{path}: {name} is no name of a custom role: projects/P/roles/NAME")
        roles[name] = Grants.from_json({"permissions": permissions}).permissions
    return roles


def _caller(token: str, item: Mapping[str, Any]) -> Caller:
    if not token:
        raise ValueError("a token is not empty")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a token needs a name, as it shall stand in refusals")
    return Caller(name, Grants.from_json({key: value for key, value in item.items() if key != "name"}))


class Gate:
    """Who may come in."""

    def __init__(
        self,
        state: State,
        *,
        tokens: Iterable[str] = (),
        denied: Iterable[str] = (),
        callers: Mapping[str, Caller] | None = None,
        required: bool = False,
        lifetime_s: float = 3600.0,
        custom_roles: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self._state = state
        self._callers: dict[str, Caller] = {token: ANYONE for token in tokens}
        self._callers.update(callers or {})
        self._denied = frozenset(denied)
        self._required = required or bool(self._callers or self._denied)
        self._lifetime_s = lifetime_s
        self.custom_roles = custom_roles or {}

    def admit(self, exchange: Exchange, *, on_session: bool) -> None:
        """Let a request in, and note who sends it and when its token was issued.

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
        if not expired and (times_s is not None or (token in self._callers and (token or not scheme))):
            caller = self._callers.get(token, ANYONE)
            exchange.caller = replace(caller, bound=lambda bucket: self._bound(bucket, caller.name))
            return
        message = "Invalid Credentials" if token else "Anonymous caller does not have access to this resource."
        raise ApiError(401, message, reason="authError" if token else "required", headers=CHALLENGE)

    def _bound(self, bucket: str, name: str) -> frozenset[str]:
        try:
            self._state.bucket(bucket)
        except ApiError:
            return frozenset()
        return bound_permissions(self._state.policy(bucket), name, self.custom_roles)

    async def token(self, exchange: Exchange) -> web.StreamResponse:
        """``POST /token``: what an OAuth 2.0 token endpoint answers to a service account's or a refresh grant."""
        await exchange.identify("")
        grant = parse_qs((await exchange.whole_body()).decode("utf-8", "replace")).get("grant_type", [""])[0]
        if grant not in _GRANTS:
            return json_answer({"error": "unsupported_grant_type"}, status=400)
        token = self._state.issue_token(self._lifetime_s)
        return json_answer({"access_token": token, "expires_in": int(self._lifetime_s), "token_type": "Bearer"})
