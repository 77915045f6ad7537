"""The host memory that states are copied into, kept from save to save.

Fresh memory costs five to ten times the copy itself in page faults, so the memory is kept, in huge pages if the machine
has them.

Rules:
* Old memory is freed before new memory is allocated, so the peak is one arena.
* It grows when the state does, and shrinks when less than half of it is needed.
* For CUDA tensors it is pinned, in blocks that are powers of two, since the allocator of pinned memory rounds up to
  those.
* Its tensors are ordinary CPU tensors, whatever mode or default device the training saves in, since later copies write
  them in other modes.
* A forked child does not inherit it; otherwise the next copy would duplicate every page.
* Before the first copy, a thread faults its pages in, and writes nothing once the memory is used.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from ckptmirror.core.errors import Temporary

__all__ = ["PINNED_BLOCK_BYTES", "Arena"]

PINNED_BLOCK_BYTES = 512 * 1024 * 1024
_HINT = "The host copy needs as much memory as this rank's part of the state."
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_PAGE_BYTES = 4096  # the smallest
_PAGES_AT_A_TIME = 2048
_log = logging.getLogger(__name__)


class Arena:
    """Blocks of host memory that outlive a copy."""

    def __init__(self) -> None:
        self._blocks: list[memoryview] = []
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._sizes: list[int] = []
        self._pinned = False
        self._fresh: list[memoryview] = []  # blocks that a thread faults in
        self._wanted: list[memoryview] = []  # the same, until the memory is used
        self._faulting_in = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self._blocks)

    def fit(self, sizes: Sequence[int], *, pinned: bool) -> bool:
        """Make blocks of at least ``sizes`` available. Returns whether new memory was allocated."""
        self._end_populating()
        if list(sizes) != self._sizes:
            self._sizes, self._tensors = list(sizes), {}  # another layout
        held = [block.nbytes for block in self._blocks]
        enough = len(held) == len(sizes) and all(h >= n for h, n in zip(held, sizes, strict=True))
        if enough and pinned == self._pinned and 2 * sum(sizes) + _HUGE_PAGE_BYTES >= sum(held):
            return False
        self.release()
        self._pinned = pinned
        self._blocks = [_take_pinned(size) if pinned else _take(size) for size in sizes]
        return True

    def storage(self, block: int, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """Return a storage of exactly ``size_bytes`` over the arena's memory."""
        self._end_populating()
        with torch.inference_mode(mode=False):
            whole = torch.frombuffer(self._blocks[block], dtype=torch.uint8, count=size_bytes, offset=offset)
            return whole.untyped_storage()

    def tensor(self, block: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of the shape and dtype of ``like``, in a storage of exactly its size.

        It is kept: states rarely change their layout, and creating thousands of tensors takes longer than copying them.
        """
        self._end_populating()
        kept = self._tensors.get((block, offset))
        if kept is None or kept.dtype != like.dtype or kept.shape != like.shape:
            with torch.inference_mode(mode=False):
                items = torch.frombuffer(self._blocks[block], dtype=like.dtype, count=like.numel(), offset=offset)
                kept = self._tensors[block, offset] = items.view(like.shape)
        return kept

    def populate(self) -> None:
        """Begin to fault every page of fresh memory in, in a thread; what is not done when it is used, its use does."""
        fresh = [block for block in self._blocks if isinstance(block.obj, mmap.mmap)]  # what is pinned is there already
        self._fresh = self._wanted = fresh
        with suppress(RuntimeError):  # no more threads
            threading.Thread(target=self._fault_in, args=[fresh], name="ckptmirror-memory", daemon=True).start()

    def release(self) -> None:
        """Release the memory; it is freed together with the last tensor that still uses it."""
        self._end_populating()
        self._blocks = []
        self._tensors = {}

    def _fault_in(self, fresh: list[memoryview]) -> None:
        """Write to each page. A madvise of the mmap module would hold the interpreter's lock meanwhile."""
        for pages in [np.frombuffer(block, np.uint8)[::_PAGE_BYTES] for block in fresh]:
            for begin in range(0, len(pages), _PAGES_AT_A_TIME):
                with self._faulting_in:
                    if self._wanted is not fresh:
                        return
                    pages[begin : begin + _PAGES_AT_A_TIME] = 0

    def _end_populating(self) -> None:
        if self._fresh:
            self._wanted = []
            with self._faulting_in:  # the thread is not writing now, and will not
                self._fresh = []


def _take(size_bytes: int) -> memoryview:
    size_bytes = max(-(-size_bytes // _HUGE_PAGE_BYTES), 1) * _HUGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise Temporary(f"no {size_bytes} bytes of memory for the host copy: {error}", hint=_HINT) from error
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        try:
            memory.madvise(advice)
        except OSError:
            continue  # a kernel without it: slower, or more memory after a fork, but still correct
    return memoryview(memory)


def _take_pinned(size_bytes: int) -> memoryview:
    try:
        with torch.inference_mode(mode=False):
            memory = torch.empty(max(size_bytes, 1), dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        _log.warning("no pinned memory, so the host copy will be slower: %s", error)
        return _take(size_bytes)
    return memory_of(memory)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which lives as long as they do."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    vars(array)["owner"] = tensor
    return memoryview(array).cast("B")
