"""Rotate: delete local saves that policy no longer wants and that are provably elsewhere.

The decision is ``core.retention.plan_rotation``; this file gathers its facts, asks the mirrors again, and deletes.

Rules:
* Before each delete every required mirror is asked, for this deletion, about every object of the save
  (``why_not_safe``). Anything but a full yes is a refusal with a reason.
* What someone else put under a save's names is never deleted: a file changed since the commit is compared with its
  checksum, and a directory that holds more than the save's files stays.
* What goes is a save, not its names: under the lock of names that a commit holds, the meta is read once more. A person
  may have removed the save meanwhile, and training saved another under its names.
* The meta goes first, then the files are renamed to trash, then the trash is emptied, then the record is forgotten.
  Where a name cannot be moved (an overlay renames no directory of its lower layer), all that was moved is put back. A
  crash in between leaves files that the table proves to be verified and without a meta; :func:`finish_interrupted`
  carries on, but for what a later save of the same bytes names by then.
* An emergency snapshot goes once the mirrors confirm a newer save that takes its place (docs/adr/0003), and with it its
  copy in the persistent directory.
* ``latest`` is moved to the newest save of the lineage before what it points at goes.
* One rotation at a time per root, held by a lock file.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError, LocalStorageFull, StoreHangs, WaitTimeout
from ckptmirror.core.model import AttemptList, Meta, top_names
from ckptmirror.core.retention import Retention, RotationPlan, SaveStatus, plan_rotation
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, local_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, close_mirrors, open_mirrors
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.retention.durability import is_skipped, save_safety, why_not_safe, why_not_same
from ckptmirror.flow.retention.ownership import why_not_ours
from ckptmirror.flow.save.commit import NAMES_LOCK_NAME, claimed_by_others, latest_target, stray_below
from ckptmirror.flow.save.emergency_files import delete_emergency, is_emergency, meta_paths
from ckptmirror.flow.save.persistent_dir import snapshots_in
from ckptmirror.local import files
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.hang_guard import hang_guard
from ckptmirror.local.lock import exclusive
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import SaveRow, UploadRecord, UploadsTable

__all__ = ["RotationReport", "finish_interrupted", "gather", "rotate", "rotate_root"]

ROTATE_LOCK_NAME = f"{names.CONTROL_DIR}/rotate.lock"
_LOCK_WAIT_S = 600.0
_NAMES_WAIT_S = 60.0
_Result = TypeVar("_Result")
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


def gather(
    root: Path,
    table: UploadsTable,
    mirrors: Sequence[Mirror],
    attempts: AttemptList | None,
    persistent: Mapping[str, Meta] | None = None,
) -> tuple[list[SaveStatus], dict[str, Meta]]:
    """Collect what the plan needs to know of every whole local save, and of the snapshots in a persistent directory."""
    catalog = local_catalog(root)
    catalog = replace(catalog, saves={**(persistent or {}), **catalog.whole}, torn=frozenset())
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
                skipped=is_skipped(table, mirrors, meta.save_id),
            )
        )
    return statuses, dict(catalog.saves)


def rotate(
    root: Path,
    table: UploadsTable,
    mirrors: Sequence[Mirror],
    retention: Retention,
    *,
    attempts: AttemptList | None = None,
    bus: events.EventBus | None = None,
    dry_run: bool = False,
    snapshots: bool = False,
    persistent_dir: Path | None = None,
) -> RotationReport:
    """Delete what the plan says and the mirrors confirm, now, without waiting for uploads.

    Args:
        root: The local root.
        table: Its table.
        mirrors: Its mirrors.
        retention: The policy.
        attempts: The attempts that count; None: those that the root lists.
        bus: Told what was deleted and what was refused.
        dry_run: Delete nothing.
        snapshots: Delete emergency snapshots too: only for the attempt that runs, once it is decided.
        persistent_dir: Where emergency snapshots have copies.

    Raises:
        WaitTimeout: Another rotation of this root does not end.
    """
    bus = bus or events.EventBus()
    with exclusive(root / ROTATE_LOCK_NAME, timeout_s=_LOCK_WAIT_S):
        if not dry_run:
            _finish(root, table, mirrors)
        copies = snapshots_in(persistent_dir) if persistent_dir is not None else {}
        statuses, metas = gather(root, table, mirrors, attempts, copies)
        plan = plan_rotation(statuses, retention)
        refused = dict(plan.refuse)
        deleted = []
        absent = _required_and_absent(table, mirrors)
        for save_id in plan.delete if not dry_run else ():
            meta, began = metas[save_id], time.monotonic()
            successor = metas.get(plan.successors.get(save_id, save_id))
            assert successor is not None
            homes = _homes(root, persistent_dir, meta, copies)
            touched = [why for home in homes if (why := _why_not_ours(root, home, meta)) is not None]
            reason = absent or next(iter(touched), None) or _why_not_elsewhere(table, mirrors, successor)
            if reason is None and successor is not meta:
                reason = _why_gone(table, mirrors, successor)
            if reason is None and is_emergency(meta) and not snapshots:
                reason = "only the running trainer deletes an emergency snapshot: a start may be reading it"
            if reason is None:
                reason = _delete_pointed_at(root, table, meta, _newest(statuses, metas), homes)
            if reason is not None:
                refused[save_id] = reason
                continue
            deleted.append((meta.step, save_id))
            reason, took_s = plan.delete[save_id], time.monotonic() - began
            bus.emit(events.SaveRotated(step=meta.step, save_id=save_id, reason=reason, duration_s=took_s))
        for save_id, reason in refused.items():
            bus.emit(events.RotationRefused(step=metas[save_id].step, save_id=save_id, reason=reason))
        return RotationReport(plan, tuple(deleted), refused, {save_id: meta.step for save_id, meta in metas.items()})


def _required_and_absent(table: UploadsTable, mirrors: Sequence[Mirror]) -> str | None:
    """Say which mirror the last start that succeeded required, and this one does not have; None if there is none."""
    here = {mirror.url for mirror in mirrors if mirror.required}
    absent = [row.url for row in table.mirrors() if row.required and row.url not in here]
    return f"{absent[0]} is required, and cannot be asked here" if absent else None


def _homes(root: Path, persistent_dir: Path | None, meta: Meta, copies: Mapping[str, Meta]) -> list[Path]:
    """Return where a save lies: only a snapshot may lie elsewhere than in the root."""
    copy = [persistent_dir] if persistent_dir is not None and meta.save_id in copies else []
    return [*copy, root] if not copy or all((root / path).exists() for path in meta_paths(meta)) else copy


def _why_not_ours(root: Path, home: Path, meta: Meta) -> str | None:
    try:
        return _at_home(root, home, lambda: why_not_ours(home, meta))
    except StoreHangs as error:
        return str(error)


def _at_home(root: Path, home: Path, call: Callable[[], _Result]) -> _Result:
    """Look at a save, or delete it, where it lies: another disk than the root's may hang."""
    return call() if home == root else hang_guard(home).call(call)


def _delete_pointed_at(
    root: Path, table: UploadsTable, meta: Meta, newest: Meta | None, homes: Sequence[Path]
) -> str | None:
    """Delete a save wherever it lies, and see that ``latest`` does not dangle; say why if it cannot be deleted."""
    try:
        if not is_emergency(meta):
            return _delete(root, table, meta, newest)
        pointed = _point_latest_elsewhere(root, meta, newest)
        for home in homes:  # nothing else ever gets its name, which holds the second when it was taken
            _at_home(root, home, partial(delete_emergency, home, meta))
        if not pointed:
            _point_latest_elsewhere(root, meta, newest)
    except (CkptMirrorError, OSError) as error:
        save_logger(_log, meta).error("step %d cannot be deleted: %s", meta.step, error)
        return f"it cannot be deleted: {error}"
    return None


def _why_not_elsewhere(table: UploadsTable, mirrors: Sequence[Mirror], meta: Meta) -> str | None:
    """Ask the mirrors for this deletion: say what of a save is not there; None if they have all of it."""
    return why_not_same(table, mirrors, meta) or why_not_safe(table, mirrors, meta.save_id)


def _why_gone(table: UploadsTable, mirrors: Sequence[Mirror], successor: Meta) -> str | None:
    """A save that stands in for another must be there itself: no tombstone, and not left out by policy."""
    required = {mirror.url for mirror in mirrors if mirror.required}
    for there in table.standing(successor.save_id):
        if there.mirror in required and not (there.verified and there.committed):
            return f"step {successor.step} is no longer on {there.mirror}"
    return None


def _newest(statuses: Sequence[SaveStatus], metas: Mapping[str, Meta]) -> Meta | None:
    """The newest save of the lineage that ``latest`` may name."""
    current = [save for save in statuses if save.standing == "current" and save.kinds != ("emergency",)]
    newest = max(current, key=lambda save: (save.step, save.number), default=None)
    return metas[newest.save_id] if newest is not None else None


def _point_latest_elsewhere(root: Path, doomed: Meta, newest: Meta | None) -> bool:
    """Say whether ``latest`` names the doomed save no more: a full disk may have no room for a new link yet."""
    link = root / names.LATEST_NAME
    if not link.is_symlink() or link.readlink().parts[:1] not in [(name,) for name in top_names(doomed.artifacts)]:
        return True
    if newest is not None and newest.save_id != doomed.save_id:
        try:
            files.replace_link(link, latest_target(newest))
        except LocalStorageFull as error:
            save_logger(_log, doomed).warning("%s still names step %d: %s", link, doomed.step, error)
            return False
    else:
        _discard(root, link)
        files.fsync_dir(root)
    return True


def _delete(root: Path, table: UploadsTable, meta: Meta, newest: Meta | None) -> str | None:
    """Meta first, durable; then the files; then the trash, since what is to be recorded may need its room.

    No save shows its names meanwhile, and what the names say is asked again: the save may be gone, and another here.
    """
    meta_path = root / names.SaveName(meta.step, meta.tag).meta
    with exclusive(root / NAMES_LOCK_NAME, timeout_s=_NAMES_WAIT_S):
        try:
            found = meta_from_bytes(files.read_limited(meta_path, META_LIMIT_BYTES)).save_id
        except FileNotFoundError:
            return f"{meta_path.name} has disappeared: the next rotation looks at what is left"
        if found == meta.save_id:
            pointed = _point_latest_elsewhere(root, meta, newest)
            with _put_back_on_failure(root) as moved:
                moved += _discard(root, meta_path)
                files.fsync_dir(root)
                taken = _in_flight(table, meta.save_id) | claimed_by_others(root, meta.save_id)
                for name in top_names(meta.artifacts):
                    if name not in taken:
                        moved += _discard(root, root / name)
                files.fsync_dir(root)
    if found != meta.save_id:
        table.forget_save(meta.save_id)  # all of it went before the other got its names, and the mirrors have it
        return f"somebody has removed it since, and another save ({found[:8]}) has its names"
    empty_trash(root)
    table.forget_save(meta.save_id)
    if not pointed:
        _point_latest_elsewhere(root, meta, newest)
    return None


def _in_flight(table: UploadsTable, save_id: str) -> set[str]:
    """Return the names of other saves whose meta the table has not met: each shows them before its meta."""
    records = [record for record in table.records() if record.save_id != save_id and not record.released]
    return {record.path.partition("/")[0] for record in records}


def _discard(root: Path, path: Path) -> list[tuple[Path, Path]]:
    """Move a name into the trash; say what lies where now, if anything was there."""
    try:
        return [(path, files.move_to_trash(root, path))]
    except FileNotFoundError:  # a person was faster
        return []


@contextlib.contextmanager
def _put_back_on_failure(root: Path) -> Iterator[list[tuple[Path, Path]]]:
    """Lend a list of names and where they were moved to. If the body fails they get their names back, the last first.

    So the meta, which went first, comes last: a save is never shown without its files.
    """
    moved: list[tuple[Path, Path]] = []
    try:
        yield moved
    except (CkptMirrorError, OSError):
        try:
            for path, lies in reversed(moved):
                files.fsync_dir(root)
                files.rename_noreplace(lies, path, label="trash.put_back")
            files.fsync_dir(root)
        except (CkptMirrorError, OSError) as error:
            _log.error("what a rotation began to move stays in %s: %s", root / names.TRASH_DIR, error)
        raise


def finish_interrupted(root: Path, table: UploadsTable, mirrors: Sequence[Mirror]) -> list[str]:
    """Carry on deletions that a crash cut short; return the save ids.

    Such a save has no meta on disk any more, every record of it is settled on every required mirror, and the mirrors,
    asked again, confirm it. Where not every required mirror is at hand, nothing is finished. A mirror that was added
    since has no record of the save, and is not asked: the deletion was decided without it.

    Raises:
        WaitTimeout: A rotation of this root does not end.
    """
    with exclusive(root / ROTATE_LOCK_NAME, timeout_s=_LOCK_WAIT_S):
        return _finish(root, table, mirrors)


def _finish(root: Path, table: UploadsTable, mirrors: Sequence[Mirror]) -> list[str]:
    finished: list[str] = []
    if _required_and_absent(table, mirrors) is not None:
        return finished
    for save in table.saves():
        if not save.released or (root / save.meta_path).exists():
            continue
        asked = {record.mirror for record in table.records(save_id=save.save_id)}
        if why_not_safe(table, [mirror for mirror in mirrors if mirror.url in asked], save.save_id) is not None:
            continue
        try:
            with exclusive(root / _stage_lock_name(save.step), timeout_s=0.0):
                gone = _take_away(root, table, save)
        except WaitTimeout:
            continue  # the step is being staged, or a save shows its names: the next rotation looks again
        except (CkptMirrorError, OSError) as error:  # one save that cannot be deleted keeps no other
            save_logger(_log, save).error("step %d is not all deleted yet: %s", save.step, error)
            continue
        if gone:
            empty_trash(root)
            table.forget_save(save.save_id)
            finished.append(save.save_id)
    empty_trash(root)
    return finished


def _take_away(root: Path, table: UploadsTable, save: SaveRow) -> bool:
    """Move what an interrupted deletion left into the trash, but for what another save names by now.

    Equal bytes do not say whose they are: a save in flight shows its names before its meta. Its records are durable
    before, and it holds the lock that is held here while a name goes.
    """
    records = [record for record in table.records(save_id=save.save_id) if record.role == "artifact"]
    for name in dict.fromkeys(record.path.partition("/")[0] for record in records):
        inode = _inode(root / name)
        if inode is None or name in _taken(root, table, save.save_id) or not _is_still_ours(root, name, records):
            continue
        with exclusive(root / NAMES_LOCK_NAME, timeout_s=_NAMES_WAIT_S):
            if (root / save.meta_path).exists():
                return False
            if name not in _taken(root, table, save.save_id) and _inode(root / name) == inode:
                _discard(root, root / name)
    files.fsync_dir(root)
    return True


def _taken(root: Path, table: UploadsTable, save_id: str) -> set[str]:
    """Return the names directly below the root that another save's records or meta name."""
    in_table = {record.path.partition("/")[0] for record in table.records() if record.save_id != save_id}
    return in_table | claimed_by_others(root, save_id)


def _stage_lock_name(step: int) -> str:
    """Where a stage of this step locks (``stage_save``)."""
    return f"{names.CONTROL_DIR}/stage_{names.SaveName(step).stem}.lock"


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_still_ours(root: Path, name: str, records: Sequence[UploadRecord]) -> bool:
    """Whether all that lies under ``name`` has the recorded bytes (what someone put there meanwhile has not)."""
    mine = [r for r in records if r.role == "artifact" and r.path.partition("/")[0] == name]
    for record in mine:
        try:
            digest = digest_file(root / record.path)
        except (CkptMirrorError, OSError):
            return False
        if (digest.size_bytes, digest.crc32c) != (record.size_bytes, record.crc32c):
            return False
    return stray_below(root, [name], {record.path for record in mine}) is None


def rotate_root(
    root: Path,
    retention: Retention,
    *,
    state_dir: Path | None = None,
    dry_run: bool = False,
    bus: events.EventBus | None = None,
) -> RotationReport:
    """Rotate a root from outside its trainer, with the mirrors that its table names.

    Raises:
        NoTable: ckptmirror has not saved here.
        ForeignTable: The table is another root's.
    """
    table = open_known_table(root, state_dir)
    try:
        mirrors = open_mirrors((MirrorSpec(row.url, row.required) for row in table.mirrors()), root, table)
        try:
            return rotate(root, table, mirrors, retention, bus=bus, dry_run=dry_run)
        finally:
            close_mirrors(mirrors)
    finally:
        table.close()
