"""A loader of data with a length and an index: every sample of an epoch once, on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from torch.utils.data import DataLoader

from ckptmirror.core.errors import UsageError
from ckptmirror.core.sample_cursors import Interval, Last, SampleCursor, merge_sample_cursors
from ckptmirror.data.loader import Loader, check_arguments, check_counts, data_rank, rank_in, whole
from ckptmirror.data.shuffle import key_of, shuffled

__all__ = ["SampleLoader"]

_OWN = {"sampler": "shuffle=", "batch_sampler": "batch_size=", "drop_last": 'last="drop"'}


class SampleLoader(Loader[SampleCursor]):
    """Loads batches of a map-style data set through a ``DataLoader``, and knows which samples the loop has had.

    Each step takes the next ``world_size * batch_size`` samples of the epoch's order, which depends on ``seed`` and
    epoch alone. So a run that keeps this product sees the same samples in each step on any number of ranks.

    Args:
        dataset: Anything with ``len()`` and ``[index]``.
        batch_size: Samples in a batch of one rank; the same on all ranks.
        seed: Of the order; the same on all ranks.
        shuffle: Whether the samples are shuffled anew in each epoch.
        last: What becomes of the last samples of an epoch, if they are too few for a whole step. ``"pad"``: each rank
            gets the same number, and at most ``world_size - 1`` samples are repeated for that. ``"drop"``: no rank gets
            them in this epoch. ``"uneven"``: each is given once; a rank may get one less than another, or no batch.
        version: Something that changes with the data; a save of other data is then refused. The length is always
            compared.
        rank: Which part of the data this process reads, of ``world_size``; by default its rank in the default process
            group. Ranks that have to get the same batches, as with tensor parallelism, give the same number.
        world_size: How many parts there are.
        dataloader: Arguments of ``DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` …

    Raises:
        UsageError: An argument is wrong.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "pad",
        version: str | int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **dataloader: Any,
    ) -> None:
        check_arguments("SampleLoader", _OWN, dataloader)
        if last not in get_args(Last):
            raise UsageError(f'last is {last!r}; it must be "pad", "drop" or "uneven".')
        check_counts(batch_size=batch_size)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"SampleLoader takes data with len() and [index], not an object of type {type(dataset).__qualname__}.",
                hint="Data that can only be read from its beginning goes into many files: ShardLoader reads those.",
            )
        size = len(dataset)
        self._seed, self._shuffle = seed, shuffle
        self._first = SampleCursor(size, *data_rank(rank, world_size), batch_size, last)
        order = {"size": size, "version": version, "seed": seed, "shuffle": shuffle}
        super().__init__("SampleLoader", order, self._first)
        dataloader = {"generator": self._generator, **dataloader}
        sampler = _Batches(self._indices, self.__len__)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **dataloader)

    def __len__(self) -> int:
        """Return how many batches are left of the epoch."""
        cursor = self._now()
        return cursor.batches_in_all - cursor.batches

    def _indices(self) -> Iterator[list[int]]:
        cursor = self._now()
        key = key_of("samples", self._seed, cursor.epoch)
        for number in range(cursor.batches, cursor.batches_in_all):
            positions = cursor.positions(number)
            yield shuffled(positions, cursor.size, key) if self._shuffle else positions

    def _batches(self, start: SampleCursor) -> Iterator[tuple[Any, Callable[[], SampleCursor]]]:
        for number, batch in enumerate(self._loader, start.batches + 1):
            yield batch, partial(replace, start, batches=number)

    def _start_of(self, epoch: int) -> SampleCursor:
        return self._now().in_epoch(epoch)

    def _continued(self, saved: SampleCursor) -> SampleCursor | None:
        one, other = (replace(each, epoch=0, done=(), batches=0, ahead={}) for each in (saved, self._first))
        return saved if one == other else None

    def _merged(self, cursors: Sequence[SampleCursor]) -> SampleCursor:
        return merge_sample_cursors(cursors, self._first)

    def _fields(self, cursor: SampleCursor) -> dict[str, Any]:
        return {
            "batch_size": cursor.batch_size,
            "last": cursor.last,
            "batches": cursor.batches,
            "done": _listed(cursor.done),
            "ahead": [[epoch, _listed(done)] for epoch, done in sorted(cursor.ahead.items())],
        }

    def _parsed(self, state: Mapping[str, Any]) -> SampleCursor:
        if state["last"] not in get_args(Last):
            raise ValueError(f"last is {state['last']!r}")
        cursor = SampleCursor(
            self._first.size,
            *rank_in(state),
            whole(state["batch_size"], 1),
            state["last"],
            whole(state["epoch"]),
            self._intervals(state["done"]),
            whole(state["batches"]),
            {whole(epoch): self._intervals(done) for epoch, done in state["ahead"]},
        )
        if cursor.batches > cursor.batches_in_all:
            raise ValueError(f"{cursor.batches} batches of {cursor.batches_in_all}")
        return cursor

    def _intervals(self, listed: Any) -> tuple[Interval, ...]:
        found = tuple((whole(begin), whole(end, begin + 1)) for begin, end in listed)
        edges = [edge for interval in found for edge in interval]
        if edges != sorted(set(edges)) or (edges and edges[-1] > self._first.size):
            raise ValueError("intervals that overlap, or that end behind the data")
        return found


def _listed(intervals: Sequence[Interval]) -> list[list[int]]:
    return [list(interval) for interval in intervals]


class _Batches:
    """The batch sampler: the samples of each batch that is left."""

    def __init__(self, indices: Callable[[], Iterator[list[int]]], count: Callable[[], int]) -> None:
        self._indices = indices
        self._count = count

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices()

    def __len__(self) -> int:
        return self._count()
