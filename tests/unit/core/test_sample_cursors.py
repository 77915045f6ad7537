"""Every sample of an epoch comes once, however often the job stops, and on however many ranks it goes on."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.sample_cursors import Last, SampleCursor, merge_sample_cursors, union

LASTS: list[Last] = ["pad", "drop", "uneven"]


def job(like: SampleCursor, world_size: int, batch_size: int, last: Last = "uneven") -> list[SampleCursor]:
    """The cursors of all ranks of a job that starts where ``like`` does."""
    return [replace(like, rank=r, world_size=world_size, batch_size=batch_size, last=last) for r in range(world_size)]


def go_on(ranks: list[SampleCursor], world_size: int, batch_size: int, last: Last = "uneven") -> list[SampleCursor]:
    """The cursors of another job, after all cursors of this one were saved."""
    return [merge_sample_cursors(ranks, like) for like in job(ranks[0], world_size, batch_size, last)]


def read(cursor: SampleCursor, batches: int, seen: dict[int, Counter[int]]) -> SampleCursor:
    """Read so many batches, into the next epochs if need be, and count which positions came."""
    for _ in range(batches):
        for _ in range(50):
            if cursor.batches < cursor.batches_in_all:
                break
            cursor = cursor.in_epoch(cursor.epoch + 1)
        else:
            return cursor
        seen.setdefault(cursor.epoch, Counter()).update(cursor.positions(cursor.batches))
        cursor = replace(cursor, batches=cursor.batches + 1)
    return cursor


def read_to_the_end(ranks: list[SampleCursor], seen: dict[int, Counter[int]]) -> int:
    """Read until the last epoch that was begun is over; return it."""
    last = max(max(cursor.epoch, *cursor.ahead) if cursor.ahead else cursor.epoch for cursor in ranks)
    for cursor in ranks:
        while cursor.epoch < last or cursor.batches < cursor.batches_in_all:
            if cursor.batches < cursor.batches_in_all:
                cursor = read(cursor, 1, seen)
            else:
                cursor = cursor.in_epoch(cursor.epoch + 1)
    return last


layouts = st.tuples(st.integers(1, 5), st.integers(1, 4))


@given(
    st.integers(1, 60), st.lists(st.tuples(layouts, st.lists(st.integers(0, 7), min_size=5)), min_size=1, max_size=5)
)
def test_ranks_that_are_not_in_step_and_jobs_of_any_size_read_every_sample_of_each_epoch_once(size, jobs):
    ranks = job(SampleCursor(size, 0, 1, 1), *jobs[0][0])
    seen: dict[int, Counter[int]] = {}
    for layout, batches in jobs:
        ranks = go_on(ranks, *layout)
        ranks = [read(cursor, count, seen) for cursor, count in zip(ranks, batches, strict=False)]
    last = read_to_the_end(ranks, seen)
    once = Counter(range(size))
    assert {epoch: seen.get(epoch, Counter()) for epoch in range(last + 1)} == dict.fromkeys(range(last + 1), once)


@given(
    st.integers(1, 60), st.lists(st.tuples(layouts, st.integers(0, 6)), min_size=1, max_size=5), st.sampled_from(LASTS)
)
def test_ranks_in_step_read_every_sample_once_but_for_what_the_last_step_repeats_or_drops(size, jobs, last):
    ranks = job(SampleCursor(size, 0, 1, 1), 1, 1, last)
    seen: Counter[int] = Counter()
    for layout, steps in [*jobs, (jobs[-1][0], size)]:
        ranks = go_on(ranks, *layout, last)
        if last != "uneven":
            assert len({cursor.batches_in_all for cursor in ranks}) == 1, "a rank would wait for another"
        for at, cursor in enumerate(ranks):
            for _ in range(min(steps, cursor.batches_in_all)):
                seen.update(cursor.positions(cursor.batches))
                cursor = replace(cursor, batches=cursor.batches + 1)
            ranks[at] = cursor
    world_size, batch_size = jobs[-1][0]
    extra = sum((seen - Counter(range(size))).values())
    lacking = len(set(range(size)) - set(seen))
    assert extra == 0 if last != "pad" else extra < max(w for (w, _), _ in jobs)
    assert lacking == 0 if last != "drop" else lacking < world_size * batch_size


@given(st.integers(1, 200), st.integers(0, 5), st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]))
def test_a_step_takes_the_same_samples_on_any_number_of_ranks_if_it_takes_as_many(size, steps, layout):
    def step(ranks: list[SampleCursor], number: int) -> set[int]:
        return {position for cursor in ranks for position in cursor.positions(number)}

    alone = job(SampleCursor(size, 0, 1, 1), 1, 12)
    others = go_on([replace(alone[0], batches=min(steps, alone[0].batches_in_all))], *layout)
    for number in range(steps, size // 12 + 1):
        assert step(alone, number) == step(others, number - steps)


def test_a_position_that_all_ranks_share_is_one_interval_however_long_the_job_ran():
    ranks = [replace(cursor, batches=40_000) for cursor in job(SampleCursor(10**9, 0, 1, 1), 8, 32)]
    assert merge_sample_cursors(ranks, ranks[0]).done == ((0, 40_000 * 8 * 32),)


def test_ranks_that_read_the_same_data_count_once():
    ranks = [replace(cursor, batches=3) for cursor in job(SampleCursor(100, 0, 1, 1), 2, 5)]
    twice = [ranks[0], ranks[0], ranks[1], ranks[1]]
    assert merge_sample_cursors(twice, ranks[0]) == merge_sample_cursors(ranks, ranks[0])
    with pytest.raises(IntegrityError, match="two different positions in the data for data rank 0"):
        merge_sample_cursors([replace(ranks[0], batches=2), *twice], ranks[0])


@pytest.mark.parametrize(("kept", "said"), [([0, 2], "data ranks 0, 2 of 3"), ([0, 1], "data ranks 0, 1 of 3")])
def test_a_rank_whose_position_is_missing_is_named_and_not_taken_for_one_that_read_nothing(kept, said):
    ranks = job(SampleCursor(100, 0, 1, 1), 3, 5)
    with pytest.raises(IntegrityError, match=said):
        merge_sample_cursors([ranks[at] for at in kept], ranks[0])


def test_ranks_that_are_further_apart_than_memory_holds_are_refused():
    ranks = job(SampleCursor(10**12, 0, 2, 1), 2, 1)
    with pytest.raises(IntegrityError, match="from 0 to 100000000 batches"):
        go_on([ranks[0], replace(ranks[1], batches=10**8)], 1, 1)


def test_ranks_that_started_from_different_positions_do_not_belong_together():
    ranks = job(SampleCursor(100, 0, 1, 1), 2, 5)
    with pytest.raises(IntegrityError, match="do not agree"):
        merge_sample_cursors([ranks[0], replace(ranks[1], done=((0, 10),))], ranks[0])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_a_union_has_the_same_positions_in_as_few_intervals_as_possible(intervals):
    found = union(intervals)
    assert {p for each in found for p in range(*each)} == {p for each in intervals for p in range(*each)}
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))
    assert all(begin < end for begin, end in found)
