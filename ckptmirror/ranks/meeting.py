"""Long work of some ranks, while all ranks meet every few seconds, so that none takes another for dead.

A rank that works comes to a meeting after a third of the limit of a wait at the latest: the rest is for a busy machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ckptmirror.ranks.base import Ranks

__all__ = ["meet_until_done"]

_SIGN_OF_LIFE_S = 10.0
T = TypeVar("T")


class _AtWork(Generic[T]):
    """What a node's leader does in a thread, since a download or a silent mirror may outlast every wait for a rank."""

    def __init__(self, work: Callable[[], T], begun: Callable[[threading.Thread], None]) -> None:
        self._done = threading.Event()
        self._found: tuple[T | None, BaseException | None] = (None, None)
        thread = threading.Thread(target=self._work, args=(work,), name="ckptmirror-bring", daemon=True)
        begun(thread)
        thread.start()

    def _work(self, work: Callable[[], T]) -> None:
        try:
            self._found = (work(), None)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            self._found = (None, error)
        self._done.set()

    def wait(self, limit_s: float) -> tuple[T | None, BaseException | None]:
        """Return the result or the error; neither if the work is not over after ``limit_s`` seconds."""
        return self._found if self._done.wait(limit_s) else (None, None)


def meet_until_done(
    ranks: Ranks,
    work: Callable[[], T] | None,
    what: str,
    *,
    begun: Callable[[threading.Thread], None] = lambda _thread: None,
) -> dict[int, T]:
    """Let some ranks work, and return the results by rank. All ranks call this.

    Args:
        ranks: The ranks.
        work: What this rank does; None: nothing. It returns something other than None.
        what: A few words for messages.
        begun: Gets the thread that works, before it starts.

    Raises:
        BaseException: Whatever ``work`` raised here; otherwise the same as :meth:`Ranks.exchange`.
    """
    at_work = _AtWork(work, begun) if work is not None else None
    limit_s = min(_SIGN_OF_LIFE_S, ranks.timeout_s / 3)
    while True:
        found, failure = at_work.wait(limit_s) if at_work is not None else (None, None)
        answers = ranks.exchange((at_work is not None, found), what=what, error=failure)
        working = {rank: result for rank, (works, result) in enumerate(answers) if works}
        if None not in working.values():
            return {rank: result for rank, result in working.items() if result is not None}
