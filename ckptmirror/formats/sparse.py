"""Checks that the indices of loaded sparse tensors are in bounds, which torch does not do by default.

Rules:
* torch's own switch for this affects the whole process, and so the training: it is not changed.
* Every place is checked where a safe load can leave a tensor: in containers, as a key, as an attribute of another
  tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError

__all__ = ["checked_sparse"]

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def checked_sparse(loaded: Any) -> Any:
    """Return what was loaded, after every sparse tensor in it was checked.

    Raises:
        IntegrityError: One has indices out of bounds, so using it would read or write other memory.
    """
    seen: set[int] = set()
    waiting = [loaded]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, torch.Tensor) and value.layout != torch.strided:
            _check(value)
        waiting += getattr(value, "__dict__", {}).values()
    return loaded


def _check(tensor: torch.Tensor) -> None:
    """As ``torch.load`` does where its switch is on; torch has no public name for it."""
    try:
        if tensor.layout == torch.sparse_coo:
            parts = (tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced())
            torch._validate_sparse_coo_tensor_args(*parts, check_pinning=False)
            return
        if tensor.layout in _BY_ROWS:
            first, second = tensor.crow_indices(), tensor.col_indices()
        elif tensor.layout in _BY_COLUMNS:
            first, second = tensor.ccol_indices(), tensor.row_indices()
        else:
            return
        compressed = (first, second, tensor.values(), tensor.size(), tensor.layout)
        torch._validate_sparse_compressed_tensor_args(*compressed, check_pinning=False)
    except RuntimeError as error:
        raise IntegrityError(f"It holds a broken sparse tensor: {str(error).splitlines()[0][:200]}") from error
