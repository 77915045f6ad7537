"""The control directory, deleted beside the trainer that leads the root: taken again where that is safe.

Rules:
* The lock that is held keeps nobody out once its file is gone. Every start leaves its attempt in the root's list, so
  nobody took a root without a list, in which no attempt but the known ones has saved, and whose new lock is free.
* Where the list is still there, somebody took away the lock alone, or leads the root by now: nothing is taken again.
* The list is written without replacing any, under the new lock.
"""

from __future__ import annotations

from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes
from ckptmirror.core.errors import NameTaken
from ckptmirror.core.model import AttemptList, new_id
from ckptmirror.local import files
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.lock import SHORT_VERBS, RootLock

__all__ = ["take_root_again"]

_WAIT_S = 10.0  # for a short verb, while the training thread may wait


def take_root_again(root: Path, lock: RootLock, known: AttemptList) -> bool:
    """Take the lost lock again and recreate directory and list; False where another may lead the root by now.

    Args:
        root: The local root.
        lock: Its lock, lost.
        known: Every attempt that this process knows, its own included.

    Raises:
        LocalStorageUnwritable: The directory cannot be made.
        LocalStorageFull: There is no room for it.
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
    files.make_dirs(root / names.TRASH_DIR)
    return True
