"""Patience: how long who asks all mirrors waits for those that are not required.

Rules:
* Required mirrors are waited for. The others have a limited time: while one of them hangs, the required ones still get
  their commits.
* One that is late is not asked again, nor waited for, until it has answered. Then that answer is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local.daemon_pool import begin

__all__ = ["Patience"]

_Answer = TypeVar("_Answer")


class Patience:
    """Asks mirrors, again and again.

    Args:
        limit_s: How long a mirror that is not required is waited for, in seconds, once all that are required have
            answered; infinite: until it has answered, or is given up.
    """

    def __init__(self, limit_s: float = 30.0) -> None:
        self._limit_s = limit_s
        self._late: dict[tuple[str, str], Future[Any]] = {}

    def ask(
        self,
        what: str,
        mirrors: Sequence[Mirror],
        ask: Callable[[Mirror], _Answer],
        late: Callable[[StoreTemporary], _Answer],
    ) -> dict[str, _Answer]:
        """Ask all mirrors at once; return their answers by URL.

        Args:
            what: Names the question.
            mirrors: The mirrors.
            ask: Asks one.
            late: Returns what stands for the answer of one that is late.
        """
        hanging = {url for (_, url), answer in self._late.items() if not answer.done()}
        asked: dict[str, Future[_Answer]] = {}
        for mirror in mirrors:
            if mirror.url not in hanging:
                before = self._late.pop((what, mirror.url), None)
                asked[mirror.url] = before or begin(partial(ask, mirror), "ckptmirror-survey")
        wait([asked[mirror.url] for mirror in mirrors if mirror.required])
        wait(asked.values(), None if math.isinf(self._limit_s) else self._limit_s)
        self._late |= {(what, url): answer for url, answer in asked.items() if not answer.done()}
        answers: dict[str, _Answer] = {}
        for url in (mirror.url for mirror in mirrors):
            answer = asked.get(url)
            if answer is not None and (what, url) not in self._late:
                answers[url] = answer.result()
            else:
                answers[url] = late(StoreTemporary(f"{url} did not answer within {self._limit_s:g} s."))
        return answers
