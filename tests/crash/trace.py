"""Reads a system call trace of strace and says which changes of the disk have no crash point around them.

Rules:
* A change is covered if its thread has passed ``before`` of a label and not yet ``after``; marks show in the trace as
  failing ``access`` calls. A call that fails inside changed nothing, and ends the cover: its ``after`` never comes.
* SQLite writes its files itself: what it appends to its write-ahead log is a commit and needs a ``table.*`` label; what
  it moves from there into the database, and its shared memory, changes nothing that could be seen after a kill.
* A database that is built under a temporary name is judged by its creation and its publishing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmirror.core.names import CONTROL_DIR
from ckptmirror.local.crashpoints import MARK_PREFIX

__all__ = ["CALLS", "Call", "calls", "changes", "covered_labels", "uncovered"]

CALLS = (
    "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,ftruncate,truncate,fallocate,fsync,fdatasync,"
    "sync_file_range,sync,syncfs,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,open,openat,creat,utimensat,access,faccessat,faccessat2"
)
_LINE = re.compile(r"(?P<thread>\d+)\s+(?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\)\s+=\s+(?P<answer>-?\d+|\?)", re.DOTALL)
_DESCRIPTOR = re.compile(r"^(?:\d+|AT_FDCWD)<(?P<path>[^>]*)>")
_TEXT = re.compile(r'(?:(?:\d+|AT_FDCWD)<(?P<at>[^>]*)>, )?"(?P<text>(?:[^"\\]|\\.)*)"')
_DATABASE = re.compile(r"uploads\.db(\.[0-9a-f]{8}\.tmp)?(-wal|-shm|-journal)?")
_ON_DESCRIPTOR = {
    "write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync",
    "sync_file_range", "syncfs", "sendfile", "copy_file_range",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One finished system call."""

    thread: str
    name: str
    arguments: str
    answer: str

    @property
    def failed(self) -> bool:
        return self.answer.startswith("-")

    @property
    def mark(self) -> tuple[str, str] | None:
        """Label and side, if this is the mark of a crash point."""
        if "access" not in self.name or MARK_PREFIX not in self.arguments:
            return None
        path = self.arguments.split('"')[1]
        _, _, _, label, side = path.split("/")
        return label, side

    @property
    def paths(self) -> list[str]:
        """The paths that the call changes."""
        if self.name in _ON_DESCRIPTOR:
            match = _DESCRIPTOR.match(self.arguments)
            return [match["path"]] if match else []
        if self.name == "utimensat" and (match := re.match(r"\d+<([^>]*)>, NULL", self.arguments)):
            return [match[1]]
        found = [os.path.join(match["at"] or "", match["text"]) for match in _TEXT.finditer(self.arguments)]
        return found[1:] if self.name.startswith("symlink") else found

    @property
    def changes_disk(self) -> bool:
        if "access" in self.name or self.failed:
            return False
        return "O_CREAT" in self.arguments if self.name in ("open", "openat") else True

    def __str__(self) -> str:
        return f"{self.name}({self.arguments[:200]}) = {self.answer}"


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """Yield finished calls, in the order in which they ended."""
    begun: dict[str, str] = {}
    for line in lines:
        match = _LINE.match(line.rstrip("\n"))
        if match is None:
            continue
        thread, rest = match["thread"], match["rest"]
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>")
            continue
        if (resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest)) is not None:
            rest = begun.pop(thread, "") + resumed[1]
        if (call := _CALL.match(rest)) is not None:
            yield Call(thread, call["name"], call["arguments"], call["answer"])


def changes(found: Iterable[Call], places: Sequence[Path]) -> Iterator[tuple[Call, str | None]]:
    """Yield every change below the places, with the label that covers it."""
    covering: dict[str, str] = {}
    for call in found:
        if call.mark is not None:
            label, side = call.mark
            if side == "before":
                covering[call.thread] = label
            else:
                covering.pop(call.thread, None)
            continue
        if call.failed:
            covering.pop(call.thread, None)
            continue
        below = [path for path in call.paths if any(Path(path).is_relative_to(place) for place in places)]
        if below and call.changes_disk:
            yield call, covering.get(call.thread)


def uncovered(found: Iterable[Call], places: Sequence[Path]) -> list[str]:
    """Say which changes below the places have no crash point around them."""
    return [str(call) for call, label in changes(found, places) if not _is_covered(call, label)]


def covered_labels(found: Iterable[Call], places: Sequence[Path]) -> set[str]:
    """The labels that cover a change."""
    return {label for call, label in changes(found, places) if label is not None and not _is_sqlites_own(call)}


def _is_covered(call: Call, label: str | None) -> bool:
    if _is_sqlites_own(call):
        return True
    if any(Path(path).name == "uploads.db-wal" for path in call.paths):
        return label is not None and label.startswith("table.")
    return label is not None


def _is_sqlites_own(call: Call) -> bool:
    """A database under a temporary name, and what SQLite does beside appending to its log."""
    # Its fdatasync of the directory; nothing of ours calls that.
    if call.name == "fdatasync" and all(Path(path).name == CONTROL_DIR for path in call.paths):
        return True
    for path in call.paths:
        match = _DATABASE.fullmatch(Path(path).name)
        if match is None:
            return False
        building = match[1] is not None and call.name not in ("open", "openat", "renameat2", "rename", "link", "linkat")
        own = match[2] == "-shm" or (match[2] is None and call.name in ("pwrite64", "fsync", "fdatasync", "ftruncate"))
        log_end = match[2] == "-wal" and call.name in ("open", "openat", "unlink", "unlinkat", "fsync", "fdatasync")
        if not (building or own or log_end or (match[1] is not None and match[2] is not None)):
            return False
    return True
