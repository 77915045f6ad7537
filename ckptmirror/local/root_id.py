"""The identity of a root in the lists of attempts: a note in the root, bound to the inodes of root and lock file.

Rules:
* A copy of a root, also one restored from a backup, is another root: it, or its lock file, has another inode. Attempts
  that a list records for the original were not made by the copy.
* The note is not in the table, so a lost table does not change which attempts this root made.
* It names the jobs of several nodes that the root was one of. Their attempts are recorded under another identity, that
  of all their roots together, which a drain on one node cannot work out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import IntegrityError
from ckptmirror.core.field_checks import Fields
from ckptmirror.core.model import new_id
from ckptmirror.local import files

__all__ = ["RootId", "keep_root_id", "note_job", "read_root_id"]

_LIMIT_BYTES = 4096
_JOBS_LIMIT = 32  # the newest; a drain takes an older job for that of another root, and is only more careful
_NAME = f"{names.CONTROL_DIR}/root.json"


@dataclass(frozen=True, slots=True)
class RootId:
    """The identity by which lists of attempts name a root.

    Attributes:
        id: 32 hex digits; "" if it has none yet.
        is_first: Whether the root never had another identity.
        jobs: The identities of the jobs of several nodes that it was one of.
    """

    id: str
    is_first: bool
    jobs: tuple[str, ...] = ()


def read_root_id(root: Path) -> RootId:
    """Return the identity of a root; writes nothing."""
    try:
        note = Fields(json.loads(files.read_limited(root / _NAME, _LIMIT_BYTES)))
        jobs = note.array("jobs", _JOBS_LIMIT) if note.has("jobs") else []
        known = RootId(note.id("id"), note.boolean("is_first"), tuple(map(str, jobs)))
        return known if note.value("inodes") == _inodes(root) else RootId("", is_first=False)
    except FileNotFoundError:
        return RootId("", is_first=True)
    except (ValueError, RecursionError, IntegrityError):  # broken: what it said is unknown
        return RootId("", is_first=False)


def keep_root_id(root: Path) -> RootId:
    """Return the identity of a root. Give it a new one if it has none, or that of another directory.

    The caller holds the root lock.
    """
    known = read_root_id(root)
    if known.id:
        return known
    made = RootId(new_id(), known.is_first)
    _write(root, made)
    return made


def note_job(root: Path, job: str) -> None:
    """Record the identity of a job of several nodes that this root is one of.

    The caller holds the root lock.
    """
    known = read_root_id(root)
    if known.id and job not in ("", known.id, *known.jobs):
        _write(root, replace(known, jobs=(*known.jobs, job)[-_JOBS_LIMIT:]))


def _write(root: Path, known: RootId) -> None:
    note = {"id": known.id, "is_first": known.is_first, "inodes": _inodes(root), "jobs": known.jobs}
    files.write_bytes(root / _NAME, json.dumps(note).encode(), save_id=known.id, replace=True)


def _inodes(root: Path) -> list[int]:
    """Return the inodes of the root and of its lock file, which is created once and never replaced."""
    return [root.stat().st_ino, (root / names.LOCK_NAME).stat().st_ino]
