"""Keeps a DataLoader's workers alive through the SIGTERM that asks the trainer to stop.

Rules:
* A worker that gets a SIGTERM keeps running for ``grace_s`` at most, so it cannot outlive its trainer by more than
  that.
* Its parent is the trainer; if the parent is gone, the worker ends at once.
* Picklable, so that workers may be spawned. Standard library only.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["WorkerShield"]


class WorkerShield:
    """A ``worker_init_fn`` that shields the worker, then calls the user's own.

    Args:
        worker_init_fn: The user's own, called with the worker's id.
        grace_s: How long after its first SIGTERM the worker ends by itself.
    """

    def __init__(self, worker_init_fn: Callable[[int], object] | None = None, *, grace_s: float = 30.0) -> None:
        self._inner = worker_init_fn
        self._grace_s = grace_s

    def __call__(self, worker_id: int) -> None:
        """Shield this process; called in the main thread of a worker."""
        parent, grace_s = os.getppid(), self._grace_s
        timers: list[threading.Timer] = []

        def outlive(_number: int, _frame: FrameType | None) -> None:
            if os.getppid() != parent:
                os._exit(0)
            if not timers:
                timer = threading.Timer(grace_s, os._exit, args=(0,))
                timer.daemon = True
                timers.append(timer)
                timer.start()

        signal.signal(signal.SIGTERM, outlive)
        if self._inner is not None:
            self._inner(worker_id)
