"""The job that has one rank.

Rules:
* It behaves like a channel with one rank: a value comes back as a list of one, an error is raised again.
* Standard library only.
"""

from __future__ import annotations

import math
from typing import TypeVar

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.base import Readers

__all__ = ["SingleRank"]

T = TypeVar("T")


class SingleRank:
    """The one rank of a job without torch.distributed."""

    rank = 0
    world_size = 1
    node = 0
    nodes = 1
    local_rank = 0
    local_world_size = 1
    node_ranks = (0,)
    nodes_of_ranks: tuple[int, ...] = ()
    is_leader = True
    timeout_s = math.inf
    torch_group = None
    lost_torch_group = False

    def renew_torch_group(self) -> None:
        """Nothing to replace."""

    def exchange(self, value: T, *, what: str, error: BaseException | None = None) -> list[T]:  # noqa: ARG002  as in Ranks
        """Return ``[value]``, or raise ``error``."""
        if error is not None:
            raise error
        return [value]

    def gather(self, value: T, *, what: str, to: Readers, error: BaseException | None = None) -> dict[int, T]:  # noqa: ARG002  as in Ranks
        """Return ``{0: value}``, or raise ``error``."""
        return dict(enumerate(self.exchange(value, what=what, error=error)))

    def send(self, data: memoryview, to: int) -> None:  # noqa: ARG002  as in Ranks
        """Raise UsageError: there is no other rank."""
        raise UsageError("There is no other rank.")

    def receive(self, into: memoryview, source: int) -> None:  # noqa: ARG002  as in Ranks
        """Raise UsageError: there is no other rank."""
        raise UsageError("There is no other rank.")

    def channel(self, name: str, *, more_s: float = 0.0) -> SingleRank:  # noqa: ARG002  as in Ranks
        """Return another channel of one."""
        return SingleRank()

    def close(self) -> None:
        """Nothing to free."""
