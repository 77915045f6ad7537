"""One line of the journal: an event with the clocks, the process and the place in its sequence.

Rules:
* A line is one ASCII JSON object followed by a line feed. Long texts are cut, so the length of a line is bounded.
* A line has both clocks: the wall clock is for people, the boot clock never jumps and gives the order
  (``clock_jumps``).
* Reading is tolerant where that is safe. A torn line, an unknown event or a field of the wrong type makes the line
  unreadable, and it is counted; unknown fields of a known event are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from ckptmirror.core import events

__all__ = [
    "FILE_LIMIT_BYTES",
    "MAX_LINE_BYTES",
    "JournalEntry",
    "entries_from_lines",
    "line_of",
    "utc_moment",
    "utc_seconds",
    "utc_text",
]

MAX_LINE_BYTES = 8192
FILE_LIMIT_BYTES = 8 * 1024 * 1024
"""A journal of this size becomes the older one."""
_MAX_TEXT = 500
_MAX_KINDS = 16
_FIRST_S, _LAST_S = -62_135_596_800.0, 253_402_300_799.0  # the years 1 and 9999
_CLASSES: Mapping[str, type[events.Event]] = {
    cls.__name__: cls
    for cls in map(vars(events).__getitem__, events.__all__)
    if isinstance(cls, type) and issubclass(cls, events.Event) and cls is not events.Event
}


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An event as the journal records it.

    Attributes:
        event: What happened.
        at_s: Wall clock, seconds since 1970 in UTC.
        boot: Id of the machine's boot; "unknown" where there is none.
        boot_s: Seconds since that boot.
        by: Who wrote it: ``trainer`` or the name of a verb.
        writer: 8 hex digits, new for every journal that is opened.
        number: The writer numbers its lines 1, 2, 3 …; a gap means that a line was lost.
        pid: The process.
    """

    event: events.Event
    at_s: float
    boot: str
    boot_s: float
    by: str
    writer: str
    number: int
    pid: int = 0


def utc_text(at_s: float) -> str:
    """Return ISO 8601 text with milliseconds, ending in ``Z``."""
    return utc_moment(at_s).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc_moment(at_s: float) -> datetime:
    """Return the moment, or the nearest that a calendar of four digits has."""
    return datetime.fromtimestamp(min(max(at_s, _FIRST_S), _LAST_S), UTC)


def utc_seconds(text: str) -> float | None:
    """Convert ISO 8601 text (UTC if it has no zone) to seconds since 1970; return None if it is not a time."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def line_of(entry: JournalEntry) -> bytes:
    """Return the line for an entry, at most ``MAX_LINE_BYTES`` long."""
    line = {
        "at_utc": utc_text(entry.at_s),
        "boot": entry.boot,
        "boot_ms": round(entry.boot_s * 1000),
        "by": entry.by,
        "pid": entry.pid,
        "writer": entry.writer,
        "number": entry.number,
        "event": type(entry.event).__name__,
        "facts": {field.name: _plain(getattr(entry.event, field.name)) for field in fields(entry.event)},
    }
    data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
    if len(data) > MAX_LINE_BYTES:  # text in letters that take six bytes each in JSON
        line["facts"] = {name: value for name, value in line["facts"].items() if not isinstance(value, str)}  # type: ignore[attr-defined]
        data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [str(one) for one in value[:_MAX_KINDS]] if isinstance(value, tuple) else value


def entries_from_lines(lines: Iterable[bytes]) -> tuple[list[JournalEntry], int]:
    """Return the entries of these lines, in order and without duplicates, and the number of unreadable lines."""
    found: list[JournalEntry] = []
    seen: set[tuple[str, int]] = set()
    broken = 0
    for line in lines:
        if not line.strip():
            continue
        entry = _entry_of(line)
        if entry is None:
            broken += 1
        elif (entry.writer, entry.number) not in seen:  # the files may have been renamed between two reads
            seen.add((entry.writer, entry.number))
            found.append(entry)
    return found, broken


def _entry_of(line: bytes) -> JournalEntry | None:
    try:
        document = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("facts"), dict):
        return None
    event = _event(document.get("event"), document["facts"])
    at_s = utc_seconds(document["at_utc"]) if isinstance(document.get("at_utc"), str) else None
    texts = [document.get(name) for name in ("boot", "by", "writer")]
    numbers = [document.get(name) for name in ("boot_ms", "number", "pid")]
    if event is None or at_s is None or not all(map(_CHECKS["str"], texts)) or not all(map(_CHECKS["int"], numbers)):
        return None
    (boot, by, writer), (boot_ms, number, pid) = texts, numbers
    assert isinstance(boot, str)
    assert isinstance(by, str)
    assert isinstance(writer, str)
    assert isinstance(boot_ms, int)
    assert isinstance(number, int)
    assert isinstance(pid, int)
    return JournalEntry(event, at_s, boot, boot_ms / 1000, by, writer, number, pid)


def _event(name: object, facts: Mapping[str, Any]) -> events.Event | None:
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None:
        return None
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name not in facts:
            continue
        value = facts[field.name]
        if not _CHECKS[str(field.type)](value):
            return None
        values[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return cls(**values)
    except TypeError:  # a field that has no default is missing
        return None


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 10**18


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value) and abs(value) < 1e12)


def _is_kinds(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_KINDS and all(isinstance(one, str) for one in value)


_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "tuple[Kind, ...]": _is_kinds,
}
