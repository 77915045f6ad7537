"""Stage: brings a step from a mirror into a directory, verified, or leaves the directory as it was.

Rules:
* ``select`` chooses the save from the mirror's own lineage. An explicit kind is never replaced by another.
* One process at a time stages a step into a directory. Others log which process they wait for, and find the step there.
  A training root has one lock, which a stage holds too: it waits for other verbs, but not for a trainer.
* If others may write to the directory, one line of the log says so, and how to close it; the step is staged.
* A directory that a trainer saves to accepts only saves of its own run, and a stage never deletes a save there: only
  rotation does, which asks every required mirror. Elsewhere ``refresh`` replaces saves that this mirror holds whole, or
  that were staged.
* ``staging`` brings the bytes, and decides the order in which names appear.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from ckptmirror.core import events, names
from ckptmirror.core.errors import CheckpointNotFound, ConfigError, KindMismatch, UsageError
from ckptmirror.core.model import SAVED_KINDS, Kind, Meta
from ckptmirror.core.setting_checks import check_kind, checked_seconds
from ckptmirror.flow.fetch.destination import is_training_root, make_control_dir
from ckptmirror.flow.fetch.stage_progress import OnProgress, StageProgress
from ckptmirror.flow.fetch.staging import Staging, wanted_artifacts
from ckptmirror.flow.places.attempt_lists import listed_attempts, trusted_attempts
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, check_destination, mirror_specs
from ckptmirror.flow.places.reference import locate
from ckptmirror.flow.places.resolve import main_path
from ckptmirror.flow.places.select import choose
from ckptmirror.local import directories
from ckptmirror.local.lock import SHORT_VERBS, OnHeld, RootLock, exclusive
from ckptmirror.local.own_files import sharing_of
from ckptmirror.local.save_logger import save_logger
from ckptmirror.stores import open_store
from ckptmirror.stores.retrying import OnWait

__all__ = ["StageProgress", "StagedCheckpoint", "stage_checkpoint_step", "stage_save"]

_OTHER_STAGE_WAIT_S = 6 * 3600.0
_POLL_FIRST_S = 0.5
_POLL_LONGEST_S = 10.0
_log = logging.getLogger("ckptmirror.stage")


@dataclass(frozen=True)
class StagedCheckpoint:
    """A verified checkpoint on local disk.

    Attributes:
        path: The DCP directory, or the model file.
    """

    path: Path
    step: int
    kind: Kind


def stage_checkpoint_step(
    mirror: str | MirrorSpec | Mirror,
    *,
    step: int | Literal["latest"],
    dest: Path | str,
    require_kind: Kind | None = None,
    refresh: bool = False,
    full: bool = False,
    superseded: bool = False,
    wait_s: float = 0.0,
    on_progress: OnProgress | None = None,
    on_wait: OnWait | None = None,
    bus: events.EventBus | None = None,
) -> StagedCheckpoint:
    """Bring one step from a mirror into a local directory, verified; at once if it is there already.

    Args:
        mirror: The mirror, or its URL; as a :class:`MirrorSpec` with its limits.
        step: A step, or ``"latest"``: the newest of the lineage that has the required kind.
        dest: The directory; made if it is missing.
        require_kind: Never replaced by another kind. Without it: dcp, then model.
        refresh: Verify the staged files of the step, and replace each one that differs from the mirror's. In a
            directory that a trainer saves to, other saves of the step stay.
        full: Also bring the optimizer, extra and tensors files, not only the DCP directory or the model file.
        superseded: Take a save off the lineage if there is no other.
        wait_s: How long to wait for the step to appear on the mirror, in seconds.
        on_progress: Called now and then, from other threads, one at a time.
        on_wait: Called when the mirror did not answer, with its URL, the seconds until it is asked again, and the
            error. Not called for a mirror that the caller opened.
        bus: Receives events when a download starts and ends.

    Raises:
        CheckpointNotFound: The mirror has no such step.
        KindMismatch: It has the step, but not in this kind.
        IntegrityError: The mirror sends other bytes than were saved.
        StoreTemporary: The mirror does not answer; calling again continues.
        LocalStorageFull: The disk of the directory is full.
        DestinationOccupied: Other files are in the way.
        RefusedOnlyCopy: ``refresh`` would replace a save that this mirror does not hold.
        ConfigError: ``dest`` is a URL, is inside the mirror itself, or a trainer saves another run there.
        RootLocked: A trainer saves there now.
        UsageError: No save on a mirror has such a kind or step, or ``wait_s`` is no time.
    """
    check_kind(require_kind, SAVED_KINDS)
    if step != "latest" and (isinstance(step, bool) or not isinstance(step, int)):
        raise UsageError(f"step is {step!r}; it must be a whole number, or 'latest'.", hint="Write step=5000.")
    wait_s = checked_seconds(wait_s, "wait_s")
    root = directories.absolute_dir(dest, "dest")
    opened = mirror if isinstance(mirror, Mirror) else _open(mirror, on_wait)
    try:
        check_destination(root, opened)
        try:
            meta, kind = _find(opened, step, require_kind, superseded, wait_s)
        except CheckpointNotFound as error:
            if (there := locate(opened.url)).parsed is not None:
                named = f"--mirror {quote(str(there.place))} --step {there.parsed.step} --dest {quote(str(root))}"
                error.hint = f"{there.name} is the name of a save there: `ckptmirror stage {named}`."
            raise
        directories.make_dirs(root)
        sharing = sharing_of(root)
        if sharing is not None:
            save_logger(_log, meta).warning(
                "others may change what is staged in %s, before it is loaded too: %s", root, sharing
            )
        lock = RootLock(root) if is_training_root(root) else None
        if lock is not None:
            lock.acquire(
                {"verb": "stage", "step": meta.step},
                wait_s=_OTHER_STAGE_WAIT_S,
                wait_for_verbs=SHORT_VERBS,
                on_held=_waiting(meta, root),
            )
        try:
            staged = stage_save(
                opened, meta, root, kinds=(kind,), full=full, refresh=refresh, on_progress=on_progress, bus=bus
            )
        finally:
            if lock is not None:
                lock.release()
        return StagedCheckpoint(main_path(root, staged, kind), staged.step, kind)
    finally:
        if opened is not mirror:
            opened.store.close()


def _open(mirror: str | MirrorSpec, on_wait: OnWait | None) -> Mirror:
    (spec,) = mirror_specs([mirror])
    store = open_store(spec.url, bytes_per_s=spec.bytes_per_s, requests_per_s=spec.requests_per_s, on_wait=on_wait)
    return Mirror(spec.url, False, store)


def _find(
    mirror: Mirror, step: int | Literal["latest"], kind: Kind | None, superseded: bool, wait_s: float
) -> tuple[Meta, Kind]:
    """Choose the save; wait for it to appear, with growing pauses, up to ``wait_s``."""
    deadline = time.monotonic() + wait_s
    pause_s = _POLL_FIRST_S
    while True:
        catalog = mirror_catalog(mirror, step=step if isinstance(step, int) else None)
        try:
            return choose(catalog, step, kind, superseded=superseded)
        except (CheckpointNotFound, KindMismatch):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                if isinstance(step, int) and not catalog.saves:
                    catalog = mirror_catalog(mirror)  # the error names the steps that exist
                    return choose(catalog, step, kind, superseded=superseded)
                raise
        threading.Event().wait(min(pause_s, left_s))
        pause_s = min(pause_s * 2, _POLL_LONGEST_S)


def stage_save(
    mirror: Mirror,
    meta: Meta,
    dest: Path,
    *,
    kinds: Sequence[Kind],
    full: bool,
    refresh: bool = False,
    repair: bool = False,
    on_progress: OnProgress | None = None,
    bus: events.EventBus | None = None,
) -> Meta:
    """Bring the artifacts of some kinds of one save into ``dest`` and return the resulting meta there.

    ``meta`` is the mirror's; ``full`` also brings the optimizer, extra and tensors files. ``repair`` is ``refresh`` for
    this save alone, by a start in its own root: all other saves of the step stay as they are. In a training root the
    caller holds the root lock.
    Raises what :func:`stage_checkpoint_step` raises.
    """
    _check_run(dest, meta, mirror, repair=repair)
    wanted = wanted_artifacts(meta, kinds, full)
    make_control_dir(dest)
    lock_path = dest / names.CONTROL_DIR / f"stage_{names.SaveName(meta.step).stem}.lock"
    with exclusive(lock_path, timeout_s=_OTHER_STAGE_WAIT_S, on_held=_waiting(meta, dest)):
        bus = bus or events.EventBus()
        staging = Staging(mirror, dest, refresh or repair, on_progress, bus, own_root=repair)
        try:
            return staging.bring(meta, wanted, kinds, replaces=refresh)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            bus.emit(events.StageFailed(mirror=mirror.url, step=meta.step, kinds=tuple(kinds), reason=reason))
            raise


def _waiting(meta: Meta, root: Path) -> OnHeld:
    """Return a callback that logs which process this stage waits for."""
    logger = save_logger(_log, meta)
    return lambda who: logger.warning("step %d waits for another process in %s: %s", meta.step, root, who)


def _check_run(dest: Path, meta: Meta, mirror: Mirror, *, repair: bool = False) -> None:
    """Refuse another run's save in a training root, where it would be uploaded as this run's."""
    attempts = trusted_attempts(dest) if repair else listed_attempts(dest)  # a start asks the mirrors instead
    if attempts is not None and attempts.run_id != meta.run_id:
        raise ConfigError(
            f"{mirror.url} holds run {meta.run_id[:8]}, and a trainer saves run {attempts.run_id[:8]} to {dest}.",
            hint="Choose another --dest.",
        )
