"""Regions of tensors: the places of the pieces that a tensor is cut into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Region", "are_apart", "make_up"]

_FREE_CELLS, _CELLS_PER_PIECE = 64, 16  # of the grid that the pieces of a tensor lie in


@dataclass(frozen=True)
class Region:
    """The place of a block of a tensor: ``sizes`` elements from ``offsets``, in a full tensor of ``shape``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Up to where it reaches, in each dimension."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    @property
    def is_inside(self) -> bool:
        """Whether it is a part of the full tensor."""
        return len(self.shape) == len(self.offsets) == len(self.sizes) and all(
            begin >= 0 and end <= whole for begin, end, whole in zip(self.offsets, self.ends, self.shape, strict=True)
        )

    def overlap(self, other: Region) -> Region | None:
        """Return what the two have in common; None if that is nothing."""
        offsets = tuple(map(max, zip(self.offsets, other.offsets, strict=True)))
        ends = map(min, zip(self.ends, other.ends, strict=True))
        sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return Region(self.shape, offsets, sizes) if all(size > 0 for size in sizes) else None

    def index_in(self, other: Region) -> tuple[slice, ...]:
        """Return the index of this region in a tensor with the values of ``other``, which contains it."""
        edges = zip(self.offsets, self.ends, other.offsets, strict=True)
        return tuple(slice(begin - first, end - first) for begin, end, first in edges)


def are_apart(regions: Iterable[Region]) -> bool:
    """Whether no two regions have a value in common; if they also have the volume of the whole, they cover it.

    Each region is marked on the grid of all their edges. Sharded tensors have about one cell of it for each piece, so a
    grid with far more cells comes from no such tensor, and the answer is no.
    """
    boxes = [(region.offsets, region.ends) for region in regions if all(region.sizes)]
    if len(boxes) < 2:
        return True
    edges = [sorted({at[axis] for box in boxes for at in box}) for axis in range(len(boxes[0][0]))]
    if math.prod(len(places) - 1 for places in edges) > _FREE_CELLS + _CELLS_PER_PIECE * len(boxes):
        return False
    places = [{edge: index for index, edge in enumerate(of_axis)} for of_axis in edges]
    marked: set[tuple[int, ...]] = set()
    for begin, end in boxes:
        ranges = [range(of_axis[a], of_axis[b]) for of_axis, a, b in zip(places, begin, end, strict=True)]
        cells = set(itertools.product(*ranges))
        if not marked.isdisjoint(cells):
            return False
        marked |= cells
    return True


def make_up(regions: Iterable[Region]) -> bool:
    """Whether regions of one tensor cover it without having a value in common. There is at least one."""
    found = list(regions)
    return sum(math.prod(one.sizes) for one in found) == math.prod(found[0].shape) and are_apart(found)
