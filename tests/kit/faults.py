"""What goes wrong in a test: a damaged file, a mirror that refuses or is silent, a disk that fails at one change.

Rules:
* Each change of the disk is between two crash points. At the first of them the change is refused, as the kernel or
  SQLite would refuse it: nothing was changed.
* What takes something away, or only makes a name durable, needs no room: a full disk lets it through, a broken or
  read-only one not.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import apsw

from ckptmirror import CheckpointManager
from ckptmirror.core import sealed_json
from ckptmirror.core.errors import StorePermanent
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local import crashpoints
from tests.kit.faulty_store import FaultyStore, StoreFault

_NEEDS_NO_ROOM = (
    "dir.fsync",
    "dir.rmdir",
    "file.unlink",
    "mirror.remove_directory",
    "mirror.unlink",
    "mirror.unlink_temporary",
    "table.remove_temporary",
    "trash.rename",
    "trash.rmdir",
    "trash.unlink",
)
_IN_FILES = ("create", "fsync", "publish", "move_log", "set_aside")
_BY_SQLITE = {errno.ENOSPC: apsw.FullError, errno.EDQUOT: apsw.FullError, errno.EIO: apsw.IOError}


@dataclass
class DiskFault:
    """What is to fail, and what did.

    Attributes:
        at: The number of the change, from 1; 0 for none.
        lasting: Whether every later change that takes room fails too.
        code: The errno.
        prefix: Only changes whose label begins so, or with one of these, are counted.
        other_than: Changes whose label begins so are not.
        labels: The changes counted.
        struck: The labels of those that were refused.
    """

    at: int = 0
    lasting: bool = False
    code: int = errno.ENOSPC
    prefix: str | tuple[str, ...] = ""
    other_than: str = "-"
    labels: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def point(self, name: str) -> None:
        """Stand in for ``crashpoints.point``."""
        label, _, side = name.rpartition(":")
        if side != "before" or not label.startswith(self.prefix) or label.startswith(self.other_than):
            return
        if self.code not in (errno.EIO, errno.EROFS) and label in _NEEDS_NO_ROOM:
            return
        with self._lock:
            self.labels.append(label)
            strikes = len(self.labels) == self.at or (self.lasting and 0 < self.at < len(self.labels))
            if strikes:
                self.struck.append(label)
        if strikes:
            raise self._error(label)

    def _error(self, label: str) -> Exception:
        area, _, change = label.rpartition(".")
        if area == "table" and change not in _IN_FILES:
            return _BY_SQLITE[self.code]("the disk refuses")
        return OSError(self.code, os.strerror(self.code))


@contextmanager
def failing(fault: DiskFault) -> Iterator[DiskFault]:
    """Let the disk of this process fail so in the body."""
    honest = crashpoints.point
    crashpoints.point = fault.point
    try:
        yield fault
    finally:
        crashpoints.point = honest


def flip_bit(path: Path, offset: int = -1) -> None:
    """Invert one bit of a file, keeping its size."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def of_a_later_version(data: bytes) -> bytes:
    """A meta or a list as a newer ckptmirror would write it: another version, under a checksum that fits."""
    document = json.loads(data)
    document["version"] += 2  # the next one is that of a signed document
    document.pop("checksum")
    document["checksum"] = sealed_json._checksum(document)
    return json.dumps(document).encode()


def faulty(manager: CheckpointManager, *faults: StoreFault) -> list[FaultyStore]:
    """Put a scripted store before each mirror of a manager that has not resumed yet; return them in order."""
    assert manager._node is not None
    stores = [FaultyStore(mirror.store, faults) for mirror in manager._node.mirrors]
    manager._node.mirrors = [
        Mirror(mirror.url, mirror.required, store)  # type: ignore[arg-type]
        for mirror, store in zip(manager._node.mirrors, stores, strict=True)
    ]
    return stores


def refusing() -> StoreFault:
    """Every upload of a file is refused for good."""
    return StoreFault("upload", when="before", times=0, error=lambda: StorePermanent("refused (a scripted fault)"))


def dead() -> StoreFault:
    """The mirror answers nothing."""
    return StoreFault(when="before", times=0)
