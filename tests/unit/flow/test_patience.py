"""Patience: some mirrors are waited for, the others only so long, and one that hangs is asked once."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import wait

from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.start.patience import Patience
from ckptmirror.local.daemon_pool import begin
from ckptmirror.stores import open_store

A, B = "memory://patience/a", "memory://patience/b"
MIRRORS = [Mirror(url, False, open_store(url)) for url in (A, B)]


class Asked:
    """Answers with how often a mirror was asked; ``hanging`` ones answer once they may."""

    def __init__(self, *hanging: str) -> None:
        self.times: Counter[str] = Counter()
        self.hanging = set(hanging)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def __call__(self, mirror: Mirror) -> int | str:
        self.times[mirror.url] += 1
        mine = self.times[mirror.url]
        if mirror.url in self.hanging:
            self.is_asked.set()
            self.may_answer.wait()
        return mine


def test_a_mirror_that_is_not_waited_for_and_hangs_is_asked_once_until_it_has_answered() -> None:
    patience, asked = Patience(0.0), Asked(B)
    late = patience.ask("list", MIRRORS, [A], asked, str)
    assert (late[A], late[B]) == (1, f"{B} did not answer within 0 s.")
    assert patience.ask("saves", MIRRORS, [A], asked, str)[B] == late[B]
    assert asked.times == {A: 2, B: 1}
    asked.hanging.clear()
    asked.may_answer.set()
    wait([one.answer for one in patience._late.values()])
    assert patience.is_late()
    assert patience.ask("list", MIRRORS, [A], asked, str) == {A: 3, B: 1}  # what it was asked before
    assert not patience.is_late()


def test_one_that_is_waited_for_is_asked_now() -> None:
    patience, asked = Patience(0.0), Asked(A)
    assert patience.ask("list", MIRRORS, (), asked, str)[A] == f"{A} did not answer within 0 s."
    asked.is_asked.clear()
    found = begin(lambda: patience.ask("list", MIRRORS, [A], asked, str), "ask")
    asked.is_asked.wait()
    asked.may_answer.set()
    assert found.result()[A] == 2
