"""How often a rank that works for long shows the others that it lives."""

from __future__ import annotations

import threading
from typing import TypeVar

import pytest

from ckptmirror.core.errors import RootLocked
from ckptmirror.ranks import SingleRank
from ckptmirror.ranks.meeting import meet_until_done

MEETINGS = 3
T = TypeVar("T")


class Hasty(SingleRank):
    """A channel with a short limit, which counts how often its ranks met."""

    timeout_s = 0.03

    def __init__(self) -> None:
        self.met = 0
        self.met_often = threading.Event()

    def exchange(self, value: T, *, what: str, error: BaseException | None = None) -> list[T]:
        self.met += 1
        if self.met == MEETINGS:
            self.met_often.set()
        return super().exchange(value, what=what, error=error)


def test_ranks_meet_several_times_within_the_limit_of_a_wait() -> None:
    ranks = Hasty()
    found = meet_until_done(ranks, lambda: ranks.met_often.wait(9.0), "look")  # by itself, a rank meets every 10 s
    assert found == {0: True}


def test_a_rank_that_does_nothing_only_meets() -> None:
    assert meet_until_done(Hasty(), None, "look") == {}


def test_what_fails_in_the_work_is_raised() -> None:
    def fails() -> int:
        raise RootLocked("somebody else has it")

    with pytest.raises(RootLocked, match="somebody else"):
        meet_until_done(SingleRank(), fails, "look")
