"""Numbers of saves and snapshots: they grow, and a snapshot's is the same whichever saves a rank called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.save_numbers import number_of_save, number_of_snapshot


@given(steps=st.lists(st.integers(0, 10**6), max_size=6).map(sorted), more=st.integers(0, 9))
def test_a_snapshot_has_one_number_whichever_saves_came_before(steps: list[int], more: int) -> None:
    begun = 0
    at = (steps[-1] if steps else 0) + more
    numbers = {number_of_snapshot(at, begun)}
    for step in steps:  # up to six of one step
        begun = number_of_save(step, begun)
        numbers.add(number_of_snapshot(at, begun))
    assert len(numbers) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_what_comes_later_has_a_greater_number(calls: list[tuple[int, bool]]) -> None:
    step = begun = last = 0
    snapshots: set[int] = set()
    for more, is_snapshot in calls:
        step += more
        if is_snapshot and step not in snapshots:  # a second one of a step changes nothing
            snapshots.add(step)
            number = number_of_snapshot(step, begun)
        elif is_snapshot:
            continue
        else:
            number = begun = number_of_save(step, last)
        assert number > last
        last = number
