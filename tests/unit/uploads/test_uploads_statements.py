"""The SQL files: every statement is used, parses, and the frequent ones are answered from an index."""

from __future__ import annotations

import re
from pathlib import Path

import apsw
import pytest

import ckptmirror.local.uploads
from ckptmirror.core.lifecycle import state_diagram
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.local.uploads.statements import migrations, statements

SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ckptmirror.local.uploads.__path__
    for path in Path(folder).glob("*.py")
)


def connect(table: UploadsTable) -> apsw.Connection:
    return apsw.Connection(str(table.path))


@pytest.mark.parametrize("name", statements())
def test_every_statement_is_used(name: str) -> None:
    assert f'"{name}"' in SOURCES


def test_every_statement_that_is_asked_for_exists() -> None:
    asked = re.findall(r'statement\(\s*"([^"]+)"', SOURCES)
    assert asked
    assert set(asked) <= set(statements())


@pytest.mark.parametrize("name", statements())
def test_every_statement_parses(table: UploadsTable, name: str) -> None:
    sql = statements()[name]
    assert "{" not in sql
    connection = connect(table)
    names = set(re.findall(r":(\w+)", sql))
    connection.execute("EXPLAIN " + sql, dict.fromkeys(names, 0)).fetchall()
    connection.close()


def test_migrations_are_numbered_and_lead_to_the_version_in_the_file(table: UploadsTable) -> None:
    connection = connect(table)
    assert connection.pragma("user_version") == len(migrations())
    connection.close()


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("find the records that may be sent, oldest first", "records_to_send"),
        ("find the records whose lease ran out", "records_to_send"),
        ("read a record", "sqlite_autoindex_records_1"),
        ("read the records of a save", "records_of_a_save"),
        ("read the records of a save on a mirror", "records_of_a_save"),
        ("read the records of a mirror in a state", "records_to_send"),
        ("count the records of a save", "records_of_a_save"),
        ("count records and bytes by mirror and state", "COVERING INDEX records_counted"),
        ("read a save", "sqlite_autoindex_saves_1"),
        ("read the history of a save", "transitions_of_a_save"),
        ("write a changed record", "INTEGER PRIMARY KEY"),
        ("forget the oldest history", "INTEGER PRIMARY KEY"),
    ],
)
def test_frequent_statements_are_answered_from_an_index(table: UploadsTable, name: str, index: str) -> None:
    sql = statements()[name]
    connection = connect(table)
    names = set(re.findall(r":(\w+)", sql))
    plan = [str(row[3]) for row in connection.execute("EXPLAIN QUERY PLAN " + sql, dict.fromkeys(names, 0))]
    connection.close()
    assert any(index in step for step in plan), plan
    allowed = ("SCAN json_each", "SCAN records USING COVERING INDEX")
    assert not [step for step in plan if step.startswith("SCAN") and not step.startswith(allowed)], plan


@pytest.mark.parametrize(
    "name", ["find the records that may be sent, oldest first", "find the records whose lease ran out"]
)
def test_the_next_record_is_found_without_sorting(table: UploadsTable, name: str) -> None:
    sql = statements()[name]
    connection = connect(table)
    names = set(re.findall(r":(\w+)", sql))
    plan = [str(row[3]) for row in connection.execute("EXPLAIN QUERY PLAN " + sql, dict.fromkeys(names, 0))]
    connection.close()
    assert not [step for step in plan if "TEMP B-TREE FOR ORDER" in step], plan


def test_the_design_page_shows_the_states_and_names_every_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "design" / "uploads-table.md").read_text(encoding="utf-8")
    assert state_diagram() in page
    for name in re.findall(r"CREATE TABLE (\w+)", "\n".join(migrations())):
        assert f"| `{name}` |" in page
