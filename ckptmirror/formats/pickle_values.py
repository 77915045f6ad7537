"""The shape of what a pickle would create, and whether it can be walked safely.

Rules:
* Of the pickle's values, only numbers, texts and bytes are created here.
* Deep, circular and endlessly unfolding values are found without recursion, in linear time.
"""

from __future__ import annotations

from typing import Any

from ckptmirror.core.errors import UnsafePickle
from ckptmirror.formats.nesting_limit import TooDeep, max_depth

__all__ = ["Global", "Made", "check_whole"]

_UNFOLDS_FREELY = 1_000_000  # values that may come of sharing; beyond it
_UNFOLDS_TIMES = 4  # times as many as are held: our own files share next to nothing


class Global(str):
    """What a pickle names: ``module.name``."""

    __slots__ = ()


class Made:
    """Something that the pickle would create, with its contents: a container, or the result of a call.

    Attributes:
        kind: ``tuple list dict set object``.
        items: Values and other ``Made``; for a call, the callable and its arguments.
        count: The most values that it can hold; for a call, those of its arguments.
        size_bytes: For a storage, the number of bytes in the file.
    """

    __slots__ = ("count", "items", "kind", "size_bytes")

    def __init__(self, kind: str, items: list[Any], size_bytes: int | None = None) -> None:
        self.kind = kind
        self.items = items
        self.count = len(items)
        self.size_bytes = size_bytes


def check_whole(root: Made, held: int) -> None:
    """Refuse a value that is too deep, contains itself, or unfolds to too much; children first, without recursion."""
    limit = _UNFOLDS_FREELY + _UNFOLDS_TIMES * held
    deepest = max_depth()
    known: dict[int, tuple[int, int]] = {}  # values and depth of what is done
    under_way: set[int] = set()
    waiting = [root]
    while waiting:
        made = waiting[-1]
        if id(made) in known:
            waiting.pop()
            continue
        below = [item for item in made.items if isinstance(item, Made)]
        if id(made) not in under_way:
            under_way.add(id(made))
            unknown = [item for item in below if id(item) not in known]
            if any(id(item) in under_way for item in unknown):
                raise UnsafePickle("It holds something that holds itself.")
            if unknown:
                waiting += unknown
                continue
        under_way.discard(id(made))
        waiting.pop()
        count = 1 + len(made.items) - len(below)
        depth = 0
        for item in below:
            values, deep = known[id(item)]
            count += values
            depth = max(depth, deep)
        if count > limit:
            raise UnsafePickle(f"It holds {held} values, which unfold to more than {limit}.")
        if depth >= deepest:
            raise TooDeep(f"It is nested more than {deepest} deep.")
        known[id(made)] = (count, depth + 1)
