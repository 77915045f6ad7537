"""Questions about a tree of live or saved values: which objects take a state, what is sharded, what can be filled.

Rules:
* A walk enters only the containers that a save marks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptmirror.formats.already_filled import overlaps_itself
from ckptmirror.formats.buffers import is_array
from ckptmirror.formats.containers import TreePath, changed, is_mapping, is_sequence, leaves, place, placed_leaves
from ckptmirror.formats.rank_files import live_at
from ckptmirror.formats.shards import Piece, fills

__all__ = [
    "any_leaf",
    "beside",
    "has",
    "is_mutable",
    "is_plain",
    "is_sharded",
    "kind_alive",
    "may_be_sharded",
    "takes_state",
    "takes_values",
    "unlike_pieces",
]


_NUMBERS = (float, int, str, bool, type(None))  # what long lists are made of


def has(value: Any, name: str) -> bool:
    """Whether a value, not a class, has an attribute."""
    return hasattr(value, name) and not isinstance(value, type)


def takes_state(value: Any) -> bool:
    """Whether ``value`` is an object that takes a state."""
    return has(value, "load_state_dict")


def is_sharded(value: Any) -> bool:
    """Whether a tensor, or any parameter or buffer of a module, is a DTensor."""
    tensors = (*value.parameters(), *value.buffers()) if isinstance(value, torch.nn.Module) else (value,)
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def unlike_pieces(saved: Any, like: Any, where: str) -> Iterator[str]:
    """Yield the places of pieces in ``saved`` for which ``like`` has no tensor, or a DTensor of another shape."""
    for path, leaf in placed_leaves(saved):
        if isinstance(leaf, Piece):
            live, shape = live_at(like, path), leaf.region.shape
            if not isinstance(live, torch.Tensor) or (isinstance(live, DTensor) and tuple(live.shape) != shape):
                yield place(saved, path, where)


def beside(now: Any, value: Any) -> Any:
    """Return ``value`` with each tensor on the device of the tensor at the same place in ``now``."""

    def moved(leaf: Any, path: TreePath) -> Any:
        live = live_at(now, path) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) else None
        return leaf.to(live.device) if isinstance(live, torch.Tensor) and not live.is_meta else leaf

    return changed(value, moved)


def kind_alive(value: Any) -> str | None:
    """Return the class name of the first object or DTensor in ``value`` that can only be restored in place."""
    alive = (leaf for leaf in leaves(value) if takes_state(leaf) or isinstance(leaf, DTensor))
    return next((type(leaf).__qualname__ for leaf in alive), None)


def is_plain(value: Any) -> bool:
    """Whether nothing in ``value`` can be filled, so that it is replaced."""
    return type(value) in _NUMBERS or (not is_mutable(value) and kind_alive(value) is None)


def is_mutable(value: Any) -> bool:
    """Whether the contents of ``value`` can change, so that everyone who holds a reference sees the new ones."""
    if isinstance(value, torch.Tensor) or is_mapping(value) or type(value) in (list, deque, set, bytearray):
        return True
    return is_array(value) or (is_sequence(value) and any(map(is_mutable, value)))


def takes_values(now: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether ``now`` has separate memory for every value and may be written."""
    return fills(saved) and fills(now) and not now.is_inference() and not overlaps_itself(now)


def may_be_sharded(saved: Any) -> bool:
    """Whether ``saved`` may be sharded, so that the live state must be asked how; asking may be expensive."""
    several = dist.is_available() and dist.is_initialized()

    def maybe(leaf: Any) -> bool:
        return isinstance(leaf, Piece) or (several and isinstance(leaf, torch.Tensor) and leaf.is_floating_point())

    return any_leaf(saved, maybe)


def any_leaf(tree: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether ``wanted`` is true for any leaf of ``tree``."""
    return any(map(wanted, leaves(tree)))
