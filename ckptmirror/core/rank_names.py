"""How messages name a rank: where a job has several nodes, with its node, since that is the machine to look at."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["rank_name"]


def rank_name(rank: int, nodes_of_ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``rank 3 on node 1``.

    Args:
        rank: The rank.
        nodes_of_ranks: The node of each rank; empty if the job has one node.
    """
    return f"rank {rank} on node {nodes_of_ranks[rank]}" if rank < len(nodes_of_ranks) else f"rank {rank}"
