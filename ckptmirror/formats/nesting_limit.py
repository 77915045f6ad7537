"""How deeply values may be nested, in a save and in a load alike.

Rules:
* The limit follows Python's own: a program that raised ``sys.setrecursionlimit`` can save and load deeper values.
* Nothing in this module walks values recursively.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from ckptmirror.core.errors import UnsafePickle, UsageError

__all__ = ["TooDeep", "max_depth", "too_deep"]

_FRAMES_PER_LEVEL = 3  # used by the functions that walk a state, at most
_MOST = 3_000  # beyond, the stack of the process would end it, whatever Python's limit
_LEVELS_PER_LEVEL = 4  # at most, as a file has it: an ordered dict in another is a dict of a list of lists there
_SHOWN_LETTERS = 60


class TooDeep(UnsafePickle):
    """A file holds values that are nested too deeply."""

    hint = "If the file is yours, call sys.setrecursionlimit(n) first, as the program that wrote it did."


def max_depth() -> int:
    """Return how many levels of containers are allowed."""
    return min(sys.getrecursionlimit() // _FRAMES_PER_LEVEL, _MOST)


def too_deep(value: Any, where: str) -> UsageError:
    """Return the error for a part of a state that is nested too deeply, with the place that is too deep."""
    place = _deeper_than(max_depth() // _LEVELS_PER_LEVEL, value, where) or where or "The state"
    return UsageError(
        f"{place} is nested too deep to be saved: the limit is {max_depth()} containers in one another; it follows "
        f"Python's recursion limit, which is {sys.getrecursionlimit()}.",
        hint="Save it flat, as a list or a tensor, or call sys.setrecursionlimit(n), here and where it is loaded.",
    )


def _deeper_than(limit: int, value: Any, where: str) -> str | None:
    """Return the first place deeper than ``limit``, or none; a container may contain itself."""
    waiting = [(value, where, 1)]
    while waiting:
        value, where, depth = waiting.pop()
        if depth > limit:
            return where if len(where) <= _SHOWN_LETTERS else f"{where[:_SHOWN_LETTERS]}…"
        if isinstance(value, Mapping):
            waiting += [(item, f"{where}.{key}".lstrip("."), depth + 1) for key, item in value.items()]
        elif isinstance(value, (list, tuple, deque)):
            waiting += [(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    return None
