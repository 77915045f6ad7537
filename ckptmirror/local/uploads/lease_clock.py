"""The clock for leases and waiting times.

Rules:
* Leases use CLOCK_BOOTTIME: it never jumps, and it runs while the machine sleeps. The wall clock is for people.
* A time of another boot has no meaning here, so every stored time has the id of its boot.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

__all__ = ["BOOT_ID_FILE", "BootClock", "LeaseClock"]

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class LeaseClock(Protocol):
    """The clock that the table needs; tests pass one that they move by hand."""

    @property
    def boot_id(self) -> str:
        """Names this boot of the machine."""
        ...

    def now_ms(self) -> int:
        """Milliseconds since this boot."""
        ...

    def utc(self) -> str:
        """The wall clock as ISO 8601 text, for people only."""
        ...


class BootClock:
    """The machine's own clock."""

    @cached_property
    def boot_id(self) -> str:
        """The kernel's boot id; "unknown" if there is none (then only its length shows that a lease is old)."""
        try:
            return BOOT_ID_FILE.read_text(encoding="ascii").strip() or "unknown"
        except OSError:
            return "unknown"

    def now_ms(self) -> int:
        """Milliseconds of CLOCK_BOOTTIME."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def utc(self) -> str:
        """Wall clock, to the millisecond."""
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
