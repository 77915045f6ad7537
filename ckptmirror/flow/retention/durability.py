"""Durability: whether everything that lies on this disk is provably on its mirrors, by the table.

Rules:
* What counts is ``UploadsTable.standing``: every artifact verified and the meta committed; or a tombstone; or left out
  by policy. No record means not durable, a broken one neither.
* Asked about are the whole saves of this disk and every released save of the table, not a count of what is pending:
  a row that is gone is pending nowhere.
* An emergency snapshot is never mirrored. A save that rotation deleted was settled if its last records say so.
* A save that is on a mirror and not on this disk can be sent to no other: a mirror that was added later waits for no
  such save.
* Counting what moves (``upload.workers.still_moving``) is for waiting; this is for the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptmirror.core.errors import BrokenTable
from ckptmirror.core.lifecycle import WAITING, RecordState
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.mirrors import counting_rows
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.local.uploads import MirrorStanding, UploadsTable

__all__ = ["OpenSave", "count_lacking", "open_files", "open_saves"]

_SETTLED = (RecordState.VERIFIED, RecordState.REMOVED, RecordState.SKIPPED)


@dataclass(frozen=True)
class OpenSave:
    """A save that is not settled on one mirror.

    Attributes:
        files: How many of its files are known to wait; at least 1.
        reason: What is missing, in words.
    """

    save_id: str
    mirror: str
    files: int
    reason: str


def _is_settled(there: MirrorStanding) -> bool:
    """Whether nothing more is to be done for a save on a mirror."""
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
    partial = {meta.save_id for meta in metas if meta.partial}  # it cannot be sent, and where it came from, it is
    expected = {one for one in wanted if one not in partial and (one in local or not _is_settled_somewhere(table, one))}
    found = [
        _open_on(table, save_id, url, url in required and save_id in expected) for save_id in wanted for url in mirrors
    ]
    if save_ids is not None:
        unknown = [one for one in save_ids if one not in wanted and not _left_settled(table, mirrors, one)]
        found += [OpenSave(save_id, url, 1, "nothing is known of it") for save_id in unknown for url in mirrors]
    return [one for one in found if one is not None]


def count_lacking(table: UploadsTable, metas: Iterable[Meta], mirror: str) -> int:
    """Count the saves of this disk that could be on a mirror and are not settled there, with or without records."""
    wanted = [meta for meta in metas if not is_emergency(meta) and not meta.partial]
    return sum(
        not any(there.mirror == mirror and _is_settled(there) for there in table.standing(meta.save_id))
        for meta in wanted
    )


def open_files(saves: Iterable[OpenSave]) -> int:
    """Count the files of saves that are not settled."""
    return sum(save.files for save in saves)


def _is_settled_somewhere(table: UploadsTable, save_id: str) -> bool:
    try:
        return any(_is_settled(there) for there in table.standing(save_id))
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
        return None  # this mirror was never meant to have it
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
        if not has_meta or not all(state in _SETTLED for state in states.values()):
            return False
    return True
