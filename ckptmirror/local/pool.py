"""A pool of threads that take their jobs from one list: how many files or objects are read in parallel.

Rules:
* Memory is bounded: a kept buffer a thread, however many jobs there are.
* The first error ends the pool, and is raised in the caller's thread. Jobs that are under way look at ``stop``.
* A person's interrupt ends it within ``STOP_WAIT_S``, whatever a mirror is doing: a thread that still waits for an
  answer then is left behind (they are daemons).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptmirror.local import files

__all__ = ["STOP_WAIT_S", "run_jobs"]

STOP_WAIT_S = 2.0
_LOOK_S = 1.0  # a signal that comes just before a wait does not end it
_Job = TypeVar("_Job")


def run_jobs(
    jobs: Sequence[_Job],
    do: Callable[[_Job, memoryview], None],
    *,
    name: str,
    workers: int,
    stop: threading.Event,
    at_end: Callable[[], None],
) -> None:
    """Do every job, in order of their begin; return once all are done.

    Args:
        jobs: What there is to do.
        do: Does one of them, in a thread of the pool, with that thread's buffer.
        name: What the threads are called, before their number.
        workers: How many threads there are at most.
        stop: No job begins once it is set. It is set by the first error and by an interrupt; ``do`` may set it too.
        at_end: Called once no thread does anything any more, by the last of them: after an interrupt too.
    """
    if not jobs:
        return
    lock = threading.Lock()
    remaining = iter(jobs)
    working = min(workers, len(jobs))
    errors: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        nonlocal working
        try:
            with files.kept_buffer() as buffer:
                while not stop.is_set():
                    with lock:
                        job = next(remaining, None)
                    if job is None:
                        return
                    do(job, buffer)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            with lock:
                errors.append(error)
            stop.set()
        finally:
            with lock:
                working -= 1
                is_last = not working
            if is_last:
                try:
                    at_end()
                except BaseException as error:  # noqa: BLE001 - raised again below, unless there was one before
                    errors.append(error)
                finally:
                    over.set()

    try:
        for number in range(working):
            threading.Thread(target=work, name=f"{name}-{number}", daemon=True).start()
        while not over.wait(_LOOK_S):
            pass
    except BaseException:  # a person's interrupt
        stop.set()
        over.wait(STOP_WAIT_S)
        raise
    if errors:
        raise errors[0]
