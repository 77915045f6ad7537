"""Calls to a directory whose file system may hang (a dead NFS server): each runs in a thread and has a time limit.

Rules:
* The kernel has no time limit for a file system that hangs, and a signal with a handler does not end the call. So the
  call runs in a daemon thread. Its caller waits, can be interrupted, and can end the process.
* A call is given up if it shows no progress for its time limit. It may continue later, and must then be harmless. A
  call that works in pieces calls :func:`beat` at each piece, which ends it after it was given up.
* While a call to a directory hangs, other calls are refused at once. From time to time, at intervals that double, one
  is let through, because the mount may have been replaced. When a hanging call returns, all are let through again.
* A process has one guard for each directory, so a caller does not wait for a hang that another caller found. A forked
  child starts with none.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from ckptmirror.core.errors import StoreHangs

__all__ = ["HANG_S", "GuardedCall", "HangGuard", "beat", "guarded_call", "hang_guard"]

HANG_S = 40.0  # longer than a call waits for a mirror's lock
_LOOK_S = 10.0
_SLOWEST_BYTES_PER_S = 20e6  # an fsync of many bytes takes this long and is not a hang
_DOUBLINGS_LIMIT = 8
_WAIT_S = 1.0  # a signal that comes just before a wait does not end it
_ENDING_S = 1.0
_SAY_AFTER_S = 10.0
_SAY_EVERY_S = 30.0
_Result = TypeVar("_Result")
_log = logging.getLogger("ckptmirror")


class _GivenUpError(Exception):
    """The caller no longer waits for this call."""


class GuardedCall:
    """A running call, for the code that it runs; other threads that work for it may use it too."""

    def __init__(self, run: Callable[[], object], guard: HangGuard) -> None:
        self.future: Future[Any] = Future()
        self.over = threading.Event()
        self._run = run
        self._guard = guard
        self._lock = threading.Lock()
        self._heard_s = guard.clock()
        self._waits_elsewhere = 0
        self._is_given_up = False

    @property
    def heard_s(self) -> float:
        """When it last showed progress; now, while it waits for something other than the directory."""
        return self._guard.clock() if self._waits_elsewhere else self._heard_s

    def beat(self) -> None:
        """Report progress; if the call was given up, raise the error that ends it."""
        self.deliver(lambda: None)

    def deliver(self, write: Callable[[], object]) -> None:
        """Run ``write``, which changes the caller's memory; if the call was given up, end it instead.

        A caller that gives up in the meantime waits for ``write``.
        """
        with self._lock:
            if self._is_given_up:
                raise _GivenUpError
            write()
        self._heard_s = self._guard.clock()

    @contextmanager
    def waits_elsewhere(self) -> Iterator[None]:
        """Do not count the time of the body: the call waits for something other than the directory."""
        with self._lock:
            self._waits_elsewhere += 1
        try:
            yield
        finally:
            with self._lock:
                self._heard_s = self._guard.clock()
                self._waits_elsewhere -= 1

    def give_up(self) -> None:
        """Mark the call as given up."""
        with self._lock:
            self._is_given_up = True

    def do(self) -> None:
        """Run the call in this thread."""
        before, _current.call = _current.call, self
        try:
            self.future.set_result(self._run())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
            self.future.set_exception(error)
        finally:
            _current.call = before
            self._guard.let_go(self)


class _Current(threading.local):
    call: GuardedCall | None = None


_current = _Current()
_lock = threading.Lock()
_guards: weakref.WeakValueDictionary[Path, HangGuard] = weakref.WeakValueDictionary()


def hang_guard(directory: Path) -> HangGuard:
    """Return this process's guard of a directory; the same one as long as it is referenced."""
    with _lock:
        return _guards.setdefault(directory, HangGuard(directory))


def guarded_call() -> GuardedCall | None:
    """Return the guarded call that this thread runs, or None."""
    return _current.call


def beat() -> None:
    """Report progress of the guarded call that this thread runs, if any; end it if it was given up."""
    if _current.call is not None:
        _current.call.beat()


class HangGuard:
    """Makes the calls to one directory.

    Args:
        directory: The directory, for messages.
        clock: Seconds, monotonic.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._directory = directory
        self._hanging: set[GuardedCall] = set()
        self._next_s = 0.0

    def look(self, run: Callable[[], _Result]) -> _Result:
        """Do as :meth:`call`, with a short limit, because the call only looks."""
        return self.call(run, limit_s=_LOOK_S)

    def ask_patiently(self, run: Callable[[], _Result], patience_s: float) -> _Result:
        """Do as :meth:`call` for a start: ask even while another call hangs, with at least this limit."""
        return self.call(run, limit_s=max(_LOOK_S, patience_s), refuses=False)

    def call(
        self,
        run: Callable[[], _Result],
        *,
        limit_s: float | None = None,
        size_bytes: int = 0,
        refuses: bool = True,
        ending: threading.Event | None = None,
    ) -> _Result:
        """Return what ``run`` returns, or raise what it raises.

        Args:
            run: Makes the call, in another thread.
            limit_s: How long it may show no progress; None for ``HANG_S``.
            size_bytes: How much it may write before it reports progress; this adds to the limit.
            refuses: Refuse the call while another one hangs.
            ending: After it is set, the process is ending, and the call may pause only for a moment.

        Raises:
            StoreHangs: It showed no progress for that long, or another call still hangs.
        """
        silence_s = (HANG_S if limit_s is None else limit_s) + size_bytes / _SLOWEST_BYTES_PER_S
        with _lock:
            if self._hanging and refuses and self.clock() < self._next_s:
                raise self._error(min(call.heard_s for call in self._hanging))
        call = GuardedCall(run, self)
        say_s = self.clock() + _SAY_AFTER_S
        try:
            _make(call)
            while not call.over.wait(min(_WAIT_S, max(0.0, call.heard_s + silence_s - self.clock()))):
                if ending is not None and ending.is_set():
                    silence_s = min(silence_s, _ENDING_S)
                if self.clock() >= call.heard_s + silence_s and self._hangs(call, silence_s):
                    raise self._error(call.heard_s)
                if self.clock() >= max(say_s, call.heard_s + _SAY_AFTER_S):
                    say_s = self.clock() + _SAY_EVERY_S
                    _log.warning("waiting for %s: its file system does not answer", self._directory)
        except BaseException:  # an interrupt too
            call.give_up()
            raise
        result: _Result = call.future.result()
        return result

    def let_go(self, call: GuardedCall) -> None:
        """End a call: wake its caller, and let other calls through again."""
        with _lock:
            self._hanging.discard(call)
            call.over.set()

    def forget(self) -> None:
        """Forget the calls that hang."""
        self._hanging.clear()

    def _hangs(self, call: GuardedCall, silence_s: float) -> bool:
        with _lock:
            if call.over.is_set():
                return False
            self._next_s = self.clock() + silence_s * 2.0 ** min(len(self._hanging), _DOUBLINGS_LIMIT)
            self._hanging.add(call)
            return True

    def _error(self, since_s: float) -> StoreHangs:
        return StoreHangs(
            f"{self._directory} does not answer: its file system has been hanging for {self.clock() - since_s:.0f} s.",
            hint=f"See whether `stat {quote(str(self._directory))}` answers, and with `mount` which server it needs.",
        )


def _make(call: GuardedCall) -> None:
    try:
        threading.Thread(target=call.do, name="ckptmirror-call", daemon=True).start()
    except RuntimeError:  # no more threads: the machine's limit, or the end of the interpreter
        call.do()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for guard in list(_guards.values()):
        guard.forget()


os.register_at_fork(after_in_child=_forget_in_child)
