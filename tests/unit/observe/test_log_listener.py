"""Log lines: a sentence for people, and the same as fields; the table of the docs is what is logged."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmirror.core import events
from ckptmirror.core.log_fields import FIELDS, RENAMED, about
from ckptmirror.local.save_logger import save_logger
from ckptmirror.observe.log import LINES, LogListener

HOME = Path(__file__).resolve().parents[3]
PACKAGE = HOME / "ckptmirror"
EVENTS = sorted(
    {
        found
        for found in map(vars(events).__getitem__, events.__all__)
        if isinstance(found, type) and issubclass(found, events.Event) and found is not events.Event
    },
    key=lambda cls: cls.__name__,
)
URL, SAVE_ID = "gs://bucket/run-17", "1f0c9a2e" + "0" * 24
VALUES: dict[str, Any] = {
    "int": 200,
    "int | None": 200,
    "float": 1.5,
    "float | None": 1.5,
    "bool": True,
    "tuple[Kind, ...]": ("dcp", "model"),
}


def some(cls: type[events.Event]) -> events.Event:
    """An event with a value in every field."""
    texts = {"mirror": URL, "save_id": SAVE_ID}
    return cls(
        **{
            f.name: VALUES[str(f.type)] if f.type != "str" else texts.get(f.name, f.name)
            for f in dataclasses.fields(cls)
        }
    )


def logged(event: events.Event, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="ckptmirror.events"):
        LogListener()(event)
    (record,) = caplog.records
    return record


def table() -> dict[str, Sequence[str]]:
    """The rows of the page: level and fields of each event."""
    text = (HOME / "docs" / "guide" / "logs.md").read_text().partition("## Events")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .* \| (.*) \|$", text, re.MULTILINE)
    return {name: (level, *re.findall(r"`(\w+)`", cells)) for name, level, cells in rows}


def test_every_event_has_a_line_and_a_row() -> None:
    assert set(LINES) == set(EVENTS)
    assert sorted(table()) == [cls.__name__ for cls in EVENTS]


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_a_record_has_the_level_and_the_fields_of_the_page(
    cls: type[events.Event], caplog: pytest.LogCaptureFixture
) -> None:
    record = logged(some(cls), caplog)
    level, *fields = table()[cls.__name__]
    assert record.levelname == level
    own = [RENAMED.get(field.name, field.name) for field in dataclasses.fields(cls)]
    assert fields == own
    assert record.event == cls.__name__  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        value = getattr(record, RENAMED.get(field.name, field.name))
        assert value == ("dcp+model" if field.name == "kinds" else getattr(some(cls), field.name))
    assert all(getattr(record, name) is None for name in set(FIELDS) - {"event", *own})
    assert "%" not in record.getMessage()
    assert "\n" not in record.getMessage()


def test_an_event_with_nothing_but_what_it_must_have_is_a_sentence_too(caplog: pytest.LogCaptureFixture) -> None:
    for cls in EVENTS:
        needed = [f for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        event = cls(**{f.name: getattr(some(cls), f.name) for f in needed})
        assert logged(event, caplog).getMessage()


def test_the_same_complaint_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    listener = LogListener(clock=lambda: now[0])
    for _ in range(13):
        listener(events.MirrorUnreachable(mirror=URL, reason=f"no answer at {now[0]}"))
        now[0] += 10
    assert len(caplog.records) == 3


def test_a_line_about_a_save_that_is_no_event_has_the_same_fields(caplog: pytest.LogCaptureFixture) -> None:
    save = SimpleNamespace(step=200, kinds=("dcp",), save_id=SAVE_ID)
    save_logger(logging.getLogger("ckptmirror.commit"), save, mirror=URL).warning("step %d is slow", 200)
    (record,) = caplog.records
    assert record.getMessage() == "step 200 is slow"
    assert {name: getattr(record, name) for name in FIELDS} == about(
        step=200, kinds=("dcp",), save_id=SAVE_ID, mirror=URL
    )


def plain_calls(path: Path) -> list[str]:
    """The sentences that a file logs without fields, at INFO and above."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("info", "warning", "error", "exception")
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("_log", "log")
            and isinstance(node.args[0], ast.Constant)
        ):
            arguments = " ".join(ast.unparse(argument) for argument in node.args[1:])
            found.append(f"{node.args[0].value} <- {arguments}")
    return found


def test_every_sentence_about_a_step_or_a_mirror_carries_fields() -> None:
    for path in [*(PACKAGE / "flow").rglob("*.py"), PACKAGE / "manager.py"]:
        for said in plain_calls(path):
            assert not re.search(r"\bstep %d|\bsave of\b|mirror\.url|\burl\b|\.save_id", said), f"{path.name}: {said}"


def test_the_library_configures_no_logging() -> None:
    """Only the command line does, which owns its process."""
    for path in PACKAGE.rglob("*.py"):
        if "cli" not in path.parts and "testing" not in path.parts:
            text = path.read_text()
            assert not re.search(r"basicConfig|addHandler|\.setLevel\(|getLogger\(\)|dictConfig|disable\(", text), path


def test_a_program_that_imports_all_of_it_finds_logging_as_it_was() -> None:
    code = (
        "import logging, pkgutil, importlib, ckptmirror\n"
        "for m in pkgutil.walk_packages(ckptmirror.__path__, 'ckptmirror.'):\n"
        "    if m.name.split('.')[1] not in ('__main__', 'cli', 'formats', 'integrations', 'ranks', 'testing'):\n"
        "        importlib.import_module(m.name)\n"
        "assert logging.root.handlers == [] and logging.root.level == logging.WARNING\n"
        "ours = [l for n, l in logging.root.manager.loggerDict.items() if n.startswith('ckptmirror')]\n"
        "assert ours\n"
        "assert all(not getattr(l, 'handlers', []) and getattr(l, 'level', 0) == 0 for l in ours)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
