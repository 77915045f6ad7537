"""Waits on any rank until what it has saved is mirrored.

Rules:
* The leader of a node does the uploads, and knows when one failed for good, and when a newer attempt has started. Its
  other ranks read the pending-uploads table, and what the leader last said of itself (``status.json``).
* A rank of another host that mounts the root has no table, and asks the mirrors, in a thread: a look never waits, and a
  wait ends in time, also where a mirror hangs.
* Nobody waits for what cannot happen any more. A leader that has finished had all on the mirrors: that a drain asks
  them again, at that moment, is no reason to wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from shlex import quote

from ckptmirror.core.errors import AttemptFenced, CkptMirrorError, DeadlinePassed, NoTable
from ckptmirror.flow.places.catalog import MetaCache
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import is_mirrored, is_on_mirrors, uploads_left
from ckptmirror.local.daemon_pool import begin, is_over
from ckptmirror.local.status_file import is_writer_alive, read_status_file

__all__ = ["MirrorWait"]

_POLL_S, _ASK_MIRROR_EVERY_S, _ASK_MIRROR_S = 0.5, 5.0, 30.0
_DIED, _FINISHED = "died", "finished"
_ENDED = ("fenced", _FINISHED, "incomplete", "stopped", _DIED)


class MirrorWait:
    """The waits of one rank, for the saves of one attempt after another.

    Attributes:
        torn: Saves that wait for nodes which are not of this job; nobody waits for these.
        attempt: The number of the attempt; -1 before the first.
    """

    def __init__(self, root: Path, specs: Sequence[MirrorSpec], state_dir: Path | None) -> None:
        self.torn: Collection[str] = ()
        self.attempt = -1
        self._root, self._specs, self._state_dir = root, specs, state_dir
        self._urls = [spec.url for spec in specs]
        self._table_is_here = True
        self._asked: dict[str | None, Future[bool]] = {}
        self._known: set[str | None] = set()
        self._metas: MetaCache = {}
        self._ask_at_s = -math.inf

    def wait(self, node: Node | None, save_id: str | None, timeout_s: float) -> bool:
        """Wait until a save (None: every save, earlier ones included) is on every mirror that counts.

        Args:
            node: Set on the leader.
            save_id: The save.
            timeout_s: The limit, in seconds; 0 only looks.

        Raises:
            AttemptFenced: It is not mirrored, and a newer attempt has started.
            DeadlinePassed: Uploads failed for good, or the leader has ended.
        """
        uploader = node if node is not None and node.uploads else None  # none any more after close()
        if uploader is not None:
            is_mirrored_now = uploader.wait_mirrored(save_id, timeout_s)
        else:
            is_mirrored_now = self._wait_for_leader(save_id, timeout_s)
        if not is_mirrored_now and timeout_s > 0:
            status, fenced = self._said_by_leader() if uploader is None else ("", uploader.fenced() or "")
            self._check_goes_on(save_id, status, fenced)
        return is_mirrored_now

    def is_mirrored(self, save_id: str | None, *, leads: bool, wait_s: float = 0.0) -> bool:
        """Whether it is now, as far as is known. A host without the table waits up to ``wait_s`` for the mirrors.

        Raises:
            NoTable: This rank leads, and its table is gone.
        """
        if self._table_is_here:
            try:
                return is_mirrored(self._root, save_id, self._state_dir, self._urls, besides=self.torn)
            except NoTable:
                if leads:
                    raise
                self._table_is_here = False  # but on another host, which mounts this root too
        return self._ask_mirrors(save_id, wait_s)

    def _ask_mirrors(self, save_id: str | None, wait_s: float) -> bool:
        """Begin to ask the mirrors, unless that was done a moment ago, and wait so long for what they answer.

        Raises:
            CkptMirrorError: It waits, and a mirror refused to answer.
        """
        if save_id is not None and save_id in self._known:
            return True
        asked = self._asked.get(save_id)
        if asked is None:
            if time.monotonic() < self._ask_at_s:
                return False
            self._ask_at_s = time.monotonic() + _ASK_MIRROR_EVERY_S
            ask = partial(is_on_mirrors, self._root, save_id, self._specs, besides=self.torn, cache=self._metas)
            asked = self._asked[save_id] = begin(ask, "ckptmirror-ask")
        if not is_over(asked, wait_s):
            return False
        self._asked.pop(save_id, None)  # another thread may have
        if wait_s <= 0 and isinstance(asked.exception(), CkptMirrorError):
            return False  # only a wait says why: a look has an answer
        found = asked.result()
        self._known |= {save_id} if found else set()
        return found

    def _forget_what_was_asked(self, save_id: str | None) -> None:
        """Let the next question be a new one: what was asked before may be answered as of then."""
        self._asked.pop(save_id, None)
        self._ask_at_s = -math.inf

    def _wait_for_leader(self, save_id: str | None, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if timeout_s > 0:
            self._forget_what_was_asked(save_id)
        while True:
            left_s = deadline - time.monotonic()
            moving, failed = self._uploads_left(save_id) if left_s > 0 else (0, 0)
            status, fenced = self._said_by_leader() if left_s > 0 else ("", "")
            if status == _FINISHED and not fenced:
                return True
            has_ended = bool(fenced) or status in _ENDED or (failed > 0 and not moving)
            if has_ended:
                self._forget_what_was_asked(save_id)  # it may have ended because all is mirrored
            if self.is_mirrored(save_id, leads=False, wait_s=max(0.0, min(left_s, _ASK_MIRROR_S))):
                return True
            if left_s <= 0 or has_ended:
                return False
            time.sleep(min(_POLL_S, left_s))

    def _check_goes_on(self, save_id: str | None, status: str, fenced: str) -> None:
        if fenced:
            raise AttemptFenced(fenced)
        at = f"--root {quote(str(self._root))}"
        if failed := self._uploads_left(save_id)[1]:
            why = f"Not everything is mirrored, and {failed} upload{'s' if failed > 1 else ''} failed for good."
            then = f"`ckptmirror status {at}` says why; fix the cause, then `ckptmirror retry {at}`."
            raise DeadlinePassed(why, hint=then)
        if status in _ENDED:
            ended = "is dead" if status == _DIED else "has closed its manager"
            why = f"Not everything is mirrored, and the leader of this node {ended}."
            raise DeadlinePassed(why, hint=f"`ckptmirror drain {at}` finishes the uploads.")

    def _said_by_leader(self) -> tuple[str, str]:
        """Return the status of this attempt as the leader of this node has it, and why it is fenced."""
        said = read_status_file(self._root)
        if said.get("attempt") != self.attempt:
            return "", ""
        status, fenced = str(said.get("status")), str(said.get("fenced") or "")
        if status not in _ENDED and is_writer_alive(said) is False:
            return _DIED, fenced
        return status, fenced

    def _uploads_left(self, save_id: str | None) -> tuple[int, int]:
        try:
            return uploads_left(self._root, save_id, self._state_dir, self._urls, besides=self.torn)
        except NoTable:  # it is on another host
            return 1, 0
