"""The reference page of the server says what the server says of itself."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from ckptmirror.testing.fault import OPERATIONS, Fault
from ckptmirror.testing.gcs.access import NEEDED, ROLES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "gcs-server.md"


def _section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]


def _rows(title):
    rows = [line for line in _section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_it_has_every_option_of_the_command_line():
    command = [sys.executable, "-m", "ckptmirror.testing.gcs", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listed = {option for row in _rows("Options") for option in re.findall(r"--[a-z0-9-]+", row[0])}
    assert listed == set(re.findall(r"^  (--[a-z0-9-]+)", shown, re.MULTILINE))


def test_it_has_every_operation_with_its_permission():
    rows = _rows("Operations")
    assert [row[0].strip("`") for row in rows] == list(OPERATIONS)
    said = {row[0].strip("`"): re.match(r"`(storage\.[a-zA-Z.]+)`", row[2]) for row in rows}
    for operation, permission in said.items():
        other = "storage.objects.create" if operation == "object.compose" else NEEDED.get(operation)
        assert (permission[1] if permission else None) == other, operation


def test_it_has_every_role_and_every_field_of_a_fault():
    assert set(re.findall(r"roles/storage\.\w+", _section("Operations"))) == set(ROLES)
    listed = {name for row in _rows("Fields of a fault") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == {field.name for field in dataclasses.fields(Fault)}
