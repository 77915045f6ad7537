"""Rotate: delete local saves that policy no longer wants and that are provably elsewhere.

The decision is ``core.retention.plan_rotation``; this file gathers its facts, asks the mirrors again, and deletes.

Rules:
* Before each delete every required mirror is asked, for this deletion, about every object of the save: same
  generation, size and crc32c as the record, and a committed meta (or a tombstone) of this save. Anything else is a
  refusal with a reason.
* The meta goes first, then the files are renamed to trash, trash is removed last. A crash in between leaves files that
  the table proves to be verified and without a meta; :func:`finish_interrupted` carries on.
* One rotation at a time per root, held by a lock file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_or_tombstone_from_bytes
from ckptmirror.core.errors import CkptMirrorError, NoTable, NotAuthorised, ObjectNotFound, Temporary
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import AttemptList, Meta, Tombstone
from ckptmirror.core.retention import MirrorSafety, Retention, RotationPlan, SaveStatus, plan_rotation
from ckptmirror.flow.catalog import META_LIMIT_BYTES, local_catalog
from ckptmirror.flow.commit import top_names
from ckptmirror.flow.mirrors import Mirror, MirrorSpec, close_mirrors, open_mirrors
from ckptmirror.flow.status import table_path
from ckptmirror.flow.upload import read_back_crc32c
from ckptmirror.local import files
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.lock import exclusive
from ckptmirror.local.uploads import UploadRecord, UploadsTable

__all__ = ["RotationReport", "finish_interrupted", "gather", "rotate", "rotate_root", "save_safety"]

ROTATE_LOCK_NAME = f"{names.CONTROL_DIR}/rotate.lock"
_LOCK_WAIT_S = 600.0
_log = logging.getLogger("ckptmirror.rotate")


@dataclass(frozen=True)
class RotationReport:
    """What a rotation did.

    Attributes:
        plan: What policy and the table said.
        deleted: Step and save id of each save that was deleted.
        refused: Reason by save id, those that the mirrors themselves gave included.
        steps: The step of every save id named above.
    """

    plan: RotationPlan
    deleted: tuple[tuple[int, str], ...]
    refused: dict[str, str]
    steps: dict[str, int]


def save_safety(table: UploadsTable, mirrors: Sequence[Mirror], save_id: str) -> tuple[MirrorSafety, ...]:
    """Say for each mirror, from the table alone, whether a save is verified and committed there."""
    standing = {there.mirror: there for there in table.standing(save_id)}
    safeties = []
    for mirror in mirrors:
        there = standing.get(mirror.url)
        if there is None:
            safeties.append(MirrorSafety(mirror.url, mirror.required, False, False, "no upload record"))
            continue
        verified = there.verified or there.removed
        committed = there.committed or there.removed
        safeties.append(MirrorSafety(mirror.url, mirror.required, verified, committed, there.reason))
    return tuple(safeties)


def gather(
    root: Path, table: UploadsTable, mirrors: Sequence[Mirror], attempts: AttemptList | None
) -> tuple[list[SaveStatus], dict[str, Meta]]:
    """Collect what the plan needs to know of every whole local save."""
    catalog = local_catalog(root)
    order = catalog.lineage(attempts)
    standing = order.standing_by_save()
    statuses = []
    for meta in catalog.saves.values():
        statuses.append(
            SaveStatus(
                save_id=meta.save_id,
                step=meta.step,
                attempt=meta.attempt.id,
                number=meta.save_number,
                kinds=meta.kinds,
                metrics=dict(meta.metrics),
                standing=standing[meta.save_id],
                safety=save_safety(table, mirrors, meta.save_id),
                skipped=_skipped(table, mirrors, meta.save_id),
            )
        )
    return statuses, dict(catalog.saves)


def _skipped(table: UploadsTable, mirrors: Sequence[Mirror], save_id: str) -> bool:
    required = {mirror.url for mirror in mirrors if mirror.required}
    standing = [there for there in table.standing(save_id) if there.mirror in required]
    return bool(standing) and all(there.skipped for there in standing)


def rotate(
    root: Path,
    table: UploadsTable,
    mirrors: Sequence[Mirror],
    retention: Retention,
    *,
    attempts: AttemptList | None = None,
    bus: events.EventBus | None = None,
    dry_run: bool = False,
) -> RotationReport:
    """Delete what the plan says and the mirrors confirm, now, without waiting for uploads.

    Raises:
        WaitTimeout: Another rotation of this root does not end.
    """
    bus = bus or events.EventBus()
    with exclusive(root / ROTATE_LOCK_NAME, timeout_s=_LOCK_WAIT_S):
        if not dry_run:
            finish_interrupted(root, table, mirrors)
        statuses, metas = gather(root, table, mirrors, attempts)
        plan = plan_rotation(statuses, retention)
        refused = dict(plan.refuse)
        deleted = []
        for save_id in plan.delete if not dry_run else ():
            meta = metas[save_id]
            reason = why_not_safe(table, mirrors, meta.save_id)
            if reason is not None:
                refused[save_id] = reason
                continue
            _delete(root, table, meta)
            deleted.append((meta.step, save_id))
            bus.emit(events.SaveRotated(step=meta.step, save_id=save_id, reason=plan.delete[save_id]))
        if deleted:
            files.empty_trash(root)
        for save_id, reason in refused.items():
            bus.emit(events.RotationRefused(step=metas[save_id].step, save_id=save_id, reason=reason))
        return RotationReport(plan, tuple(deleted), refused, {save_id: meta.step for save_id, meta in metas.items()})


def why_not_safe(table: UploadsTable, mirrors: Iterable[Mirror], save_id: str) -> str | None:
    """Ask every required mirror, now, about every object of a save; None if all is there as the table says (I1)."""
    required = [mirror for mirror in mirrors if mirror.required]
    if not required:
        return "no required mirror is configured"
    for mirror in required:
        try:
            reason = _why_not_on(table, mirror, save_id)
        except (Temporary, NotAuthorised) as error:
            return f"{mirror.url} does not answer: {error}"
        except CkptMirrorError as error:
            return f"{mirror.url}: {error}"
        if reason is not None:
            return f"{mirror.url}: {reason}"
    return None


def _why_not_on(table: UploadsTable, mirror: Mirror, save_id: str) -> str | None:
    there = next((there for there in table.standing(save_id) if there.mirror == mirror.url), None)
    if there is None:
        return "the table has no record of it there"
    if there.skipped:
        return None
    if not there.removed and not (there.verified and there.committed):
        return there.reason
    records = table.records(save_id=save_id, mirror=mirror.url)
    metas = [record for record in records if record.role == "meta"]
    try:
        data, _ = mirror.store.read(metas[0].object or metas[0].path, limit_bytes=META_LIMIT_BYTES)
    except ObjectNotFound:
        _forget_verified(table, metas[0], "the mirror's meta is gone")
        return "its meta is gone from the mirror"
    found = meta_or_tombstone_from_bytes(data)
    if found.save_id != save_id:
        return f"{metas[0].object or metas[0].path} is another save's meta"
    if isinstance(found, Tombstone):
        return None
    for record in records:
        reason = _why_object_differs(mirror, record)
        if reason is not None:
            _forget_verified(table, record, reason)
            return reason
    return None


def _why_object_differs(mirror: Mirror, record: UploadRecord) -> str | None:
    name = record.object or record.path
    info = mirror.store.stat(name)
    if info is None:
        return f"{name} is gone from the mirror"
    if (info.generation, info.size_bytes) != (record.generation, record.size_bytes):
        return f"{name} is not the object that was verified (its generation or size changed)"
    crc32c = info.crc32c if info.crc32c is not None else read_back_crc32c(mirror.store, info)
    if crc32c != record.crc32c:
        return f"{name} has another crc32c than was verified"
    return None


def _forget_verified(table: UploadsTable, record: UploadRecord, reason: str) -> None:
    """What the mirror no longer has is pending again: it will be sent once more."""
    if record.state is RecordState.VERIFIED:
        table.unverify(record.save_id, record.path, record.mirror, reason)


def _delete(root: Path, table: UploadsTable, meta: Meta) -> None:
    """Meta first, durable; then the files; then the record of it."""
    files.move_to_trash(root, root / names.SaveName(meta.step, meta.tag).meta)
    files.fsync_dir(root)
    for name in top_names(meta.artifacts):
        files.move_to_trash(root, root / name)
    files.fsync_dir(root)
    table.forget_save(meta.save_id)


def finish_interrupted(root: Path, table: UploadsTable, mirrors: Sequence[Mirror]) -> list[str]:
    """Carry on deletions that a crash cut short; return the save ids.

    Such a save has no meta on disk any more, every record of it is settled on every required mirror, and the mirrors,
    asked again, confirm it.
    """
    finished = []
    for save in table.saves():
        if not save.released or (root / save.meta_path).exists():
            continue
        if why_not_safe(table, mirrors, save.save_id) is not None:
            continue
        records = [record for record in table.records(save_id=save.save_id) if record.role == "artifact"]
        for name in dict.fromkeys(record.path.partition("/")[0] for record in records):
            if _is_still_ours(root, name, records):
                files.move_to_trash(root, root / name)
        files.fsync_dir(root)
        table.forget_save(save.save_id)
        finished.append(save.save_id)
    files.empty_trash(root)
    return finished


def _is_still_ours(root: Path, name: str, records: Sequence[UploadRecord]) -> bool:
    """Whether everything under ``name`` has the recorded bytes (a file that someone put there meanwhile has not)."""
    mine = [r for r in records if r.role == "artifact" and r.path.partition("/")[0] == name]
    for record in mine:
        try:
            digest = digest_file(root / record.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if (digest.size_bytes, digest.crc32c) != (record.size_bytes, record.crc32c):
            return False
    return True


def rotate_root(
    root: Path, retention: Retention, *, state_dir: Path | None = None, dry_run: bool = False
) -> RotationReport:
    """Rotate a root from outside its trainer, with the mirrors that its table names.

    Raises:
        NoTable: ckptmirror has not saved here.
    """
    path = table_path(root, state_dir)
    if not path.exists():
        raise NoTable(f"{root} has no pending-uploads table, so ckptmirror has not saved there.")
    table = UploadsTable.open(path)
    try:
        mirrors = open_mirrors(MirrorSpec(row.url, row.required) for row in table.mirrors())
        try:
            return rotate(root, table, mirrors, retention, dry_run=dry_run)
        finally:
            close_mirrors(mirrors)
    finally:
        table.close()
