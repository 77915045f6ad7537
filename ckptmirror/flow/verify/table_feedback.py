"""Table feedback: compares a root's table with what a verification found on its mirrors.

Rules:
* A verification changes the table in one way only: it makes a verified record of a damaged object pending again. That
  blocks a deletion and causes an upload, never the reverse.
* It does so only for a mirror that the table knows, and that has the identity that the table remembers, and never for
  an object that could not be read. It asks the mirror once more before: a worker may have repaired the object.
* A root without a table, or with one that cannot be opened, is verified without it; a note says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableSequence, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Self

from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, open_mirrors
from ckptmirror.flow.places.object_match import why_differs
from ckptmirror.flow.retention.mirror_audit import forget_verified
from ckptmirror.flow.verify.structure import Subject
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import SaveRow, UploadRecord, UploadsTable
from ckptmirror.stores.retrying import OnWait

__all__ = ["Table"]


class Table:
    """A root's table, if there is one to ask.

    Args:
        root: None if only mirrors are verified: then there is no table to read or change.
        read_only: Whether the table is only read.
    """

    def __init__(self, root: Path | None, *, read_only: bool) -> None:
        self._root = root
        self._read_only = read_only
        self._table: UploadsTable | None = None
        self._known: dict[str, bool] = {}
        self._why_not = ""

    def __enter__(self) -> Self:
        if self._root is None or not self._root.is_dir():
            return self
        try:
            table = open_known_table(self._root, read_only=self._read_only)
            try:
                self._known = {row.url: row.required for row in table.mirrors()}
            except BaseException:
                table.close()
                raise
            self._table = table
        except CkptMirrorError as error:
            self._why_not = str(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._table is not None:
            self._table.close()

    def knows(self, url: str) -> bool:
        """Whether the table has this mirror among its own."""
        return url in self._known

    def open(self, url: str, on_wait: OnWait | None = None) -> Mirror | None:
        """Open a mirror that the table knows, and check its identity; None if the table does not know it."""
        if self._table is None or self._root is None or url not in self._known:
            return None
        spec = MirrorSpec(url, self._known[url])
        (mirror,) = open_mirrors([spec], self._root, self._table, on_wait=on_wait, is_verb=True)
        return mirror

    def save_of(self, subject: Subject) -> SaveRow | None:
        """Return the table's row of a save whose meta cannot be read; None if it has none, or the meta was read."""
        if self._table is None or subject.meta is not None:
            return None
        with contextlib.suppress(CkptMirrorError):
            saves = self._table.saves()
            if not subject.is_on_mirror:
                return next((row for row in saves if row.meta_path == Path(subject.name).name), None)
            metas = [record for record in self._table.records(mirror=subject.place) if record.role == "meta"]
            ids = [record.save_id for record in metas if subject.name in (record.object, record.path)]
            return next((row for row in saves if row.save_id in ids), None)
        return None

    def holders(self, save_id: str) -> list[str]:
        """Return the mirrors that have the save, by the table."""
        if self._table is None or not save_id:
            return []
        with contextlib.suppress(CkptMirrorError):
            return [there.mirror for there in self._table.standing(save_id) if there.verified and there.committed]
        return []

    def missed_on(self, mirror: Mirror, subjects: Sequence[Subject], step: int | None) -> list[Subject]:
        """Return the saves that the table calls committed on a mirror, but whose meta is not there.

        Raises:
            StoreTemporary: The mirror does not answer.
        """
        if self._table is None or not self.knows(mirror.url):
            return []
        standing = {subject.save_id: subject.standing for subject in subjects if not subject.is_on_mirror}
        there = {subject.save_id for subject in subjects if subject.place == mirror.url}
        missed = []
        for record in self._table.records(mirror=mirror.url, state=RecordState.VERIFIED):
            name = record.object or record.path
            if record.role != "meta" or record.save_id in there or step not in (None, record.step):
                continue
            if mirror.store.stat(name) is None:  # otherwise it is broken, which is reported already, or a tombstone
                missed.append(
                    Subject(
                        place=mirror.url,
                        name=name,
                        step=record.step,
                        standing=standing.get(record.save_id, "unknown"),
                        exists=lambda _name: True,
                        save_id=record.save_id,
                        why="its meta is gone from the mirror",
                        is_missed=True,
                    )
                )
        return missed

    def doubt(self, mirror: Mirror, subjects: Sequence[Subject], notes: MutableSequence[str]) -> int:
        """Make verified records of damaged objects pending again; return how many.

        A meta that is only not signed, and did not change since it was verified, would be no better if sent again.
        If the mirror does not answer for an object, its record stays unchanged, and a note says so.
        """
        if self._table is None or not self.knows(mirror.url):
            return 0
        count = 0
        for subject in subjects:
            bad = {path: fault for path, fault in subject.faults.items() if fault.state == "damaged"}
            is_broken_meta = subject.meta is None and subject.state() == "damaged"
            for record in self._verified(mirror, subject):
                if record.role == "meta" and is_broken_meta:
                    reason = f"{subject.name} is damaged on the mirror: {subject.why}"
                elif record.role == "artifact" and (path := _path_of(record, subject)) in bad:
                    reason = f"{record.object or record.path} is damaged on the mirror: {bad[path].why}"
                else:
                    continue
                try:
                    stands = _still_stands(mirror, record, subject) and not _was_sent_so(mirror, record, subject)
                except CkptMirrorError as error:
                    name = record.object or record.path
                    notes.append(
                        f"{mirror.url}/{name}: its record was not changed, because it could not be asked: {error}"
                    )
                    continue
                if stands:
                    forget_verified(self._table, record, reason)
                    count += 1
        return count

    def notes_on(self, mirror: Mirror, subjects: Sequence[Subject]) -> list[str]:
        """Return notes about the table's records of a mirror that are not about damage."""
        if self._table is None or not self.knows(mirror.url):
            damaged = any(subject.state() == "damaged" for subject in subjects)
            why = self._why_not or f"{mirror.url} is not a mirror of {self._root}"
            return [f"{why.rstrip('.')}: no upload record was changed"] if damaged else []
        other = [
            record
            for subject in subjects
            for record in self._verified(mirror, subject)
            if record.role == "artifact"
            and _path_of(record, subject) not in subject.faults
            and (info := subject.objects.get(record.object or record.path)) is not None
            and why_differs(record, info) is not None
        ]
        if not other:
            return []
        first = other[0].object or other[0].path
        return [
            f"{mirror.url}: {len(other)} objects were rewritten there since they were verified ({first} …); "
            f"`ckptmirror drain --root {quote(str(self._root))}` verifies them again",
        ]

    def _verified(self, mirror: Mirror, subject: Subject) -> list[UploadRecord]:
        """Return the verified records of a save there, for the objects that were checked."""
        assert self._table is not None
        if subject.meta is None:
            records = self._table.records(mirror=mirror.url, state=RecordState.VERIFIED)
            return [r for r in records if r.role == "meta" and (r.object or r.path) == subject.name]
        named = {artifact.object_name for artifact in subject.meta.artifacts}
        records = self._table.records(save_id=subject.save_id, mirror=mirror.url, state=RecordState.VERIFIED)
        return [r for r in records if r.role == "artifact" and (r.object or r.path) in named]


def _still_stands(mirror: Mirror, record: UploadRecord, subject: Subject) -> bool:
    """Whether the mirror still has the object that was checked under the record's name."""
    name = record.object or record.path
    now, seen = mirror.store.stat(name), subject.objects.get(name)
    if record.role == "meta":
        return (now is None) == subject.is_missed
    return (now.generation if now is not None else None) == (seen.generation if seen is not None else None)


def _was_sent_so(mirror: Mirror, record: UploadRecord, subject: Subject) -> bool:
    """Whether a meta that is not signed has the bytes that were verified once."""
    now = mirror.store.stat(subject.name) if subject.not_signed else None
    return now is not None and why_differs(replace(record, generation=now.generation), now, store=mirror.store) is None


def _path_of(record: UploadRecord, subject: Subject) -> str:
    """Return the path by which the mirror's meta names the record's file: tags may differ."""
    assert subject.meta is not None
    wanted = names.untagged(record.path)
    return next((a.path for a in subject.meta.artifacts if names.untagged(a.path) == wanted), "")
