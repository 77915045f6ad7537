"""The seam between ckptmirror and the other ranks of the job.

Rules:
* Ranks talk over their own channel, never over the training's process group.
* Only one thread at a time uses a channel; a second thread opens its own with :meth:`Ranks.channel`, on all ranks in
  the same order.
* Every exchange has a time limit. A rank that failed still takes part, with its error, so one rank's error frees the
  others with that error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ckptmirror.ranks.messages import pack_value, unpack_value

__all__ = ["Ranks", "collect_result", "exchange_result"]

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of the job, as one of them sees them."""

    @property
    def rank(self) -> int:
        """This process's global rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def node(self) -> int:
        """This process's node, from 0. Ranks that share one root are one node."""
        ...

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        ...

    @property
    def local_rank(self) -> int:
        """This process's rank within its node, from 0."""
        ...

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        ...

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """All ranks on this node, ascending; the first leads it. Ranks of other nodes may be between them."""
        ...

    @property
    def nodes_of_ranks(self) -> tuple[int, ...]:
        """The node of each rank; empty in a job of one node."""
        ...

    @property
    def is_leader(self) -> bool:
        """Whether this process owns the table, the meta and the uploads of its node (``local_rank == 0``)."""
        ...

    @property
    def torch_group(self) -> Any:
        """The channel's own CPU (gloo) process group, for torch APIs that need one; None in a single process."""
        ...

    def exchange(self, value: T, *, what: str, error: BaseException | None = None) -> list[T]:
        """Send ``value`` (picklable) or ``error`` to all ranks and return every rank's value, by rank.

        Args:
            value: This rank's value; ignored if it sends an error.
            what: A few words for messages ("report artifacts of step 200").
            error: This rank's failure. The rank still takes part, and its own error is raised here again.

        Raises:
            RankFailed: Another rank sent an error; the message names the rank (and its node) and quotes the error.
            WaitTimeout: Not all ranks took part within the channel's limit.
        """
        ...

    def send(self, data: memoryview, to: int) -> None:
        """Send bytes to one rank, which receives as many with :meth:`receive`.

        Raises:
            RankFailed: The other rank is gone, or did not take them within the channel's limit.
        """
        ...

    def receive(self, into: memoryview, source: int) -> None:
        """Receive bytes from one rank, which sends as many with :meth:`send`.

        Raises:
            RankFailed: The other rank is gone, or sent nothing within the channel's limit.
        """
        ...

    def channel(self, name: str) -> Ranks:
        """Open another channel between the same ranks (all ranks call this in the same order)."""
        ...

    def close(self) -> None:
        """Release the channel. Needs no other rank."""
        ...


def exchange_result(ranks: Ranks, work: Callable[[], T], *, what: str) -> list[T]:
    """Do ``work`` on this rank, send its result to all ranks and return every rank's result, by rank.

    Raises:
        BaseException: Whatever ``work`` raised here; otherwise the same as :meth:`Ranks.exchange`.
    """
    try:
        result = work()
    except BaseException as error:
        ranks.exchange(None, what=what, error=error)  # raises it again after the other ranks have it
        raise
    return ranks.exchange(result, what=what)


def collect_result(ranks: Ranks, work: Callable[[], T], *, what: str) -> list[T]:
    """Do ``work`` on this rank and return every rank's result, on rank 0; the others return an empty list.

    For results that may be large: no other rank makes objects of them.

    Raises:
        BaseException: As :func:`exchange_result`.
    """
    packed = exchange_result(ranks, lambda: pack_value(work()), what=what)
    return [unpack_value(one) for one in packed] if ranks.rank == 0 else []
