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
from typing import Any, Literal, Protocol, TypeVar

__all__ = ["Ranks", "Readers", "exchange_result", "gather_result"]

T = TypeVar("T")

Readers = Literal["node", "first"]
"""Who reads the values of a :meth:`Ranks.gather`: the ranks of each sender's node, or rank 0 alone."""


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
    def timeout_s(self) -> float:
        """The limit of every wait on this channel; infinite in a single process."""
        ...

    @property
    def torch_group(self) -> Any:
        """The channel's own CPU (gloo) process group, for torch APIs that need one; None in a single process."""
        ...

    @property
    def lost_torch_group(self) -> bool:
        """Whether a collective on ``torch_group`` failed here, so that none can succeed before it is renewed."""
        ...

    def renew_torch_group(self) -> None:
        """Replace ``torch_group``. All ranks call this at the same place, after an exchange; any thread may.

        Raises:
            UsageError: The training destroyed all groups.
            WaitTimeout: Not all ranks took part within the channel's limit.
        """
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

    def gather(self, value: T, *, what: str, to: Readers, error: BaseException | None = None) -> dict[int, T]:
        """Do the same as :meth:`exchange`, but return, by rank, only the values that are sent to this rank.

        An exchange of values that all differ costs the square of the number of ranks; this does not.

        Args:
            value: This rank's value.
            what: As in :meth:`exchange`.
            to: Who gets it: all ranks of this rank's node, or rank 0 alone. Rank 0 gets every value in any case.
            error: As in :meth:`exchange`.

        Raises:
            RankFailed: As in :meth:`exchange`; every rank learns of an error.
            WaitTimeout: As in :meth:`exchange`.
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

    def channel(self, name: str, *, more_s: float = 0.0) -> Ranks:
        """Open another channel between the same ranks (all ranks call this in the same order).

        Args:
            name: What it is for, in a word.
            more_s: How much longer than on this channel a wait on the new one may take.
        """
        ...

    def close(self) -> None:
        """Release the channel. Needs no other rank."""
        ...


def exchange_result(ranks: Ranks, work: Callable[[], T], *, what: str) -> list[T]:
    """Do ``work`` on this rank, send its result to all ranks and return every rank's result, by rank.

    Raises:
        BaseException: Whatever ``work`` raised here; otherwise the same as :meth:`Ranks.exchange`.
    """
    return ranks.exchange(_result(ranks, work, what), what=what)


def gather_result(ranks: Ranks, work: Callable[[], T], *, what: str, to: Readers) -> dict[int, T]:
    """Do the same as :func:`exchange_result`, with :meth:`Ranks.gather`."""
    return ranks.gather(_result(ranks, work, what), what=what, to=to)


def _result(ranks: Ranks, work: Callable[[], T], what: str) -> T:
    try:
        return work()
    except BaseException as error:
        ranks.exchange(None, what=what, error=error)  # raises it again after the other ranks have it
        raise
