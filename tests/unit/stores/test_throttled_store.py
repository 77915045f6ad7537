"""The throttled decorator: budgets on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptmirror.core.errors import ConfigError, StoreTemporary
from ckptmirror.stores import memory
from ckptmirror.stores.throttled import Budget, ThrottledStore
from tests.contract.stores_under_test import pattern_bytes, upload_of

MIB = 1024 * 1024


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, delay_s: float) -> bool:
        self.now_s += delay_s
        return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Callable[..., ThrottledStore]:
    memory.drop("throttled")
    return lambda **limits: ThrottledStore(memory.open("memory://throttled"), clock=clock, wait=clock.wait, **limits)


def test_the_first_second_is_free_and_the_rest_keeps_the_rate(clock: Clock) -> None:
    budget = Budget(10.0, clock)
    assert budget.take(10) == 0.0
    assert budget.take(5) == pytest.approx(0.5)
    clock.wait(0.5)
    assert budget.take(10) == pytest.approx(1.0)


def test_an_idle_hour_saves_up_no_burst(clock: Clock) -> None:
    budget = Budget(10.0, clock)
    clock.wait(3600.0)
    assert budget.take(10) == 0.0
    assert budget.take(10) == pytest.approx(1.0)


def test_bytes_take_as_long_as_the_rate_says_in_both_directions(
    clock: Clock, store: Callable[..., ThrottledStore]
) -> None:
    data = pattern_bytes(8 * MIB)
    slow = store(bytes_per_s=2 * MIB)
    began = clock()
    info = slow.upload(upload_of("x", data))
    assert clock() - began == pytest.approx(3.0)  # eight, less the second that is free
    began = clock()
    slow.download("x", generation=info.generation, offset=0, buffer=memoryview(bytearray(4 * MIB)))
    assert clock() - began == pytest.approx(2.0)


def test_requests_of_any_kind_take_as_long_as_the_rate_says(clock: Clock, store: Callable[..., ThrottledStore]) -> None:
    slow = store(requests_per_s=4.0)
    began = clock()
    for _ in range(4):
        slow.stat("x")
        list(slow.list())
    slow.write("x", b"1", if_generation=0)
    slow.read("x", limit_bytes=1)
    assert clock() - began == pytest.approx(10 / 4 - 1)


def test_without_limits_nothing_waits(clock: Clock, store: Callable[..., ThrottledStore]) -> None:
    free = store()
    began = clock()
    free.upload(upload_of("x", pattern_bytes(MIB)))
    assert clock() == began


def test_what_waits_when_the_store_is_closed_ends_with_a_temporary_error() -> None:
    memory.drop("throttled")
    slow = ThrottledStore(memory.open("memory://throttled"), bytes_per_s=1.0)
    slow.close()
    with pytest.raises(StoreTemporary, match="was closed"):
        slow.upload(upload_of("x", b"12345678"))


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Budget(rate)
