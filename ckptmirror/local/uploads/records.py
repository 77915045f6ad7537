"""The values that the table returns, and how rows become them.

Rules:
* Every row of ``records``, ``saves`` and ``facts`` carries a CRC-32 of its canonical content: a JSON list of its
  columns in the schema's order, without the row number and the checksum. Every change writes it, every read checks it.
* A row that has a wrong checksum, cannot be decoded, or names what no save has, is a ``BrokenRow``: it is reported and
  counts as no record. A start removes the files that the rows of an interrupted save name.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import KINDS, Kind
from ckptmirror.core.names import check_relative_path, parse_artifact_path, parse_name

__all__ = [
    "BrokenRow",
    "Claim",
    "MirrorRow",
    "MirrorStanding",
    "RootIdentity",
    "SaveRow",
    "StateCount",
    "Transition",
    "UploadRecord",
    "canonical_crc",
    "is_line",
    "is_list_of_mirrors",
    "is_list_of_urls",
    "record_from_row",
    "record_to_columns",
    "save_from_row",
    "save_to_columns",
    "text_of",
    "transition_from_row",
]

_LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*")
Value = int | str | bytes | float | None
Role = Literal["artifact", "meta"]


@dataclass(frozen=True, slots=True)
class RootIdentity:
    """The root and the run that a table belongs to.

    Attributes:
        run_id: 32 hex digits.
        root: The root's resolved path when the table was made.
        device: st_dev of the root then.
        inode: st_ino of the root then.
    """

    run_id: str
    root: str
    device: int
    inode: int

    @staticmethod
    def is_one(value: object) -> bool:
        """Whether a fact is an identity."""
        kinds = {"run_id": str, "root": str, "device": int, "inode": int}
        return isinstance(value, dict) and {name: type(one) for name, one in value.items()} == kinds

    @classmethod
    def of(cls, root: Path, run_id: str) -> RootIdentity:
        """Return the identity of a directory, for a run."""
        status = root.stat()
        return cls(run_id, str(root.resolve()), status.st_dev, status.st_ino)

    def is_directory(self, path: Path) -> bool:
        """Whether ``path`` is this same directory now, not only the same path."""
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (self.device, self.inode) == (status.st_dev, status.st_ino)

    def same_root(self, other: RootIdentity) -> bool:
        """Whether both are one root of one run: moved to another path it is still the same directory."""
        return self.run_id == other.run_id and self.same_directory(other)

    def same_directory(self, other: RootIdentity) -> bool:
        """Whether both are one root, whatever its run."""
        return self.root == other.root or (self.device, self.inode) == (other.device, other.inode)


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """One file of one save on one mirror.

    Attributes:
        id: The row's number; it has no meaning outside this table.
        save_order: Rises with every save added: older saves are sent first.
        path: Relative to the root, as in the meta; for role "meta" the meta's own name.
        role: "artifact", or "meta" for the record whose state says whether the save is committed on this mirror.
        size_bytes: Of the file; None for a meta that is not written yet.
        crc32c: Of the file; None for a meta that is not written yet.
        object: The name on the mirror; ``path`` until another one was chosen.
        generation: The object's generation when it was verified; None otherwise.
        session: The resumable session of a half-sent file. It is a key to the mirror: never shown, never logged.
        attempts_made: How often it was claimed.
        token: The fencing token: rises with every claim.
        claimed_by: The worker that holds the lease; None unless the state is ``uploading``.
        lease_boot: The boot that the lease's clock belongs to.
        lease_until_ms: CLOCK_BOOTTIME at which the lease runs out.
        lease_ms: The granted length of the lease.
        not_before_boot: The boot that ``not_before_ms`` belongs to.
        not_before_ms: CLOCK_BOOTTIME before which the record is not claimed again.
        reason: Why it is in its state, in words; of a failed record, the error.
        changed_at_utc: Wall clock of the last change, for people only.
        released: Whether the save's local meta is on disk, so that the record may be claimed.
    """

    id: int
    save_order: int
    save_id: str
    step: int
    path: str
    mirror: str
    role: Role
    kinds: tuple[Kind, ...]
    rank: int | None
    size_bytes: int | None
    crc32c: int | None
    state: RecordState
    object: str
    generation: int | None
    session: str | None = field(repr=False)
    attempts_made: int
    token: int
    claimed_by: str | None
    lease_boot: str | None
    lease_until_ms: int | None
    lease_ms: int | None
    not_before_boot: str | None
    not_before_ms: int | None
    reason: str
    changed_at_utc: str
    released: bool

    @property
    def last_error(self) -> str | None:
        """Why the last try failed; None if there is no error."""
        complains = self.state is RecordState.FAILED or (self.state is RecordState.PENDING and self.attempts_made > 0)
        return self.reason if complains else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's time-limited hold on a record. Every verb on it checks the token."""

    record: UploadRecord

    @property
    def token(self) -> int:
        """The fencing token that the record was claimed under."""
        return self.record.token


@dataclass(frozen=True, slots=True)
class MirrorRow:
    """A mirror that the trainer configured, or that a person pushed to.

    Attributes:
        pushed: The trainer does not upload to it, and nothing waits for it; every drain does upload to it.
    """

    url: str
    required: bool
    pushed: bool = False


@dataclass(frozen=True, slots=True)
class SaveRow:
    """One save, and what every mirror must have of it.

    Attributes:
        artifact_count: Number of records of role "artifact" that the save must have on each of its mirrors.
        size_bytes: Sum of the artifacts' sizes, once (not per mirror).
        released: Whether the save's local meta is on disk.
    """

    save_order: int
    save_id: str
    step: int
    kinds: tuple[Kind, ...]
    meta_path: str
    artifact_count: int
    size_bytes: int
    released: bool


@dataclass(frozen=True, slots=True)
class MirrorStanding:
    """What the table durably knows about one save on one mirror.

    Attributes:
        verified: Every artifact of the save has a sound record with state ``verified``.
        committed: The save's meta has one too.
        skipped: The policy keeps this save off this mirror (its meta's record is ``skipped``).
        removed: The mirror has a tombstone in its place (its meta's record is ``removed``).
        reason: What is missing, in words; "" if nothing is.
    """

    mirror: str
    verified: bool
    committed: bool
    skipped: bool
    removed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of a record's state; ``old`` is None when it was added, ``new`` is None when it left the table."""

    id: int
    save_id: str
    step: int
    path: str
    mirror: str
    old: RecordState | None
    new: RecordState | None
    token: int
    worker: str | None
    reason: str
    at_utc: str


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many records of one mirror are in one state, and their bytes if known.

    For people: the rows are not checked, so no deletion is based on it.
    """

    mirror: str
    state: RecordState
    records: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A damaged row. It counts as no record."""

    table: str
    number: int
    why: str
    content: str


_RECORD_FIELDS = tuple(f.name for f in fields(UploadRecord) if f.name not in ("id", "released"))
_RECORD_INTEGERS = frozenset(
    {"save_order", "step", "rank", "size_bytes", "crc32c", "generation", "attempts_made", "token", "lease_until_ms"}
    | {"lease_ms", "not_before_ms"}
)
_RECORD_NULLABLE = frozenset(
    {"rank", "size_bytes", "crc32c", "generation", "session", "claimed_by", "lease_boot", "lease_until_ms", "lease_ms"}
    | {"not_before_boot", "not_before_ms"}
)


def canonical_crc(values: Sequence[int | str | None]) -> int:
    """Return the CRC-32 of the canonical content of a row."""
    return zlib.crc32(json.dumps(values, separators=(",", ":")).encode("ascii"))


def record_to_columns(record: UploadRecord) -> dict[str, int | str | None]:
    """Return the columns of a record, sealed."""
    columns: dict[str, int | str | None] = {name: getattr(record, name) for name in _RECORD_FIELDS}
    columns["kinds"] = json.dumps(record.kinds)
    columns["state"] = record.state.value
    columns["row_crc"] = canonical_crc(list(columns.values()))
    return columns


def record_from_row(row: Sequence[Value]) -> UploadRecord | BrokenRow:
    """Turn a row of the ``record`` columns into a record, or return what is wrong with it."""
    number, *raw, row_crc, released = row
    try:
        values = [
            _decoded(name, value, integer=name in _RECORD_INTEGERS, nullable=name in _RECORD_NULLABLE)
            for name, value in zip(_RECORD_FIELDS, raw, strict=True)
        ]
        if canonical_crc(values) != row_crc:
            raise ValueError("its checksum is wrong")
        columns: dict[str, Any] = dict(zip(_RECORD_FIELDS, values, strict=True))
        columns["kinds"] = _kinds(columns["kinds"])
        columns["state"] = RecordState(columns["state"])
        _check_names(columns["save_id"], columns["path"], columns["role"])
        if not is_line(columns["mirror"]):
            raise ValueError("mirror is not a URL")
        return UploadRecord(id=cast(int, number), released=released == 1, **columns)
    except ValueError as error:
        return BrokenRow("records", cast(int, number), str(error), repr(_without_session(row)))


def _without_session(row: Sequence[Value]) -> tuple[Value, ...]:
    place = 1 + _RECORD_FIELDS.index("session")
    return tuple("(not shown)" if number == place and value else value for number, value in enumerate(row))


_SAVE_FIELDS = ("save_id", "step", "kinds", "meta_path", "artifact_count", "size_bytes", "released")


def save_to_columns(save: SaveRow) -> dict[str, int | str | None]:
    """Return the columns of a save, sealed; its order is the row's number, which SQLite gives."""
    columns: dict[str, int | str | None] = {name: getattr(save, name) for name in _SAVE_FIELDS}
    columns["kinds"] = json.dumps(save.kinds)
    columns["released"] = int(save.released)
    columns["row_crc"] = canonical_crc(list(columns.values()))
    return columns


def save_from_row(row: Sequence[Value]) -> SaveRow | BrokenRow:
    """Turn a row of the ``save`` columns into a save, or return what is wrong with it."""
    number, *raw, row_crc = row
    try:
        values = [
            _decoded(name, value, integer=name not in ("save_id", "kinds", "meta_path"), nullable=False)
            for name, value in zip(_SAVE_FIELDS, raw, strict=True)
        ]
        if canonical_crc(values) != row_crc:
            raise ValueError("its checksum is wrong")
        columns: dict[str, Any] = dict(zip(_SAVE_FIELDS, values, strict=True))
        columns["kinds"] = _kinds(columns["kinds"])
        columns["released"] = columns["released"] == 1
        _check_names(columns["save_id"], columns["meta_path"], "meta")
        return SaveRow(save_order=cast(int, number), **columns)
    except ValueError as error:
        return BrokenRow("saves", cast(int, number), str(error), repr(tuple(row)))


def _decoded(name: str, value: Value, *, integer: bool, nullable: bool) -> int | str | None:
    if value is None and nullable:
        return None
    if integer and isinstance(value, int):
        return value
    if not integer and isinstance(value, bytes):
        return value.decode("utf-8")
    raise ValueError(f"{name} has the wrong type")


def is_line(value: object) -> bool:
    """Whether a value is one line of text, as a URL or an identity is."""
    return isinstance(value, str) and _LINE.fullmatch(value) is not None


def is_list_of_urls(value: object) -> bool:
    """Whether a fact is a list of URLs."""
    return isinstance(value, list) and all(map(is_line, value))


def is_list_of_mirrors(value: object) -> bool:
    """Whether a fact is a list of URLs, each with whether the mirror is required."""
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 2 and is_line(row[0]) and isinstance(row[1], bool) for row in value
    )


@lru_cache(maxsize=1024)
def _check_names(save_id: str, path: str, role: str) -> None:
    if not re.fullmatch("[0-9a-f]{32}", save_id):
        raise ValueError("save_id is not one")
    try:
        check_relative_path(path)
    except BrokenMeta as error:
        raise ValueError(str(error)) from error
    if role == "artifact" and parse_artifact_path(path) is not None:
        return
    named = parse_name(path) if role == "meta" else None
    if named is None or named.role != "meta":
        raise ValueError(f"{path[:80]!a} is not the name of a file of a save")


def _kinds(text: str) -> tuple[Kind, ...]:
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, list) or not all(kind in KINDS for kind in found):
        raise ValueError("kinds is not a list of kinds")
    return tuple(found)


def text_of(value: Value) -> str:
    """Return text that was read as bytes, for people: invalid letters are replaced."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def transition_from_row(row: Sequence[Value]) -> Transition:
    """Turn a row of the ``transition`` columns into a value."""
    number, save_id, step, path, mirror, old, new, token, worker, reason, at_utc = row
    return Transition(
        id=cast(int, number),
        save_id=text_of(save_id),
        step=cast(int, step),
        path=text_of(path),
        mirror=text_of(mirror),
        old=_state_or_none(old),
        new=_state_or_none(new),
        token=cast(int, token),
        worker=None if worker is None else text_of(worker),
        reason=text_of(reason),
        at_utc=text_of(at_utc),
    )


def _state_or_none(value: Value) -> RecordState | None:
    known: Mapping[str, RecordState] = {state.value: state for state in RecordState}
    return None if value is None else known.get(text_of(value))
