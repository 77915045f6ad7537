"""What the positions in the data of the ranks of one job have in common.

Rules:
* Ranks that read the same data, as with tensor parallelism, are one data rank. The ``rank`` of a cursor is always that.
* Ranks need not be in the same epoch, but what takes time or memory for each epoch between them has a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ckptmirror.core.errors import IntegrityError

__all__ = ["Cursor", "epochs_of", "one_for_each_rank"]

_MOST_EPOCHS = 10_000


class Cursor(Protocol):
    """How far one data rank has read."""

    @property
    def rank(self) -> int:
        """The data rank."""
        ...

    @property
    def world_size(self) -> int:
        """How many data ranks there are."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch that it is in."""
        ...


_Cursor = TypeVar("_Cursor", bound=Cursor)


def one_for_each_rank(cursors: Sequence[_Cursor]) -> list[_Cursor]:
    """Return one cursor for each data rank, in their order.

    Raises:
        IntegrityError: A rank is missing, or two cursors of one rank differ.
    """
    by_rank: dict[int, _Cursor] = {}
    for cursor in cursors:
        if by_rank.setdefault(cursor.rank, cursor) != cursor:
            raise IntegrityError(f"The save has two different positions in the data for data rank {cursor.rank}.")
    sizes = sorted({cursor.world_size for cursor in cursors})
    if len(sizes) != 1 or len(by_rank) != sizes[0] or set(by_rank) != set(range(sizes[0])):
        raise IntegrityError(
            f"The save has the positions in the data of data ranks {', '.join(map(str, sorted(by_rank)))} of "
            f"{' or '.join(map(str, sizes))}; what the others have read is not known."
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def epochs_of(cursors: Sequence[Cursor]) -> range:
    """Return the epochs from that of the slowest rank to that of the fastest.

    Raises:
        IntegrityError: They are too far apart to be those of one job.
    """
    epochs = [cursor.epoch for cursor in cursors]
    first, last = min(epochs), max(epochs)
    if last - first > _MOST_EPOCHS:
        raise IntegrityError(f"The save has positions in the data from epoch {first} to {last}: those of no job.")
    return range(first, last + 1)
