"""Rotate: deletes local saves that policy no longer keeps and that are provably elsewhere.

``core.retention.plan_rotation`` decides; this file gathers the facts for it, asks the mirrors again, and deletes.

Rules:
* Before each delete every required mirror is asked, for this deletion, about every object of the save
  (``why_not_safe``). Anything but a full yes is a refusal with a reason.
* Files that another program put under a save's names are never deleted: a file that changed since the commit is
  compared with its checksum, and a directory that has more than the save's files stays.
* A step that is being staged into the root stays: the stage counts on the files that it found there.
* A rotation deletes a save, not names: under the lock that a commit holds while names appear, the meta is read once
  more. A person may have removed the save, and training may have saved another under its names.
* The meta is moved first, then the files are renamed to trash, the trash is emptied, and the record is deleted. If a
  name cannot be moved (an overlay cannot rename a directory of its lower layer), everything moved is put back. A crash
  in between leaves files without a meta that the table proves to be verified. :func:`finish_interrupted` deletes them,
  except those that a later save of the same bytes now names.
* An emergency snapshot is deleted once the mirrors confirm a newer save that takes its place (docs/adr/0003), together
  with its copy in the persistent directory. So is a node's part of one of which the rest is gone for good.
* While the disk has no room for the next save, safe saves that the policy keeps go early (``core.retention``). The room
  is measured before each, after what the policy does not keep is gone.
* ``latest`` is moved to the newest save of the lineage before its target is deleted.
* A lock file allows only one rotation at a time per root.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError, LocalStorageFull, WaitTimeout
from ckptmirror.core.model import AttemptList, Meta, top_names
from ckptmirror.core.retention import (
    Retention,
    Room,
    RotationPlan,
    SaveStatus,
    next_save_bytes,
    plan_rotation,
    where_it_is,
)
from ckptmirror.core.tensor_lists import is_list
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, local_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, close_mirrors, open_mirrors
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.retention.durability import is_skipped, save_safety, why_not_safe, why_not_same
from ckptmirror.flow.retention.ownership import stray_in, why_not_ours
from ckptmirror.flow.save.commit import NAMES_LOCK_NAME, claimed_by_others, point_latest, stray_below
from ckptmirror.flow.save.emergency_files import delete_emergency, is_emergency, meta_paths
from ckptmirror.flow.save.persistent_dir import names_in, snapshots_in, why_perhaps_elsewhere
from ckptmirror.local import directories, files, trash
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.free_space import room_bytes
from ckptmirror.local.hang_guard import hang_guard
from ckptmirror.local.listing import Listing
from ckptmirror.local.lock import exclusive
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import SaveRow, UploadRecord, UploadsTable

__all__ = ["RotationReport", "finish_interrupted", "gather", "rotate", "rotate_root"]

_LOCK_WAIT_S = 600.0
_NAMES_WAIT_S = 60.0
_Result = TypeVar("_Result")
_log = logging.getLogger("ckptmirror.rotate")


@dataclass(frozen=True)
class RotationReport:
    """What a rotation did.

    Attributes:
        plan: The plan by policy and the table.
        deleted: Step and save id of each save that was deleted, also of those that went early.
        refused: Reason by save id, including the reasons found by asking the mirrors.
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
    """Collect the facts for the plan: every whole local save, and the snapshots in a persistent directory."""
    catalog = local_catalog(root).with_parts()
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
                size_bytes=meta.size_bytes,
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
    abandoned: Collection[str] = frozenset(),
    make_room: bool = False,
    in_use: Collection[str] = frozenset(),
) -> RotationReport:
    """Delete the saves that the plan names and the mirrors confirm, now, without waiting for uploads.

    Args:
        root: The local root.
        table: Its table.
        mirrors: Its mirrors.
        retention: The policy.
        attempts: The attempts that count; None: those that the root lists.
        bus: Receives an event for each save that was deleted or refused.
        dry_run: Delete nothing.
        snapshots: Delete emergency snapshots too. Only the running attempt does, after its claim.
        persistent_dir: The directory with copies of emergency snapshots.
        abandoned: Saves of which this disk has a part, and which are whole nowhere.
        make_room: Also delete saves early while the disk has no room for the next one. Only a running trainer does.
        in_use: Saves that a start is about to continue from.

    Raises:
        WaitTimeout: Another rotation of this root does not end.
    """
    with exclusive(root / names.ROTATE_LOCK_NAME, timeout_s=_LOCK_WAIT_S):
        if not dry_run:
            _finish(root, table, mirrors)
        copies = snapshots_in(persistent_dir) if persistent_dir is not None else {}
        if persistent_dir is not None and snapshots and not dry_run:
            _empty_trash_of(persistent_dir)
        statuses, metas = gather(root, table, mirrors, attempts, copies)
        statuses = [replace(one, in_use=one.save_id in in_use) for one in statuses]
        plan = plan_rotation(statuses, retention, abandoned=abandoned)
        rotation = _Rotation(
            root,
            table,
            mirrors,
            bus or events.EventBus(),
            statuses,
            metas,
            plan,
            copies,
            names_in(persistent_dir) if persistent_dir is not None else frozenset(),
            persistent_dir,
            snapshots,
            abandoned,
        )
        if not dry_run:
            rotation.delete_unwanted()
        if make_room and not dry_run:
            rotation.delete_early()
        return rotation.report()


@dataclass
class _Rotation:
    """One rotation, from its plan on; the caller holds the lock."""

    root: Path
    table: UploadsTable
    mirrors: Sequence[Mirror]
    bus: events.EventBus
    statuses: Sequence[SaveStatus]
    metas: Mapping[str, Meta]
    plan: RotationPlan
    copies: Mapping[str, Meta]
    kept: frozenset[str]
    persistent_dir: Path | None
    snapshots: bool
    abandoned: Collection[str]
    deleted: list[tuple[int, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refused |= self.plan.refuse
        self._absent = _required_and_absent(self.table, self.mirrors)

    def delete_unwanted(self) -> None:
        """Delete the saves that the policy does not keep."""
        for save_id, why in self.plan.delete.items():
            self._delete(save_id, why)

    def delete_early(self) -> None:
        """Delete saves that the policy keeps, while the disk has no room for the next save."""
        needed_bytes = next_save_bytes(self.statuses)
        safe = {one.save_id: where_it_is(one) for one in self.statuses}
        tried: list[str] = []
        went: list[str] = []
        room = Room(room_bytes(self.root), needed_bytes)
        while (save_id := self.plan.next_early(room, tried)) is not None:
            tried.append(save_id)
            why = f"the next save needs {room.needed_bytes} bytes, and {room.free_bytes} are free; {safe[save_id]}"
            if self._delete(save_id, why):
                went.append(f"{self.metas[save_id].step} ({why})")
            room = Room(room_bytes(self.root), needed_bytes)
        if went:
            _log.warning(
                "%s is short of space, so saves that the retention keeps were deleted early: step %s. Free space "
                "there, or lower keep_last.",
                self.root,
                ", ".join(went),
            )

    def report(self) -> RotationReport:
        """Tell what was refused, and return what the rotation did."""
        for save_id, reason in self.refused.items():
            meta = self.metas[save_id]
            if meta.partial:
                kinds = "+".join(meta.kinds)
                reason = (
                    f"{reason} (it is a staged copy of kind {kinds} alone, which is never sent: delete it yourself)"
                )
            self.bus.emit(events.RotationRefused(step=meta.step, save_id=save_id, kinds=meta.kinds, reason=reason))
        steps = {save_id: meta.step for save_id, meta in self.metas.items()}
        return RotationReport(self.plan, tuple(self.deleted), self.refused, steps)

    def _delete(self, save_id: str, why: str) -> bool:
        """Delete a save if the mirrors confirm it now; return whether it is gone."""
        meta, began = self.metas[save_id], time.monotonic()
        reason = self._why_not(save_id)
        if reason is None:
            reason = self._delete_pointed_at(meta)
        if reason is not None:
            self.refused[save_id] = reason
            return False
        self.deleted.append((meta.step, save_id))
        took_s = time.monotonic() - began
        self.bus.emit(events.SaveRotated(step=meta.step, save_id=save_id, reason=why, duration_s=took_s))
        return True

    def _why_not(self, save_id: str) -> str | None:
        """Return why a save of the plan cannot be deleted now; None if it can."""
        meta = self.metas[save_id]
        successor = self.metas[self.plan.successors.get(save_id, save_id)]
        touched = [why for home in self._homes(meta) if (why := self._why_not_ours(home, meta)) is not None]
        reason = self._absent or next(iter(touched), None) or _why_not_elsewhere(self.table, self.mirrors, successor)
        if reason is None and successor is not meta:
            reason = _why_gone(self.table, self.mirrors, successor)
        if reason is None and is_emergency(meta) and not self.snapshots:
            reason = "only the running trainer deletes an emergency snapshot: a start may be reading it"
        if reason is None and is_emergency(meta) and save_id in self.abandoned:
            reason = self._why_not_abandoned(meta)
        return reason

    def _why_not_abandoned(self, meta: Meta) -> str | None:
        """Say why a snapshot of which a start found only a part may be whole after all."""
        copy = self.copies.get(meta.save_id, meta)
        if len({one.rank for one in (*meta.artifacts, *copy.artifacts)}) == meta.world_size:
            return "it is an emergency snapshot of which parts were missing, and now all are here: is a mount back?"
        if self.root in self._homes(meta):
            return why_perhaps_elsewhere(self.root, meta.save_id, self.persistent_dir)
        return None

    def _homes(self, meta: Meta) -> list[Path]:
        """Return the directories that hold a save: the root and, for a snapshot, also the persistent directory."""
        copy = self.persistent_dir
        is_here = all((self.root / path).exists() for path in meta_paths(meta))
        is_there = meta.save_id in self.copies or (is_emergency(meta) and self.kept & set(top_names(meta.artifacts)))
        if copy is None or not is_there:
            return [self.root]
        return [copy, self.root] if is_here else [copy]

    def _why_not_ours(self, home: Path, meta: Meta) -> str | None:
        there = meta if home == self.root else self.copies.get(meta.save_id)  # it has the parts of all nodes

        def look() -> str | None:
            why = why_not_ours(home, there) if there is not None else stray_in(home, meta)
            if home != self.root and not any(Listing(home).is_dir(top) for top in top_names(meta.artifacts)):
                return None  # another node has deleted it, perhaps while it was looked at
            return why

        try:
            return self._at_home(home, look)
        except (CkptMirrorError, OSError) as error:
            return str(error)

    def _at_home(self, home: Path, call: Callable[[], _Result]) -> _Result:
        """Read or delete a save in its directory; a disk other than the root's may hang."""
        return call() if home == self.root else hang_guard(home).call(call)

    def _delete_pointed_at(self, meta: Meta) -> str | None:
        """Delete a save everywhere, without leaving ``latest`` dangling; return the reason if that is impossible."""
        root, newest = self.root, _newest(self.statuses, self.metas)
        try:
            if not is_emergency(meta):
                with contextlib.ExitStack() as held:
                    try:
                        held.enter_context(_not_staged(root, meta.step))
                    except WaitTimeout:
                        return "it is being staged into this directory"
                    return _delete(root, self.table, meta, newest)
            pointed = _point_latest_elsewhere(root, meta, newest)
            for home in self._homes(meta):  # no other snapshot gets its name, which has the second when it was taken
                self._at_home(home, partial(delete_emergency, home, meta))
            if not pointed:
                _point_latest_elsewhere(root, meta, newest)
        except (CkptMirrorError, OSError) as error:
            save_logger(_log, meta).error("step %d cannot be deleted: %s", meta.step, error)
            return f"it cannot be deleted: {error}"
        return None


def _empty_trash_of(persistent_dir: Path) -> None:
    """Finish a deletion there that a crash interrupted; if the directory fails, the next rotation tries again."""
    try:
        hang_guard(persistent_dir).call(lambda: empty_trash(persistent_dir))
    except (CkptMirrorError, OSError) as error:
        _log.debug("the trash of %s cannot be emptied: %s", persistent_dir, error)


def _required_and_absent(table: UploadsTable, mirrors: Sequence[Mirror]) -> str | None:
    """Return the reason if a mirror that the last successful start required is missing here; None otherwise."""
    here = {mirror.url for mirror in mirrors if mirror.required}
    absent = [row.url for row in table.mirrors() if row.required and row.url not in here]
    return f"{absent[0]} is required, and cannot be asked here" if absent else None


def _why_not_elsewhere(table: UploadsTable, mirrors: Sequence[Mirror], meta: Meta) -> str | None:
    """Ask the mirrors for this deletion, and say what of a save they lack; None if they have all of it."""
    part = None if meta.is_whole else names.part_name(meta.step, meta.save_id, meta.node + 1, meta.nodes)
    return why_not_same(table, mirrors, meta) or why_not_safe(table, mirrors, meta.save_id, part)


def _why_gone(table: UploadsTable, mirrors: Sequence[Mirror], successor: Meta) -> str | None:
    """Say why a save cannot take the place of another: a tombstone replaced it, or policy left it out; else None."""
    required = {mirror.url for mirror in mirrors if mirror.required}
    for there in table.standing(successor.save_id):
        if there.mirror in required and not (there.verified and there.committed):
            return f"step {successor.step} is no longer on {there.mirror}"
    return None


def _newest(statuses: Sequence[SaveStatus], metas: Mapping[str, Meta]) -> Meta | None:
    """Return the newest save of the lineage that ``latest`` may name."""
    current = [save for save in statuses if save.standing == "current" and save.kinds != ("emergency",)]
    newest = max(current, key=lambda save: (save.step, save.number), default=None)
    return metas[newest.save_id] if newest is not None else None


def _point_latest_elsewhere(root: Path, doomed: Meta, newest: Meta | None) -> bool:
    """Move ``latest`` off the doomed save; return False if a full disk has no room for a new link yet."""
    link = root / names.LATEST_NAME
    if not link.is_symlink() or link.readlink().parts[:1] not in [(name,) for name in top_names(doomed.artifacts)]:
        return True
    try:
        has_moved = newest is not None and newest.save_id != doomed.save_id and point_latest(root, newest)
    except LocalStorageFull as error:
        save_logger(_log, doomed).warning("%s still names step %d: %s", link, doomed.step, error)
        return False
    if not has_moved:
        _discard(root, link)
        directories.fsync_dir(root)
    return True


def _delete(root: Path, table: UploadsTable, meta: Meta, newest: Meta | None) -> str | None:
    """Move the meta, durably, then the files; then empty the trash, since the table's update may need its space.

    No save gets its names meanwhile. The meta is read again: the save may be gone, with another under its names.
    """
    meta_path = root / names.SaveName(meta.step, meta.tag).meta
    with exclusive(root / NAMES_LOCK_NAME, timeout_s=_NAMES_WAIT_S):
        try:
            found = meta_from_bytes(files.read_limited(meta_path, META_LIMIT_BYTES))
        except FileNotFoundError:
            return f"{meta_path.name} has disappeared: the next rotation checks the other files"
        if found.save_id == meta.save_id:
            if _has_more(root, found, meta):
                return (
                    "the rest of it was staged into this directory meanwhile: a start or a drain has to record it first"
                )
            pointed = _point_latest_elsewhere(root, meta, newest)
            with _put_back_on_failure(root) as moved:
                moved += _discard(root, meta_path)
                directories.fsync_dir(root)
                taken = _in_flight(table, meta.save_id) | claimed_by_others(root, meta.save_id)
                for name in top_names(meta.artifacts):
                    if name not in taken:
                        moved += _discard(root, root / name)
                directories.fsync_dir(root)
    if found.save_id != meta.save_id:
        table.forget_save(meta.save_id)  # it was gone before the other got its names, and the mirrors have it
        return f"it was removed meanwhile, and another save ({found.save_id[:8]}) has its names"
    empty_trash(root)
    table.forget_save(meta.save_id)
    if not pointed:
        _point_latest_elsewhere(root, meta, newest)
    return None


def _has_more(root: Path, found: Meta, asked: Meta) -> bool:
    """Whether a save has files here of which the mirrors were not asked; a list of tensors may be damaged."""
    more = {one.path for one in found.artifacts} - {one.path for one in asked.artifacts}
    return any((root / path).exists() for path in more if not is_list(path))


def _in_flight(table: UploadsTable, save_id: str) -> set[str]:
    """Return the names of other saves that are being committed: their files get names before their meta does."""
    records = [record for record in table.records() if record.save_id != save_id and not record.released]
    return {record.path.partition("/")[0] for record in records}


def _discard(root: Path, path: Path) -> list[tuple[Path, Path]]:
    """Move a name into the trash; return the old and the new path if it existed."""
    try:
        return [(path, trash.move_to_trash(root, path))]
    except FileNotFoundError:  # a person deleted it first
        return []


@contextlib.contextmanager
def _put_back_on_failure(root: Path) -> Iterator[list[tuple[Path, Path]]]:
    """Yield a list for the moved names. If the body fails, move them back, the last one first.

    So the meta, which was moved first, comes back last: a save is never visible without its files.
    """
    moved: list[tuple[Path, Path]] = []
    try:
        yield moved
    except (CkptMirrorError, OSError):
        try:
            for path, lies in reversed(moved):
                directories.fsync_dir(root)
                directories.rename_noreplace(lies, path, label="trash.put_back")
            directories.fsync_dir(root)
        except (CkptMirrorError, OSError) as error:
            _log.error("files that a rotation began to move stay in %s: %s", root / names.TRASH_DIR, error)
        raise


def finish_interrupted(root: Path, table: UploadsTable, mirrors: Sequence[Mirror]) -> list[str]:
    """Finish deletions that a crash interrupted; return the save ids.

    Such a save has no meta on disk any more, every record of it is settled on every required mirror, and the mirrors
    confirm it when asked again. Nothing is finished unless every required mirror is open here. A mirror that was added
    later has no record of the save, and is not asked: the deletion was decided without it.

    Raises:
        WaitTimeout: Another rotation of this root does not end.
    """
    with exclusive(root / names.ROTATE_LOCK_NAME, timeout_s=_LOCK_WAIT_S):
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
            with _not_staged(root, save.step):
                gone = _take_away(root, table, save)
        except WaitTimeout:
            continue  # the step is being staged, or a save is being committed: the next rotation tries again
        except (CkptMirrorError, OSError) as error:  # one save that cannot be deleted does not stop the others
            save_logger(_log, save).error("step %d is not fully deleted yet: %s", save.step, error)
            continue
        if gone:
            empty_trash(root)
            table.forget_save(save.save_id)
            finished.append(save.save_id)
    empty_trash(root)
    return finished


def _take_away(root: Path, table: UploadsTable, save: SaveRow) -> bool:
    """Move the files that an interrupted deletion left into the trash, except those that another save now names.

    Equal bytes do not show which save wrote them: a save in flight gets its names before its meta. But its records are
    durable before that, and it holds the lock that this function holds while it moves a name.
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
    directories.fsync_dir(root)
    return True


def _taken(root: Path, table: UploadsTable, save_id: str) -> set[str]:
    """Return the names directly below the root that another save's records or meta name."""
    in_table = {record.path.partition("/")[0] for record in table.records() if record.save_id != save_id}
    return in_table | claimed_by_others(root, save_id)


@contextlib.contextmanager
def _not_staged(root: Path, step: int) -> Iterator[None]:
    """Hold the lock of a stage of this step (``stage_save``), whose file goes with the save.

    Raises:
        WaitTimeout: The step is being staged.
    """
    path = root / names.CONTROL_DIR / f"stage_{names.SaveName(step).stem}.lock"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(LocalStorageFull):  # no room for a new file: then there was none, and nobody holds it
            held.enter_context(exclusive(path, timeout_s=0.0, keep_file=False))
        yield


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_still_ours(root: Path, name: str, records: Sequence[UploadRecord]) -> bool:
    """Whether all files under ``name`` have the recorded bytes, so that no other program put them there."""
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
        specs = [MirrorSpec(row.url, row.required) for row in table.mirrors()]
        mirrors = open_mirrors(specs, root, table, is_verb=True)
        try:
            return rotate(root, table, mirrors, retention, bus=bus, dry_run=dry_run)
        finally:
            close_mirrors(mirrors)
    finally:
        table.close()
