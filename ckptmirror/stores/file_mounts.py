"""Mounts: whether the file system that should hold a directory is there, by what fstab lists and the kernel has.

Rules:
* A listed mount point counts as mounted only if a mount on it fits the listed type. A bind of a path on itself, which a
  service manager makes where it lets a process write, is a mount of the file system beneath, and does not fit.
* An automount point that waits is a mount of its own type, and does not fit either.
* Rows that say ``auto``, ``none`` or ``bind`` leave the type open: there any mount counts.
* A type that only a mount helper knows (``efs``, ``sshfs``) has another name in the kernel: there a mount of any other
  file system than the one beneath counts.
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
    """Return the mount point, ``place`` or above it, that is listed and not mounted; None if there is none.

    Args:
        place: A path without links in it.
        fstab: What should be mounted.
        mounts: What is.
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
    """The rows of a table of the system that have so many fields; none where it cannot be read."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    return [row for row in rows if len(row) >= fields]


def _unescaped(point: str) -> str:
    """A path as it is: spaces stand in these tables as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), point).rstrip("/") or "/"
