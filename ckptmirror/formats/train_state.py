"""The state that a training loop passes to a save, and that a load fills.

Rules:
* Nothing here imports torch until a state is created, so ``import ckptmirror`` stays light.
* A part that could not be saved is refused when it is passed, since the first save may be hours away.
* The state holds references, not copies. Every part is optional, except the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptmirror.core.containers import has, place, placed_leaves
from ckptmirror.core.errors import UsageError
from ckptmirror.core.load_options import PARTS
from ckptmirror.core.per_rank import PerRank, check_per_rank

__all__ = ["PARTS", "SETTINGS", "TrainState", "check_is_state", "check_state", "left_out"]

SETTINGS = ("training_config", "merge_extra", "per_rank")  # what else a state has, which no load fills


@dataclass
class TrainState:
    """Everything that a resume needs.

    Attributes:
        model: A ``torch.nn.Module``, also wrapped by DDP, by ``torch.compile`` or sharded by ``fully_shard``.
        optimizer: A ``torch.optim.Optimizer``, or a list of them, over parameters of ``model``.
        scheduler: Anything with ``state_dict`` and ``load_state_dict``, or a list of such.
        scaler: A ``GradScaler``.
        ema: Shadow weights: a module, or anything with ``state_dict`` and ``load_state_dict``, or a list of such.
        dataloader: A data loader that can save its position (``state_dict``, ``load_state_dict``); others are ignored.
        extra: Your own values: plain values, paths, times, members of enums, tensors (sharded ones too), arrays, random
            generators, objects with ``state_dict`` and ``load_state_dict``, and lists and dicts of these. A load writes
            back into this dict, filling tensors, arrays, sets, byte arrays and generators in place, except those that
            share memory with something saved with other values.
        training_config: Plain values that describe the run; they go into the meta.
        merge_extra: By key of ``extra``, how a rank gets its value if the number of ranks has changed: a function of
            the values of all ranks of the save, this rank and the number of ranks. Other values are taken as they are,
            by a new rank from rank 0. An object with ``merge_state_dicts``, which has the same arguments, needs none.
        per_rank: Patterns (``"experts.*"``) of names of parameters and buffers of which each rank has values of its
            own. They and their optimizer state are saved and restored for each rank. In a dict, each pattern has a
            function like those of ``merge_extra``, for another number of ranks, or None: that is refused.

    Raises:
        UsageError: A part is not of these kinds, such as the model's ``state_dict()`` in place of the model.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None
    dataloader: Any = None
    extra: dict[str, Any] | None = None
    training_config: dict[str, Any] | None = None
    merge_extra: Mapping[str, Callable[[Sequence[Any], int, int], Any]] | None = None
    per_rank: PerRank = ()

    def __post_init__(self) -> None:
        check_state(self)


def check_is_state(state: TrainState) -> None:
    """Check that what was passed as a state is one.

    Raises:
        UsageError: It is something else, such as the model itself.
    """
    if not isinstance(state, TrainState):
        raise UsageError(
            f"The state is {_kind(state)}; it must be a TrainState.",
            hint="Write TrainState(model=model, optimizer=optimizer), and pass that.",
        )


def check_state(state: TrainState) -> None:
    """Check that every part of ``state`` is of its kind. Its attributes may have been set after it was made.

    Raises:
        UsageError: One is not; names it, and what to pass.
    """
    check_is_state(state)
    from torch.nn import Module

    if not isinstance(state.model, Module):
        hint = "Pass the module itself, TrainState(model=model): each save asks it for its state_dict()."
        if isinstance(state.model, list | tuple):
            hint = "Pass one module that holds them all: TrainState(model=torch.nn.ModuleList([...]))."
        raise UsageError(f"TrainState.model is {_kind(state.model)}, not a torch.nn.Module.", hint=hint)
    for part in ("optimizer", "scheduler", "scaler", "ema"):
        needed = ("state_dict", "load_state_dict", *(["param_groups"] if part == "optimizer" else []))
        objects = getattr(state, part)
        for path, value in placed_leaves(objects) if objects is not None else ():
            if lacking := [name for name in needed if not has(value, name)]:
                raise UsageError(
                    f"{place(objects, path, f'TrainState.{part}')} is {_kind(value)}, which has no {lacking[0]}.",
                    hint=f"Pass the {part} itself, or a list of several: each save asks for its state_dict().",
                )
    for part in ("extra", "training_config", "merge_extra"):
        value = getattr(state, part)
        if not isinstance(value, Mapping | None):
            raise UsageError(f"TrainState.{part} is {_kind(value)}, not a dict.", hint=f'Pass {part}={{"name": ...}}.')
    check_per_rank(state.per_rank)
    for key, function in (state.merge_extra or {}).items():
        if key not in (state.extra or {}):
            there = ", ".join(map(repr, state.extra or {})) or "nothing"
            raise UsageError(
                f"merge_extra has a function for {key!r}, and extra has no {key!r}.", hint=f"extra has {there}."
            )
        if not callable(function):
            raise UsageError(f"TrainState.merge_extra[{key!r}] is {_kind(function)}, not a function.")


def _kind(value: Any) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else f"of type {type(value).__qualname__}"


def left_out(state: TrainState, exclude: Collection[str]) -> tuple[str, ...]:
    """Return a line for each part of ``state`` that a load with ``exclude`` leaves unchanged."""
    here = (part for part in PARTS if part == "rng" or getattr(state, part) is not None)
    return tuple(f"{part}: left out (exclude), it stays as it is" for part in here if part in exclude)
