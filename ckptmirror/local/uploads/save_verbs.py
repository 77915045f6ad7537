"""Verbs on whole saves: they enter the table, are released, and leave it.

Rules:
* Records are added before the save's local meta exists and may be claimed only after it does (``release_save``).
* Adding is repeatable: what is there stays as it is, what is missing is added, what contradicts is refused.
* What leaves the table leaves its history.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import apsw

from ckptmirror.core.errors import CheckpointNotFound, IntegrityError
from ckptmirror.core.model import Artifact, Kind
from ckptmirror.local.uploads import reports, rows
from ckptmirror.local.uploads.records import SaveRow, record_to_columns, save_to_columns
from ckptmirror.local.uploads.statements import statement
from ckptmirror.local.uploads.verbs import Verbs

__all__ = ["HISTORY_KEPT", "SaveVerbs"]

HISTORY_KEPT = 200_000
"""How many transitions are kept; older ones are forgotten when a save is added."""


class SaveVerbs(Verbs):
    """add, release, discard, forget."""

    def add_save(
        self,
        save_id: str,
        step: int,
        kinds: Sequence[Kind],
        artifacts: Sequence[Artifact],
        mirrors: Sequence[str],
        *,
        meta_path: str | None = None,
    ) -> int:
        """Add what is missing of a save's records: one per artifact and mirror, and one per mirror for the meta.

        Records of a new save are pending, but not claimable before ``release_save``.

        Args:
            save_id: 32 hex digits.
            step: The save's step.
            kinds: The save's kinds.
            artifacts: What the node's meta will name.
            mirrors: The mirrors' URLs.
            meta_path: The meta's name, ``meta_<step>.json`` if not given.

        Returns:
            How many records were added.

        Raises:
            IntegrityError: The table knows this save with other contents.
        """
        if len({artifact.path for artifact in artifacts}) != len(artifacts):
            raise IntegrityError(f"save {save_id} names a path twice")
        total = sum(artifact.digest.size_bytes for artifact in artifacts)
        meta = meta_path if meta_path is not None else f"meta_{step:06d}.json"
        wanted = SaveRow(0, save_id, step, tuple(kinds), meta, len(artifacts), total, released=False)
        # Tokens start anywhere: a worker of a table that was since rebuilt cannot hold one that is valid here.
        token = secrets.randbits(48)
        with self._database.change("add_save") as connection:
            save = self._same_save(connection, wanted)
            found = rows.iterate_records(connection, "read the records of a save", {"save_id": save_id})
            known = {(record.path, record.mirror): record for record in found}
            fresh = [
                record
                for record in reports.records_of_save(save, artifacts, mirrors, token, self._clock)
                if not reports.is_known(record, known.get((record.path, record.mirror)))
            ]
            before = _count(connection, save_id)
            connection.executemany(statement("add a record"), [record_to_columns(record) for record in fresh])
            added = _count(connection, save_id) - before
            connection.execute(statement("forget the oldest history"), {"keep": HISTORY_KEPT})
        self._tell()
        return added

    def _same_save(self, connection: apsw.Connection, wanted: SaveRow) -> SaveRow:
        known = rows.read_save(connection, wanted.save_id)
        if known is None:
            connection.execute(statement("add a save"), save_to_columns(wanted))
            return replace(wanted, save_order=connection.last_insert_rowid())
        if replace(known, save_order=0, released=False) != wanted:
            raise IntegrityError(f"save {wanted.save_id} is in the table with other contents; a save never changes")
        return known

    def release_save(self, save_id: str) -> None:
        """The save's local meta is on disk: from here its records may be claimed.

        Raises:
            CheckpointNotFound: The save is not in the table.
        """
        with self._database.change("release_save") as connection:
            save = rows.read_save(connection, save_id)
            if save is None:
                raise CheckpointNotFound(f"save {save_id} is not in the table")
            columns = save_to_columns(replace(save, released=True))
            connection.execute(statement("write a changed save"), columns | {"save_order": save.save_order})
        self._tell()

    def discard_unreleased(self, save_ids: Iterable[str]) -> int:
        """Take out saves that a crash left without a meta; released ones stay. Returns how many went."""
        gone = 0
        with self._database.change("discard_unreleased") as connection:
            for save_id in save_ids:
                save = rows.read_save(connection, save_id)
                if save is not None and not save.released:
                    self._take_out(connection, save_id, "discarded: the save was never committed on this disk")
                    gone += 1
        self._tell()
        return gone

    def forget_save(self, save_id: str, reason: str = "the local save was deleted") -> None:
        """Take out a save that rotation deleted from this disk; its history stays."""
        with self._database.change("forget_save") as connection:
            self._take_out(connection, save_id, reason)
        self._tell()

    def _take_out(self, connection: apsw.Connection, save_id: str, reason: str) -> None:
        noted = {"save_id": save_id, "reason": reason, "at_utc": self._clock.utc()}
        connection.execute(statement("note that the records of a save go"), noted)
        connection.execute(statement("delete the records of a save"), {"save_id": save_id})
        connection.execute(statement("delete a save"), {"save_id": save_id})


def _count(connection: apsw.Connection, save_id: str) -> int:
    rows_found = connection.execute(statement("count the records of a save"), {"save_id": save_id}).fetchall()
    return cast(int, rows_found[0][0])
