"""Temporary files of a ``file://`` mirror: their names, and the removal of those that dead writers left.

Rules:
* A temporary is in the directory of its final name. Its writer holds a lock on it, if the file system has locks.
* Only its writer removes it, until it is unlocked and a day old.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time

from ckptmirror.local import crashpoints

__all__ = ["remove_stale_temporaries", "remove_temporary", "temporary_name"]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STALE_TEMPORARY_S = 24 * 3600.0


def temporary_name(last: str) -> str:
    """Return a new temporary name for a file that will be ``last``."""
    return f"{_stem(last)}.{secrets.token_hex(8)}.tmp"


def _stem(last: str) -> str:
    """Return the beginning of a temporary's name: the final name, shortened if the rest would not fit."""
    return last if len(last.encode()) <= 200 else hashlib.blake2b(last.encode(), digest_size=16).hexdigest()


def remove_temporary(name: str, parent: int) -> None:
    """Remove a temporary, unless it was renamed to its final name."""
    try:
        with crashpoints.around("mirror.unlink_temporary"):
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass  # it was renamed to its final name


def remove_stale_temporaries(parent: int, last: str) -> None:
    """Remove the temporaries of the same object that are unlocked and a day old by the file system's clock."""
    pattern = re.compile(re.escape(_stem(last)) + r"\.[0-9a-f]{16}\.tmp")
    for entry in [entry for entry in os.scandir(parent) if pattern.fullmatch(entry.name)]:
        try:
            descriptor = os.open(entry.name, _READ, dir_fd=parent)
        except OSError:
            continue  # gone, or not ours to read
        try:
            if time.time() - os.fstat(descriptor).st_mtime > _STALE_TEMPORARY_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_temporary(entry.name, parent)
        except OSError:
            continue  # its writer lives, or may live
        finally:
            os.close(descriptor)
