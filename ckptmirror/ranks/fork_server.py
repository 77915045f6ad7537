"""Imported by multiprocessing's fork server before it forks: it then ignores SIGTERM, and what it forks does not.

A fork server is the parent of every process that is started by ``forkserver``, for example of a DataLoader's workers.
A SIGTERM to the process group ends it, and workers whose parent is gone end themselves. It ends with its trainer.
"""

from __future__ import annotations

import os
import signal
import sys

_SERVER = os.getpid()


def _let_child_end() -> None:
    if os.getppid() == _SERVER and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_let_child_end)
