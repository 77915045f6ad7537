"""How long to wait before a retry: one rule for both requests and upload records.

Rules:
* The delay is random between zero and a limit that doubles with each failure ("full jitter"), so that many clients of
  one mirror do not retry at the same moment.
* It is never shorter than the mirror asked for (Retry-After).
"""

from __future__ import annotations

import random

from ckptmirror.core.errors import StoreTemporary

__all__ = ["retry_delay_s"]

_DOUBLINGS_LIMIT = 30
_random = random.Random()  # does not disturb the random numbers of the training


def retry_delay_s(error: BaseException, failures: int, *, first_s: float, longest_s: float) -> float:
    """Return for how many seconds to wait.

    Args:
        error: The last failure.
        failures: How many failures there were, at least 1.
        first_s: The longest delay after the first failure.
        longest_s: Where the doubling stops.
    """
    limit_s = min(longest_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS_LIMIT))
    asked_s = error.retry_after_s if isinstance(error, StoreTemporary) else None
    return max(_random.uniform(0.0, limit_s), asked_s or 0.0)
