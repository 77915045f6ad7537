"""A loader of shards (files) that are read from their beginning: every sample once, on any number of ranks and workers.

Rules:
* A worker says with each batch where it is in its shards, so that what it has read ahead does not count.
* A worker reads a few shards at a time, a sample of each in turn. Within a shard it shuffles block by block, so the
  number of samples that were read says which ones: of an open block only the rest is read again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ckptmirror.core.errors import UsageError
from ckptmirror.core.shard_cursors import (
    Shard,
    ShardCursor,
    Version,
    listing_of,
    merge_shard_cursors,
    shared_out,
    with_readers,
)
from ckptmirror.data.loader import Loader, check_arguments, check_counts, data_rank, rank_in, whole
from ckptmirror.data.shuffle import key_of, shuffled

__all__ = ["ShardLoader"]

_OWN = {"sampler": "shuffle=", "batch_sampler": "batch_size=", "dataset": "shards and read"}
_T = TypeVar("_T")
_Place = tuple[list[tuple[int, int]], int]  # the open shards (their number in the list, the offset), and how many wait
Read = Callable[[str, int], Iterable[Any]]


class ShardLoader(Loader[ShardCursor]):
    """Loads batches of samples that come out of shards, and knows where the loop is in each of them.

    The shards of an epoch are shared out over ranks and workers. The same number of ranks and workers continues in the
    same order; any other shares out what is unread, each shard from where it was left. Ranks have different numbers of
    batches.

    Args:
        shards: The names, or a dict from name to something that changes with the contents, such as the size in bytes.
        read: ``read(name, n)`` returns the samples of a shard from the n-th on. Picklable, if workers are spawned.
        batch_size: Samples in a batch. A worker fills a batch from its own shards.
        seed: Of the order; the same on all ranks.
        shuffle: Whether the order of the shards is shuffled anew in each epoch.
        shuffle_block: How many consecutive samples of a shard are shuffled together; 1 keeps their order. A worker
            holds so many samples in memory for each open shard.
        open_shards: How many shards a worker reads at a time, a sample of each in turn.
        drop_last: Whether the last batch of a worker is dropped if it is not full.
        rank: Which part of the data this process reads, of ``world_size``; by default its rank in the default process
            group. Ranks that have to get the same batches, as with tensor parallelism, give the same number.
        world_size: How many parts there are.
        collate_fn: Makes a batch of a list of samples; by default torch's.
        num_workers: How many processes read; with 0 this one does.
        dataloader: Other arguments of ``DataLoader``: ``pin_memory``, ``prefetch_factor``, ``worker_init_fn`` …

    Raises:
        UsageError: An argument is wrong.
    """

    def __init__(
        self,
        shards: Iterable[str] | Mapping[str, Version],
        read: Read,
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_block: int = 1,
        open_shards: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        **dataloader: Any,
    ) -> None:
        check_arguments("ShardLoader", _OWN, dataloader)
        if dataloader.get("persistent_workers"):
            raise UsageError("ShardLoader cannot keep its workers: each epoch gives them other shards.")
        check_counts(batch_size=batch_size, shuffle_block=shuffle_block, open_shards=open_shards)
        if isinstance(shards, str) or not isinstance(shards, Iterable) or not callable(read):
            raise UsageError(
                f"ShardLoader takes names of shards and a function that reads one, not {shards!r} and {read!r}.",
                hint="Write ShardLoader(sorted(glob('train-*.txt')), read), where read(name, offset) yields samples.",
            )
        listed = sorted(shards.items()) if isinstance(shards, Mapping) else [(name, None) for name in sorted(shards)]
        self._shards = [Shard(name, version) for name, version in listed]
        if len(dict(listed)) < len(listed):
            raise UsageError("Two shards have one name.")
        self._seed, self._shuffle = seed, shuffle
        self._rank, self._world_size = data_rank(rank, world_size)
        if len(listed) < self._world_size:
            raise UsageError(
                f"There are {len(listed)} shards for {self._world_size} ranks: a rank would have nothing to read.",
                hint="Split the data into more files, many for each worker, or use a SampleLoader.",
            )
        self._readers = max(1, num_workers)
        reading = _Reading(read, seed if shuffle_block > 1 else None, shuffle_block, open_shards)
        self._stream = _Stream(reading, batch_size, collate_fn, drop_last)
        order = {"seed": seed, "shuffle": shuffle, "shuffle_block": shuffle_block}
        super().__init__("ShardLoader", order, self._of_epoch(0, {}))
        self._arguments = {"generator": self._generator, "num_workers": num_workers, **dataloader}

    def _ordered(self, epoch: int) -> list[Shard]:
        """Return all shards in the order of an epoch."""
        numbers = range(len(self._shards))
        key = key_of("shards", self._seed, epoch)
        return [self._shards[at] for at in (shuffled(numbers, len(numbers), key) if self._shuffle else numbers)]

    def _of_epoch(self, epoch: int, ahead: Mapping[int, tuple[Shard, ...]]) -> ShardCursor:
        unread = ahead.get(epoch) if epoch in ahead else self._ordered(epoch)
        later = {number: left for number, left in ahead.items() if number > epoch}
        lists = shared_out(unread or (), self._rank, self._world_size, self._readers)
        return ShardCursor(self._rank, self._world_size, lists, epoch, listing_of(self._shards), later)

    def _start_of(self, epoch: int) -> ShardCursor:
        return self._of_epoch(epoch, self._now().ahead)

    def _batches(self, start: ShardCursor) -> Iterator[tuple[Any, Callable[[], ShardCursor]]]:
        stream = replace(self._stream, epoch=start.epoch, lists=start.lists)
        loader: DataLoader[Any] = DataLoader(stream, batch_size=None, collate_fn=_as_it_is, **self._arguments)
        places: tuple[_Place, ...] = tuple(([], len(one)) for one in start.lists)
        for batch, worker, place in loader:
            places = (*places[:worker], place, *places[worker + 1 :])
            yield batch, partial(_behind, start, places, worker)

    def _continued(self, saved: ShardCursor) -> ShardCursor | None:
        here = (self._rank, self._world_size, listing_of(self._shards))
        is_same = here == (saved.rank, saved.world_size, saved.listing)
        return with_readers(saved, self._ordered, self._readers) if is_same else None

    def _merged(self, cursors: Sequence[ShardCursor]) -> ShardCursor:
        return merge_shard_cursors(cursors, self._ordered, self._rank, self._world_size, self._readers)

    def _fields(self, cursor: ShardCursor) -> dict[str, Any]:
        return {
            "lists": [list(map(list, one)) for one in cursor.lists],
            "listing": cursor.listing,
            "ahead": [[epoch, list(map(list, shards))] for epoch, shards in sorted(cursor.ahead.items())],
        }

    def _parsed(self, state: Mapping[str, Any]) -> ShardCursor:
        lists = tuple(map(_shards_in, state["lists"]))
        if not lists or not isinstance(state["listing"], str):
            raise ValueError("no list of shards")
        ahead = {whole(epoch): _shards_in(shards) for epoch, shards in state["ahead"]}
        return ShardCursor(*rank_in(state), lists, whole(state["epoch"]), state["listing"], ahead)


def _behind(start: ShardCursor, places: Sequence[_Place], worker: int) -> ShardCursor:
    """Return the cursor behind a batch of ``worker``, from where each worker is in its list of ``start``."""
    lists = []
    for number in (*range(worker + 1, len(places)), *range(worker + 1)):
        opened, waiting = places[number]
        listed = start.lists[number]
        begun = (listed[at]._replace(offset=offset) for at, offset in opened)
        lists.append((*begun, *listed[len(listed) - waiting :]))
    return replace(start, lists=tuple(lists))


def _shards_in(listed: Any) -> tuple[Shard, ...]:
    found = tuple(Shard(name, version, whole(offset)) for name, version, offset in listed)
    for name, version, _ in found:
        if type(name) is not str or type(version) not in (str, int, type(None)):
            raise TypeError(f"a shard named {name!r}, of version {version!r}")
    return found


def _as_it_is(batch: _T) -> _T:
    return batch


@dataclass(eq=False)
class _Slot:
    at: int
    offset: int
    samples: Iterator[Any]


@dataclass(frozen=True)
class _Reading:
    """How a worker reads shards.

    Attributes:
        read: Reads one.
        seed: Of the blocks; None if they are not shuffled.
        block: Samples that are shuffled together.
        most: How many shards are open at a time.
    """

    read: Read
    seed: int | None
    block: int
    most: int

    def samples(self, shards: Sequence[Shard], epoch: int) -> Iterator[tuple[Any, Callable[[], _Place]]]:
        """Yield each sample of a list of shards, and what returns the place behind it."""
        waiting = deque(enumerate(shards))
        opened: deque[_Slot] = deque()

        def begin() -> _Slot:
            at, shard = waiting.popleft()
            return _Slot(at, shard.offset, iter(self._rest_of(shard, epoch)))

        def place() -> _Place:
            return [(slot.at, slot.offset) for slot in opened], len(waiting)

        while opened or waiting:
            while waiting and len(opened) < self.most:
                opened.append(begin())
            slot = opened[0]
            for sample in slot.samples:
                slot.offset += 1
                opened.rotate(-1)
                yield sample, place
                break
            else:
                opened.popleft()

    def _rest_of(self, shard: Shard, epoch: int) -> Iterator[Any]:
        number, read = divmod(shard.offset, self.block)
        samples = iter(self.read(shard.name, shard.offset if self.seed is None else number * self.block))
        if self.seed is None:
            yield from samples
            return
        while block := list(itertools.islice(samples, self.block)):
            key = key_of("block", self.seed, epoch, shard.name, number)
            for at in shuffled(range(read, len(block)), len(block), key):
                yield block[at]
            number, read = number + 1, 0


@dataclass(frozen=True)
class _Stream(IterableDataset[Any]):
    """What the ``DataLoader`` iterates over: in each worker the batches of its list."""

    reading: _Reading
    batch_size: int
    collate: Callable[[list[Any]], Any]
    drop_last: bool
    epoch: int = 0
    lists: tuple[tuple[Shard, ...], ...] = ((),)

    def __iter__(self) -> Iterator[tuple[Any, int, _Place]]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        samples = []
        for sample, place in self.reading.samples(self.lists[worker], self.epoch):
            samples.append(sample)
            if len(samples) == self.batch_size:
                yield self.collate(samples), worker, place()
                samples = []
        if samples and not self.drop_last:
            yield self.collate(samples), worker, place()
