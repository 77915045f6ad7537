"""The order of write, fsync and rename, judged from a trace: what a power loss leaves is what was promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.durability import not_durable
from tests.crash.trace import Call


def test_order_of_write_fsync_rename(traced: tuple[list[Call], list[Path]]) -> None:
    found, places = traced
    assert not_durable(found, places) == []


def is_fsync(call: Call) -> bool:
    return call.name in ("fsync", "fdatasync")


def of_file(call: Call) -> bool:
    return is_fsync(call) and call.paths[0].endswith(".tmp") and "uploads.db" not in call.paths[0]


def of_file_in_root(call: Call) -> bool:
    return of_file(call) and "/root/" in call.paths[0]


def of_file_on_mirror(call: Call) -> bool:
    return of_file(call) and "/mirror/" in call.paths[0]


def of_root(call: Call) -> bool:
    return is_fsync(call) and call.paths[0].endswith("/root")


def of_mirror(call: Call) -> bool:
    return is_fsync(call) and call.paths[0].endswith("/mirror")


def of_dcp_directory(call: Call) -> bool:
    return is_fsync(call) and Path(call.paths[0]).name.startswith("dcp_")


def of_tables_log(call: Call) -> bool:
    return is_fsync(call) and call.paths[0].endswith("uploads.db-wal")


@pytest.mark.parametrize(
    "dropped", [of_file_in_root, of_file_on_mirror, of_root, of_mirror, of_dcp_directory, of_tables_log]
)
def test_a_missing_fsync_is_noticed(dropped: Callable[[Call], bool], traced: tuple[list[Call], list[Path]]) -> None:
    found, places = traced
    assert not_durable([call for call in found if not dropped(call)], places)
