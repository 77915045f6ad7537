"""The content of a root's directories: names, types and sizes. Links are never followed.

Rules:
* Each directory is scanned once; an entry gets one stat, if a caller asks about it.
* A file that cannot be read now (an I/O error, no permission) is not reported as missing: it may be whole.
* Only the path of the root itself may contain links.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core.errors import IntegrityError
from ckptmirror.local.storage_errors import disk_error

__all__ = ["Fault", "Listing", "is_not_readable_now"]

_MAX_DEPTH = 32
_SOMETHING_ELSE = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with an entry; ``unreadable`` if it could not be read, so that it may be whole."""

    why: str
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class _Directory:
    """Entries by name, or why they cannot be listed."""

    entries: dict[str, os.DirEntry[str]]
    fault: Fault | None = None


def is_not_readable_now(error: BaseException | None) -> bool:
    """Whether an error of the device, a permission or a shortage prevented reading, and nothing else."""
    return isinstance(error, OSError) and error.errno not in _SOMETHING_ELSE


class Listing:
    """The directories below ``root``, each scanned when first asked about."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._directories: dict[str, _Directory] = {}

    def names(self, directory: str = "") -> list[str]:
        """Return the sorted names in a directory, given relative to the root; empty if it cannot be listed."""
        return sorted(self._directory(directory).entries)

    def is_dir(self, path: str) -> bool:
        """Whether ``path`` is a directory, not a link to one."""
        entry = self._entry(path)
        return entry is not None and entry.is_dir(follow_symlinks=False)

    def is_unreadable(self, directory: str) -> bool:
        """Whether a directory exists but cannot be listed now."""
        fault = self._directory(directory).fault
        return fault is not None and fault.unreadable

    def fault_of(self, path: str, size_bytes: int) -> Fault | None:
        """Return why ``path`` is not a regular file of exactly ``size_bytes``; None if it is."""
        directory, _, name = path.rpartition("/")
        listed = self._directory(directory)
        if listed.fault is not None:
            return listed.fault
        entry = listed.entries.get(name)
        if entry is None:
            return Fault(f"{path} is missing")
        if entry.is_symlink():
            return Fault(f"{path} is a symbolic link, and links are not followed")
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return Fault(f"{path} is missing")
        except OSError as error:
            return Fault(f"{path} cannot be looked at: {error.strerror}", is_not_readable_now(error))
        if not stat.S_ISREG(facts.st_mode):
            return Fault(f"{path} is not a regular file")
        if facts.st_size != size_bytes:
            return Fault(f"{path} has {facts.st_size} bytes instead of {size_bytes}")
        return None

    def size_bytes(self, path: str) -> int | None:
        """Return the size of a regular file; None if it is not one, or cannot be looked at now."""
        entry = self._entry(path)
        try:
            return entry.stat().st_size if entry is not None and entry.is_file(follow_symlinks=False) else None
        except OSError:
            return None

    def files_below(self, directory: str, depth: int = 0) -> list[str]:
        """Return the paths of everything below a directory that is not itself a directory, sorted."""
        found = []
        for name in self.names(directory):
            path = f"{directory}/{name}"
            if self.is_dir(path) and depth < _MAX_DEPTH:
                found += self.files_below(path, depth + 1)
            else:
                found.append(path)
        return found

    def _entry(self, path: str) -> os.DirEntry[str] | None:
        directory, _, name = path.rpartition("/")
        return self._directory(directory).entries.get(name)

    def _directory(self, directory: str) -> _Directory:
        known = self._directories.get(directory)
        if known is None:
            known = self._directories[directory] = self._scanned(directory)
        return known

    def _scanned(self, directory: str) -> _Directory:
        if directory:
            above = self._directory(directory.rpartition("/")[0])
            entry = above.entries.get(directory.rpartition("/")[2])
            if above.fault is not None:
                return _Directory({}, above.fault)
            if entry is None:
                return _Directory({}, Fault(f"{directory} is missing"))
            if entry.is_symlink():
                return _Directory({}, Fault(f"{directory} is a symbolic link, and links are not followed"))
            if not entry.is_dir(follow_symlinks=False):
                return _Directory({}, Fault(f"{directory} is not a directory"))
        try:
            with os.scandir(self.root / directory) as entries:
                return _Directory({entry.name: entry for entry in entries})
        except FileNotFoundError:
            return _Directory({}, Fault(f"{directory or self.root} is missing"))
        except OSError as error:
            if not directory and isinstance(error, PermissionError):
                raise disk_error(error, "list", self.root) from error
            if not directory:
                raise IntegrityError(f"{self.root} cannot be listed: {error.strerror}.") from error
            return _Directory({}, Fault(f"{directory} cannot be listed: {error.strerror}", is_not_readable_now(error)))
