"""The structured fields of a log record, beside its sentence.

Rules:
* A record about a save, an attempt or a mirror has all of ``FIELDS``; a field that does not apply is None.
* An event's fields become fields of its record, except for two names that ``logging`` already uses (``RENAMED``). Text
  becomes one printable line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from ckptmirror.core import events
from ckptmirror.core.printable import printable_line

__all__ = ["FIELDS", "RENAMED", "about", "fields_of"]

FIELDS = ("event", "step", "kind", "rank", "mirror", "save_id")
RENAMED: Mapping[str, str] = {"name": "object", "kinds": "kind"}


def about(
    *,
    event: str | None = None,
    step: int | None = None,
    kinds: Sequence[str] = (),
    rank: int | None = None,
    mirror: str | None = None,
    save_id: str | None = None,
) -> dict[str, object]:
    """Return the fields to pass as ``extra=`` of a logging call.

    Args:
        event: Class name of the event that the line reports.
        step: The save's step.
        kinds: The save's kinds; the field is a text such as ``dcp+model``.
        rank: The rank concerned.
        mirror: The mirror's URL.
        save_id: 32 hex digits.
    """
    kind = "+".join(kinds) or None
    return dict(zip(FIELDS, (event, step, kind, rank, mirror, save_id or None), strict=True))


def fields_of(event: events.Event) -> dict[str, object]:
    """Return the fields of an event's log record: those that every record has, and the event's own."""
    found = about(event=type(event).__name__)
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "kinds":
            value = "+".join(value) or None
        elif field.name == "save_id":
            value = value or None
        if isinstance(value, str):
            value = printable_line(value)
        found[RENAMED.get(field.name, field.name)] = value
    return found
