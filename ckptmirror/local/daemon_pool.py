"""Threads for work that a mirror may delay: a few that take jobs from one list, and one for a single call.

Rules:
* The first error ends the work, and is raised in the caller's thread.
* Ctrl-C ends the work within ``STOP_WAIT_S``, even if a mirror does not answer: a thread that still waits is left
  behind. So the threads are daemons. The interpreter would wait for every thread of a ``ThreadPoolExecutor``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["STOP_WAIT_S", "begin", "begin_or_do", "cores", "is_over", "run_jobs"]

STOP_WAIT_S = 2.0
_CORES = 4
_LOOK_S = 1.0  # a signal that comes just before a wait does not end it
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def cores() -> int:
    """Return how many threads should compute at once: a few, and no more than this process has cores."""
    return min(_CORES, len(os.sched_getaffinity(0)))


def begin(run: Callable[[], _Result], name: str) -> Future[_Result]:
    """Begin ``run`` in a daemon thread; the future gets its result or its exception."""
    future: Future[_Result] = Future()
    threading.Thread(target=_do, args=(run, future), name=name, daemon=True).start()
    return future


def _do(run: Callable[[], _Result], future: Future[_Result]) -> None:
    try:
        future.set_result(run())
    except BaseException as error:  # noqa: BLE001 - raised again where somebody asks for the result
        future.set_exception(error)


def begin_or_do(run: Callable[[], _Result], name: str) -> Future[_Result]:
    """Do the same as :func:`begin`, but in this thread if none can be started, as when the interpreter is ending."""
    try:
        return begin(run, name)
    except RuntimeError:
        future: Future[_Result] = Future()
        _do(run, future)
        return future


def is_over(future: Future[_Result], timeout_s: float) -> bool:
    """Wait until a future is done, at most so many seconds; return whether it is."""
    ends_s = time.monotonic() + timeout_s
    while not future.done() and time.monotonic() < ends_s:
        wait([future], min(_LOOK_S, max(0.0, ends_s - time.monotonic())))
    return future.done()


def run_jobs(
    jobs: Sequence[_Job],
    do: Callable[[_Job], None],
    *,
    name: str,
    workers: int,
    stop: threading.Event | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Begin the jobs in order, and return when all are done.

    Args:
        jobs: The jobs.
        do: Does one job, in one of the threads.
        name: The name of the threads, before their number.
        workers: The largest number of threads.
        stop: No job begins after it is set. The first error and Ctrl-C set it; ``do`` may set and read it too.
        at_end: The last thread to end calls it, also after Ctrl-C.
    """
    if not jobs:
        return
    stopped = stop if stop is not None else threading.Event()
    lock = threading.Lock()
    remaining = iter(jobs)
    errors: list[BaseException] = []
    over = threading.Event()
    awaited = set(range(min(workers, len(jobs))))  # threads that have not begun
    working = len(awaited)

    def work(number: int) -> None:
        with lock:
            if number not in awaited:
                return  # Ctrl-C came while it was started
            awaited.remove(number)
        try:
            while not stopped.is_set():
                with lock:
                    job = next(remaining, None)
                if job is None:
                    return
                do(job)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)
            stopped.set()
        finally:
            leave(1)

    def leave(threads: int) -> None:
        nonlocal working
        with lock:
            working -= threads
            is_last = threads and not working
        if is_last:
            try:
                at_end()
            except BaseException as error:  # noqa: BLE001 - raised again below, unless there was one before
                errors.append(error)
            finally:
                over.set()

    try:
        for number in sorted(awaited):
            threading.Thread(target=work, args=[number], name=f"{name}-{number}", daemon=True).start()
        while not over.wait(_LOOK_S):
            pass
    except BaseException:  # Ctrl-C
        stopped.set()
        with lock:
            not_begun = len(awaited)
            awaited.clear()
        leave(not_begun)
        over.wait(STOP_WAIT_S)
        raise
    if errors:
        raise errors[0]
