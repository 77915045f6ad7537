"""Whether a process of this machine is alive.

Rules:
* A killed process is dead at once, even before it is reaped: as a zombie it keeps its number until its parent (a
  launcher, or a PID 1 that never reaps) waits for it, but it does nothing more.
* A number alone does not identify a process, because another one may have reused it; number and start time do.
* If ``/proc`` does not help, a number that is in use counts as alive.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_alive", "started"]

_ENDED = ("Z", "X", "x")  # proc(5): a zombie; dead


def is_alive(pid: int, began: str = "") -> bool:
    """Whether a process runs, sleeps or is stopped.

    Args:
        pid: Its number.
        began: The answer of :func:`started` for it; "" if not known.
    """
    if stat := _stat(pid):
        return stat[0] not in _ENDED and began in ("", stat[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True


def started(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if that cannot be read."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third (the state) on; the 22nd is the start. Empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
