"""Uploads one claimed record of the table and stores its new state.

Rules:
* ``artifact`` and ``meta`` decide what is sent and when it is verified; this file decides the record's next state.
* A part that another node has still to upload is waited for, however long.
* A save that rotation deletes meanwhile is not sent any more, and that is no fault.
* A temporary fault puts the record back with a growing, jittered delay. A permanent fault fails the record and is
  logged as an error. No record is dropped.
"""

from __future__ import annotations

import contextlib
import os

from ckptmirror.core import events
from ckptmirror.core.errors import AttemptFenced, CkptMirrorError, ClaimLost, NodeBehind
from ckptmirror.core.names import ROTATE_LOCK_NAME
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.retry_delay import retry_delay_s
from ckptmirror.flow.upload.artifact import ArtifactUpload
from ckptmirror.flow.upload.meta import MetaUpload
from ckptmirror.flow.upload.sending import UploadContext
from ckptmirror.local.lock import exclusive
from ckptmirror.local.uploads import Claim, UploadRecord

__all__ = ["TRIES_LIMIT", "upload_claimed"]

TRIES_LIMIT = 10_000  # about a week at the longest delay
_FIRST_DELAY_S = 2.0
_NODE_DELAY_S = 0.5  # nodes that save together also end together, or nearly
_LONGEST_DELAY_S = 60.0
_ROTATION_S = 60.0


def upload_claimed(context: UploadContext, claim: Claim) -> None:
    """Upload one claimed record as far as possible now; its new state is durable on return.

    Raises:
        AttemptFenced: A newer attempt has claimed the run; the record is pending again, or another worker has it.
    """
    record = claim.record
    try:
        if record.role == "meta":
            MetaUpload(context, claim).send()
        else:
            ArtifactUpload(context, claim).send()
    except ClaimLost:
        return  # the lease expired and another worker has the record; it finds what we sent
    except NodeBehind as error:  # the mirror answers, and nothing is wrong
        delay_s = retry_delay_s(error, record.attempts_made, first_s=_NODE_DELAY_S, longest_s=_LONGEST_DELAY_S)
        delay_s = error.writes_for_s + min(delay_s, error.writes_for_s) if error.writes_for_s else delay_s
        with contextlib.suppress(ClaimLost):
            context.table.put_back(claim, str(error), not_before_s=delay_s)
        context.under_way.waits(record.mirror, delay_s, error)
    except AttemptFenced as error:
        with contextlib.suppress(ClaimLost):
            context.table.put_back(claim, str(error), not_before_s=_LONGEST_DELAY_S)
        raise
    except CkptMirrorError as error:
        if reach_after(error) is not Reach.ANSWERED:
            _put_back(context, claim, error)
        else:
            _fail(context, claim, str(error))
    except Exception as error:  # noqa: BLE001 - an unexpected error must not end the worker
        _put_back(context, claim, error)
    else:
        context.under_way.answered(record.mirror)
    finally:
        context.under_way.over((record.save_id, record.path), record.mirror)


def _put_back(context: UploadContext, claim: Claim, error: Exception) -> None:
    tries = claim.record.attempts_made
    if tries >= TRIES_LIMIT:
        _fail(context, claim, f"gave up after {tries} tries: {error}")
        return
    delay_s = retry_delay_s(error, tries, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S)
    is_refused = reach_after(error) is Reach.REFUSED
    if is_refused:
        delay_s = max(delay_s, min(2.0 * tries, 5.0))
    reason = f"{type(error).__name__}: {error}"
    try:
        context.table.put_back(claim, reason, not_before_s=delay_s)
    except ClaimLost:
        return
    context.under_way.waits(claim.record.mirror, delay_s, error)
    context.bus.emit(
        events.MirrorUnreachable(
            mirror=context.mirror.url,
            step=claim.record.step,
            path=claim.record.path,
            reason=reason,
            refused=is_refused,
        )
    )


def _fail(context: UploadContext, claim: Claim, reason: str) -> None:
    if _is_gone(context, claim.record):
        # A rotation that is deleting the save, which an optional mirror lacks, takes its records out in a moment.
        with contextlib.suppress(CkptMirrorError), exclusive(context.root / ROTATE_LOCK_NAME, timeout_s=_ROTATION_S):
            pass
    try:
        context.table.fail(claim, reason)
    except ClaimLost:
        return
    context.bus.emit(
        events.RecordFailed(mirror=context.mirror.url, step=claim.record.step, path=claim.record.path, reason=reason)
    )


def _is_gone(context: UploadContext, record: UploadRecord) -> bool:
    """Whether the file, or the meta of its save, is gone. A rotation moves the meta first, and the files later."""
    of_save = context.table.records(save_id=record.save_id, mirror=record.mirror)
    paths = [record.path, *(one.path for one in of_save if one.role == "meta")]
    return not all(os.path.lexists(context.root / path) for path in paths)
