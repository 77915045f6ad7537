"""Queries that read more than one row, and the decisions that are based on them.

Rules:
* A deletion or a commit is based only on rows that are read and checked one by one: ``standing`` and ``may_be_sent``.
* ``counts`` and ``history`` are for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import apsw

from ckptmirror.core.errors import BrokenTable
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import rows
from ckptmirror.local.uploads.records import (
    MirrorStanding,
    SaveRow,
    StateCount,
    Transition,
    UploadRecord,
    text_of,
    transition_from_row,
)
from ckptmirror.local.uploads.statements import statement

__all__ = ["counts", "history", "may_be_sent", "records", "standing"]


def may_be_sent(connection: apsw.Connection, record: UploadRecord) -> bool:
    """Whether a worker may get this record: its save is released, and for a meta, its artifacts are done."""
    try:
        save = rows.read_save(connection, record.save_id)
    except BrokenTable:
        return False
    if save is None or not save.released:
        return False
    if record.role == "artifact":
        return True
    key = {"save_id": record.save_id, "mirror": record.mirror}
    return not rows.blocked_because(
        save, rows.iterate_records(connection, "read the records of a save on a mirror", key)
    )


def records(
    connection: apsw.Connection, save_id: str | None, mirror: str | None, state: RecordState | None
) -> list[UploadRecord]:
    """Return the sound records that match."""
    name, parameters = "read all records", dict[str, int | str | None]()
    if save_id is not None:
        name, parameters = "read the records of a save", {"save_id": save_id}
    elif mirror is not None and state is not None:
        name, parameters = "read the records of a mirror in a state", {"mirror": mirror, "state": state.value}
    return [
        record
        for record in rows.iterate_records(connection, name, parameters)
        if mirror in (None, record.mirror) and state in (None, record.state)
    ]


def standing(connection: apsw.Connection, save_id: str, configured: Sequence[str]) -> tuple[MirrorStanding, ...]:
    """Return, for each mirror, what is durably known about a save."""
    save = rows.read_save(connection, save_id)
    found = list(rows.iterate_records(connection, "read the records of a save", {"save_id": save_id}))
    mirrors = dict.fromkeys([*configured, *(record.mirror for record in found)])
    return tuple(_standing_on(mirror, save, [r for r in found if r.mirror == mirror]) for mirror in mirrors)


def _standing_on(mirror: str, save: SaveRow | None, found: Sequence[UploadRecord]) -> MirrorStanding:
    meta = next((record for record in found if record.role == "meta"), None)
    meta_state = None if meta is None else meta.state
    verified = {r.path for r in found if r.role == "artifact" and r.state is RecordState.VERIFIED}
    complete = save is not None and len(verified) == save.artifact_count
    committed = meta_state is RecordState.VERIFIED
    if complete and committed:
        reason = ""
    elif not complete:
        reason = rows.blocked_because(save, found) or "some of its artifacts were skipped"
    else:
        reason = (
            "the table does not say that its meta was uploaded"
            if meta is None
            else f"its meta is {meta.state.value}: {meta.reason}"
        )
    return MirrorStanding(
        mirror=mirror,
        verified=complete,
        committed=committed,
        skipped=meta_state is RecordState.SKIPPED,
        removed=meta_state is RecordState.REMOVED,
        reason=reason,
    )


def history(connection: apsw.Connection, save_id: str | None) -> list[Transition]:
    """Return the transitions, oldest first."""
    if save_id is None:
        found = connection.execute(statement("read the whole history"), {})
    else:
        found = connection.execute(statement("read the history of a save"), {"save_id": save_id})
    return [transition_from_row(row) for row in found]


def counts(connection: apsw.Connection) -> tuple[StateCount, ...]:
    """Count records and bytes by the index."""
    known = {state.value: state for state in RecordState}
    found = connection.execute(statement("count records and bytes by mirror and state"), {})
    return tuple(
        StateCount(text_of(mirror), known[text_of(state)], cast(int, count), int(cast(float, size)))
        for mirror, state, count, size in found
        if text_of(state) in known
    )
