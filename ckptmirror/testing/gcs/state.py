"""What the server knows: buckets, objects, upload sessions and tokens, in one directory.

Rules:
* Every change is one SQLite transaction; the bytes it names are complete in their file before it. So a kill at any
  instruction leaves a change whole or absent. Nothing is fsynced: this outlives a process, not a machine.
* A file of bytes has a name of its own from its first byte on and never moves; at start, files that nobody names are
  removed.
* Generations rise strictly, over deletions and restarts too.
* Only the event loop's thread calls this module, and only one server uses a directory.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sqlite3
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ckptmirror.testing.gcs.answers import ApiError, not_found
from ckptmirror.testing.gcs.checks import Preconditions

__all__ = ["Bucket", "Session", "State", "StoredObject"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, created_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    bucket TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, metageneration INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL, crc32c BLOB NOT NULL, md5 BLOB, created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL, file TEXT NOT NULL, metadata TEXT NOT NULL, PRIMARY KEY (bucket, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    upload_id TEXT PRIMARY KEY, bucket TEXT NOT NULL, name TEXT NOT NULL, file TEXT NOT NULL,
    started_us INTEGER NOT NULL, state TEXT NOT NULL, total INTEGER, declared TEXT NOT NULL, result TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens (
    token TEXT PRIMARY KEY, issued_s REAL NOT NULL, expires_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


def _now_us() -> int:
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket."""

    name: str
    created_us: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A live object; ``metadata`` holds the resource fields that a client may set (``contentType``, ``metadata`` …)."""

    bucket: str
    name: str
    generation: int
    metageneration: int
    size_bytes: int
    crc32c: bytes
    md5: bytes | None
    created_us: int
    updated_us: int
    file: str
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """A resumable upload.

    Attributes:
        state: ``open``, ``done`` (``result`` is the object it made), ``cancelled`` or ``dead`` (its end was refused).
        total: The object's length as soon as the client has said it.
        declared: ``metadata`` (resource fields), ``preconditions`` and ``checksums`` (base64) from the start.
    """

    upload_id: str
    bucket: str
    name: str
    file: str
    started_us: int
    declared: dict[str, Any]
    state: str = "open"
    total: int | None = None
    result: StoredObject | None = None


class State:
    """The directory of one server."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data"
        self._data.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise BlockingIOError(f"another server is using {directory}") from None
        self._db = sqlite3.connect(directory / "index.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(_SCHEMA)
        self._remove_unnamed_files()

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def _remove_unnamed_files(self) -> None:
        rows = self._db.execute("SELECT file FROM objects UNION SELECT file FROM sessions WHERE state = 'open'")
        named = {row[0] for row in rows}
        for path in self._data.iterdir():
            if path.name not in named:
                path.unlink()

    def new_file(self) -> str:
        """A name for bytes that are about to arrive."""
        return secrets.token_hex(16)

    def path(self, file: str) -> Path:
        """Where the bytes of ``file`` lie."""
        return self._data / file

    def remove_file(self, file: str) -> None:
        """Drop bytes that nothing names any more; open descriptors keep reading."""
        self.path(file).unlink(missing_ok=True)

    # Buckets

    def insert_bucket(self, name: str) -> Bucket:
        if self._db.execute("SELECT 1 FROM buckets WHERE name = ?", (name,)).fetchone():
            raise ApiError(409, "Your previous request to create the named bucket succeeded and you already own it.")
        self._db.execute("INSERT INTO buckets VALUES (?, ?)", (name, _now_us()))
        return self.bucket(name)

    def bucket(self, name: str) -> Bucket:
        row = self._db.execute("SELECT name, created_us FROM buckets WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise not_found("The specified bucket does not exist.")
        return Bucket(*row)

    def buckets(self) -> list[Bucket]:
        return [Bucket(*row) for row in self._db.execute("SELECT name, created_us FROM buckets ORDER BY name")]

    def delete_bucket(self, name: str) -> None:
        self.bucket(name)
        if self._db.execute("SELECT 1 FROM objects WHERE bucket = ? LIMIT 1", (name,)).fetchone():
            raise ApiError(409, "The bucket you tried to delete is not empty.")
        self._db.execute("DELETE FROM buckets WHERE name = ?", (name,))

    # Objects

    def find(self, bucket: str, name: str) -> StoredObject | None:
        row = self._db.execute("SELECT * FROM objects WHERE bucket = ? AND name = ?", (bucket, name)).fetchone()
        return None if row is None else _object(row)

    def live(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        """The live object, which must be at ``generation`` if one is given; 404 otherwise."""
        self.bucket(bucket)
        found = self.find(bucket, name)
        if found is None or generation not in (None, found.generation):
            raise not_found(f"No such object: {bucket}/{name}")
        return found

    def names_from(self, bucket: str, start: str, end: str, limit: int) -> list[StoredObject]:
        """Objects with ``start`` <= name (< ``end`` if given), in the order of their names' UTF-8 bytes."""
        query = "SELECT * FROM objects WHERE bucket = ? AND name >= ? AND (? = '' OR name < ?) ORDER BY name LIMIT ?"
        return [_object(row) for row in self._db.execute(query, (bucket, start, end, end, limit))]

    def put(self, new: StoredObject, preconditions: Preconditions, upload_id: str | None = None) -> StoredObject:
        """Make complete bytes the live object, and its session done, in one transaction.

        Raises:
            ApiError: 412 or 304; nothing changed.
        """
        self.bucket(new.bucket)
        old = self.find(new.bucket, new.name)
        preconditions.check(*((old.generation, old.metageneration) if old else (0, 0)))
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            now_us = _now_us()
            new = replace(new, generation=self._next_generation(now_us), created_us=now_us, updated_us=now_us)
            self._write(new)
            if upload_id is not None:
                done = "UPDATE sessions SET state = 'done', result = ? WHERE upload_id = ?"
                self._db.execute(done, (_to_text(new), upload_id))
        if old is not None:
            self.remove_file(old.file)
        return new

    def _next_generation(self, now_us: int) -> int:
        row = self._db.execute("SELECT value FROM counters WHERE name = 'generation'").fetchone()
        generation = max(now_us, (row[0] if row else 0) + 1)
        self._db.execute("INSERT OR REPLACE INTO counters VALUES ('generation', ?)", (generation,))
        return generation

    def _write(self, item: StoredObject) -> None:
        values = asdict(item)
        values["metadata"] = json.dumps(item.metadata)
        marks = ", ".join(f":{name}" for name in values)
        self._db.execute(f"INSERT OR REPLACE INTO objects ({', '.join(values)}) VALUES ({marks})", values)

    def change_metadata(self, item: StoredObject, metadata: dict[str, Any]) -> StoredObject:
        """Give a live object other metadata: the metageneration rises, the generation stays."""
        changed = replace(
            item, metadata=metadata, metageneration=item.metageneration + 1, updated_us=max(_now_us(), item.updated_us)
        )
        self._write(changed)
        return changed

    def delete(self, item: StoredObject) -> None:
        self._db.execute("DELETE FROM objects WHERE bucket = ? AND name = ?", (item.bucket, item.name))
        self.remove_file(item.file)

    # Upload sessions

    def start_session(self, bucket: str, name: str, declared: dict[str, Any], total: int | None) -> Session:
        session = Session(secrets.token_urlsafe(48), bucket, name, self.new_file(), _now_us(), declared, total=total)
        row = (session.upload_id, bucket, name, session.file, session.started_us, "open", total, json.dumps(declared))
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)
        return session

    def session(self, upload_id: str) -> Session | None:
        row = self._db.execute("SELECT * FROM sessions WHERE upload_id = ?", (upload_id,)).fetchone()
        if row is None:
            return None
        result = None if row[8] is None else _from_text(row[8])
        upload_id, bucket, name, file, started_us, state, total, declared = row[:8]
        return Session(upload_id, bucket, name, file, started_us, json.loads(declared), state, total, result)

    def set_total(self, session: Session, total: int) -> Session:
        """Remember the length that the client has now said."""
        self._db.execute("UPDATE sessions SET total = ? WHERE upload_id = ?", (total, session.upload_id))
        return replace(session, total=total)

    def end_session(self, session: Session, state: str) -> None:
        """``cancelled`` or ``dead``: what arrived is dropped."""
        self._db.execute("UPDATE sessions SET state = ? WHERE upload_id = ?", (state, session.upload_id))
        self.remove_file(session.file)

    # Tokens

    def issue_token(self, lifetime_s: float) -> str:
        token = f"ya29.{secrets.token_urlsafe(32)}"
        now_s = time.time()
        self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (token, now_s, now_s + lifetime_s))
        return token

    def token_times_s(self, token: str) -> tuple[float, float] | None:
        """When an issued token was issued and when it expires (seconds since 1970)."""
        row = self._db.execute("SELECT issued_s, expires_s FROM tokens WHERE token = ?", (token,)).fetchone()
        return None if row is None else (row[0], row[1])


def _object(row: tuple[Any, ...]) -> StoredObject:
    values = dict(zip(_OBJECT_COLUMNS, row, strict=True))
    return StoredObject(**{**values, "metadata": json.loads(values["metadata"])})


_OBJECT_COLUMNS = tuple(column.name for column in fields(StoredObject))


def _to_text(item: StoredObject) -> str:
    values = asdict(item)
    values["crc32c"] = item.crc32c.hex()
    values["md5"] = None if item.md5 is None else item.md5.hex()
    return json.dumps(values)


def _from_text(text: str) -> StoredObject:
    values = json.loads(text)
    values["crc32c"] = bytes.fromhex(values["crc32c"])
    values["md5"] = None if values["md5"] is None else bytes.fromhex(values["md5"])
    return StoredObject(**values)
