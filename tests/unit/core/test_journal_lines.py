"""Lines of the journal: every event comes back as it was told; what is torn or strange is counted, never believed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ckptmirror.core import events
from ckptmirror.core.journal import MAX_LINE_BYTES, JournalEntry, entries_from_lines, line_of, utc_seconds, utc_text

SAMPLES: dict[str, Any] = {
    "str": 'text with "quotes", ü and \x1b',
    "bool": True,
    "int": 200,
    "int | None": None,
    "float": 0.25,
    "float | None": 2.5,
    "tuple[Kind, ...]": ("dcp", "model"),
}
NAMED = [getattr(events, name) for name in events.__all__]
CLASSES = {one for one in NAMED if isinstance(one, type) and issubclass(one, events.Event)} - {events.Event}


def told(event: events.Event, number: int = 1) -> JournalEntry:
    return JournalEntry(event, 1_790_000_000.125, "a-boot", 12.5, "trainer", "0a1b2c3d", number, 77)


def a_line(number: int = 1) -> bytes:
    return line_of(told(events.HostCopied(step=number, kinds=("dcp",)), number))


@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_every_event_comes_back_as_it_was_told(cls: type[events.Event]) -> None:
    event = cls(**{field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(cls)})
    line = line_of(told(event))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert entries_from_lines([line]) == ([told(event)], 0)


def test_a_long_text_is_cut_and_a_line_has_a_greatest_length() -> None:
    for text in ("x" * 100_000, "\U0001f600" * 100_000):
        line = line_of(told(events.CopyBroken(step=1, save_id=text, place=text, reason=text)))
        assert len(line) <= MAX_LINE_BYTES
        assert entries_from_lines([line])[1] == 0


def test_a_torn_line_is_counted_and_costs_no_other() -> None:
    whole = a_line(2)
    for length in range(1, len(whole) - 2):
        found, broken = entries_from_lines([a_line(1), whole[:length], a_line(3)])
        assert [one.number for one in found] == [1, 3]
        assert broken == 1


def test_a_line_that_is_there_twice_counts_once() -> None:
    found, broken = entries_from_lines([a_line(1), a_line(2), a_line(1), b"", b" "])
    assert [one.number for one in found] == [1, 2]
    assert broken == 0


@pytest.mark.parametrize(
    "change",
    [
        {"event": "NoSuchEvent"},
        {"event": "Event"},
        {"event": 7},
        {"facts": []},
        {"facts": {"step": "200", "kinds": ["dcp"]}},
        {"facts": {"step": True, "kinds": ["dcp"]}},
        {"facts": {"step": 10**30, "kinds": ["dcp"]}},
        {"facts": {"step": 200, "kinds": "dcp"}},
        {"facts": {"step": 200, "kinds": [1]}},
        {"facts": {"kinds": ["dcp"]}},
        {"at_utc": "yesterday"},
        {"at_utc": 5},
        {"boot_ms": "5"},
        {"number": 1.5},
        {"writer": None},
    ],
    ids=str,
)
def test_a_line_with_anything_of_the_wrong_type_is_no_event(change: dict[str, Any]) -> None:
    document = json.loads(a_line()) | change
    assert entries_from_lines([json.dumps(document).encode()]) == ([], 1)


def test_garbage_is_no_event() -> None:
    for line in (b"\x00" * 300, b"[]", b"null", b'{"facts": NaN}', b"[" * 5000, b'"' + b"x" * 100_000, b"\xff\xfe"):
        assert entries_from_lines([line]) == ([], 1)


def test_a_field_of_a_later_version_is_left_out() -> None:
    document = json.loads(a_line())
    document["facts"]["colour"] = "green"
    document["host"] = "a-machine"
    assert entries_from_lines([json.dumps(document).encode()]) == entries_from_lines([a_line()])


def test_times_are_utc_to_the_millisecond() -> None:
    assert utc_text(1_790_000_000.1254) == "2026-09-21T14:13:20.125Z"
    assert utc_seconds("2026-09-21T14:13:20.125Z") == 1_790_000_000.125
    assert utc_seconds("2026-09-21T16:13:20.125+02:00") == 1_790_000_000.125
    assert utc_seconds("2026-09-21T14:13:20.125") == 1_790_000_000.125
    assert utc_seconds("") is None
