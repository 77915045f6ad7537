"""Recreates a control directory that somebody deleted beside a running trainer, if that is safe.

Rules:
* A lock keeps nobody out once its file is gone. But every start adds its attempt to the root's list. So if there is no
  list, the new lock is free, and no unknown attempt has saved here, then no other trainer has taken the root.
* If the list is still there, somebody removed only the lock, or another trainer leads the root: nothing is recreated.
* The list is written under the new lock, and never replaces another.
"""

from __future__ import annotations

from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes
from ckptmirror.core.errors import NameTaken
from ckptmirror.core.model import AttemptList, new_id
from ckptmirror.local import files, trash
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.lock import SHORT_VERBS, RootLock

__all__ = ["take_root_again"]

_WAIT_S = 10.0  # for a short verb, while the training thread may wait


def take_root_again(root: Path, lock: RootLock, known: AttemptList) -> bool:
    """Retake the lost lock and recreate directory and list; return False if another trainer may lead the root now.

    Args:
        root: The local root.
        lock: Its lock, whose file is gone.
        known: Every attempt that this process knows, including its own.

    Raises:
        LocalStorageUnwritable: The directory cannot be created.
        LocalStorageFull: The disk has no room for it.
    """

    def nobody_came() -> bool:
        inventory = read_inventory(root)
        saved = {save.meta.attempt.id for save in (*inventory.saves, *inventory.incomplete)}
        if not saved <= {attempt.id for attempt in known.attempts}:
            return False
        try:
            files.write_bytes(root / names.ATTEMPTS_NAME, attempts_to_bytes(known), save_id=new_id())
        except NameTaken:
            return False
        return True

    if not lock.retake(nobody_came, wait_s=_WAIT_S, wait_for_verbs=SHORT_VERBS):
        return False
    trash.make_trash(root)
    return True
