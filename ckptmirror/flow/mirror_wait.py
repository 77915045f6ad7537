"""Waits on any rank until what it has saved is mirrored.

Rules:
* The leader of a node does the uploads, and knows when one failed for good, and when a newer attempt has started. Its
  other ranks read the pending-uploads table, and what the leader last said of itself (``status.json``).
* A rank of another host that mounts the root has no table, and asks the mirrors.
* Nobody waits for what cannot happen any more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from shlex import quote

from ckptmirror.core.errors import AttemptFenced, DeadlinePassed, NoTable
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.status import is_mirrored, is_on_mirrors, uploads_left
from ckptmirror.local.status_file import read_status_file

__all__ = ["MirrorWait"]

_POLL_S, _ASK_MIRROR_EVERY_S = 0.5, 5.0
_ENDED = ("fenced", "finished", "incomplete", "stopped")


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
        if node is not None:
            is_mirrored_now = node.wait_mirrored(save_id, timeout_s)
        else:
            is_mirrored_now = self._wait_for_leader(save_id, timeout_s)
        if not is_mirrored_now and timeout_s > 0:
            status, fenced = self._said_by_leader() if node is None else ("", node.fenced() or "")
            self._check_goes_on(save_id, status, fenced)
        return is_mirrored_now

    def is_mirrored(self, save_id: str | None, *, leads: bool) -> bool:
        """Whether it is now.

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
        return is_on_mirrors(self._root, save_id, self._specs, besides=self.torn)

    def _wait_for_leader(self, save_id: str | None, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            is_over = time.monotonic() >= deadline
            if not is_over:
                moving, failed = self._uploads_left(save_id)
                status, fenced = self._said_by_leader()
                is_over = (failed > 0 and not moving) or bool(fenced) or status in _ENDED
            if self.is_mirrored(save_id, leads=False):  # asked last: it may have ended because all is mirrored
                return True
            if is_over:
                return False
            time.sleep(_POLL_S if self._table_is_here else _ASK_MIRROR_EVERY_S)

    def _check_goes_on(self, save_id: str | None, status: str, fenced: str) -> None:
        if fenced:
            raise AttemptFenced(fenced)
        at = f"--root {quote(str(self._root))}"
        if failed := self._uploads_left(save_id)[1]:
            why = f"Not everything is mirrored, and {failed} upload{'s' if failed > 1 else ''} failed for good."
            then = f"`ckptmirror status {at}` says why; fix the cause, then `ckptmirror retry {at}`."
            raise DeadlinePassed(why, hint=then)
        if status in _ENDED:
            why = "Not everything is mirrored, and the leader of this node has closed its manager."
            raise DeadlinePassed(why, hint=f"`ckptmirror drain {at}` finishes the uploads.")

    def _said_by_leader(self) -> tuple[str, str]:
        """Return the status of this attempt as the leader of this node has it, and why it is fenced."""
        said = read_status_file(self._root)
        if said.get("attempt") != self.attempt:
            return "", ""
        return str(said.get("status")), str(said.get("fenced") or "")

    def _uploads_left(self, save_id: str | None) -> tuple[int, int]:
        try:
            return uploads_left(self._root, save_id, self._state_dir, self._urls, besides=self.torn)
        except NoTable:  # it is on another host
            return 1, 0
