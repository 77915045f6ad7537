"""A store that reports what it does: one event for each call, for metrics, the log and the timeline.

Rules:
* It sends an event when a call ends, whether it succeeded or failed. No decision depends on these events.
* It wraps the store itself, inside the retrying one, so it reports every try.
* It reports a listing once, after the last object or a failure.
* The bytes of an upload are the object's size; a continued session sends fewer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ckptmirror.core.events import EventBus, StoreCalled
from ckptmirror.stores.base import ObjectInfo, Store
from ckptmirror.stores.decorator import StoreDecorator

__all__ = ["ObservedStore"]

_Result = TypeVar("_Result")


@dataclass
class _Call:
    """What is known only when a call ends."""

    size_bytes: int = 0


class ObservedStore(StoreDecorator):
    """``store``, with an event for each call.

    Args:
        store: The store behind.
        bus: Gets the events.
        clock: Seconds, monotonic.
    """

    def __init__(self, store: Store, bus: EventBus, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._bus = bus
        self._clock = clock

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._reported("list", prefix):
            yield from self._store.list(prefix)

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        with self._reported("read", name) as call:
            data, info = self._store.read(name, generation=generation, limit_bytes=limit_bytes)
            call.size_bytes = len(data)
            return data, info

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        with self._reported(operation, name, size_bytes):
            return run()

    @contextmanager
    def _reported(self, operation: str, name: str, size_bytes: int = 0) -> Iterator[_Call]:
        call, began, error = _Call(size_bytes), self._clock(), ""
        try:
            yield call
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self._bus.emit(
                StoreCalled(
                    mirror=self.url,
                    operation=operation,
                    name=name,
                    size_bytes=call.size_bytes if not error else 0,
                    duration_s=self._clock() - began,
                    error=error,
                )
            )
