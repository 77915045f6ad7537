"""Combination of checksums: as if the bytes had been read in one piece."""

from __future__ import annotations

import random

from core_builders import crc32c_bitwise
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.crc import combine, combine_blocks
from tests.kit.cost import calls_of


def test_the_reference_value_of_the_polynomial() -> None:
    assert crc32c_bitwise(b"123456789") == 0xE3069283
    assert combine(crc32c_bitwise(b"1234"), crc32c_bitwise(b"56789"), 5) == 0xE3069283


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_pieces_combine_to_the_whole(one: bytes, other: bytes) -> None:
    assert combine(crc32c_bitwise(one), crc32c_bitwise(other), len(other)) == crc32c_bitwise(one + other)


@given(st.binary(max_size=300), st.integers(1, 64))
def test_blocks_with_a_short_last_one_combine_to_the_whole(data: bytes, size: int) -> None:
    blocks = [crc32c_bitwise(data[at : at + size]) for at in range(0, len(data), size)]
    assert combine_blocks(blocks, size, len(data)) == crc32c_bitwise(data)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), st.integers(0, 2**40), st.integers(0, 2**40))
def test_combination_is_associative_for_sizes_that_no_test_could_read(crcs: list[int], b: int, c: int) -> None:
    x, y, z = crcs
    assert combine(combine(x, y, b), z, c) == combine(x, combine(y, z, c), b + c)


def test_4096_blocks_combine_by_tables_without_a_call_for_each() -> None:
    blocks = [random.Random(1).getrandbits(32) for _ in range(4096)]
    assert calls_of(lambda: combine_blocks(blocks, 2**22, 4096 * 2**22 - 17)) < 1000
