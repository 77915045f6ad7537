"""The IAM policy of a bucket: read, replaced, and what it lets a caller do.

Source: https://cloud.google.com/storage/docs/json_api/v1/buckets/setIamPolicy and
https://cloud.google.com/storage/docs/access-control/iam

Rules:
* A policy is replaced whole. With an etag that is not the policy's it is 412; without one it is replaced blindly.
* A caller of the tokens file gets what is bound to its name (``serviceAccount:NAME``, ``user:NAME``, a principal), to
  ``allUsers`` and, with a name, to ``allAuthenticatedUsers``; besides what the file grants.
* A role is a predefined one of ``ROLES``, or a project's own that the tokens file defines.
* A new bucket has the bindings for the project's owners, editors and viewers that the service gives it; nobody here is
  one of those, nor a member of a group or a domain.

Not modelled: conditions, and the minutes until a change is known everywhere.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ckptmirror.testing.gcs.access import ROLES
from ckptmirror.testing.gcs.answers import ApiError, bad_request, json_answer, not_served
from ckptmirror.testing.gcs.exchange import Exchange
from ckptmirror.testing.gcs.fields import select
from ckptmirror.testing.gcs.records import Policy
from ckptmirror.testing.gcs.state import State

__all__ = ["bound_permissions", "get_policy", "set_policy"]

_FIELDS = frozenset({"kind", "resourceId", "version", "bindings", "etag"})
_PUBLIC = ("allUsers", "allAuthenticatedUsers")
_MEMBER = re.compile(
    r"allUsers|allAuthenticatedUsers|(user|serviceAccount|group):[^\s@:]+@[^\s@:]+|domain:[^\s:]+"
    r"|project(Owner|Editor|Viewer):[^\s:]+|principal(Set)?://iam\.googleapis\.com/\S+"
)
_VERSIONS = (None, 1, 3)


def bound_permissions(policy: Policy, name: str, roles: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """What a policy lets the caller of this name do; ``roles`` are the projects' own."""
    found: set[str] = set()
    for role, members in policy.bindings.items():
        if any(_is_meant(member, name) for member in members):
            found |= ROLES.get(role) or roles.get(role, frozenset())
    return frozenset(found)


def _is_meant(member: str, name: str) -> bool:
    if member == "allUsers" or (member == "allAuthenticatedUsers" and name):
        return True
    kind, _, rest = member.partition(":")
    return bool(name) and (member == name or (kind in ("user", "serviceAccount") and rest == name))


async def get_policy(exchange: Exchange, state: State, name: str) -> web.StreamResponse:
    """The bucket's policy."""
    await exchange.identify(name)
    state.bucket(name)
    wanted = exchange.query.get("optionsRequestedPolicyVersion")
    if wanted is not None and wanted not in ("1", "3"):
        raise bad_request(f"Invalid value for optionsRequestedPolicyVersion: {wanted}", reason="invalidParameter")
    return json_answer(select(_resource(name, state.policy(name)), exchange.query.get("fields")))


async def set_policy(
    exchange: Exchange, state: State, name: str, roles: Mapping[str, frozenset[str]]
) -> web.StreamResponse:
    """Replace the bucket's policy."""
    await exchange.identify(name)
    body = await exchange.json_body()
    bucket, now = state.bucket(name), state.policy(name)
    bindings = _read(body, roles)
    etag = body.get("etag")
    if etag is not None and etag != _etag(now):
        raise ApiError(412, "At least one of the pre-conditions you specified did not hold.", reason="conditionNotMet")
    access = bucket.settings.get("iamConfiguration", {})
    if access.get("publicAccessPrevention") == "enforced" and any(
        member in _PUBLIC for members in bindings.values() for member in members
    ):
        raise ApiError(
            412,
            "The member bindings allUsers and allAuthenticatedUsers are not allowed since public access prevention "
            "is enforced.",
        )
    changed = state.change_policy(name, bindings)
    return json_answer(select(_resource(name, changed), exchange.query.get("fields")))


def _read(body: Mapping[str, Any], roles: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """The bindings of a policy, members by role.

    Raises:
        ApiError: 400 for what makes no sense, 501 for a condition.
    """
    unknown = set(body) - _FIELDS
    if unknown or body.get("version") not in _VERSIONS or not isinstance(body.get("bindings", []), list):
        raise bad_request(f"Invalid policy: {sorted(unknown) or body.get('version')}")
    found: dict[str, list[str]] = {}
    for binding in body.get("bindings", []):
        if not isinstance(binding, dict) or set(binding) - {"role", "members", "condition"}:
            raise bad_request(f"Invalid binding: {binding}")
        if binding.get("condition"):
            raise not_served("conditions of a policy")
        role, members = binding.get("role"), binding.get("members")
        if role not in ROLES and role not in roles:
            raise bad_request(f"Role {role} is not supported for this resource.")
        if not isinstance(members, list) or not members:
            raise bad_request(f"The binding of {role} has no members.")
        for member in members:
            if not isinstance(member, str) or not _MEMBER.fullmatch(member):
                raise bad_request(f"Invalid principal: {member}")
        merged = found.setdefault(str(role), [])
        merged += [member for member in dict.fromkeys(members) if member not in merged]
    return found


def _etag(policy: Policy) -> str:
    return base64.b64encode(b"policy/%d" % policy.version).decode()


def _resource(bucket: str, policy: Policy) -> dict[str, Any]:
    return {
        "kind": "storage#policy",
        "resourceId": f"projects/_/buckets/{bucket}",
        "version": 1,
        "etag": _etag(policy),
        "bindings": [{"role": role, "members": members} for role, members in policy.bindings.items()],
    }
