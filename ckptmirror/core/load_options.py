"""What the caller of a load wants of it, apart from the state and the save."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ckptmirror.core.errors import UsageError
from ckptmirror.core.name_rules import ALL_NAMES, NameRules

__all__ = ["PARTS", "LoadOptions", "checked_parts"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "dataloader", "extra", "rng")
"""The parts of a state."""


@dataclass(frozen=True)
class LoadOptions:
    """What to load, and what to accept.

    Attributes:
        exclude: Parts of the state to leave unchanged.
        command_wins: Settings of optimizers and schedulers that are this command's after the load.
        allow_cold_optimizer: Whether only one of the save and the state may have an optimizer.
        verify_loaded: Whether to prove after the load that each tensor in memory is what was saved.
        rules: Which of the model's tensors are loaded, and under which names.
    """

    exclude: frozenset[str] = frozenset()
    command_wins: tuple[str, ...] = ()
    allow_cold_optimizer: bool = True
    verify_loaded: bool = True
    rules: NameRules = ALL_NAMES


def checked_parts(exclude: Collection[str]) -> frozenset[str]:
    """Return the parts of a state that a load should leave unchanged.

    Raises:
        UsageError: One is not among :data:`PARTS`.
    """
    unknown = [exclude] if isinstance(exclude, str) else [part for part in exclude if part not in PARTS]
    if unknown:
        raise UsageError(
            f"exclude holds {', '.join(map(repr, unknown))}; it must be a tuple of names among "
            f"{', '.join(map(repr, PARTS))}.",
            hint='Write exclude=("optimizer", "model.head.*"), for example: patterns of tensors begin with "model.".',
        )
    return frozenset(exclude)
