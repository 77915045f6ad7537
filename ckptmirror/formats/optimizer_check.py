"""Checks, while saving, that a load can restore everything that an optimizer keeps.

Rules:
* An optimizer's state is saved by parameter name, once for all ranks. State is refused if it has no such name, if two
  optimizers have it under one name, or if it may differ between ranks.
* State that comes back changed, but without loss, is logged once.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import place, placed_leaves
from ckptmirror.core.errors import UsageError
from ckptmirror.formats.already_filled import span_of
from ckptmirror.formats.names import some

__all__ = [
    "check_shards",
    "is_split",
    "not_in_model",
    "refuse_local_state",
    "refuse_more",
    "refuse_second_owner",
    "refuse_spread",
    "refuse_strays",
    "warn_of_shared_state",
]

_log = logging.getLogger("ckptmirror.formats")
_IN_EXTRA = 'Give this optimizer as TrainState(extra={"optimizer": …}), where all of its state is kept.'
_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def not_in_model(parameter: torch.Tensor, index: int, params: Sequence[torch.Tensor]) -> UsageError:
    """Return the error for a parameter of group ``index`` that is not the model's."""
    position = next(place for place, one in enumerate(params) if one is parameter)
    return UsageError(
        f"Parameter {position} of group {index}, of shape {tuple(parameter.shape)}, is not in the model: its state has "
        "no name to be saved under.",
        hint="Give all that the optimizer trains as one model: TrainState(model=nn.ModuleDict({...})).",
    )


def refuse_spread(one: Any, where: str) -> None:
    """Refuse an optimizer that keeps each parameter's state on one rank only, so that no rank can return all of it."""
    package = sys.modules.get("torch.distributed.optim")
    kind = getattr(package, "ZeroRedundancyOptimizer", None)
    if kind is not None and isinstance(one, kind):
        raise UsageError(
            f"The {where} is a ZeroRedundancyOptimizer: its state is spread over the ranks and put together only "
            "by a collective of its own.",
            hint="Shard with fully_shard, under which an ordinary optimizer is sharded too. Or call "
            "consolidate_state_dict(to=rank) for each rank in turn, have that rank keep its state_dict() as a value in "
            "extra, and give it back by load_state_dict() after resume().",
        )


def refuse_more(raw: Mapping[str, Any]) -> None:
    """Refuse an optimizer that keeps more than state and param_groups, since that cannot be saved by name."""
    more = sorted(str(key) for key in raw if key not in ("state", "param_groups"))
    if more:
        raise UsageError(
            f"The optimizer's state_dict() also holds {some(more)}, which would not be saved.", hint=_IN_EXTRA
        )


def refuse_second_owner(name: str, owners: Mapping[str, int], index: int) -> None:
    """Refuse a parameter that an earlier optimizer owns; ``owners`` has the number of each parameter's optimizer."""
    if owners.get(name, index) != index:
        raise UsageError(
            f"Two optimizers train the parameter {name}. Optimizer state is saved under the parameter's name, so only "
            "one of them can be saved.",
            hint='Give one of them as TrainState(extra={"optimizer": …}), where it is saved by itself.',
        )


def refuse_strays(one: Any, raw: Mapping[Any, Any], keys: Mapping[Any, str], *, names: Any, several: bool) -> None:
    """Refuse state of no parameter that could be confused with a parameter's, or with another optimizer's.

    Args:
        one: The optimizer.
        raw: Its state, as its ``state_dict`` returns it.
        keys: The parameter name for each key of ``raw`` that has one.
        names: The names of all parameters of the model.
        several: Whether there are other optimizers.
    """
    strays = [key for key in raw if key not in keys]
    own = getattr(one, "state", None)
    own = own if isinstance(own, Mapping) else {}
    has_others = any(not isinstance(key, torch.Tensor) for key in own)
    covered = [key for key in own if key in keys] if has_others else []
    for key in (*strays, *covered):
        if not isinstance(key, str) or key in names:
            raise UsageError(
                f"The optimizer has state under the key {key!r}, which is not a parameter's and would not be restored.",
                hint=_IN_EXTRA,
            )
    if strays and several:
        raise UsageError(
            f"An optimizer has state under {some(sorted(map(str, strays)))}, which is not a parameter's: with several "
            "optimizers, a load could not tell which one it belongs to.",
            hint=_IN_EXTRA,
        )


def refuse_local_state(tree: Any, parameter: torch.Tensor, where: str) -> None:
    """Refuse plain values of a sharded parameter: they may differ between ranks, and only one rank's would be saved."""
    for path, leaf in placed_leaves(tree) if is_split(parameter) else ():
        is_array = hasattr(leaf, "dtype") and not isinstance(leaf, DTensor)
        size = (leaf.numel() if isinstance(leaf, torch.Tensor) else getattr(leaf, "size", 0)) if is_array else 0
        if size > 1:
            raise UsageError(
                f"{place(tree, path, where)} is a plain tensor of {size} values beside a parameter that is sharded: "
                "each rank may hold other values, and only one rank's would be saved.",
                hint='Give this optimizer as TrainState(extra={"optimizer": …}): there each rank\'s state is kept, for '
                "the same number of ranks.",
            )


def is_split(parameter: torch.Tensor) -> bool:
    """Whether several ranks hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(size > 1 and not p.is_replicate() for size, p in zip(sizes, parameter.placements, strict=True))


def check_shards(tree: Any, shape: torch.Size | None, where: str) -> None:
    """Refuse a DTensor of another shape than its parameter, since a load could not shard it again."""
    for path, leaf in placed_leaves(tree):
        if isinstance(leaf, DTensor) and leaf.shape != shape:
            raise UsageError(
                f"{place(tree, path, where)} is a DTensor of shape {tuple(leaf.shape)}, not of its parameter's: no "
                "load could shard it again.",
                hint="Keep it as a plain tensor (full_tensor()), or in the shape of the parameter.",
            )


def warn_of_shared_state(one: Any, state: Mapping[Any, Any], names: Mapping[Any, str]) -> None:
    """Warn once if parameters share a tensor of an optimizer's state: after a load each has its own copy.

    Args:
        one: The optimizer.
        state: Its state by key, as its ``state_dict`` returns it.
        names: The parameter name for each key.
    """
    if not state or not isinstance(one, torch.optim.Optimizer) or one in _looked_at:
        return
    _looked_at.add(one)
    seen: dict[tuple[Any, int, int], str] = {}
    for parameter, values in state.items():
        for key, value in values.items() if isinstance(values, Mapping) and parameter in names else ():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            span = span_of(value) if plain else None
            if span is None:
                continue
            first = seen.setdefault((span.storage, span.begin, span.end), names[parameter])
            if first != names[parameter]:
                _log.warning(
                    "optimizer: the state %r of %s and %s is one tensor; after a resume each has one of its own",
                    key,
                    first,
                    names[parameter],
                )
                return
