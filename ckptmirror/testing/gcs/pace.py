"""How often one object may change (https://cloud.google.com/storage/quotas#objects): about once a second, more is 429.

Rules:
* Off unless the server was started with a rate. One change is allowed at once, each further one ``1 / per_s`` later.
* Counted per bucket and name, over uploads, compositions, rewrites, changes of metadata and deletions.
* The rate lives in memory: a restarted server has forgotten who was too fast.

The service tolerates short bursts that it does not document; this server tolerates none.
"""

from __future__ import annotations

import time

from ckptmirror.testing.gcs.answers import ApiError

__all__ = ["Pace"]

_LONGEST = 100_000


class Pace:
    """The last change of each object."""

    def __init__(self, per_s: float | None = None) -> None:
        self._between_s = None if per_s is None else 1.0 / per_s
        self._last_s: dict[tuple[str, str], float] = {}

    def spend(self, bucket: str, name: str) -> None:
        """A change is about to happen.

        Raises:
            ApiError: 429: the last one was too short a time ago.
        """
        if self._between_s is None:
            return
        now_s, key = time.monotonic(), (bucket, name)
        if now_s - self._last_s.get(key, float("-inf")) < self._between_s:
            raise ApiError(
                429,
                f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, update, "
                "and delete). Please reduce your request rate. "
                "See https://cloud.google.com/storage/docs/gcs429.",
            )
        if len(self._last_s) >= _LONGEST:
            self._last_s = {k: s for k, s in self._last_s.items() if now_s - s < self._between_s}
        self._last_s[key] = now_s
