"""Mirror audit: asks each mirror again for everything that the table calls verified there.

Rules:
* An object that is gone or was replaced (because the mirror was emptied, recreated, or restored from an older copy) is
  pending again, unless the mirror has a tombstone of its save: then the save is not sent again.
* Code that reports everything as safe has asked every mirror first. A mirror that did not answer stays open and is
  asked again later, so an outage during a start cannot hide lost objects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ckptmirror.core import events
from ckptmirror.core.errors import CheckpointNotFound, CkptMirrorError, IllegalTransition, StoreTemporary
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.flow.places.catalog import listed_among, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.places.object_match import is_rewritten, why_differs
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.uploads import UploadRecord, UploadsTable
from ckptmirror.stores.base import ObjectInfo

__all__ = ["ASK_AGAIN_S", "MirrorAudit", "forget_verified"]

ASK_AGAIN_S = 10.0
_SHORT_S = 0.2
_log = logging.getLogger("ckptmirror.safety")


@dataclass(frozen=True, eq=False)
class _Question:
    """A mirror to ask, and why it did not answer the last time."""

    error: CkptMirrorError | None = None

    def was_silent(self) -> bool:
        """Whether it was asked, and may still answer."""
        return self.error is not None and reach_after(self.error) is Reach.SILENT


class MirrorAudit:
    """Keeps track of which mirrors this process has audited. May be used by several threads.

    Args:
        table: The table that says what the mirrors should have.
        mirrors: The mirrors to ask, in this order.
        bus: Receives an event for each mirror that does not answer.
        notes: Asked at each answer: whether to note in the table, for other processes, the mirrors that have not
            answered yet. A trainer does, and so does a drain while no trainer leads the root; beside a trainer, others
            only remove mirrors that answered.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        table: UploadsTable,
        mirrors: Sequence[Mirror],
        bus: events.EventBus | None = None,
        notes: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._mirrors = {mirror.url: mirror for mirror in mirrors}
        self._bus = bus or events.EventBus()
        self._clock = clock
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._noting = threading.Lock()  # else an older note could be written after a newer one
        known = {record.mirror for record in _verified(table)}
        self._open = {url: _Question() for url in self._mirrors if url in known}
        self._notes = notes
        self._note()
        self._asked_s = float("-inf")
        self._thread: threading.Thread | None = None

    def ask(self) -> bool:
        """Ask every mirror that has not answered yet; return whether one did just now."""
        with self._asking:
            answered = [url for url in list(self._open) if self._is_answered(self._mirrors[url])]
            self._asked_s = self._clock()
        if answered:
            self._note()
        return bool(answered)

    def ask_if_due(self) -> None:
        """Ask the mirrors that did not answer again, if the last time was a while ago. Returns soon in any case."""
        if self.is_asking() or (self.waits_for(self._mirrors) and self._clock() - self._asked_s >= ASK_AGAIN_S):
            self._ask_beside(_SHORT_S)

    def ask_once_more(self, urls: Collection[str], timeout_s: float, is_stopped: Callable[[], bool]) -> None:
        """Ask these mirrors once more, and wait at most ``timeout_s`` seconds: a rotation may delay the answers.

        It waits no longer once ``is_stopped()``.
        """
        self.reopen(urls)
        self._thread = None
        ends_s = time.monotonic() + timeout_s
        self._ask_beside(0.0)
        while (left_s := ends_s - time.monotonic()) > 0 and self._thread is not None and not is_stopped():
            self._thread.join(min(left_s, _SHORT_S))
            if not self.is_asking():
                return

    def _ask_beside(self, timeout_s: float) -> None:
        if not self.is_asking():
            self._thread = threading.Thread(target=self.ask, name="ckptmirror-ask", daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))

    def is_asking(self) -> bool:
        """Whether a thread of this object is asking; it then uses the table and the mirrors."""
        return self._thread is not None and self._thread.is_alive()

    def reopen(self, urls: Collection[str]) -> None:
        """Let these mirrors be asked once more."""
        with self._lock:
            earlier = {url: self._open.get(url, _Question()) for url in self._mirrors if url in {*urls, *self._open}}
            self._open = {url: _Question(one.error) for url, one in earlier.items()}
        self._note()

    def unasked(self, urls: Collection[str]) -> dict[str, CkptMirrorError]:
        """Return those of ``urls`` that did not answer yet, with the reason."""
        return {
            url: one.error or StoreTemporary("it was not asked yet") for url, one in self._open.items() if url in urls
        }

    def silent(self) -> set[str]:
        """Return the mirrors that were asked and may still answer."""
        return {url for url, one in self._open.items() if one.was_silent()}

    def waits_for(self, urls: Collection[str]) -> bool:
        """Whether one of ``urls`` may still answer: it has not yet, and did not refuse for good."""
        return any(url in urls and (one.error is None or one.was_silent()) for url, one in self._open.items())

    def _note(self) -> None:
        with self._noting:
            still_open = set(self._open)
            try:
                noted = self._table.unasked() - (self._mirrors.keys() - still_open)
                self._table.set_unasked(noted | still_open if self._notes() else noted)
            except CkptMirrorError as error:
                _log.error("other processes cannot see which mirrors have not answered yet: %s", error)

    def _is_answered(self, mirror: Mirror) -> bool:
        question = self._open[mirror.url]
        error: CkptMirrorError | None = None
        try:
            _ask(self._table, mirror)
        except CkptMirrorError as failure:
            error = failure
            refused = reach_after(error) is Reach.REFUSED
            self._bus.emit(events.MirrorUnreachable(mirror=mirror.url, reason=str(error), refused=refused))
        with self._lock:
            if self._open.get(mirror.url) is question:  # otherwise it is to be asked again
                left = {url: one for url, one in self._open.items() if one is not question}
                self._open = left if error is None else {**self._open, mirror.url: _Question(error)}
        return error is None


def _ask(table: UploadsTable, mirror: Mirror) -> None:
    verified = [record for record in _verified(table) if record.mirror == mirror.url]
    if not verified:
        return
    there = listed_among(mirror.store, "", [record.object or record.path for record in verified])
    missed = [(r, why) for r in verified if (why := why_differs(r, there.get(r.object or r.path))) is not None]
    removed = {
        save_id: stone.reason
        for step in dict.fromkeys(record.step for record, _ in missed)
        for save_id, stone in mirror_catalog(mirror, step=step).tombstones.items()
    }
    for save_id in {record.save_id for record, _ in missed} & removed.keys():
        table.remove(save_id, mirror.url, f"removed by retention: {removed[save_id]}")
    missed = [(record, why) for record, why in missed if record.save_id not in removed]
    for record, why in missed:
        forget_verified(table, record, f"{record.object or record.path} {why}")
    _warn(mirror, [(record, there.get(record.object or record.path)) for record, _ in missed])


def _warn(mirror: Mirror, missed: Sequence[tuple[UploadRecord, ObjectInfo | None]]) -> None:
    """Say what the mirror lost, and what is only looked at once more."""
    fields = save_logger(_log, mirror=mirror.url)
    rewritten = [record.object or record.path for record, found in missed if is_rewritten(record, found)]
    lost = [record.object or record.path for record, found in missed if not is_rewritten(record, found)]
    if rewritten:
        fields.warning(
            "%d objects on %s were rewritten or moved since they were verified, and are verified again: %s …",
            len(rewritten),
            mirror.url,
            rewritten[0],
        )
    if lost:
        fields.error(
            "%d objects that were verified on %s are gone or damaged and will be sent again: %s …",
            len(lost),
            mirror.url,
            lost[0],
        )


def _verified(table: UploadsTable) -> list[UploadRecord]:
    return table.records(state=RecordState.VERIFIED)


def forget_verified(table: UploadsTable, record: UploadRecord, reason: str) -> None:
    """Make a file that the mirror no longer has pending again, so that it is sent once more.

    The meta of its save is pending again too, at once: it may have to give the object another name, because a damaged
    object keeps its own.
    """
    if record.state is not RecordState.VERIFIED:
        return
    try:
        table.unverify(record.save_id, record.path, record.mirror, reason, with_meta=True)
    except (CheckpointNotFound, IllegalTransition) as error:  # it was rotated, or another thread found it missing
        save_logger(_log, record).info("%s is no longer kept on %s: %s", record.path, record.mirror, error)
