"""Tensors as bytes: which have some of their own, and separate storages for what is written.

Rules:
* Nothing here copies a dense, contiguous tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import TreePath, changed, leaves
from ckptmirror.sums.digests import byte_view

__all__ = ["DEVICE_ERRORS", "compact", "has_memory", "has_plain_bytes", "is_wrapper"]

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # they say nothing about what is read or loaded


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
            return leaf.resolve_conj().resolve_neg() if type(leaf) is torch.Tensor else leaf
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
