"""A request to stop: by a signal, by the program, or by another rank.

Python runs a signal handler only between two steps of the interpreter, so a long C call (a matrix product, a
collective) delays it. The interpreter's C handler, though, writes the signal's number to a wakeup descriptor at once,
and a thread that reads that descriptor reacts within milliseconds.

Rules:
* On a signal, only the watcher thread changes the state and calls ``on_request``; the main thread's handler calls the
  earlier handler.
* Earlier handlers and an earlier wakeup descriptor still get every signal, and ``uninstall`` restores them.
* No watched signal kills this process, neither the first nor the second.
* A forked child is not asked to stop: it gets the earlier handlers and closes its copies of the descriptors.
* All ranks stop at the same step, because they act on the answer of one exchange (``check``), never on what one rank
  knows.
* Standard library only.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks.base import Ranks
from ckptmirror.ranks.dataloader_workers import WorkerShield

__all__ = ["DEFAULT_GRACE_S", "StopRequest"]

DEFAULT_GRACE_S = 12.0
_WAKE = 0  # not a signal number: there are callbacks to call
_HANDLED = 128  # added to a signal: Python's handler ran, and the wakeup byte went out on its own
_END = 255
_JOIN_LIMIT_S = 5.0
_log = logging.getLogger(__name__)
_installed: weakref.WeakSet[StopRequest] = weakref.WeakSet()
_fork_hooked = False


class StopRequest:
    """Whether, why and by when this job should stop.

    Args:
        grace_s: Time from the first signal to the end. 12 s suits machines that give 15; torchrun gives 30.
        on_request: Called once, from the watcher thread, with this object, when the first request arrives; more can be
            added to the attribute. What they raise is logged and kept in ``callback_errors``.
    """

    def __init__(
        self, *, grace_s: float = DEFAULT_GRACE_S, on_request: Iterable[Callable[[StopRequest], object]] = ()
    ) -> None:
        self.grace_s = grace_s
        self.on_request: list[Callable[[StopRequest], object]] = list(on_request)
        self.callback_errors: list[BaseException] = []
        self._lock = threading.RLock()
        self._reason: str | None = None
        self._ends_at = math.inf
        self._told = False
        self._earlier: dict[int, Any] = {}
        self._earlier_fd = -1
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        self._watcher: threading.Thread | None = None

    # -- what is known --------------------------------------------------------------------------------------------

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request. Ranks may know at different times: stop on :meth:`check`."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why, in a few words ("SIGTERM", "rank 3: SIGTERM"); None if nobody asked."""
        return self._reason

    @property
    def remaining_s(self) -> float:
        """Seconds left of the grace period, never below 0; infinite as long as no signal came."""
        return max(self._ends_at - time.monotonic(), 0.0)

    def request(self, reason: str) -> None:
        """Ask this job to stop. The first reason stays. No grace period begins, since nobody will kill the process."""
        self._note(reason, math.inf)
        if not self._wake(_WAKE):
            self._tell()

    def check(self, ranks: Ranks) -> bool:
        """Return whether any rank was asked to stop. All ranks call this once per step and get the same answer.

        Every rank takes over the earliest end of a grace period of all ranks.

        Raises:
            RankFailed: A rank is gone.
            WaitTimeout: Not all ranks called within the channel's limit.
        """
        if not hasattr(ranks, "exchange"):
            raise UsageError(
                f"check() takes the ranks of a manager, not an object of type {type(ranks).__name__}.",
                hint="Write stop.check(manager.ranks).",
            )
        said = ranks.exchange((self._reason, self.remaining_s), what="agree whether to stop")
        asked = [(rank, reason) for rank, (reason, _) in enumerate(said) if reason is not None]
        if not asked:
            return False
        rank, reason = asked[0]
        self._note(f"rank {rank}: {reason}", time.monotonic() + min(remaining_s for _, remaining_s in said))
        if not self._wake(_WAKE):
            self._tell()
        return True

    # -- signals --------------------------------------------------------------------------------------------------

    def install(self, signals: Iterable[int] = (signal.SIGTERM,)) -> StopRequest:
        """Watch ``signals`` from now on. Call this in the main thread, after libraries that set handlers of their own.

        Raises:
            UsageError: This is not the main thread, or it is installed already.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("StopRequest.install must be called in the main thread", hint="Python allows no other.")
        if self._watcher is not None:
            raise UsageError("this StopRequest is installed already")
        _hook_fork()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, args=(self._reader,), name="ckptmirror-stop", daemon=True)
        self._watcher.start()
        _installed.add(self)
        self._earlier_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in signals:
            self._earlier[int(number)] = signal.signal(number, self._handle)
        return self

    def uninstall(self) -> None:
        """Restore the earlier handlers and wakeup descriptor. A request that was made stays."""
        watcher, writer = self._watcher, self._writer
        if watcher is None or writer is None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("StopRequest.uninstall must be called in the main thread", hint="Python allows no other.")
        self._put_back(writer.fileno(), self._earlier_fd)
        self._wake(_END)
        watcher.join(_JOIN_LIMIT_S)
        self._close()

    def __enter__(self) -> StopRequest:
        """Install for SIGTERM, unless it is installed already."""
        return self if self._watcher is not None else self.install()

    def __exit__(self, *_: object) -> None:
        """Uninstall."""
        self.uninstall()

    @staticmethod
    def shield_workers(worker_init_fn: Callable[[int], object] | None = None) -> WorkerShield:
        """Return a ``worker_init_fn`` for a DataLoader whose workers outlive a SIGTERM to the process group.

        Without it a signal to the whole group kills the workers, and the next batch fails before the emergency
        snapshot.
        """
        return WorkerShield(worker_init_fn)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Call the earlier handler. Runs in the main thread, maybe late.

        The byte wakes the watcher if other code took over the wakeup descriptor.
        """
        self._wake(_HANDLED + number)
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)

    def _watch(self, reader: socket.socket) -> None:
        while True:
            received = reader.recv(1)
            if not received or received[0] == _END:
                return
            number = received[0] % _HANDLED
            if number in self._earlier:
                self._note(signal.Signals(number).name, time.monotonic() + self.grace_s)
            if received[0] not in (_WAKE, _HANDLED + number):
                self._forward(received)
            if self._reason is not None:
                self._tell()

    def _note(self, reason: str, ends_at: float) -> None:
        with self._lock:
            first = self._reason is None
            self._reason = self._reason or reason
            if math.isinf(self._ends_at):
                self._ends_at = ends_at
            elif not math.isinf(ends_at):
                self._ends_at = min(self._ends_at, ends_at)
        if first:
            _log.warning("asked to stop: %s", reason)

    def _tell(self) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
        for callback in list(self.on_request):
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001  somebody else's code; the stop goes on
                self.callback_errors.append(error)
                _log.exception("a callback of the stop request failed")

    def _wake(self, number: int) -> bool:
        """Write a byte to the watcher; return whether there is one."""
        writer = self._writer
        if writer is None:
            return False
        try:
            writer.send(bytes([number]))
        except BlockingIOError:
            return True  # it has plenty to read
        except OSError:
            return False  # closed meanwhile
        return True

    def _forward(self, received: bytes) -> None:
        if self._earlier_fd < 0:
            return
        try:
            os.write(self._earlier_fd, received)
        except BlockingIOError:
            return  # as the interpreter itself would drop it
        except OSError:
            self._earlier_fd = -1  # its owner closed it

    def _put_back(self, our_fd: int, earlier_fd: int) -> None:
        """Undo ``install``, except for a handler or descriptor that other code has taken over since."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        current = signal.set_wakeup_fd(-1)
        back = earlier_fd if current == our_fd else current
        if back >= 0:
            try:
                signal.set_wakeup_fd(back, warn_on_full_buffer=False)
            except (OSError, ValueError):
                _log.debug("the earlier wakeup descriptor is closed")

    def _close(self) -> None:
        for end in (self._reader, self._writer):
            if end is not None:
                end.close()
        self._reader = self._writer = self._watcher = None
        _installed.discard(self)

    def _leave_child(self) -> None:
        """In a forked child: release everything; the parent's descriptors are not affected."""
        writer = self._writer
        self._lock = threading.RLock()  # the parent's watcher may have held it
        if writer is not None:
            self._put_back(writer.fileno(), -1)
        self._close()


def _hook_fork() -> None:
    global _fork_hooked
    if not _fork_hooked:
        _fork_hooked = True
        os.register_at_fork(after_in_child=_leave_children)


def _leave_children() -> None:
    for stop in list(_installed):
        stop._leave_child()
