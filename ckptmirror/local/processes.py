"""Whether a process of this machine is alive, and which hold a lock.

Rules:
* A killed process is dead at once, even before it is reaped: as a zombie it keeps its number until its parent (a
  launcher, or a PID 1 that never reaps) waits for it, but it does nothing more.
* A number alone does not identify a process, because another one may have reused it; number and start time do.
* If ``/proc`` does not help, a number that is in use counts as alive.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["is_alive", "lock_holders", "named_processes", "pid_namespace", "started"]

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


def pid_namespace() -> str:
    """Return the namespace in which this process sees others, as ``pid:[4026531836]``; "" if that cannot be read.

    The containers of a pod share the name of the host, and each has numbers of its own for processes.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def lock_holders(path: Path) -> list[int]:
    """Return the ids of the processes that hold a lock on ``path``, if the kernel lists them."""
    try:
        inode = str(os.lstat(path).st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    held = [f for f in fields if len(f) >= 6 and f[1] == "FLOCK" and f[5].rpartition(":")[2] == inode]
    return sorted({int(f[4]) for f in held if f[4].isdigit() and int(f[4]) > 0})


def named_processes(pids: Collection[int]) -> str:
    """Return process ids as a message shows them."""
    return f"process ids: {', '.join(map(str, pids)) or 'unknown'}"


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third (the state) on; the 22nd is the start. Empty if gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()
