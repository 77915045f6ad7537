"""Which place a mirror is that no node of a job remembers: what is there depends on what is mounted on each node.

Rules:
* Where the first node sees none and others see one, it is that one.
* Where no node sees one, the first node makes it, and no other.
* Where nodes see several, nobody can tell which is the right one: then none is.
* Where the first node sees none, and another cannot tell what is there, no node makes one: it may be there already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["UNKNOWN", "seen_elsewhere"]

UNKNOWN = ""
"""The identity of a place that a node cannot read now."""


def seen_elsewhere(
    here: Mapping[str, str | None], seen_by: Sequence[Mapping[str, str | None]]
) -> dict[str, tuple[str | None, str]]:
    """Return, by URL, the only place that may be the mirror, and who sees it; "" if none may; None: any that is there.

    A URL is left out if the first node may decide.

    Args:
        here: The identity of the place that the first node sees under each URL; None: there is none yet; or UNKNOWN.
        seen_by: The same of each other node, from node 1 on.
    """
    found: dict[str, tuple[str | None, str]] = {}
    for url, own in here.items():
        there = {f"node {number}": seen.get(url) for number, seen in enumerate(seen_by, 1)}
        seen_here = {node: identity for node, identity in there.items() if identity}
        if len({own, *seen_here.values()} - {None, UNKNOWN}) > 1:
            found[url] = "", "another node"
        elif not own and seen_here:
            where, identity = next(iter(seen_here.items()))
            found[url] = str(identity), where
        elif own is None and (blind := [node for node, identity in there.items() if identity == UNKNOWN]):
            found[url] = None, blind[0]
    return found
