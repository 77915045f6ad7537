"""A rate limit for log lines and journal entries that repeat."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RateLimit"]

_KEYS_KEPT = 1000


class RateLimit:
    """Lets each key through once in a while.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s: dict[object, float] = {}

    def is_due(self, key: object, every_s: float) -> bool:
        """Whether ``key`` was not due within the last ``every_s`` seconds; if so, it was due now."""
        now_s = self._clock()
        if now_s - self._last_s.get(key, -every_s) < every_s:
            return False
        if len(self._last_s) >= _KEYS_KEPT:
            self._last_s.clear()
        self._last_s[key] = now_s
        return True
