"""Paths, dates and times, each written as text.

Rules:
* Only the classes on the list, and no subclass of them: another class would come back as one of these.
* A time zone is an offset from UTC, with or without a name. Other zones need a table that may differ where it is read.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Mapping
from typing import Any

from ckptmirror.core.errors import UsageError

__all__ = ["text_of", "value_of"]

_PATHS = {cls.__name__: cls for cls in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
_CLOCK = {cls.__name__: cls for cls in (datetime.datetime, datetime.date, datetime.time)}


def text_of(value: Any, where: str) -> dict[str, Any] | None:
    """Return what is written of a path, a date or a time; None for anything else.

    Raises:
        UsageError: It is in a time zone of another kind.
    """
    kind = type(value)
    if kind in _PATHS.values():
        return {"kind": kind.__name__, "text": str(value)}
    if kind is datetime.timedelta:
        return {"kind": "timedelta", "text": f"{value.days} {value.seconds} {value.microseconds}"}
    if kind not in _CLOCK.values():
        return None
    written = {"kind": kind.__name__, "text": value.isoformat()}
    if kind is not datetime.date and (zone := value.tzinfo) is not None:
        if type(zone) is not datetime.timezone:
            raise UsageError(
                f"{where} is a {kind.__name__} in the time zone {zone}, whose rules are not saved.",
                hint="Convert it first: value.astimezone(datetime.timezone.utc).",
            )
        written["zone"] = zone.tzname(None)
    return {**written, "fold": value.fold} if getattr(value, "fold", 0) else written


def value_of(written: Mapping[str, Any]) -> Any:
    """Return the value; raises ValueError, TypeError, KeyError or OverflowError if the text is not one."""
    kind, text = written["kind"], written["text"]
    if not isinstance(kind, str) or not isinstance(text, str):
        raise TypeError("its kind or its text is no text")
    if kind in _PATHS:
        return _PATHS[kind](text)
    if kind == "timedelta":
        days, seconds, microseconds = map(int, text.split(" "))
        return datetime.timedelta(days, seconds, microseconds)
    value: Any = _CLOCK[kind].fromisoformat(text)
    if "fold" in written:
        value = value.replace(fold=written["fold"])
    if "zone" in written:
        offset = value.utcoffset()
        plain = datetime.timezone(offset)
        named = plain.tzname(None) != written["zone"]
        value = value.replace(tzinfo=datetime.timezone(offset, written["zone"]) if named else plain)
    return value
