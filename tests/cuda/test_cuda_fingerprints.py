"""The fingerprints of tensors on a GPU are those of their bytes on the host."""

from __future__ import annotations

import pytest
import torch

from ckptmirror.core.regions import Region
from ckptmirror.sums.fingerprints import fingerprints
from tests.unit.sums.test_fingerprints import DTYPES, SHAPES, some_values, whole

LARGE = [(3, 30_000), (40_000,), (30_001,), (9000, 3), (33, 9001), (257, 3, 4097), (5_000_003,), (2048, 4096)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_they_are_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = some_values(shape, dtype)
    there = values.cuda()
    assert whole(there) == whole(values)
    if values.dim() > 1:
        assert whole(there.transpose(0, 1)) == whole(values.transpose(0, 1))


def test_pieces_of_both_places_come_in_their_order() -> None:
    values = [some_values(shape, torch.float32, seed) for seed, shape in enumerate([(3, 5), (300, 70), (), (7, 9000)])]
    places = [one.cuda() if number % 2 else one for number, one in enumerate(values)]
    mixed = [(one, Region(tuple(one.shape), (0,) * one.dim(), tuple(one.shape))) for one in places]
    for workers in (1, 3):
        assert fingerprints(mixed, workers=workers) == [whole(one) for one in values]
