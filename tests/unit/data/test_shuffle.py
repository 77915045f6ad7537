"""The order of an epoch: every number once, as good as random, and the same for ever."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.data.shuffle import key_of, shuffled

KEY = 14518642523202291953
TEN = [9, 6, 7, 8, 2, 1, 3, 5, 4, 0]
OF_MANY = [398822032, 966419577, 588375614]


@given(st.integers(0, 700), st.integers(0, 2**64 - 1))
def test_every_number_comes_once(size: int, key: int) -> None:
    assert sorted(shuffled(range(size), size, key)) == list(range(size))


@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
def test_any_position_of_any_size_is_found_without_the_others(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    found = shuffled(positions, size, key)
    assert len(set(found)) == len(positions)
    assert all(0 <= each < size for each in found)
    assert [shuffled([each], size, key)[0] for each in positions] == found


def test_all_orders_of_a_few_come_about_equally_often() -> None:
    found = Counter(tuple(shuffled(range(4), 4, key_of("test", number))) for number in range(4800))
    assert len(found) == 24
    assert all(140 < count < 260 for count in found.values()), "200 each; 60 are more than four standard deviations"


def test_neighbours_do_not_stay_together() -> None:
    order = shuffled(range(10_000), 10_000, key_of("test"))
    assert sum(abs(one - other) == 1 for one, other in itertools.pairwise(order)) < 15, "two are expected"


def test_the_order_never_changes() -> None:
    """A position in a save names samples by this order."""
    assert key_of("samples", 0, 3) == KEY
    assert shuffled(range(10), 10, KEY) == TEN
    assert shuffled([0, 1, 2], 10**9, KEY) == OF_MANY
