"""What lies in a root's directories: names, types and sizes, asked once each, never through a link.

Rules:
* One scan a directory, and one stat an entry that somebody asks about.
* Only the root itself may be reached through links.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core.errors import IntegrityError

__all__ = ["Listing"]

_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class _Directory:
    """Entries by name, or why they cannot be listed."""

    entries: dict[str, os.DirEntry[str]]
    why: str = ""


class Listing:
    """The directories below ``root``, each scanned when first asked about."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._directories: dict[str, _Directory] = {}

    def names(self, directory: str = "") -> list[str]:
        """Return the names in a directory given relative to the root, sorted; empty if it cannot be listed."""
        return sorted(self._directory(directory).entries)

    def is_dir(self, path: str) -> bool:
        """Whether ``path`` is a directory, not a link to one."""
        entry = self._entry(path)
        return entry is not None and entry.is_dir(follow_symlinks=False)

    def is_link(self, path: str) -> bool:
        """Whether ``path`` is a symbolic link."""
        entry = self._entry(path)
        return entry is not None and entry.is_symlink()

    def why_not_file(self, path: str, size_bytes: int) -> str:
        """Return why ``path`` is not a regular file of exactly ``size_bytes``; "" if it is."""
        directory, _, name = path.rpartition("/")
        listed = self._directory(directory)
        if listed.why:
            return listed.why
        entry = listed.entries.get(name)
        if entry is None:
            return f"{path} is missing"
        if entry.is_symlink():
            return f"{path} is a symbolic link, and links are not followed"
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return f"{path} is missing"
        if not stat.S_ISREG(facts.st_mode):
            return f"{path} is not a regular file"
        if facts.st_size != size_bytes:
            return f"{path} has {facts.st_size} bytes instead of {size_bytes}"
        return ""

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
            entry = self._entry(directory)
            if entry is None:
                return _Directory({}, f"{directory} is missing")
            if entry.is_symlink():
                return _Directory({}, f"{directory} is a symbolic link, and links are not followed")
            if not entry.is_dir(follow_symlinks=False):
                return _Directory({}, f"{directory} is not a directory")
        try:
            with os.scandir(self.root / directory) as entries:
                return _Directory({entry.name: entry for entry in entries})
        except FileNotFoundError:
            return _Directory({}, f"{directory or self.root} is missing")
        except OSError as error:
            if not directory:
                raise IntegrityError(f"{self.root} cannot be listed: {error.strerror}.") from error
            return _Directory({}, f"{directory} cannot be listed: {error.strerror}")
