"""Copies of emergency snapshots in ``persistent_dir``, a directory that outlives this machine.

Rules:
* A snapshot is durable on the local disk first. A failure to copy it is logged, and does not harm the snapshot.
* The copy has the same names and the same bytes. Each rank copies its own part, its meta last. So, like the snapshot,
  the copy is whole when the metas of all ranks are there.
* Every byte is checked: the crc32c of the copied bytes must be the meta's, and in a signed run their SHA-256.
* For a start it is one more place, after the disk and the mirrors, and a snapshot is copied back from there when its
  turn comes: of several nodes, to each the parts of its own ranks. Its metas name their run and attempt, as the root's
  own metas do. A directory that cannot be read now may hold the newest state.
* Only emergency snapshots are read. Other files in the directory are left alone.
* A directory whose file system hangs counts as one that cannot be read now. It never blocks, least of all in an
  emergency.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.errors import (
    CkptMirrorError,
    ConfigError,
    DestinationOccupied,
    IntegrityError,
    NameTaken,
    StoreHangs,
    Temporary,
)
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.core.problems import Problem
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES, Catalog, local_catalog
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.save.commit import stray_below
from ckptmirror.flow.save.emergency_files import (
    another_snapshot_in,
    is_emergency,
    meta_paths,
    note_path,
    read_note,
    write_note,
)
from ckptmirror.local import checksummed_writer, directories, files, trash
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.daemon_pool import run_jobs
from ckptmirror.local.direct_io import kept_buffer
from ckptmirror.local.file_systems import refuse_fuse
from ckptmirror.local.hang_guard import beat, hang_guard
from ckptmirror.local.listing import Fault, Listing, is_not_readable_now
from ckptmirror.local.own_files import make_own_dir
from ckptmirror.local.root_id import read_root_id
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.status_file import read_status_file

__all__ = [
    "bring_snapshot",
    "copy_of",
    "keep_copy",
    "lost_snapshots",
    "names_in",
    "open_persistent",
    "persistent_catalog",
    "snapshots_in",
    "why_perhaps_elsewhere",
    "with_kept",
]

_WORKERS = 4
_EMERGENCY_S = 5.0  # the grace period runs
_EMERGENCY_BYTES_PER_S = 100e6  # an fsync of the copy that takes no longer than this is not a hang

_log = logging.getLogger("ckptmirror.emergency")


def open_persistent(root: Path, directory: Path | None) -> bool:
    """Create the directory, if one is configured, and return whether it was new.

    Raises:
        ConfigError: It is the root, or one is inside the other; it is on a FUSE file system; or its parent is missing.
        LocalStorageUnwritable: It cannot be created.
    """
    if directory is None:
        return False
    try:
        return hang_guard(directory).look(lambda: _open(root, directory))
    except StoreHangs as error:  # the start reads it again
        _log.error("%s", error)
        return False


def _open(root: Path, directory: Path) -> bool:
    here, there = root.resolve(), directory.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ConfigError(
            f"persistent_dir {directory} and root {root} are the same directory, or one is inside the other.",
            hint="Give a directory on a disk that outlives this machine, one for each run.",
        )
    refuse_fuse(directory, what="persistent_dir")
    is_new = not directory.exists()
    if is_new and not there.parent.is_dir():  # a mirror beside it tells by the parent that nothing is mounted
        raise ConfigError(
            f"persistent_dir {directory} cannot be created: there is no {there.parent}.",
            hint=f"Mount its file system; if it is a new place, run `mkdir -p {quote(str(there.parent))}` first.",
        )
    directories.make_dirs(directory)
    if directory.stat().st_dev == root.stat().st_dev:
        _log.warning(
            "persistent_dir %s is on the same disk as root %s and would be lost with it: is it mounted?", there, here
        )
    return is_new


def keep_copy(root: Path, name: str, meta: Meta, rank: int, directory: Path) -> None:
    """Copy a rank's part of the snapshot ``name``, which is already durable in ``root``. A failure is only logged.

    Args:
        root: The local root.
        name: The snapshot's directory.
        meta: The rank's own meta, which names its files.
        rank: The rank whose part is copied.
        directory: The persistent directory.
    """
    guard = hang_guard(directory)
    final = directory / name / names.emergency_meta_name(rank)
    try:
        if guard.call(lambda: os.path.lexists(final), limit_s=_EMERGENCY_S):  # an earlier call for the same step did it
            return
        guard.call(lambda: make_own_dir(directory / name), limit_s=_EMERGENCY_S)
        for artifact in meta.artifacts:
            copy = partial(_copy, root, directory / artifact.path, artifact, meta)
            guard.call(copy, limit_s=_EMERGENCY_S + artifact.digest.size_bytes / _EMERGENCY_BYTES_PER_S)
        write = partial(files.write_bytes, final, meta_to_bytes(meta), save_id=meta.save_id)
        guard.call(write, limit_s=_EMERGENCY_S)
    except (CkptMirrorError, OSError) as error:
        save_logger(_log, meta, rank=rank).error(
            "the emergency snapshot of step %d is only on this disk; it has no whole copy in %s: %s",
            meta.step,
            directory,
            error,
        )


def snapshots_in(directory: Path) -> dict[str, Meta]:
    """Return what a persistent directory has of snapshots, whole or in part, by save id; none if it cannot be read."""
    found = persistent_catalog(directory)
    return {**found.saves, **found.parts}


def names_in(directory: Path) -> frozenset[str]:
    """Return what a persistent directory holds, by name; nothing if it cannot be read."""
    try:
        return frozenset(hang_guard(directory).call(Listing(directory).names))
    except (CkptMirrorError, OSError):
        return frozenset()


def copy_of(root: Path, save_id: str, *, is_here: bool) -> Path | None:
    """Return the persistent directory that has a copy of a snapshot of a root; None if none is known.

    Args:
        root: The root.
        save_id: The snapshot's.
        is_here: Whether the root has any of it. Then only a whole copy counts.
    """
    try:
        directory = read_note(note_path(root, save_id)).persistent_dir
    except (FileNotFoundError, ValueError, CkptMirrorError, OSError):
        directory = _last_used(root)
    if directory is None:
        return None
    found = persistent_catalog(directory)
    has_it = save_id in found.saves or (not is_here and save_id in found.parts)
    return directory if has_it else None


def _last_used(root: Path) -> Path | None:
    """Return the persistent directory of the last trainer, if it had one."""
    directory = read_status_file(root).get("persistent_dir")
    return Path(directory) if isinstance(directory, str) else None


def with_kept(root: Path, here: Catalog) -> Catalog:
    """Return what a root has, parts too, and what only the last trainer's persistent directory has of its snapshots.

    A full disk sends a snapshot there alone. If the directory cannot be read, nothing is added.
    """
    directory = _last_used(root)
    if directory is None or here.attempts is None:
        return here
    run_id = here.attempts.run_id
    kept = {save_id: meta for save_id, meta in snapshots_in(directory).items() if meta.run_id == run_id}
    absent = kept.keys() - here.saves.keys() - _torn_alone(root, here, kept.values()).keys()
    more = {save_id: meta for save_id, meta in kept.items() if meta.is_whole or save_id in absent}
    whole = {save_id: meta for save_id, meta in here.saves.items() if meta.is_whole}
    return replace(here, saves={**here.saves, **more, **whole})


def lost_snapshots(root: Path, here: Catalog) -> frozenset[str]:
    """Return the snapshots that nothing can make whole: this root's node took them alone, and a rank left nothing.

    That is neither here nor in the last trainer's persistent directory. If that cannot be read, none is lost.
    """
    torn, directory = _torn_alone(root, here, [*here.saves.values(), *here.parts.values()]), _last_used(root)
    kept = persistent_catalog(directory) if torn and directory is not None else Catalog("", None, {})
    if any(problem.hindrance for problem in kept.problems.values()):
        return frozenset()
    there = {**kept.saves, **kept.parts}

    def is_lost(meta: Meta) -> bool:
        ranks = {one.rank for one in (*meta.artifacts, *there.get(meta.save_id, meta).artifacts)}
        return len(ranks) < meta.world_size

    return frozenset(save_id for save_id, meta in torn.items() if is_lost(meta))


def _torn_alone(root: Path, here: Catalog, metas: Iterable[Meta]) -> dict[str, Meta]:
    """Return the snapshots among these that are not whole, and that this root's node took alone, by save id."""
    root_id = read_root_id(root).id
    attempts = here.attempts.attempts if here.attempts is not None and root_id else ()
    own = {one.id for one in attempts if one.root == root_id}
    return {
        meta.save_id: meta
        for meta in metas
        if is_emergency(meta) and not meta.is_whole and meta.nodes == 1 and meta.attempt.id in own
    }


def why_perhaps_elsewhere(root: Path, save_id: str, persistent_dir: Path | None) -> str | None:
    """Say why parts of a snapshot may be where this start did not look; None: they are not."""
    try:
        noted = read_note(note_path(root, save_id)).persistent_dir
    except (FileNotFoundError, ValueError, CkptMirrorError, OSError) as error:
        return f"other ranks' parts may be in a persistent_dir, and the note that names it cannot be read ({error})"
    if noted in (None, persistent_dir):
        return None
    return f"other ranks' parts may be in {noted}, which was its persistent_dir"


def persistent_catalog(directory: Path, *, patience_s: float = 0.0) -> Catalog:
    """List the snapshots in a persistent directory, and nothing else in it.

    A snapshot that cannot be read is among the problems, and so is the directory itself if it cannot be read: it may
    hold the newest state of the run. So is a copy that was not finished, and has no meta.

    Args:
        directory: The persistent directory.
        patience_s: How long a start waits for a file system that hangs, in seconds.
    """
    try:
        found = hang_guard(directory).ask_patiently(lambda: local_catalog(directory), patience_s)
    except (CkptMirrorError, OSError) as error:
        problem = Problem(f"it cannot be listed: {error}", kinds=("emergency",), hindrance="unreadable")
        return Catalog(str(directory), None, {}, {str(directory): problem})
    saves = {save_id: meta for save_id, meta in found.saves.items() if is_emergency(meta)}
    problems = {name: problem for name, problem in found.problems.items() if problem.kinds == ("emergency",)}
    for name in found.others:
        parsed = names.parse_name(name)
        is_told = any(f"{name}/" in one for one in problems)  # of a meta in it
        if parsed is not None and parsed.role == "emergency" and not is_told:
            why = "it has no rank's meta, so the copy was not finished"
            problems[str(directory / name)] = Problem(why, parsed.step, kinds=("emergency",))
    parts = {save_id: meta for save_id, meta in found.parts.items() if is_emergency(meta)}
    return Catalog(str(directory), None, saves, problems, torn=found.torn, parts=parts, damaged=found.damaged)


def bring_snapshot(root: Path, directory: Path, meta: Meta, ranks: Collection[int] | None = None) -> str:
    """Copy what the root lacks of a snapshot, and verify it. It mends a broken one of its name.

    Parts of it that the root has stay where they are, unless a whole one is brought in their place: they may be whole
    nowhere else, and what cannot be read now may be whole.

    Args:
        root: The local root.
        directory: The persistent directory.
        meta: The whole snapshot; the directory may lack what disks have of it.
        ranks: The ranks whose parts are brought, as far as the copy has them as they were saved: another node may have
            the others. None: all, or it is an error.

    Returns:
        Why a part of one of ``ranks`` was not brought; "" if all were.

    Raises:
        IntegrityError: The copy does not have the bytes that were saved.
        DestinationOccupied: A file that is not part of the snapshot is in the broken one's directory.
        LocalStorageFull: The root's disk is full.
        Temporary: It cannot be read now.
    """
    name = meta_paths(meta)[0].partition("/")[0]
    if os.path.lexists(root / name) and (stray := _stray(root, name, meta)) is not None:
        raise DestinationOccupied(
            f"{root / name} is broken and has a whole copy in {directory}, but a file that is not part of it is in the "
            f"way: {stray}.",
            hint=f"Move it out of {root / name}, and start again.",
        )
    kept, unreadable = _whole_parts(root, meta)
    if ranks is not None and kept.issuperset(ranks):
        return ""
    wanted = {one.rank for one in meta.artifacts if ranks is None or one.rank in ranks} - kept
    brought = replace(meta, artifacts=tuple(one for one in meta.artifacts if one.rank in wanted))
    temporary = root / names.tmp_name(name, meta.save_id)
    if os.path.lexists(temporary):  # an earlier start stopped here
        trash.move_to_trash(root, temporary)
        empty_trash(root)
    make_own_dir(temporary)
    guard = hang_guard(directory)
    metas: dict[str, bytes] = {}
    broken: dict[int | None, str] = {}

    def meta_of(path: str, one: Artifact) -> bytes:
        try:
            return guard.call(partial(_meta_of, directory / path, meta, one))
        except (IntegrityError, FileNotFoundError) as error:
            if not is_not_readable_now(error.__cause__):
                with contextlib.suppress(IntegrityError, OSError):
                    return _meta_of(root / path, meta, one)  # of what is damaged here
            raise

    def bring(one: Artifact) -> None:
        """Bring a file of a rank, and the rank's meta."""
        [path] = meta_paths(replace(meta, artifacts=(one,)))
        try:
            try:
                metas[path] = meta_of(path, one)
                copy = partial(_copy, directory, temporary / Path(one.path).name, one, meta)
                guard.call(copy, size_bytes=one.digest.size_bytes)
            except FileNotFoundError as error:
                if not guard.call((directory / name).is_dir):
                    raise
                raise IntegrityError(f"{directory / name} lacks files of rank {one.rank}.") from error
        except IntegrityError as error:
            if one.rank in unreadable:
                raise _cannot_be_read(root / one.path, unreadable[one.rank]) from error
            if ranks is None or is_not_readable_now(error.__cause__):
                raise
            save_logger(_log, meta, rank=one.rank).warning("step %d: not copied back: %s", meta.step, error)
            broken[one.rank] = str(error)

    try:
        run_jobs(brought.artifacts, bring, name="ckptmirror-bring", workers=_WORKERS)
        for one in brought.artifacts:
            if one.rank in broken:
                with contextlib.suppress(FileNotFoundError):
                    trash.move_to_trash(root, temporary / Path(one.path).name)
        brought = replace(brought, artifacts=tuple(one for one in brought.artifacts if one.rank not in broken))
        for path in meta_paths(brought):
            files.write_bytes(temporary / Path(path).name, metas[path], save_id=meta.save_id)
    except (CkptMirrorError, OSError) as error:
        with contextlib.suppress(CkptMirrorError, OSError):  # what came of it takes room
            trash.move_to_trash(root, temporary)
            empty_trash(root)
        if isinstance(error, OSError) or (isinstance(error, IntegrityError) and is_not_readable_now(error.__cause__)):
            raise _cannot_be_read(directory / name, str(error)) from error
        raise
    why = next(iter(broken.values()), "")
    if not brought.artifacts:
        trash.move_to_trash(root, temporary)
        empty_trash(root)
        return why
    _put_in_place(root / name, temporary, brought)
    with contextlib.suppress(NameTaken):  # the snapshot was taken on this disk, so the note exists
        write_note(root, meta.save_id, name, directory)
    empty_trash(root)
    save_logger(_log, meta).info("the emergency snapshot of step %d was copied back from %s", meta.step, directory)
    return why


def _meta_of(path: Path, meta: Meta, artifact: Artifact) -> bytes:
    """Read a rank's meta, and compare what it says of a file with the meta of the whole snapshot.

    Raises:
        IntegrityError: It is damaged, not signed, or that of another snapshot.
    """
    data = files.read_limited(path, META_LIMIT_BYTES)
    found = meta_from_bytes(data)
    digests = [one.digest for one in found.artifacts if one.path == artifact.path]
    if found.save_id != meta.save_id or not (digests and digests[0].agrees_with(artifact.digest)):
        raise IntegrityError(f"{path} is not the meta of this snapshot.")
    return data


def _cannot_be_read(path: Path, why: str) -> Temporary:
    return Temporary(
        f"{path} cannot be read now: {why}", hint="Make it readable, or go back to an older save with policy=<step>."
    )


def _put_in_place(final: Path, temporary: Path, brought: Meta) -> None:
    """Give what was brought its name: file by file, where there is something of the snapshot.

    So what else is there stays, also if the process dies.
    """
    root = final.parent
    if final.is_symlink() or not final.is_dir():
        if os.path.lexists(final):
            trash.move_to_trash(root, final)
        directories.publish_dir(temporary, final)
        return
    for path in _paths(brought):
        with contextlib.suppress(FileNotFoundError):
            trash.move_to_trash(root, root / path)
    for path in reversed(_paths(brought)):
        directories.rename_noreplace(temporary / Path(path).name, root / path, label="snapshot.publish")
    directories.fsync_dir(final)
    trash.move_to_trash(root, temporary)


def _paths(meta: Meta) -> list[str]:
    """Return the paths of the parts of a snapshot, their metas first."""
    return [*meta_paths(meta), *(one.path for one in meta.artifacts)]


def _whole_parts(root: Path, meta: Meta) -> tuple[frozenset[int], dict[int | None, str]]:
    """Return the ranks whose parts of a snapshot, with their metas, are in the root as they were saved.

    And by rank, why a part cannot be read now.
    """
    listing = Listing(root)
    catalog = local_catalog(root, with_attempts=False)
    named = {one.path for local in catalog.metas() if local.save_id == meta.save_id for one in local.artifacts}
    lost: list[int | None] = []
    unreadable: dict[int | None, str] = {}

    def check(one: Artifact) -> None:
        fault = listing.fault_of(one.path, one.digest.size_bytes)
        if one.path in named and fault is None:
            try:
                verify_file(root / one.path, one.digest)
            except FileNotFoundError:
                pass
            except IntegrityError as error:
                fault = Fault(str(error), is_not_readable_now(error.__cause__))
            else:
                return
        if fault is not None and fault.unreadable:
            unreadable[one.rank] = fault.why
        lost.append(one.rank)

    run_jobs(meta.artifacts, check, name="ckptmirror-bring", workers=_WORKERS)
    whole = frozenset(one.rank for one in meta.artifacts if one.rank is not None and one.rank not in lost)
    return whole, unreadable


def _stray(root: Path, name: str, meta: Meta) -> str | None:
    """Name a file in a snapshot's directory that is not part of the snapshot; None if there is none."""
    ours = {*meta_paths(meta), *(artifact.path for artifact in meta.artifacts)}
    return another_snapshot_in(root, meta) or stray_below(root, [name], ours)


def _copy(place: Path, target: Path, artifact: Artifact, meta: Meta) -> None:
    """Copy a file from a place. It gets its name only if every byte is what was saved."""
    with (
        kept_buffer() as buffer,
        files.FileSource(place, artifact.path) as read,
        checksummed_writer.ArtifactWriter(target, meta.save_id) as writer,
    ):
        while count := read.read_into(writer.tell(), buffer):
            writer.write(buffer[:count])
            beat()
        found = writer.seal()
        beat()
        if (found.size_bytes, found.crc32c) != (artifact.digest.size_bytes, artifact.digest.crc32c):
            raise IntegrityError(
                f"{read.path} has crc32c {found.crc32c:08x} over {found.size_bytes} bytes, but "
                f"{artifact.digest.crc32c:08x} over {artifact.digest.size_bytes} bytes was saved."
            )
        if found.hashes and artifact.digest.hashes and found.hashes != artifact.digest.hashes:
            raise IntegrityError(f"{read.path}: its crc32c is right, and its SHA-256 is not: somebody has changed it.")
        writer.publish()
