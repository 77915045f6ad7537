"""What both loaders have in common: iterating once at a time, and a state that all ranks' states can be merged into.

Rules:
* A batch counts as read when the loop gets it, not when a worker has read it ahead. So a save after a step has the
  batches of the steps so far, and no others.
* An iteration goes to the end of the epoch, from wherever it is; the next one is of the next epoch.
* The state names what must not change (the data and its order). A loader that has anything else refuses it.
* The same data ranks and workers continue with their own states. Others merge the states of all ranks of the save: all
  ranks of a job, or none.
* Nothing is drawn from torch's global generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ckptmirror.core import setting_checks
from ckptmirror.core.cursors import Cursor, one_for_each_rank
from ckptmirror.core.errors import DataChanged, IntegrityError, UsageError
from ckptmirror.data.shuffle import key_of

__all__ = ["Loader", "check_arguments", "check_counts", "data_rank", "rank_in", "whole"]

_FORMAT = 1
_Cursor = TypeVar("_Cursor", bound=Cursor)


def data_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return which part of the data this process reads: what was given, otherwise its rank in the default group.

    Raises:
        UsageError: Only one of the two was given, or they do not fit.
    """
    if rank is None and world_size is None:
        several = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    if rank is None or world_size is None:
        raise UsageError("rank and world_size belong together.", hint="Give both, or neither.")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank is {rank}; with world_size={world_size} it must be from 0 to {world_size - 1}.")
    return rank, world_size


def check_counts(**given: Any) -> None:
    """Check arguments that count something, by their names.

    Raises:
        UsageError: One is not a whole number from 1 up.
    """
    for name, number in given.items():
        try:
            setting_checks.whole(1)(number)
        except setting_checks.WrongValue as error:
            raise UsageError(f"{name} {error.why}.", hint=f"Write {name}=8, for example.") from None


def check_arguments(kind: str, own: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Check the arguments that are passed on to torch's ``DataLoader``.

    Args:
        kind: The loader that passes them on.
        own: What it sets itself, and what to use in its place.
        given: The arguments.

    Raises:
        UsageError: One does not go with it.
    """
    for name in own.keys() & given.keys():
        raise UsageError(f"{kind} takes no {name}: it orders the samples itself.", hint=f"Use {own[name]}.")
    if not given.get("in_order", True):
        raise UsageError(
            f"{kind} takes no in_order=False: the batches that the loop has had must be the first ones.",
            hint="Leave in_order out.",
        )


class Loader(ABC, Generic[_Cursor]):
    """A loader that continues where the loop was, on any number of ranks and workers.

    Args:
        kind: Which loader it is, for the state.
        order: What must not change within an epoch, by the name of the argument.
        first: Where this rank starts.
    """

    def __init__(self, kind: str, order: Mapping[str, Any], first: _Cursor) -> None:
        self._kind = kind
        self._order = dict(order)
        self._now: Callable[[], _Cursor] = lambda: first
        self._iteration: object = None
        self._generator = torch.Generator()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._now().epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what is left of the epoch."""
        self._iteration = iteration = object()
        return self._read(iteration)

    def _read(self, iteration: object) -> Iterator[Any]:
        self._check_is_last(iteration)
        start = self._now()
        self._generator.manual_seed(key_of(self._state(start)) % 2**63)  # the workers' seeds are drawn from it
        for batch, now in self._batches(start):
            self._check_is_last(iteration)
            self._now = now
            yield batch
        self._check_is_last(iteration)
        following = self._start_of(start.epoch + 1)
        self._now = lambda: following

    def _check_is_last(self, iteration: object) -> None:
        if self._iteration is not iteration:
            raise UsageError(
                "This iteration over the data is over: another one has begun, or a position was loaded.",
                hint="Iterate over a loader once at a time, and call resume() before the loop.",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is in the data, and what the data is."""
        return self._state(self._now())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank, or of the only rank.

        Raises:
            UsageError: It is that of one of several ranks, and there are other ranks or workers here.
            DataChanged: It is of other data, or of data in another order.
            IntegrityError: It is broken.
        """
        saved = self._cursor_of(state)
        cursor = self._continued(saved)
        if cursor is None and saved.world_size > 1:
            raise UsageError(
                f"This is the position of data rank {saved.rank} of {saved.world_size}, and here are other ranks or "
                "batches: the positions of the others are needed too.",
                hint="Pass the loader as TrainState(dataloader=...), or merge_state_dicts() of all ranks.",
            )
        cursor = cursor or self._merged([saved])
        self._iteration = None
        self._now = lambda: cursor

    def merge_state_dicts(
        self,
        states: Sequence[Mapping[str, Any]],
        rank: int,
        world_size: int,  # noqa: ARG002 - it knows how many data ranks there are
    ) -> dict[str, Any]:
        """Return this rank's state from those of all ranks of a save; ckptmirror calls it in each load.

        Args:
            states: The states, by rank of the save. Each is read only when it is needed.
            rank: The rank of this process.
            world_size: The number of ranks now.

        Raises:
            DataChanged: They are of other data, or of data in another order.
            IntegrityError: One is missing or broken, or they do not belong together.
        """
        if rank < len(states):
            own = self._continued(self._cursor_of(states[rank]))
            if own is not None:
                return self._state(own)
        cursors = one_for_each_rank([self._cursor_of(state) for state in states])
        for cursor in cursors:  # another rank may have saved it, if more or fewer ranks share a data rank now
            if (own := self._continued(cursor)) is not None:
                return self._state(own)
        return self._state(self._merged(cursors))

    def _state(self, cursor: _Cursor) -> dict[str, Any]:
        fields = {"rank": cursor.rank, "world_size": cursor.world_size, "epoch": cursor.epoch}
        return {"loader": self._kind, "format": _FORMAT, "order": self._order, **fields, **self._fields(cursor)}

    def _cursor_of(self, state: Mapping[str, Any]) -> _Cursor:
        if not isinstance(state, Mapping) or state.get("loader") != self._kind:
            what = state.get("loader") if isinstance(state, Mapping) else None
            raise UsageError(f"The save has the position of {what or 'another loader'}, not of a {self._kind}.")
        if state.get("format") != _FORMAT or not isinstance(state.get("order"), Mapping):
            raise IntegrityError(f"The position in the data is of format {state.get('format')!r}, not {_FORMAT}.")
        for name, here in self._order.items():
            if (saved := state["order"].get(name)) != here:
                raise DataChanged(
                    f"The position in the save is of data with {name}={saved!r}; here it is {name}={here!r}.",
                    hint=f'Give {name}={saved!r}, or start the data from its beginning: exclude=("dataloader",).',
                )
        try:
            return self._parsed(state)
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"The position in the data is broken: {type(error).__name__}: {error}") from error

    @abstractmethod
    def _batches(self, start: _Cursor) -> Iterator[tuple[Any, Callable[[], _Cursor]]]:
        """Yield each batch from ``start`` to the end of the epoch, and what returns the cursor behind it."""

    @abstractmethod
    def _start_of(self, epoch: int) -> _Cursor:
        """Return the cursor before the first batch of an epoch."""

    @abstractmethod
    def _continued(self, saved: _Cursor) -> _Cursor | None:
        """Return where this rank continues by itself; None if that needs the cursors of all ranks."""

    @abstractmethod
    def _merged(self, cursors: Sequence[_Cursor]) -> _Cursor:
        """Return this rank's cursor from those of all ranks."""

    @abstractmethod
    def _fields(self, cursor: _Cursor) -> dict[str, Any]:
        """Return what else a state has of a cursor, as plain values."""

    @abstractmethod
    def _parsed(self, state: Mapping[str, Any]) -> _Cursor:
        """Return the cursor of a state; raises ValueError, TypeError or KeyError if it is broken."""


def whole(value: Any, least: int = 0) -> int:
    """Return a number of a state.

    Raises:
        ValueError: It is none, or too low.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is not a number from {least} on")
    return value


def rank_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the data rank of a state, and how many there were.

    Raises:
        ValueError: They do not fit.
    """
    rank, world_size = whole(state["rank"]), whole(state["world_size"], 1)
    if rank >= world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    return rank, world_size
