"""What the leader of a node owns: the lock, the table, the claim of the run, the uploader, the rotation thread.

Rules:
* It opens them in an order in which a failure leaves nothing held: lock, table, reconcile, mirrors, claim.
* A leader whose lock file somebody removed commits nothing more, since another may lead this root now. If the whole
  control directory was deleted and no other trainer took the root, the leader recreates it (``control_directory``).
* ``retention.durability`` decides whether something is safe; a count of pending uploads never does.
* Closing needs no other rank and no mirror. What is not uploaded stays in the table, and the next start continues.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shlex import quote

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenTable,
    CkptMirrorError,
    DeadlinePassed,
    LocalStorageFull,
    NoTable,
    Temporary,
)
from ckptmirror.core.lifecycle import SETTLED
from ckptmirror.core.model import Meta, Sign
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.disks import Torn
from ckptmirror.core.start.mirror_places import Expected, expected_by_others
from ckptmirror.core.start.quarantine import FAILED_STARTS
from ckptmirror.core.uncommitted import LEFT_OFF_TEXT, given_up_text, is_behind_text, is_left_off_text
from ckptmirror.flow.places.attempt_lists import note_diverged, note_sign
from ckptmirror.flow.places.catalog import Catalog, local_catalog
from ckptmirror.flow.places.mirrors import (
    Mirror,
    MirrorSpec,
    ask_patiently,
    close_mirrors,
    counting,
    counting_rows,
    expect_places,
    known_mirrors,
    open_mirrors,
    remember_places,
    remembered_places,
    seen_places,
    set_mirrors,
    stop_retrying,
)
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.flow.retention.durability import Durability, OpenSave, open_saves, waiting_for_nodes
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.reconcile import add_missing_records, carry_on, reconcile
from ckptmirror.flow.retention.rotation import RotationReport, rotate
from ckptmirror.flow.retention.rotation_thread import RotationThread
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.flow.save.persistent_dir import open_persistent, persistent_catalog
from ckptmirror.flow.start.claim import RunClaim
from ckptmirror.flow.start.control_directory import take_root_again
from ckptmirror.flow.start.disk_facts import DiskFacts, TakenNames, look_at_disk
from ckptmirror.flow.upload.workers import UploadWorkers, still_moving
from ckptmirror.local import trash
from ckptmirror.local.daemon_pool import begin_or_do, is_over
from ckptmirror.local.lock import SHORT_VERBS, RootLock, exclusive
from ckptmirror.local.root_id import keep_root_id
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.status_file import write_status_file
from ckptmirror.local.table_place import check_place, note_place, open_table
from ckptmirror.local.uploads import LeaseClock, RootIdentity, UploadRecord
from ckptmirror.stores.retrying import total_s_of_environment

__all__ = ["Node", "open_table"]

_log = logging.getLogger("ckptmirror")
_STOP_WORKERS_S = 10.0
_STOP_ROTATION_S = 60.0
_STOP_LATE_S = 5.0  # how long to stop threads if the time is up and a mirror does not answer
_SHORT_VERB_S = 60.0  # how long a start waits for a short verb to release the root
_STOP_BRINGING_S = 2.0
_REPAIR_WAIT_S = 5.0
_BEHIND_WAIT_S = 5.0  # for parts of saves that were left behind: the mirrors have just answered
_NOTES_S = 2.0  # how long an attempt waits at its end for what it notes of itself
_STOPPED_LIMIT_S = 2.0  # short, since the grace period of a stop request is running
_SKIPPED_LISTED = 20
_NOTHING_TORN = Torn()
_NONE_TAKEN = TakenNames()
_DELETIONS_LIMIT = 100  # how often the control directory is recreated while somebody is still deleting it


class Node:
    """The leader's side of one root."""

    def __init__(
        self,
        root: Path,
        specs: Sequence[MirrorSpec],
        retention: Retention,
        bus: events.EventBus,
        *,
        state_dir: Path | None = None,
        persistent_dir: Path | None = None,
        workers_per_mirror: int = 2,
        share_downloads: bool = False,
        clock: LeaseClock | None = None,
        verb: str | None = None,
        wait_s: float = math.inf,
    ) -> None:
        self.root, self.persistent_dir = root, persistent_dir
        self.specs = list(specs)
        self.retention = retention
        self.share_downloads = share_downloads
        self.claim: RunClaim | None = None
        self._bus = bus
        bus.subscribe(self._on_event)
        self._workers_per_mirror = workers_per_mirror
        self.bringing: threading.Thread | None = None  # finds a copy to resume from, and may be staging it
        self._workers: UploadWorkers | None = None
        self._rotation_thread: RotationThread | None = None
        self._audit: MirrorAudit | None = None
        self._last_step: int | None = None
        self._signs: set[Sign] = set()  # of this attempt
        self._noting = threading.Lock()
        self._notes: list[Future[None]] = []  # of signs, in the background
        self._retaking = threading.Lock()
        self._meet_again = False
        self._torn: frozenset[str] = frozenset()
        self._behind: frozenset[str] = frozenset()
        self._cannot_be_on: Mapping[str, tuple[str, ...]] = {}
        self._once_whole: Mapping[str, tuple[str, ...]] = {}
        self.taken = TakenNames()
        self._abandoned: frozenset[str] = frozenset()
        self._skipped: deque[dict[str, object]] = deque(maxlen=_SKIPPED_LISTED)
        check_place(root, state_dir)
        self.persistent_is_new = open_persistent(root, persistent_dir)
        trash.make_trash(root)  # now: on a full disk a failed save goes there
        self.lock = RootLock(root)
        owner = {"verb": verb} if verb is not None else {}
        self.lock.acquire(owner, wait_s=min(wait_s, _SHORT_VERB_S), wait_for_verbs=SHORT_VERBS)
        with contextlib.ExitStack() as undo:
            undo.callback(self.lock.release)
            try:
                self.table = open_table(root, state_dir, clock)
            except LocalStorageFull:  # even reading the table needs room: empty the trash of an earlier rotation
                empty_trash(root)
                self.table = open_table(root, state_dir, clock)
            undo.callback(self.table.close)
            self.reconciled = reconcile(root, self.table, known_mirrors(self.table, self.specs))
            self.mirrors: list[Mirror] = open_mirrors(self.specs, root, self.table, bus)
            undo.pop_all()
        for step, save_id, reason in self.reconciled.gone:
            bus.emit(events.SaveGone(step=step, save_id=save_id, reason=reason))

    def prepare(self) -> None:
        """Prepare for a start: stop what an earlier start of this process began. Asks no mirror.

        Raises:
            Temporary: The root is still being changed.
        """
        self.end_attempt(failed=False)
        rotation_ended, _ = self._stop_services()
        if not rotation_ended or self._is_bringing():
            raise Temporary(f"{self.root} is still being changed by what the start before this one began.")
        ask_patiently(self.mirrors)

    def look_at_disk(self) -> DiskFacts:
        """Return what this node knows of its disk."""
        found = look_at_disk(self.root, self.table, keep_root_id(self.root))
        return replace(found, places=self.places(), persistent_is_new=self.persistent_is_new)

    def places(self) -> dict[str, str]:
        """Return which place each mirror is, by URL, as far as this node remembers."""
        return remembered_places(self.root, self.table, self.mirrors)

    def sees(self, remembered: Collection[str]) -> dict[str, str | None]:
        """Return which place is there now for each mirror whose URL no node remembers.

        Where one does not answer, this looks again as long as any mirror is asked; briefly, if no save has to be there.
        """
        new = [mirror for mirror in self.mirrors if mirror.url not in remembered]
        return seen_places(new, counting=self._counting(), patience_s=total_s_of_environment())

    def remember_places(self, places: Mapping[str, str]) -> None:
        """Remember which places another node uses; see :func:`ckptmirror.flow.places.mirrors.remember_places`."""
        remember_places(self.root, self.table, places)

    def take_places(
        self, places: Mapping[str, str], expected: Mapping[str, Expected], read: Collection[str] = ()
    ) -> None:
        """Use the places that the first node knows or expects. It alone makes what is a mirror nowhere.

        Args:
            places: The identities that it knows, by URL.
            expected: What it expects of those that no node remembers.
            read: What it has read, for this node to read too: a read-only mirror may have no identity.
        """
        self.remember_places(places)
        expect_places(self.mirrors, expected_by_others([mirror.url for mirror in self.mirrors], expected), read)

    def expect_places(self, places: Mapping[str, Expected]) -> None:
        """Take no other place for a mirror than these, unless this node remembers it: see ``SamePlaceStore.expect``."""
        expect_places(self.mirrors, places)

    def look_at_persistent(self) -> Catalog | None:
        """Return what the persistent directory has, if there is one. This may wait for its file system."""
        if self.persistent_dir is None:
            return None
        return persistent_catalog(self.persistent_dir, patience_s=total_s_of_environment())

    def start(
        self,
        claim: RunClaim,
        abandoned: Mapping[str, str] | None = None,
        torn: Torn = _NOTHING_TORN,
        whole: Collection[str] = (),
        taken: TakenNames = _NONE_TAKEN,
    ) -> None:
        """Let uploads and rotation run for an attempt that has claimed the run.

        Args:
            claim: The claim.
            abandoned: The saves of which this node may have a part and which can never be whole, with the reason.
            torn: The saves of which this node may have a part, and no disk of this job the rest. Its part is uploaded,
                but nothing waits for the parts of nodes that are not of this job.
            whole: The saves that the disks of this job have whole. What was left off a mirror until then is sent.
            taken: The names of saves that mirrors have: saves of these steps have a tag.
        """
        self.taken = taken
        self.claim = claim
        self._signs = set()
        self._torn, self._behind = torn.all, torn.behind
        self._cannot_be_on, self._once_whole = torn.cannot_be_on, torn.once_whole
        self._abandoned = frozenset(abandoned or ())
        for save_id, reason in (abandoned or {}).items():
            if self.table.skip(save_id, reason):
                _log.warning("%s; this node's part is not uploaded", reason)
        self.table.take_back(whole, is_left_off_text)
        self.table.claim_identity(RootIdentity.of(self.root, claim.run_id))
        self._start_services(claim)
        self.write_status("running")

    def _start_services(self, claim: RunClaim) -> None:
        self._workers = UploadWorkers(
            self.root,
            self.table,
            self.mirrors,
            self._bus,
            claim.confirm,
            workers_per_mirror=self._workers_per_mirror,
            on_fenced=lambda reason: self._on_fenced(claim, reason),
            read_by=dict.fromkeys(self.taken.read_from, claim.attempt.id),
        )
        set_mirrors(self.table, self.specs)
        self._add_records(lambda whole: whole)
        self.table.retry_failed()
        self.table.end_delays([mirror.url for mirror in self.mirrors])  # they grew in an outage that may be over
        counting_first = sorted(self.mirrors, key=lambda mirror: mirror.url not in self._counting())
        audit = self._audit = MirrorAudit(self.table, counting_first, self._bus, notes=lambda: True)
        self._rotation_thread = RotationThread(
            lambda: self._ask_mirrors(audit), lambda: audit.waits_for(self._counting()), self._rotate_by_policy
        )
        self._rotation_thread.start()
        self._workers.start()

    def _ask_mirrors(self, audit: MirrorAudit) -> bool:
        if self._meet_again:
            self._meet_again = False
            for mirror in self.mirrors:
                with contextlib.suppress(CkptMirrorError):  # the next start finds it again
                    mirror.store.identity()
        has_answered = carry_on(self.root, self.table, self.mirrors, audit)
        if has_answered and self._workers is not None:
            self._workers.notify()
        return has_answered

    def fenced(self) -> str | None:
        """Return why this attempt may commit nothing more, or None. Called before each commit."""
        if self.lock.lost and not self._take_root_again():
            return (
                f"{self.root / names.LOCK_NAME} was deleted or replaced while this process held it, so another process "
                "may write to this root by now: this one commits nothing more."
            )
        return self.claim.fenced if self.claim is not None else None

    def _take_root_again(self) -> bool:
        """Recreate the control directory after somebody deleted it, if no other trainer took the root meanwhile."""
        with self._retaking:
            if not self.lock.lost:
                return True
            control = self.root / names.CONTROL_DIR
            try:
                if not self._recreated():
                    return False
            except (CkptMirrorError, OSError) as error:
                _log.error("%s was deleted, and cannot be recreated: %s", control, error)
                return not self.lock.lost
            self._meet_again = True
        _log.error(
            "%s was deleted while this process led the root. ckptmirror recreated its lock, list of attempts and "
            "table, and asks the mirrors which saves they have. The history of events is lost.",
            control,
        )
        return True

    def _recreated(self) -> bool:
        """Recreate lock, list and table; return False if another trainer may lead the root now."""
        for _ in range(_DELETIONS_LIMIT):
            try:
                return self._recreate()
            except (CkptMirrorError, OSError) as error:
                still_deleted = isinstance(error, FileNotFoundError) or not (self.root / names.LOCK_NAME).exists()
                if not still_deleted:
                    raise
        return self._recreate()

    def _recreate(self) -> bool:
        claim = self.claim
        if claim is None or (self.lock.lost and not take_root_again(self.root, self.lock, claim.attempts)):
            return False
        if self.table.path.exists():
            note_place(self.root, self.table)
        else:
            self._new_table()
        return True

    def on_commit(self, meta: Meta) -> None:
        """Start the uploads of a committed save, and rotate what may go."""
        if self._workers is not None:
            self._workers.notify()
        if self._rotation_thread is not None:
            self._rotation_thread.wake()
        self._last_step = meta.step
        if "saved" not in self._signs:
            has_reported = bool(self._signs - {"ended"})
            self._signs.add("saved")
            if has_reported:
                self._note("saved")
        self.write_status("running")

    def report(self, step: int, loss: float) -> None:
        """Record, the first time, that training got to a step, and that its loss is not finite; never waits."""
        sign: Sign = "reported" if math.isfinite(loss) else "diverged"
        if sign in self._signs:
            return
        self._signs.add(sign)
        sign = "ended" if sign == "reported" and "ended" in self._signs else sign  # ckptmirror has let it down
        if sign == "diverged":
            save_logger(_log, step=step).warning(
                "step %d: the reported loss is %s. If %d starts in a row fail from one save, the next one goes back to "
                "the save before it",
                step,
                loss,
                FAILED_STARTS,
            )
        if "saved" not in self._signs:  # an attempt that saved has not failed
            self._note(sign)

    def end_attempt(self, *, failed: bool) -> None:
        """Record how this attempt ended, if it has reported anything."""
        ends_s = time.monotonic() + _NOTES_S
        for note in self._notes:
            is_over(note, ends_s - time.monotonic())
        self._notes.clear()
        if not failed and self._signs - {"saved", "ended"}:
            self._signs.add("ended")
            self._write_sign(self.claim, "ended")

    def on_failed(self) -> None:
        """Record at once that a save failed because of ckptmirror: what this may end is not the fault of training."""
        if self._signs & {"saved", "ended"}:
            return
        self._signs.add("ended")
        if "reported" in self._signs:  # else report() records it: in this order one of both sees the other
            self._write_sign(self.claim, "ended")

    def _note(self, sign: Sign) -> None:
        claim = self.claim
        notes = [partial(self._write_sign, claim, sign)]
        if sign == "diverged" and claim is not None:  # each in a thread of its own, since a mirror may not answer
            notes += [partial(note_diverged, mirror, claim.attempt.id) for mirror in self.mirrors]
        self._notes += [begin_or_do(note, "ckptmirror-health") for note in notes]

    def _write_sign(self, claim: RunClaim | None, sign: Sign) -> None:
        with self._noting:
            if claim is not None and not self.lock.lost:
                note_sign(self.root, claim.run_id, claim.attempt.id, sign)

    def on_skipped(self, step: int, reason: str) -> None:
        """Record in the status that the disk had no room for a save, and rotate what may go."""
        self._skipped.append({"step": step, "reason": reason})
        self.write_status("running")
        if self._rotation_thread is not None:
            self._rotation_thread.wake()

    @property
    def uploads(self) -> bool:
        """Whether its uploaders run: from a start that succeeded until the end."""
        return self._workers is not None

    def wait_mirrored(
        self, save_id: str | None, timeout_s: float, *, is_stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until a save (None: every save, earlier ones included) is verified on every mirror that counts.

        Returns:
            False if the time runs out, or as soon as only permanent failures are left, or this attempt is fenced, or
            the run was asked to stop.
        """
        rotation, workers = self._rotation_thread, self._workers
        if workers is None:
            return False
        if self.unsafe_saves(save_id):
            self.repair_records(min(timeout_s, _REPAIR_WAIT_S))
            if timeout_s > 0:  # else somebody polls
                self.table.end_delays(self._counting(), is_behind_text)
            workers.notify()

        def is_over() -> bool:
            if self.fenced() is not None or is_stopped():
                return True
            if rotation is not None and self._can_be_left_off():
                rotation.wake()
            asked = save_id is not None or self._audit is None or not self._audit.waits_for(self._counting())
            return asked and not self._still_moving(save_id)

        workers.wait_until_verified(is_over, timeout_s)
        return self.durability().is_safe if save_id is None else not self.unsafe_saves(save_id)

    def _still_moving(self, save_id: str | None = None) -> int:
        return still_moving(self.table, self._counting(), save_id, besides=self._torn)

    def unsafe_saves(self, save_id: str | None = None) -> list[OpenSave]:
        """List the files of one save, or of all, that are not safe on a mirror that counts, or have no record."""
        counting = self._counting()
        ids = None if save_id is None else [save_id]
        if not counting or not open_saves(self.table, self._whole(), counting, ids):
            return []
        # A rotation may run between reading the disk and reading the table, so a finding must be seen twice.
        found = open_saves(self.table, self._whole(), counting, ids)
        return [one for one in found if one.save_id not in self._torn]

    def durability(self) -> Durability:
        """Say whether everything is safe now."""
        unasked = self._unasked()  # first, as flow.retention.durability says
        return Durability(tuple(self.unsafe_saves()), unasked)

    def _named(self, one: OpenSave) -> str:
        steps = {record.step for record in self.table.records(save_id=one.save_id)}
        which = f"step {min(steps)}" if steps else f"save {one.save_id[:8]}"
        return f"{which} on {one.mirror}: {one.reason.removesuffix('.')}"

    def _unasked(self) -> dict[str, str]:
        asked = self._audit.unasked(self._counting()) if self._audit is not None else {}
        return {url: str(error) for url, error in asked.items()}

    def repair_records(self, wait_s: float = _REPAIR_WAIT_S) -> None:
        """Write the missing or unreleased records of whole saves on this disk: without them nothing is sent."""
        self.table.drop_broken_rows()
        urls = [spec.url for spec in self.specs]

        def unsafe(whole: list[Meta]) -> list[Meta]:
            ids = {one.save_id for one in open_saves(self.table, whole, urls)}
            return [meta for meta in whole if meta.save_id in ids]

        self._add_records(unsafe, wait_s)

    def _add_records(self, chosen: Callable[[list[Meta]], list[Meta]], wait_s: float = _REPAIR_WAIT_S) -> None:
        rotation = self._rotation_thread
        is_own = rotation is not None and rotation.is_busy
        with contextlib.ExitStack() as held:
            try:  # no rotation may run between reading the disk and writing the records
                held.enter_context(exclusive(self.root / names.ROTATE_LOCK_NAME, timeout_s=wait_s))
            except CkptMirrorError as error:
                is_own = is_own or (rotation is not None and rotation.is_busy)  # it is in every run
                _log.log(logging.DEBUG if is_own else logging.WARNING, "no record is repaired now: %s", error)
                return
            add_missing_records(self.table, self.specs, chosen(self._whole()))

    def _whole(self) -> list[Meta]:
        return list(local_catalog(self.root).with_parts().whole.values())

    def recreate_table(self, error: CkptMirrorError) -> None:
        """Recreate the table after it broke or vanished while training runs; uploads continue with the new one.

        Raises:
            NoTable: This node was closed.
        """
        if self.lock.lost and self._take_root_again():
            return
        aside = self._new_table()
        where = f"It is now at {aside}" if aside is not None else "Its file is gone"
        _log.error("%s %s; its facts are gathered again from disk and mirrors.", error, where)

    def _new_table(self) -> Path | None:
        aside = self.table.recreate()
        note_place(self.root, self.table)
        set_mirrors(self.table, self.specs)
        if self.claim is not None:
            self.table.claim_identity(RootIdentity.of(self.root, self.claim.run_id))
        add_missing_records(self.table, self.specs, self._whole())
        if self._workers is not None:
            self._workers.notify()
        return aside

    def _counting(self) -> set[str]:
        """The mirrors that a save must be on to be safe: the required ones, or all mirrors if none is required.

        Until this start has succeeded, the mirrors of the last start that counted also count.
        """
        urls = set(counting((spec.url, spec.required) for spec in self.specs))
        if self.claim is None:
            urls |= set(counting_rows(self.table.mirrors()))
        return urls

    def rotate_now(self, timeout_s: float) -> RotationReport:
        """Wait up to ``timeout_s`` seconds for pending uploads, then rotate."""
        if self._workers is not None:
            self._workers.wait_until_verified(
                lambda: not self._still_moving() and self._has_sent_what_is_behind(), timeout_s
            )
        return self.rotate()

    def _rotate_by_policy(self) -> None:
        rotates = self.retention.keep_last is not None
        if (rotates or self._behind or self._cannot_be_on or self._once_whole) and self._is_newest():
            if rotates:
                self.rotate()
            else:
                self._give_up_what_nobody_completes()

    def _give_up_what_nobody_completes(self) -> None:
        self._leave_off_mirrors()
        self._give_up_left_behind()

    def _leave_off_mirrors(self) -> None:
        """Leave saves off mirrors where they cannot become whole any more, once this node's part is there.

        Not before: a node that is not of this job may come back, and needs the part to complete the save there.
        """
        for save_id, url in self._can_be_left_off():
            self.table.skip(save_id, LEFT_OFF_TEXT, mirror=url)
            save_logger(_log, mirror=url).warning(
                "save %s stays incomplete on %s: no disk of this job has what other nodes had to send there, and no "
                "start needs it there",
                save_id[:8],
                url,
            )

    def _give_up_left_behind(self) -> None:
        """Give up the parts of saves that this attempt left behind, once they are sent and it has a safe save."""
        mirrors, whole = self._counting(), self._whole()
        self._behind &= {meta.save_id for meta in whole}  # of the others this node has no part
        if not self._behind or not self._has_safe_save():
            return
        workers = self._workers
        if workers is not None and not self._has_sent_what_is_behind():
            self.table.end_delays(mirrors)  # they waited for the save that is safe now
            workers.notify()
            workers.wait_until_verified(self._has_sent_what_is_behind, _BEHIND_WAIT_S)
        for meta in whole:
            if meta.save_id in self._behind and self._only_waits_for_nodes(meta.save_id, mirrors):
                why = given_up_text(meta.step)
                self.table.skip(meta.save_id, why)
                save_logger(_log, meta).warning("%s; this node's part, which the mirrors have, may go", why)
                self._abandoned |= {meta.save_id}
                self._behind -= {meta.save_id}

    def _has_safe_save(self) -> bool:
        """Whether this attempt has a save that is on every mirror that counts."""
        claim, mirrors, whole = self.claim, self._counting(), self._whole()
        if claim is None or not mirrors:
            return False
        own = [meta.save_id for meta in whole if meta.attempt.id == claim.attempt.id and not is_emergency(meta)]
        return not all(open_saves(self.table, whole, mirrors, [save_id]) for save_id in own)

    def _wait_until_given_up(self, limit_s: float, is_stopped: Callable[[], bool]) -> None:
        """Let the rotation thread give up what nobody can complete, if nothing but that is left to do."""
        rotation, workers = self._rotation_thread, self._workers
        if self._behind and rotation is not None and workers is not None and self._has_safe_save():
            rotation.wake()
            workers.wait_until_verified(lambda: is_stopped() or not self._behind, min(limit_s, 2 * _BEHIND_WAIT_S))

    def _has_sent_what_is_behind(self) -> bool:
        places = {**dict.fromkeys(self._behind, tuple(self._counting())), **self._cannot_become_whole()}
        return all(self._only_waits_for_nodes(save_id, urls) for save_id, urls in places.items())

    def _can_be_left_off(self) -> list[tuple[str, str]]:
        """Return the saves, and the mirrors to leave them off by now: no commit says so, to wake the rotation."""
        pairs = [(save_id, url) for save_id, urls in self._cannot_become_whole().items() for url in urls]
        open_there = [(save_id, url) for save_id, url in pairs if self._unsettled(save_id, {url})]
        return [(save_id, url) for save_id, url in open_there if self._only_waits_for_nodes(save_id, {url})]

    def _cannot_become_whole(self) -> dict[str, tuple[str, ...]]:
        """Return the mirrors where a save cannot become whole by now, by its id."""
        counting = self._counting()
        found = dict(self._cannot_be_on)
        for save_id, urls in self._once_whole.items():
            there = [one for one in self.table.standing(save_id) if one.mirror in counting.difference(urls)]
            if any(one.verified and one.committed for one in there):
                found[save_id] = urls
        return found

    def _only_waits_for_nodes(self, save_id: str, mirrors: Collection[str]) -> bool:
        """Whether each mirror has this node's part: if the other disk comes back, it makes the save whole there."""
        left = self._unsettled(save_id, mirrors)
        return waiting_for_nodes(left, mirrors) == left

    def _unsettled(self, save_id: str, mirrors: Collection[str]) -> list[UploadRecord]:
        records = self.table.records(save_id=save_id)
        return [one for one in records if one.mirror in mirrors and one.state not in SETTLED]

    def _has_sent_all(self, found: Durability) -> bool:
        """Whether all that is not safe only waits for other nodes."""
        ids = {one.save_id for one in found.open}
        records = [record for save_id in ids for record in self.table.records(save_id=save_id)]
        return 0 < found.files == len(waiting_for_nodes(records, self._counting()))

    def _is_newest(self) -> bool:
        """Ask each required mirror, as the rotation will do too, whether a newer attempt has started."""
        if self.claim is None or self.fenced() is not None:
            return False
        for mirror in (mirror for mirror in self.mirrors if mirror.required):
            try:
                self.claim.confirm(mirror)
            except AttemptFenced as error:
                self._on_fenced(self.claim, str(error))
                return False
            except CkptMirrorError as error:
                _log.debug("%s does not say whether a newer attempt has started: %s", mirror.url, error)
        return True

    def rotate(self, *, dry_run: bool = False, in_use: Collection[str] = frozenset()) -> RotationReport:
        """Rotate now, without waiting; ``in_use`` stay: a start is about to continue from one."""
        if not dry_run:
            self._give_up_what_nobody_completes()
        return rotate(
            self.root,
            self.table,
            self.mirrors,
            self.retention,
            attempts=self.claim.attempts if self.claim is not None else None,
            bus=self._bus,
            dry_run=dry_run,
            snapshots=self.claim is not None and not self.lock.lost,
            persistent_dir=self.persistent_dir,
            abandoned=self._abandoned,
            make_room=self._rotation_thread is not None,  # not while a start chooses what it continues from
            in_use=in_use,
        )

    def write_status(self, status: str, **more: object) -> None:
        """Write ``.ckptmirror/status.json`` for people and monitors. A failure is only logged."""
        facts = {
            "status": status,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "attempt": self.claim.attempt.number if self.claim is not None else None,
            "fenced": self.fenced(),
            "last_step": self._last_step,
            "skipped": list(self._skipped),
            "persistent_dir": str(self.persistent_dir) if self.persistent_dir is not None else None,
            "at_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            **more,
        }
        write_status_file(self.root, facts)

    def finish(
        self, timeout_s: float, *, is_stopped: Callable[[], bool], saving: bool = False, failed: bool = False
    ) -> None:
        """Upload what is pending within ``timeout_s`` seconds, then release everything (see :meth:`close`).

        Args:
            timeout_s: The limit.
            is_stopped: Whether the run was asked to stop by now: then it waits no longer for uploads.
            saving: Whether a save is in flight.
            failed: Whether training ends because of an error of its own.

        Raises:
            DeadlinePassed: The run finished (it was not stopped) and something is not verified on a mirror that counts.
        """
        services_ended = None
        ends_s = time.monotonic() + timeout_s
        limit_s = _STOPPED_LIMIT_S if is_stopped() else _STOP_LATE_S
        try:
            self.end_attempt(failed=failed)
            self.fenced()  # recreates a deleted control directory while mirrors can still be asked
            unasked = self._see_to_the_rest(timeout_s, is_stopped)
            if not is_stopped():
                self._wait_until_given_up(ends_s - time.monotonic(), is_stopped)
            limit_s = _STOPPED_LIMIT_S if is_stopped() else max(limit_s, ends_s - time.monotonic())
            services_ended = self._stop_services(limit_s)
            found = self.durability()  # only now: the threads that just ended may have added something
            pending, has_sent_all = found.files, self._has_sent_all(found)
            reason = self._named(found.open[0]) if found.open else ""
            status = "stopped" if is_stopped() else "incomplete" if pending or unasked else "finished"
            if self.claim is not None:
                self.write_status(status, pending=pending)
                number = self.claim.attempt.number
                self._bus.emit(events.AttemptEnded(attempt=number, status=status, pending=pending))
        finally:
            self.close(limit_s, saving=saving, services_ended=services_ended)
        lines = [f"{pending} files of {self.root} are not verified on their mirrors: {reason}."] if pending else []
        lines += [
            f"{url} has not confirmed that it still has what was verified there ({why})."
            for url, why in unasked.items()
        ]
        if lines and not is_stopped():
            hint = f"Run `ckptmirror drain --root {quote(str(self.root))}`."
            if has_sent_all and not unasked:
                hint = (
                    "This node has sent all that it has: run `ckptmirror drain` on the node that is named. If that "
                    "node deleted its part, or is gone, the next start does not wait for it."
                )
            raise DeadlinePassed(" ".join(lines), hint=hint)
        for line in lines:
            _log.warning(
                "%s `ckptmirror drain --root %s`, or the next start, finishes them.", line, quote(str(self.root))
            )

    def _see_to_the_rest(self, timeout_s: float, is_stopped: Callable[[], bool]) -> dict[str, str]:
        """Wait for the uploads unless the run was stopped; return the mirrors that were not asked, with the reason."""
        deadline = time.monotonic() + timeout_s
        try:
            self.table.mirrors()
        except (BrokenTable, NoTable) as error:
            self.recreate_table(error)
        if is_stopped():
            return {}
        if self.wait_mirrored(None, timeout_s, is_stopped=is_stopped) or self._workers is None:
            if self._audit is not None and timeout_s > 0:  # without time there is no waiting for an answer
                return self._ask_once_more(self._audit, deadline - time.monotonic(), is_stopped)
            return {}  # each answered at least once
        return {} if is_stopped() else self._unasked()

    def _ask_once_more(self, audit: MirrorAudit, timeout_s: float, is_stopped: Callable[[], bool]) -> dict[str, str]:
        """Check that no mirror was emptied, and resend what is missing; return the mirrors that do not answer."""
        ends_s = time.monotonic() + timeout_s
        audit.ask_once_more(self._counting(), timeout_s, is_stopped)
        if self.unsafe_saves():
            self.wait_mirrored(None, ends_s - time.monotonic(), is_stopped=is_stopped)
        unasked = self._unasked()
        for url in unasked.keys() & audit.silent():
            save_logger(_log, mirror=url).warning("%s is silent now (%s); all was verified earlier", url, unasked[url])
        return {url: why for url, why in unasked.items() if url not in audit.silent()}

    def close(
        self, limit_s: float | None = None, *, saving: bool = False, services_ended: tuple[bool, bool] | None = None
    ) -> None:
        """Stop the threads; release the table, the stores and the lock.

        A thread that does not end within its limit, because a mirror keeps it waiting, keeps what it uses until this
        process ends. An uploader keeps the table and the stores. The rotation thread, a save in flight (``saving``) and
        the thread that brings a copy keep the lock too, since they change the root.
        """
        rotation_ended, workers_ended = services_ended or self._stop_services(limit_s)
        saving = saving or self._is_bringing()
        is_asking = self._audit is not None and self._audit.is_asking()
        try:
            if rotation_ended and workers_ended and not saving and not is_asking:
                self.table.close()
                close_mirrors(self.mirrors)
        finally:
            if rotation_ended and not saving:
                self.lock.release()

    def _is_bringing(self) -> bool:
        if self.bringing is not None:
            self.bringing.join(_STOP_BRINGING_S)
        return self.bringing is not None and self.bringing.is_alive()

    def _stop_services(self, limit_s: float | None = None) -> tuple[bool, bool]:
        """Stop the rotation thread and the workers; return whether each ended."""
        stop_retrying(self.mirrors)
        ends_s = time.monotonic() + (_STOP_ROTATION_S if limit_s is None else min(limit_s, _STOP_ROTATION_S))
        rotation, workers, self._rotation_thread, self._workers = self._rotation_thread, self._workers, None, None
        if workers is not None:
            workers.ask_to_stop()
        rotation_ended = rotation is None or rotation.stop(ends_s - time.monotonic())
        workers_ended = workers is None or workers.stop(min(_STOP_WORKERS_S, max(1.0, ends_s - time.monotonic())))
        if not (rotation_ended and workers_ended):
            _log.warning("a mirror keeps %s busy until this process ends", "uploads" if rotation_ended else "rotation")
        return rotation_ended, workers_ended

    def _on_fenced(self, claim: RunClaim, reason: str) -> None:
        if claim is not self.claim:
            return  # a worker of an earlier claim of this process is still waiting for a mirror
        self._bus.emit(events.Fenced(attempt=claim.attempt.number, reason=reason))
        self.write_status("fenced", reason=reason)

    def _on_event(self, event: object) -> None:
        if isinstance(event, events.MirrorCommitted) and self._rotation_thread is not None:
            self._rotation_thread.wake()
