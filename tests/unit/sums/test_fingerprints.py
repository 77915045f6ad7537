"""Fingerprints: the definition in plain Python, sums over any cut, and what a wrong load changes."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmirror.core.regions import Region
from ckptmirror.core.tensor_proof import Fingerprint, total
from ckptmirror.sums import fingerprints
from ckptmirror.sums.fingerprints import fingerprint, fingerprint_there
from ckptmirror.sums.fingerprints import fingerprints as fingerprints_of

MASK = 0xFFFFFFFF
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int64,
    torch.float8_e4m3fn,
]
SHAPES = [(), (1,), (5,), (3, 7), (4, 4, 3), (2, 3, 5, 3), (16, 9), (4100,), (2, 4097), (600, 3), (8192,), (2, 8192)]


def mix(word: int) -> int:
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & MASK
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & MASK
    return word ^ (word >> 16)


def odd(dimension: int, part: int, which: int, at: int) -> int:
    seed = (0x9E3779B1 * (1 + 4 * dimension + 2 * part + which)) & MASK
    return mix(mix(at & MASK) ^ seed ^ mix(at >> 32)) | 1


def weight(dimension: int, at: int, which: int) -> int:
    return odd(dimension, 0, which, at // 4096) * odd(dimension, 1, which, at % 4096)


def by_definition(values: torch.Tensor) -> Fingerprint:
    """The fingerprint of a whole tensor, unit by unit, as docs/design/fingerprints.md defines it."""
    shape, size = tuple(values.shape) or (1,), values.element_size()
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    found = [0, 0]
    for number, place in enumerate(np.ndindex(*shape)):
        data = raw[number * size : (number + 1) * size]
        last = len(shape) - 1
        for which in (0, 1):
            of_place = 1
            for dimension, at in enumerate(place[:last]):
                of_place = of_place * weight(dimension, at, which) & MASK
            of_place = of_place * weight(last, place[last] // (2 if size == 1 else 1), which) & MASK
            if size == 1:
                of_place <<= 8 * (place[last] % 2)
            units = [int.from_bytes(data[at : at + 2], "little") for at in range(0, size, 2)]
            weights = [weight(last + 1, at, which) for at in range(len(units))] if size > 2 else [1]
            found[which] += sum(unit * of_place * own for unit, own in zip(units, weights, strict=True))
    return found[0] & MASK, found[1] & MASK


def whole(values: torch.Tensor) -> Fingerprint:
    shape = tuple(values.shape)
    return fingerprint(values, Region(shape, (0,) * len(shape), shape))


def some_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_the_definition_says(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = some_values(shape, dtype)
    assert whole(values) == by_definition(values)


@pytest.mark.parametrize("workers", [1, 3])
def test_many_pieces_are_summed_in_their_order(workers: int) -> None:
    pieces = [
        (one, Region(shape, (0,) * len(shape), shape))
        for seed, shape in enumerate([(3, 5), (0,), (300, 70), (), (7, 9000), (2,)])
        for one in (some_values(shape, DTYPES[seed % len(DTYPES)], seed),)
    ]
    assert fingerprints_of(pieces, workers=workers) == [fingerprint(*piece) for piece in pieces]
    assert fingerprints_of([], workers=workers) == []


def test_several_threads_sum_pieces_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both, of_ones = threading.Barrier(2), whole(torch.ones(4))

    def together(values: torch.Tensor, region: Region) -> torch.Tensor:
        both.wait(timeout=60)
        return fingerprint_there(values, region)

    monkeypatch.setattr("ckptmirror.sums.fingerprints.fingerprint_there", together)
    pieces = [(torch.ones(4), Region((4,), (0,), (4,))), (torch.zeros(4), Region((4,), (0,), (4,)))]
    assert fingerprints_of(pieces, workers=2) == [of_ones, (0, 0)]


def test_a_failure_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_values: torch.Tensor, _region: Region) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr("ckptmirror.sums.fingerprints.fingerprint_there", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        fingerprints_of([(torch.ones(4), Region((4,), (0,), (4,)))], workers=2)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 30_000), torch.bfloat16),
        ((40_000,), torch.float32),
        ((30_001,), torch.uint8),
        ((40, 8192), torch.float64),
        ((9000, 3), torch.float32),
        ((33, 9001), torch.float16),
    ],
    ids=str,
)
def test_what_is_long_and_what_is_short_have_one_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values, axis = some_values(shape, dtype), 0 if shape[0] > shape[-1] else len(shape) - 1
    short = [(at, values.narrow(axis, at, min(777, shape[axis] - at))) for at in range(0, shape[axis], 777)]
    half = shape[axis] // 3
    long = [(0, values.narrow(axis, 0, half)), (half, values.narrow(axis, half, shape[axis] - half))]
    for cut in (short, long):
        offsets = [tuple(at if one == axis else 0 for one in range(len(shape))) for at, _ in cut]
        parts = [
            fingerprint(part, Region(shape, first, tuple(part.shape)))
            for first, (_, part) in zip(offsets, cut, strict=True)
        ]
        assert total(parts) == whole(values)


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_pieces_cut_anywhere_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    values, chance = some_values(shape, dtype, seed), random.Random(seed)
    pieces = [((0,) * len(shape), shape)]
    for _ in range(6):
        offsets, sizes = pieces.pop(chance.randrange(len(pieces)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, sizes[axis])
        low, high = list(sizes), list(sizes)
        low[axis], high[axis] = at, sizes[axis] - at
        moved = list(offsets)
        moved[axis] += at
        pieces += [(offsets, tuple(low)), (tuple(moved), tuple(high))]
    parts = [
        fingerprint(
            values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))],
            Region(shape, offsets, sizes),
        )
        for offsets, sizes in pieces
    ]
    assert total(parts) == whole(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64], ids=str)
def test_one_changed_bit_changes_both_sums(dtype: torch.dtype) -> None:
    values, chance = some_values((37, 53), dtype), random.Random(4)
    before = whole(values)
    for _ in range(100):
        changed = values.clone()
        data = changed.view(-1).view(torch.uint8)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        first, second = whole(changed)
        assert first != before[0]
        assert second != before[1]


def test_a_wrong_load_changes_it() -> None:
    values = some_values((64, 64), torch.float32)
    swapped = values.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    wrong = {
        "zeros": torch.zeros_like(values),
        "transposed": values.T,
        "rows swapped": swapped,
        "shifted by a row": values.roll(1, 0),
        "negated": -values,  # an even number of top bits
        "two signs": values * torch.tensor([-1.0, -1.0] + [1.0] * 62),
        "another seed": some_values((64, 64), torch.float32, seed=1),
    }
    assert whole(values) not in {name: whole(one) for name, one in wrong.items()}.values()


def test_the_layout_in_memory_does_not_matter() -> None:
    values = some_values((8, 6, 5, 4), torch.float32)
    assert whole(values.contiguous(memory_format=torch.channels_last)) == whole(values)
    assert whole(some_values((11,), torch.uint8)[1:]) == whole(some_values((11,), torch.uint8)[1:].clone())
    assert whole(torch.empty(0, 3)) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operations_for_other_devices_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [some_values(shape, dtype) for shape in SHAPES]
    on_host = [whole(one) for one in values]
    monkeypatch.setattr(fingerprints, "_is_host", lambda _device: False)
    monkeypatch.setattr(fingerprints, "_BLOCK_WORDS_ELSEWHERE", 512)
    assert [whole(one) for one in values] == on_host
