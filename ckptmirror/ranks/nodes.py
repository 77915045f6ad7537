"""Which ranks are one node: those whose roots are one directory.

Rules:
* Ranks with one key share a root. Of those with different keys, the ones that see each other's tokens do: one rank of
  each key leaves a token in its root and looks for the tokens of the others.
* That one of two saw the other is enough, since a network file system may show a new file late.
* Nodes are ordered by their lowest rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["NodeLayout", "Probe", "joined", "layout_of", "ranks_by_node"]


class Probe(Protocol):
    """The root of one rank, as far as the other ranks see it."""

    def leave(self) -> str:
        """Leave a token in the root and return its name, or "" if there is no room for one."""
        ...

    def seen(self, tokens: Iterable[str]) -> list[int]:
        """Return which of the tokens are in the root, by position."""
        ...

    def remove(self) -> None:
        """Remove the token."""
        ...


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """A rank's node, and its place within the node.

    Attributes:
        node: The node, from 0.
        nodes: How many there are.
        ranks: All ranks of the node, ascending. Other nodes may have ranks between them.
        rank: The rank itself.
        of_ranks: The node of each rank; empty if there is one node.
    """

    node: int
    nodes: int
    ranks: tuple[int, ...]
    rank: int
    of_ranks: tuple[int, ...] = ()

    @property
    def local_rank(self) -> int:
        """The rank's place within its node, from 0."""
        return self.ranks.index(self.rank)


def layout_of(keys: Sequence[str], rank: int) -> NodeLayout:
    """Return the layout of ``rank``, given every rank's node key."""
    nodes = ranks_by_node(keys)
    of_ranks = [0] * len(keys)
    for number, ranks in enumerate(nodes):
        for one in ranks:
            of_ranks[one] = number
    node = of_ranks[rank]
    return NodeLayout(node, len(nodes), nodes[node], rank, tuple(of_ranks) if len(nodes) > 1 else ())


def ranks_by_node(keys: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of each node, ascending, given every rank's node key."""
    found: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def joined(keys: Sequence[str], seen: Sequence[Collection[int]]) -> list[str]:
    """Return every rank's node key, given that rank ``i`` saw the tokens of the ranks ``seen[i]``."""
    name = {key: key for key in keys}  # of a key: one that its node has too; in the end, that of its lowest rank

    def first(key: str) -> str:
        while name[key] != key:
            key = name[key]
        return key

    order = {key: index for index, key in reversed(list(enumerate(keys)))}
    for index, others in enumerate(seen):
        for other in others:
            lower, higher = sorted((first(keys[index]), first(keys[other])), key=order.__getitem__)
            name[higher] = lower
    return [first(key) for key in keys]
