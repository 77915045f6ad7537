"""The identity of a root in the lists of attempts: a note in the root, bound to the inodes of root and lock file.

Rules:
* A copy of a root, also one restored from a backup, is another root: it, or its lock file, has another inode. Attempts
  that a list records for the original were not made by the copy.
* The note is not in the table, so a lost table does not change which attempts this root made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.model import new_id
from ckptmirror.local import files

__all__ = ["RootId", "keep_root_id", "read_root_id"]

_LIMIT_BYTES = 4096
_NAME = f"{names.CONTROL_DIR}/root.json"


@dataclass(frozen=True, slots=True)
class RootId:
    """The identity by which lists of attempts name a root.

    Attributes:
        id: 32 hex digits; "" if it has none yet.
        is_first: Whether the root never had another identity.
    """

    id: str
    is_first: bool


def read_root_id(root: Path) -> RootId:
    """Return the identity of a root; writes nothing."""
    try:
        note = json.loads(files.read_limited(root / _NAME, _LIMIT_BYTES))
        known = RootId(str(note["id"]), note["is_first"] is True)
        return known if note["inodes"] == _inodes(root) else RootId("", is_first=False)
    except FileNotFoundError:
        return RootId("", is_first=True)
    except (ValueError, TypeError, KeyError, IntegrityError):  # broken: what it said is unknown
        return RootId("", is_first=False)


def keep_root_id(root: Path) -> RootId:
    """Return the identity of a root. Give it a new one if it has none, or that of another directory.

    The caller holds the root lock.
    """
    known = read_root_id(root)
    if known.id:
        return known
    made = RootId(new_id(), known.is_first)
    note = {"id": made.id, "is_first": made.is_first, "inodes": _inodes(root)}
    files.write_bytes(root / _NAME, json.dumps(note).encode(), save_id=made.id, replace=True)
    return made


def _inodes(root: Path) -> list[int]:
    """Return the inodes of the root and of its lock file, which is created once and never replaced."""
    return [root.stat().st_ino, (root / names.LOCK_NAME).stat().st_ino]
