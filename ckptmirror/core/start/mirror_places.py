"""Which place a mirror is that no node of a job remembers: what is there depends on what is mounted on each node.

Rules:
* Where the first node sees none and others see one, it is that one.
* Where no node sees one, the first node makes it, and no other.
* What the first node alone sees binds nobody: it uses what is there when it first asks, and the others what it used.
* Where nodes see several, nobody can tell which is the right one: then none is.
* Where the first node sees none, and another cannot tell what is there, no node makes one: it may be there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["UNKNOWN", "Expected", "expected_by_others", "expected_places", "is_expected"]

UNKNOWN = ""
"""The identity of a place that a node cannot read now."""

Expected = tuple[str | None, str]
"""The identity of the only place that may be the mirror, and who sees it; "": none may; None: what is one already."""


def expected_places(here: Mapping[str, str | None], seen_by: Sequence[Mapping[str, str | None]]) -> dict[str, Expected]:
    """Return, by URL, what all nodes expect of mirrors that none remembers. The first node decides about others.

    Args:
        here: The identity of the place that the first node sees under each URL; None: there is none yet; or UNKNOWN.
        seen_by: The same of each other node, from node 1 on.
    """
    found: dict[str, Expected] = {}
    for url, own in here.items():
        sights = {f"node {number}": seen.get(url) for number, seen in enumerate(seen_by, 1)}
        there = {identity: node for node, identity in reversed(sights.items()) if identity}
        blind = [node for node, identity in sights.items() if identity == UNKNOWN]
        if len({own, *there} - {None, UNKNOWN}) > 1:
            found[url] = "", "another node"
        elif there and not own:
            found[url] = next(iter(there.items()))
        elif blind and own is None:
            found[url] = None, blind[0]
    return found


def expected_by_others(urls: Iterable[str], expected: Mapping[str, Expected]) -> dict[str, Expected]:
    """Return what the other nodes expect of the mirrors that none remembers: they make none."""
    return {**{url: (None, "node 0") for url in urls}, **expected}


def is_expected(there: str | None, identity: str | None) -> bool:
    """Whether a place may be the mirror.

    Args:
        there: Its identity; None: it is not a mirror yet.
        identity: The identity that is expected.
    """
    return there is not None if identity is None else bool(identity) and there == identity
