"""Which samples of an epoch have been read, and which ones a rank reads next, for any number of ranks.

Rules:
* Positions count in the order of the epoch; ``data/shuffle.py`` says which sample is at a position.
* A step takes the next ``world_size * batch_size`` unread positions, rank by rank. So while this product stays as it
  is, a step takes the same samples on any number of ranks.
* What remains at the end is less than a step: it is dropped, shared out evenly with a few positions repeated, or shared
  out without repeats, so that a rank may get one sample less than another, or none.
* A cursor says what one rank has read since a start that all ranks have in common. All ranks' cursors together say what
  was read, and that is the common start of the next ranks, however many they are.
* Ranks need not be at the same batch, nor in the same epoch: what a rank has read ahead is kept for each epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ckptmirror.core.cursors import epochs_of, one_for_each_rank
from ckptmirror.core.errors import IntegrityError

__all__ = ["Interval", "Last", "SampleCursor", "merge_sample_cursors", "union"]

_MOST_APART = 1_000_000  # batches that ranks have read beyond what all have: each is a place in memory

Interval = tuple[int, int]
Last = Literal["pad", "drop", "uneven"]


@dataclass(frozen=True)
class SampleCursor:
    """How far one rank has read.

    Attributes:
        size: Number of samples of an epoch.
        rank: The rank, of ``world_size`` that share the epoch.
        batch_size: Samples in a batch of one rank.
        last: What becomes of the samples that are too few for a whole step: ``"pad"``, ``"drop"`` or ``"uneven"``.
        epoch: The epoch that the rank is in.
        done: The positions that were read before all ranks started from here.
        batches: How many batches the rank has read since.
        ahead: By later epoch, the positions of it that have been read already.
    """

    size: int
    rank: int
    world_size: int
    batch_size: int
    last: Last = "pad"
    epoch: int = 0
    done: tuple[Interval, ...] = ()
    batches: int = 0
    ahead: Mapping[int, tuple[Interval, ...]] = field(default_factory=dict)

    @cached_property
    def unread(self) -> tuple[Interval, ...]:
        """The positions that were unread when all ranks started."""
        edges = [0, *itertools.chain.from_iterable(self.done), self.size]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple((begin, end) for begin, end in pairs if begin < end)

    @cached_property
    def count(self) -> int:
        """How many of them there are."""
        return sum(end - begin for begin, end in self.unread)

    @property
    def batches_in_all(self) -> int:
        """How many batches this rank reads of them."""
        whole = self.count // (self.world_size * self.batch_size)
        begin, end = self.places(whole)
        return whole + (begin < end)

    def places(self, number: int) -> Interval:
        """Return which of the unread positions are in a batch; those beyond the last one are repeats."""
        whole, rest = divmod(self.count, self.world_size * self.batch_size)
        if number < whole:
            begin = (number * self.world_size + self.rank) * self.batch_size
            return begin, begin + self.batch_size
        begin = self.count - rest
        if number > whole or self.last == "drop":
            return self.count, self.count
        if self.last == "pad":
            share = -(-rest // self.world_size)
            return begin + self.rank * share, begin + (self.rank + 1) * share
        share, more = divmod(rest, self.world_size)
        begin += self.rank * share + min(self.rank, more)
        return begin, begin + share + (self.rank < more)

    def positions(self, number: int) -> list[int]:
        """Return the positions in a batch; repeats are taken from the beginning of the epoch."""
        begin, end = self.places(number)
        new = itertools.chain.from_iterable(range(*each) for each in _slice(self.unread, begin, end))
        return [*new, *((place - self.count) % self.size for place in range(max(begin, self.count), end))]

    def in_epoch(self, epoch: int) -> SampleCursor:
        """Return the cursor of this rank before its first batch of a later epoch."""
        ahead = {later: done for later, done in self.ahead.items() if later > epoch}
        return replace(self, epoch=epoch, batches=0, done=self.ahead.get(epoch, ()), ahead=ahead)


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the intervals, sorted and joined where they touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def merge_sample_cursors(cursors: Sequence[SampleCursor], like: SampleCursor) -> SampleCursor:
    """Return where a rank of a job continues, from the cursors of all ranks of another.

    Args:
        cursors: Those of the save. Ranks that share their data have the same.
        like: Says which rank continues, of how many, and with which batches.

    Raises:
        IntegrityError: A rank is missing, or the cursors do not belong together.
    """
    ranks = one_for_each_rank(cursors)
    epochs = epochs_of(ranks)
    first = epochs.start
    slowest = next(cursor for cursor in ranks if cursor.epoch == first)
    done = {epoch: _read_in(epoch, ranks, slowest) for epoch in epochs}
    ahead = {epoch: read for epoch, read in {**slowest.ahead, **done}.items() if epoch > first and read}
    return replace(like, epoch=first, batches=0, done=done[first], ahead=ahead)


def _read_in(epoch: int, ranks: Sequence[SampleCursor], slowest: SampleCursor) -> tuple[Interval, ...]:
    """Return what all ranks together have read of an epoch."""
    start = slowest if slowest.epoch == epoch else slowest.in_epoch(epoch)
    if any(cursor.done != start.done for cursor in ranks if cursor.epoch == epoch):
        raise IntegrityError("The ranks of the save do not agree on what was read before.")
    own = [replace(start, rank=cursor.rank) for cursor in ranks]
    counts = [
        0 if cursor.epoch < epoch else cursor.batches if cursor.epoch == epoch else one.batches_in_all
        for cursor, one in zip(ranks, own, strict=True)
    ]
    step = start.world_size * start.batch_size
    common = min(*counts, start.count // step)
    if sum(count - common for count in counts) > _MOST_APART:
        raise IntegrityError(f"The ranks of the save have read from {min(counts)} to {max(counts)} batches: of no job.")
    places = [(0, common * step)]
    places += [one.places(n) for one, count in zip(own, counts, strict=True) for n in range(common, count)]
    read = itertools.chain.from_iterable(_slice(start.unread, *each) for each in union(places))
    return union((*start.done, *read))


def _slice(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """Return the places from ``begin`` to ``end`` of intervals that are laid end to end."""
    found: list[Interval] = []
    start = 0
    for low, high in intervals:
        first, last = max(begin, start), min(end, start + high - low)
        if first < last:
            found.append((low + first - start, low + last - start))
        start += high - low
    return found
