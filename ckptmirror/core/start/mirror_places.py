"""Which place a mirror is that no node of a job remembers: what is there depends on what is mounted on each node.

Rules:
* Where the first node sees none and others see one, it is that one.
* Where nodes see several, nobody can tell which is the right one: then none is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["seen_elsewhere"]


def seen_elsewhere(
    here: Mapping[str, str | None], seen_by: Sequence[Mapping[str, str | None]]
) -> dict[str, tuple[str, str]]:
    """Return, by URL, the only place that may be the mirror, and who sees it; "" if none may.

    A URL is left out if the first node may decide.

    Args:
        here: The identity of the place that the first node sees under each URL; None: there is none yet.
        seen_by: The same of each other node, from node 1 on.
    """
    found: dict[str, tuple[str, str]] = {}
    for url, own in here.items():
        there = {f"node {number}": seen[url] for number, seen in enumerate(seen_by, 1) if seen.get(url)}
        if len({*there.values()} | {own} - {None}) > 1:
            found[url] = "", "another node"
        elif own is None and there:
            where, identity = next(iter(there.items()))
            found[url] = str(identity), where
    return found
