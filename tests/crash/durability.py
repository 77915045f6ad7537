"""Judges a trace by what a power loss would leave: SIGKILL alone can never show a missing fsync.

Rules (a "name" is one that stays: not a temporary's, not one in the trash, not one of the control directory):
* A file gets its name only after an fsync that followed its last write; a directory only after all in it is durable.
* A meta gets its name only when every other name of its place is durable.
* Records are released only when the name of the meta is durable; so are the files of a rotated save moved only after
  the going of its meta.
* A commit of the table is in its log, and the log fsynced, when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptmirror.core.names import CONTROL_DIR, is_tmp_name
from tests.crash.trace import Call

__all__ = ["not_durable"]

_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate")
_MOVES = ("rename", "renameat", "renameat2", "link", "linkat")


def not_durable(found: Iterable[Call], places: Sequence[Path]) -> list[str]:
    """Say what could be seen after a power loss without being durable."""
    judge = _Judge(places)
    for call in found:
        judge.see(call)
    return judge.wrong


class _Judge:
    def __init__(self, places: Sequence[Path]) -> None:
        self.wrong: list[str] = []
        self._places = places
        self._written: set[str] = set()  # files with bytes that no fsync followed
        self._named: set[str] = set()  # names that no fsync of their directory followed
        self._gone: set[str] = set()  # metas whose going is not durable yet
        self._label: dict[str, str] = {}

    def see(self, call: Call) -> None:
        if call.mark is not None:
            self._see_mark(call)
        elif not call.failed and call.paths and self._place_of(call.paths[0]) is not None:
            if call.name in _WRITES:
                self._written.add(call.paths[0])
            elif call.name in ("fsync", "fdatasync"):
                self._see_fsync(call.paths[0])
            elif call.name in ("mkdir", "mkdirat"):
                self._named.add(call.paths[0])
            elif call.name in _MOVES:
                self._see_move(*call.paths[:2])

    def _see_mark(self, call: Call) -> None:
        assert call.mark is not None
        label, side = call.mark
        if label.startswith("table.") and side == "after":
            logs = [path for path in self._written if path.endswith("uploads.db-wal")]
            self.wrong += [f"{label} returned before {path} was fsynced" for path in logs]
        if (label, side) == ("table.release_save", "before"):
            late = [path for path in self._named if _is_meta(path) and "/root/" in path]
            self.wrong += [f"records were released before the name {path} was durable" for path in late]

    def _see_fsync(self, path: str) -> None:
        self._written.discard(path)
        self._named = {name for name in self._named if str(Path(name).parent) != path}
        self._gone = {name for name in self._gone if str(Path(name).parent) != path}

    def _see_move(self, source: str, target: str) -> None:
        inside = source + "/"
        if self._stays(target):
            bytes_late = [path for path in self._written if path == source or path.startswith(inside)]
            names_late = [name for name in self._named if name.startswith(inside)]
            self.wrong += [f"{target} got its name before {path} was fsynced" for path in bytes_late + names_late]
            if _is_meta(target):
                place = self._place_of(target)
                late = [name for name in self._named if self._place_of(name) == place and self._stays(name)]
                self.wrong += [f"{target} got its name before the name {name} was durable" for name in late]
            self._named.add(target)
        elif f"/{CONTROL_DIR}/trash/" in target and self._stays(source):
            if _is_meta(source):
                self._gone.add(source)
            else:
                late = [meta for meta in self._gone if Path(meta).parent == Path(source).parent]
                self.wrong += [f"{source} was moved before {meta} was durably gone" for meta in late]
        for seen in (self._written, self._named):
            for path in [path for path in seen if path == source or path.startswith(inside)]:
                seen.discard(path)
                if path != source or seen is self._written:
                    seen.add(target + path.removeprefix(source))

    def _place_of(self, path: str) -> Path | None:
        return next((place for place in self._places if Path(path).is_relative_to(place)), None)

    def _stays(self, path: str) -> bool:
        place = self._place_of(path)
        parts = Path(path).relative_to(place).parts if place is not None else ()
        return bool(parts) and parts[0] != CONTROL_DIR and not any(is_tmp_name(p) or p.endswith(".tmp") for p in parts)


def _is_meta(path: str) -> bool:
    name = Path(path).name
    return name.startswith("meta_") and name.endswith(".json")
