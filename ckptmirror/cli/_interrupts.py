"""Ctrl-C and SIGTERM: a verb stops cleanly, says so in one sentence, and exits with 130 or 143.

Rules:
* A verb may stop at any instant (the same command continues), so the exit never waits long: after ``GRACE_S``, or at a
  second signal, the process ends.
* SIGALRM enforces the limit, not a thread: a signal may arrive while the lock that starts threads is held.
* The sentence has a line of its own: on a terminal it replaces a bar, and the ``^C`` that was typed.
* The sentence says what the same command would do next. If that is not to continue, the verb sets another sentence
  beforehand.
* Only the light parts of the standard library are imported here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from ckptmirror.cli._terminal import is_terminal, moves_cursor

__all__ = ["GRACE_S", "Interrupted", "Interrupts", "next_step_if_interrupted"]

GRACE_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERASE_LINE = "\r\x1b[2K\x1b[?25h"
_next_steps = ["the same command continues where it stopped"]


@contextmanager
def next_step_if_interrupted(what: str) -> Iterator[None]:
    """Inside this context, a signal prints ``what`` as the next step."""
    _next_steps.append(what)
    try:
        yield
    finally:
        _next_steps.pop()


class Interrupted(BaseException):
    """A signal asked the verb to stop. No ``except Exception`` catches it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        self._next = _next_steps[-1]
        self._is_printed = False

    def tell(self) -> None:
        """Print what happened, in one sentence, once: an exit may take longer. stderr may be closed by now."""
        if self._is_printed:
            return
        what = "interrupted" if self.signum == signal.SIGINT else "terminated"
        shown = _ERASE_LINE if moves_cursor() else "\n" if is_terminal() else ""
        try:
            os.write(2, f"{shown}ckptmirror: {what}; {self._next}.\n".encode())
            self._is_printed = True  # not before: a second signal may come in between, and rather twice than never
        except OSError:
            return


class Interrupts:
    """Inside this context, the first signal raises :class:`Interrupted` in the main thread.

    Args:
        own_process: Whether the process ends with the verb. If so, these handlers stay until the end, and unfinished
            work does not delay the exit.
    """

    def __init__(self, *, own_process: bool) -> None:
        self._own_process = own_process
        self._earlier: dict[int, Any] = {}
        self._met: Interrupted | None = None
        self._exit_code: int | None = None

    def __enter__(self) -> Self:
        try:
            for signum in _SIGNALS:
                self._earlier[signum] = signal.signal(signum, self._on_signal)
            self._earlier[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_signal)
        except ValueError:  # not the main thread: other code handles signals
            self._earlier.clear()
        return self

    def over(self, exit_code: int) -> int:
        """Note that the verb is done: from here a signal ends the process with this exit code."""
        self._exit_code = exit_code
        return exit_code

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own_process or not self._earlier:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._exit_code is not None:
            self._leave(self._exit_code)
        if self._met is not None:
            self._met.tell()
            self._leave(self._met.exit_code)
        if signum != signal.SIGALRM:
            self._met = Interrupted(signum)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            raise self._met

    def _leave(self, exit_code: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, RuntimeError, ValueError, AttributeError):
                continue  # it has no reader, or the signal arrived during a write
        os._exit(exit_code)
