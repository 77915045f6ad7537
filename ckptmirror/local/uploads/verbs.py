"""What all verbs of the table share: the database, the clock, and telling listeners of a change.

Rules:
* Listeners are told after the commit and outside the table's lock. Their errors are logged and change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckptmirror.local.uploads import rows
from ckptmirror.local.uploads.database import Database
from ckptmirror.local.uploads.lease_clock import LeaseClock
from ckptmirror.local.uploads.records import UploadRecord

__all__ = ["Verbs"]

_log = logging.getLogger(__name__)


class Verbs:
    """The base of the groups of verbs that make up ``UploadsTable``."""

    def __init__(self, database: Database, clock: LeaseClock) -> None:
        self.path = database.path
        self.on_change: list[Callable[[], None]] = []
        self._database = database
        self._clock = clock

    def _change_all(
        self,
        verb: str,
        name: str,
        parameters: rows.Parameters,
        wanted: Callable[[UploadRecord], bool],
        change: Callable[[UploadRecord], UploadRecord],
    ) -> int:
        """Change every sound record that a statement finds and that is wanted, in one transaction; return how many."""
        with self._database.change(verb) as connection:
            found = [record for record in rows.iterate_records(connection, name, parameters) if wanted(record)]
            for record in found:
                rows.write_changed(connection, record, change(record))
        if found:
            self._tell()
        return len(found)

    def _tell(self) -> None:
        for listener in list(self.on_change):
            try:
                listener()
            except Exception:  # noqa: BLE001  the change is durable: a listener's error must not make it look undone
                _log.exception("a listener of the uploads table failed")
