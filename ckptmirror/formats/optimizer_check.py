"""What an optimizer may keep so that a load can give it back: looked at while saving, and refused with its place.

Rules:
* An optimizer's state is saved by the names of its parameters, once for all ranks: what has no such name, what two
  optimizers have under one name, and what each rank may have otherwise is refused.
* What comes back otherwise than it was, but is no loss, is said once.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptmirror.core.errors import UsageError
from ckptmirror.formats.memory import span_of
from ckptmirror.formats.rank_files import is_mapping, is_sequence

__all__ = [
    "check_shards",
    "is_split",
    "not_in_model",
    "refuse_local_state",
    "refuse_more",
    "refuse_second_owner",
    "refuse_spread",
    "refuse_strays",
    "some",
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
    """Refuse an optimizer that keeps the state of each parameter on one rank and gives all of it on none."""
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
    """Refuse an optimizer that keeps something beside state and param_groups, which has no place under names here."""
    more = sorted(str(key) for key in raw if key not in ("state", "param_groups"))
    if more:
        raise UsageError(
            f"The optimizer's state_dict() also holds {some(more)}, which would not be saved.", hint=_IN_EXTRA
        )


def refuse_second_owner(name: str, owners: Mapping[str, int], index: int) -> None:
    """Refuse a parameter that an earlier optimizer holds: ``owners`` has the number of each parameter's optimizer."""
    if owners.get(name, index) != index:
        raise UsageError(
            f"Two optimizers hold the parameter {name}, and an optimizer's state is saved by its parameter's name.",
            hint='Give one of them as TrainState(extra={"optimizer": …}), where it is saved by itself.',
        )


def refuse_strays(one: Any, raw: Mapping[Any, Any], keys: Mapping[Any, str], *, names: Any, several: bool) -> None:
    """Refuse state that belongs to no parameter and could not be told from one's, or from another optimizer's.

    Args:
        one: The optimizer.
        raw: Its state as it gives it.
        keys: The parameter's name of each key of ``raw`` that has one.
        names: Of all parameters of the model.
        several: Whether there are other optimizers.
    """
    strays = [key for key in raw if key not in keys]
    own = getattr(one, "state", None)
    covered = [key for key in own if key in keys] if isinstance(own, Mapping) and not _has_tensor_keys_only(own) else []
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


def _has_tensor_keys_only(state: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, torch.Tensor) for key in state)


def refuse_local_state(tree: Any, parameter: torch.Tensor, where: str) -> None:
    """Refuse plain values of a parameter that is cut up over ranks: each rank may have others, and one's are saved."""
    if is_split(parameter):
        for place, size in _plain_tensors(tree, where):
            raise UsageError(
                f"{place} is a plain tensor of {size} values beside a parameter that is sharded: each rank may hold "
                "other values, and only one rank's would be saved.",
                hint='Give this optimizer as TrainState(extra={"optimizer": …}): there each rank\'s state is kept, for '
                "the same number of ranks.",
            )


def is_split(parameter: torch.Tensor) -> bool:
    """Whether several ranks hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(size > 1 and not p.is_replicate() for size, p in zip(sizes, parameter.placements, strict=True))


def _plain_tensors(tree: Any, where: str) -> Iterator[tuple[str, int]]:
    if is_mapping(tree):
        for key, item in tree.items():
            yield from _plain_tensors(item, f"{where}.{key}")
    elif is_sequence(tree):
        for index, item in enumerate(tree):
            yield from _plain_tensors(item, f"{where}[{index}]")
    elif isinstance(tree, torch.Tensor):
        if not isinstance(tree, DTensor) and tree.numel() > 1:
            yield where, tree.numel()
    elif hasattr(tree, "dtype") and getattr(tree, "size", 0) > 1:  # an array
        yield where, int(tree.size)


def check_shards(tree: Any, shape: torch.Size | None, where: str) -> None:
    """Refuse what a load could not shard again: a DTensor that is not of its parameter's shape."""
    if is_mapping(tree):
        for key, item in tree.items():
            check_shards(item, shape, f"{where}.{key}")
    elif is_sequence(tree):
        for index, item in enumerate(tree):
            check_shards(item, shape, f"{where}[{index}]")
    elif isinstance(tree, DTensor) and tree.shape != shape:
        raise UsageError(
            f"{where} is a DTensor of shape {tuple(tree.shape)}, not of its parameter's: no load could shard it again.",
            hint="Keep it as a plain tensor (full_tensor()), or in the shape of the parameter.",
        )


def warn_of_shared_state(one: Any, state: Mapping[Any, Any], names: Mapping[Any, str]) -> None:
    """Say once of an optimizer that parameters share a tensor of its state: each comes back with one of its own.

    Args:
        one: The optimizer.
        state: By key, as it gives it.
        names: The parameter's name of each key.
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


def some(names: Sequence[str]) -> str:
    """Return the first few names, and how many there are more."""
    shown = ", ".join(list(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
