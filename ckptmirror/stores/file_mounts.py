"""Whether the file system that should hold a directory is mounted: compares fstab with the kernel's mounts.

Rules:
* A listed mount point counts as mounted only if a mount on it has the listed type. A service manager binds a path to
  itself to let a process write there; that is a mount of the file system beneath, and does not count.
* An automount point that waits is a mount of its own type, and does not count either.
* Rows with ``auto``, ``none`` or ``bind`` leave the type open: any mount counts.
* A type that only a mount helper knows (``efs``, ``sshfs``) has another name in the kernel: a mount of any file system
  other than the one beneath counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FSTAB", "MOUNTS", "unmounted_point"]

FSTAB = Path("/etc/fstab")
MOUNTS = Path("/proc/self/mountinfo")
_OPEN_TYPES = {"auto", "none"}
_OPEN_OPTIONS = {"bind", "rbind"}
_ALIKE = ({"nfs", "nfs4"}, {"cifs", "smb3", "smbfs"}, {"ext2", "ext3", "ext4"}, {"xfs"}, {"btrfs"}, {"tmpfs"})
_NEVER_A_HELPERS = {"autofs", "tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class _Mount:
    type: str
    covers_another: bool  # it is not the file system of the mount beneath it


def unmounted_point(place: Path, fstab: Path = FSTAB, mounts: Path = MOUNTS) -> Path | None:
    """Return a mount point, ``place`` or above it, that is listed but not mounted; None if there is none.

    Args:
        place: A path without links in it.
        fstab: The table of what should be mounted.
        mounts: The kernel's table of what is mounted.
    """
    listed = {_unescaped(row[1]): row[2:4] for row in _rows(fstab, 3)}
    wanted = [point for point in (place, *place.parents[:-1]) if str(point) in listed]
    if not wanted:
        return None
    mounted = list(_mounted(mounts))
    for point in wanted:
        types, *options = listed[str(point)]
        there = [mount for where, mount in mounted if where == str(point)]
        if not any(_fits(types, options, mount) for mount in there):
            return point
    return None


def _fits(types: str, options: list[str], mount: _Mount) -> bool:
    wanted = set(types.split(","))
    if wanted & _OPEN_TYPES or _OPEN_OPTIONS & set(",".join(options).split(",")):
        return True
    return any(_is_one(one, mount) for one in wanted)


def _is_one(wanted: str, mount: _Mount) -> bool:
    if wanted == mount.type:
        return True
    for alike in _ALIKE:
        if wanted in alike:
            return mount.type in alike
    return mount.covers_another and mount.type not in _NEVER_A_HELPERS


def _mounted(table: Path) -> Iterator[tuple[str, _Mount]]:
    rows = _rows(table, 10)
    devices = {row[0]: row[2] for row in rows}
    for row in rows:
        if "-" in row[6:-1]:
            yield _unescaped(row[4]), _Mount(row[row.index("-", 6) + 1], devices.get(row[1]) != row[2])


def _rows(table: Path, fields: int) -> list[list[str]]:
    """Return the rows of a system table that have at least this many fields; none if it cannot be read."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    return [row for row in rows if len(row) >= fields]


def _unescaped(point: str) -> str:
    """Return the path with its octal escapes (of spaces, for example) decoded."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), point).rstrip("/") or "/"
