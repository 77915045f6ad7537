"""The pool of threads that reads and brings ranges: each job once, the first error, and an interrupt that is heeded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptmirror.core.errors import LocalStorageFull
from ckptmirror.local.daemon_pool import run_jobs


def pooled(jobs: list[int], do: Callable[[int], None], **more: Any) -> threading.Event:
    """Run the jobs; return what is set once no thread is left."""
    ended = more.pop("ended", threading.Event())
    run_jobs(jobs, do, name="pooled", **({"workers": 3, "at_end": ended.set} | more))
    return ended


def test_every_job_is_done_once_by_no_more_threads_than_asked_for() -> None:
    done: list[int] = []
    threads: set[str] = set()

    def do(job: int) -> None:
        done.append(job)
        threads.add(threading.current_thread().name)

    assert pooled(list(range(50)), do).is_set()
    assert sorted(done) == list(range(50))
    assert threads <= {"pooled-0", "pooled-1", "pooled-2"}


def test_without_jobs_there_is_nothing_to_wait_for() -> None:
    pooled([], lambda _job: None)


def test_the_first_error_is_raised_here_and_no_job_begins_after_it() -> None:
    begun: list[int] = []
    ended = threading.Event()

    def do(job: int) -> None:
        begun.append(job)
        if job == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pooled(list(range(50)), do, workers=1, ended=ended)
    assert begun == [0, 1]
    assert ended.is_set()


def test_whoever_works_may_stop_the_rest_without_an_error() -> None:
    stop = threading.Event()
    begun: list[int] = []

    def do(job: int) -> None:
        begun.append(job)
        stop.set()

    pooled(list(range(50)), do, workers=1, stop=stop)
    assert begun == [0]


def test_an_error_at_the_end_is_raised_and_keeps_nobody_waiting() -> None:
    """A network file system says at close(2) that there was no room."""

    def full() -> None:
        raise LocalStorageFull("no room")

    def do(_job: int) -> None:
        pass

    with pytest.raises(LocalStorageFull):
        run_jobs([1, 2], do, name="test", workers=2, at_end=full)


def test_an_interrupt_waits_for_all_threads_together_and_the_last_of_them_ends_the_work() -> None:
    workers = 100  # were each waited for in turn, it would take longer than a test may
    working = threading.Barrier(workers)
    answer, ended = threading.Event(), threading.Event()

    def do(_job: int) -> None:
        if working.wait(60) == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        answer.wait()

    with pytest.raises(KeyboardInterrupt):
        pooled(list(range(workers)), do, workers=workers, ended=ended)
    assert not ended.is_set()
    answer.set()
    assert ended.wait(60)


def test_an_interrupt_while_threads_are_started_ends_the_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            if self.name == "pooled-1":
                raise KeyboardInterrupt
            super().start()

    monkeypatch.setattr(threading, "Thread", Interrupted)
    ended = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        pooled(list(range(50)), lambda _job: None, ended=ended)
    assert ended.wait(60)
