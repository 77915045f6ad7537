"""The kind of file system of a directory, and the kinds that a root and its table must not be on.

Rules:
* A root is never under FUSE: gcsfuse and similar mounts have no atomic rename, and their fsync makes nothing durable.
  virtiofs, by which a host shares a directory with its guest, has both, and is allowed.
* A root may be on a network file system, but its uploads table may not: locks and shared memory do not work there.
* A path that does not exist yet is judged by the nearest existing directory above it, following links.
* If the mount table cannot be read, nothing more is allowed: what statfs(2) reports as FUSE counts as FUSE.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

from ckptmirror.core.errors import ConfigError
from ckptmirror.local.storage_errors import explained

__all__ = ["file_system_type", "mount_of", "refuse_fuse", "refuse_network_place"]

_MOUNTS = Path("/proc/self/mountinfo")
_FUSE = 0x65735546
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x564C: "NCP",
    0x01021997: "9P",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS",
    0x786F4256: "VirtualBox shared folders",
    _FUSE: "FUSE",
}
_LENT_BY_A_HOST = {"virtiofs"}


def file_system_type(path: Path) -> int:
    """Return statfs(2)'s f_type, which os.statvfs leaves out."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(512)
    if libc.statfs(os.fsencode(path), answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF


def refuse_network_place(directory: Path, type_of: Callable[[Path], int] = file_system_type) -> None:
    """Refuse a directory for the uploads table if its file system is not node-local.

    Raises:
        ConfigError: It is a network file system or FUSE.
    """
    name = _NETWORK.get(_type_of_nearest(directory, type_of))
    if name is not None:
        raise ConfigError(
            f"The pending-uploads table must be on node-local disk, but {directory} is on {name}.",
            hint="Set state_dir (`ckptmirror push` has --state-dir) to a directory on this node's own disk.",
        )


def refuse_fuse(
    place: Path, mounts: Path = _MOUNTS, type_of: Callable[[Path], int] = file_system_type, *, what: str = "root"
) -> None:
    """Refuse a root, or another place (``what``), under FUSE, wherever its table is. Nothing is created there.

    Raises:
        ConfigError: It is under FUSE.
        LocalStorageUnwritable: Its file system does not answer.
    """
    if _type_of_nearest(place, type_of) != _FUSE:
        return
    found = mount_of(place, mounts)
    point, kind = found if found is not None else (_nearest(place), "FUSE")
    if kind in _LENT_BY_A_HOST:
        return
    where = "this machine's own disk" if what == "root" else "a disk, or on NFS"
    raise ConfigError(
        f"The {what} {place} is on {kind}, mounted on {point}: under FUSE no rename is atomic and no fsync durable.",
        hint=f"Choose a {what} on {where}, and give what is mounted there as a mirror, by its own URL "
        "(gs://bucket/prefix).",
    )


def mount_of(place: Path, mounts: Path = _MOUNTS) -> tuple[Path, str] | None:
    """Return the mount point above ``place`` and the type of its file system; None if they are not known."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    types: dict[Path, str] = {}
    for fields in map(str.split, lines):
        if "-" in fields[6:-1]:
            # The last of several mounts on one point is the visible one.
            types[_unescaped(fields[4])] = fields[fields.index("-", 6) + 1]
    real = Path(os.path.realpath(place))
    for point in (real, *real.parents):
        if point in types:
            return point, types[point]
    return None


def _unescaped(point: str) -> Path:
    """Return the path with its octal escapes (of spaces, for example) decoded."""
    return Path(re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), point))


def _type_of_nearest(path: Path, type_of: Callable[[Path], int]) -> int:
    nearest = _nearest(path)
    with explained("look at the file system of", nearest):
        return type_of(nearest)


def _nearest(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    return next((candidate for candidate in (real, *real.parents) if candidate.exists()), real)
