"""Every sample of every shard comes once, on any ranks and workers; the same ranks and workers keep their order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmirror.core.errors import DataChanged, IntegrityError
from ckptmirror.core.shard_cursors import Shard, ShardCursor, listing_of, merge_shard_cursors, shared_out, with_readers
from ckptmirror.data.shards import _behind, _Place, _Reading, _Stream
from ckptmirror.data.shuffle import key_of, shuffled

Sizes = dict[str, int]
Rank = tuple[ShardCursor, int]  # the cursor, and how many batches it reads


class Data:
    """Shards of some sizes, and everything that reading them gave."""

    def __init__(self, sizes: list[int], block: int, most: int, batch_size: int) -> None:
        self.sizes = {f"shard-{number}": size for number, size in enumerate(sizes)}
        self.shards = [Shard(name, size) for name, size in sorted(self.sizes.items())]
        reading = _Reading(self.read, 7 if block > 1 else None, block, most)
        self.stream = _Stream(reading, batch_size, list, drop_last=False)
        self.seen: dict[int, Counter[Any]] = {}

    def read(self, name: str, start: int) -> Iterator[Any]:
        return ((name, number) for number in range(start, self.sizes[name]))

    def ordered(self, epoch: int) -> list[Shard]:
        return [self.shards[at] for at in shuffled(range(len(self.shards)), len(self.shards), key_of(epoch))]

    def start_of(self, rank: int, world_size: int, readers: int, epoch: int, ahead: Any) -> ShardCursor:
        lists = shared_out(ahead.get(epoch, self.ordered(epoch)), rank, world_size, readers)
        later = {number: left for number, left in ahead.items() if number > epoch}
        return ShardCursor(rank, world_size, lists, epoch, listing_of(self.shards), later)

    def batches(self, cursor: ShardCursor) -> Iterator[tuple[list[Any], ShardCursor]]:
        """What a DataLoader makes of it: the workers' batches in turn, without those that are at their end."""
        workers: dict[int, Iterator[tuple[list[Any], int, _Place]]] = {
            number: self.worker(cursor, number) for number in range(len(cursor.lists))
        }
        places: list[_Place] = [([], len(one)) for one in cursor.lists]
        while workers:
            for number in list(workers):
                found = next(workers[number], None)
                if found is None:
                    del workers[number]
                    continue
                batch, places[number] = found
                yield batch, _behind(cursor, list(places), number)

    def worker(self, cursor: ShardCursor, number: int) -> Iterator[Any]:
        samples: list[Any] = []
        for sample, place in self.stream.reading.samples(cursor.lists[number], cursor.epoch):
            samples.append(sample)
            if len(samples) == self.stream.batch_size:
                yield samples, place()
                samples = []
        if samples:
            yield samples, place()

    def go_on(self, cursor: ShardCursor, batches: int) -> ShardCursor:
        """Read so many batches, into the next epochs if need be, and count what came."""
        while batches > 0:
            for batch, behind in itertools.islice(self.batches(cursor), batches):
                batches -= 1
                cursor = behind
                self.seen.setdefault(cursor.epoch, Counter()).update(batch)
            if batches > 0:
                cursor = self.next_epoch(cursor)
        return cursor

    def next_epoch(self, cursor: ShardCursor) -> ShardCursor:
        return self.start_of(cursor.rank, cursor.world_size, len(cursor.lists), cursor.epoch + 1, cursor.ahead)

    def finish(self, ranks: list[ShardCursor]) -> None:
        """Read the last epoch that any rank has begun to its end, on all ranks, and check all epochs."""
        last = max(max(cursor.epoch, *cursor.ahead) if cursor.ahead else cursor.epoch for cursor in ranks)
        for cursor in ranks:
            for epoch in range(cursor.epoch, last + 1):
                for batch, _ in self.batches(cursor):
                    self.seen.setdefault(epoch, Counter()).update(batch)
                cursor = self.next_epoch(cursor)
        once = Counter((name, number) for name, size in self.sizes.items() for number in range(size))
        for epoch in range(last + 1):
            assert self.seen.get(epoch, Counter()) == once


datas = st.builds(
    Data, st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)
)
job = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 8)), min_size=1, max_size=4)  # (readers, batches) of a rank


@settings(max_examples=60)
@given(datas.filter(lambda data: sum(data.sizes.values()) > 0), st.lists(job, min_size=1, max_size=4))
def test_jobs_of_any_ranks_and_workers_read_every_sample_of_each_epoch_once(data: Data, jobs: Any) -> None:
    """Ranks are neither in step nor in the same epoch, and each may have another number of workers."""
    first = jobs[0]
    ranks = [data.start_of(rank, len(first), readers, 0, {}) for rank, (readers, _) in enumerate(first)]
    for now in jobs:
        if len(now) == len(ranks):
            ranks = [with_readers(cursor, data.ordered, own[0]) for cursor, own in zip(ranks, now, strict=True)]
        else:
            ranks = [merge_shard_cursors(ranks, data.ordered, at, len(now), own[0]) for at, own in enumerate(now)]
        counts = [
            batches if any(map(data.sizes.get, names(cursor))) else 0
            for cursor, (_, batches) in zip(ranks, now, strict=True)
        ]
        ranks = [data.go_on(cursor, count) for cursor, count in zip(ranks, counts, strict=True)]
    data.finish(ranks)


def names(cursor: ShardCursor) -> list[str]:
    return [shard.name for one in cursor.lists for shard in one]


@given(datas, st.integers(1, 3), st.lists(st.integers(0, 5), max_size=6))
def test_the_same_workers_go_on_in_the_same_order_wherever_they_stopped(
    data: Data, readers: int, stops: list[int]
) -> None:
    start = data.start_of(0, 1, readers, 0, {})
    whole = [batch for batch, _ in data.batches(start)]
    found = []
    cursor = start
    for count in [*stops, len(whole)]:
        read = list(itertools.islice(data.batches(cursor), count))
        found += [batch for batch, _ in read]
        cursor = read[-1][1] if read else cursor
    assert found == whole


def test_what_a_rank_has_read_of_a_later_epoch_is_kept_over_several_jobs() -> None:
    data = Data([2, 2, 2, 2, 2, 2], 1, 1, 1)
    ranks = [data.start_of(rank, 2, 1, 0, {}) for rank in range(2)]
    ranks[0] = data.go_on(ranks[0], 9)  # six of epoch 0, three of epoch 1
    for world_size, batches in ((3, 5), (2, 4)):
        ranks = [merge_shard_cursors(ranks, data.ordered, rank, world_size, 1) for rank in range(world_size)]
        ranks[0] = data.go_on(ranks[0], batches)
        assert [cursor.epoch for cursor in ranks] == [1, *[0] * (world_size - 1)]
    data.finish(ranks)


def test_a_worker_reads_a_sample_of_each_open_shard_in_turn() -> None:
    data = Data([2, 2, 2], 1, 3, 100)
    (batch,) = (batch for batch, _ in data.batches(data.start_of(0, 1, 1, 0, {})))
    read = [name for name, _ in batch]
    assert read[:3] == read[3:]
    assert len(set(read)) == 3


def test_an_unread_shard_that_is_gone_or_has_changed_is_named() -> None:
    data = Data([3, 3, 3, 3], 1, 1, 1)
    ranks = [data.start_of(rank, 2, 1, 0, {}) for rank in range(2)]
    ranks = [data.go_on(cursor, 3) for cursor in ranks]  # each has read one shard, which may be gone
    unread = sorted(names(ranks[0]) + names(ranks[1]))[-1]
    for shards, said in (
        ([shard for shard in data.shards if shard.name != unread], f"{unread} is gone"),
        (
            [s._replace(version=4) if s.name == unread else s for s in data.shards],
            rf"{unread} has changed \(3 when .* 4 now\)",
        ),
    ):
        with pytest.raises(DataChanged, match=said):
            merge_shard_cursors(ranks, lambda _, there=shards: there, 0, 1, 1)


def test_a_shard_that_was_read_may_be_gone_and_a_new_one_comes_with_the_next_epoch() -> None:
    data = Data([3, 3, 3, 3], 1, 1, 1)
    cursor = data.go_on(data.start_of(0, 1, 1, 0, {}), 4)  # one is read, and one begun
    (left,) = {shard.name for shard in data.shards} - set(names(cursor))
    there = [shard for shard in data.shards if shard.name != left] + [Shard("shard-new", 1)]
    merged = merge_shard_cursors([cursor], lambda _: there, 0, 1, 1)
    assert sorted(names(merged)) == sorted(names(cursor))


def test_shards_that_changed_while_the_ranks_were_in_two_epochs_are_refused() -> None:
    data = Data([1, 1], 1, 1, 1)
    ranks = [data.start_of(rank, 2, 1, 0, {}) for rank in range(2)]
    ranks[0] = data.next_epoch(data.go_on(ranks[0], 1))
    more = [*data.shards, Shard("shard-new", 1)]
    with pytest.raises(DataChanged, match="had begun a new epoch"):
        merge_shard_cursors(ranks, lambda _: more, 0, 1, 1)


def test_a_shard_in_two_lists_is_not_read_twice() -> None:
    data = Data([3, 3], 1, 1, 1)
    ranks = [replace(data.start_of(0, 1, 1, 0, {}), rank=rank, world_size=2) for rank in range(2)]
    with pytest.raises(IntegrityError, match="same shard"):
        merge_shard_cursors(ranks, data.ordered, 0, 3, 1)
