"""Which node gets which file of a save from where, when not every node has the files that its ranks read.

Rules:
* Every node works out the same plan from the same reports, and goes through it in order: no two wait for one another.
* From a mirror each node fetches what it lacks. If downloads are shared, it fetches only what no node has: of the nodes
  that lack such a file, the one with the least to fetch so far fetches it, and the others get it from there.
* Of the nodes that hold a file, the one with the least to send so far sends it, once: those that lack it pass it on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Holding", "Transfer", "fetched_by", "transfers"]


@dataclass(frozen=True)
class Holding:
    """What one node has of a save's files, and what it needs and lacks; by their plain paths.

    Attributes:
        unreadable: Files of its own that cannot be read now, with the reason.
    """

    has: frozenset[str] = frozenset()
    lacks: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def with_files(self, paths: Collection[str]) -> Holding:
        """Return what the node has and lacks once it has got these files."""
        got = frozenset(paths)
        return replace(self, has=self.has | got, lacks=tuple(path for path in self.lacks if path not in got))


@dataclass(frozen=True)
class Transfer:
    """One file, on its way from a node to others, in this order; nodes are named by the ranks that lead them."""

    path: str
    source: int
    to: tuple[int, ...]


def fetched_by(
    holdings: Mapping[int, Holding], named: Collection[str], sizes_bytes: Mapping[str, int], *, shared: bool
) -> dict[int, tuple[str, ...]]:
    """Return what each node fetches from a mirror.

    Args:
        holdings: What each node has and lacks, by the rank that leads it.
        named: The files that the mirror has.
        sizes_bytes: The size of each file of the save.
        shared: Whether a file is fetched once for all nodes, and not at all if one has it.
    """
    if not shared:
        lacked = {leader: [path for path in one.lacks if path in named] for leader, one in holdings.items()}
        return {leader: tuple(paths) for leader, paths in lacked.items() if paths}
    taken = dict.fromkeys(sorted(holdings), 0)
    fetched: dict[int, list[str]] = {}
    for path, to in _lacking(holdings).items():
        if path in named and not any(path in holding.has for holding in holdings.values()):
            fetched.setdefault(_least_busy(taken, to, sizes_bytes[path]), []).append(path)
    return {leader: tuple(paths) for leader, paths in fetched.items()}


def transfers(holdings: Mapping[int, Holding], sizes_bytes: Mapping[str, int]) -> tuple[list[Transfer], list[str]]:
    """Return what is sent, in order, and the paths that are needed and that no node has.

    Args:
        holdings: What each node has and lacks, by the rank that leads it.
        sizes_bytes: The size of each file of the save.
    """
    sent = dict.fromkeys(sorted(holdings), 0)
    found, absent = [], []
    for path, to in _lacking(holdings).items():
        sources = tuple(leader for leader, holding in sorted(holdings.items()) if path in holding.has)
        if not sources:
            absent.append(path)
            continue
        found.append(Transfer(path, _least_busy(sent, sources, sizes_bytes[path]), to))
    return found, absent


def _lacking(holdings: Mapping[int, Holding]) -> dict[str, tuple[int, ...]]:
    """Return the nodes that lack each file."""
    paths: dict[str, list[int]] = {}
    for leader, holding in sorted(holdings.items()):
        for path in dict.fromkeys(holding.lacks):
            paths.setdefault(path, []).append(leader)
    return {path: tuple(leaders) for path, leaders in sorted(paths.items())}


def _least_busy(load_bytes: dict[int, int], candidates: tuple[int, ...], size_bytes: int) -> int:
    """Return the candidate with the least to do so far, and give it this file too."""
    leader = min(candidates, key=lambda one: (load_bytes[one], one))
    load_bytes[leader] += size_bytes
    return leader
