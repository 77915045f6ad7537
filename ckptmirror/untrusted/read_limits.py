"""What reading a file may cost: memory, comparisons of keys that have one hash, and depth.

Rules:
* A small file may take a little for nothing. Beyond that, memory grows with the bytes of the file.
* Keys of one hash cost the square of their number. Pairs are common (-1 and -2), long chains are made on purpose.
* The depth follows Python's own limit, in a save and in a load alike: a program that raised ``sys.setrecursionlimit``
  can save and load deeper values. Nothing here walks values recursively.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckptmirror.core.errors import IntegrityError, UnsafePickle, UsageError

__all__ = ["BYTES_PER_BYTE", "FREE_BYTES", "Budget", "TooDeep", "max_depth", "too_deep"]

FREE_BYTES = 32 << 20
BYTES_PER_BYTE = 25  # the shortest honest container takes six bytes in a file, and 80 to 250 in memory
_FREE_COMPARISONS = 500_000
_SMALL = 64  # keys: too few to cost anything
_MAX_KEY_VALUES = 100_000  # of one key; a position of a game or a row of a table may be one
_MAX_KEY_DEPTH = 16  # hashing a tuple recurses in C, without a check
_HASHED_BYTES = 8  # for each value in a key: hashing it again takes time, not memory
_HASHES = 2**61 - 1  # a number below it is its own hash

_FRAMES_PER_LEVEL = 3  # used by the functions that walk a state, at most
_MOST = 3_000  # beyond, the stack of the process would end it, whatever Python's limit
_LEVELS_PER_LEVEL = 4  # at most, as a file has it: an ordered dict in another is a dict of a list of lists there
_SHOWN_LETTERS = 60


class Budget:
    """The budget of one file, or of one pickle in it.

    Args:
        size_bytes: Its length.
    """

    def __init__(self, size_bytes: int = 0) -> None:
        self._size_bytes = size_bytes
        self._left_bytes = FREE_BYTES + BYTES_PER_BYTE * size_bytes
        self._comparisons_left = _FREE_COMPARISONS + size_bytes
        self._chains: dict[int, dict[int, int]] = {}  # of each large dict: how many keys have a hash

    def spend(self, size_bytes: int) -> None:
        """Take this much memory.

        Raises:
            UnsafePickle: Nothing is left.
        """
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise UnsafePickle(f"It would take far more memory than its {self._size_bytes} bytes.")

    def check_keys(self, keys: Iterable[Any], target: Collection[Any] | None = None) -> None:
        """Refuse keys that take long to hash, or that ``target`` (a dict or a set) takes long to tell apart.

        Raises:
            UnsafePickle: They do.
            IntegrityError: One cannot be a key.
        """
        weighed = [(key, self._weight(key) if type(key) is tuple else 1) for key in keys if not _has_own_hash(key)]
        if len(weighed) + (len(target) if target is not None else 0) <= _SMALL:
            return
        chains = self._chains.setdefault(id(target), {}) if target is not None else {}
        for key, weight in weighed:
            try:
                number = hash(key)
            except TypeError as error:
                raise IntegrityError(f"It has a key of type {type(key).__name__}.") from error
            before = chains.get(number, 0)
            chains[number] = before + 1
            self._comparisons_left -= before * weight
            if self._comparisons_left < 0:
                raise UnsafePickle("It has too many different keys of one hash.")

    def _weight(self, key: tuple[Any, ...]) -> int:
        """Return how many values a key holds."""
        waiting: list[tuple[tuple[Any, ...], int]] = [(key, 1)]
        seen = 0
        while waiting:
            value, depth = waiting.pop()
            seen += len(value) + 1
            if seen > _MAX_KEY_VALUES or depth > _MAX_KEY_DEPTH:
                raise UnsafePickle("It has a key that holds too much, or too deep.")
            waiting += [(item, depth + 1) for item in value if type(item) is tuple]
        self.spend(_HASHED_BYTES * seen)
        return seen


def _has_own_hash(key: Any) -> bool:
    """Whether no file can hold many keys with the hash of this one: the seed of texts is secret."""
    kind = type(key)
    return kind is str or kind is bytes or (kind is int and abs(key) < _HASHES)


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
