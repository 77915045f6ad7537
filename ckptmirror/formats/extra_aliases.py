"""Which values of the extra state are shared, as the save recorded: a load keeps those shared, and no others.

Equal values prove nothing: the best weights so far may equal the live ones when they are saved, but are a copy. So a
save writes the path of each value that shares memory with the model, the average or an earlier value, or that is the
same container as an earlier one.

Rules:
* A save and a load walk in the same order (``formats.restore``).
* Looking costs little where nothing is shared: addresses are compared first, bytes only if two are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ckptmirror.core.containers import TreePath, any_leaf, is_mapping, is_sequence, items_of, leaves, takes_state
from ckptmirror.formats.already_filled import Taken
from ckptmirror.formats.buffers import is_array
from ckptmirror.formats.shards import local_of
from ckptmirror.formats.state_tree import state_of

__all__ = ["KEY", "aliases_in", "aliases_of", "in_order"]

KEY = "aliases"


def aliases_of(model: torch.nn.Module, ema: Any, extra: Any, captured: tuple[Any, Any, Any]) -> list[list[Any]]:
    """Return the paths, from the top of the extra state, of what is one with something before it.

    Args:
        model: The live model.
        ema: The live average, or averages.
        extra: The live extra state.
        captured: These three as they were captured: their tensors are aliases of the live ones.
    """
    if not _may_share(extra, captured):
        return []
    found: list[list[Any]] = []
    taken = Taken()
    taken.take(model, "the model")
    _walk(ema, ("ema",), taken, found)
    if ema is not None:
        taken.take(state_of(ema, "ema"), "the average")
    for key in in_order(extra or {}):
        _walk(extra[key], ("extra", key), taken, found)
    return found


def aliases_in(tree: Any, path: TreePath) -> bool:
    """Whether the save of the extra state ``tree`` says that what is at ``path`` is one with something before it."""
    told = tree.get(KEY) if isinstance(tree, dict) else None
    return isinstance(told, list) and any(isinstance(one, list) and tuple(one) == path for one in told)


def in_order(values: dict[Any, Any], keys: Iterable[Any] | None = None) -> list[Any]:
    """Return the keys of the extra state in the order of a walk.

    Objects first: they can only be filled, and values that share memory with them can be replaced.
    """
    return sorted(values if keys is None else keys, key=lambda key: not any_leaf(values.get(key), takes_state))


def _walk(value: Any, path: TreePath, taken: Taken, found: list[list[Any]]) -> None:
    if takes_state(value):
        tensors = (*value.parameters(), *value.buffers()) if isinstance(value, torch.nn.Module) else ()
        if any(taken.owner_of(tensor) is not None for tensor in tensors):
            found.append(list(path))
        taken.take(value, "")
    elif isinstance(value, torch.Tensor):
        if taken.owner_of(value) is not None:
            found.append(list(path))
        else:
            taken.take(value, "")
    elif is_mapping(value) or is_sequence(value):
        if not isinstance(value, tuple):
            if taken.knows(value):
                found.append(list(path))
                return
            taken.remember(value, value)
        for key, item in items_of(value):
            _walk(item, (*path, key), taken, found)
    elif isinstance(value, (set, bytearray)) or is_array(value):
        if taken.has_buffer(value):
            found.append(list(path))
        else:
            taken.take_buffer(value, "")


def _may_share(extra: Any, captured: tuple[Any, Any, Any]) -> bool:
    """Whether anything may be one with something else; rarely wrong where it says so, never where it does not."""
    model, ema, own = ([_address(one) for one in leaves(tree) if isinstance(one, torch.Tensor)] for tree in captured)
    addresses = [*set(model), *ema, *own]  # one model has tied weights, and no two averages may be one
    return len(set(addresses)) < len(addresses) or _has_arrays_or_twins(extra, set())


def _has_arrays_or_twins(value: Any, ids: set[int]) -> bool:
    if is_array(value) or isinstance(value, bytearray):
        return True
    if isinstance(value, set) or is_mapping(value) or (is_sequence(value) and not isinstance(value, tuple)):
        if id(value) in ids:
            return True
        ids.add(id(value))
    return any(_has_arrays_or_twins(item, ids) for _, item in items_of(value))


def _address(tensor: torch.Tensor) -> object:
    local = local_of(tensor)
    try:
        return local.untyped_storage().data_ptr() or object()
    except (RuntimeError, ValueError, NotImplementedError):  # made of other tensors
        return object()
