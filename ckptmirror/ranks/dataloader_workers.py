"""Keeps a DataLoader's workers alive through the SIGTERM that asks the trainer to stop.

Rules:
* A worker that gets a SIGTERM keeps running for ``grace_s`` at most, so it cannot outlive its trainer by more than
  that.
* Its parent is the trainer, or multiprocessing's fork server, which is made to ignore SIGTERM. If the parent is gone,
  the worker ends at once.
* It also ends at once if the trainer ends: Python then sends its workers SIGTERM and waits for them. A file that is
  there from just before that until just after tells them whose signal it is.
* Picklable, so that workers may be spawned.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType

from ckptmirror.core.errors import UsageError

__all__ = ["WorkerShield"]

_FOR_FORK_SERVER = "ckptmirror.ranks.fork_server"


class WorkerShield:
    """A ``worker_init_fn`` that shields the worker, then calls the user's own.

    Args:
        worker_init_fn: The user's own, called with the worker's id.
        grace_s: How long after its first SIGTERM the worker ends by itself.
    """

    def __init__(self, worker_init_fn: Callable[[int], object] | None = None, *, grace_s: float = 30.0) -> None:
        self._inner = worker_init_fn
        self._grace_s = grace_s
        self._ends = Path(tempfile.gettempdir()) / f"ckptmirror-ends-{secrets.token_hex(8)}"
        _prepare_fork_server()
        Finalize(None, _make, (self._ends,), exitpriority=100)  # those of 0 and above run before the workers are ended
        Finalize(None, _remove, (self._ends,), exitpriority=-100)

    def __call__(self, worker_id: int) -> None:
        """Shield this process; called in the main thread of a worker.

        Raises:
            UsageError: A fork server that began before the first shield was made has forked it.
        """
        trainer = parent_process()
        is_of_fork_server = trainer is not None and trainer.pid != os.getppid()
        if is_of_fork_server and _FOR_FORK_SERVER not in sys.modules:
            raise UsageError(
                "A SIGTERM would end the fork server of this worker, which does not know of shield_workers().",
                hint="Call it before anything starts a process by forkserver, and after set_forkserver_preload(). Or "
                "use multiprocessing_context='spawn'.",
            )
        parent, grace_s, ends = os.getppid(), self._grace_s, self._ends
        timers: list[threading.Timer] = []

        def outlive(_number: int, _frame: FrameType | None) -> None:
            if os.getppid() != parent or ends.exists():
                os._exit(0)
            if not timers:
                timer = threading.Timer(grace_s, os._exit, args=(0,))
                timer.daemon = True
                timers.append(timer)
                timer.start()

        signal.signal(signal.SIGTERM, outlive)
        if self._inner is not None:
            self._inner(worker_id)


def _prepare_fork_server() -> None:
    """Let a fork server that starts later ignore SIGTERM."""
    preloaded = list(getattr(forkserver._forkserver, "_preload_modules", ["__main__"]))
    if _FOR_FORK_SERVER not in preloaded:
        forkserver.set_forkserver_preload([*preloaded, _FOR_FORK_SERVER])


def _make(path: Path) -> None:
    with suppress(OSError):
        path.touch()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
