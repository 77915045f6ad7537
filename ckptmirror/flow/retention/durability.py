"""Durability: answers "is everything safe?" for rotation, status, close and drain.

The table says whether a save is *settled* on a mirror or *open* there. Before a deletion the mirrors are asked too.

Rules:
* A save is settled if every artifact is verified and the meta is committed, if a tombstone replaced it, or if policy
  left it out. A save without a record is open, and so is one whose record is broken.
* The answer is about the whole saves of this disk and every released save of the table. Counting pending rows would not
  do: a lost row is not pending. ``upload.workers.still_moving`` counts them, for waiting.
* An emergency snapshot is never uploaded. A save that rotation deleted was settled if its last records say so.
* A save that is on a mirror but not on this disk cannot be sent to another mirror. So it is not open on a mirror that
  was added later.
* While a mirror has not confirmed that it still has what was verified there, the answer is no. The list of such mirrors
  is read first, because an audit makes missing objects pending before it takes the mirror off that list.
* The table alone never allows a deletion (I1). Each required mirror is asked, for this deletion, for a whole meta of
  this save or its tombstone, and for every object of its records, which must be the one that was verified. An object
  that a mirror no longer has is pending again.
* A save that was left off a mirror, because another node's part cannot come there now, goes only while that mirror has
  this node's part: with it, the other node completes the save there if it comes back.
* When a mirror is asked, anything unexpected is a reason to keep the save, not an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptmirror.core import names
from ckptmirror.core.codec import meta_or_tombstone_from_bytes
from ckptmirror.core.errors import BrokenTable, CkptMirrorError, ObjectNotFound
from ckptmirror.core.lifecycle import SETTLED, WAITING, RecordState
from ckptmirror.core.model import Meta, Tombstone
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.retention import MirrorSafety
from ckptmirror.core.uncommitted import LEFT_OFF_TEXT, is_behind_text, is_held_back_text, is_left_off_text
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, counting_rows
from ckptmirror.flow.places.object_match import is_of_save, why_differs
from ckptmirror.flow.retention.mirror_audit import forget_verified
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.local.uploads import MirrorStanding, UploadRecord, UploadsTable

__all__ = [
    "Durability",
    "OpenSave",
    "count_lacking",
    "durability",
    "is_skipped",
    "only_waiting",
    "open_saves",
    "save_safety",
    "waiting_for_nodes",
    "why_not_safe",
    "why_not_same",
]

_READ_AGAIN_BYTES = 1 << 20  # a meta up to this size is read again before each deletion


@dataclass(frozen=True)
class OpenSave:
    """A save that is not settled on one mirror.

    Attributes:
        files: How many of its files are known to wait; at least 1.
        reason: What is missing, in words, for people.
    """

    save_id: str
    mirror: str
    files: int
    reason: str


@dataclass(frozen=True)
class Durability:
    """Whether everything is safe, at one moment.

    Attributes:
        open: Saves that are not settled.
        unasked: Mirrors that have not confirmed yet that they still have what was verified there, with the reason.
    """

    open: tuple[OpenSave, ...] = ()
    unasked: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_safe(self) -> bool:
        """Whether nothing is open and every mirror confirmed what it has."""
        return not (self.open or self.unasked)

    @property
    def files(self) -> int:
        """How many files are not settled; a file counts once for each mirror."""
        return sum(save.files for save in self.open)


def durability(
    table: UploadsTable, metas: Iterable[Meta], mirrors: Collection[str], unasked: Mapping[str, str] | None = None
) -> Durability:
    """Return whether everything is safe on these mirrors.

    Args:
        metas: The whole saves of this disk.
        mirrors: The mirrors that count.
        unasked: Mirrors that have not confirmed, read before the table; None: those that the trainer noted in it.

    Raises:
        BrokenTable: The list of mirrors is broken.
    """
    if unasked is None:
        unasked = dict.fromkeys(table.unasked(), "it has not confirmed yet that it still has what was verified there")
    found = {url: why for url, why in unasked.items() if url in mirrors}
    return Durability(tuple(open_saves(table, metas, mirrors)), found)


def _is_settled(there: MirrorStanding) -> bool:
    """Whether a save needs no more work on a mirror."""
    return (there.verified and there.committed) or there.removed or there.skipped


def open_saves(
    table: UploadsTable, metas: Iterable[Meta], mirrors: Collection[str], save_ids: Collection[str] | None = None
) -> list[OpenSave]:
    """List what is not settled on these mirrors.

    Args:
        metas: The whole saves of this disk.
        mirrors: Mirrors to ask about. Beside required ones, another counts only where it has a record of a save.
        save_ids: Only these saves; None: all of them.

    Raises:
        BrokenTable: The list of mirrors is broken.
    """
    required = counting_rows(table.mirrors())
    released = [save.save_id for save in table.saves() if save.released]
    metas = list(metas)
    local = [meta.save_id for meta in metas if not is_emergency(meta)]
    wanted = [save_id for save_id in dict.fromkeys([*released, *local]) if save_ids is None or save_id in save_ids]
    partial = {
        meta.save_id for meta in metas if meta.partial
    }  # they cannot be sent; the mirror they came from has them
    expected = {one for one in wanted if one not in partial and (one in local or not _is_settled_on(table, one))}
    found = [
        _open_on(table, save_id, url, url in required and save_id in expected) for save_id in wanted for url in mirrors
    ]
    if save_ids is not None:
        unknown = [one for one in save_ids if one not in wanted and not _left_settled(table, mirrors, one)]
        found += [OpenSave(save_id, url, 1, "the table has no record of it") for save_id in unknown for url in mirrors]
    return [one for one in found if one is not None]


def waiting_for_nodes(records: Iterable[UploadRecord], mirrors: Collection[str]) -> list[UploadRecord]:
    """Return the records that only wait until another node has uploaded its part: this node has sent all it has."""
    return [record for record in records if record.mirror in mirrors and is_behind_text(record.last_error)]


def only_waiting(records: Iterable[UploadRecord], mirrors: Collection[str]) -> list[UploadRecord]:
    """Return these, and the records that wait for a save of a newer attempt: nothing here can send any of them."""
    given = list(records)
    held = [record for record in given if record.mirror in mirrors and is_held_back_text(record.last_error)]
    return [*waiting_for_nodes(given, mirrors), *held]


def count_lacking(table: UploadsTable, metas: Iterable[Meta], mirror: str) -> int:
    """Count the saves of this disk that could be on a mirror and are not settled there, with or without records."""
    wanted = [meta for meta in metas if not is_emergency(meta) and not meta.partial]
    return sum(not _is_settled_on(table, meta.save_id, mirror) for meta in wanted)


def _is_settled_on(table: UploadsTable, save_id: str, mirror: str | None = None) -> bool:
    """Whether a save needs no more work on a mirror (None: on one at least); not if its row is broken."""
    try:
        return any(_is_settled(there) for there in table.standing(save_id) if mirror in (None, there.mirror))
    except BrokenTable:
        return False


def _open_on(table: UploadsTable, save_id: str, mirror: str, required: bool) -> OpenSave | None:
    try:
        there = next((one for one in table.standing(save_id) if one.mirror == mirror), None)
    except BrokenTable as error:
        return OpenSave(save_id, mirror, 1, str(error))
    if there is not None and _is_settled(there):
        return None
    records = table.records(save_id=save_id, mirror=mirror)
    if not records and not required:
        return None  # this mirror was never supposed to have it
    waiting = sum(record.state in WAITING for record in records)
    return OpenSave(
        save_id, mirror, max(1, waiting), there.reason if there is not None else "not queued for upload yet"
    )


def _left_settled(table: UploadsTable, mirrors: Collection[str], save_id: str) -> bool:
    """Whether a save that left the table (rotation deleted it) was settled on these mirrors when it did."""
    left = [moved for moved in table.history(save_id) if moved.new is None]
    for mirror in mirrors:
        states = {moved.path: moved.old for moved in left if moved.mirror == mirror}
        has_meta = any(path.startswith("meta_") for path in states)
        if not has_meta or not all(state in SETTLED for state in states.values()):
            return False
    return True


def save_safety(table: UploadsTable, mirrors: Sequence[Mirror], save_id: str) -> tuple[MirrorSafety, ...]:
    """Say for each mirror, from the table alone, whether a save is verified and committed there."""
    try:
        standing = {there.mirror: there for there in table.standing(save_id)}
    except BrokenTable as error:
        return tuple(MirrorSafety(mirror.url, mirror.required, False, False, str(error)) for mirror in mirrors)
    required = [standing[mirror.url] for mirror in mirrors if mirror.required and mirror.url in standing]
    is_there = any(one.removed or (one.verified and one.committed) for one in required)
    safeties = []
    for mirror in mirrors:
        there = standing.get(mirror.url)
        if there is None:
            safeties.append(MirrorSafety(mirror.url, mirror.required, False, False, "not queued for upload yet"))
            continue
        without = ""
        if there.removed:
            without = "has a tombstone of it"
        elif there.skipped and is_there:
            without = "is left without it"
        verified, committed = there.verified or bool(without), there.committed or bool(without)
        safeties.append(MirrorSafety(mirror.url, mirror.required, verified, committed, there.reason, without))
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
    """Say why the table's records do not belong to the save on this disk; None if they do."""
    wanted = {artifact.path: (artifact.digest.size_bytes, artifact.digest.crc32c) for artifact in meta.artifacts}
    for mirror in mirrors:
        if not mirror.required:
            continue
        records = table.records(save_id=meta.save_id, mirror=mirror.url)
        if {r.path: (r.size_bytes, r.crc32c) for r in records if r.role == "artifact"} != wanted:
            return f"{mirror.url}: the uploaded files are not the ones on this disk"
    return None


def why_not_safe(table: UploadsTable, mirrors: Iterable[Mirror], save_id: str, part: str | None = None) -> str | None:
    """Ask every required mirror, now, about every object of a save; None if each has all of it, as the table says.

    Args:
        table: What was verified where.
        mirrors: The required ones of these are asked.
        save_id: The save.
        part: The name of this node's part of it, if other nodes have parts, too. A mirror that the save was left off
            must have it: with it, a node that comes back completes the save there.
    """
    required = [mirror for mirror in mirrors if mirror.required]
    if not required:
        return "no required mirror is configured"
    for mirror in required:
        try:
            reason = _why_not_on(table, mirror, save_id, part)
        except (CkptMirrorError, OSError) as error:
            may_answer_later = " cannot be asked now" if reach_after(error) is not Reach.ANSWERED else ""
            return f"{mirror.url}{may_answer_later}: {error}"
        if reason is not None:
            return f"{mirror.url}: {reason}"
    return None


def _why_not_on(table: UploadsTable, mirror: Mirror, save_id: str, part: str | None) -> str | None:
    there = next((there for there in table.standing(save_id) if there.mirror == mirror.url), None)
    if there is None:
        return "the table does not say that it was uploaded there"
    if there.skipped:
        return _why_not_left_off(table, mirror, save_id, part)
    if not there.removed and not (there.verified and there.committed):
        return there.reason
    records = table.records(save_id=save_id, mirror=mirror.url)
    meta = next((record for record in records if record.role == "meta"), None)
    if meta is None:
        return "the table does not say that its meta was uploaded"
    found: Meta | None = None
    if not _is_large_and_as_verified(mirror, meta):
        try:
            data, _ = mirror.store.read(meta.object or meta.path, limit_bytes=META_LIMIT_BYTES)
        except ObjectNotFound:
            forget_verified(table, meta, "the mirror's meta is gone")
            return "its meta is gone from the mirror"
        there_now = meta_or_tombstone_from_bytes(data)
        if there_now.save_id != save_id:
            return f"{meta.object or meta.path} is another save's meta"
        if isinstance(there_now, Tombstone):
            return None
        found = there_now
    lost = _why_objects_differ(table, mirror, records)
    return lost or (_why_meta_differs(found, records, mirror) if found is not None else None)


def _why_objects_differ(table: UploadsTable, mirror: Mirror, records: Iterable[UploadRecord]) -> str | None:
    """Say which verified object is gone or replaced, which makes it pending again; None if all are there."""
    for record in records:
        name = record.object or record.path
        why = why_differs(record, mirror.store.stat(name), store=mirror.store)
        if why is not None:
            forget_verified(table, record, f"{name} {why}")
            return f"{name} {why}"
    return None


def _why_not_left_off(table: UploadsTable, mirror: Mirror, save_id: str, part: str | None) -> str | None:
    """Say what this node has to send once more of a save that is left off a mirror until another node comes back.

    Of a save that policy left out, nothing has to be there; nor of one that retention deleted there meanwhile.
    """
    records = table.records(save_id=save_id, mirror=mirror.url)
    meta = next((record for record in records if record.role == "meta"), None)
    if meta is None or meta.reason != LEFT_OFF_TEXT:
        return None
    sent = [record for record in records if record.state is RecordState.VERIFIED]
    lost = _why_objects_differ(table, mirror, sent)
    if lost is None and part is not None and mirror.store.stat(part) is None:
        lost = f"{part} is missing"
    if lost is not None and save_id in mirror_catalog(mirror, step=meta.step).tombstones:
        return None
    if lost is not None:
        table.take_back([save_id], is_left_off_text, mirror=mirror.url)
    return lost


def _is_large_and_as_verified(mirror: Mirror, meta: UploadRecord) -> bool:
    """Whether a large meta is the object that was read, and compared, when this record became verified.

    It names the files of all nodes, of which there are many: if each node read it for each save that it deletes, that
    would cost the square of their number. Its generation and checksum say the same.
    """
    if (meta.size_bytes or 0) <= _READ_AGAIN_BYTES or not mirror.store.capabilities.server_crc32c:
        return False
    found = mirror.store.stat(meta.object or meta.path)
    return found is not None and found.crc32c is not None and why_differs(meta, found) is None


def _why_meta_differs(found: Meta, records: Sequence[UploadRecord], mirror: Mirror) -> str | None:
    """Say why the mirror's meta does not name the objects that were verified, or equal ones; None if it does.

    All nodes have ``.metadata``, and two of them may have sent it under different names: the meta names one.
    """
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
        if artifact.object_name == (record.object or record.path):
            continue
        info = mirror.store.stat(artifact.object_name)
        if info is None or not is_of_save(artifact, found.save_id, info, mirror.store):
            return f"its meta there names {artifact.object_name}, but the verified object is {record.object}"
    return None
