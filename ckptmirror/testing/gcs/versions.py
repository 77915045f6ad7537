"""The versions of all objects, in the server's database.

Sources: https://cloud.google.com/storage/docs/object-versioning and https://cloud.google.com/storage/docs/soft-delete

Rules:
* Every change is one transaction; a file of bytes goes only after the last row that names it.
* What is replaced or deleted becomes noncurrent where the bucket is versioned, else soft-deleted where it has a policy,
  else it is gone. A deletion that names a generation makes nothing noncurrent.
* What is under a hold is neither replaced nor deleted.
* Generations rise strictly, over deletions and restarts too.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from ckptmirror.testing.gcs.answers import ApiError, not_found
from ckptmirror.testing.gcs.checks import Preconditions
from ckptmirror.testing.gcs.pace import Pace
from ckptmirror.testing.gcs.records import Bucket, Folder, StoredObject, object_from_row, to_text

__all__ = ["SCHEMA", "VersionTable", "now_us"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    bucket TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, metageneration INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL, crc32c BLOB NOT NULL, md5 BLOB, created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL, file TEXT NOT NULL, metadata TEXT NOT NULL, components INTEGER NOT NULL,
    deleted_us INTEGER, soft_deleted_us INTEGER, hard_delete_us INTEGER, PRIMARY KEY (bucket, name, generation)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS live ON versions (bucket, name) WHERE deleted_us IS NULL;
CREATE INDEX IF NOT EXISTS version_files ON versions (file);
CREATE INDEX IF NOT EXISTS soft_deleted ON versions (hard_delete_us) WHERE hard_delete_us IS NOT NULL;
CREATE TABLE IF NOT EXISTS folders (
    bucket TEXT NOT NULL, name TEXT NOT NULL, created_us INTEGER NOT NULL, PRIMARY KEY (bucket, name)
) WITHOUT ROWID;
"""
_LIVE = "deleted_us IS NULL"
_KEPT = {"live": _LIVE, "versions": "soft_deleted_us IS NULL", "soft-deleted": "soft_deleted_us IS NOT NULL"}


def now_us() -> int:
    """The time, in the server's unit."""
    return time.time_ns() // 1000


class VersionTable:
    """All versions of all objects, and the folders.

    Args:
        db: The server's database; every change is a transaction of its own.
        drop_file: Called with a file of bytes that no version names any more, after the change.
        pace: How fast one object may change.
        day_s: How long a day of a soft delete policy takes.
    """

    def __init__(
        self, db: sqlite3.Connection, drop_file: Callable[[str], None], pace: Pace, day_s: float = 86400.0
    ) -> None:
        self._db = db
        self._drop_file = drop_file
        self._pace = pace
        self._day_s = day_s
        db.executescript(SCHEMA)
        self.purge()

    # Reading

    def find(self, bucket: str, name: str) -> StoredObject | None:
        """The live version."""
        return self._one(f"bucket = ? AND name = ? AND {_LIVE}", bucket, name)

    def version(self, bucket: str, name: str, generation: int | None, kept: str = "versions") -> StoredObject:
        """The live version, or the one of ``generation``; 404 otherwise.

        Args:
            bucket: A bucket that there is.
            name: The object.
            generation: None for the live version.
            kept: ``versions`` for live and noncurrent ones, ``soft-deleted`` for those.
        """
        if generation is None:
            found = self.find(bucket, name)
        else:
            self.purge()
            where = f"bucket = ? AND name = ? AND generation = ? AND {_KEPT[kept]}"
            found = self._one(where, bucket, name, generation)
        if found is None:
            raise not_found(f"No such object: {bucket}/{name}")
        return found

    def _one(self, where: str, *values: Any) -> StoredObject | None:
        row = self._db.execute(f"SELECT * FROM versions WHERE {where}", values).fetchone()
        return None if row is None else object_from_row(row)

    def rows_from(self, bucket: str, start: tuple[str, int], end: str, limit: int, kept: str) -> list[StoredObject]:
        """Versions from (name, generation) ``start`` on (< ``end`` if given), by the UTF-8 bytes of their names."""
        where = f"bucket = ? AND name >= ? AND (name > ? OR generation >= ?) AND (? = '' OR name < ?) AND {_KEPT[kept]}"
        query = f"SELECT * FROM versions WHERE {where} ORDER BY name, generation LIMIT ?"
        values = (bucket, start[0], start[0], start[1], end, end, limit)
        return [object_from_row(row) for row in self._db.execute(query, values)]

    def is_empty(self, bucket: str) -> bool:
        """Whether a bucket has neither live nor noncurrent versions."""
        query = "SELECT 1 FROM versions WHERE bucket = ? AND soft_deleted_us IS NULL LIMIT 1"
        return self._db.execute(query, (bucket,)).fetchone() is None

    # Changing

    @contextmanager
    def _change(self) -> Iterator[list[str]]:
        """One transaction; the files in the list are dropped after it, unless a version still names them."""
        dropped: list[str] = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield dropped
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        for file in dropped:
            if self._db.execute("SELECT 1 FROM versions WHERE file = ? LIMIT 1", (file,)).fetchone() is None:
                self._drop_file(file)

    def put(
        self,
        bucket: Bucket,
        new: StoredObject,
        preconditions: Preconditions,
        *,
        no_replacing: str | None = None,
        upload_id: str | None = None,
        move_from: StoredObject | None = None,
    ) -> StoredObject:
        """Make complete bytes the live object, and its session done, in one transaction.

        Args:
            bucket: Where.
            new: The object; its generation and times are given here.
            preconditions: On the live object that there may be.
            no_replacing: Why the caller may not replace a live object; None if it may.
            upload_id: The session that this ends.
            move_from: The version that goes, because this one is it under another name.

        Raises:
            ApiError: 403, 412, 304 or 429; nothing changed.
        """
        old = self.find(new.bucket, new.name)
        if old is not None and no_replacing is not None:
            raise ApiError(403, no_replacing)
        preconditions.check(*((old.generation, old.metageneration) if old else (0, 0)))
        for gone in filter(None, (old, move_from)):
            self._check_hold(gone)
        self._pace.spend(new.bucket, new.name)
        with self._change() as dropped:
            now = now_us()
            if old is not None:
                self._retire(bucket, old, now, dropped)
            if move_from is not None:
                self._retire(bucket, move_from, now, dropped)
            metadata = new.metadata
            if bucket.place[1] != "STANDARD":
                metadata = {"storageClass": bucket.place[1], **metadata}
            generation = self._next_generation(now)
            new = replace(new, generation=generation, created_us=now, updated_us=now, metadata=metadata)
            self._write(new)
            self._make_folders(bucket, new.name, now)
            if upload_id is not None:
                done = "UPDATE sessions SET state = 'done', result = ? WHERE upload_id = ?"
                self._db.execute(done, (to_text(new), upload_id))
        return new

    def _check_hold(self, item: StoredObject) -> None:
        """Refuse to take away what is held (https://cloud.google.com/storage/docs/object-holds).

        Whether a versioned bucket may make a held object noncurrent is not documented; here it may not.
        """
        for name, kind in (("temporaryHold", "Temporary"), ("eventBasedHold", "Event-Based")):
            if item.metadata.get(name):
                raise ApiError(
                    403,
                    f"Object '{item.bucket}/{item.name}' is under active {kind} hold and cannot be deleted, "
                    "overwritten or archived until hold is removed.",
                )

    def _next_generation(self, now: int) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = 'generation'").fetchone()
        generation = max(now, (row[0] if row else 0) + 1)
        self._db.execute("INSERT OR REPLACE INTO counters VALUES ('generation', ?)", (generation,))
        return generation

    def _write(self, item: StoredObject) -> None:
        values = asdict(item)
        values["metadata"] = json.dumps(item.metadata)
        marks = ", ".join(f":{name}" for name in values)
        self._db.execute(f"INSERT OR REPLACE INTO versions ({', '.join(values)}) VALUES ({marks})", values)

    def _retire(self, bucket: Bucket, item: StoredObject, now: int, dropped: list[str], *, keep: bool = True) -> None:
        """Take a version away; ``keep`` lets a versioned bucket keep it as a noncurrent one."""
        since = item.deleted_us or max(now, item.updated_us)
        if keep and bucket.versioned:
            self._write(replace(item, deleted_us=since))
        elif bucket.soft_delete_s:
            end = now + int(bucket.soft_delete_s * self._day_s / 86400.0 * 1e6)
            self._write(replace(item, deleted_us=since, soft_deleted_us=now, hard_delete_us=end))
        else:
            key = (item.bucket, item.name, item.generation)
            self._db.execute("DELETE FROM versions WHERE bucket = ? AND name = ? AND generation = ?", key)
            dropped.append(item.file)

    def change_metadata(self, item: StoredObject, metadata: dict[str, Any]) -> StoredObject:
        """Give a version other metadata: the metageneration rises, the generation stays."""
        self._pace.spend(item.bucket, item.name)
        changed = replace(
            item, metadata=metadata, metageneration=item.metageneration + 1, updated_us=max(now_us(), item.updated_us)
        )
        self._write(changed)
        return changed

    def delete(self, bucket: Bucket, item: StoredObject, *, for_good: bool) -> None:
        """Delete a version; ``for_good``: it was named by its generation, so that it does not become noncurrent."""
        self._check_hold(item)
        self._pace.spend(item.bucket, item.name)
        with self._change() as dropped:
            self._retire(bucket, item, now_us(), dropped, keep=not for_good)

    def purge(self) -> None:
        """Forget what was soft-deleted for longer than its policy wanted."""
        query = "SELECT * FROM versions WHERE hard_delete_us IS NOT NULL AND hard_delete_us <= ?"
        expired = [object_from_row(row) for row in self._db.execute(query, (now_us(),)).fetchall()]
        if expired:
            self._forget(expired)

    def forget_bucket(self, bucket: str) -> None:
        """Forget all that a deleted bucket still held."""
        query = "SELECT * FROM versions WHERE bucket = ?"
        self._forget([object_from_row(row) for row in self._db.execute(query, (bucket,)).fetchall()])
        self._db.execute("DELETE FROM folders WHERE bucket = ?", (bucket,))

    def _forget(self, items: list[StoredObject]) -> None:
        delete = "DELETE FROM versions WHERE bucket = ? AND name = ? AND generation = ?"
        with self._change() as dropped:
            self._db.executemany(delete, [(item.bucket, item.name, item.generation) for item in items])
            dropped.extend(item.file for item in items)

    # Folders

    def _make_folders(self, bucket: Bucket, name: str, now: int) -> None:
        if bucket.hierarchical:
            cuts = [index + 1 for index, letter in enumerate(name) if letter == "/"]
            rows = [(bucket.name, name[:cut], now) for cut in cuts]
            self._db.executemany("INSERT OR IGNORE INTO folders VALUES (?, ?, ?)", rows)

    def insert_folder(self, bucket: Bucket, name: str) -> Folder:
        """Create a folder with all folders above it."""
        with self._change():
            self._make_folders(bucket, name, now_us())
        folder = self.folder(bucket.name, name)
        assert folder is not None
        return folder

    def folder(self, bucket: str, name: str) -> Folder | None:
        """A folder, if there is one of that name."""
        query = "SELECT * FROM folders WHERE bucket = ? AND name = ?"
        row = self._db.execute(query, (bucket, name)).fetchone()
        return None if row is None else Folder(*row)

    def folders_from(self, bucket: str, start: str, end: str, limit: int) -> list[Folder]:
        """Folders with ``start`` <= name (< ``end`` if given), in the order of their names' UTF-8 bytes."""
        query = "SELECT * FROM folders WHERE bucket = ? AND name >= ? AND (? = '' OR name < ?) ORDER BY name LIMIT ?"
        return [Folder(*row) for row in self._db.execute(query, (bucket, start, end, end, limit))]

    def delete_folder(self, folder: Folder) -> None:
        """Take a folder away."""
        self._db.execute("DELETE FROM folders WHERE bucket = ? AND name = ?", (folder.bucket, folder.name))
