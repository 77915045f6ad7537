"""A clock that a test moves."""

from __future__ import annotations


class HandClock:
    """A clock for leases and delays that moves only when a test moves it."""

    def __init__(self) -> None:
        self.boot_id = "boot-1"
        self.time_ms = 1_000_000

    def now_ms(self) -> int:
        return self.time_ms

    def utc(self) -> str:
        return "2026-01-01T00:00:00.000Z"

    def pass_s(self, seconds: float) -> None:
        self.time_ms += round(seconds * 1000)

    def reboot(self) -> None:
        """Restart at a time that says nothing: only the boot's id tells."""
        self.boot_id += "+"
