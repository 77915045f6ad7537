"""Rewinding: which saves a new attempt from an older save leaves behind, and which it puts back on the lineage.

Rules:
* The lineage decides both, computed once with and once without the attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ckptmirror.core.model import Attempt, SaveRef
from ckptmirror.core.start.lineage import Lineage, SaveFacts, lineage

__all__ = ["Fork", "fork_at"]


@dataclass(frozen=True)
class Fork:
    """What an attempt that continues from a save does to the lineage; each by step, then save id.

    Attributes:
        superseded: The saves that are off the lineage from then on.
        restored: The saves that are on it again, after an earlier fork had left them.
    """

    superseded: tuple[SaveFacts, ...]
    restored: tuple[SaveFacts, ...]


def fork_at(
    attempts: Sequence[Attempt],
    saves: Sequence[SaveFacts],
    parent: SaveRef | None,
    counting: Collection[str] | None = None,
) -> Fork:
    """Return what a new attempt from ``parent`` would change.

    Args:
        attempts: All known attempts.
        saves: All known saves, also those that are not whole: they would be left behind too.
        parent: The save to continue from; None: step 0.
        counting: The ids of the attempts that count; None: all of them.

    Raises:
        LineageError: The data contradicts itself.
    """
    number = max((attempt.number for attempt in attempts), default=-1) + 1
    fork = Attempt("the fork", number, parent)
    before = lineage(attempts, saves, counting)
    after = lineage([*attempts, fork], saves, None if counting is None else {*counting, fork.id})
    was_on, is_on = _on(before), _on(after)
    return Fork(
        superseded=_sorted(save for save_id, save in was_on.items() if save_id not in is_on),
        restored=_sorted(save for save_id, save in is_on.items() if save_id not in was_on),
    )


def _on(order: Lineage) -> dict[str, SaveFacts]:
    return {save.save_id: save for save in (*order.current.values(), *order.replaced)}


def _sorted(saves: Iterable[SaveFacts]) -> tuple[SaveFacts, ...]:
    return tuple(sorted(saves, key=lambda save: (save.step, save.save_id)))
