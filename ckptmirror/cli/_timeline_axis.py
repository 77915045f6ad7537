"""The time axis of a drawing: positions of moments, ticks, and cuts for idle time.

Rules:
* Time runs evenly, except over a long pause in which nothing happened. A pause is drawn as a short gap with its
  duration. It is long if it is ``CUT_SHARE`` of everything and far longer than the usual one.
* Ticks are at round times of UTC, far enough apart that their labels do not touch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ckptmirror.core.journal import utc_moment

__all__ = ["Axis", "Cut", "Tick"]

CUT_SHARE = 0.15
_CUT_TIMES_MEDIAN = 10.0
_CUT_WIDTH = 34.0
_MARGIN_SHARE = 0.03
_LABEL_WIDTH = 76.0
_SHORTEST_S = 0.5
_STEPS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0),
    *(hours * 3600.0 for hours in (1, 2, 3, 6, 12, 24, 48, 96, 240, 720, 2400, 8760, 87600)),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A pause that is drawn short."""

    begin_s: float
    end_s: float
    left: float
    right: float


@dataclass(frozen=True, slots=True)
class Tick:
    """A round time; ``date`` is empty unless a new day begins with it."""

    x: float
    text: str
    date: str


class Axis:
    """Maps seconds since 1970 to a place between ``left`` and ``left + width``.

    Args:
        busy: Begin and end of everything that counts as something happening.
        begin_s: The first moment.
        end_s: The last moment.
        left: The position of the first moment.
        width: The distance from the first moment to the last.
    """

    def __init__(
        self, busy: Iterable[tuple[float, float]], begin_s: float, end_s: float, left: float, width: float
    ) -> None:
        if end_s - begin_s < _SHORTEST_S:
            end_s = begin_s + _SHORTEST_S
        self.begin_s, self.end_s = begin_s, end_s
        self.left, self.right = left, left + width
        pauses = _long_pauses(busy, begin_s, end_s)
        cut_s = sum(end - begin for begin, end in pauses)
        self.scale = (width - _CUT_WIDTH * len(pauses)) / (end_s - begin_s - cut_s)
        self._pieces: list[tuple[float, float, float, float]] = []  # begin, end, left, right
        self.cuts: list[Cut] = []
        at_s, x = begin_s, left
        for begin, end in pauses:
            self._pieces.append((at_s, begin, x, x + (begin - at_s) * self.scale))
            x = self._pieces[-1][3]
            self.cuts.append(Cut(begin, end, x, x + _CUT_WIDTH))
            at_s, x = end, x + _CUT_WIDTH
        self._pieces.append((at_s, end_s, x, self.right))

    def x(self, at_s: float) -> float:
        """Return the position of a moment."""
        for begin, end, left, right in self._pieces:
            if at_s < begin:  # inside the cut before this piece
                return left - _CUT_WIDTH / 2
            if at_s <= end:
                return left + (at_s - begin) * self.scale if end > begin else right
        return self.right

    def ticks(self) -> list[Tick]:
        """Return the ticks, from left to right."""
        step_s = next((step for step in _STEPS_S if step * self.scale >= _LABEL_WIDTH * 1.15), _STEPS_S[-1])
        found: list[Tick] = []
        day = ""
        for begin, end, _, _ in self._pieces:
            for number in range(math.ceil(begin / step_s), math.floor(end / step_s) + 1):
                x = self.x(number * step_s)
                if (found and x - found[-1].x < _LABEL_WIDTH) or x > self.right:
                    continue
                date, text = _texts(number * step_s, step_s)
                found.append(Tick(x, text, date if date != day else ""))
                day = date
        return found


def _texts(at_s: float, step_s: float) -> tuple[str, str]:
    moment = utc_moment(round(at_s, 3))
    date = moment.strftime("%Y-%m-%d")
    if step_s >= 86400:
        return date, "00:00"
    if step_s >= 60:
        return date, moment.strftime("%H:%M")
    if step_s >= 1:
        return date, moment.strftime("%H:%M:%S")
    digits = 1 if step_s >= 0.1 else 2
    return date, moment.strftime("%H:%M:%S") + f"{moment.microsecond / 1e6:.{digits}f}"[1:]


def _long_pauses(busy: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    pauses: list[tuple[float, float]] = []
    last_s = begin_s
    for begin, end in sorted(busy):
        if begin > last_s:
            pauses.append((last_s, begin))
        last_s = max(last_s, end)
    if end_s > last_s:
        pauses.append((last_s, end_s))
    if not pauses:
        return []
    usual_s = statistics.median(end - begin for begin, end in pauses)
    least_s = max(CUT_SHARE * (end_s - begin_s), _CUT_TIMES_MEDIAN * usual_s)
    long = [pause for pause in pauses if pause[1] - pause[0] >= least_s]
    drawn_s = end_s - begin_s - sum(end - begin for begin, end in long)
    return [_shortened(begin, end, _MARGIN_SHARE * drawn_s) for begin, end in long]


def _shortened(begin: float, end: float, margin_s: float) -> tuple[float, float]:
    """Shorten a pause on both sides, so that bars that end there do not touch the gap."""
    margin_s = min(margin_s, 0.02 * (end - begin))
    return begin + margin_s, end - margin_s
