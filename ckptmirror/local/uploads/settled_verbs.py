"""Verbs on records that no worker need hold: decisions of policy, reconcile and people.

Rules:
* A worker that holds such a record loses it: its next verb raises ``ClaimLost``.
* Skipping never touches what is verified: that the mirror has it stays true.
"""

from __future__ import annotations

from ckptmirror.core.errors import CheckpointNotFound
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import changes, rows
from ckptmirror.local.uploads.verbs import Verbs

__all__ = ["SettledVerbs"]

_UNSENT = (RecordState.PENDING, RecordState.UPLOADING, RecordState.FAILED)


class SettledVerbs(Verbs):
    """unverify, skip, remove, retry_failed, put_back_all."""

    def unverify(self, save_id: str, path: str, mirror: str, reason: str) -> None:
        """The mirror no longer has what was verified: pending again.

        Raises:
            CheckpointNotFound: There is no such record.
            IllegalTransition: It is not verified.
        """
        with self._database.change("unverify") as connection:
            record = rows.read_record(connection, save_id, path, mirror)
            if record is None:
                raise CheckpointNotFound(f"{path} of save {save_id} has no record on {mirror}")
            rows.write_changed(connection, record, changes.unverified(record, reason, self._clock))
        self._tell()

    def skip(self, save_id: str, reason: str, *, mirror: str | None = None) -> int:
        """Policy leaves this save out: what is not on a mirror yet is not sent. Returns how many records changed."""
        return self._change_all(
            "skip",
            "read the records of a save",
            {"save_id": save_id},
            lambda r: r.state in _UNSENT and mirror in (None, r.mirror),
            lambda r: changes.skipped(r, reason, self._clock),
        )

    def remove(self, save_id: str, mirror: str, reason: str) -> int:
        """A tombstone stands for this save on the mirror. Returns how many records changed."""
        return self._change_all(
            "remove",
            "read the records of a save on a mirror",
            {"save_id": save_id, "mirror": mirror},
            lambda r: r.state is not RecordState.REMOVED,
            lambda r: changes.removed(r, reason, self._clock),
        )

    def retry_failed(self, mirror: str | None = None, step: int | None = None) -> int:
        """Make failed records pending again, of one mirror or step or of all. Returns how many."""
        return self._change_all(
            "retry_failed",
            "read all records in a state",
            {"state": RecordState.FAILED.value},
            lambda r: mirror in (None, r.mirror) and step in (None, r.step),
            lambda r: changes.retried(r, self._clock),
        )

    def put_back_all(self, worker: str, reason: str) -> int:
        """Make the records of a worker that is known to be dead pending at once, leases or not. Returns how many."""
        return self._change_all(
            "put_back_all",
            "read all records in a state",
            {"state": RecordState.UPLOADING.value},
            lambda r: r.claimed_by == worker,
            lambda r: changes.put_back(r, reason, 0, self._clock),
        )
