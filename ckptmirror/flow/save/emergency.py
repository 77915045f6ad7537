"""The emergency snapshot: each rank writes its part by itself, to local disk, within the grace period.

Rules:
* There are no collectives: the other ranks may be gone. What ranks must share follows from what they already know (the
  save id is a digest of attempt, number and step), or the file system decides it (the first rank's directory name
  wins).
* A rank writes its files first and its meta last. The snapshot is whole when the metas of all ranks are there.
* It goes to local disk first, and is never uploaded to a mirror. With ``persistent_dir``, each rank then copies its
  part there.
* If the disk is full, this rank removes what it wrote. It tries once more when the save in flight is over, which may
  have freed space. If that fails too, or the disk is read-only or broken, only ``persistent_dir`` gets the snapshot.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.errors import (
    CkptMirrorError,
    IntegrityError,
    LocalStorageFull,
    LocalStorageUnwritable,
    NameTaken,
    WaitTimeout,
)
from ckptmirror.core.model import Attempt, Meta
from ckptmirror.core.name_rules import marked
from ckptmirror.core.plain_values import plain_values
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.save.emergency_files import note_path, read_note, write_note
from ckptmirror.flow.save.handle import SaveHandle
from ckptmirror.flow.save.persistent_dir import keep_copy
from ckptmirror.local import directories, files, trash
from ckptmirror.local.own_files import make_own_dir
from ckptmirror.local.save_logger import save_logger

if TYPE_CHECKING:
    from ckptmirror.formats.train_state import TrainState
    from ckptmirror.ranks.base import Ranks

__all__ = ["emergency_save_id", "save_emergency"]

_IN_FLIGHT_WAIT_S = 15.0  # the grace period runs
_DISK_FAILURES = (LocalStorageFull, LocalStorageUnwritable, IntegrityError)  # full; read-only or lost; broken
_log = logging.getLogger("ckptmirror.emergency")


def emergency_save_id(attempt: Attempt, number: int, step: int) -> str:
    """Return the save id, which every rank computes alike: 32 hex digits of a SHA-256."""
    text = f"emergency {attempt.id} {number} {step}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def save_emergency(
    root: Path,
    state: TrainState,
    *,
    run_id: str,
    attempt: Attempt,
    number: int,
    step: int,
    ranks: Ranks,
    bus: events.EventBus,
    persistent_dir: Path | None = None,
    apart: bool = False,
    stage: int | None = None,
    renamed: str = "",
    in_flight: SaveHandle | None = None,
) -> Path:
    """Write this rank's part of the emergency snapshot, durable on return, and return its directory.

    Args:
        ranks: All ranks; they are not talked to.
        persistent_dir: The directory for a copy, if any; a failure to copy is only logged.
        apart: Whether ranks hold different values under one name, so that each writes its own.
        stage: This rank's stage.
        renamed: The mark of the ``rename`` that the attempt began with.
        in_flight: A save that is being written while the snapshot is taken.

    Raises:
        LocalStorageFull: The disk is full; earlier saves are untouched.
        LocalStorageUnwritable: It is read-only, or gone.
        IntegrityError: It reported an I/O error.
    """
    started = time.monotonic()
    rank = ranks.rank
    save_id = emergency_save_id(attempt, number, step)
    plan = Meta(
        run_id=run_id,
        attempt=attempt,
        step=step,
        save_id=save_id,
        save_number=number,
        kinds=("emergency",),
        world_size=ranks.world_size,
        nodes=ranks.nodes,
        node=ranks.node,
        artifacts=(),
        training_config=plain_values(state.training_config or {}),
        architecture_hash=marked(None, renamed),
        created_at_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    home = root
    try:
        try:
            name, meta = _write(root, home, state, plan, rank, persistent_dir, apart=apart, stage=stage)
        except LocalStorageFull:
            if in_flight is None:
                raise
            with contextlib.suppress(WaitTimeout):
                in_flight.wait_over(_IN_FLIGHT_WAIT_S)
            name, meta = _write(root, home, state, plan, rank, persistent_dir, apart=apart, stage=stage)
    except _DISK_FAILURES as error:
        if persistent_dir is None:
            raise
        save_logger(_log, plan, rank=rank).error(
            "the emergency snapshot of step %d goes only to %s: %s", step, persistent_dir, error
        )
        home = persistent_dir
        name, meta = _write(root, home, state, plan, rank, persistent_dir, apart=apart, stage=stage)
    directory = home / name
    if home == root and all((directory / names.emergency_meta_name(other)).exists() for other in ranks.node_ranks):
        try:
            directories.replace_link(root / names.LATEST_NAME, name)
        except CkptMirrorError as error:  # only a hint for people: the snapshot is durable without it
            save_logger(_log, meta, rank=rank).warning(
                "the emergency snapshot of step %d is durable, but latest does not name it: %s", step, error
            )
    bus.emit(
        events.EmergencySaved(
            step=step,
            rank=rank,
            save_id=save_id,
            size_bytes=meta.size_bytes,
            place=str(home),
            duration_s=time.monotonic() - started,
        )
    )
    if persistent_dir is not None and home == root:
        keep_copy(root, name, meta, rank, persistent_dir)
    return directory


def _write(
    root: Path,
    home: Path,
    state: TrainState,
    plan: Meta,
    rank: int,
    persistent_dir: Path | None,
    *,
    apart: bool,
    stage: int | None,
) -> tuple[str, Meta]:
    """Write this rank's files below ``home`` and its meta last. If the disk is full or fails, remove all of it."""
    from ckptmirror.formats.emergency import write_emergency

    name = _agreed_name(root, plan, persistent_dir)
    parsed = names.parse_name(name)
    assert parsed is not None
    directory = home / name
    make_own_dir(directory)
    with contextlib.suppress(FileNotFoundError):  # an earlier call for the same step wrote it
        there = meta_from_bytes(files.read_limited(directory / names.emergency_meta_name(rank), META_LIMIT_BYTES))
        if there.save_id == plan.save_id:
            return name, there
    try:
        artifacts = write_emergency(
            state,
            directory,
            save_id=plan.save_id,
            rank=rank,
            world_size=plan.world_size,
            step=plan.step,
            apart=apart,
            stage=stage,
        )
        meta = replace(plan, artifacts=tuple(artifacts), tag=parsed.tag)
        files.write_bytes(directory / names.emergency_meta_name(rank), meta_to_bytes(meta), save_id=plan.save_id)
    except _DISK_FAILURES:
        try:
            for mine in names.emergency_files(rank):
                with contextlib.suppress(FileNotFoundError):
                    trash.move_to_trash(home, directory / mine)
            empty_trash(home)
        except (CkptMirrorError, OSError) as error:  # the caller must hear of the first one: it may have another disk
            save_logger(_log, plan, rank=rank).error("what was written to %s stays there: %s", directory, error)
        if plan.world_size == 1:  # else another rank may be about to write there
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    return name, meta


def _agreed_name(root: Path, plan: Meta, persistent_dir: Path | None) -> str:
    """Let the first rank of the node name the directory; the others read the name.

    Where no rank can note a name, and on several nodes, they use one that each computes alike, without a time. On
    several nodes the note only says where the copies are.
    """
    alike = names.emergency_dir_name(plan.step, names.NO_TIME, plan.save_id[:8])
    if plan.nodes > 1:
        with contextlib.suppress(NameTaken, *_DISK_FAILURES):
            write_note(root, plan.save_id, alike, persistent_dir)
        return alike
    if os.path.lexists(root / alike):
        return alike
    name = names.emergency_dir_name(plan.step, _utc_second())
    if os.path.lexists(root / name):  # another snapshot of the same second has it
        name = names.emergency_dir_name(plan.step, _utc_second(), plan.save_id[:8])
    try:
        write_note(root, plan.save_id, name, persistent_dir)
    except (NameTaken, *_DISK_FAILURES):
        return _noted_name(root, plan) or (name if plan.world_size == 1 else alike)
    return name


def _noted_name(root: Path, plan: Meta) -> str | None:
    """Return the directory that another rank, or an earlier try, has noted; None if the note is not one of ours."""
    try:
        name = read_note(note_path(root, plan.save_id)).directory
    except (ValueError, CkptMirrorError, OSError):
        return None
    parsed = names.parse_name(name)
    return name if parsed is not None and parsed.role == "emergency" and parsed.step == plan.step else None


def _utc_second() -> str:
    """Return the current time as a snapshot's name writes it."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
