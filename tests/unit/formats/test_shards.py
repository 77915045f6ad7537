"""Pieces of a tensor, saved by any number of ranks, fill the region of any other rank with exactly its values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.regions import Region
from ckptmirror.formats.shards import Piece, fill

Cuts = Sequence[Sequence[int]]  # where each axis is cut


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Cuts, Cuts]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    cut = [st.lists(st.integers(0, size), max_size=3).map(sorted) for size in shape]
    return shape, draw(st.tuples(*cut)), draw(st.tuples(*cut))


def regions(shape: tuple[int, ...], cuts: Cuts) -> list[Region]:
    edges = [[0, *of_axis, size] for of_axis, size in zip(cuts, shape, strict=True)]
    boxes = itertools.product(*(itertools.pairwise(of_axis) for of_axis in edges))
    return [Region(shape, tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]


def cut_out(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True))].clone()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float64)])
@given(layouts=two_layouts(), seed=st.randoms(use_true_random=False))
def test_a_region_is_filled_with_its_own_values_from_pieces_cut_elsewhere(
    dtypes: tuple[torch.dtype, torch.dtype], layouts: tuple[tuple[int, ...], Cuts, Cuts], seed: object
) -> None:
    shape, saved, live = layouts
    whole = torch.arange(torch.Size(shape).numel(), dtype=dtypes[0]).reshape(shape)
    pieces = [Piece(region, cut_out(whole, region)) for region in regions(shape, saved)]
    seed.shuffle(pieces)  # type: ignore[attr-defined]  # a random.Random
    for region in regions(shape, live):
        target = torch.full(region.sizes, -1, dtype=dtypes[1])
        fill(target, region, pieces, "weight")
        assert torch.equal(target, cut_out(whole, region).to(dtypes[1]))


def test_five_rows_saved_by_three_ranks_are_loaded_by_two() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    pieces = [Piece(Region((5, 2), (at, 0), (n, 2)), whole[at : at + n].clone()) for at, n in ((0, 2), (2, 2), (4, 1))]
    target = torch.zeros(2, 2)
    fill(target, Region((5, 2), (3, 0), (2, 2)), pieces, "weight")
    assert torch.equal(target, whole[3:])


def test_a_region_that_the_pieces_do_not_cover_is_refused() -> None:
    piece = Piece(Region((4,), (0,), (2,)), torch.zeros(2))
    with pytest.raises(IntegrityError, match="hold 2 of the 4 values"):
        fill(torch.zeros(4), Region((4,), (0,), (4,)), [piece], "weight")
