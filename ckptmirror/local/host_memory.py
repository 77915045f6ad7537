"""Host memory: makes the pages of new memory before something is written there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["back_with_memory"]

_PAGE, _AT_ONCE_BYTES = 4096, 4 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_libc = ctypes.CDLL(None, use_errno=True)


def back_with_memory(address: int, size_bytes: int, is_over: Callable[[], bool]) -> None:
    """Let the kernel make the whole pages of new memory now, and not when each is first written; stop when over.

    Making them takes most of the time of a read from the page cache into new memory. What the memory holds stays.
    Kernels before 5.14 do nothing, nor does one that has no memory left: the one who writes there learns that.
    """
    begin, end = -(-address // _PAGE) * _PAGE, (address + size_bytes) // _PAGE * _PAGE
    for at in range(begin, end, _AT_ONCE_BYTES):
        if is_over():
            return
        piece_bytes = min(_AT_ONCE_BYTES, end - at)
        _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(piece_bytes), ctypes.c_int(_POPULATE_WRITE))
