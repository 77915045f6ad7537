"""The emergency snapshot: every rank by itself, to local disk, within the grace period.

Rules:
* No collective: a rank may be alone by now. What ranks must share follows from what they know already (the save id is a
  digest of attempt, number and step) or is settled by the file system (the first rank's directory name wins).
* A rank's files are written first, its meta last; the snapshot is whole when the metas of all ranks are there.
* It goes to local disk first, and no mirror gets it; with ``persistent_dir`` each rank then copies its part there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core import events, names
from ckptmirror.core.codec import meta_to_bytes, plain_values
from ckptmirror.core.errors import CkptMirrorError, NameTaken
from ckptmirror.core.model import Attempt, Meta
from ckptmirror.flow.save.emergency_files import note_path, read_note, write_note
from ckptmirror.flow.save.persistent_dir import keep_copy
from ckptmirror.local import files
from ckptmirror.local.saying import saying

if TYPE_CHECKING:
    from ckptmirror.formats.train_state import TrainState

__all__ = ["emergency_save_id", "save_emergency"]

_log = logging.getLogger("ckptmirror.emergency")


def emergency_save_id(attempt: Attempt, number: int, step: int) -> str:
    """Return the save id that every rank computes alike: 32 hex digits of a SHA-256."""
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
    rank: int,
    world_size: int,
    bus: events.EventBus,
    persistent_dir: Path | None = None,
) -> Path:
    """Write this rank's part of the emergency snapshot, durable on return; give its directory.

    Args:
        persistent_dir: Where a copy goes, if anywhere; that it cannot go there is only logged.

    Raises:
        LocalStorageFull: There is no room; earlier saves are untouched.
    """
    from ckptmirror.formats.emergency import write_emergency

    started = time.monotonic()
    save_id = emergency_save_id(attempt, number, step)
    name = _agreed_name(root, save_id, step, persistent_dir)
    parsed = names.parse_name(name)
    assert parsed is not None
    directory = root / name
    files.make_dirs(directory)
    artifacts = tuple(write_emergency(state, directory, save_id=save_id, rank=rank, world_size=world_size, step=step))
    meta = Meta(
        run_id=run_id,
        attempt=attempt,
        step=step,
        save_id=save_id,
        save_number=number,
        kinds=("emergency",),
        world_size=world_size,
        nodes=1,
        node=0,
        artifacts=artifacts,
        tag=parsed.tag,
        training_config=plain_values(state.training_config or {}),
        created_at_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    files.write_bytes(directory / names.emergency_meta_name(rank), meta_to_bytes(meta), save_id=save_id)
    if all((directory / names.emergency_meta_name(other)).exists() for other in range(world_size)):
        try:
            files.replace_link(root / names.LATEST_NAME, directory.name)
        except CkptMirrorError as error:  # a hint for people: the snapshot is durable, whatever stands in the way
            saying(_log, meta, rank=rank).warning(
                "the emergency snapshot of step %d is durable, but latest does not name it: %s", step, error
            )
    bus.emit(
        events.EmergencySaved(
            step=step,
            rank=rank,
            save_id=save_id,
            size_bytes=sum(a.digest.size_bytes for a in artifacts),
            duration_s=time.monotonic() - started,
        )
    )
    if persistent_dir is not None:
        keep_copy(root, name, meta, rank, persistent_dir)
    return directory


def _agreed_name(root: Path, save_id: str, step: int, persistent_dir: Path | None) -> str:
    """Let the first rank of the node name the directory; the others read the name."""
    name = names.emergency_dir_name(step, datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))
    if os.path.lexists(root / name):  # of another snapshot in the same second
        name = names.emergency_dir_name(step, datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), save_id[:8])
    try:
        write_note(root, save_id, name, persistent_dir)
    except NameTaken:
        name = read_note(note_path(root, save_id)).directory
    parsed = names.parse_name(name)
    if parsed is None or parsed.role != "emergency" or parsed.step != step:
        raise NameTaken(f"{note_path(root, save_id)} does not name an emergency directory of step {step}.")
    return name
