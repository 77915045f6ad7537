"""Match: whether an object of a mirror is what should be there.

Rules:
* What is expected is an artifact of a meta, by size and crc32c; or a verified upload record, by generation as well: an
  object that was replaced is not the one that was verified, even with the same bytes.
* The answer is the first reason that holds: it is missing, its generation, its size, its crc32c. The reason does not
  name the object.
* Where a mirror reports no crc32c, the object is read back if the caller passes the store; otherwise the crc32c is not
  compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmirror.core.model import Artifact
from ckptmirror.local.checksums import crc32c
from ckptmirror.stores.base import ObjectInfo, Store

if TYPE_CHECKING:  # code that only reads a mirror imports this file and needs no table
    from ckptmirror.local.uploads import UploadRecord

__all__ = ["is_of_save", "is_rewritten", "read_back_crc32c", "why_differs"]

_READ_BACK_BYTES = 4 * 1024 * 1024


def why_differs(
    expected: Artifact | UploadRecord, found: ObjectInfo | None, *, store: Store | None = None, by_size: bool = False
) -> str | None:
    """Say how an object differs from what is expected; None if it does not.

    Args:
        expected: What should be there.
        found: What the mirror reports; None if the object is not there.
        store: Where to read the object back if the mirror reports no crc32c.
        by_size: Compare the sizes and not the checksums.

    Raises:
        ObjectNotFound: It was deleted while it was read back.
        StoreTemporary: The mirror does not answer.
    """
    if found is None:
        return "is missing"
    if not isinstance(expected, Artifact) and found.generation != expected.generation:
        return "is not the object that was verified: its generation changed"
    digest = expected.digest if isinstance(expected, Artifact) else expected
    if found.size_bytes != digest.size_bytes:
        return f"has {found.size_bytes} bytes instead of {digest.size_bytes}"
    if by_size:
        return None
    there = read_back_crc32c(store, found) if found.crc32c is None and store is not None else found.crc32c
    if there is None or there == digest.crc32c:
        return None
    return f"has crc32c {there:08x}" + (f" instead of {digest.crc32c:08x}" if digest.crc32c is not None else "")


def is_of_save(artifact: Artifact, save_id: str, info: ObjectInfo, store: Store) -> bool:
    """Whether an object is a save's file: by its metadata, or by equal bytes alone if the store keeps no metadata."""
    if store.capabilities.custom_metadata and info.metadata.get("ckptmirror-save") != save_id:
        return False
    return why_differs(artifact, info, store=store) is None


def is_rewritten(record: UploadRecord, found: ObjectInfo | None) -> bool:
    """Whether an object that is not the verified one may be as good: it has the same bytes, as far as a listing shows.

    So has each object of a mirror that was moved to another disk. The meta that another node wrote has other bytes.
    """
    if found is None:
        return False
    return record.role == "meta" or why_differs(replace(record, generation=found.generation), found) is None


def read_back_crc32c(store: Store, info: ObjectInfo) -> int:
    """Read a whole object and return its crc32c; uses at most 4 MiB of memory."""
    buffer = memoryview(bytearray(min(_READ_BACK_BYTES, max(1, info.size_bytes))))
    crc = 0
    for offset in range(0, info.size_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), info.size_bytes - offset)]
        store.download(info.name, generation=info.generation, offset=offset, buffer=piece)
        crc = crc32c(piece, crc)
    return crc
