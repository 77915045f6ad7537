"""Puts the times of a wall clock that may have jumped on one time line.

Rules:
* Within one boot of the machine, the boot clock says how far apart two moments are. The boot's last reading anchors it
  to the wall clock: once somebody corrects the clock, the correction applies to earlier times too.
* If the difference of the two clocks changes by more than ``JUMP_S`` between two readings, the wall clock has jumped.
  The jump is reported, and everything before it is shifted.
* A time without a boot clock (a row of the table) is placed between the readings around it. If a clock that was set
  back makes more than one place possible, it gets the earliest (of the last ``_MOST_PLACES`` that began) that is not
  before what is known to have happened earlier.
* Without readings no jump can be seen, and times stay as they are.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

__all__ = ["JUMP_S", "Jump", "LaidClock", "Reading"]

JUMP_S = 1.0
_UNKNOWN = "unknown"
_MOST_PLACES = 16


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

    def holds(self, wall_s: float) -> bool:
        return self.first_s - JUMP_S <= wall_s <= self.last_s + JUMP_S


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
        self._bounds, self._between = _by_wall(self._regimes)

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
        around = self._between[bisect.bisect_right(self._bounds, (wall_s, 0))]
        if not around[0].holds(wall_s):
            around = (min(around, key=lambda one: max(one.first_s - wall_s, wall_s - one.last_s)),)
        laid = sorted(wall_s + one.shift_s for one in around)
        return next((at_s for at_s in laid if at_s >= not_before_s - JUMP_S), laid[-1])


def _by_wall(regimes: Iterable[_Regime]) -> tuple[list[tuple[float, int]], list[tuple[_Regime, ...]]]:
    """Return where regimes begin (0) and end (1) on the wall clock, and the regimes before, between and after these.

    Where there is none, they are the one that ended before and the one that begins after.
    """
    steps = [(one.first_s - JUMP_S, 0, number, one) for number, one in enumerate(regimes)]
    steps += [(max(one.first_s, one.last_s) + JUMP_S, 1, number, one) for _, _, number, one in steps]
    steps.sort(key=lambda step: step[:3])
    running: dict[int, _Regime] = {}
    between = [tuple(step[3] for step in steps[:1])]
    for place, (_, is_end, number, one) in enumerate(steps):
        if not is_end:
            running[number] = one
        else:
            del running[number]
        found = tuple(islice(reversed(running.values()), _MOST_PLACES))
        between.append(found or (one, *(step[3] for step in steps[place + 1 : place + 2])))
    return [step[:2] for step in steps], between
