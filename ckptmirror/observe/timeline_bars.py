"""A bar of the timeline: one thing that took time, or one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Bar", "BarKind", "Outcome", "ended_bar"]

BarKind = Literal[
    "attempt",
    "resume",
    "stage",
    "host_copy",
    "emergency",
    "commit",
    "upload",
    "mirror_commit",
    "unreachable",
    "rotation",
    "stop",
    "fence",
    "broken_copy",
    "gone",
    "quarantine",
]
Outcome = Literal["done", "failed", "refused", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing that happened.

    Attributes:
        begin_s: Seconds since 1970, on a line without jumps.
        end_s: None if no end is known: it continues, or its process was killed.
        until_s: When it ended; if no end is known, the last moment at which it can have ended.
        step: None if it concerns no step.
        rank: The rank, if one rank did it.
        mirror: URL, if it concerns a mirror.
        save_id: 32 hex digits, or empty if it is not known.
        attempt: Number of the attempt that ran then; None before the first one.
        by: ``trainer``, a verb's name, or empty if only the table records it.
        reason: Why it failed or happened, in words.
        tries: How often a file of an upload was begun; 0 if it is not an upload.
    """

    kind: BarKind
    begin_s: float
    end_s: float | None
    until_s: float
    outcome: Outcome = "done"
    step: int | None = None
    rank: int | None = None
    mirror: str | None = None
    save_id: str = ""
    attempt: int | None = None
    by: str = ""
    reason: str = ""
    tries: int = 0

    @property
    def is_moment(self) -> bool:
        """Whether it is one moment, without a known duration."""
        return self.end_s is not None and self.end_s <= self.begin_s


def ended_bar(kind: BarKind, at_s: float, took_s: float = 0.0, **facts: Any) -> Bar:
    """Return a bar that ended at ``at_s`` and took ``took_s`` seconds; 0 seconds make it a moment.

    Args:
        kind: The kind of bar.
        at_s: As ``Bar.end_s``.
        took_s: A negative value, from a clock that was set back, counts as 0.
        **facts: The other attributes of the bar.
    """
    return Bar(kind=kind, begin_s=at_s - max(0.0, took_s), end_s=at_s, until_s=at_s, **facts)
