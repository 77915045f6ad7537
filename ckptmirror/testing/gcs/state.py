"""What the server knows: buckets, objects, upload sessions, rewrites and tokens, in one directory.

Rules:
* Every change is one SQLite transaction; the bytes it names are complete in their file before it. So a kill at any
  instruction leaves a change whole or absent. Nothing is fsynced: this outlives a process, not a machine.
* A file of bytes has a name of its own from its first byte on and never moves or changes; versions may share one. At
  start, files that nobody names are removed.
* Only the event loop's thread calls this module, and only one server uses a directory.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptmirror.testing.gcs.answers import ApiError, not_found
from ckptmirror.testing.gcs.pace import Pace
from ckptmirror.testing.gcs.records import Bucket, Policy, Rewrite, Session, object_from_text
from ckptmirror.testing.gcs.versions import VersionTable, now_us

__all__ = ["State"]

_LAYOUT = 2
_OF_THE_PROJECT = {
    "roles/storage.legacyBucketOwner": ["projectEditor:p", "projectOwner:p"],
    "roles/storage.legacyBucketReader": ["projectViewer:p"],
}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (
    name TEXT PRIMARY KEY, created_us INTEGER NOT NULL, updated_us INTEGER NOT NULL, metageneration INTEGER NOT NULL,
    settings TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    upload_id TEXT PRIMARY KEY, bucket TEXT NOT NULL, name TEXT NOT NULL, file TEXT NOT NULL,
    started_us INTEGER NOT NULL, state TEXT NOT NULL, total INTEGER, declared TEXT NOT NULL, result TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rewrites (
    token TEXT PRIMARY KEY, started_us INTEGER NOT NULL, done_bytes INTEGER NOT NULL, request TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens (
    token TEXT PRIMARY KEY, issued_s REAL NOT NULL, expires_s REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS policies (
    bucket TEXT PRIMARY KEY, version INTEGER NOT NULL, bindings TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


class State:
    """The directory of one server; its objects are in ``objects``."""

    def __init__(self, directory: Path, *, mutations_per_s: float | None = None, day_s: float = 86400.0) -> None:
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
        self._check_layout(directory)
        self._db.executescript(_SCHEMA)
        self.objects = VersionTable(self._db, self.remove_file, Pace(mutations_per_s), day_s)
        self._remove_unnamed_files()

    def _check_layout(self, directory: Path) -> None:
        """Refuse a directory whose tables another version of this server made."""
        (layout,) = self._db.execute("PRAGMA user_version").fetchone()
        has_tables = self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
        if has_tables and layout != _LAYOUT:
            raise ValueError(f"{directory} was written by another version of this server: use an empty one")
        self._db.execute(f"PRAGMA user_version = {_LAYOUT}")

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def _remove_unnamed_files(self) -> None:
        rows = self._db.execute("SELECT file FROM versions UNION SELECT file FROM sessions WHERE state = 'open'")
        named = {row[0] for row in rows}
        for path in self._data.iterdir():
            if path.name not in named:
                path.unlink()

    def new_file(self) -> str:
        """A name for bytes that are about to arrive."""
        return secrets.token_hex(16)

    def path(self, file: str) -> Path:
        """The path of the bytes of ``file``."""
        return self._data / file

    def remove_file(self, file: str) -> None:
        """Drop bytes that nothing names any more; open descriptors keep reading."""
        self.path(file).unlink(missing_ok=True)

    # Buckets

    def insert_bucket(self, name: str, settings: dict[str, Any] | None = None) -> Bucket:
        if self._db.execute("SELECT 1 FROM buckets WHERE name = ?", (name,)).fetchone():
            raise ApiError(409, "Your previous request to create the named bucket succeeded and you already own it.")
        now = now_us()
        row = (name, now, now, 1, json.dumps(settings or {}))
        self._db.execute("INSERT INTO buckets VALUES (?, ?, ?, ?, ?)", row)
        return self.bucket(name)

    def bucket(self, name: str) -> Bucket:
        row = self._db.execute("SELECT * FROM buckets WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise not_found("The specified bucket does not exist.")
        return _bucket(row)

    def buckets(self) -> list[Bucket]:
        rows = self._db.execute("SELECT * FROM buckets ORDER BY name")
        return [_bucket(row) for row in rows]

    def change_bucket(self, bucket: Bucket, settings: dict[str, Any]) -> Bucket:
        """Give a bucket other settings: its metageneration rises."""
        query = "UPDATE buckets SET settings = ?, updated_us = ?, metageneration = metageneration + 1 WHERE name = ?"
        self._db.execute(query, (json.dumps(settings), max(now_us(), bucket.updated_us), bucket.name))
        return self.bucket(bucket.name)

    def delete_bucket(self, bucket: Bucket) -> None:
        if not self.objects.is_empty(bucket.name):
            raise ApiError(409, "The bucket you tried to delete is not empty.")
        self._db.execute("DELETE FROM buckets WHERE name = ?", (bucket.name,))
        self._db.execute("DELETE FROM policies WHERE bucket = ?", (bucket.name,))
        self.objects.forget_bucket(bucket.name)

    def policy(self, bucket: str) -> Policy:
        """Who has which role in a bucket; that of a new one, where nobody has set another."""
        row = self._db.execute("SELECT version, bindings FROM policies WHERE bucket = ?", (bucket,)).fetchone()
        return Policy(0, dict(_OF_THE_PROJECT)) if row is None else Policy(row[0], json.loads(row[1]))

    def change_policy(self, bucket: str, bindings: dict[str, list[str]]) -> Policy:
        row = (bucket, self.policy(bucket).version + 1, json.dumps(bindings))
        self._db.execute("INSERT OR REPLACE INTO policies VALUES (?, ?, ?)", row)
        return self.policy(bucket)

    # Upload sessions

    def start_session(self, bucket: str, name: str, declared: dict[str, Any], total: int | None) -> Session:
        session = Session(secrets.token_urlsafe(48), bucket, name, self.new_file(), now_us(), declared, total=total)
        row = (session.upload_id, bucket, name, session.file, session.started_us, "open", total, json.dumps(declared))
        self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)
        return session

    def session(self, upload_id: str) -> Session | None:
        row = self._db.execute("SELECT * FROM sessions WHERE upload_id = ?", (upload_id,)).fetchone()
        if row is None:
            return None
        result = None if row[8] is None else object_from_text(row[8])
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

    # Rewrites

    def start_rewrite(self, done_bytes: int, request: dict[str, Any]) -> Rewrite:
        rewrite = Rewrite(secrets.token_urlsafe(48), now_us(), done_bytes, request)
        row = (rewrite.token, rewrite.started_us, done_bytes, json.dumps(request, sort_keys=True))
        self._db.execute("INSERT INTO rewrites VALUES (?, ?, ?, ?)", row)
        return rewrite

    def rewrite(self, token: str) -> Rewrite | None:
        row = self._db.execute("SELECT * FROM rewrites WHERE token = ?", (token,)).fetchone()
        return None if row is None else Rewrite(row[0], row[1], row[2], json.loads(row[3]))

    def advance_rewrite(self, rewrite: Rewrite, done_bytes: int) -> Rewrite:
        self._db.execute("UPDATE rewrites SET done_bytes = ? WHERE token = ?", (done_bytes, rewrite.token))
        return replace(rewrite, done_bytes=done_bytes)

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


def _bucket(row: tuple[Any, ...]) -> Bucket:
    name, created_us, updated_us, metageneration, settings = row
    return Bucket(name, created_us, updated_us, metageneration, json.loads(settings))
