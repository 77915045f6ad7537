"""The order of an epoch: a permutation that is computed where it is needed and takes no memory, of any size.

It is a Feistel network over a grid with little more cells than there are samples: each round adds to the row a number
that depends on the column, then to the column one that depends on the row, so that it can be undone and no cell is hit
twice. A cell outside the samples is sent through again (cycle walking).

Rules:
* The order depends on the key alone: it is the same on every machine and with every version of Python and NumPy.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy
from numpy.typing import NDArray

__all__ = ["key_of", "shuffled"]

_ROUNDS = 6
_MIX = (numpy.uint64(0xBF58476D1CE4E5B9), numpy.uint64(0x94D049BB133111EB))  # of the finalizer of SplitMix64
_SHIFT = (numpy.uint64(30), numpy.uint64(27), numpy.uint64(31))

Numbers = NDArray[numpy.uint64]


def key_of(*parts: object) -> int:
    """Return a 64-bit key from numbers and texts."""
    text = "\n".join(map(repr, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def shuffled(positions: list[int] | range, size: int, key: int) -> list[int]:
    """Return what is at some positions of the permutation of ``range(size)`` that ``key`` names."""
    columns = isqrt(max(size - 1, 0)) + 1
    rows = -(-size // columns)
    found = numpy.array(positions, dtype=numpy.uint64)
    waiting = numpy.arange(len(found))
    while len(waiting):
        found[waiting] = _cell(found[waiting], numpy.uint64(rows), numpy.uint64(columns), key)
        waiting = waiting[found[waiting] >= size]
    return [int(each) for each in found]


def _cell(positions: Numbers, rows: numpy.uint64, columns: numpy.uint64, key: int) -> Numbers:
    row, column = positions // columns, positions % columns
    for number in range(_ROUNDS):
        row = (row + _mixed(column, key, 2 * number)) % rows
        column = (column + _mixed(row, key, 2 * number + 1)) % columns
    return row * columns + column


def _mixed(values: Numbers, key: int, number: int) -> Numbers:
    mixed = values + numpy.uint64((key + number * 0x9E3779B97F4A7C15) % 2**64)
    mixed = (mixed ^ (mixed >> _SHIFT[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFT[1])) * _MIX[1]
    return (mixed ^ (mixed >> _SHIFT[2])) >> numpy.uint64(1)
