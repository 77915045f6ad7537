"""Reads and writes single rows inside a connection that the caller holds.

Rules:
* Every row that is read is checked; broken ones are reported once per process and left out.
* A damaged index can return sound rows that were not asked for, so every row is compared with the query.
* Every write names the state and token that it expects; if they differ, it changes nothing and raises an error.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing

import apsw

from ckptmirror.core.errors import BrokenTable, ClaimLost
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads.records import (
    BrokenRow,
    SaveRow,
    UploadRecord,
    record_from_row,
    record_to_columns,
    save_from_row,
)
from ckptmirror.local.uploads.statements import statement

__all__ = [
    "Parameters",
    "blocked_because",
    "broken_rows",
    "first_record",
    "iterate_records",
    "iterate_saves",
    "read_record",
    "read_save",
    "write_changed",
]

Parameters = Mapping[str, int | str | None]

_log = logging.getLogger(__name__)
_reported: set[BrokenRow] = set()


def _report(broken: BrokenRow) -> None:
    if broken not in _reported:
        _reported.add(broken)
        _log.error("row %d of %s is broken and counts as no record: %s", broken.number, broken.table, broken.why)


def iterate_records(connection: apsw.Connection, name: str, parameters: Parameters) -> Generator[UploadRecord]:
    """Yield the sound records that a statement finds, one by one."""
    with closing(connection.execute(statement(name), dict(parameters))) as cursor:
        for row in cursor:
            record = record_from_row(row)
            if isinstance(record, BrokenRow):
                _report(record)
            else:
                _hold_against(record, parameters)
                yield record


def _hold_against(record: UploadRecord, asked: Parameters) -> None:
    """Raise BrokenTable if the record is not one that was asked for."""
    known = {"save_id": record.save_id, "path": record.path, "mirror": record.mirror, "state": record.state.value}
    for name in known.keys() & asked.keys():
        if known[name] != asked[name]:
            raise BrokenTable(
                f"an index is damaged: asked for {name} {asked[name]}, it gave row {record.id} of {known[name]}"
            )


def iterate_saves(connection: apsw.Connection) -> Iterator[SaveRow]:
    """Yield the sound saves, oldest first."""
    for row in connection.execute(statement("read all saves"), {}):
        save = save_from_row(row)
        if isinstance(save, BrokenRow):
            _report(save)
        else:
            yield save


def first_record(connection: apsw.Connection, name: str, parameters: Parameters) -> UploadRecord | None:
    """Return the first sound record that a statement finds."""
    with closing(iterate_records(connection, name, parameters)) as records:
        return next(records, None)


def broken_rows(connection: apsw.Connection) -> list[BrokenRow]:
    """Read every row and return the broken ones."""
    records = [record_from_row(row) for row in connection.execute(statement("read all records"), {})]
    saves = [save_from_row(row) for row in connection.execute(statement("read all saves"), {})]
    broken = [row for row in (*records, *saves) if isinstance(row, BrokenRow)]
    for row in broken:
        _report(row)
    return broken


def read_record(connection: apsw.Connection, save_id: str, path: str, mirror: str) -> UploadRecord | None:
    """Return one record, None if there is none.

    Raises:
        BrokenTable: Its row is damaged.
    """
    key: Parameters = {"save_id": save_id, "path": path, "mirror": mirror}
    rows = connection.execute(statement("read a record"), dict(key)).fetchall()
    if not rows:
        return None
    record = record_from_row(rows[0])
    if isinstance(record, BrokenRow):
        raise BrokenTable(f"the record of {path} of save {save_id} on {mirror} is broken: {record.why}")
    _hold_against(record, key)
    return record


def read_save(connection: apsw.Connection, save_id: str) -> SaveRow | None:
    """Return one save, None if there is none.

    Raises:
        BrokenTable: Its row is damaged.
    """
    rows = connection.execute(statement("read a save"), {"save_id": save_id}).fetchall()
    if not rows:
        return None
    save = save_from_row(rows[0])
    if isinstance(save, BrokenRow):
        raise BrokenTable(f"the row of save {save_id} is broken: {save.why}")
    if save.save_id != save_id:
        raise BrokenTable(f"an index is damaged: asked for save {save_id}, it gave {save.save_id}")
    return save


def write_changed(connection: apsw.Connection, old: UploadRecord, new: UploadRecord) -> None:
    """Write ``new`` over ``old``, if the row still has the state and token of ``old``.

    Raises:
        ClaimLost: The row has another state or token.
    """
    columns = record_to_columns(new) | {
        "id": old.id,
        "expected_state": old.state.value,
        "expected_token": old.token,
    }
    connection.execute(statement("write a changed record"), columns)
    if connection.changes() != 1:
        raise ClaimLost(f"the record of {old.path} of save {old.save_id} on {old.mirror} has changed since")


def blocked_because(save: SaveRow | None, records: Iterable[UploadRecord]) -> str:
    """Return why the meta of a save may not be written to a mirror yet, "" if it may.

    The records are all sound ones of the save on that mirror. A missing or broken row makes the count too small.
    """
    if save is None:
        return "the save is not in the table"
    done = {RecordState.VERIFIED, RecordState.SKIPPED}
    artifacts = list({record.path: record for record in records if record.role == "artifact"}.values())
    waiting = [record for record in artifacts if record.state not in done]
    if waiting:
        first = waiting[0]
        return (
            f"{len(waiting)} of {save.artifact_count} artifacts are not verified, {first.path} is {first.state.value}"
        )
    if len(artifacts) != save.artifact_count:
        return f"{save.artifact_count - len(artifacts)} of {save.artifact_count} artifacts have no sound record"
    return ""
