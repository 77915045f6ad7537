"""How much room a disk has for the next save.

Rules:
* Free is what a process without privileges may still write.
* What the save in flight has written so far counts as free: the room for that save is all that is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.local.storage_errors import explained

__all__ = ["allocated_bytes", "free_bytes", "room_bytes"]

_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's is


def free_bytes(directory: Path) -> int:
    """Return how many bytes are free on the disk of a directory.

    Raises:
        LocalStorageUnwritable: It is gone.
    """
    with explained("ask for the free space of", directory):
        found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def room_bytes(root: Path) -> int:
    """Return what is free for the next save: the free space, and what a save in flight has written.

    Raises:
        LocalStorageUnwritable: The root is gone.
    """
    with explained("list", root):
        return free_bytes(root) + sum(allocated_bytes(root / name) for name in _temporaries(root))


def allocated_bytes(path: Path) -> int:
    """Return what a file, or all files of a directory, take on the disk; 0 for what is gone by now."""
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(allocated_bytes(Path(entry.path)) for entry in os.scandir(path))
        return path.lstat().st_blocks * _BLOCK_BYTES
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _temporaries(root: Path) -> list[str]:
    parsed = {entry.name: names.parse_name(entry.name) for entry in os.scandir(root)}
    return [name for name, one in parsed.items() if one is not None and one.role == "tmp"]
