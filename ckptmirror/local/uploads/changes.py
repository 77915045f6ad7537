"""How each verb changes a record: pure functions that check every step against the state graph of ``core.lifecycle``.

Rules:
* Each function takes a record and returns the changed record; nothing is read or written here.
* Leaving ``uploading`` ends the claim: the worker, its lease and the waiting time are cleared.
* A session belongs to one object name and survives ``pending``, so that another process can continue a half-sent file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptmirror.core.errors import IllegalTransition, IntegrityError
from ckptmirror.core.lifecycle import RecordState, check_transition
from ckptmirror.core.model import Artifact
from ckptmirror.core.uncommitted import is_behind_text
from ckptmirror.local.uploads.lease_clock import LeaseClock
from ckptmirror.local.uploads.records import SaveRow, UploadRecord

__all__ = [
    "LONGEST_MS",
    "claimed",
    "duration_ms",
    "failed",
    "new_meta_record",
    "new_record",
    "put_back",
    "removed",
    "renewed",
    "retried",
    "skipped",
    "unverified",
    "verified",
    "with_object",
    "with_session",
    "without_delay",
]

LONGEST_MS = 24 * 60 * 60 * 1000
"""No lease and no waiting time is longer than a day; longer ones are cut."""


def duration_ms(duration_s: float) -> int:
    """Return whole milliseconds, at least 0 and at most ``LONGEST_MS``."""
    return max(0, min(LONGEST_MS, round(duration_s * 1000)))


def _moved(record: UploadRecord, state: RecordState, clock: LeaseClock, reason: str, **changes: Any) -> UploadRecord:
    check_transition(record.state, state)
    free: dict[str, Any] = dict.fromkeys(
        ("claimed_by", "lease_boot", "lease_until_ms", "lease_ms", "not_before_boot", "not_before_ms")
    )
    return replace(record, state=state, reason=reason, changed_at_utc=clock.utc(), **(free | changes))


def new_record(save: SaveRow, artifact: Artifact, mirror: str, token: int, clock: LeaseClock) -> UploadRecord:
    """Return the first state of an artifact's record."""
    return replace(
        new_meta_record(save, mirror, token, clock),
        path=artifact.path,
        object=artifact.object_name,
        role="artifact",
        kinds=artifact.kinds,
        rank=artifact.rank,
        size_bytes=artifact.digest.size_bytes,
        crc32c=artifact.digest.crc32c,
    )


def new_meta_record(save: SaveRow, mirror: str, token: int, clock: LeaseClock) -> UploadRecord:
    """Return the first state of the record of a save's meta, whose digest is not known before it is written."""
    return UploadRecord(
        id=0,
        save_order=save.save_order,
        save_id=save.save_id,
        step=save.step,
        path=save.meta_path,
        mirror=mirror,
        role="meta",
        kinds=save.kinds,
        rank=None,
        size_bytes=None,
        crc32c=None,
        state=RecordState.PENDING,
        object=save.meta_path,
        generation=None,
        session=None,
        attempts_made=0,
        token=token,
        claimed_by=None,
        lease_boot=None,
        lease_until_ms=None,
        lease_ms=None,
        not_before_boot=None,
        not_before_ms=None,
        reason="added with its save",
        changed_at_utc=clock.utc(),
        released=save.released,
    )


def claimed(record: UploadRecord, worker: str, lease_ms: int, clock: LeaseClock) -> UploadRecord:
    """From pending to uploading, under the next token."""
    return renewed(
        _moved(
            record,
            RecordState.UPLOADING,
            clock,
            f"claimed by {worker}",
            claimed_by=worker,
            token=record.token + 1,
            attempts_made=record.attempts_made + 1,
        ),
        lease_ms,
        clock,
    )


def renewed(record: UploadRecord, lease_ms: int, clock: LeaseClock) -> UploadRecord:
    """Renew the lease, counted from now."""
    until_ms = clock.now_ms() + lease_ms
    return replace(record, lease_boot=clock.boot_id, lease_until_ms=until_ms, lease_ms=lease_ms)


def with_session(record: UploadRecord, session: str | None) -> UploadRecord:
    """Set the session of the half-sent object."""
    return replace(record, session=session)


def with_object(record: UploadRecord, object_name: str) -> UploadRecord:
    """Set another object name, and drop the session of the old one."""
    return replace(record, object=object_name, session=record.session if object_name == record.object else None)


def verified(
    record: UploadRecord, *, object_name: str, generation: int, size_bytes: int, crc32c: int, clock: LeaseClock
) -> UploadRecord:
    """From uploading to verified, if the mirror's answer matches the saved file.

    Raises:
        IntegrityError: It does not match.
    """
    if record.role == "artifact" and (size_bytes, crc32c) != (record.size_bytes, record.crc32c):
        raise IntegrityError(
            f"{record.path} on {record.mirror} has {size_bytes} bytes with crc32c {crc32c:#010x}, "
            f"saved were {record.size_bytes} bytes with crc32c {record.crc32c or 0:#010x}"
        )
    return _moved(
        record,
        RecordState.VERIFIED,
        clock,
        "the mirror answered with the same size and crc32c",
        object=object_name,
        generation=generation,
        size_bytes=size_bytes,
        crc32c=crc32c,
        session=None,
    )


def put_back(record: UploadRecord, reason: str, wait_ms: int, clock: LeaseClock) -> UploadRecord:
    """From uploading to pending; no worker claims it before ``wait_ms`` have passed."""
    wait: dict[str, Any] = {}
    if wait_ms > 0:
        wait = {"not_before_boot": clock.boot_id, "not_before_ms": clock.now_ms() + wait_ms}
    return _moved(record, RecordState.PENDING, clock, reason, **wait)


def without_delay(record: UploadRecord) -> UploadRecord:
    """Still pending, and free to be claimed; what waits for another node waits as if it had asked once."""
    tries = min(1, record.attempts_made) if is_behind_text(record.last_error) else record.attempts_made
    return replace(record, not_before_boot=None, not_before_ms=None, attempts_made=tries)


def failed(record: UploadRecord, reason: str, clock: LeaseClock) -> UploadRecord:
    """From uploading to failed: it is not tried again until ``retry``."""
    return _moved(record, RecordState.FAILED, clock, reason, session=None)


def retried(record: UploadRecord, clock: LeaseClock) -> UploadRecord:
    """From failed to pending."""
    return _moved(record, RecordState.PENDING, clock, f"retry asked for after: {record.reason}"[:1000])


def unverified(record: UploadRecord, reason: str, clock: LeaseClock) -> UploadRecord:
    """From verified to pending: the object is gone, or differs from what was verified."""
    if record.state is not RecordState.VERIFIED:
        raise IllegalTransition(f"An upload record that is {record.state.value} was not verified.")
    changes: dict[str, Any] = {"generation": None, "session": None}
    if record.role == "meta":
        changes |= {"size_bytes": None, "crc32c": None}
    return _moved(record, RecordState.PENDING, clock, reason, **changes)


def skipped(record: UploadRecord, reason: str, clock: LeaseClock) -> UploadRecord:
    """From any state of a file that is not on the mirror to skipped."""
    return _moved(record, RecordState.SKIPPED, clock, reason, session=None)


def taken_back(record: UploadRecord, clock: LeaseClock) -> UploadRecord:
    """From skipped to pending."""
    return _moved(record, RecordState.PENDING, clock, f"taken back after: {record.reason}"[:1000])


def removed(record: UploadRecord, reason: str, clock: LeaseClock) -> UploadRecord:
    """From any state to removed."""
    return _moved(record, RecordState.REMOVED, clock, reason, session=None)
