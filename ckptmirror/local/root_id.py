"""The identity of a root, by which lists of attempts name it: a note in the root, bound to the files that they are.

Rules:
* A root that was copied, or restored from a copy, is another one: it, or its lock file, has another inode. What a list
  says that a root made was then not made by this one.
* The note is not in the table: a table that was lost takes nothing from what the root made.
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
        id: 32 hex digits; "" where nobody has given it one.
        is_first: Whether the root never had another.
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
    """Return the identity of a root, and give it one where it has none, or that of another directory.

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
    """The root's own, and that of its lock file, which is made once and never replaced."""
    return [root.stat().st_ino, (root / names.LOCK_NAME).stat().st_ino]
