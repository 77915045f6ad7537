"""The thread that audits the mirrors and rotates; it never delays a save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.flow.retention.mirror_audit import ASK_AGAIN_S

__all__ = ["RotationThread"]

_log = logging.getLogger("ckptmirror")


class RotationThread:
    """Works at its start, and at each :meth:`wake` (a commit, a verification).

    Args:
        ask: Asks the mirrors that have not answered yet; returns whether one did.
        is_waiting: Whether a mirror has not answered yet; then it is asked again after ``ASK_AGAIN_S``.
        rotate: Rotates by the policy.

    Attributes:
        is_busy: Whether it asks or rotates now.
    """

    def __init__(self, ask: Callable[[], bool], is_waiting: Callable[[], bool], rotate: Callable[[], None]) -> None:
        self._ask = ask
        self._is_waiting = is_waiting
        self._rotate = rotate
        self._wake = threading.Event()
        self._stopping = False
        self.is_busy = False
        self._thread = threading.Thread(target=self._work, name="ckptmirror-rotate", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._wake.set()
        self._thread.start()

    def wake(self) -> None:
        """Make the thread run once more."""
        self._wake.set()

    def stop(self, limit_s: float) -> bool:
        """Ask the thread to end after its current work; return whether it did within ``limit_s`` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            is_woken = self._wake.wait(ASK_AGAIN_S if self._is_waiting() else None)
            self._wake.clear()
            if self._stopping:
                return
            self.is_busy = True
            try:
                has_answered = self._ask()
                if is_woken or has_answered:
                    self._rotate()
            except CkptMirrorError as error:
                _log.error("nothing was rotated: %s", error)
            except Exception:  # noqa: BLE001 - no caller would see it, and the next rotation may succeed
                _log.exception("nothing was rotated, because of an unexpected error")
            finally:
                self.is_busy = False
