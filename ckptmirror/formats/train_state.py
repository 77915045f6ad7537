"""What a training loop hands over to be saved, and gets filled again by a load.

Rules:
* Nothing here imports torch: ``import ckptmirror`` stays light.
* Objects are held, never copied. Every one of them is optional, except the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckptmirror.core.errors import UsageError

__all__ = ["PARTS", "TrainState", "checked_parts", "left_out"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "dataloader", "extra", "rng")


@dataclass
class TrainState:
    """Everything that a resume needs.

    Attributes:
        model: A ``torch.nn.Module``, also wrapped by DDP, by ``torch.compile`` or sharded by ``fully_shard``.
        optimizer: A ``torch.optim.Optimizer``, or a list of them, over parameters of ``model``.
        scheduler: Anything with ``state_dict`` and ``load_state_dict``, or a list of such.
        scaler: A ``GradScaler``.
        ema: Shadow weights: a module, or anything with ``state_dict`` and ``load_state_dict``, or a list of such.
        dataloader: A data loader that knows its position (``state_dict``, ``load_state_dict``); others are left alone.
        extra: Values of your own: plain values, tensors (sharded ones too), arrays, objects with ``state_dict`` and
            ``load_state_dict``, and lists and dicts of these. A load writes back into this dict: tensors, arrays, sets
            and byte arrays in place, but for those that share memory with something that was saved with other values.
        training_config: Plain values that describe the run; they go into the meta.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None
    dataloader: Any = None
    extra: dict[str, Any] | None = None
    training_config: dict[str, Any] | None = None


def checked_parts(exclude: Collection[str]) -> frozenset[str]:
    """Return the parts of a state that a load leaves alone.

    Raises:
        UsageError: One is not among :data:`PARTS`.
    """
    unknown = [exclude] if isinstance(exclude, str) else [part for part in exclude if part not in PARTS]
    if unknown:
        raise UsageError(
            f"exclude holds {', '.join(map(repr, unknown))}; it is a sequence of parts of the state, of "
            f"{', '.join(map(repr, PARTS))}.",
            hint='To leave one part alone give a tuple: exclude=("optimizer",).',
        )
    return frozenset(exclude)


def left_out(state: TrainState, exclude: Collection[str]) -> tuple[str, ...]:
    """Return a line for each part of ``state`` that a load with ``exclude`` leaves alone."""
    here = (part for part in PARTS if part == "rng" or getattr(state, part) is not None)
    return tuple(f"{part}: left out (exclude), it stays as it is" for part in here if part in exclude)
