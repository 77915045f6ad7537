"""Measuring several contestants side by side: the same rounds, in an order that rotates, after a warm-up.

Rules:
* Ratios are taken within a round and their median is shown: a machine that becomes slower meanwhile slows all.
* Every second round goes backwards, so that nobody always follows the same one.
* What prepares a run or removes what it left is not measured, nor is writing back what is in the page cache, nor what
  a virtual disk goes on doing for a moment when it has said that all is written.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Contestant", "Measured", "Role", "measure", "table"]

_REST_S = 1.0
Role = Literal["limit", "ours", "peer"]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """One way to do the work.

    Attributes:
        run: Does it once and returns seconds (or bytes) by what was measured.
        before: Prepares a run; not measured.
        after: Removes what the run left; not measured.
        times: How often it runs in a round, of which the median counts: what is short is at the mercy of the moment.
    """

    name: str
    role: Role
    run: Callable[[], Mapping[str, float]]
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing
    times: int = 1


@dataclass
class Measured:
    """What one contestant took, round by round."""

    what: str
    name: str
    role: Role
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.samples)

    def ratio_to(self, other: Measured) -> float:
        """The median of the ratios within each round."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(mine / theirs if theirs else float("inf") for mine, theirs in pairs)


def measure(contestants: Sequence[Contestant], rounds: int, *, unit: str = "s", warm_up: bool = True) -> list[Measured]:
    """Run everyone ``rounds`` times, after one round that does not count."""
    found: dict[tuple[str, str], Measured] = {}
    for number in range(-1 if warm_up else 0, rounds):
        turn = number % len(contestants)
        order = [*contestants[turn:], *contestants[:turn]]
        for contestant in reversed(order) if number % 2 else order:
            runs = [_run_once(contestant) for _ in range(contestant.times)]
            if number < 0:
                continue
            for what in runs[0]:
                key, value = (what, contestant.name), statistics.median(run[what] for run in runs)
                found.setdefault(key, Measured(what, contestant.name, contestant.role, unit)).samples.append(value)
    places = {contestant.name: index for index, contestant in enumerate(contestants)}
    return sorted(found.values(), key=lambda measured: places[measured.name])


def _run_once(contestant: Contestant) -> Mapping[str, float]:
    contestant.before()
    os.sync()
    time.sleep(_REST_S)
    try:
        return contestant.run()
    finally:
        contestant.after()


def table(measured: Sequence[Measured]) -> list[str]:
    """Return Markdown: for each thing measured, everyone's median, its ratio to the limit, and ours to each peer."""
    lines: list[str] = []
    for what in dict.fromkeys(one.what for one in measured):
        rows = [one for one in measured if one.what == what]
        ours = [one for one in rows if one.role == "ours"]
        limit = next((one for one in rows if one.role == "limit"), None)
        heads = [what, "median", "to the limit", *[f"{one.name} to it" for one in ours]]
        lines += ["", "| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        for row in rows:
            value = _shown(row.median, row.unit)
            to_limit = f"{row.ratio_to(limit):.2f}" if limit is not None else ""
            ratios = ["" if row.role == "ours" else f"{one.ratio_to(row):.2f}" for one in ours]
            name = f"**{row.name}**" if row.role == "ours" else row.name
            lines.append("| " + " | ".join([name, value, to_limit, *ratios]) + " |")
    return lines


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s"
    if unit == "GiB/s":
        return f"{value:.2f} {unit}"
    if unit != "bytes":
        return f"{value:.0f}"
    return f"{value / 2**20:.0f} MiB" if value >= 10 * 2**20 else f"{value / 2**10:.1f} KiB"
