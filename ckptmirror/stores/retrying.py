"""A store that retries: the decorator that every mirror gets from ``open_store``.

Rules:
* Only ``StoreTemporary`` is retried. Every method that reads or changes objects can be retried: each is idempotent or
  guarded by its precondition. After a lost answer the precondition may fail because of our own object; the caller gets
  that error and compares. ``identity`` is retried only if its file system hangs, because a missing mount does not come
  back within seconds.
* Time limits the retries (I7), not their number: the last error is raised ``total_s`` after the first failure.
  ``CKPTMIRROR_RETRY_S`` sets that time; ``stop_retrying`` and ``close`` end it at once.
* The time counts for the mirror, not for each call. A mirror that has not answered for that long is *silent*. Each call
  then tries once, until the mirror answers or a start calls ``ask_patiently``.
* A retried upload continues with the session of the failed try; a retried listing continues after the last name that
  it yielded.
* The first try costs nothing extra: the retry library is imported after the first failure.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckptmirror.core.errors import CkptMirrorError, ConfigError, StoreHangs, StoreTemporary
from ckptmirror.core.retry_delay import retry_delay_s
from ckptmirror.stores.base import ObjectInfo, Store, Upload
from ckptmirror.stores.decorator import StoreDecorator

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = ["OnWait", "RetryingStore", "total_s_of_environment"]

_TOTAL_S = 120.0
_SHORTEST_S = 0.01  # with less time left than this, stop
_VARIABLE = "CKPTMIRROR_RETRY_S"

OnWait: TypeAlias = Callable[[str, float, StoreTemporary], None]
"""Called before a mirror is asked again: its URL, the delay in seconds, and the reason."""
_Result = TypeVar("_Result")


def total_s_of_environment() -> float:
    """Return for how many seconds to retry a mirror that does not answer.

    Raises:
        ConfigError: The variable is not a number of seconds.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return _TOTAL_S
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
    """``store``, with retries of temporary errors.

    Args:
        store: The store behind.
        total_s: No try begins later than this after the first failure.
        first_delay_s: Longest delay after the first try; it doubles with each try.
        longest_delay_s: The limit of the doubling.
        clock: Seconds, monotonic; tests pass their own.
        wait: Waits so many seconds, or until retrying is stopped; tests pass their own.
        on_wait: Called before each wait with the mirror's URL, the seconds, and what went wrong.
    """

    def __init__(
        self,
        store: Store,
        *,
        total_s: float = _TOTAL_S,
        first_delay_s: float = 0.5,
        longest_delay_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
        on_wait: OnWait | None = None,
    ) -> None:
        super().__init__(store)
        self._on_wait = on_wait
        self._total_s = total_s
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._clock = clock
        self._is_over = threading.Event()
        self._wait = wait if wait is not None else self._is_over.wait
        self._silent_since_s: float | None = None

    def identity(self, expected: str | None = None) -> str | None:
        return self._retried(lambda: self._store.identity(expected), StoreHangs)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List the objects; each page is retried by itself."""
        listing = _Listing(self._store, prefix)
        while (info := self._retried(listing.next)) is not None:
            yield info

    def upload(self, upload: Upload) -> ObjectInfo:
        session = upload.session

        def keep(learned: str) -> None:
            nonlocal session
            session = learned
            upload.on_session(learned)

        return self._retried(lambda: self._store.upload(replace(upload, session=session, on_session=keep)))

    def stop_retrying(self) -> None:
        """End the waits between tries, and stop retrying."""
        self._is_over.set()
        super().stop_retrying()

    def ask_patiently(self) -> None:
        """Forget that the mirror was silent, and retry again."""
        self._silent_since_s = None
        self._is_over.clear()
        super().ask_patiently()

    def close(self) -> None:
        """Stop retrying, and close the store behind."""
        self._is_over.set()
        super().close()

    def _call(self, operation: str, name: str, run: Callable[[], _Result], size_bytes: int = 0) -> _Result:
        del operation, name, size_bytes
        return self._retried(run)

    def _retried(self, operation: Callable[[], _Result], retried: type[StoreTemporary] = StoreTemporary) -> _Result:
        try:
            return self._try(operation)
        except retried as error:
            return self._call_again(operation, error, retried)

    def _try(self, operation: Callable[[], _Result]) -> _Result:
        try:
            result = operation()
        except StoreTemporary:
            if self._silent_since_s is None:
                self._silent_since_s = self._clock()
            raise
        except CkptMirrorError:
            self._silent_since_s = None  # an answer, too
            raise
        self._silent_since_s = None
        return result

    def _call_again(
        self, operation: Callable[[], _Result], first_error: StoreTemporary, retried: type[StoreTemporary]
    ) -> _Result:
        from tenacity import Retrying, retry_if_exception_type

        first_failed_s = self._clock()
        errors = [first_error]

        def operation_after_the_first() -> _Result:
            if errors:
                raise errors.pop()
            return self._try(operation)

        def left_s() -> float:
            silent_since_s = self._silent_since_s
            since_s = first_failed_s if silent_since_s is None else min(first_failed_s, silent_since_s)
            return since_s + self._total_s - self._clock()

        def delay_s(state: RetryCallState) -> float:
            error = _error_of(state)
            drawn_s = retry_delay_s(
                error, state.attempt_number, first_s=self._first_delay_s, longest_s=self._longest_delay_s
            )
            return max(min(drawn_s, left_s()), error.retry_after_s or 0.0)  # the last try is when the time ends

        def is_enough(state: RetryCallState) -> bool:
            return self._is_over.is_set() or left_s() < _SHORTEST_S or state.upcoming_sleep > left_s() + _SHORTEST_S

        retrying = Retrying(
            retry=retry_if_exception_type(retried),
            stop=is_enough,
            wait=delay_s,
            sleep=self._sleep,
            before_sleep=self._tell,
            reraise=True,
        )
        return retrying(operation_after_the_first)

    def _sleep(self, delay_s: float) -> None:
        self._wait(delay_s)

    def _tell(self, state: RetryCallState) -> None:
        if self._on_wait is not None:
            self._on_wait(self.url, state.upcoming_sleep, _error_of(state))


def _error_of(state: RetryCallState) -> StoreTemporary:
    """Return the error that is about to be retried."""
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, StoreTemporary)
    return error


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
