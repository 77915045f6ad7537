"""Reads the SQL files: each statement has a name in English.

Rules:
* ``-- name: <words>`` starts a statement, which ends at the next such line.
* ``-- columns: <word>`` starts a list of columns; ``{word}`` in a statement of any file is replaced by it.
* Migrations are ``migrations/<4 digits>_<word>.sql``, numbered from 1 without a gap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

__all__ = ["migrations", "statement", "statements"]

_HEADING = re.compile(r"^-- (name|columns): (.+)$", re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)\}")
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


@cache
def statements() -> Mapping[str, str]:
    """Return every named statement, with its columns filled in."""
    found: dict[str, dict[str, str]] = {"name": {}, "columns": {}}
    for entry in sorted(files(__package__).joinpath("sql").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".sql"):
            _, *parts = _HEADING.split(entry.read_text(encoding="utf-8"))
            for what, name, body in zip(parts[0::3], parts[1::3], parts[2::3], strict=True):
                if name in found[what]:
                    raise ValueError(f"{entry.name} names {name!r} a second time")
                found[what][name] = body.strip()
    columns = found["columns"]
    filled = {name: _PLACE.sub(lambda place: columns[place[1]], body) for name, body in found["name"].items()}
    return MappingProxyType(filled)


def statement(name: str) -> str:
    """Return one statement by its name."""
    return statements()[name]


@cache
def migrations() -> tuple[str, ...]:
    """Return the migrations' texts in order; the first leads from version 0 to version 1."""
    folder = files(__package__).joinpath("sql", "migrations")
    numbered = {int(m[1]): e for e in folder.iterdir() if (m := _MIGRATION.fullmatch(e.name))}
    if sorted(numbered) != list(range(1, len(numbered) + 1)):
        raise ValueError(f"migrations are not numbered from 1 without a gap: {sorted(numbered)}")
    return tuple(numbered[number].read_text(encoding="utf-8") for number in sorted(numbered))
