"""Progress, speed and time left of a transfer, for a bar and for plain lines.

Rules:
* The speed counts the bytes that this call moved within the last ``WINDOW_S`` seconds. Bytes that were there before do
  not count, and the speed of a stalled transfer falls to 0 B/s by itself.
* Other activity (a check, a wait for a mirror) is shown for as long as it lasts.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptmirror.cli._human_text import duration_text, size

if TYPE_CHECKING:
    from ckptmirror.flow.upload.transfer_progress import Wait

__all__ = ["WINDOW_S", "Pace"]

WINDOW_S = 15.0
_SHORTEST_S = 0.2  # a speed over less is noise
_FIRST_BYTES_S = 5.0  # before that, no bytes does not mean 0 B/s


class Pace:
    """One transfer. The threads that move bytes report to it, and one thread shows it.

    Args:
        title: The text in front: the verb.
        clock: Seconds, monotonic.
    """

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._moved_bytes = 0
        self._samples: deque[tuple[float, int]] = deque([(self._began_s, 0)])
        self._doing = ""
        self._waits: dict[str, tuple[str, float]] = {}

    def __call__(self, done_bytes: int, total_bytes: int, moved_bytes: int | None = None, doing: str = "") -> None:
        """Report the progress.

        Args:
            done_bytes: How many bytes of ``total_bytes`` are there.
            total_bytes: The size of everything; 0 if it is not known yet.
            moved_bytes: How many of them this call has moved; None: ``done_bytes``.
            doing: Other activity.
        """
        moved = done_bytes if moved_bytes is None else moved_bytes
        with self._lock:
            now_s = self._clock()
            self.done_bytes, self.total_bytes = done_bytes, total_bytes or None
            self._doing = doing
            if moved > self._moved_bytes:
                self._waits.clear()
                if not self._moved_bytes:  # the time before the first byte does not count
                    self._samples = deque([self._samples[-1]])
            elif moved < self._moved_bytes:  # another transfer of the same verb
                self._samples.clear()
            self._moved_bytes = moved
            self._samples.append((now_s, moved))
            self._forget(now_s)

    def doing(self, what: str) -> None:
        """Report an activity, until bytes move."""
        with self._lock:
            self._doing = what

    def waiting(self, url: str, delay_s: float, error: Exception) -> None:
        """Report that a mirror is asked again in ``delay_s`` seconds, and why; shown until bytes move."""
        with self._lock:
            self._waits[url] = str(error), self._clock() + delay_s

    def waits(self, waits: Sequence[Wait]) -> None:
        """Report all current waits for mirrors."""
        with self._lock:
            now_s = self._clock()
            self._waits = {wait.mirror: (wait.reason, now_s + wait.retry_in_s) for wait in waits}

    def _forget(self, now_s: float) -> None:
        """Drop reports older than the window, except the last of them."""
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - WINDOW_S:
            self._samples.popleft()

    def speed(self) -> float | None:
        """Return bytes per second; None while it is unknown."""
        with self._lock:
            now_s = self._clock()
            self._forget(now_s)
            first_s, first_bytes = self._samples[0]
            took_s = min(now_s - first_s, WINDOW_S)
            if took_s < (_SHORTEST_S if self._moved_bytes else _FIRST_BYTES_S):
                return None
            return (self._moved_bytes - first_bytes) / took_s

    def amount_text(self) -> str:
        """Return the amount that is done: ``1.2 GiB of 4.0 GiB``."""
        if self.total_bytes is None:
            return ""
        return f"{size(self.done_bytes)} of {size(self.total_bytes)}"

    def speed_text(self) -> str:
        """Return the speed: ``85.3 MiB/s``."""
        speed = self.speed()
        return "" if speed is None or self.total_bytes is None else f"{size(round(speed))}/s"

    def left_text(self) -> str:
        """Return the time left: ``33 s left``."""
        speed, total = self.speed(), self.total_bytes
        if not speed or total is None or self.done_bytes >= total:
            return ""
        left_s = math.ceil((total - self.done_bytes) / speed)
        return f"{left_s} s left" if left_s < 60 else f"{duration_text(left_s)} left"

    def besides_text(self) -> str:
        """Return the other activity, waits for mirrors first."""
        with self._lock:
            now_s = self._clock()
            texts = [_wait_text(url, why, at_s - now_s) for url, (why, at_s) in self._waits.items()]
            return "; ".join([*texts, self._doing] if self._doing else texts)

    def line(self) -> str:
        """Return all of it as one line."""
        parts = [self.amount_text(), self.speed_text(), self.left_text(), self.besides_text()]
        return f"{self.title}: " + (", ".join(filter(None, parts)) or "begins")

    def sum_line(self) -> str:
        """Return a summary in one line."""
        took_s = max(self._clock() - self._began_s, _SHORTEST_S)
        speed = size(round(self._moved_bytes / took_s))
        return f"{self.title}: {size(self._moved_bytes)} moved in {duration_text(took_s)}, {speed}/s"


def _wait_text(url: str, reason: str, left_s: float) -> str:
    when = f"retry in {math.ceil(left_s)} s" if left_s > 0 else "asking again"
    return f"waiting for {url} ({when}): {reason}"
