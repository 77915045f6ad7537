"""Sizes, durations, ages and standing sentences, in words for people."""

from __future__ import annotations

import re
import time
from pathlib import Path

from ckptmirror.core import errors
from ckptmirror.core.printable import printable_line
from ckptmirror.core.uncommitted import is_held_back_text

__all__ = ["age_text", "behind_text", "duration_text", "on_no_mirror", "plain_reason", "size"]

_CLOCKS_DIFFER_S = 60


def size(size_bytes: int) -> str:
    """Return a size for people: ``1.4 GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration_text(duration_s: float) -> str:
    """Return a duration for people: ``340 ms``, ``4.2 s``, ``3 min 20 s``, ``6 h 12 min``, ``2 d 3 h``."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    seconds = round(duration_s)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller_size
            return f"{seconds // size} {unit} {rest} {smaller}" if rest else f"{seconds // size} {unit}"
    return f"{seconds} s"


def age_text(at_utc: str, now_s: float | None = None) -> str:
    """Return how long ago a moment was: ``3 min ago``. If it is in the future by this clock, return the moment."""
    from ckptmirror.core.journal import utc_seconds  # with all events: `--help` needs none

    at_s = utc_seconds(at_utc)
    if at_s is None:
        return ""
    age_s = round((time.time() if now_s is None else now_s) - at_s)
    if age_s <= 0:
        return at_utc if age_s < -_CLOCKS_DIFFER_S else "just now"
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= size_s:
            return f"{age_s // size_s} {unit} ago"
    return f"{age_s} s ago"


def plain_reason(reason: str) -> str:
    """Return why something failed, on one line, and without the names of our classes of errors."""
    return printable_line(re.sub(rf"\b(?:{'|'.join(errors.__all__)}): ", "", reason))


def behind_text(reason: str, *, is_over: bool = True) -> str:
    """Return why a save waits for another node, and what sends it: to a mirror that a person pushed to, a push.

    Args:
        is_over: Whether nothing here asks for it any more, so that another drain has to.
    """
    if is_held_back_text(reason):
        return plain_reason(reason)
    push = "`ckptmirror push --mirror URL` there, or, if it has deleted it, from a copy by `ckptmirror stage --full`"
    there = f"`ckptmirror drain` there sends it (a mirror that was pushed to: {push})"
    here = ", and one here then records it: `ckptmirror drain`" if is_over else ""
    return f"{plain_reason(reason).removesuffix('.')}; if its job has ended, {there}{here}"


def on_no_mirror(step: int, copy: Path | None, is_here: bool, is_whole: bool) -> str:
    """Say that the newest state is an emergency snapshot, for a person who is about to give this machine back."""
    what = f"the newest state, step {step}, is an emergency snapshot"
    if not is_whole:
        where = "this disk" if is_here else copy
        return f"{what}, of which {where} has a part; a start that finds the other ranks' parts continues from it"
    where = "only on this disk" if copy is None else f"on this disk and in {copy}" if is_here else f"only in {copy}"
    then = "the next start continues from it" if is_here else "a start with that persistent_dir continues from it"
    return f"{what} {where}; {then}"
