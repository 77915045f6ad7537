"""Reconcile: makes the table and the disk agree at every start.

Rules (the caller holds the root lock, so no save is in flight):
* Records without a meta, or a sealed meta that never got its name, belong to a save that a crash interrupted before it
  existed. Its files are removed.
* A meta whose records were never released is a save. Its records are released; if the meta has been damaged since, the
  uploads fail and say so.
* A whole save without records (a lost table, a staged save) gets pending ones. The uploader asks the mirror first, and
  sends nothing if our own object is there already.
* The claims of a dead process are freed at once, without waiting for their leases.
* If a crash interrupted the replacement of a broken copy after the new meta was written, it is finished.
* Where names cannot be exchanged, a crash may leave what a meta names in the trash, and the place free. It is put back.
* If nothing of a save is left here, its records cannot be uploaded. They are deleted, with an error in the log.
* Temporaries carry a save id. Under the lock no process writes them, so they are removed. A name that is not ours is
  never touched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.core.model import Meta, new_id
from ckptmirror.flow.fetch.destination import Destination
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.places.trash import empty_trash, not_replaced, parsed_in_trash
from ckptmirror.flow.retention.durability import open_saves
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.rotation import finish_interrupted
from ckptmirror.flow.save.commit import (
    claimed_by_others,
    in_order_of_upload,
    made_by,
    may_be_meta_of,
    remove_uncommitted,
)
from ckptmirror.flow.save.emergency_files import remove_what_is_stale
from ckptmirror.flow.upload.workers import free_dead_workers
from ckptmirror.local import directories, files, trash
from ckptmirror.local.inventory import Inventory, read_inventory
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.uploads import SaveRow, UploadsTable

__all__ = [
    "BRINGING_NAME",
    "REMOVED_REASON",
    "Reconciled",
    "add_missing_records",
    "being_brought",
    "carry_on",
    "forget_brought",
    "note_brought",
    "reconcile",
    "renew_records",
]

BRINGING_NAME = f"{names.CONTROL_DIR}/bringing.json"
REMOVED_REASON = "its files were removed before they were uploaded"
_log = logging.getLogger("ckptmirror.reconcile")


@dataclass(frozen=True)
class Reconciled:
    """What a reconcile did; each attribute is a tuple of save ids or names.

    Attributes:
        gone: Step, save id and reason of saves whose files were removed before they were on every required mirror.
    """

    discarded: tuple[str, ...]
    released: tuple[str, ...]
    added: tuple[str, ...]
    temporaries: tuple[str, ...]
    gone: tuple[tuple[int, str, str], ...] = ()


def reconcile(root: Path, table: UploadsTable, mirrors: Sequence[Mirror | MirrorSpec]) -> Reconciled:
    """Make the table and the disk agree. Needs no answer from a mirror.

    Raises:
        TableLocked: Another process holds the table.
    """
    table.drop_broken_rows()
    free_dead_workers(table)
    inventory = read_inventory(root)
    if _put_back(root, inventory):
        inventory = read_inventory(root)
    whole = {save.meta.save_id: save.meta for save in inventory.saves}
    on_disk = set(whole) | {save.meta.save_id for save in inventory.incomplete}
    released, discarded = [], []
    for save in (save for save in table.saves() if not save.released):
        if save.save_id in on_disk or may_be_meta_of(root / save.meta_path, save.save_id):
            table.release_save(save.save_id)
            released.append(save.save_id)
        else:
            records = [record for record in table.records(save_id=save.save_id) if record.role == "artifact"]
            remove_uncommitted(root, save.save_id, {r.path: (r.size_bytes, r.crc32c) for r in records})
            table.discard_unreleased([save.save_id])
            discarded.append(save.save_id)
    for meta in _sealed_only(root, inventory.temporaries):  # there may have been no mirror, so no records
        if meta.save_id not in on_disk:
            remove_uncommitted(root, meta.save_id, made_by(meta))
    bringing = being_brought(root)
    removed = [path for path in inventory.temporaries if not _is_of(path, bringing) and _remove_temporary(root, path)]
    added = add_missing_records(table, mirrors, whole.values())
    if any(parsed_in_trash(path) is not None for path in inventory.trash):
        for staged in (meta for meta in whole.values() if meta.staged_from is not None):
            _finish_replacement(root, staged)
    gone = _forget_gone(root, table, on_disk)
    remove_what_is_stale(root)
    empty_trash(root)
    return Reconciled(tuple(discarded), tuple(released), tuple(added), tuple(path.name for path in removed), gone)


def _put_back(root: Path, inventory: Inventory) -> bool:
    """Put back from the trash what a crash kept from being replaced; return whether there was something."""
    found = list(not_replaced(inventory))
    for trashed, top, meta in found:
        directories.rename_noreplace(trashed, root / top, label="trash.put_back")
        save_logger(_log, meta).warning("step %d: %s was in the trash, and is put back", meta.step, top)
    if found:
        directories.fsync_dir(root)
    return bool(found)


def _forget_gone(root: Path, table: UploadsTable, on_disk: Collection[str]) -> tuple[tuple[int, str, str], ...]:
    """Delete the records of saves whose files are gone before they were uploaded, and log each as an error.

    A save that every required mirror has is an interrupted rotation; it is finished once the mirrors were asked.
    """
    gone = []
    required = [row.url for row in table.mirrors() if row.required]
    for save in table.saves():
        if not save.released or save.save_id in on_disk or os.path.lexists(root / save.meta_path):
            continue
        missing = open_saves(table, [], required, [save.save_id])
        if not missing or _is_something_left(root, table, save):
            continue
        reason = f"nothing of it is left in {root}; {missing[0].mirror}: {missing[0].reason}"
        save_logger(_log, save, event="SaveGone").error(
            "the save of step %d was removed before it was mirrored: %s", save.step, reason
        )
        table.forget_save(save.save_id, REMOVED_REASON)
        gone.append((save.step, save.save_id, reason))
    return tuple(gone)


def _is_something_left(root: Path, table: UploadsTable, save: SaveRow) -> bool:
    """Whether a file exists under a name of the save that no other save's meta names."""
    tops = {r.path.partition("/")[0] for r in table.records(save_id=save.save_id) if r.role == "artifact"}
    if not tops:  # its records were broken: take every name like its own
        meta = names.parse_name(save.meta_path)
        found = {entry.name: names.parse_name(entry.name) for entry in root.iterdir()}
        tops = {name for name, p in found.items() if meta and p and (p.step, p.tag) == (meta.step, meta.tag)}
    claimed = claimed_by_others(root, save.save_id)
    return any(os.path.lexists(root / name) for name in tops - claimed)


def add_missing_records(
    table: UploadsTable,
    mirrors: Sequence[Mirror | MirrorSpec],
    metas: Iterable[Meta],
) -> list[str]:
    """Give each save a pending, claimable record for every file and mirror that has none; return the save ids.

    A staged copy that has only a part of its save must not look like the whole save on a mirror that lacks it. So it
    gets records only for the mirror that it came from.

    A save that the table knows with other contents keeps its records, and so is never deleted. A staged copy, which may
    have come back under other names, instead gets new records for every mirror that had some.
    """
    added = []
    urls = [mirror.url for mirror in mirrors]
    for meta in sorted(metas, key=lambda meta: (meta.attempt.number, meta.save_number)):
        if meta.kinds == ("emergency",):
            continue  # stays on the local disk unless mirrored on purpose
        wanted = [url for url in urls if url == meta.staged_from] if meta.partial else urls
        try:
            count = _add(table, wanted, meta)
        except IntegrityError as error:
            if meta.staged_from is None:
                save_logger(_log, meta).error("step %d: %s", meta.step, error)
                continue
            count = renew_records(table, wanted, meta)
        if count:
            added.append(meta.save_id)
    return added


def renew_records(table: UploadsTable, urls: Sequence[str], meta: Meta) -> int:
    """Give a save that was staged in the place of another copy new records, for ``urls`` and where it had some.

    A mirror that had some may not be configured now. It stays known until a start without it succeeds.
    """
    had = {record.mirror for record in table.records(save_id=meta.save_id)}
    table.forget_save(meta.save_id, "staged again, maybe under other names")
    return _add(table, list(dict.fromkeys([*urls, *sorted(had)])), meta)


def _add(table: UploadsTable, urls: Sequence[str], meta: Meta) -> int:
    meta_path = names.SaveName(meta.step, meta.tag).meta
    artifacts = in_order_of_upload(meta)
    count = table.add_save(meta.save_id, meta.step, meta.kinds, artifacts, urls, meta_path=meta_path)
    table.release_save(meta.save_id)
    return count


def carry_on(root: Path, table: UploadsTable, mirrors: Sequence[Mirror], audit: MirrorAudit | None = None) -> bool:
    """Audit each mirror once it answers, and finish interrupted rotations. Return whether a mirror answered."""
    if not (audit or MirrorAudit(table, mirrors)).ask():
        return False
    try:
        finish_interrupted(root, table, mirrors)
    except CkptMirrorError as error:
        _log.error("an interrupted rotation is not finished yet: %s", error)
    return True


def _sealed_only(root: Path, temporaries: Iterable[Path]) -> list[Meta]:
    """Read the metas that were sealed and never got their name, except those of stages, which can be continued."""
    metas = []
    for path in temporaries:
        parsed = names.parse_name(path.name)
        final = names.parse_name(parsed.final) if parsed is not None else None
        if parsed is None or final is None or final.role != "meta" or path.parent != root:
            continue
        if os.path.lexists(root / parsed.final):
            continue
        with contextlib.suppress(CkptMirrorError, FileNotFoundError):  # an incomplete meta: nothing was published yet
            meta = meta_from_bytes(files.read_limited(path, META_LIMIT_BYTES))
            if meta.staged_from is None and meta.save_id[:8] == parsed.save:
                metas.append(meta)
    return metas


def _finish_replacement(root: Path, staged: Meta) -> None:
    """Delete what a crash left of a broken copy that ``staged``, of the same save, has replaced."""
    place = Destination(root, staged.step, replaces=staged.save_id, own_root=True)
    if any(meta.save_id == staged.save_id for meta in place.trashed_metas()):
        place.finish_replacing()


def note_brought(root: Path, save_id: str, *, beside: bool) -> None:
    """Note that a start begins to bring a save: if it is killed, the next one continues with the temporaries.

    Those of another save, which an earlier start noted, are removed.

    Args:
        beside: Whether it is gathered beside a copy that the root may have, which it does not change.
    """
    if being_brought(root) not in (None, save_id):
        forget_brought(root)
    note = json.dumps({"save_id": save_id, "beside": beside}).encode()
    files.write_bytes(root / BRINGING_NAME, note, save_id=new_id(), replace=True)


def forget_brought(root: Path) -> None:
    """Remove the temporaries of a save that an earlier start began to bring. Called after a start has decided."""
    save_id = being_brought(root)
    if save_id is not None:
        for path in read_inventory(root).temporaries:
            if _is_of(path, save_id):
                _remove_temporary(root, path)
        with contextlib.suppress(FileNotFoundError):
            trash.move_to_trash(root, root / BRINGING_NAME)
        empty_trash(root)


def being_brought(root: Path, *, in_place: bool = False) -> str | None:
    """Return the save that a start was bringing when it was killed; its temporaries are kept.

    Args:
        in_place: Only one that takes the place of a copy in the root.
    """
    try:
        note = json.loads(files.read_limited(root / BRINGING_NAME, 4096))
    except (FileNotFoundError, ValueError, RecursionError, IntegrityError):
        return None
    is_wanted = isinstance(note, dict) and not (in_place and note.get("beside") is True)
    save_id = note.get("save_id") if is_wanted else None
    return save_id if isinstance(save_id, str) and len(save_id) == 32 else None


def _is_of(path: Path, save_id: str | None) -> bool:
    parsed = names.parse_name(path.name)
    return save_id is not None and parsed is not None and parsed.save == save_id[:8]


def _remove_temporary(root: Path, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        trash.move_to_trash(root, path)
        return True
    return False
