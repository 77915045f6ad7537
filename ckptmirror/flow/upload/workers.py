"""The uploader's threads: they claim records, and sleep when there is nothing to claim.

Rules:
* Threads are daemons: the table is durable, so a process may end at any moment. ``stop`` ends them cleanly.
* A worker whose claim the table did not let end puts it back as soon as the table can be used.
* A worker that is fenced by a newer attempt ends all workers of this process. Nothing else ends a worker.
* A worker's name has its host and process. An idle worker takes over the records of a dead process at once; it waits
  for a lease only if it cannot tell whether the process lives.
* Waits are bounded: a worker reads the table at least every ``IDLE_S`` seconds, since other processes write to it too.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ckptmirror.core import events
from ckptmirror.core.errors import AttemptFenced, CkptMirrorError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.flow.upload.sending import LEASE_S, Confirm, UploadContext
from ckptmirror.flow.upload.transfer_progress import Held, UnderWay
from ckptmirror.local.processes import is_alive, started
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.uploads import UploadsTable

__all__ = ["IDLE_S", "UploadWorkers", "free_dead_workers", "held_elsewhere", "still_moving", "upload_save"]

IDLE_S = 2.0
_numbers = itertools.count()
_PID = re.compile(r"[0-9]{1,9}")
_NONE_READ: Mapping[str, str] = {}
_MOVING = (RecordState.PENDING, RecordState.UPLOADING)
_log = logging.getLogger("ckptmirror.upload")


def still_moving(
    table: UploadsTable, mirrors: Collection[str], save_id: str | None = None, *, besides: Collection[str] = ()
) -> int:
    """Count the records that may still become verified by themselves. 0 ends a wait; it does not mean that all is safe.

    A failed file does not count, nor does the meta that waits for it: they need a person to fix the cause, or the next
    start. Nor does what a save that is not committed has in the table: no worker may send it.

    Args:
        save_id: Only the records of this save; None: of all.
        besides: The ids of saves whose records do not count.
    """
    counts = [count for count in table.counts() if count.mirror in mirrors]
    any_failed = any(count.state is RecordState.FAILED for count in counts)
    if save_id is None and not besides and not any_failed and all(save.released for save in table.saves()):
        return sum(count.records for count in counts if count.state in _MOVING)
    records = [
        record
        for record in table.records(save_id=save_id)
        if record.mirror in mirrors and record.released and record.save_id not in besides
    ]
    stuck = {(record.save_id, record.mirror) for record in records if record.state is RecordState.FAILED}
    return sum(
        record.state in _MOVING and (record.role == "artifact" or (record.save_id, record.mirror) not in stuck)
        for record in records
    )


def free_dead_workers(table: UploadsTable, mirror: str | None = None) -> int:
    """Put back the records claimed by dead processes of this machine, and return how many there were."""
    held = table.records(mirror=mirror, state=RecordState.UPLOADING)
    workers = {record.claimed_by for record in held if record.claimed_by}
    return sum(
        table.put_back_all(worker, "the process that was sending it died") for worker in workers if _is_dead(worker)
    )


def upload_save(context: UploadContext, save_id: str) -> None:
    """Upload the records of one save as far as possible now, without threads. What the mirror has is not sent again.

    Raises:
        AttemptFenced: A newer attempt has claimed the run.
    """
    others = [save.save_id for save in context.table.saves() if save.save_id != save_id]
    worker = _worker_name()
    while (claim := context.table.claim(worker, context.mirror.url, lease_s=LEASE_S, exclude=others)) is not None:
        upload_claimed(context, claim)


def held_elsewhere(table: UploadsTable, mirrors: Collection[str]) -> tuple[Held, ...]:
    """Return the files that other processes are sending to these mirrors, with the time left until others may."""
    own = socket.gethostname(), str(os.getpid())
    held = [record for mirror in mirrors for record in table.records(mirror=mirror, state=RecordState.UPLOADING)]
    return tuple(
        Held(record.path, _holder(record.claimed_by), table.lease_left_s(record))
        for record in held
        if record.claimed_by and tuple(record.claimed_by.split(":")[:2]) != own
    )


def _worker_name() -> str:
    """Return a name that no other worker has: one puts back all that is claimed by its own."""
    return f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}:{started(os.getpid())}"


def _holder(worker: str) -> str:
    """Describe the process of a worker to a person."""
    host, pid, *_ = [*worker.split(":"), "?"]
    return f"process {pid}" + (f" on {host}" if host != socket.gethostname() else "")


def _is_dead(worker: str) -> bool:
    """Whether the process is certainly dead. A wrong answer does no harm, since a lost claim's token is refused."""
    host, pid, _, began = [*worker.split(":"), "", "", ""][:4]
    return host == socket.gethostname() and bool(_PID.fullmatch(pid)) and not is_alive(int(pid), began)


class UploadWorkers:
    """``workers_per_mirror`` threads for each mirror."""

    def __init__(
        self,
        root: Path,
        table: UploadsTable,
        mirrors: Sequence[Mirror],
        bus: events.EventBus,
        confirm: Confirm,
        *,
        workers_per_mirror: int = 2,
        on_fenced: Callable[[str], None] = lambda _reason: None,
        under_way: UnderWay | None = None,
        read_by: Mapping[str, str] = _NONE_READ,
    ) -> None:
        self.under_way = under_way if under_way is not None else UnderWay()
        self._contexts = [
            UploadContext(root, table, one, bus, confirm, under_way=self.under_way, read_by=read_by.get(one.url, ""))
            for one in mirrors
        ]
        self._table = table
        self._bus = bus
        self._on_fenced = on_fenced
        self._workers_per_mirror = workers_per_mirror
        self._wake = threading.Condition()
        self._rounds = 0
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for context in self._contexts:
            for number in range(self._workers_per_mirror):
                thread = threading.Thread(
                    target=self._work,
                    args=(context, _worker_name()),
                    name=f"ckptmirror-upload-{number}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)

    def notify(self) -> None:
        """Wake the threads: there may be something to claim."""
        with self._wake:
            self._rounds += 1
            self._wake.notify_all()

    def wait_until_verified(self, done: Callable[[], bool], timeout_s: float, *, look_every_s: float = IDLE_S) -> bool:
        """Wait until ``done()``, which reads the table, returns True.

        It is called after each upload, and every ``look_every_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self._stopping:
                return False
            with self._wake:
                self._wake.wait(min(remaining, look_every_s))
        return True

    def ask_to_stop(self) -> None:
        """Ask the threads to end after their current record."""
        self._stopping = True
        self.notify()

    def stop(self, timeout_s: float) -> bool:
        """Ask the threads to end after their current record; return whether all did within ``timeout_s`` seconds."""
        self.ask_to_stop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, context: UploadContext, worker: str) -> None:
        may_hold_one = False  # for which the table did not take what became of it
        while not self._stopping:
            rounds = self._rounds
            try:
                if may_hold_one:
                    self._table.put_back_all(worker, "what became of it could not be noted")
                    may_hold_one = False
                claim = self._table.claim(worker, context.mirror.url, lease_s=LEASE_S)
                if claim is not None:
                    upload_claimed(context, claim)
                    self.notify()
                    continue
                if free_dead_workers(self._table, context.mirror.url):
                    continue
            except AttemptFenced as fenced:
                save_logger(_log, event="Fenced", mirror=context.mirror.url).error("uploads stop: %s", fenced)
                self._on_fenced(str(fenced))
                self._stopping = True
                self.notify()
                return
            except CkptMirrorError as error:
                may_hold_one = True
                if not self._stopping:
                    _log.error("the uploader cannot use its table: %s", error)
            except Exception:  # noqa: BLE001 - a dead worker would leave a queue that nothing empties
                may_hold_one = True
                _log.exception("the uploader met an unexpected error and continues")
            with self._wake:
                if self._rounds == rounds and not self._stopping:
                    self._wake.wait(min(IDLE_S, self.under_way.due_s(context.mirror.url)))
