"""Who may do what: IAM permissions of a caller (https://cloud.google.com/storage/docs/access-control/iam-json).

Rules:
* A caller without grants may do everything. A caller with grants may do only what they name, and what the bucket's
  policy allows (``policies``).
* A refusal uses the service's words: 403 with the caller's name and the permission, 401 if the caller has no name.
* Replacing a live object also needs ``storage.objects.delete``. Whether the service checks that before or after a
  precondition is not documented; here permissions come first.

Not modelled: conditions, managed folders, access lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptmirror.testing.gcs.answers import ApiError

__all__ = ["ANYONE", "CHALLENGE", "NEEDED", "PERMISSIONS", "ROLES", "Caller", "Grants"]

NEEDED: Mapping[str, str] = {  # what the operation itself needs; what it needs besides is asked where it is done
    "bucket.get": "storage.buckets.get",
    "bucket.insert": "storage.buckets.create",
    "bucket.list": "storage.buckets.list",
    "bucket.delete": "storage.buckets.delete",
    "bucket.patch": "storage.buckets.update",
    "bucket.layout": "storage.objects.list",
    "bucket.policy": "storage.buckets.getIamPolicy",
    "bucket.set_policy": "storage.buckets.setIamPolicy",
    "object.get": "storage.objects.get",
    "object.media": "storage.objects.get",
    "object.list": "storage.objects.list",
    "object.delete": "storage.objects.delete",
    "object.patch": "storage.objects.update",  # and storage.objects.get
    "object.compose": "storage.objects.create",
    "object.rewrite": "storage.objects.get",
    "object.copy": "storage.objects.get",
    "object.move": "storage.objects.move",
    "object.restore": "storage.objects.restore",
    "upload.media": "storage.objects.create",
    "upload.multipart": "storage.objects.create",
    "upload.start": "storage.objects.create",
    "folder.get": "storage.folders.get",
    "folder.list": "storage.folders.list",
    "folder.insert": "storage.folders.create",
    "folder.delete": "storage.folders.delete",
}
PERMISSIONS = frozenset(NEEDED.values())

_OBJECTS = frozenset(name for name in PERMISSIONS if name.startswith("storage.objects."))
_FOLDERS = frozenset(name for name in PERMISSIONS if name.startswith("storage.folders."))
_READ = frozenset({"storage.objects.get", "storage.objects.list", "storage.folders.get", "storage.folders.list"})
ROLES: Mapping[str, frozenset[str]] = {  # https://cloud.google.com/storage/docs/access-control/iam-roles
    "roles/storage.admin": PERMISSIONS,
    "roles/storage.objectAdmin": _OBJECTS | _FOLDERS,
    "roles/storage.objectUser": _OBJECTS | _FOLDERS,
    "roles/storage.objectViewer": _READ,
    "roles/storage.objectCreator": frozenset({"storage.objects.create", "storage.folders.create"}),
    "roles/storage.legacyBucketReader": frozenset({"storage.buckets.get", "storage.objects.list"}),
    "roles/storage.legacyBucketWriter": frozenset(
        {"storage.buckets.get", "storage.objects.list", "storage.objects.create", "storage.objects.delete"}
    ),
    "roles/storage.legacyBucketOwner": frozenset(
        {
            "storage.buckets.get",
            "storage.buckets.update",
            "storage.buckets.getIamPolicy",
            "storage.buckets.setIamPolicy",
        }
        | {"storage.objects.list", "storage.objects.create", "storage.objects.delete"}
    ),
    "roles/storage.legacyObjectReader": frozenset({"storage.objects.get"}),
    "roles/storage.legacyObjectOwner": frozenset({"storage.objects.get", "storage.objects.update"}),
}
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}


@dataclass(frozen=True, slots=True)
class Grants:
    """Permissions, in some buckets or in all."""

    permissions: frozenset[str]
    buckets: frozenset[str] | None = None

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Grants:
        """Read ``{"roles": […], "permissions": […], "buckets": […]}``.

        Raises:
            ValueError: An unknown key, role or permission.
        """
        unknown = set(item) - {"roles", "permissions", "buckets"}
        if unknown:
            raise ValueError(f"grants have no {', '.join(sorted(unknown))}")
        found: set[str] = set(item.get("permissions", []))
        for role in item.get("roles", []):
            if role not in ROLES:
                raise ValueError(f"there is no role {role}; there are {', '.join(ROLES)}")
            found |= ROLES[role]
        if found - PERMISSIONS:
            raise ValueError(f"there is no permission {', '.join(sorted(found - PERMISSIONS))}")
        buckets = item.get("buckets")
        return cls(frozenset(found), None if buckets is None else frozenset(buckets))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: The name shown in refusals; empty for an anonymous caller.
        grants: What the caller may do; None for everything.
        bound: What a bucket's policy also allows; None for nothing.
    """

    name: str = ""
    grants: Grants | None = None
    bound: Callable[[str], frozenset[str]] | None = None

    def may(self, permission: str, bucket: str) -> bool:
        """Whether the caller has a permission in a bucket."""
        grants = self.grants
        if grants is None:
            return True
        if permission in grants.permissions and (grants.buckets is None or bucket in grants.buckets):
            return True
        return self.bound is not None and permission in self.bound(bucket)

    def refusal(self, permission: str, bucket: str) -> str | None:
        """Why the caller may not; None if it may."""
        if self.may(permission, bucket):
            return None
        kind = "bucket" if permission.startswith("storage.buckets.") or permission.endswith(".list") else "object"
        kind = "folder" if permission.startswith("storage.folders.") else kind
        return (
            f"{self.name or 'Anonymous caller'} does not have {permission} access to the Google Cloud Storage {kind}. "
            f"Permission '{permission}' denied on resource (or it may not exist)."
        )

    def require(self, permission: str, bucket: str) -> None:
        """Go on only with a permission.

        Raises:
            ApiError: 403; 401 for an anonymous caller.
        """
        message = self.refusal(permission, bucket)
        if message is not None and self.name:
            raise ApiError(403, message)
        if message is not None:
            raise ApiError(401, message, reason="required", headers=CHALLENGE)

    def no_replacing(self, bucket: str) -> str | None:
        """Why the caller may not replace an object; None if it may."""
        return self.refusal("storage.objects.delete", bucket)


ANYONE = Caller()
