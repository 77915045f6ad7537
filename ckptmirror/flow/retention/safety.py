"""Safety: whether a save is provably on every required mirror - by the table, and by asking the mirrors now (I1).

Rules:
* The table alone never suffices for a deletion: every object of the save is asked for, for this deletion.
* What must hold: a whole meta of this very save (or its tombstone) stands there, it names exactly the objects that were
  verified, and each of them shows the generation, size and crc32c of its record.
* What a mirror no longer has is pending again: it will be sent once more.
* Everything unforeseen is a reason, not an error: a reason keeps the save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptmirror.core import names
from ckptmirror.core.codec import meta_or_tombstone_from_bytes
from ckptmirror.core.errors import BrokenTable, CkptMirrorError, ObjectNotFound
from ckptmirror.core.model import Meta, Tombstone
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.retention import MirrorSafety
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.flow.places.match import why_differs
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.mirror_audit import forget_verified
from ckptmirror.local.uploads import UploadRecord, UploadsTable

__all__ = ["is_skipped", "save_safety", "why_not_safe", "why_not_same"]


def save_safety(table: UploadsTable, mirrors: Sequence[Mirror], save_id: str) -> tuple[MirrorSafety, ...]:
    """Say for each mirror, from the table alone, whether a save is verified and committed there."""
    try:
        standing = {there.mirror: there for there in table.standing(save_id)}
    except BrokenTable as error:
        return tuple(MirrorSafety(mirror.url, mirror.required, False, False, str(error)) for mirror in mirrors)
    safeties = []
    for mirror in mirrors:
        there = standing.get(mirror.url)
        if there is None:
            safeties.append(MirrorSafety(mirror.url, mirror.required, False, False, "not queued for upload yet"))
            continue
        verified = there.verified or there.removed
        committed = there.committed or there.removed
        safeties.append(MirrorSafety(mirror.url, mirror.required, verified, committed, there.reason))
    return tuple(safeties)


def is_skipped(table: UploadsTable, mirrors: Sequence[Mirror], save_id: str) -> bool:
    """Whether policy left a save out of every required mirror."""
    required = {mirror.url for mirror in mirrors if mirror.required}
    try:
        standing = [there for there in table.standing(save_id) if there.mirror in required]
    except BrokenTable:
        return False
    return bool(standing) and all(there.skipped for there in standing)


def why_not_same(table: UploadsTable, mirrors: Iterable[Mirror], meta: Meta) -> str | None:
    """Say why the table's records are not of the save that lies on this disk; None if they are."""
    wanted = {artifact.path: (artifact.digest.size_bytes, artifact.digest.crc32c) for artifact in meta.artifacts}
    for mirror in mirrors:
        if not mirror.required:
            continue
        records = table.records(save_id=meta.save_id, mirror=mirror.url)
        if {r.path: (r.size_bytes, r.crc32c) for r in records if r.role == "artifact"} != wanted:
            return f"{mirror.url}: the files that were uploaded are not those here"
    return None


def why_not_safe(table: UploadsTable, mirrors: Iterable[Mirror], save_id: str) -> str | None:
    """Ask every required mirror, now, about every object of a save; None if all of it is there as the table says."""
    required = [mirror for mirror in mirrors if mirror.required]
    if not required:
        return "no required mirror is configured"
    for mirror in required:
        try:
            reason = _why_not_on(table, mirror, save_id)
        except (CkptMirrorError, OSError) as error:
            may_answer_later = " cannot be asked now" if reach_after(error) is not Reach.ANSWERED else ""
            return f"{mirror.url}{may_answer_later}: {error}"
        if reason is not None:
            return f"{mirror.url}: {reason}"
    return None


def _why_not_on(table: UploadsTable, mirror: Mirror, save_id: str) -> str | None:
    there = next((there for there in table.standing(save_id) if there.mirror == mirror.url), None)
    if there is None:
        return "nothing says that it was uploaded there"
    if there.skipped:
        return None
    if not there.removed and not (there.verified and there.committed):
        return there.reason
    records = table.records(save_id=save_id, mirror=mirror.url)
    meta = next((record for record in records if record.role == "meta"), None)
    if meta is None:
        return "nothing says that its meta was uploaded"
    try:
        data, _ = mirror.store.read(meta.object or meta.path, limit_bytes=META_LIMIT_BYTES)
    except ObjectNotFound:
        forget_verified(table, meta, "the mirror's meta is gone")
        return "its meta is gone from the mirror"
    found = meta_or_tombstone_from_bytes(data)
    if found.save_id != save_id:
        return f"{meta.object or meta.path} is another save's meta"
    if isinstance(found, Tombstone):
        return None
    for record in records:
        name = record.object or record.path
        why = why_differs(record, mirror.store.stat(name), store=mirror.store)
        if why is not None:
            forget_verified(table, record, f"{name} {why}")
            return f"{name} {why}"
    return _why_meta_differs(found, records)


def _why_meta_differs(found: Meta, records: Sequence[UploadRecord]) -> str | None:
    """Say why the mirror's meta does not lead to the objects that were verified; None if it does."""
    if not found.is_whole:
        return "only one node's part of it is committed there"
    named = {names.untagged(artifact.path): artifact for artifact in found.artifacts}
    for record in records:
        if record.role != "artifact":
            continue
        artifact = named.get(names.untagged(record.path))
        if artifact is None:
            return f"its meta there does not name {record.path}"
        if (artifact.digest.size_bytes, artifact.digest.crc32c) != (record.size_bytes, record.crc32c):
            return f"its meta there names {record.path} with other contents"
        if artifact.object_name != (record.object or record.path):
            return f"its meta there names {artifact.object_name}, but what was verified is {record.object}"
    return None
