"""Which node sends which file of a save to which other nodes, when no mirror has the save yet.

Rules:
* Every node works out the same list from the same reports, and goes through it in order: no two wait for one another.
* Of the nodes that hold a file, the one with the least to send so far sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Holding", "Transfer", "transfers"]


@dataclass(frozen=True)
class Holding:
    """What one node has of a save's files, and what it needs and lacks; by their plain paths."""

    has: frozenset[str] = frozenset()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Transfer:
    """One file, on its way from a node to others; nodes are named by the ranks that lead them."""

    path: str
    source: int
    to: tuple[int, ...]


def transfers(holdings: Mapping[int, Holding], sizes_bytes: Mapping[str, int]) -> tuple[list[Transfer], list[str]]:
    """Return what is sent, in order, and the paths that are needed and that no node has.

    Args:
        holdings: What each node has and lacks, by the rank that leads it.
        sizes_bytes: The size of each file of the save.
    """
    sent = dict.fromkeys(holdings, 0)
    lack: dict[str, list[int]] = {}
    for leader, holding in sorted(holdings.items()):
        for path in dict.fromkeys(holding.lacks):
            lack.setdefault(path, []).append(leader)
    found, absent = [], []
    for path, to in sorted(lack.items()):
        sources = [leader for leader, holding in sorted(holdings.items()) if path in holding.has]
        if not sources:
            absent.append(path)
            continue
        source = min(sources, key=lambda leader: (sent[leader], leader))
        sent[source] += sizes_bytes[path] * len(to)
        found.append(Transfer(path, source, tuple(to)))
    return found, absent
