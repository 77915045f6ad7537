"""Bars of uploads and of commits on a mirror, from the transitions that the uploads table keeps.

Rules:
* One bar is one save on one mirror, from the first file that was begun to the last that was verified, no matter how
  often a file was put back. A retry of a failed file, or finding that a verified one is gone, begins another bar.
* It failed if a file has state failed when the history ends, or when a retry is requested.
* Transitions are sorted by their numbers, whatever the clock showed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckptmirror.core import names
from ckptmirror.core.journal import utc_seconds
from ckptmirror.core.lifecycle import SETTLED, RecordState
from ckptmirror.local.uploads import Transition
from ckptmirror.observe.timeline_bars import Bar, ended_bar

__all__ = ["forgotten_saves", "upload_bars"]

_FORGOTTEN = "the local save was deleted"
When = Callable[[float, float], float]
"""Converts a time of the wall clock, given a moment that it cannot be before."""


@dataclass
class _Upload:
    """What is known so far about one save on one mirror, since the last retry."""

    save_id: str
    mirror: str
    step: int
    states: dict[str, RecordState] = field(default_factory=dict)
    begin_s: float | None = None
    last_s: float = 0.0
    tries: int = 0
    reason: str = ""
    dropped: bool = False  # records left the table before their files were verified

    def restarts_with(self, one: Transition) -> bool:
        """Whether a file waits again that had failed, was done, or had left the table."""
        if one.new is not RecordState.PENDING:
            return False
        return one.old in (RecordState.FAILED, *SETTLED) or (one.old is None and one.path in self.states)

    def restart(self) -> None:
        self.begin_s, self.tries, self.reason, self.dropped = None, 0, "", False

    def see(self, one: Transition, at_s: float) -> None:
        """Add the next transition."""
        if RecordState.UPLOADING in (one.old, one.new) and self.begin_s is None:
            self.begin_s = at_s
        if one.new is RecordState.UPLOADING:
            self.tries += 1
        elif one.old is RecordState.UPLOADING and one.new in (RecordState.PENDING, RecordState.FAILED):
            self.reason = one.reason
        elif one.new is None and self.begin_s is not None and one.old not in SETTLED:
            self.reason, self.dropped = one.reason, True
        if one.new is not None:
            self.states[one.path] = one.new
        if one.new is not None or self.dropped:
            self.last_s = at_s

    def bar(self, last_s: float) -> Bar | None:
        """Return the bar for the history so far; None if no file was begun."""
        if self.begin_s is None:
            return None
        states = set(self.states.values())
        failed = self.dropped or RecordState.FAILED in states
        is_over = self.dropped or (failed and RecordState.UPLOADING not in states) or states.issubset(SETTLED)
        end_s = max(self.begin_s, self.last_s) if is_over else None
        return Bar(
            kind="upload",
            begin_s=self.begin_s,
            end_s=end_s,
            until_s=end_s if end_s is not None else max(self.begin_s, last_s),
            outcome="failed" if failed else "done" if is_over else "unfinished",
            step=self.step,
            mirror=self.mirror,
            save_id=self.save_id,
            reason=self.reason,
            tries=self.tries,
        )


def upload_bars(transitions: Iterable[Transition], when: When, last_s: float) -> list[Bar]:
    """Return the bars of every save on every mirror, and the moments of commits there.

    Args:
        transitions: In the order of their numbers.
        when: Converts their times.
        last_s: The last known moment.
    """
    known: dict[tuple[str, str], _Upload] = {}
    bars: list[Bar] = []
    for one, at_s in _laid(transitions, when):
        upload = known.setdefault((one.save_id, one.mirror), _Upload(one.save_id, one.mirror, one.step))
        if upload.restarts_with(one):
            bars += filter(None, [upload.bar(at_s)])
            upload.restart()
        upload.see(one, at_s)
        if one.new is RecordState.VERIFIED and _is_meta(one.path):
            bars.append(ended_bar("mirror_commit", at_s, step=one.step, save_id=one.save_id, mirror=one.mirror))
    bars += [bar for upload in known.values() if (bar := upload.bar(last_s)) is not None]
    return bars


def forgotten_saves(transitions: Iterable[Transition], when: When) -> dict[str, Bar]:
    """Return, by save id, the moments at which the table forgot a save because rotation had deleted it."""
    found: dict[str, Bar] = {}
    for one, at_s in _laid(transitions, when):
        if one.new is None and one.reason == _FORGOTTEN:
            found[one.save_id] = ended_bar("rotation", at_s, step=one.step, save_id=one.save_id, reason=one.reason)
    return found


def _laid(transitions: Iterable[Transition], when: When) -> Iterable[tuple[Transition, float]]:
    last_s = float("-inf")
    for one in transitions:
        wall_s = utc_seconds(one.at_utc)
        if wall_s is not None:
            last_s = when(wall_s, last_s)
            yield one, last_s


def _is_meta(path: str) -> bool:
    parsed = names.parse_name(path)
    return parsed is not None and parsed.role == "meta"
