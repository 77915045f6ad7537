"""Tensors as bytes: a view without a copy, and sums of the bytes.

Rules:
* A view keeps its memory alive.
* Nothing here copies a dense, contiguous tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.local.checksums import crc32c

__all__ = ["byte_view", "digest32", "sum32_there"]

_WORDS_PER_CHUNK = 1 << 15  # up to here torch sums in the calling thread, which is faster than waiting for its pool


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes; the view keeps the tensor alive.

    Raises:
        UsageError: It has no memory of its own.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(bytearray())
    if tensor.data_ptr() == 0:
        raise UsageError(f"A tensor of type {type(tensor).__qualname__} has no bytes of its own.")
    memory: Any = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def digest32(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (sum32, crc32c) of a CPU tensor's bytes in row-major order.

    ``sum32`` is the sum, modulo 2**32, of the bytes read as little-endian 32-bit words, the last padded. The sums of
    pieces whose sizes are multiples of four bytes add up to the sum of the whole, however it was cut.
    """
    data = byte_view(tensor.detach().contiguous())
    whole = data.nbytes // 4 * 4
    total = crc = 0
    for begin in range(0, whole, 4 * _WORDS_PER_CHUNK):  # both sums of a chunk while it is in the cache
        chunk = data[begin : min(begin + 4 * _WORDS_PER_CHUNK, whole)]
        total += int(torch.frombuffer(chunk, dtype=torch.int32).sum(dtype=torch.int32))
        crc = crc32c(chunk, crc)
    tail = data[whole:]
    return (total + int.from_bytes(tail, "little")) & 0xFFFFFFFF, crc32c(tail, crc)


def sum32_there(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``sum32``, as a signed number, of a plain tensor on any device, without waiting for the device."""
    if tensor.element_size() == 4 and not tensor.is_neg():  # the usual case: no copy in any layout, and few calls
        return tensor.detach().view(torch.int32).sum(dtype=torch.int32)
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    whole = data.numel() // 4 * 4
    total = data[:whole].view(torch.int32).sum(dtype=torch.int32)
    for index, byte in enumerate(data[whole:].unbind()):
        total = total + byte.to(torch.int32) * 256**index
    return total
