"""Drain: finishes the pending uploads of the table, from any process, with or without a trainer.

Rules:
* A drain is not an attempt: it fences no attempt and no attempt fences it. ``core.start.attempts`` decides what it may
  commit, by the lists of all mirrors of the root, including those to which this drain does not upload.
* It shares the table with a live trainer by claims. Only if no trainer holds the root does it also reconcile. It holds
  the root's lock no longer than that: a start must not fail because of a drain.
* It waits for a mirror that does not answer, but not for one that refuses the credentials: a person must fix that. Nor
  for one that a person takes out of the run meanwhile. If none of its mirrors is left, it ends with an error.
* Its time limit holds whatever a mirror does: calls that may block run in other threads.
* It asks the mirrors for everything that it calls verified: a mirror that was emptied since, or is gone, is not safe.
* ``push`` asks a mirror before it adds it to the table, so a mistyped URL leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Self, TypeVar

from ckptmirror.core import events, names
from ckptmirror.core.errors import (
    CheckpointNotFound,
    CkptMirrorError,
    ConfigError,
    RootLocked,
    StoreTemporary,
    Temporary,
)
from ckptmirror.core.lifecycle import SETTLED, RecordState
from ckptmirror.core.model import Meta
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.flow.fetch.destination import is_training_root
from ckptmirror.flow.places.attempt_lists import check_can_sign
from ckptmirror.flow.places.catalog import Catalog, catalogs_on, local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import (
    Mirror,
    MirrorSpec,
    close_mirrors,
    mirror_specs,
    open_mirrors,
    stop_retrying,
    waiting_for_removed,
)
from ckptmirror.flow.places.select import is_left_behind, lineage_of
from ckptmirror.flow.retention.durability import Durability, only_waiting, open_saves
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.reconcile import add_missing_records, carry_on, reconcile
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.flow.save.persistent_dir import copy_of, lost_snapshots, with_kept
from ckptmirror.flow.start.claim import DrainConfirmation, check_of_run
from ckptmirror.flow.upload.sending import UploadContext
from ckptmirror.flow.upload.transfer_progress import Held, Transfers, UnderWay, Wait
from ckptmirror.flow.upload.workers import IDLE_S, UploadWorkers, held_elsewhere, still_moving, upload_save
from ckptmirror.local import directories
from ckptmirror.local.daemon_pool import begin, is_over
from ckptmirror.local.lock import RootLock, is_held
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.table_place import check_place, note_place, open_known_table, table_path
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores.retrying import OnWait

__all__ = ["DrainReport", "Drained", "confirm", "drain", "push"]

_STOP_S = 30.0
_MORE_TIME = (
    "Give it more time (--timeout); or, if a mirror is gone for good, take it out of the run with `ckptmirror "
    "forget-mirror`."
)
_STOP_AT_ONCE_S = 1.0
_REFUSALS_LIMIT = 2
_LOOK_EVERY_S = 0.5  # while progress is shown
_Result = TypeVar("_Result")
_PART = "this disk has only a part of the save, and a save is uploaded whole or not at all"
_log = logging.getLogger("ckptmirror.drain")


@dataclass(frozen=True)
class Drained:
    """The progress of a drain: files and bytes for its mirrors; they count as done once they are verified.

    Attributes:
        seen: The transfers beyond that, and the waits for mirrors.
        held: Files that other processes are sending to these mirrors.
    """

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int
    seen: Transfers = field(default_factory=Transfers)
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class DrainReport:
    """How a drain ended.

    Attributes:
        pending: Files that could still become verified, and files without a valid record.
        awaited: ``step N: reason`` of each pending file that only waits for another node, or for a save of a newer
            attempt. Nothing here can send it.
        failed: ``mirror: path: reason`` of each file that failed for good, or that can no longer be uploaded.
        refused: Mirrors that do not accept the credentials, with their errors.
        unasked: Other mirrors that could not be asked for files verified there before, with their errors.
        left: How many files wait for each mirror that is no longer configured; they are not sent.
        emergency_step: The step of an emergency snapshot that is newer than all other saves here; it is never uploaded.
        emergency_copy: The persistent directory that has a whole copy of it, or, if it is not here, any of it.
        emergency_here: Whether it is on this disk. If that was full, it is in the persistent directory alone.
        emergency_whole: Whether one of the two has all of it. The parts of other ranks may be on other nodes.
    """

    drained: Drained
    pending: int
    failed: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    unasked: Mapping[str, CkptMirrorError] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    emergency_step: int | None = None
    emergency_copy: Path | None = None
    emergency_here: bool = True
    emergency_whole: bool = True
    awaited: tuple[str, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether every mirror has everything that this drain was asked to upload."""
        return not (self.pending or self.failed or self.refused or self.unasked)


def drain(
    root: Path,
    *,
    only: Sequence[str] = (),
    limits: Sequence[MirrorSpec] = (),
    retry: bool = True,
    timeout_s: float = float("inf"),
    state_dir: Path | None = None,
    bus: events.EventBus | None = None,
    on_progress: Callable[[Drained], None] | None = None,
) -> DrainReport:
    """Upload and verify the pending files of ``root``.

    Args:
        only: Mirror URLs to upload to; empty: all that the table knows.
        limits: Mirrors as they are configured, for their rate limits.
        retry: Try failed uploads once more.
        timeout_s: Give up waiting after this many seconds; pending files stay pending.
        on_progress: Called with the progress before the first byte and then twice a second, by one thread at a time.

    Raises:
        NoTable: ckptmirror has not saved here.
        ForeignTable: The table is another root's.
        ConfigError: The root has no mirror, or has others than this drain was for since a start changed them.
    """
    check_can_sign(root)
    ends_s = time.monotonic() + timeout_s
    table = open_known_table(root, state_dir)
    with _Opened(table) as held:
        if not table.knows_mirrors():
            raise Temporary(
                f"The table of {root} is new and does not know its mirrors yet.",
                hint="Start the trainer, which knows them, or name the mirror with `ckptmirror push --mirror URL`.",
            )
        limited = {spec.url: spec for spec in mirror_specs(limits)}
        specs = [replace(limited.get(row.url, MirrorSpec(row.url)), required=row.required) for row in table.mirrors()]
        if not specs:
            left = waiting_for_removed(table, ())
            waiting = "".join(
                f" {count} files wait for {url}, which is no longer a mirror." for url, count in left.items()
            )
            raise ConfigError(
                f"{root} has no mirror.{waiting}",
                hint="Start the trainer with its mirrors, or name one with `ckptmirror push --mirror URL`.",
            )
        wanted = {spec.url for spec in mirror_specs(only)}
        if unknown := wanted - {spec.url for spec in specs}:
            raise ConfigError(
                f"{', '.join(sorted(unknown))} is not a mirror of {root}. "
                f"Its mirrors are: {', '.join(spec.url for spec in specs)}.",
                hint="Use `ckptmirror push --mirror URL` to add a mirror.",
            )
        served = [spec for spec in specs if not wanted or spec.url in wanted]
        work = _Work(root, held, served, specs, bus or events.EventBus(), on_progress)
        gone = work.look(lambda audit: _reconcile_if_free(root, table, specs, work.served(), audit), ends_s)
        if retry:
            table.retry_failed()
            table.end_delays([spec.url for spec in served])  # they grew in an outage that may be over
        report = work.run(ends_s)
        return replace(report, failed=(*report.failed, *(gone or ())))


def push(
    root: Path,
    mirror: str | MirrorSpec,
    *,
    step: int | None = None,
    timeout_s: float = float("inf"),
    state_dir: Path | None = None,
    bus: events.EventBus | None = None,
    on_progress: Callable[[Drained], None] | None = None,
) -> DrainReport:
    """Mirror whole saves of a root to ``mirror``, whether or not a trainer ever used it.

    Args:
        step: Only the saves of this step; None: all.

    Raises:
        CheckpointNotFound: There is no such save.
        NotAuthorised: The mirror does not accept the credentials.
        StorePermanent: There is no such bucket.
        StoreTemporary: The mirror does not answer.
        ConfigError: The mirror holds another run.
    """
    (spec,) = mirror_specs([mirror])
    here = local_catalog(root).with_parts()
    mirrored = [meta for meta in here.whole.values() if not is_emergency(meta)]
    found = [meta for meta in mirrored if step is None or meta.step == step]
    metas = [meta for meta in found if not meta.partial or meta.staged_from == spec.url]
    standing = lineage_of(here).standing_by_save()
    parts = [m for m in found if m not in metas and (step is not None or standing[m.save_id] == "current")]
    if not found:
        of_step = f" of step {step}" if step is not None else ""
        from ckptmirror.flow.places.legacy_references import ADOPT_HINT, find_older

        older = [one for one in find_older(root) if step in (None, one.step)]
        if older:
            what = (
                f"{older[-1].path} is a legacy checkpoint without checksums, which ckptmirror does not upload as it is."
            )
            raise CheckpointNotFound(f"{root} holds no whole save{of_step}. {what}", hint=ADOPT_HINT)
        what = f"holds no whole save{of_step}" if root.is_dir() else "does not exist"
        hint = None if here.saves or here.problems else "Give the directory that the trainer saves to."
        raise CheckpointNotFound(f"{root} {what}.", hint=hint)
    check_can_sign(root)
    check_place(root, state_dir)

    def waits(url: str, delay_s: float, error: Exception) -> None:
        if on_progress is not None:
            on_progress(Drained(0, 0, 0, 0, Transfers(waits=(Wait(url, str(error), delay_s),))))

    ends_s = time.monotonic() + timeout_s
    steps = {meta.step for meta in parts}
    asking = begin(lambda: _ask(root, spec, table_path(root, state_dir), waits, steps), "ckptmirror-ask")
    if not is_over(asking, timeout_s):
        raise StoreTemporary(f"{spec.url} did not answer within {timeout_s:g} s.")
    there, required = asking.result()
    parts = [meta for meta in parts if meta.save_id not in there]
    if parts and not metas:
        raise CheckpointNotFound(
            f"{root} has only a part of a save of step {parts[0].step}.", hint=_bring_the_rest(root, parts[0])
        )
    directories.make_dirs(table_path(root, state_dir).parent)
    table = UploadsTable.open(table_path(root, state_dir), create=True)
    with _Opened(table) as held:
        table.check_root(root)
        note_place(root, table)
        known = table.mirrors()
        if spec.url not in [row.url for row in known]:
            is_only_word = not known and not is_training_root(root)  # otherwise the trainer decides what is required
            table.set_mirrors(
                [*((row.url, row.required) for row in known), (spec.url, is_only_word and spec.required)],
                [*(row.url for row in known if row.pushed), spec.url],
            )
        add_missing_records(table, [spec], metas)
        table.retry_failed(mirror=spec.url)
        table.end_delays([spec.url])
        known_specs = [MirrorSpec(row.url, row.required) for row in table.mirrors() if row.url != spec.url]
        came_from = {meta.staged_from for meta in metas if meta.staged_from in required}
        known_specs += [MirrorSpec(url, required=False) for url in came_from - {row.url for row in table.mirrors()}]
        work = _Work(root, held, [spec], [*known_specs, spec], bus or events.EventBus(), on_progress)
        work.look(lambda audit: audit.ask(), ends_s)
        # No reconcile: it would add records for every other save too.
        report = work.run(ends_s, [meta.save_id for meta in metas])
        refused = [f"{spec.url}: step {m.step}: {_PART}. {_bring_the_rest(root, m)}" for m in parts]
        return replace(report, failed=(*report.failed, *refused))


def _bring_the_rest(root: Path, meta: Meta) -> str:
    """Say how to bring the rest of a staged save to this disk."""
    command = f"ckptmirror stage --step {meta.step} --full --mirror {quote(str(meta.staged_from))}"
    return (
        f"Bring the rest of it here, with `{command} --dest {quote(str(root))}` for each of its kinds (--kind dcp, "
        "--kind model), or push from where it was saved."
    )


def confirm(root: Path, save_id: str, urls: Collection[str]) -> None:
    """Ask mirrors that have a save for its files, and record in the table that they have it.

    No other file is sent. A mirror that does not answer now is asked by the next start or drain.
    """
    with open_known_table(root) as table:
        specs = [MirrorSpec(row.url, row.required) for row in table.mirrors()]
        save = next((one for one in table.saves() if one.save_id == save_id), None)
        mirrors = open_mirrors(specs, root, table)
        may_commit = DrainConfirmation(root, table, mirrors)
        try:
            for mirror in (mirror for mirror in mirrors if mirror.url in urls):
                context = UploadContext(root, table, mirror, events.EventBus(), may_commit)
                try:
                    upload_save(context, save_id)
                except CkptMirrorError as error:
                    save_logger(_log, save, mirror=mirror.url).warning(
                        "save %.8s is not confirmed on %s yet: %s", save_id, mirror.url, error
                    )
        finally:
            close_mirrors(mirrors)


def _ask(
    root: Path, spec: MirrorSpec, path: Path, on_wait: OnWait, steps: Collection[int]
) -> tuple[set[str], tuple[str, ...]]:
    """Check that the mirror answers and may hold this run.

    Returns:
        The ids of its whole saves of these steps, and the URLs of the mirrors that its list calls required.
    """
    with contextlib.ExitStack() as opened:
        table = opened.enter_context(UploadsTable.open(path)) if path.exists() else None
        rows = table.mirrors() if table is not None else []
        known = [MirrorSpec(row.url, row.required) for row in rows if row.url != spec.url]
        mirrors = open_mirrors([*known, spec], root, table, on_wait=on_wait)  # none may be another one's directory
        opened.callback(close_mirrors, mirrors)
        mirror = mirrors[-1]
        mirror.store.identity()  # the first contact, which creates a directory
        listed, _ = check_of_run(root, mirror)
        whole = {save_id for step in steps for save_id in mirror_catalog(mirror, step=step).saves}
        return whole, listed.required if listed is not None else ()


def _reconcile_if_free(
    root: Path,
    table: UploadsTable,
    specs: Sequence[MirrorSpec],
    mirrors: Sequence[Mirror],
    audit: MirrorAudit,
) -> list[str]:
    """Reconcile if no trainer runs, and return the saves whose files were removed before they were uploaded."""
    lock = RootLock(root)
    try:
        lock.acquire({"verb": "drain"})
    except RootLocked:  # a live trainer reconciled, and asked its mirrors, when it started
        audit.ask()
        return []
    try:
        done = reconcile(root, table, specs)
    finally:
        lock.release()  # before the mirrors are asked, which may take long: a trainer that starts need not wait
    carry_on(root, table, mirrors, audit)
    return [f"step {step} (save {save_id[:8]}): {reason}" for step, save_id, reason in done.gone]


class _Opened:
    """A table and its mirrors, closed at the end; if a call to a mirror still blocks, they stay open until exit."""

    def __init__(self, table: UploadsTable) -> None:
        self.table = table
        self.mirrors: list[Mirror] = []
        self.is_busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_busy:
            close_mirrors(self.mirrors)
            self.table.close()


class _Work:
    """The common part of a drain and a push: ask the mirrors, then upload, both until the time limit."""

    def __init__(
        self,
        root: Path,
        held: _Opened,
        served: Sequence[MirrorSpec],
        known: Sequence[MirrorSpec],
        bus: events.EventBus,
        on_progress: Callable[[Drained], None] | None,
    ) -> None:
        self._root = root
        self._held = held
        self._table = held.table
        self._known = known
        self._urls = [spec.url for spec in served]
        self._bus = bus
        self._looker = _Looker(held.table, self._urls, on_progress)
        self._audit: MirrorAudit | None = None

    def look(self, ask: Callable[[MirrorAudit], _Result], ends_s: float) -> _Result | None:
        """Open the mirrors, and ask them in another thread; None if that took too long."""

        def ask_all() -> _Result:
            waits = self._looker.waits
            self._held.mirrors += open_mirrors(self._known, self._root, self._table, on_wait=waits, is_verb=True)
            self._looker.look()
            lock = self._root / names.LOCK_NAME
            self._audit = MirrorAudit(self._table, self.served(), self._bus, notes=lambda: not is_held(lock))
            answer = ask(self._audit)
            self._looker.answered(self._audit)
            return answer

        asking = begin(ask_all, "ckptmirror-ask")
        try:
            return asking.result() if is_over(asking, ends_s - time.monotonic()) else None
        finally:
            self._held.is_busy = not asking.done()

    def served(self) -> list[Mirror]:
        """Return the mirrors to upload to; the others are asked only about what may be committed."""
        return [mirror for mirror in self._held.mirrors if mirror.url in self._urls]

    def run(self, ends_s: float, save_ids: Collection[str] | None = None) -> DrainReport:
        """Upload the pending files until ``ends_s``, and return the report."""
        refusals = _Refusals()
        if self._held.is_busy:
            stop_retrying(self._held.mirrors)
        else:
            self._upload(refusals, ends_s)
        return self._report(refusals, save_ids, min(_STOP_S, max(_STOP_AT_ONCE_S, ends_s - time.monotonic())))

    def _upload(self, refusals: _Refusals, ends_s: float) -> None:
        table, audit = self._table, self._audit
        assert audit is not None
        workers = UploadWorkers(
            self._root,
            table,
            self.served(),
            self._bus,
            DrainConfirmation(self._root, table, self._held.mirrors),
            under_way=self._looker.under_way,
        )
        self._bus.subscribe(refusals)

        def done() -> bool:
            known = {row.url for row in table.mirrors()}
            if not known.intersection(self._urls):
                raise ConfigError(
                    f"{', '.join(self._urls)} was taken out of the run meanwhile; nothing else was to be drained.",
                    hint="Use `ckptmirror push --mirror URL` to add a mirror.",
                )
            self._urls[:] = [url for url in self._urls if url in known]
            self._looker.look()
            if still_moving(table, [url for url in self._urls if url not in refusals.final]):
                return False
            audit.ask_if_due()
            return not audit.waits_for(self._urls)

        limit_s = _STOP_AT_ONCE_S  # on Ctrl-C: the next drain finds what was being sent
        try:
            workers.start()
            workers.wait_until_verified(done, ends_s - time.monotonic(), look_every_s=self._looker.every_s)
            limit_s = min(_STOP_S, max(_STOP_AT_ONCE_S, ends_s - time.monotonic()))
        finally:
            stop_retrying(self._held.mirrors)
            self._held.is_busy = not workers.stop(limit_s) or audit.is_asking()

    def _report(self, refusals: _Refusals, save_ids: Collection[str] | None, limit_s: float) -> DrainReport:
        table, urls = self._table, self._urls
        given_up = [record for record in table.records(state=RecordState.FAILED) if record.mirror in urls]
        failed = [f"{record.mirror}: {record.path}: {record.last_error}" for record in given_up]
        here = local_catalog(self._root)
        here = here.with_parts(besides=lost_snapshots(self._root, here))
        unasked = self._unasked()  # first, as durability() does
        now = Durability(tuple(open_saves(table, here.whole.values(), urls, save_ids)))
        wanted = [record for record in given_up if save_ids is None or record.save_id in save_ids]
        pending = max(0, now.files - len(wanted))
        refused = {url: reason for url, reason in refusals.final.items() if url in {one.mirror for one in now.open}}
        refused |= {url: str(error) for url, error in unasked.items() if reach_after(error) is Reach.REFUSED}
        unasked = {url: error for url, error in unasked.items() if url not in refused}
        left = waiting_for_removed(table, {row.url for row in table.mirrors()})
        answering = [] if self._held.is_busy else [url for url in urls if url not in unasked]
        found = _emergency(self._root, here, answering, limit_s)
        awaited = [f"step {one.step}: {one.last_error}" for one in only_waiting(table.records(), urls)]
        at = _settled(table, urls, Transfers())
        return DrainReport(at, pending, tuple(failed), refused, unasked, left, *found, tuple(awaited))

    def _unasked(self) -> dict[str, CkptMirrorError]:
        if self._audit is not None:
            return self._audit.unasked(self._urls)
        known = {record.mirror for record in self._table.records(state=RecordState.VERIFIED)}
        if len(self._known) == 1:
            return {url: StoreTemporary("it did not answer in time") for url in self._urls if url in known}
        every = ", ".join(spec.url for spec in self._known)
        why = f"the time was up before the mirrors of the run were open; one of {every} hangs, perhaps not this one"
        return {url: StoreTemporary(why, hint=_MORE_TIME) for url in self._urls if url in known}


def _emergency(
    root: Path, here: Catalog, urls: Sequence[str], limit_s: float
) -> tuple[int | None, Path | None, bool, bool]:
    """Return the newest step of the lineage if it is a snapshot, the directory with its copy, if it is here, and whole.

    None if the run went on without it, as mirrors tell that answer within ``limit_s`` seconds.
    """
    everywhere = with_kept(root, here)
    newest = max(lineage_of(everywhere).current.values(), key=lambda save: save.step, default=None)
    if newest is None or newest.kinds != ("emergency",):
        return None, None, True, True
    asking = begin(lambda: catalogs_on(urls), "ckptmirror-ask")
    there = asking.result() if is_over(asking, limit_s) else []
    meta, is_here = everywhere.saves[newest.save_id], newest.save_id in here.saves
    if is_left_behind(meta, everywhere, there):
        return None, None, True, True
    return newest.step, copy_of(root, newest.save_id, is_here=is_here), is_here, meta.is_whole


class _Refusals:
    """Notices mirrors that refuse the credentials several times, with nothing verified in between."""

    def __init__(self) -> None:
        self.final: dict[str, str] = {}
        self._in_a_row: dict[str, int] = {}

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.RecordVerified | events.MirrorCommitted):
            self._in_a_row[event.mirror] = 0
        elif isinstance(event, events.MirrorUnreachable) and event.refused:
            self._in_a_row[event.mirror] = self._in_a_row.get(event.mirror, 0) + 1
            if self._in_a_row[event.mirror] >= _REFUSALS_LIMIT:
                self.final[event.mirror] = event.reason


class _Looker:
    """Reports the progress of a drain. Several threads report: any of them may be the one that waits."""

    def __init__(self, table: UploadsTable, urls: Sequence[str], on_progress: Callable[[Drained], None] | None) -> None:
        self.under_way = UnderWay()
        self.every_s = IDLE_S if on_progress is None else _LOOK_EVERY_S
        self._table = table
        self._urls = urls
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def look(self) -> None:
        if self._on_progress is not None:
            with self._lock:
                # Before the table: a file verified in between then counts twice, rather than never.
                seen = self.under_way.seen()
                self._on_progress(_settled(self._table, self._urls, seen))

    def answered(self, audit: MirrorAudit) -> None:
        for url in set(self._urls) - audit.unasked(self._urls).keys():
            self.under_way.answered(url)

    def waits(self, url: str, delay_s: float, error: Exception) -> None:
        self.under_way.waits(url, delay_s, error)
        self.look()


def _settled(table: UploadsTable, urls: Sequence[str], seen: Transfers) -> Drained:
    rows = [count for count in table.counts() if count.mirror in urls]
    settled = [row for row in rows if row.state in SETTLED]
    return Drained(
        files_done=sum(row.records for row in settled),
        files_total=sum(row.records for row in rows),
        bytes_done=sum(row.size_bytes for row in settled),
        bytes_total=sum(row.size_bytes for row in rows),
        seen=seen,
        held=held_elsewhere(table, urls),
    )
