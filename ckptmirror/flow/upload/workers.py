"""The uploader's threads: they claim records, and sleep when there is nothing to claim.

Rules:
* Threads are daemons: the table is durable, so a process may end at any moment. ``stop`` is the sound end.
* A worker that meets a newer attempt ends all workers of this process. Nothing else ends a worker.
* A worker's name says host and process, so that what a dead one held is free again at the next start.
* Waits are bounded: a worker looks at the table at least every ``IDLE_S`` seconds, since other processes write to it
  too.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ckptmirror.core import events
from ckptmirror.core.errors import AttemptFenced, CkptMirrorError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.flow.upload.sending import LEASE_S, UploadContext
from ckptmirror.flow.upload.transfer_progress import UnderWay
from ckptmirror.local.saying import saying
from ckptmirror.local.uploads import UploadsTable

__all__ = ["IDLE_S", "UploadWorkers", "free_dead_workers", "still_moving"]

IDLE_S = 2.0
_MOVING = (RecordState.PENDING, RecordState.UPLOADING)
_log = logging.getLogger("ckptmirror.upload")


def still_moving(table: UploadsTable, mirrors: Collection[str], save_id: str | None = None) -> int:
    """Count the records that may still become verified by themselves. 0 ends the waiting; it does not say all is well.

    A failed file is not among them, nor is the meta that waits for it: a person mends the cause, or the next start
    tries.
    """
    counts = [count for count in table.summary().counts if count.mirror in mirrors]
    if save_id is None and not any(count.state is RecordState.FAILED for count in counts):
        return sum(count.records for count in counts if count.state in _MOVING)
    records = [record for record in table.records(save_id=save_id) if record.mirror in mirrors]
    stuck = {(record.save_id, record.mirror) for record in records if record.state is RecordState.FAILED}
    return sum(
        record.state in _MOVING and (record.role == "artifact" or (record.save_id, record.mirror) not in stuck)
        for record in records
    )


def free_dead_workers(table: UploadsTable) -> int:
    """Put back at once what workers of this machine held whose process is gone. Returns how many records."""
    workers = {record.claimed_by for record in table.records(state=RecordState.UPLOADING) if record.claimed_by}
    return sum(table.put_back_all(worker, "its worker's process is gone") for worker in workers if _is_dead(worker))


def _is_dead(worker: str) -> bool:
    """Whether the process is surely gone; a wrong answer costs nothing, since a lost claim's token is refused."""
    host, pid, _, started = [*worker.split(":"), "", "", ""][:4]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    if started and started != _started(int(pid)):
        return True  # gone, or another process has its number by now
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot (proc(5), stat, field 22); "" if that cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


class UploadWorkers:
    """``workers_per_mirror`` threads for each mirror."""

    def __init__(
        self,
        root: Path,
        table: UploadsTable,
        mirrors: Sequence[Mirror],
        bus: events.EventBus,
        confirm: Callable[[Mirror, Meta | None], None],
        *,
        workers_per_mirror: int = 2,
        on_fenced: Callable[[str], None] = lambda _reason: None,
        under_way: UnderWay | None = None,
    ) -> None:
        self.under_way = under_way if under_way is not None else UnderWay()
        self._contexts = [
            UploadContext(root, table, mirror, bus, confirm, under_way=self.under_way) for mirror in mirrors
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
                name = f"{socket.gethostname()}:{os.getpid()}:{number}:{_started(os.getpid())}"
                thread = threading.Thread(
                    target=self._work, args=(context, name), name=f"ckptmirror-upload-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def notify(self) -> None:
        """Wake the threads: there may be something to claim."""
        with self._wake:
            self._rounds += 1
            self._wake.notify_all()

    def wait_until_verified(self, done: Callable[[], bool], timeout_s: float, *, look_every_s: float = IDLE_S) -> bool:
        """Wait until ``done()``, which asks the table, says so.

        It is asked after each upload, and every ``look_every_s``.
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
        """Ask the threads to end after the record they carry."""
        self._stopping = True
        self.notify()

    def stop(self, timeout_s: float) -> bool:
        """Ask the threads to end after the record they carry; say whether all did within ``timeout_s`` seconds."""
        self.ask_to_stop()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, context: UploadContext, worker: str) -> None:
        while not self._stopping:
            rounds = self._rounds
            try:
                claim = self._table.claim(worker, context.mirror.url, lease_s=LEASE_S)
                if claim is not None:
                    upload_claimed(context, claim)
                    self.notify()
                    continue
            except AttemptFenced as fenced:
                saying(_log, event="Fenced", mirror=context.mirror.url).error("uploads stop: %s", fenced)
                self._on_fenced(str(fenced))
                self._stopping = True
                self.notify()
                return
            except CkptMirrorError as error:
                if not self._stopping:
                    _log.error("the uploader cannot use its table: %s", error)
            except Exception:  # noqa: BLE001 - a worker that died would leave a queue that only looks alive
                _log.exception("the uploader met something unforeseen and goes on")
            with self._wake:
                if self._rounds == rounds and not self._stopping:
                    self._wake.wait(IDLE_S)
