"""Puts the times of a wall clock that may have jumped on one time line.

Rules:
* Within one boot of the machine, the boot clock says how far apart two moments are. The boot's last reading anchors it
  to the wall clock: once somebody corrects the clock, the correction applies to earlier times too.
* If the difference of the two clocks changes by more than ``JUMP_S`` between two readings, the wall clock has jumped.
  The jump is reported, and everything before it is shifted.
* A time without a boot clock (a row of the table) is placed between the readings around it. If a clock that was set
  back makes two places possible, it gets the earliest that is not before what is known to have happened earlier.
* Without readings no jump can be seen, and times stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["JUMP_S", "Jump", "LaidClock", "Reading"]

JUMP_S = 1.0
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reading:
    """Both clocks at one moment, in seconds; the boot "unknown" has no boot clock."""

    wall_s: float
    boot: str
    boot_s: float


@dataclass(frozen=True, slots=True)
class Jump:
    """The wall clock was set ``by_s`` seconds forward (back if negative), noticed at ``at_s`` on the time line."""

    at_s: float
    by_s: float


@dataclass(slots=True)
class _Regime:
    """A stretch of one boot in which the wall clock did not jump."""

    first_s: float
    last_s: float
    offset_s: float
    shift_s: float = 0.0


class LaidClock:
    """One time line for all times of a root.

    Attributes:
        jumps: The jumps of the wall clock, in order.
    """

    def __init__(self, readings: Iterable[Reading]) -> None:
        by_boot: dict[str, list[Reading]] = {}
        for reading in readings:
            if reading.boot != _UNKNOWN:
                by_boot.setdefault(reading.boot, []).append(reading)
        self._offset_s: dict[str, float] = {}
        self._regimes: list[_Regime] = []
        jumps: list[Jump] = []
        for boot, found in by_boot.items():
            jumps += self._lay(boot, sorted(found, key=lambda reading: reading.boot_s))
        self.jumps = tuple(sorted(jumps, key=lambda jump: jump.at_s))

    def _lay(self, boot: str, readings: list[Reading]) -> list[Jump]:
        final_s = self._offset_s[boot] = readings[-1].wall_s - readings[-1].boot_s
        regimes: list[_Regime] = []
        jumps = []
        for reading in readings:
            offset_s = reading.wall_s - reading.boot_s
            if not regimes or abs(offset_s - regimes[-1].offset_s) > JUMP_S:
                if regimes:
                    jumps.append(Jump(reading.boot_s + final_s, offset_s - regimes[-1].offset_s))
                regimes.append(_Regime(reading.wall_s, reading.wall_s, offset_s))
            last = regimes[-1]
            last.last_s, last.offset_s, last.shift_s = reading.wall_s, offset_s, final_s - offset_s
        self._regimes += regimes
        return jumps

    def of(self, reading: Reading) -> float:
        """Return the time of a reading, in seconds since 1970."""
        offset_s = self._offset_s.get(reading.boot)
        return reading.wall_s if offset_s is None else reading.boot_s + offset_s

    def of_wall(self, wall_s: float, not_before_s: float = -math.inf) -> float:
        """Return the time, in seconds since 1970, of a moment known only by the wall clock."""
        if not self._regimes:
            return wall_s
        around = [one for one in self._regimes if one.first_s - JUMP_S <= wall_s <= one.last_s + JUMP_S]
        if not around:
            around = [min(self._regimes, key=lambda one: max(one.first_s - wall_s, wall_s - one.last_s))]
        laid = sorted(wall_s + one.shift_s for one in around)
        return next((at_s for at_s in laid if at_s >= not_before_s - JUMP_S), laid[-1])
