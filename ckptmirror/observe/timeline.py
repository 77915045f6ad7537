"""The timeline: a run's history as bars over time. Pure: ``history`` reads what it is built from.

Rules:
* All times are on one line without jumps of the wall clock (``core.clock_jumps``); times that only the wall clock gives
  are converted to it.
* A bar without a recorded end is unfinished: its process was killed, or it continues. It lasts at most until the next
  attempt (an upload: until the last known event), and is marked as unfinished.
* The journal records saves, starts, rotations and stages; the table's transitions record uploads. Events that are
  missing in the journal, because an older version ran or its old lines are gone, come from metas and transitions, as
  moments.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptmirror.core import events
from ckptmirror.core.clock_jumps import Jump, LaidClock, Reading
from ckptmirror.core.journal import JournalEntry, utc_seconds
from ckptmirror.observe.history import History
from ckptmirror.observe.timeline_bars import Bar, BarKind, Outcome, ended_bar
from ckptmirror.observe.timeline_uploads import forgotten_saves, upload_bars

__all__ = ["Timeline", "build_timeline"]


@dataclass(frozen=True)
class Timeline:
    """Everything that happened, sorted by its begin.

    Attributes:
        begin_s: The first known moment, in seconds since 1970.
        end_s: The last known moment, in seconds since 1970.
        bars: Sorted by begin; an attempt comes before what it contains.
        jumps: The moments at which the wall clock was set.
        lost_lines: The number of journal lines that are cut short, unknown or missing from a sequence.
        problems: One sentence for each thing that could not be read.
    """

    begin_s: float
    end_s: float
    bars: tuple[Bar, ...]
    jumps: tuple[Jump, ...] = ()
    lost_lines: int = 0
    problems: tuple[str, ...] = ()

    def of_kind(self, *kinds: BarKind) -> list[Bar]:
        """Return the bars of some kinds."""
        return [bar for bar in self.bars if bar.kind in kinds]


def build_timeline(history: History) -> Timeline:
    """Build the timeline of a history that has at least one event, transition or save with a time."""
    clock = LaidClock(_reading(told) for told in history.told)
    told = sorted(((clock.of(_reading(one)), one) for one in history.told), key=lambda pair: pair[0])
    dated = [*(one.at_utc for one in history.transitions), *(meta.created_at_utc for meta in history.saves)]
    walls = [wall_s for at_utc in dated if (wall_s := utc_seconds(at_utc)) is not None]
    moments = [at_s for at_s, _ in told] + [clock.of_wall(wall_s) for wall_s in walls]
    last_s = max(moments, default=0.0)
    bars = _Building(told, last_s).build()
    bars += upload_bars(history.transitions, clock.of_wall, last_s)
    bars = _once_each(bars)
    known = {(bar.kind, bar.save_id) for bar in bars}
    forgotten = forgotten_saves(history.transitions, clock.of_wall)
    bars += [bar for save_id, bar in forgotten.items() if ("rotation", save_id) not in known]
    bars += _saves_without_events(history, clock, known)
    bars = _with_attempts(bars)
    bars.sort(key=lambda bar: (bar.begin_s, bar.kind != "attempt"))
    return Timeline(
        begin_s=min([bar.begin_s for bar in bars], default=last_s),
        end_s=max([last_s, *(bar.until_s for bar in bars)]),
        bars=tuple(bars),
        jumps=clock.jumps,
        lost_lines=history.broken_lines + _gaps(history.told),
        problems=history.problems,
    )


def _reading(told: JournalEntry) -> Reading:
    return Reading(told.at_s, told.boot, told.boot_s)


def _gaps(told: Iterable[JournalEntry]) -> int:
    """Count the lines that are missing inside their writers' sequences; lines too old to be kept do not count."""
    numbers: dict[str, list[int]] = {}
    for one in told:
        numbers.setdefault(one.writer, []).append(one.number)
    return sum(max(found) - min(found) + 1 - len(found) for found in numbers.values())


def _once_each(bars: list[Bar]) -> list[Bar]:
    """Remove duplicates: both journal and table record a commit on a mirror; keep the table's."""
    by_table = {(bar.save_id, bar.mirror) for bar in bars if bar.kind == "mirror_commit" and not bar.by}
    return [
        bar for bar in bars if bar.kind != "mirror_commit" or not bar.by or (bar.save_id, bar.mirror) not in by_table
    ]


def _saves_without_events(history: History, clock: LaidClock, known: set[tuple[BarKind, str]]) -> list[Bar]:
    found = []
    for meta in history.saves:
        kind: BarKind = "emergency" if meta.kinds == ("emergency",) else "commit"
        created_s = utc_seconds(meta.created_at_utc)
        if created_s is not None and (kind, meta.save_id) not in known:
            at_s = clock.of_wall(created_s)
            reason = "from the save's meta, to the second"
            found.append(ended_bar(kind, at_s, step=meta.step, save_id=meta.save_id, reason=reason))
    return found


def _with_attempts(bars: Sequence[Bar]) -> list[Bar]:
    """Set in each bar the attempt that ran when it began; a resume belongs to the attempt that it started."""
    attempts = sorted((bar for bar in bars if bar.kind == "attempt"), key=lambda bar: bar.begin_s)
    begins = [bar.begin_s for bar in attempts]
    placed = []
    for bar in bars:
        number = bisect.bisect_right(begins, bar.begin_s) - 1
        if bar.attempt is None and number >= 0:
            placed.append(replace(bar, attempt=attempts[number].attempt))
        else:
            placed.append(bar)
    return placed


_SHARED = ("step", "rank", "mirror", "save_id", "reason")
_ONE_BAR_EACH: dict[type[events.Event], tuple[BarKind, Outcome]] = {
    events.EmergencySaved: ("emergency", "done"),
    events.MirrorCommitted: ("mirror_commit", "done"),
    events.SaveRotated: ("rotation", "done"),
    events.RotationRefused: ("rotation", "refused"),
    events.Fenced: ("fence", "refused"),
    events.SaveGone: ("gone", "failed"),
    events.SaveQuarantined: ("quarantine", "failed"),
    events.SaveReleased: ("quarantine", "done"),
}


class _Building:
    """Turns the journal's events into bars, one by one, in the order of their time."""

    def __init__(self, told: Sequence[tuple[float, JournalEntry]], last_s: float) -> None:
        self._told = told
        self._last_s = last_s
        self._starts = [at_s for at_s, one in told if isinstance(one.event, events.AttemptDecided)]
        self._bars: list[Bar] = []
        self._host_copies: dict[tuple[int | None, int | None, float | None], int] = {}  # the last of each, in _bars
        self._copied: dict[tuple[str, int, int], deque[Bar]] = {}  # by writer, rank and step: not committed yet
        self._attempts: dict[str, Bar] = {}  # by writer
        self._stages: dict[tuple[str, str, int], Bar] = {}  # by writer, mirror and step

    def build(self) -> list[Bar]:
        """Return all bars; those that are still open are unfinished."""
        for at_s, one in self._told:
            self._see(at_s, one)
        copied = [bar for waiting in self._copied.values() for bar in waiting]
        for bar in [*copied, *self._attempts.values(), *self._stages.values()]:
            self._give_up(bar)
        return self._bars

    def _see(self, at_s: float, one: JournalEntry) -> None:
        event = one.event
        match event:
            case events.HostCopied() | events.SaveCommitted() | events.SaveFailed() | events.SaveSkipped():
                self._see_save(at_s, one)
            case events.AttemptDecided() | events.AttemptEnded():
                self._see_attempt(at_s, one)
            case events.StageStarted() | events.StageFinished() | events.StageFailed():
                self._see_stage(at_s, one)
            case events.MirrorUnreachable():
                self._add("unreachable", at_s, one, outcome="refused" if event.refused else "failed")
            case events.StopRequested():
                self._add("stop", at_s - max(0.0, event.age_s), one)
            case events.CopyBroken():
                reason = f"{event.place}: {event.reason}" if event.place else event.reason
                self._add("broken_copy", at_s, one, outcome="failed", reason=reason)
            case _ if type(event) in _ONE_BAR_EACH:
                kind, outcome = _ONE_BAR_EACH[type(event)]
                self._add(kind, at_s, one, getattr(event, "duration_s", 0.0), outcome=outcome)
            case _:  # nothing that a timeline shows
                return

    def _see_save(self, at_s: float, one: JournalEntry) -> None:
        """Pair each end with its host copy: the next save may be copied before the last one has ended."""
        event = one.event
        assert isinstance(event, events.HostCopied | events.SaveCommitted | events.SaveFailed | events.SaveSkipped)
        waiting = self._copied.setdefault((one.writer, event.rank, event.step), deque())
        if isinstance(event, events.HostCopied):
            self._host_copies[event.rank, event.step, at_s] = len(self._bars)
            self._add("host_copy", at_s, one, event.duration_s)
            waiting.append(_open_bar("commit", at_s, one))
            return
        begun = waiting.popleft() if waiting else None
        if isinstance(event, events.SaveFailed | events.SaveSkipped):
            self._add("commit", at_s, one, at_s - begun.begin_s if begun is not None else 0.0, outcome="failed")
            return
        if begun is not None:
            self._name_host_copy(begun, event.save_id)
        self._add("commit", at_s, one, event.duration_s)

    def _name_host_copy(self, begun: Bar, save_id: str) -> None:
        """Set the save's id in the bar of its host copy; it was not agreed on at that time."""
        number = self._host_copies[begun.rank, begun.step, begun.begin_s]
        self._bars[number] = replace(self._bars[number], save_id=save_id)

    def _see_attempt(self, at_s: float, one: JournalEntry) -> None:
        event = one.event
        begun = self._attempts.pop(one.writer, None)
        if isinstance(event, events.AttemptDecided):
            if begun is not None:  # of this same process
                self._end_attempt(begun, at_s - event.duration_s, "done", "the next began in the same process")
            where = event.place if "://" in event.place else None
            reason = "from scratch" if event.step is None else f"continues from step {event.step} ({event.place})"
            facts = {"reason": reason, "attempt": event.attempt}
            self._add("resume", at_s, one, event.duration_s, mirror=where, **facts)
            self._attempts[one.writer] = _open_bar("attempt", at_s, one, save_id="", **facts)
        elif isinstance(event, events.AttemptEnded) and begun is not None:
            left = f", {event.pending} files pending" if event.pending else ""
            self._end_attempt(begun, at_s, "failed" if event.status == "incomplete" else "done", event.status + left)

    def _end_attempt(self, begun: Bar, at_s: float, outcome: Outcome, how: str) -> None:
        end_s = max(begun.begin_s, at_s)
        reason = f"{begun.reason}; {how}"
        self._bars.append(replace(begun, end_s=end_s, until_s=end_s, outcome=outcome, reason=reason))

    def _see_stage(self, at_s: float, one: JournalEntry) -> None:
        event = one.event
        assert isinstance(event, events.StageStarted | events.StageFinished | events.StageFailed)
        key = (one.writer, event.mirror, event.step)
        begun = self._stages.pop(key, None)
        if isinstance(event, events.StageStarted):
            if begun is not None:
                self._give_up(begun)
            self._stages[key] = _open_bar("stage", at_s, one)
            return
        took_s = at_s - begun.begin_s if begun is not None else getattr(event, "duration_s", 0.0)
        self._add("stage", at_s, one, took_s, outcome="failed" if isinstance(event, events.StageFailed) else "done")

    def _add(self, kind: BarKind, at_s: float, one: JournalEntry, took_s: float = 0.0, **facts: Any) -> None:
        self._bars.append(ended_bar(kind, at_s, took_s, by=one.by, **(_facts(one.event) | facts)))

    def _give_up(self, bar: Bar) -> None:
        number = bisect.bisect_right(self._starts, bar.begin_s)
        until_s = self._starts[number] if number < len(self._starts) else max(bar.begin_s, self._last_s)
        self._bars.append(replace(bar, until_s=until_s))


def _open_bar(kind: BarKind, at_s: float, one: JournalEntry, **facts: Any) -> Bar:
    known = _facts(one.event) | facts
    return Bar(kind=kind, begin_s=at_s, end_s=None, until_s=at_s, outcome="unfinished", by=one.by, **known)


def _facts(event: events.Event) -> dict[str, Any]:
    """Return the attributes that an event shares with a bar."""
    return {name: getattr(event, name) for name in _SHARED if hasattr(event, name)}
