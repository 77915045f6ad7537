"""Patience: how long who asks all mirrors, for a commit on one of them, waits for the others.

Rules:
* That one is waited for, and so are those that a save must be on to be safe. The others have a limited time: while one
  of them hangs, the required ones still get their commits.
* One that is late is not asked again, nor waited for, until it has answered. Then that answer is taken, unless it was
  asked for long ago, or is waited for now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local.daemon_pool import begin

__all__ = ["Patience"]

_OLD_S = 600.0
_Answer = TypeVar("_Answer")


class _Late(NamedTuple):
    """A question that was not answered in time, and when it was asked."""

    answer: Future[Any]
    asked_s: float


class Patience:
    """Asks mirrors, again and again, from any thread.

    Args:
        limit_s: How long the others are waited for, in seconds, once these have answered.
    """

    def __init__(self, limit_s: float = 30.0) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._late: dict[tuple[str, str], _Late] = {}

    def is_late(self) -> bool:
        """Whether any mirror was late, and has not been asked since."""
        with self._lock:
            return bool(self._late)

    def ask(
        self,
        what: str,
        mirrors: Sequence[Mirror],
        awaited: Collection[str],
        ask: Callable[[Mirror], _Answer],
        late: Callable[[StoreTemporary], _Answer],
    ) -> dict[str, _Answer]:
        """Ask all mirrors at once; return their answers by URL.

        Args:
            what: Names the question.
            mirrors: The mirrors.
            awaited: The URLs of those that are waited for.
            ask: Asks one.
            late: Returns what stands for the answer of one that is late.
        """
        asked: dict[str, _Late] = {}
        with self._lock:
            hanging = {url for (_, url), one in self._late.items() if not one.answer.done()}
            for mirror in mirrors:
                is_awaited = mirror.url in awaited
                if is_awaited or mirror.url not in hanging:
                    now_s = time.monotonic()
                    before = self._late.pop((what, mirror.url), None)
                    if before is None or is_awaited or now_s - before.asked_s > _OLD_S:
                        before = _Late(begin(partial(ask, mirror), "ckptmirror-survey"), now_s)
                    asked[mirror.url] = before
        wait([one.answer for url, one in asked.items() if url in awaited])
        wait([one.answer for one in asked.values()], self._limit_s)
        in_time = {url: one.answer for url, one in asked.items() if one.answer.done()}
        with self._lock:
            self._late |= {(what, url): one for url, one in asked.items() if url not in in_time}
        answers: dict[str, _Answer] = {}
        for url in (mirror.url for mirror in mirrors):
            if url in in_time:
                answers[url] = in_time[url].result()
            else:
                answers[url] = late(StoreTemporary(f"{url} did not answer within {self._limit_s:g} s."))
        return answers
