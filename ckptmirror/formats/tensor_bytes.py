"""Tensors as bytes: views without copies, separate storages, checksums.

Rules:
* A view keeps its memory alive.
* Nothing here copies a dense, contiguous tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.errors import UsageError
from ckptmirror.formats.containers import TreePath, changed, leaves
from ckptmirror.local.checksums import crc32c

__all__ = ["byte_view", "compact", "digest32", "has_memory", "has_plain_bytes", "is_wrapper", "sum32_there"]

_WORDS_PER_CHUNK = 1 << 15  # up to here torch sums in the calling thread, which is faster than waiting for its pool


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps its values in other tensors and has no bytes of its own, as quantised ones do.

    A DTensor is not one: ask for its local part.
    """
    if isinstance(tensor, DTensor):
        return is_wrapper(tensor.to_local())
    return hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ != "AsyncCollectiveTensor"


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain row of bytes that can be summed."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_wrapper(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a plain tensor are there: FSDP frees those of what it does not need, and meta has none."""
    return not tensor.is_meta and bool(tensor.untyped_storage().nbytes() or not tensor.numel())


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


def compact(tree: Any) -> Any:
    """Return ``tree`` so that ``torch.save`` writes only the bytes that its tensors show.

    ``torch.save`` writes whole storages. A tensor that shows a small part of a large one (a slice, or a piece of a copy
    arena) gets a storage of its own: over the same memory where it is contiguous there, else a copy. Tensors that show
    the same memory stay one tensor, and views that together cover their storage are left as they are.
    """
    shown: dict[int, int] = {}
    seen = set()
    for leaf in leaves(tree):
        tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if _is_dense(tensor) and (key := _view_key(tensor)) not in seen:
            seen.add(key)
            storage = tensor.untyped_storage().data_ptr()
            shown[storage] = shown.get(storage, 0) + tensor.numel() * tensor.element_size()
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    dtypes: dict[int, torch.dtype] = {}

    def own(leaf: Any, path: TreePath) -> Any:
        if isinstance(leaf, DTensor):
            local = leaf.to_local()
            owned = own(local, path)
            if owned is local:
                return leaf
            return DTensor.from_local(
                owned, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
            )
        if not _is_dense(leaf):
            return leaf
        key = _view_key(leaf)
        if key not in made:
            made[key] = _own(leaf, shown, dtypes)
        return made[key]

    return changed(tree, own)


def _own(tensor: torch.Tensor, shown: dict[int, int], dtypes: dict[int, torch.dtype]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    result = tensor
    if storage.nbytes() > shown[storage.data_ptr()]:
        result = _over_same_memory(tensor) if tensor.is_contiguous() else tensor.contiguous()
    # torch.save refuses one address under two dtypes.
    pointer = result.untyped_storage().data_ptr()
    if dtypes.setdefault(pointer, result.dtype) != result.dtype:
        result = result.clone()
        dtypes[result.untyped_storage().data_ptr()] = result.dtype
    return result


def _over_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.frombuffer(byte_view(tensor), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def _is_dense(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


def _view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
