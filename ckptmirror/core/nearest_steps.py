"""The sentence that names the steps nearest to one that does not exist."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["nearest_steps"]

_LISTED = 4


def nearest_steps(steps: Iterable[int], step: int) -> str:
    """Return ``" The nearest are 100, 200."``: at most four steps, ascending; "" if there are none."""
    nearest = sorted(sorted(set(steps), key=lambda there: abs(there - step))[:_LISTED])
    verb = "is" if len(nearest) == 1 else "are"
    return f" The nearest {verb} {', '.join(map(str, nearest))}." if nearest else ""
