"""Calls to a directory whose file system may hang (a dead NFS server): each in a thread, and given up after a limit.

Rules:
* The kernel knows no time limit for a file system that hangs, and no signal that has a handler ends the call. So it is
  made in a daemon thread. Its caller waits, can be interrupted, and can end the process.
* A call is given up when nothing was heard of it for its limit. It may go on later: what it does then must be harmless.
  One that works in pieces calls :func:`beat` at each, which ends it once it is given up.
* While a call to a directory hangs, others are refused at once. One is let through now and then, at intervals that
  double, since the mount may be another by then. When a call that hung returns, all are let through again.
* One guard for each directory in a process: nobody waits for what somebody else found hanging. A forked child starts
  with none.
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
_SLOWEST_BYTES_PER_S = 20e6  # a silent pass (fsync) over so many bytes is no hang
_DOUBLINGS_LIMIT = 8
_WAIT_S = 1.0  # a signal that comes just before a wait does not end it
_ENDING_S = 1.0
_SAY_AFTER_S = 10.0
_SAY_EVERY_S = 30.0
_Result = TypeVar("_Result")
_log = logging.getLogger("ckptmirror")


class _GivenUpError(Exception):
    """Nobody waits for this call any more."""


class GuardedCall:
    """A call under way, as what it is made of sees it; may be used by other threads that work for it."""

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
        """When it was last heard of; now, while it waits for something else than the directory."""
        return self._guard.clock() if self._waits_elsewhere else self._heard_s

    def beat(self) -> None:
        """Say that the call goes on; raise what ends it if it was given up."""
        self.deliver(lambda: None)

    def deliver(self, write: Callable[[], object]) -> None:
        """Do ``write``, which changes what belongs to the caller, unless the call was given up: then it ends.

        A caller that gives up meanwhile waits for ``write``.
        """
        with self._lock:
            if self._is_given_up:
                raise _GivenUpError
            write()
        self._heard_s = self._guard.clock()

    @contextmanager
    def waits_elsewhere(self) -> Iterator[None]:
        """While the body runs it is not the directory that keeps the call waiting."""
        with self._lock:
            self._waits_elsewhere += 1
        try:
            yield
        finally:
            with self._lock:
                self._heard_s = self._guard.clock()
                self._waits_elsewhere -= 1

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._is_given_up = True

    def do(self) -> None:
        """Make the call, in this thread."""
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
    """Return this process's guard of a directory; the same one for as long as anybody has it."""
    with _lock:
        return _guards.setdefault(directory, HangGuard(directory))


def guarded_call() -> GuardedCall | None:
    """Return the call that this thread makes for a guard; None if it makes none."""
    return _current.call


def beat() -> None:
    """Say that the call that this thread makes for a guard goes on, if it makes one; end it if it was given up."""
    if _current.call is not None:
        _current.call.beat()


class HangGuard:
    """Makes the calls to one directory.

    Args:
        directory: Which; for messages.
        clock: Seconds, monotonic.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._directory = directory
        self._hanging: set[GuardedCall] = set()
        self._next_s = 0.0

    def look(self, run: Callable[[], _Result]) -> _Result:
        """The same as :meth:`call`, where all that is wanted is a look: nobody waits long for it."""
        return self.call(run, limit_s=_LOOK_S)

    def ask_patiently(self, run: Callable[[], _Result], patience_s: float) -> _Result:
        """The same as :meth:`call`, for a start: it asks also while another call hangs, for so long at least."""
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
            limit_s: How long it may say nothing; None: ``HANG_S``.
            size_bytes: How much it may write before it says something.
            refuses: Ask nothing while another call hangs.
            ending: Once it is set somebody waits for the end, and a call may say nothing for a moment only.

        Raises:
            StoreHangs: It said nothing for that long, or another call still hangs.
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
        """A call is over: wake who waits for it, and let others be made again."""
        with _lock:
            self._hanging.discard(call)
            call.over.set()

    def forget(self) -> None:
        """Forget what hangs."""
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
