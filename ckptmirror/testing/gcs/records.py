"""What the server remembers of a bucket, of one version of an object, of an upload session and of a rewrite.

Rules:
* A record is a value: a change makes another one.
* A version is live, noncurrent (a versioned bucket kept it) or soft-deleted; at most one version of a name is live.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "Bucket",
    "Folder",
    "Policy",
    "Rewrite",
    "Session",
    "StoredObject",
    "object_from_row",
    "object_from_text",
    "to_text",
]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket; ``settings`` holds the resource fields that a client may set (``versioning``, ``labels`` …)."""

    name: str
    created_us: int
    updated_us: int
    metageneration: int
    settings: dict[str, Any]

    def _flag(self, name: str) -> bool:
        return bool(self.settings.get(name, {}).get("enabled", False))

    @property
    def versioned(self) -> bool:
        """Whether a replaced or deleted live object becomes noncurrent."""
        return self._flag("versioning")

    @property
    def hierarchical(self) -> bool:
        """Whether folders are resources of their own."""
        return self._flag("hierarchicalNamespace")

    @property
    def uniform_access(self) -> bool:
        """Whether access lists of objects are switched off."""
        access = self.settings.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {})
        return bool(access.get("enabled", False))

    @property
    def soft_delete_s(self) -> int:
        """How long what is deleted can be restored; 0: it cannot."""
        return int(self.settings.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))

    @property
    def place(self) -> tuple[str, str]:
        """Location and default storage class: a rewrite to another place moves bytes."""
        return str(self.settings.get("location", "US")), str(self.settings.get("storageClass", "STANDARD"))


@dataclass(frozen=True, slots=True)
class Policy:
    """Who has which role in a bucket: members by role. ``version`` rises with each change."""

    version: int
    bindings: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of an object.

    Attributes:
        metadata: The resource fields that a client may set (``contentType``, ``metadata`` …).
        components: How many objects a composite one was made of; 0 for one that is not composite.
        deleted_us: Since when it is not live any more; None while it is.
        soft_deleted_us: Since when it is soft-deleted; None otherwise.
        hard_delete_us: When a soft-deleted one goes for good.
    """

    bucket: str
    name: str
    generation: int
    metageneration: int
    size_bytes: int
    crc32c: bytes
    md5: bytes | None
    created_us: int
    updated_us: int
    file: str
    metadata: dict[str, Any]
    components: int = 0
    deleted_us: int | None = None
    soft_deleted_us: int | None = None
    hard_delete_us: int | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a bucket with hierarchical namespace; its name ends in a slash."""

    bucket: str
    name: str
    created_us: int


@dataclass(frozen=True, slots=True)
class Session:
    """A resumable upload.

    Attributes:
        state: ``open``, ``done`` (``result`` is the object it made), ``cancelled`` or ``dead`` (its end was refused).
        total: The object's length as soon as the client has said it.
        declared: From the start: ``metadata`` (resource fields), ``preconditions``, ``checksums`` (base64) and
            ``no_replacing`` (why the caller may not replace an object, or None).
    """

    upload_id: str
    bucket: str
    name: str
    file: str
    started_us: int
    declared: dict[str, Any]
    state: str = "open"
    total: int | None = None
    result: StoredObject | None = None


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite that takes several calls.

    Attributes:
        request: What the call asked for (source, its generation, destination, limit, body): a later one must ask the
            same.
    """

    token: str
    started_us: int
    done_bytes: int
    request: dict[str, Any]


def object_from_row(row: tuple[Any, ...]) -> StoredObject:
    """A row of the table of versions, whose columns are the fields in their order."""
    values = dict(zip((column.name for column in fields(StoredObject)), row, strict=True))
    return StoredObject(**{**values, "metadata": json.loads(values["metadata"])})


def to_text(item: StoredObject) -> str:
    """A version as JSON, for a session that is done."""
    values = asdict(item)
    values["crc32c"] = item.crc32c.hex()
    values["md5"] = None if item.md5 is None else item.md5.hex()
    return json.dumps(values)


def object_from_text(text: str) -> StoredObject:
    """What ``to_text`` wrote."""
    values = json.loads(text)
    values["crc32c"] = bytes.fromhex(values["crc32c"])
    values["md5"] = None if values["md5"] is None else bytes.fromhex(values["md5"])
    return StoredObject(**values)
