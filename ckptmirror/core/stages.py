"""Stages: the parts of a model that different ranks hold, as in pipeline parallel training.

Rules:
* Each rank has one stage, named by a number; ranks of one stage hold the same part of the model.
* Without stages every rank holds the whole model, or shards of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptmirror.core.errors import ConfigError

__all__ = ["NO_STAGES", "Stages", "stages_of"]


@dataclass(frozen=True)
class Stages:
    """Which rank has which stage.

    Attributes:
        of_ranks: The stage of each rank; empty if there are no stages.
    """

    of_ranks: tuple[int, ...] = ()

    def of(self, rank: int) -> int | None:
        """Return a rank's stage; None if there are no stages."""
        return self.of_ranks[rank] if self.of_ranks else None

    def peers(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part of the model as ``rank``, ascending, itself included."""
        if not self.of_ranks:
            return tuple(range(world_size))
        return tuple(other for other, stage in enumerate(self.of_ranks) if stage == self.of_ranks[rank])


NO_STAGES = Stages()


def stages_of(given: Sequence[int | None]) -> Stages:
    """Return the stages, from what each rank was given.

    Raises:
        ConfigError: Some ranks have one, and others have none.
    """
    known = [stage for stage in given if stage is not None]
    if not known:
        return NO_STAGES
    if len(known) < len(given):
        raise ConfigError(
            f"Rank {given.index(None)} has no pp_rank, and other ranks have one.",
            hint="Pass pp_rank on every rank: the number of the stage that it holds.",
        )
    return Stages(tuple(known))
