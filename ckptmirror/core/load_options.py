"""What the caller of a load wants of it, apart from the state and the save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptmirror.core.errors import UsageError
from ckptmirror.core.name_rules import ALL_NAMES, NameRules, Rename
from ckptmirror.core.rank_names import rank_name
from ckptmirror.core.stages import Stages

__all__ = ["PARTS", "LoadOptions", "check_given_alike", "checked_parts"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "dataloader", "extra", "rng")
"""The parts of a state."""

_OF_A_STAGE = ("exclude", "strict")


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

    def texts(self) -> dict[str, str]:
        """Return what was given, by the name of its parameter, for a comparison and for people."""
        return {
            "exclude": ", ".join(sorted({*self.exclude, *self.rules.patterns})),
            "rename": _rename_text(self.rules.rename),
            "strict": str(bool(self.rules.strict)),
            "command_wins": ", ".join(sorted(set(self.command_wins))),
            "allow_cold_optimizer": str(bool(self.allow_cold_optimizer)),
            "verify_loaded": str(bool(self.verify_loaded)),
        }


def _rename_text(rename: Rename) -> str:
    """Name a function; list the pairs of a mapping, in its order only where a name may match two patterns."""
    if not isinstance(rename, Mapping):
        return str(getattr(rename, "__qualname__", type(rename).__name__))
    pairs = [f"{old} -> {new}" for old, new in rename.items()]
    return ", ".join(pairs if any(set(old) & set("*?[") for old in rename) else sorted(pairs))


def checked_parts(exclude: Collection[str]) -> frozenset[str]:
    """Return the parts of a state that a load should leave unchanged.

    Raises:
        UsageError: One is not among :data:`PARTS`.
    """
    is_one = isinstance(exclude, str) or not isinstance(exclude, Collection)
    unknown = [exclude] if is_one else [part for part in exclude if part not in PARTS]
    if unknown:
        raise UsageError(
            f"exclude holds {', '.join(map(repr, unknown))}; it must be a tuple of names among "
            f"{', '.join(map(repr, PARTS))}.",
            hint='Write exclude=("optimizer", "model.head.*"), for example: patterns of tensors begin with "model.".',
        )
    return frozenset(exclude)


def check_given_alike(given: Sequence[Mapping[str, str]], stages: Stages, nodes_of_ranks: Sequence[int]) -> None:
    """Check that all ranks were given the same; what is about this model's names, all ranks of a stage.

    Args:
        given: Of each rank, texts by the name of the parameter.
        stages: The stage of each rank.
        nodes_of_ranks: The node of each rank; empty if the job has one node.

    Raises:
        UsageError: They were not; the message has both values.
    """
    for rank, theirs in enumerate(given):
        for name, value in theirs.items():
            first = stages.peers(rank, len(given))[0] if name in _OF_A_STAGE else 0
            if value != given[first][name]:
                said = [f"{rank_name(one, nodes_of_ranks)} has {given[one][name] or 'none'}" for one in (first, rank)]
                raise UsageError(
                    f"The ranks of this job differ in {name}: {', '.join(said)}.",
                    hint="Start all ranks with the same script and the same arguments. Nothing was loaded.",
                )
