"""How large a save of a live state will be: an estimate, before anything is saved.

Rules:
* Only tensors are counted: what else a save has is small beside them.
* No rank is talked to, and no method of the user's objects is called, since they may not be ready.
* What several ranks have alike is written once by one of them, so each counts its share. The estimates of all ranks add
  up to the save.
* An optimizer creates its state at its first step. Until then the state counts as it will be, by the names of the
  optimizer's settings: ``betas`` mean two values for each of a parameter, ``momentum`` one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import leaves
from ckptmirror.core.model import Kind
from ckptmirror.core.per_rank import matching
from ckptmirror.formats.names import live_parameters
from ckptmirror.formats.optimizer_state import optimizers_of
from ckptmirror.formats.shards import local_of
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.weights_only_values import has_shards

__all__ = ["estimated_bytes"]


def estimated_bytes(state: TrainState, kinds: Sequence[Kind], *, rank: int, world_size: int) -> int:
    """Return about how many bytes this rank will write of a save of ``state``.

    Args:
        state: What will be saved.
        kinds: The kinds of the save.
        rank: This process's rank.
        world_size: Number of ranks.
    """
    parameters, buffers = list(state.model.parameters()), list(state.model.buffers())
    moments = list(_moments(state.optimizer))
    is_first, sharded = rank == 0, has_shards(state.model)
    total = 0.0
    if "dcp" in kinds:
        total += sum(_held_bytes(one) * times / _copies(one, world_size) for one, times in moments)
        total += sum(_held_bytes(one) / _copies(one, world_size) for one in parameters)
        total += sum(map(_held_bytes, buffers)) if is_first else 0
    if "model" in kinds:
        total += sum(_full_bytes(one) for one in (*parameters, *buffers)) if is_first else 0
        total += sum(_held_bytes(one) * times for one, times in moments) if is_first or sharded else 0
    total += sum(
        _held_bytes(one) for one in _tensors(state.ema) if is_first or state.per_rank or isinstance(one, DTensor)
    )
    total += sum(map(_held_bytes, _tensors(state.extra)))
    if not is_first and state.per_rank:  # with moments in proportion
        named = dict(live_parameters(state.model))
        own = sum(_held_bytes(named[name]) for name in matching(state.per_rank, named))
        moved = sum(_held_bytes(one) * times for one, times in moments)
        total += own * (1 + moved / max(1, sum(map(_held_bytes, parameters))))
    return int(total)


def _moments(optimizer: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the tensors of the optimizers' state, each with how often it counts."""
    for one in optimizers_of(optimizer):
        state = getattr(one, "state", None)
        for group in one.param_groups:
            for parameter in group["params"]:
                held = state.get(parameter) if isinstance(state, Mapping) else None
                if held:
                    yield from ((value, 1) for value in leaves(held) if isinstance(value, torch.Tensor))
                else:
                    yield parameter, _values_to_come(group)


def _values_to_come(group: Mapping[str, Any]) -> int:
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return 1 if group.get("momentum") else 0


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    """Return the tensors in a tree of values and modules."""
    for leaf in leaves(tree):
        if isinstance(leaf, torch.nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _copies(tensor: torch.Tensor, world_size: int) -> int:
    """Return how many ranks have the same values as this one."""
    if not isinstance(tensor, DTensor):
        return world_size
    mesh = tensor.device_mesh
    return prod(mesh.size(axis) for axis, placement in enumerate(tensor.placements) if placement.is_replicate())


def _held_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes this rank has of a tensor."""
    local = local_of(tensor)
    return local.numel() * local.element_size()


def _full_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
