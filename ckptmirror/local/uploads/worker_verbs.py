"""A worker's verbs: it claims a record, holds it, and settles it.

Rules:
* Each verb reads the row anew, inside the transaction, and goes on only if the state is ``uploading`` under the claim's
  own token: a worker that was overtaken gets ``ClaimLost`` and has changed nothing.
* A lease that ran out is ended when somebody asks for work, in the same transaction as the claim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

import apsw

from ckptmirror.core.errors import ClaimLost
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import changes, reports, rows
from ckptmirror.local.uploads.records import Claim, UploadRecord
from ckptmirror.local.uploads.verbs import Verbs

__all__ = ["WorkerVerbs"]


class WorkerVerbs(Verbs):
    """claim, renew, set_session, set_object, verify, put_back, fail."""

    def claim(self, worker: str, mirror: str, *, lease_s: float, exclude: Collection[str] = ()) -> Claim | None:
        """Take the oldest record of a mirror that may be sent, or None.

        Oldest save first, artifacts before the meta. A record whose lease ran out counts as pending again.

        Args:
            worker: Names the worker, for people and for ``put_back_all``.
            mirror: The mirror's URL.
            lease_s: How long the record is held unless the lease is renewed, at most a day.
            exclude: Ids of saves to pass over.
        """
        if not self._anything(mirror, exclude):
            return None  # without a write transaction: idle workers ask often
        with self._database.change("claim") as connection:
            for late in list(
                rows.iterate_records(connection, "find the records whose lease ran out", self._now(mirror))
            ):
                back = changes.put_back(late, f"{late.claimed_by} did not finish it in time", 0, self._clock)
                rows.write_changed(connection, late, back)
            record = self._next(connection, mirror, exclude)
            taken = None
            if record is not None:
                taken = changes.claimed(record, worker, changes.duration_ms(lease_s), self._clock)
                rows.write_changed(connection, record, taken)
        self._tell()
        return None if taken is None else Claim(taken, taken.token)

    def _now(self, mirror: str) -> dict[str, int | str | None]:
        return {"mirror": mirror, "boot": self._clock.boot_id, "now_ms": self._clock.now_ms()}

    def _to_send(self, mirror: str, exclude: Collection[str]) -> dict[str, int | str | None]:
        return self._now(mirror) | {"longest_wait_ms": changes.LONGEST_MS, "excluded": json.dumps(sorted(exclude))}

    def _anything(self, mirror: str, exclude: Collection[str]) -> bool:
        with self._database.reading() as connection:
            ended = rows.first_record(connection, "find the records whose lease ran out", self._now(mirror))
            return ended is not None or self._next(connection, mirror, exclude) is not None

    def _next(self, connection: apsw.Connection, mirror: str, exclude: Collection[str]) -> UploadRecord | None:
        to_send = self._to_send(mirror, exclude)
        for record in rows.iterate_records(connection, "find the records that may be sent, oldest first", to_send):
            if record.state is RecordState.PENDING and reports.may_be_sent(connection, record):
                return record
        return None

    def _worker_change(self, verb: str, claim: Claim, change: Callable[[UploadRecord], UploadRecord]) -> UploadRecord:
        held = claim.record
        with self._database.change(verb) as connection:
            record = rows.read_record(connection, held.save_id, held.path, held.mirror)
            if record is None or record.state is not RecordState.UPLOADING or record.token != claim.token:
                now = "gone" if record is None else f"{record.state.value}, token {record.token}"
                raise ClaimLost(
                    f"{held.path} of save {held.save_id} on {held.mirror} is {now}; yours was {claim.token}"
                )
            new = change(record)
            rows.write_changed(connection, record, new)
        self._tell()
        return new

    def renew(self, claim: Claim, lease_s: float) -> Claim:
        """Hold the record for ``lease_s`` from now. Raises ClaimLost, as all of a worker's verbs do."""
        lease_ms = changes.duration_ms(lease_s)
        return Claim(
            self._worker_change("renew", claim, lambda r: changes.renewed(r, lease_ms, self._clock)), claim.token
        )

    def set_session(self, claim: Claim, session: str | None) -> Claim:
        """Store the resumable session, so that any process can continue the upload."""
        record = self._worker_change("set_session", claim, lambda r: changes.with_session(r, session))
        return Claim(record, claim.token)

    def set_object(self, claim: Claim, object_name: str) -> Claim:
        """Choose another name on the mirror, where another save's object is in the way."""
        return Claim(
            self._worker_change("set_object", claim, lambda r: changes.with_object(r, object_name)), claim.token
        )

    def verify(self, claim: Claim, *, object_name: str, generation: int, size_bytes: int, crc32c: int) -> UploadRecord:
        """The mirror was asked and answered this.

        Raises:
            ClaimLost: Another worker holds the record.
            IntegrityError: The answer is not what was saved; nothing changed.
        """

        def change(record: UploadRecord) -> UploadRecord:
            return changes.verified(
                record,
                object_name=object_name,
                generation=generation,
                size_bytes=size_bytes,
                crc32c=crc32c,
                clock=self._clock,
            )

        return self._worker_change("verify", claim, change)

    def put_back(self, claim: Claim, reason: str, *, not_before_s: float = 0.0) -> UploadRecord:
        """A temporary fault: pending again, not claimed for ``not_before_s`` from now (at most a day)."""
        wait_ms = changes.duration_ms(not_before_s)
        return self._worker_change("put_back", claim, lambda r: changes.put_back(r, reason, wait_ms, self._clock))

    def fail(self, claim: Claim, reason: str) -> UploadRecord:
        """A permanent fault: nobody tries again before ``retry_failed``."""
        return self._worker_change("fail", claim, lambda r: changes.failed(r, reason, self._clock))
