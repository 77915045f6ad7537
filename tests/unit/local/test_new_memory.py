"""New memory whose pages are made before they are written."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from ckptmirror.local.host_memory import back_with_memory

_SIZE_BYTES = 64 << 20


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(_kernel() < (5, 14), reason="the kernel cannot")
def test_pages_are_made_until_it_is_over_and_keep_what_they_hold() -> None:
    memory = mmap.mmap(-1, _SIZE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address, before = ctypes.addressof(ctypes.c_char.from_buffer(memory)), _resident_bytes()
    back_with_memory(address, _SIZE_BYTES, lambda: True)
    assert _resident_bytes() - before < _SIZE_BYTES // 4
    asked = iter((False, False, True))
    back_with_memory(address, _SIZE_BYTES, lambda: next(asked))
    assert _SIZE_BYTES // 16 < _resident_bytes() - before < _SIZE_BYTES // 4
    memory[0], memory[-1] = 7, 9
    back_with_memory(address + 1, _SIZE_BYTES - 2, lambda: False)
    assert _resident_bytes() - before > _SIZE_BYTES * 3 // 4
    assert (memory[0], memory[-1]) == (7, 9)


@pytest.mark.parametrize("size_bytes", [0, 1, mmap.PAGESIZE - 1])
def test_less_than_a_page_is_nothing_to_make(size_bytes: int) -> None:
    back_with_memory(mmap.PAGESIZE * 10 + 1, size_bytes, lambda: False)


def test_memory_that_is_not_there_is_not_an_error() -> None:
    back_with_memory(mmap.PAGESIZE, mmap.PAGESIZE, lambda: False)
