"""What a request must fulfil: preconditions, checksums, names, ranges. Pure functions of text.

Rules:
* A parameter that cannot be read is refused with 400, never ignored.
* ``ifGenerationMatch=0`` means: no live object; where there is none, ``ifGenerationNotMatch`` fails. A generation that
  does not match answers 412, one that must not match and does answers 304
  (https://cloud.google.com/storage/docs/request-preconditions).
* Checksums are compared as decoded bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptmirror.testing.gcs.answers import ApiError, bad_request, not_served

__all__ = [
    "ByteRange",
    "Checksums",
    "ContentRange",
    "Preconditions",
    "check_bucket_name",
    "check_object_name",
    "declared_checksums",
    "flag",
    "integer",
    "parse_content_range",
    "parse_range",
]


def integer(query: Mapping[str, str], name: str) -> int | None:
    """A query parameter that must be a whole number, or None without it."""
    text = query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise bad_request(f"Invalid value for {name}: {text}", reason="invalidParameter")
    return int(text)


def flag(query: Mapping[str, str], name: str) -> bool:
    """A query parameter that is ``true`` or ``false``; false without it."""
    text = query.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise bad_request(f"Invalid value for {name}: {text}", reason="invalidParameter")
    return text.lower() == "true"


@dataclass(frozen=True, slots=True)
class Preconditions:
    """The four generation preconditions of one request."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str], of: str = "") -> Preconditions:
        """Read them from a query; ``of="Source"`` for those on the source of a copy."""
        return cls(
            integer(query, f"if{of}GenerationMatch"),
            integer(query, f"if{of}GenerationNotMatch"),
            integer(query, f"if{of}MetagenerationMatch"),
            integer(query, f"if{of}MetagenerationNotMatch"),
        )

    def check(self, generation: int, metageneration: int) -> None:
        """Compare with the live object, or with (0, 0) where there is none.

        Raises:
            ApiError: 412 or 304.
        """
        if self.generation_match is not None and self.generation_match != generation:
            raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
        if self.metageneration_match is not None and self.metageneration_match != metageneration:
            raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
        if self.generation_not_match is not None and generation in (0, self.generation_not_match):
            raise ApiError(304, "Not Modified")
        if self.metageneration_not_match is not None and self.metageneration_not_match == metageneration:
            raise ApiError(304, "Not Modified")


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums that a client declared or the server computed, as bytes in network order."""

    crc32c: bytes | None = None
    md5: bytes | None = None

    def over(self, other: Checksums) -> Checksums:
        """These, completed by ``other``; two that contradict each other are refused."""
        for ours, theirs in ((self.crc32c, other.crc32c), (self.md5, other.md5)):
            if ours is not None and theirs is not None and ours != theirs:
                raise bad_request("The checksums in the metadata and in the headers contradict each other.")
        return Checksums(self.crc32c or other.crc32c, self.md5 or other.md5)

    def check(self, crc32c: bytes, md5: bytes | None) -> None:
        """Compare with what was computed over the bytes that arrived; 400 where they differ."""
        if self.crc32c is not None and self.crc32c != crc32c:
            raise bad_request(_mismatch("CRC32C", self.crc32c, crc32c))
        if self.md5 is not None and self.md5 != md5:
            raise bad_request(_mismatch("MD5 hash", self.md5, md5 or b""))


def _mismatch(kind: str, declared: bytes, computed: bytes) -> str:
    said, found = base64.b64encode(declared).decode(), base64.b64encode(computed).decode()
    return f'Provided {kind} "{said}" doesn\'t match calculated {kind} "{found}".'


def _digest(text: object, size_bytes: int, name: str) -> bytes | None:
    if text is None:
        return None
    try:
        raw = base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != size_bytes:
        raise bad_request(f"Invalid value for {name}: {text}", reason="invalid")
    return raw


def declared_checksums(metadata: Mapping[str, object], goog_hash: str | None, content_md5: str | None) -> Checksums:
    """What a client says of its bytes: in the metadata, in ``x-goog-hash``, in ``Content-MD5``."""
    declared = Checksums(_digest(metadata.get("crc32c"), 4, "crc32c"), _digest(metadata.get("md5Hash"), 16, "md5Hash"))
    found: dict[str, str] = {}
    for item in (goog_hash or "").split(","):
        if item.strip():
            kind, _, value = item.strip().partition("=")
            if kind not in ("crc32c", "md5"):
                raise bad_request(f"Invalid value for x-goog-hash: {item.strip()}")
            found[kind] = value
    header = Checksums(_digest(found.get("crc32c"), 4, "x-goog-hash"), _digest(found.get("md5"), 16, "x-goog-hash"))
    return declared.over(header).over(Checksums(md5=_digest(content_md5, 16, "Content-MD5")))


def check_object_name(name: str, *, hierarchical: bool = False) -> str:
    """The naming rules of objects (https://cloud.google.com/storage/docs/objects).

    What an object whose name ends in a slash is in a bucket with hierarchical namespace is not modelled: 501.
    """
    if not name:
        raise ApiError(400, "Required parameter: name", reason="required")
    if len(name.encode()) > 1024:
        raise bad_request("The maximum object length is 1024 characters, but got a name with more.")
    if "\r" in name or "\n" in name or name in (".", "..") or name.startswith(".well-known/acme-challenge/"):
        raise bad_request(f"Disallowed unicode characters or reserved words present in object name '{name}'")
    if hierarchical and name.endswith("/"):
        raise not_served("objects whose names end in a slash, in a bucket with hierarchical namespace")
    return name


def check_bucket_name(name: str) -> str:
    """The naming rules of buckets (https://cloud.google.com/storage/docs/buckets).

    Of the "close misspellings" of google that they forbid, these are the ones with digits that look like its letters.
    """
    legal = re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", name) is not None
    legal = legal and all(1 <= len(part) <= 63 for part in name.split("."))
    is_address = re.fullmatch(r"[0-9]+(\.[0-9]+){3}", name) is not None
    if not legal or is_address or name.startswith("goog") or re.search("g[o0]{2}g[l1][e3]", name):
        raise bad_request(f"Invalid bucket name: '{name}'")
    return name


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Part of an object: ``size_bytes`` from ``offset``."""

    offset: int
    size_bytes: int


def parse_range(header: str | None, object_size_bytes: int) -> ByteRange | None:
    """What of an object a Range header asks for; None for all of it.

    A header that is not one range of bytes is ignored, as RFC 9110 section 14.2 has it.

    Raises:
        ApiError: 416 for a range that begins after the last byte.
    """
    match = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", (header or "").strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first == "":
        size_bytes = min(int(last), object_size_bytes)
        offset = object_size_bytes - size_bytes
    else:
        offset = int(first)
        end = object_size_bytes if last == "" else min(int(last) + 1, object_size_bytes)
        if last != "" and int(last) < offset:
            return None
        size_bytes = end - offset
    if size_bytes <= 0:
        headers = {"Content-Range": f"bytes */{object_size_bytes}"}
        raise ApiError(416, "The requested range cannot be satisfied.", headers=headers)
    return ByteRange(offset, size_bytes)


@dataclass(frozen=True, slots=True)
class ContentRange:
    """A Content-Range of an upload: which bytes, or none (a status query), of how many (None: not known yet)."""

    first: int | None
    end: int | None
    total: int | None


def parse_content_range(header: str) -> ContentRange:
    """Read ``bytes 0-99/100``, ``bytes 0-99/*``, ``bytes */100`` or ``bytes */*``."""
    match = re.fullmatch(r"bytes (?:([0-9]+)-([0-9]+)|\*)/([0-9]+|\*)", header.strip())
    if match is None:
        raise bad_request(f"Failed to parse Content-Range header: {header}", reason="badRequest")
    total = None if match[3] == "*" else int(match[3])
    if match[1] is None:
        return ContentRange(None, None, total)
    first, end = int(match[1]), int(match[2]) + 1
    if end <= first or (total is not None and end > total):
        raise bad_request(f"Failed to parse Content-Range header: {header}", reason="badRequest")
    return ContentRange(first, end, total)
