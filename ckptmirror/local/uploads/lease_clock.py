"""The clock that leases and waiting times are measured with.

Rules:
* Leases use CLOCK_BOOTTIME: it never jumps, and it goes on while the machine sleeps. The wall clock is for people.
* A time of another boot means nothing here, so every stored time carries the id of its boot.
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
    """What the table asks of a clock; tests give it one that they move by hand."""

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
        """The kernel's boot id; "unknown" where there is none (then only the granted length tells an old lease)."""
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
