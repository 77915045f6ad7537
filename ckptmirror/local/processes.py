"""Whether a process of this machine is alive.

Rules:
* A process that was killed is dead from then on, also where nobody reaps it: as a zombie it keeps its number until its
  parent (a launcher, or a PID 1 that never does) asks for its end, and does nothing more.
* A number alone does not name a process, since another may have it by now; with the time of the start it does.
* Where ``/proc`` says nothing, a number that is in use counts as alive.
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
        began: What :func:`started` said of it; "": not known.
    """
    if stat := _stat(pid):
        return stat[0] not in _ENDED and began in ("", stat[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if that cannot be read."""
    stat = _stat(pid)
    return stat[19] if stat else ""


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third (the state) on; the 22nd is the start. None of a process gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
