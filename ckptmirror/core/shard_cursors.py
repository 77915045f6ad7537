"""Which shards (files) of an epoch are unread, from which sample on, and which reader of which rank reads them.

Rules:
* A shard is read from its beginning to its end, by one reader at a time (a reader is a worker of a rank). So the number
  of samples that were read of it says all.
* A reader has a list: the shards that it has open, first the one whose turn it is, then those that it has not opened.
  A shard that is in no list has been read.
* The same ranks keep their shards, and with the same readers their order. Any others share out all unread shards.
* Ranks read different numbers of samples, so they need not be in the same epoch: what is unread of a later epoch is
  kept as one list for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptmirror.core.cursors import epochs_of, one_for_each_rank
from ckptmirror.core.errors import DataChanged, IntegrityError

__all__ = ["Shard", "ShardCursor", "Version", "listing_of", "merge_shard_cursors", "shared_out", "with_readers"]

Version = str | int | None
_SHOWN = 3


class Shard(NamedTuple):
    """A shard, and where reading it continues.

    Attributes:
        name: Its name.
        version: Something that changes with its contents, such as its size.
        offset: How many of its samples have been read.
    """

    name: str
    version: Version = None
    offset: int = 0


@dataclass(frozen=True)
class ShardCursor:
    """How far one rank has read.

    Attributes:
        rank: The rank, of ``world_size`` that share the shards.
        lists: What each of its readers has to read; first that of the reader whose batch comes next.
        epoch: The epoch that the rank is in.
        listing: The digest of all shards that there were (:func:`listing_of`).
        ahead: By later epoch, what is unread of it, where that is not every shard from its beginning.
    """

    rank: int
    world_size: int
    lists: tuple[tuple[Shard, ...], ...]
    epoch: int = 0
    listing: str = ""
    ahead: Mapping[int, tuple[Shard, ...]] = field(default_factory=dict)


Order = Callable[[int], Sequence[Shard]]


def listing_of(shards: Iterable[Shard]) -> str:
    """Return a digest of the names and versions of shards."""
    lines = sorted(f"{shard.name!r} {shard.version!r}" for shard in shards)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def shared_out(unread: Sequence[Shard], rank: int, world_size: int, readers: int) -> tuple[tuple[Shard, ...], ...]:
    """Return what each reader of a rank reads: shards go to the ranks in turn, and those of a rank to its readers."""
    starts = range(rank, world_size * readers, world_size)
    return tuple(tuple(unread[start :: world_size * readers]) for start in starts)


def with_readers(cursor: ShardCursor, order: Order, readers: int) -> ShardCursor:
    """Return where a rank continues by itself, with any number of readers.

    Raises:
        DataChanged: An unread shard is not there, or has changed.
    """
    unread, all_shards = [shard for one in cursor.lists for shard in one], order(cursor.epoch)
    _check_unchanged(unread, all_shards)
    if len(cursor.lists) == readers:
        return cursor
    unread = _sorted(unread, all_shards)
    return replace(cursor, lists=shared_out(unread, 0, 1, readers))


def merge_shard_cursors(
    cursors: Sequence[ShardCursor], order: Order, rank: int, world_size: int, readers: int
) -> ShardCursor:
    """Return where a rank of a job continues, from the cursors of all ranks of another.

    Args:
        cursors: Those of the save. Ranks that share their data have the same.
        order: Returns every shard there is, in the order of an epoch.
        rank: The rank that continues, of ``world_size``.
        readers: How many readers it has.

    Raises:
        IntegrityError: A rank is missing, or the cursors do not belong together.
        DataChanged: An unread shard is not there, or has changed.
    """
    ranks = one_for_each_rank(cursors)
    epochs = epochs_of(ranks)
    first = epochs.start
    slowest = next(cursor for cursor in ranks if cursor.epoch == first)
    unread = {epoch: _unread_in(epoch, ranks, slowest, order) for epoch in epochs}
    ahead = {epoch: shards for epoch, shards in {**slowest.ahead, **unread}.items() if epoch > first}
    lists = shared_out(unread[first], rank, world_size, readers)
    return ShardCursor(rank, world_size, lists, first, listing_of(order(first)), ahead)


def _unread_in(epoch: int, ranks: Sequence[ShardCursor], slowest: ShardCursor, order: Order) -> tuple[Shard, ...]:
    all_shards = order(epoch)
    start = slowest.ahead.get(epoch, all_shards)
    if start is all_shards and slowest.epoch < epoch and slowest.listing != listing_of(all_shards):
        raise DataChanged("Some ranks of the save had begun a new epoch, others had not, and the shards have changed.")
    found: list[Shard] = []
    for cursor in ranks:
        if cursor.epoch <= epoch:
            is_in_it = cursor.epoch == epoch
            lists = cursor.lists if is_in_it else shared_out(start, cursor.rank, len(ranks), len(cursor.lists))
            found += (shard for one in lists for shard in one)
    names = [shard.name for shard in found]
    if len(set(names)) < len(names):
        raise IntegrityError("Two readers of the save have the same shard to read.")
    _check_unchanged(found, all_shards)
    return tuple(_sorted(found, all_shards))


def _sorted(shards: Iterable[Shard], in_order: Sequence[Shard]) -> list[Shard]:
    number = {shard.name: at for at, shard in enumerate(in_order)}
    return sorted(shards, key=lambda shard: number[shard.name])


def _check_unchanged(unread: Iterable[Shard], all_shards: Iterable[Shard]) -> None:
    """Check that every unread shard is there, as it was.

    Raises:
        DataChanged: One is not.
    """
    versions = {shard.name: shard.version for shard in all_shards}
    wrong = [
        f"{shard.name} is gone"
        if shard.name not in versions
        else f"{shard.name} has changed ({shard.version!r} when it was saved, {versions[shard.name]!r} now)"
        for shard in unread
        if shard.name not in versions or versions[shard.name] != shard.version
    ]
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DataChanged(f"The save has shards to read that are not as they were: {', '.join(wrong[:_SHOWN])}{more}.")
