"""Numbered crash points: every change of the disk happens between two of them.

Rules:
* Code that changes the disk wraps the one system call (or the one table commit) in :func:`around`, which passes the
  point ``<label>:before`` and then ``<label>:after``.
* Points are numbered from 1 in the order in which this process passes them. A test counts them in one run (:func:`arm`
  with nothing to kill at, then :func:`passed`), then runs the same work once per number and is killed there by SIGKILL.
* ``CKPTMIRROR_CRASH_AT=17`` kills at the 17th point; ``CKPTMIRROR_CRASH_AT=publish:after`` at the first point of that
  name; ``CKPTMIRROR_CRASH_AT=publish:after@3`` at the third.
* ``CKPTMIRROR_CRASH_MARK=1`` makes every point visible in a system call trace, as a failing ``access`` of
  ``/ckptmirror-crash-point/<number>/<label>/<before|after>``.
* A test that simulates several processes in one gives :func:`arm` its own ``die``, which raises. It is called at every
  later point too, so that code that unwinds changes nothing more.
* Disarmed, as always in production, a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["MARK_PREFIX", "arm", "around", "disarm", "passed", "point"]

MARK_PREFIX = "/ckptmirror-crash-point"


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_lock = threading.Lock()
_armed = False
_dead = False
_die: Callable[[], None] = _kill_this_process
_mark = False
_kill_number = 0
_kill_name = ""
_kill_nth = 1
_passed: list[str] = []
_seen: Counter[str] = Counter()


def arm(crash_at: str | None = None, *, mark: bool = False, die: Callable[[], None] = _kill_this_process) -> None:
    """Start counting from 1, and kill this process at ``crash_at`` (a number, a name, or ``name@nth``) if given."""
    global _armed, _dead, _die, _mark, _kill_number, _kill_name, _kill_nth
    with _lock:
        _dead, _die = False, die
        _passed.clear()
        _seen.clear()
        _kill_number, _kill_name, _kill_nth = 0, "", 1
        if crash_at and crash_at.isdigit():
            _kill_number = int(crash_at)
        elif crash_at:
            _kill_name, _, nth = crash_at.partition("@")
            _kill_nth = int(nth or 1)
        _mark = mark
        _armed = True


def disarm() -> None:
    """Stop counting: every point is free again."""
    global _armed
    _armed = False


def passed() -> list[str]:
    """Return the names of the points passed since :func:`arm`, in order."""
    with _lock:
        return list(_passed)


def point(name: str) -> None:
    """Pass one point: count it, and die if this is the chosen one."""
    global _dead
    if not _armed:
        return
    with _lock:
        _passed.append(name)
        _seen[name] += 1
        number, nth = len(_passed), _seen[name]
        _dead = _dead or number == _kill_number or (name == _kill_name and nth == _kill_nth)
        dead = _dead
    if _mark:
        os.access(f"{MARK_PREFIX}/{number}/{name.replace(':', '/')}", os.F_OK)
    if dead:
        _die()


@contextmanager
def around(label: str) -> Iterator[None]:
    """Pass ``label:before``, run the body, pass ``label:after``."""
    point(f"{label}:before")
    yield
    point(f"{label}:after")


if os.environ.get("CKPTMIRROR_CRASH_AT") or os.environ.get("CKPTMIRROR_CRASH_MARK"):
    arm(os.environ.get("CKPTMIRROR_CRASH_AT"), mark=bool(os.environ.get("CKPTMIRROR_CRASH_MARK")))
