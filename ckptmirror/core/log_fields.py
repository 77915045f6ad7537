"""The fields of a log record: what a line is about, beside its sentence.

Rules:
* A record about a save, an attempt or a mirror has all of ``FIELDS``; None stands for what it does not concern.
* A field of an event is a field of its record, but for the two names that ``logging`` has taken already (``RENAMED``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from ckptmirror.core import events

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
    """Return the fields, for ``extra=`` of a call that logs.

    Args:
        event: Name of the class of event that the line tells of.
        step: Of the save.
        kinds: Of the save; the field is a text such as ``dcp+model``.
        rank: Which rank it was.
        mirror: URL.
        save_id: 32 hex digits.
    """
    kind = "+".join(kinds) or None
    return dict(zip(FIELDS, (event, step, kind, rank, mirror, save_id or None), strict=True))


def fields_of(event: events.Event) -> dict[str, object]:
    """Return the fields of an event's record: those that every record has, and the event's own."""
    found = about(event=type(event).__name__)
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "kinds":
            value = "+".join(value) or None
        elif field.name == "save_id":
            value = value or None
        found[RENAMED.get(field.name, field.name)] = value
    return found
