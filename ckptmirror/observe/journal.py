"""The journal of a root: one line for each event that no table keeps, to show later what happened when.

Rules:
* Every process that acts on the root appends to ``.ckptmirror/events.jsonl``: each rank of the trainer, and each verb.
  At ``FILE_LIMIT_BYTES`` the file is renamed to ``events.older.jsonl`` and replaces the earlier one.
* The code that emits an event does not wait for the disk (nothing is fsynced) and never sees an error: a line that
  cannot be written is lost, the first loss is logged, and the line numbers show the gap.
* Events that are in the uploads table's history are not written here, nor are single calls to a mirror, which are many.
  Repeated events are written only from time to time.
* The root's control directory is not created here: if it is gone, the root is gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckptmirror.core import events, names
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.journal import FILE_LIMIT_BYTES, JournalEntry, line_of
from ckptmirror.core.rate_limit import RateLimit
from ckptmirror.local.line_file import append_line
from ckptmirror.local.uploads.lease_clock import BootClock
from ckptmirror.observe.log import log_failure

__all__ = ["Journal", "bus_with_journal"]

_NOT_WRITTEN = (events.RecordVerified, events.RecordFailed, events.StoreCalled)
_UNREACHABLE_EVERY_S = 60.0
_REFUSED_EVERY_S = 3600.0
_WAIT_S = 1.0  # how long to wait for another thread of this process that writes a line
_log = logging.getLogger("ckptmirror.events")


class Journal:
    """Listens to a bus and writes its events.

    Args:
        root: The root; its control directory must exist.
        by: ``trainer``, or the name of a verb.
        wall: The wall clock, in seconds since 1970.
        boot: The boot's id and the milliseconds since it.
    """

    def __init__(
        self,
        root: Path,
        by: str,
        *,
        wall: Callable[[], float] = time.time,
        boot: BootClock | None = None,
        limit_bytes: int = FILE_LIMIT_BYTES,
    ) -> None:
        self._path, self._older = root / names.EVENTS_NAME, root / names.OLDER_EVENTS_NAME
        self._by = by
        self._wall = wall
        self._boot = boot if boot is not None else BootClock()
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._writer = secrets.token_hex(4)
        self._number = 0
        self._lost = False
        self._rate_limit = RateLimit(lambda: self._boot.now_ms() / 1000)

    def __call__(self, event: events.Event) -> None:
        """Write one event."""
        if isinstance(event, _NOT_WRITTEN) or not self._lock.acquire(timeout=_WAIT_S):
            return
        try:
            if os.getpid() != self._pid:  # a forked child is another writer
                self._begin()
            if self._is_due(event):
                self._append(self._next_line(event))
        finally:
            self._lock.release()

    def _next_line(self, event: events.Event) -> bytes:
        self._number += 1
        return line_of(
            JournalEntry(
                event=event,
                at_s=self._wall(),
                boot=self._boot.boot_id,
                boot_s=self._boot.now_ms() / 1000,
                by=self._by,
                writer=self._writer,
                number=self._number,
                pid=self._pid,
            )
        )

    def _append(self, line: bytes) -> None:
        try:
            append_line(self._path, line, older=self._older, limit_bytes=self._limit_bytes)
        except (CkptMirrorError, OSError) as error:
            if not self._lost:
                self._lost = True
                _log.warning("a line of the event journal is lost, so `ckptmirror timeline` lacks a bar: %s", error)

    def _is_due(self, event: events.Event) -> bool:
        if isinstance(event, events.MirrorUnreachable):
            return self._rate_limit.is_due(("unreachable", event.mirror), _UNREACHABLE_EVERY_S)
        if isinstance(event, events.RotationRefused):
            return self._rate_limit.is_due(("refused", event.save_id), _REFUSED_EVERY_S)
        return True


def bus_with_journal(root: Path, by: str) -> events.EventBus:
    """Return the bus for a verb that acts on a root; its events go into the root's journal."""
    bus = events.EventBus(log_failure)
    bus.subscribe(Journal(root, by))
    return bus
