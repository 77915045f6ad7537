"""A store that tries again: the decorator that every mirror gets from ``open_store``.

Rules:
* Only ``StoreTemporary`` is tried again, and every method that reads or changes objects may be: each is idempotent or
  guarded by its precondition. After a lost answer the precondition may meet our own object; that is passed on, the
  caller compares. ``identity`` is not: a file system that is not mounted is not so in a second.
* Delays are drawn between zero and a limit that doubles ("full jitter"), never shorter than the store's Retry-After.
* It ends with the last error after ``tries`` tries, or when the next would begin later than ``total_s`` after the
  first; ``stop_retrying`` and ``close`` end it at once. ``CKPTMIRROR_RETRY_S`` is the time, with any number of tries.
* An upload is continued with the session that the failed try learned, a listing after the last name that was yielded.
* The first try costs nothing: the retry library is imported when something has failed.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckptmirror.core.errors import ConfigError, StoreTemporary
from ckptmirror.stores.base import ObjectInfo, Store, Upload
from ckptmirror.stores.decorator import StoreDecorator

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = ["OnWait", "RetryingStore", "total_s_of_environment"]

_TOTAL_S = 120.0
_VARIABLE = "CKPTMIRROR_RETRY_S"

OnWait: TypeAlias = Callable[[str, float, StoreTemporary], None]
_Result = TypeVar("_Result")
_random = random.Random()  # the training's own numbers stay its own


def total_s_of_environment() -> float | None:
    """Return for how many seconds the user wants a mirror to be tried again; None if nothing says so.

    Raises:
        ConfigError: That is no number of seconds.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return None
    try:
        total_s = float(text)
    except ValueError:
        total_s = math.nan
    if not 0.0 <= total_s < math.inf:
        raise ConfigError(
            f"{_VARIABLE} is {text!r}, not a number of seconds.", hint=f"Correct {_VARIABLE}; 0 asks a mirror once."
        )
    return total_s


class RetryingStore(StoreDecorator):
    """``store``, with temporary faults tried again.

    Args:
        store: The store behind.
        tries: How often each call is made at most; None: as often as ``total_s`` allows.
        total_s: No try begins later than this after the first.
        first_delay_s: Longest delay after the first try; it doubles with each.
        longest_delay_s: Where the doubling stops.
        wait: Waits so many seconds, or until nothing is to be tried again; tests pass their own.
        on_wait: Told before each wait: the mirror's URL, for how many seconds, and what went wrong.
    """

    def __init__(
        self,
        store: Store,
        *,
        tries: int | None = 6,
        total_s: float = _TOTAL_S,
        first_delay_s: float = 0.5,
        longest_delay_s: float = 20.0,
        wait: Callable[[float], object] | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        super().__init__(store)
        self._on_wait = on_wait
        self._tries = tries
        self._total_s = total_s
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._is_over = threading.Event()
        self._wait = wait if wait is not None else self._is_over.wait

    def stat(self, name: str) -> ObjectInfo | None:
        """See :meth:`Store.stat`."""
        return self._call(lambda: self._store.stat(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`Store.list`. The tries are counted for the whole listing."""
        listing = _Listing(self._store, prefix)
        while (info := self._call(listing.next)) is not None:
            yield info

    def read(self, name: str, *, generation: int | None = None, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """See :meth:`Store.read`."""
        return self._call(lambda: self._store.read(name, generation=generation, limit_bytes=limit_bytes))

    def write(
        self, name: str, data: bytes, *, if_generation: int, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See :meth:`Store.write`."""
        return self._call(lambda: self._store.write(name, data, if_generation=if_generation, metadata=metadata))

    def upload(self, upload: Upload) -> ObjectInfo:
        """See :meth:`Store.upload`."""
        session = upload.session

        def keep(learned: str) -> None:
            nonlocal session
            session = learned
            upload.on_session(learned)

        return self._call(lambda: self._store.upload(replace(upload, session=session, on_session=keep)))

    def download(self, name: str, *, generation: int, offset: int, buffer: memoryview) -> None:
        """See :meth:`Store.download`."""
        self._call(lambda: self._store.download(name, generation=generation, offset=offset, buffer=buffer))

    def delete(self, name: str, *, generation: int) -> None:
        """See :meth:`Store.delete`."""
        self._call(lambda: self._store.delete(name, generation=generation))

    def stop_retrying(self) -> None:
        """End the waits between tries, and try nothing again."""
        self._is_over.set()
        super().stop_retrying()

    def close(self) -> None:
        """The same, and close the store behind."""
        self._is_over.set()
        super().close()

    def _call(self, operation: Callable[[], _Result]) -> _Result:
        try:
            return operation()
        except StoreTemporary as error:
            return self._call_again(operation, error)

    def _call_again(self, operation: Callable[[], _Result], first_error: StoreTemporary) -> _Result:
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            stop_after_attempt,
            stop_any,
            stop_before_delay,
            stop_when_event_set,
        )

        errors = [first_error]

        def operation_after_the_first() -> _Result:
            if errors:
                raise errors.pop()
            return operation()

        enough = [stop_when_event_set(self._is_over), stop_before_delay(self._total_s)]
        if self._tries is not None:
            enough.append(stop_after_attempt(self._tries))
        retrying = Retrying(
            retry=retry_if_exception_type(StoreTemporary),
            stop=stop_any(*enough),
            wait=self._delay_s,
            sleep=self._sleep,
            before_sleep=self._tell,
            reraise=True,
        )
        return retrying(operation_after_the_first)

    def _sleep(self, delay_s: float) -> None:
        self._wait(delay_s)

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if self._on_wait is not None and isinstance(error, StoreTemporary):
            self._on_wait(self.url, state.upcoming_sleep, error)

    def _delay_s(self, state: RetryCallState) -> float:
        limit_s = min(self._longest_delay_s, self._first_delay_s * 2.0 ** min(state.attempt_number - 1, 30))
        error = state.outcome.exception() if state.outcome is not None else None
        asked_s = error.retry_after_s if isinstance(error, StoreTemporary) else None
        return max(_random.uniform(0.0, limit_s), asked_s or 0.0)


class _Listing:
    """A listing that can be asked again for its next object after an error."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._names: Iterator[ObjectInfo] | None = None
        self._last = ""

    def next(self) -> ObjectInfo | None:
        """Return the next object, None after the last."""
        try:
            if self._names is None:
                self._names = (info for info in self._store.list(self._prefix) if info.name > self._last)
            info = next(self._names, None)
        except StoreTemporary:
            self._names = None
            raise
        if info is not None:
            self._last = info.name
        return info
