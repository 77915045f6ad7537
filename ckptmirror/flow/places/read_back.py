"""Reading an object back from a mirror: what it holds, where the mirror's own word is not enough."""

from __future__ import annotations

from ckptmirror.local.checksums import crc32c
from ckptmirror.stores.base import ObjectInfo, Store

__all__ = ["read_back_crc32c"]

_READ_BACK_BYTES = 4 * 1024 * 1024


def read_back_crc32c(store: Store, info: ObjectInfo) -> int:
    """Read a whole object and return its crc32c, in bounded memory."""
    buffer = memoryview(bytearray(min(_READ_BACK_BYTES, max(1, info.size_bytes))))
    crc = 0
    for offset in range(0, info.size_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), info.size_bytes - offset)]
        store.download(info.name, generation=info.generation, offset=offset, buffer=piece)
        crc = crc32c(piece, crc)
    return crc
