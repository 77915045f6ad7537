"""The guard of a directory that may hang: what is given up, what is refused meanwhile, and what may still happen."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmirror.core.errors import StoreHangs
from ckptmirror.local.hang_guard import HangGuard, beat, guarded_call, hang_guard

PLACE = Path("/nfs/run 17")


class Hung:
    """Calls that hang until they are released."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.over = threading.Event()
        self.ended_by: BaseException | None = None

    def __call__(self) -> str:
        self.answers.wait(60)
        try:
            beat()
        except BaseException as error:
            self.ended_by = error
            raise
        finally:
            self.over.set()
        return "answered"

    def release(self) -> None:
        self.answers.set()
        assert self.over.wait(60)


@pytest.fixture
def hung() -> Iterator[Hung]:
    one = Hung()
    yield one
    one.answers.set()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def raised(call: Callable[[], object]) -> StoreHangs:
    with pytest.raises(StoreHangs) as caught:
        call()
    return caught.value


def test_a_call_that_hangs_is_given_up_and_the_error_names_the_path_and_what_to_look_at(hung: Hung) -> None:
    error = raised(lambda: HangGuard(PLACE).call(hung, limit_s=0.0))
    assert "/nfs/run 17 does not answer" in str(error)
    assert "stat '/nfs/run 17'" in error.hint
    assert "mount" in error.hint
    assert error.temporary
    assert error.exit_code == 5


def test_what_a_call_returns_and_raises_is_the_callers() -> None:
    guard = HangGuard(PLACE)
    assert guard.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 // 0)
    assert guard.call(threading.current_thread) is not threading.current_thread()


def found_hanging(guard: HangGuard, hung: Hung) -> None:
    """Somebody waited for a call in vain, and nothing is to be asked for the next 40 s."""
    raised(lambda: guard.call(hung, limit_s=0.0))
    guard._next_s += 40


def test_while_a_call_hangs_others_are_refused_at_once_until_it_returns(hung: Hung) -> None:
    guard = HangGuard(PLACE, Clock())
    found_hanging(guard, hung)
    made: list[int] = []
    assert "hanging" in str(raised(lambda: guard.call(lambda: made.append(1))))
    assert made == []
    hung.release()
    while guard._hanging:  # its thread is about to say so
        HangGuard(PLACE).call(lambda: None)
    guard.call(lambda: made.append(2))
    assert made == [2]


def test_now_and_then_one_is_let_through_since_the_mount_may_be_another(hung: Hung) -> None:
    clock = Clock()
    guard = HangGuard(PLACE, clock)
    found_hanging(guard, hung)
    raised(lambda: guard.call(lambda: "other mount"))
    clock.now_s += 40
    assert guard.call(lambda: "other mount") == "other mount"


def test_what_was_given_up_ends_at_its_next_piece(hung: Hung) -> None:
    raised(lambda: HangGuard(PLACE).call(hung, limit_s=0.0))
    hung.release()
    assert hung.ended_by is not None


def test_who_waits_can_be_interrupted(hung: Hung) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def hang() -> str:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return hung()

    earlier = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            HangGuard(PLACE).call(hang)
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    hung.release()
    assert hung.ended_by is not None


def test_what_waits_for_something_else_is_no_hang() -> None:
    clock = Clock()
    guard = HangGuard(PLACE, clock)
    waiting, go_on = threading.Event(), threading.Event()

    def slow_source() -> str:
        call = guarded_call()
        assert call is not None
        with call.waits_elsewhere():
            waiting.set()
            go_on.wait(60)
            return "read"

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(guard.call(slow_source)))
    thread.start()
    assert waiting.wait(60)
    clock.now_s += 1e6
    go_on.set()
    thread.join(60)
    assert found == ["read"]


def test_a_directory_has_one_guard_and_another_has_another() -> None:
    one = hang_guard(PLACE)
    assert hang_guard(PLACE) is one
    assert hang_guard(PLACE / "other") is not one


def test_a_forked_child_waits_for_nothing_that_hangs_in_its_parent(hung: Hung) -> None:
    guard = hang_guard(PLACE)
    guard.call(lambda: None)
    found_hanging(guard, hung)
    child = os.fork()
    if child == 0:
        os._exit(guard.call(lambda: 42))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
