"""Rebuilds a tree of dicts and lists from its leaves and their paths."""

from __future__ import annotations

from typing import Any

from ckptmirror.core.errors import IntegrityError

__all__ = ["rebuilt"]


def rebuilt(items: list[tuple[tuple[str | int, ...], Any]], at: int = 0) -> Any:
    """Rebuild a tree from leaves and their paths, from part ``at`` on: text keys make dicts, numbers make lists.

    Raises:
        IntegrityError: A path leads through a leaf.
    """
    if len(items) == 1 and len(items[0][0]) == at:
        return items[0][1]
    below: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for item in items:
        if len(item[0]) == at:
            raise IntegrityError("The saved state has a value where it also has a container.")
        below.setdefault(item[0][at], []).append(item)
    if all(isinstance(key, int) for key in below):
        return [rebuilt(below[key], at + 1) for key in sorted(below)]
    return {str(key): rebuilt(rest, at + 1) for key, rest in below.items()}
