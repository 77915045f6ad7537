"""The pending-uploads table: its identity, the changes of saves and their records, and the queries.

Rules:
* Every verb is one transaction, durable when it returns; the history is written in the same one (by triggers).
* The same table may be used by any number of threads and processes, and across forks.
* Records are added before the save's local meta exists and may be claimed only after it does (``release_save``).
* Adding is repeatable: existing records stay as they are, missing ones are added, and a contradiction is refused.
* Each verb of a worker reads the row again, inside the transaction, and continues only if the state is ``uploading``
  under the claim's own token: a worker that lost its claim gets ``ClaimLost`` and has changed nothing.
* An expired lease is ended when a worker asks for work, in the same transaction as the claim.
* A decision of policy, reconcile or a person takes the record from the worker that holds it.
* The history of a record stays when the record leaves the table.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import apsw

from ckptmirror.core.errors import (
    BrokenTable,
    CheckpointNotFound,
    ClaimLost,
    ForeignTable,
    IntegrityError,
    Temporary,
    UsageError,
)
from ckptmirror.core.lifecycle import WAITING, RecordState
from ckptmirror.core.model import Artifact, Kind, new_id
from ckptmirror.core.names import ATTEMPTS_NAME
from ckptmirror.local.uploads import changes, place, reports, rows
from ckptmirror.local.uploads.database import Database
from ckptmirror.local.uploads.lease_clock import BootClock, LeaseClock
from ckptmirror.local.uploads.records import (
    BrokenRow,
    Claim,
    MirrorRow,
    MirrorStanding,
    RootIdentity,
    SaveRow,
    StateCount,
    Transition,
    UploadRecord,
    is_line,
    is_list_of_mirrors,
    is_list_of_urls,
    record_to_columns,
    save_to_columns,
)
from ckptmirror.local.uploads.statements import statement

__all__ = ["HISTORY_KEPT", "UploadsTable"]

HISTORY_KEPT = 200_000
"""How many transitions are kept; older ones are forgotten when a save is added."""


class UploadsTable:
    """A durable table of upload records.

    Attributes:
        path: The database file.
    """

    def __init__(self, database: Database, clock: LeaseClock) -> None:
        self.path = database.path
        self._database = database
        self._clock = clock

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        create: bool = False,
        read_only: bool = False,
        identity: RootIdentity | None = None,
        clock: LeaseClock | None = None,
        busy_timeout_s: float = 5.0,
    ) -> UploadsTable:
        """Open the table at ``path``; with ``create``, make it first if there is none.

        Args:
            path: The database file.
            create: Make the table if there is none.
            read_only: Change nothing; works on a medium that cannot be written.
            identity: The root that the table must belong to; written into it if it has none yet. None: do not check.
            clock: The clock for leases; the machine's own by default.
            busy_timeout_s: How long to wait for other processes.

        Raises:
            NoTable: There is none.
            TableLocked: Another process held it for too long.
            BrokenTable: It is not a sound table. ``set_aside`` moves it away, and it is rebuilt from disk and mirror.
            NewerTable: A newer ckptmirror wrote it.
            ForeignTable: It is another root's.
            ConfigError: The directory is on a network file system.
        """
        if create and read_only:
            raise UsageError("a table cannot be created by a reader")
        database = Database(Path(path), read_only=read_only, busy_timeout_s=busy_timeout_s)
        try:
            if create:
                database.create()
            database.check()
            table = cls(database, clock if clock is not None else BootClock())
            if identity is not None:
                table.claim_identity(identity)
        except BaseException:
            database.close()
            raise
        return table

    @staticmethod
    def set_aside(path: Path, *, timeout_s: float = 5.0) -> Path:
        """Rename a broken table and its logs to a free name beside it, and return that. No process may have it open."""
        return place.set_aside(Path(path), timeout_s=timeout_s)

    def close(self) -> None:
        """Close it; every change is durable already."""
        self._database.close()

    def __enter__(self) -> UploadsTable:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- whose it is, and where it mirrors to ---------------------------------------------------------------

    def identity(self) -> RootIdentity | None:
        """Return the root and run that this table belongs to; None if it has none yet."""
        value = self._database.read_fact("identity", RootIdentity.is_one)
        return None if value is None else RootIdentity(**value)

    def claim_identity(self, identity: RootIdentity) -> None:
        """Write the identity if the table has none yet; otherwise check that it is the same root of the same run.

        Raises:
            ForeignTable: It is another root's, or another run's.
        """
        known = self.identity()
        if known is None:
            if not self._database.read_only:
                self._database.write_fact("identity", asdict(identity))
        elif not known.same_root(identity):
            raise ForeignTable(
                f"{self.path} is the table of {known.root} (run {known.run_id}), "
                f"not of {identity.root} (run {identity.run_id})."
            )

    def check_root(self, root: Path) -> None:
        """Check that this is the root's table, or belongs to none yet. Call this before anything is changed.

        Another directory at the root's path counts as the root if it has the list of attempts (it was restored), or
        if the table has no saves to miss. Otherwise the root's file system is not mounted.

        Raises:
            ForeignTable: It is another root's.
            Temporary: The root is not mounted, so the saves of this table cannot be found here.
        """
        known = self.identity()
        if known is None or known.is_directory(root):
            return
        if known.root != str(root.resolve()):
            raise self._foreign(root, known)
        if not os.path.lexists(root / ATTEMPTS_NAME) and any(save.released for save in self.saves()):
            raise Temporary(
                f"{root} is not the directory that {self.path} names, and no run is in it: is it mounted?",
                hint=f"Mount it and start again. If it was emptied on purpose, move {self.path.name}* away "
                "or set another state_dir: the mirrors are asked again.",
            )

    def _foreign(self, root: Path, known: RootIdentity) -> ForeignTable:
        error = ForeignTable(f"{self.path} is the table of {known.root} (run {known.run_id}), not of {root}.")
        if self.path.is_relative_to(root):  # it came along with a copied root
            error.hint = (
                f"If {root} is a copy, move {self.path.name}* away: the next start of the trainer "
                "rebuilds the table from disk and mirrors. Only one of the copies can continue."
            )
        return error

    def recreate(self) -> Path | None:
        """Replace a broken or missing table by an empty one; return where the broken one is now.

        All users of this object continue with the new table; a claim of the old one is lost.

        Raises:
            NoTable: This object was closed.
        """
        return self._database.recreate()

    def set_mirrors(self, mirrors: Sequence[tuple[str, bool]], pushed: Collection[str] = ()) -> None:
        """Replace the list of ``(url, required)``, and the set of those that were pushed to.

        An unchanged list is not written, because the disk may be full.
        """
        self._set_fact("pushed", sorted(pushed), unset=[])
        self._set_fact("mirrors", [[url, required] for url, required in mirrors])

    def _set_fact(self, name: str, wanted: Sequence[object], *, unset: Sequence[object] | None = None) -> None:
        """Write a fact, unless it has this value already; a fact that was never written has the value ``unset``."""
        with suppress(BrokenTable):
            found = self._database.read_fact(name, lambda value: isinstance(value, list))
            if (unset if found is None else found) == wanted:
                return
        self._database.write_fact(name, wanted)

    def knows_mirrors(self) -> bool:
        """Whether the list of mirrors was ever written: a new table does not know the mirrors.

        Raises:
            BrokenTable: The list does not read back as it was written.
        """
        return self._database.read_fact("mirrors", is_list_of_mirrors) is not None

    def mirrors(self) -> list[MirrorRow]:
        """Return the mirrors in configured order; also empty if the list was never written (:meth:`knows_mirrors`).

        Raises:
            BrokenTable: The list does not read back as it was written.
        """
        pushed = self._database.read_fact("pushed", is_list_of_urls) or ()
        found = self._database.read_fact("mirrors", is_list_of_mirrors) or ()
        return [MirrorRow(url, required, url in pushed) for url, required in found]

    def set_unasked(self, mirrors: Collection[str]) -> None:
        """Store the mirrors that the running start has not yet asked about the files verified there."""
        self._set_fact("unasked", sorted(mirrors), unset=[])

    def unasked(self) -> set[str]:
        """Return what :meth:`set_unasked` stored.

        Raises:
            BrokenTable: The fact does not read back as it was written.
        """
        return set(self._database.read_fact("unasked", is_list_of_urls) or ())

    def own_id(self) -> str:
        """Return what tells this table from one at the same path on another host; "" if it has no id."""
        found: str | None = self._database.read_fact("id", is_line)
        return found or ""

    def give_id(self) -> str:
        """Give the table an id, unless it has one; return it."""
        if not self.own_id():
            self._database.write_fact("id", new_id(), replace=False)
        return self.own_id()

    def mirror_identity(self, url: str) -> str | None:
        """Return the identity that a mirror had at the first contact; None if there was no contact.

        Raises:
            BrokenTable: The fact does not read back as it was written.
        """
        try:
            found: str | None = self._database.read_fact(f"mirror {url}", is_line)
        except BrokenTable as error:
            hint = "See that the mirror is mounted, then move the table away: the next start rebuilds it."
            raise BrokenTable(error.message, hint=hint) from error
        return found

    def remember_mirror_identity(self, url: str, identity: str) -> str:
        """Store a mirror's identity unless one is stored already; return the stored one."""
        self._database.write_fact(f"mirror {url}", identity, replace=False)
        return self.mirror_identity(url) or identity

    # -- whole saves -----------------------------------------------------------------------------------------

    def add_save(
        self,
        save_id: str,
        step: int,
        kinds: Sequence[Kind],
        artifacts: Sequence[Artifact],
        mirrors: Sequence[str],
        *,
        meta_path: str | None = None,
    ) -> int:
        """Add the missing records of a save: one per artifact and mirror, and one per mirror for the meta.

        Records of a new save are pending, but not claimable before ``release_save``.

        Args:
            save_id: 32 hex digits.
            step: The save's step.
            kinds: The save's kinds.
            artifacts: The artifacts that the node's meta will name.
            mirrors: The mirrors' URLs.
            meta_path: The meta's name, ``meta_<step>.json`` if not given.

        Returns:
            How many records were added.

        Raises:
            IntegrityError: The table has this save with other contents.
        """
        if len({artifact.path for artifact in artifacts}) != len(artifacts):
            raise IntegrityError(f"save {save_id} names a path twice")
        total = sum(artifact.digest.size_bytes for artifact in artifacts)
        meta = meta_path if meta_path is not None else f"meta_{step:06d}.json"
        wanted = SaveRow(0, save_id, step, tuple(kinds), meta, len(artifacts), total, released=False)
        # Tokens start at random: a worker of an earlier, rebuilt table cannot hold one that is valid here.
        token = secrets.randbits(48)
        with self._database.change("add_save") as connection:
            save = self._same_save(connection, wanted)
            found = rows.iterate_records(connection, "read the records of a save", {"save_id": save_id})
            known = {(record.path, record.mirror): record for record in found}
            fresh = [
                record
                for record in _records_of_save(save, artifacts, mirrors, token, self._clock)
                if not _is_known(record, known.get((record.path, record.mirror)))
            ]
            before = _count(connection, save_id)
            connection.executemany(statement("add a record"), [record_to_columns(record) for record in fresh])
            added = _count(connection, save_id) - before
            connection.execute(statement("forget the oldest history"), {"keep": HISTORY_KEPT})
        return added

    def _same_save(self, connection: apsw.Connection, wanted: SaveRow) -> SaveRow:
        known = rows.read_save(connection, wanted.save_id)
        if known is None:
            connection.execute(statement("add a save"), save_to_columns(wanted))
            return replace(wanted, save_order=connection.last_insert_rowid())
        if replace(known, save_order=0, released=False) != wanted:
            raise IntegrityError(f"save {wanted.save_id} is in the table with other contents; a save never changes")
        return known

    def release_save(self, save_id: str) -> None:
        """Allow workers to claim a save's records, because its local meta is on disk.

        Raises:
            CheckpointNotFound: The save is not in the table.
        """
        with self._database.change("release_save") as connection:
            save = rows.read_save(connection, save_id)
            if save is None:
                raise CheckpointNotFound(f"save {save_id} is not in the table")
            columns = save_to_columns(replace(save, released=True))
            connection.execute(statement("write a changed save"), columns | {"save_order": save.save_order})

    def discard_unreleased(self, save_ids: Iterable[str]) -> int:
        """Remove the saves that a crash left without a meta; released ones stay. Returns how many were removed."""
        gone = 0
        with self._database.change("discard_unreleased") as connection:
            for save_id in save_ids:
                save = rows.read_save(connection, save_id)
                if save is not None and not save.released:
                    self._take_out(connection, save_id, "discarded: the save was never committed on this disk")
                    gone += 1
        return gone

    def forget_save(self, save_id: str, reason: str = "the local save was deleted") -> None:
        """Remove a save that rotation deleted from this disk; its history stays."""
        with self._database.change("forget_save") as connection:
            self._take_out(connection, save_id, reason)

    def _take_out(self, connection: apsw.Connection, save_id: str, reason: str) -> None:
        noted = {"save_id": save_id, "reason": reason, "at_utc": self._clock.utc()}
        connection.execute(statement("note that the records of a save go"), noted)
        connection.execute(statement("delete the records of a save"), {"save_id": save_id})
        connection.execute(statement("delete a save"), {"save_id": save_id})

    # -- what a worker does with the record that it holds ----------------------------------------------------

    def claim(self, worker: str, mirror: str, *, lease_s: float, exclude: Collection[str] = ()) -> Claim | None:
        """Claim the oldest record of a mirror that may be sent, or return None.

        Oldest save first, artifacts before the meta. A record whose lease expired counts as pending again.

        Args:
            worker: Names the worker, for people and for ``put_back_all``.
            mirror: The mirror's URL.
            lease_s: How long the claim lasts unless it is renewed, at most a day.
            exclude: Ids of saves to skip.
        """
        if not self._anything(mirror, exclude):
            return None  # without a write transaction: idle workers ask often
        with self._database.change("claim") as connection:
            for late in list(
                rows.iterate_records(connection, "find the records whose lease ran out", self._now(mirror))
            ):
                back = changes.put_back(late, f"{late.claimed_by} did not finish it in time", 0, self._clock)
                rows.write_changed(connection, late, back)
            record = self._next(connection, mirror, exclude)
            taken = None
            if record is not None:
                taken = changes.claimed(record, worker, changes.duration_ms(lease_s), self._clock)
                rows.write_changed(connection, record, taken)
        return None if taken is None else Claim(taken)

    def _now(self, mirror: str) -> dict[str, int | str | None]:
        return {"mirror": mirror, "boot": self._clock.boot_id, "now_ms": self._clock.now_ms()}

    def _anything(self, mirror: str, exclude: Collection[str]) -> bool:
        with self._database.reading() as connection:
            ended = rows.first_record(connection, "find the records whose lease ran out", self._now(mirror))
            return ended is not None or self._next(connection, mirror, exclude) is not None

    def _next(self, connection: apsw.Connection, mirror: str, exclude: Collection[str]) -> UploadRecord | None:
        excluded = json.dumps(sorted(exclude))
        to_send = self._now(mirror) | {"longest_wait_ms": changes.LONGEST_MS, "excluded": excluded}
        for record in rows.iterate_records(connection, "find the records that may be sent, oldest first", to_send):
            if record.state is RecordState.PENDING and reports.may_be_sent(connection, record):
                return record
        return None

    def _worker_change(self, verb: str, claim: Claim, change: Callable[[UploadRecord], UploadRecord]) -> UploadRecord:
        held = claim.record
        with self._database.change(verb) as connection:
            record = rows.read_record(connection, held.save_id, held.path, held.mirror)
            if record is None or record.state is not RecordState.UPLOADING or record.token != claim.token:
                now = "gone" if record is None else f"{record.state.value}, token {record.token}"
                raise ClaimLost(
                    f"{held.path} of save {held.save_id} on {held.mirror} is {now}; yours was {claim.token}"
                )
            new = change(record)
            rows.write_changed(connection, record, new)
        return new

    def renew(self, claim: Claim, lease_s: float) -> Claim:
        """Renew the lease for ``lease_s`` from now. Raises ClaimLost, as all of a worker's verbs do."""
        lease_ms = changes.duration_ms(lease_s)
        return Claim(self._worker_change("renew", claim, lambda r: changes.renewed(r, lease_ms, self._clock)))

    def set_session(self, claim: Claim, session: str | None) -> Claim:
        """Store the resumable session, so that any process can continue the upload."""
        return Claim(self._worker_change("set_session", claim, lambda r: changes.with_session(r, session)))

    def set_object(self, claim: Claim, object_name: str) -> Claim:
        """Choose another name on the mirror, because another save's object has this one."""
        return Claim(self._worker_change("set_object", claim, lambda r: changes.with_object(r, object_name)))

    def verify(self, claim: Claim, *, object_name: str, generation: int, size_bytes: int, crc32c: int) -> UploadRecord:
        """Mark the record as verified, with the mirror's answer.

        Raises:
            ClaimLost: Another worker holds the record.
            IntegrityError: The answer does not match the saved file; nothing changed.
        """

        def change(record: UploadRecord) -> UploadRecord:
            return changes.verified(
                record,
                object_name=object_name,
                generation=generation,
                size_bytes=size_bytes,
                crc32c=crc32c,
                clock=self._clock,
            )

        return self._worker_change("verify", claim, change)

    def put_back(self, claim: Claim, reason: str, *, not_before_s: float = 0.0) -> UploadRecord:
        """After a temporary error: pending again, not claimed for ``not_before_s`` from now (at most a day)."""
        wait_ms = changes.duration_ms(not_before_s)
        return self._worker_change("put_back", claim, lambda r: changes.put_back(r, reason, wait_ms, self._clock))

    def fail(self, claim: Claim, reason: str) -> UploadRecord:
        """After a permanent error: failed, not tried again until ``retry_failed``."""
        return self._worker_change("fail", claim, lambda r: changes.failed(r, reason, self._clock))

    # -- what policy, a reconcile or a person decides --------------------------------------------------------

    def unverify(self, save_id: str, path: str, mirror: str, reason: str, *, with_meta: bool = False) -> None:
        """Make a verified record pending again, because the mirror no longer has the file.

        Args:
            save_id: The save.
            path: The file.
            mirror: The mirror's URL.
            reason: Why, for people.
            with_meta: Whether the save's meta is pending again too, in the same transaction.

        Raises:
            CheckpointNotFound: There is no such record.
            IllegalTransition: It is not verified.
        """
        with self._database.change("unverify") as connection:
            record = rows.read_record(connection, save_id, path, mirror)
            if record is None:
                raise CheckpointNotFound(f"{path} of save {save_id} has no record on {mirror}")
            rows.write_changed(connection, record, changes.unverified(record, reason, self._clock))
            of_save = {"save_id": save_id, "mirror": mirror}
            others = rows.iterate_records(connection, "read the records of a save on a mirror", of_save)
            for meta in [one for one in others if with_meta and one.role == "meta" and one.path != path]:
                if meta.state is RecordState.VERIFIED:
                    rows.write_changed(connection, meta, changes.unverified(meta, reason, self._clock))

    def skip(self, save_id: str, reason: str, *, mirror: str | None = None) -> int:
        """Skip a save by policy: files that are not on a mirror yet are not sent. Returns how many records changed."""
        return self._change_all(
            "skip",
            "read the records of a save",
            {"save_id": save_id},
            lambda r: r.state in WAITING and mirror in (None, r.mirror),
            lambda r: changes.skipped(r, reason, self._clock),
        )

    def take_back(self, save_ids: Collection[str], was: Callable[[str], bool], *, mirror: str | None = None) -> int:
        """Make skipped records of these saves pending again, if ``was`` their reason. Returns how many."""
        return self._change_all(
            "take_back",
            "read all records in a state",
            {"state": RecordState.SKIPPED.value},
            lambda r: r.save_id in save_ids and mirror in (None, r.mirror) and was(r.reason),
            lambda r: changes.taken_back(r, self._clock),
        )

    def remove(self, save_id: str, mirror: str, reason: str) -> int:
        """Mark a save as removed: the mirror has a tombstone in its place. Returns how many records changed."""
        return self._change_all(
            "remove",
            "read the records of a save on a mirror",
            {"save_id": save_id, "mirror": mirror},
            lambda r: r.state is not RecordState.REMOVED,
            lambda r: changes.removed(r, reason, self._clock),
        )

    def retry_failed(self, mirror: str | None = None, step: int | None = None) -> int:
        """Make failed records pending again, of one mirror or step or of all. Returns how many."""
        return self._change_all(
            "retry_failed",
            "read all records in a state",
            {"state": RecordState.FAILED.value},
            lambda r: mirror in (None, r.mirror) and step in (None, r.step),
            lambda r: changes.retried(r, self._clock),
        )

    def end_delays(self, mirrors: Collection[str], of: Callable[[str | None], bool] = lambda _: True) -> int:
        """Let pending records of these mirrors be claimed now, whatever they were to wait. Returns how many.

        Args:
            mirrors: Their URLs.
            of: Says of a record's last error whether its delay ends.
        """
        return self._change_all(
            "end_delays",
            "read all records in a state",
            {"state": RecordState.PENDING.value},
            lambda r: r.mirror in mirrors and r.not_before_ms is not None and of(r.last_error),
            changes.without_delay,
        )

    def put_back_all(self, worker: str, reason: str) -> int:
        """Make the records of a dead worker pending at once, whatever their leases. Returns how many."""
        return self._change_all(
            "put_back_all",
            "read all records in a state",
            {"state": RecordState.UPLOADING.value},
            lambda r: r.claimed_by == worker,
            lambda r: changes.put_back(r, reason, 0, self._clock),
        )

    def _change_all(
        self,
        verb: str,
        name: str,
        parameters: rows.Parameters,
        wanted: Callable[[UploadRecord], bool],
        change: Callable[[UploadRecord], UploadRecord],
    ) -> int:
        """Change every sound and wanted record that a statement finds, in one transaction; return how many."""
        with self._database.change(verb) as connection:
            found = [record for record in rows.iterate_records(connection, name, parameters) if wanted(record)]
            for record in found:
                rows.write_changed(connection, record, change(record))
        return len(found)

    # -- reading --------------------------------------------------------------------------------------------

    def records(
        self, *, save_id: str | None = None, mirror: str | None = None, state: RecordState | None = None
    ) -> list[UploadRecord]:
        """Return the sound records, oldest save first; broken ones are logged and left out."""
        with self._database.reading() as connection:
            return reports.records(connection, save_id, mirror, state)

    def lease_left_s(self, record: UploadRecord) -> float:
        """Return the seconds until a record's lease expires; 0 if it has expired."""
        if record.lease_until_ms is None or record.lease_boot != self._clock.boot_id:
            return 0.0
        return max(0.0, (record.lease_until_ms - self._clock.now_ms()) / 1000)

    def saves(self) -> list[SaveRow]:
        """Return the sound saves, oldest first, released or not."""
        with self._database.reading() as connection:
            return list(rows.iterate_saves(connection))

    def standing(self, save_id: str) -> tuple[MirrorStanding, ...]:
        """Return what is durably known about a save on each mirror, also on earlier ones. No record: not durable.

        Raises:
            BrokenTable: The list of mirrors or the save's row is broken.
        """
        configured = [row.url for row in self.mirrors()]
        with self._database.reading() as connection:
            return reports.standing(connection, save_id, configured)

    def history(self, save_id: str | None = None) -> list[Transition]:
        """Return every kept transition, oldest first."""
        with self._database.reading() as connection:
            return reports.history(connection, save_id)

    def counts(self) -> tuple[StateCount, ...]:
        """Return how many records and bytes each mirror has in each state."""
        with self._database.reading() as connection:
            return reports.counts(connection)

    # -- damage ------------------------------------------------------------------------------------------------

    def drop_broken_rows(self) -> list[BrokenRow]:
        """Delete broken rows, so that a reconcile adds them again as pending. Returns their contents."""
        with self._database.change("drop_broken_rows") as connection:
            broken = rows.broken_rows(connection)
            for row in broken:
                _take_out_broken(connection, row, self._clock.utc())
        return broken

    def check_pages(self) -> None:
        """Read the whole file and compare pages and indexes; rows may still be broken one by one.

        Raises:
            BrokenTable: Pages or indexes are damaged: the table cannot be used, nor repaired row by row.
        """
        with self._database.reading() as connection:
            found = connection.execute(statement("look over pages and indexes")).fetchall()
            if found != [("ok",)]:
                raise BrokenTable(f"{self.path} is damaged: {found[0][0]}")


def _records_of_save(
    save: SaveRow, artifacts: Sequence[Artifact], mirrors: Sequence[str], token: int, clock: LeaseClock
) -> Iterator[UploadRecord]:
    """Yield every record that a save must have, in its first state."""
    for mirror in mirrors:
        for artifact in artifacts:
            yield changes.new_record(save, artifact, mirror, token, clock)
        yield changes.new_meta_record(save, mirror, token, clock)


def _is_known(wanted: UploadRecord, known: UploadRecord | None) -> bool:
    """Whether the table has this record already.

    Raises:
        IntegrityError: It has it with another content.
    """
    if known is None:
        return False
    same = (known.role, known.kinds, known.rank) == (wanted.role, wanted.kinds, wanted.rank)
    if wanted.role == "artifact":
        same = same and (known.size_bytes, known.crc32c) == (wanted.size_bytes, wanted.crc32c)
    if not same:
        raise IntegrityError(f"{wanted.path} of save {wanted.save_id} is in the table with other contents")
    return True


def _count(connection: apsw.Connection, save_id: str) -> int:
    rows_found = connection.execute(statement("count the records of a save"), {"save_id": save_id}).fetchall()
    return cast(int, rows_found[0][0])


def _take_out_broken(connection: apsw.Connection, broken: BrokenRow, at_utc: str) -> None:
    """Delete a broken row; for a record, note in the history that it was removed and why."""
    if broken.table == "saves":
        connection.execute(statement("delete a broken save"), {"save_order": broken.number})
        return
    noted = {"id": broken.number, "reason": f"the row was broken: {broken.why}", "at_utc": at_utc}
    connection.execute(statement("note that a broken record goes"), noted)
    connection.execute(statement("delete a broken record"), {"id": broken.number})
