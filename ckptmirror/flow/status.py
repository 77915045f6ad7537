"""Status: how much training is not yet safe. It reads only this node's disk, and a mirror only if it is named.

Rules:
* Unsafe saves come first. A save without a record is not safe.
* It locks and changes nothing; a trainer may be running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.core.lifecycle import WAITING, RecordState
from ckptmirror.core.model import Kind
from ckptmirror.core.uncommitted import Uncommitted
from ckptmirror.flow.places.catalog import MetaCache, catalogs_on, local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import MirrorSpec, counting, counting_rows, opened_mirror
from ckptmirror.flow.places.select import is_left_behind, lineage_of, quarantined_in
from ckptmirror.flow.places.uncommitted import uncommitted_on
from ckptmirror.flow.retention.durability import count_lacking, durability, only_waiting, open_saves
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.flow.save.persistent_dir import copy_of, lost_snapshots, with_kept
from ckptmirror.flow.upload.workers import still_moving
from ckptmirror.local.status_file import is_writer_alive, read_status_file
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import UploadRecord
from ckptmirror.stores import normalise_url
from ckptmirror.stores.retrying import OnWait

__all__ = [
    "AwaitedSave",
    "SaveLine",
    "Status",
    "is_mirrored",
    "is_on_mirrors",
    "read_awaited",
    "read_status",
    "uploads_left",
]


@dataclass(frozen=True)
class SaveLine:
    """One local save.

    Attributes:
        standing: ``current``, ``replaced``, ``superseded`` or ``unknown``.
        safe: Whether it is verified and committed on every required mirror that can have it (False if there is no
            mirror).
        waiting: ``mirror: why`` for each required mirror that does not have it yet.
        without: ``mirror: why`` for each required mirror that does not get it: it has a tombstone of it, or the part of
            a node is lost.
        created_at_utc: When it was committed here, for people.
        quarantined: Why a start goes back past it: starts failed from it in a row. "": it is not quarantined.
        nodes: How many nodes wrote it.
    """

    step: int
    save_id: str
    kinds: tuple[Kind, ...]
    size_bytes: int
    standing: str
    safe: bool
    waiting: Mapping[str, str]
    created_at_utc: str = ""
    quarantined: str = ""
    nodes: int = 1
    without: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """The saves of a root, and which of them are not yet safe.

    Attributes:
        newest_step: The newest committed step of the lineage; None if there is none.
        newest_safe_step: The newest safe step; None if there is none.
        trainer: The last ``status.json`` of the trainer.
        trainer_alive: Whether the process that wrote it lives; None if there is none, or it is on another machine or in
            another container.
        problems: Files under the root that look like saves but are not whole.
        unsettled: Save id -> why it is not on every required mirror, for whole saves and for all that the table knows.
        emergency_step: The step of an emergency snapshot that is newer than all safe saves; it is never uploaded.
        emergency_copy: The persistent directory that has a whole copy of it, or, if it is not here, any of it.
        emergency_here: Whether it is on this disk. If that was full, it is in the persistent directory alone.
        emergency_whole: Whether one of the two has all of it. The parts of other ranks may be on other nodes.
        unasked: Mirrors that count, and have not yet confirmed that they still have what was verified there.
        skipped: Steps that the trainer did not save because the disk was full, oldest first; only the last ones.
        skipped_why: Why the last of them was skipped.
        awaited: ``step N: reason`` of each unsafe file that only waits for another node, or for a save of a newer
            attempt. Nothing here can send it.
        pushed: Mirrors that a person pushed to, beside the trainer's, each with how many saves of this disk it lacks.
        pushed_awaited: For each of them that lacks only saves of which nothing here can send more: why.
        optional: As ``pushed``, of all mirrors that are not required.
    """

    root: Path
    mirrors: tuple[tuple[str, bool], ...]
    newest_step: int | None
    newest_safe_step: int | None
    unsafe_files: int
    unsafe_bytes: int
    failed_files: int
    saves: tuple[SaveLine, ...]
    trainer: Mapping[str, Any]
    problems: Mapping[str, str]
    unsettled: Mapping[str, str]
    unasked: tuple[str, ...] = ()
    trainer_alive: bool | None = None
    emergency_step: int | None = None
    emergency_copy: Path | None = None
    emergency_here: bool = True
    emergency_whole: bool = True
    skipped: tuple[int, ...] = ()
    skipped_why: str = ""
    awaited: tuple[str, ...] = ()
    pushed: Mapping[str, int] = field(default_factory=dict)
    pushed_awaited: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, int] = field(default_factory=dict)

    def is_mirrored(self, save_id: str | None) -> bool:
        """Whether a save (all saves, if None) is on every mirror that counts. True if no mirror is configured.

        This knows only saves on this disk; :func:`is_mirrored` also reads the table's history.
        """
        if save_id is None or not self.mirrors:
            return not (self.unsettled or self.unasked)
        mirrored = {line.save_id for line in self.saves if line.kinds != ("emergency",)}
        return save_id in mirrored and save_id not in self.unsettled


@dataclass(frozen=True)
class AwaitedSave:
    """A save on a mirror that waits for nodes, and what this node has still to send of it.

    Attributes:
        mirror: The mirror's URL.
        found: What the mirror has of it.
        this_node: This node's number in that save; None if this disk has no part of it.
        unsent_files: How many files of this node's part its table has not verified there; its meta is one of them.
        unsent_bytes: Their bytes.
        is_queued: Whether the table has records for this mirror; if it has none, a drain sends nothing there.
    """

    mirror: str
    found: Uncommitted
    this_node: int | None = None
    unsent_files: int = 0
    unsent_bytes: int = 0
    is_queued: bool = True


def read_awaited(
    root: Path, mirrors: Sequence[str], state_dir: Path | None = None, on_wait: OnWait | None = None
) -> list[AwaitedSave]:
    """Return the saves on these mirrors that wait for nodes, and what this node lacks of them there.

    Raises:
        NoTable: ckptmirror has not saved here.
        StoreTemporary: A mirror does not answer.
    """
    awaited = []
    with open_known_table(root, state_dir, read_only=True) as table:
        parts = local_catalog(root).parts
        for url in dict.fromkeys(normalise_url(url) for url in mirrors):
            for found in uncommitted_on(url, on_wait):
                mine = next((one for one in parts.values() if one.save_id.startswith(found.save_id)), None)
                if mine is None:
                    awaited.append(AwaitedSave(url, found))
                    continue
                records = table.records(save_id=mine.save_id, mirror=url)
                unsent = [record.size_bytes or 0 for record in records if record.state in WAITING]
                if not records:
                    unsent = [0, *(artifact.digest.size_bytes for artifact in mine.artifacts)]
                awaited.append(AwaitedSave(url, found, mine.node, len(unsent), sum(unsent), is_queued=bool(records)))
    return awaited


def is_mirrored(
    root: Path,
    save_id: str | None,
    state_dir: Path | None = None,
    configured: Collection[str] | None = None,
    *,
    besides: Collection[str] = (),
) -> bool:
    """Whether a save (all saves, if None) is on every mirror that counts, or was when rotation deleted it here.

    Of the ``configured`` mirrors (None: all that the table knows), the required ones count; if none is, all do. Saves
    ``besides`` which all are meant are left out.

    Raises:
        NoTable: ckptmirror has not saved here.
    """
    with open_known_table(root, state_dir, read_only=True) as table:
        if not table.knows_mirrors():
            return False  # it is being rebuilt at this moment
        metas = local_catalog(root).with_parts().whole.values()
        rows = [row for row in table.mirrors() if configured is None or row.url in configured]
        if save_id is None:
            now = durability(table, metas, counting_rows(rows))
            return not now.unasked and all(one.save_id in besides for one in now.open)
        return not open_saves(table, metas, counting_rows(rows), [save_id])


def uploads_left(
    root: Path,
    save_id: str | None,
    state_dir: Path | None = None,
    configured: Collection[str] | None = None,
    *,
    besides: Collection[str] = (),
) -> tuple[int, int]:
    """Return how many files may still become verified by themselves, and how many failed for good.

    The arguments are those of :func:`is_mirrored`.

    Raises:
        NoTable: ckptmirror has not saved here.
    """
    with open_known_table(root, state_dir, read_only=True) as table:
        counts = counting_rows([row for row in table.mirrors() if configured is None or row.url in configured])
        records = table.records(save_id=save_id, state=RecordState.FAILED)
        failed = sum(record.mirror in counts and record.save_id not in besides for record in records)
        return still_moving(table, counts, save_id, besides=besides), failed


def is_on_mirrors(
    root: Path,
    save_id: str | None,
    specs: Sequence[MirrorSpec],
    *,
    besides: Collection[str] = (),
    cache: MetaCache | None = None,
) -> bool:
    """The same as :func:`is_mirrored` asked of the mirrors: for a host that mounts the root and has not its table.

    Metas in ``cache`` are not read again.

    Raises:
        NotAuthorised: A mirror does not accept the credentials.
    """
    wanted = {save_id}
    if save_id is None:
        here = local_catalog(root).with_parts()
        current = lineage_of(here).standing_by_save()
        wanted = {one for one in here.whole if current[one] == "current" and not is_emergency(here.whole[one])}
    for url in counting((spec.url, spec.required) for spec in specs):
        try:
            with opened_mirror(url) as mirror:
                there = mirror_catalog(mirror, with_attempts=False, cache=cache)
        except StoreTemporary:
            return False
        if not wanted - set(besides) <= there.whole.keys() | there.tombstones.keys():
            return False
    return True


def read_status(root: Path, state_dir: Path | None = None, *, mirrors: Sequence[str] = ()) -> Status:
    """Read the status of a root.

    Args:
        root: The root.
        state_dir: As the trainer has it.
        mirrors: URLs of mirrors to ask whether the run went on elsewhere, if its newest state here is a snapshot.

    Raises:
        NoTable: ckptmirror has not saved here.
    """
    with open_known_table(root, state_dir, read_only=True) as table:
        rows = table.mirrors()
        known = [(row.url, row.required) for row in rows]
        required = [url for url, is_required in known if is_required]
        records = table.records()
        found = local_catalog(root)
        catalog = found.with_parts(besides=lost_snapshots(root, found))
        now = durability(table, catalog.whole.values(), counting_rows(rows))
        lacking = {row.url: count_lacking(table, catalog.whole.values(), row.url) for row in rows}
        pushed = {row.url: lacking[row.url] for row in rows if row.pushed}
    gaps: dict[str, dict[str, str]] = {}
    for one in now.open:
        gaps.setdefault(one.save_id, {})[one.mirror] = one.reason
    everywhere = with_kept(root, catalog)
    standing = lineage_of(everywhere).standing_by_save()
    quarantined = quarantined_in(catalog, root)
    by_save: dict[str, list[UploadRecord]] = {}
    for record in records:
        by_save.setdefault(record.save_id, []).append(record)
    saves = []
    for meta in sorted(catalog.saves.values(), key=lambda meta: (meta.step, meta.attempt.number, meta.save_number)):
        waiting = _waiting(by_save.get(meta.save_id, []), required, gaps.get(meta.save_id, {}), now.unasked)
        if is_emergency(meta):
            waiting = dict.fromkeys(required, "an emergency snapshot is never uploaded")
        saves.append(
            SaveLine(
                step=meta.step,
                save_id=meta.save_id,
                kinds=meta.kinds,
                size_bytes=meta.size_bytes,
                standing=standing[meta.save_id],
                safe=bool(required) and not waiting,
                waiting=waiting,
                created_at_utc=meta.created_at_utc,
                quarantined=quarantined.get(meta.save_id, ""),
                nodes=meta.nodes,
                without=_without(by_save.get(meta.save_id, []), required),
            )
        )
    unsafe = [record for record in records if record.mirror in required and record.state in WAITING]
    current = [line for line in saves if line.standing == "current"]
    safe = max((line.step for line in current if line.safe), default=None)
    newest = [meta for meta in everywhere.saves.values() if standing[meta.save_id] == "current"]
    snapshots = [meta for meta in newest if is_emergency(meta) and (safe is None or meta.step > safe)]
    if snapshots:
        there = catalogs_on(mirrors)
        behind = {meta.save_id for meta in snapshots if is_left_behind(meta, everywhere, there)}
        newest = [meta for meta in newest if meta.save_id not in behind]
        snapshots = [meta for meta in snapshots if meta.save_id not in behind]
    snapshot = max(snapshots, key=lambda meta: meta.step, default=None)
    is_here = snapshot is None or snapshot.save_id in catalog.saves
    trainer = read_status_file(root)
    skipped = _skipped(trainer)
    return Status(
        root=root,
        mirrors=tuple(known),
        newest_step=max((meta.step for meta in newest), default=None),
        newest_safe_step=safe,
        unsafe_files=len(unsafe),
        unsafe_bytes=sum(record.size_bytes or 0 for record in unsafe),
        failed_files=sum(record.state is RecordState.FAILED for record in unsafe),
        saves=tuple(saves),
        trainer=trainer,
        trainer_alive=is_writer_alive(trainer),
        problems={name: str(why) for name, why in catalog.problems.items()},
        unsettled={one.save_id: f"{one.mirror}: {one.reason}" for one in now.open},
        unasked=tuple(url for url, _ in known if url in now.unasked),
        emergency_step=snapshot.step if snapshot is not None else None,
        emergency_copy=copy_of(root, snapshot.save_id, is_here=is_here) if snapshot is not None else None,
        emergency_here=is_here,
        emergency_whole=snapshot is None or snapshot.is_whole,
        skipped=tuple(step for step, _ in skipped),
        skipped_why=skipped[-1][1] if skipped else "",
        awaited=tuple(f"step {one.step}: {one.last_error}" for one in only_waiting(unsafe, required)),
        pushed=pushed,
        pushed_awaited={url: why for url in pushed if (why := _all_awaited(records, url, lacking[url]))},
        optional={url: count for url, count in lacking.items() if url not in required},
    )


def _all_awaited(records: Iterable[UploadRecord], url: str, lacking: int) -> str:
    """Return why a mirror lacks so many saves if nothing here can send any of them; else ""."""
    left = [record for record in records if record.mirror == url and record.state in WAITING]
    awaited = only_waiting(left, {url})
    is_all = len(awaited) == len(left) and len({one.save_id for one in awaited}) == lacking
    return f"step {awaited[0].step}: {awaited[0].last_error}" if awaited and is_all else ""


def _skipped(trainer: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return step and reason of each save that the trainer skipped. The file is not trusted: anyone can write it."""
    found = trainer.get("skipped")
    entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [(one["step"], str(one.get("reason"))) for one in entries if type(one.get("step")) is int]


def _without(records: list[UploadRecord], required: list[str]) -> dict[str, str]:
    """Say, for each required mirror that does not get a save, why."""
    of_metas = [record for record in records if record.role == "meta" and record.mirror in required]
    states = (RecordState.SKIPPED, RecordState.REMOVED)
    return {record.mirror: record.reason or record.state.value for record in of_metas if record.state in states}


def _waiting(
    records: list[UploadRecord], required: list[str], gaps: Mapping[str, str], unasked: Mapping[str, str]
) -> dict[str, str]:
    """Say, for each required mirror in ``gaps``, which files of the save wait for it, and why."""
    waiting = {}
    for url in required:
        mine = [record for record in records if record.mirror == url]
        open_ones = [record for record in mine if record.state in WAITING]
        if url in gaps and open_ones:
            worst = max(open_ones, key=lambda record: WAITING.index(record.state))
            error = f": {worst.last_error}" if worst.last_error else ""
            waiting[url] = (
                f"{len(open_ones)} of {len(mine)} files not verified ({worst.path} {worst.state.value}{error})"
            )
        elif url in gaps:
            waiting[url] = gaps[url] if mine else "not queued for upload yet"
        elif url in unasked:
            waiting[url] = unasked[url]
    return waiting
