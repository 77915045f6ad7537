"""Reconcile: make table and disk agree at every start, without being told.

Rules (the caller holds the root lock, so no save is in flight):
* Records without a meta, or a sealed meta that never got its name, are a save that a crash cut short before it
  existed: what it left is removed.
* A meta with records that were never released is a save: its records are released.
* A whole save without records (a lost table, a staged save) gets them, pending: the uploader asks the mirror first,
  and our own object there is success without sending a byte.
* What workers of a dead process held is free again, without waiting for their leases.
* Temporaries carry a save id; under the lock nobody writes them any more, so they are removed. A name that is not ours
  is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.core.model import Meta
from ckptmirror.flow.catalog import META_LIMIT_BYTES
from ckptmirror.flow.commit import made_by, remove_uncommitted
from ckptmirror.flow.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.rotate import finish_interrupted
from ckptmirror.flow.trash import empty_trash
from ckptmirror.flow.workers import free_dead_workers
from ckptmirror.local import files
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.uploads import UploadsTable

__all__ = ["Reconciled", "add_missing_records", "carry_on", "reconcile"]

_log = logging.getLogger("ckptmirror.reconcile")


@dataclass(frozen=True)
class Reconciled:
    """What a reconcile found to do; each a tuple of save ids or names."""

    discarded: tuple[str, ...]
    released: tuple[str, ...]
    added: tuple[str, ...]
    temporaries: tuple[str, ...]


def reconcile(root: Path, table: UploadsTable, mirrors: Sequence[Mirror | MirrorSpec]) -> Reconciled:
    """Bring table and disk in step after whatever happened. Needs no mirror to answer.

    Raises:
        TableLocked: Another process holds the table.
    """
    table.drop_broken_rows()
    free_dead_workers(table)
    inventory = read_inventory(root)
    whole = {save.meta.save_id: save.meta for save in inventory.saves}
    on_disk = set(whole) | {save.meta.save_id for save in inventory.incomplete}
    released, discarded = [], []
    for save in (save for save in table.saves() if not save.released):
        if save.save_id in on_disk:
            table.release_save(save.save_id)
            released.append(save.save_id)
        elif not (root / save.meta_path).exists():  # a meta that is there but cannot be read decides nothing
            records = [record for record in table.records(save_id=save.save_id) if record.role == "artifact"]
            remove_uncommitted(root, save.save_id, {r.path: (r.size_bytes, r.crc32c) for r in records})
            table.discard_unreleased([save.save_id])
            discarded.append(save.save_id)
    for meta in _sealed_only(root, inventory.temporaries):  # there may have been no mirror, so no records
        if meta.save_id not in on_disk:
            remove_uncommitted(root, meta.save_id, made_by(meta))
    removed = [path for path in inventory.temporaries if _remove_temporary(root, path)]
    added = add_missing_records(table, mirrors, whole.values())
    empty_trash(root)
    return Reconciled(tuple(discarded), tuple(released), tuple(added), tuple(path.name for path in removed))


def add_missing_records(
    table: UploadsTable, mirrors: Sequence[Mirror | MirrorSpec], metas: Iterable[Meta]
) -> list[str]:
    """Give each save a pending, claimable record for every file and mirror that has none; return the save ids.

    A save that the table knows with other contents keeps its records and so is never deleted, unless it is a staged
    copy, which may have come back under other names: its records are made anew.
    """
    added = []
    urls = [mirror.url for mirror in mirrors]
    for meta in sorted(metas, key=lambda meta: (meta.attempt.number, meta.save_number)):
        if meta.kinds == ("emergency",):
            continue  # stays on the local disk unless mirrored on purpose
        try:
            count = _add(table, urls, meta)
        except IntegrityError as error:
            if meta.staged_from is None:
                _log.error("step %d: %s", meta.step, error)
                continue
            table.forget_save(meta.save_id, "staged again under other names")
            count = _add(table, urls, meta)
        if count:
            added.append(meta.save_id)
    return added


def _add(table: UploadsTable, urls: Sequence[str], meta: Meta) -> int:
    meta_path = names.SaveName(meta.step, meta.tag).meta
    count = table.add_save(meta.save_id, meta.step, meta.kinds, meta.artifacts, urls, meta_path=meta_path)
    table.release_save(meta.save_id)
    return count


def carry_on(root: Path, table: UploadsTable, mirrors: Sequence[Mirror]) -> None:
    """What a start does once mirrors can be asked: finish cut-short rotations, and try failed uploads once more."""
    finish_interrupted(root, table, mirrors)
    table.retry_failed()


def _sealed_only(root: Path, temporaries: Iterable[Path]) -> list[Meta]:
    """Read the metas that were sealed and never got their name. What was staged has a copy and is continued."""
    metas = []
    for path in temporaries:
        parsed = names.parse_name(path.name)
        final = names.parse_name(parsed.final) if parsed is not None else None
        if parsed is None or final is None or final.role != "meta" or path.parent != root:
            continue
        if os.path.lexists(root / parsed.final):
            continue
        with contextlib.suppress(CkptMirrorError, FileNotFoundError):  # cut short itself: nothing was published yet
            meta = meta_from_bytes(files.read_limited(path, META_LIMIT_BYTES))
            if meta.staged_from is None and meta.save_id[:8] == parsed.save:
                metas.append(meta)
    return metas


def _remove_temporary(root: Path, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        files.move_to_trash(root, path)
        return True
    return False
