"""The pending-uploads table: opening it, whose it is, and what it says.

Rules:
* Every verb is one transaction, durable when it returns; the history is written in the same one (by triggers).
* The same table may be used by any number of threads and processes, and across forks.
* The verbs stand in ``save_verbs``, ``worker_verbs`` and ``settled_verbs``; questions in ``reports``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ckptmirror.core.errors import BrokenTable, Temporary, UsageError
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.names import ATTEMPTS_NAME
from ckptmirror.local.uploads import place, reports, rows
from ckptmirror.local.uploads.database import Database, RootIdentity
from ckptmirror.local.uploads.lease_clock import BootClock, LeaseClock
from ckptmirror.local.uploads.records import (
    BrokenRow,
    MirrorRow,
    MirrorStanding,
    SaveRow,
    Summary,
    Transition,
    UploadRecord,
)
from ckptmirror.local.uploads.save_verbs import SaveVerbs
from ckptmirror.local.uploads.settled_verbs import SettledVerbs
from ckptmirror.local.uploads.statements import statement
from ckptmirror.local.uploads.worker_verbs import WorkerVerbs

__all__ = ["UploadsTable"]


class UploadsTable(SaveVerbs, WorkerVerbs, SettledVerbs):
    """A durable table of upload records.

    Attributes:
        path: The database file.
        on_change: Called without arguments after every change made through this object.
    """

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
            identity: Whose table it must be; written into it if nothing is there yet. None: do not ask.
            clock: What leases are measured with; the machine's own by default.
            busy_timeout_s: How long other processes are waited for.

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
            if identity is not None:
                database.claim_identity(identity)
        except BaseException:
            database.close()
            raise
        return cls(database, clock if clock is not None else BootClock())

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
        """Return whose table this is."""
        return self._database.identity()

    def claim_identity(self, identity: RootIdentity) -> None:
        """Write whose table this is, if nobody has yet; else see that it is the same root of the same run.

        Raises:
            ForeignTable: It is another's.
        """
        self._database.claim_identity(identity)

    def check_root(self, root: Path) -> None:
        """See that this is the root's table, or nobody's yet. Asked before anything is changed.

        Another directory at the root's path is the root if it has the list of attempts (it was restored), or if there
        is nothing to miss in it. Else it is what lies there while the root's file system is not mounted.

        Raises:
            ForeignTable: It is another root's.
            Temporary: The saves of this table are not to be looked for here.
        """
        if self._database.check_root(root) or os.path.lexists(root / ATTEMPTS_NAME):
            return
        if any(save.released for save in self.saves()):
            raise Temporary(
                f"{root} is not the directory that {self.path} names, and no run is in it: is it mounted?",
                hint=f"Mount it and start again. If it was emptied on purpose, move {self.path.name} and its logs away "
                "or set another state_dir: the mirrors are asked again.",
            )

    def start_anew(self) -> Path | None:
        """Put an empty table in the place of one that broke or went away; return where the broken one lies now.

        Everybody who holds this object goes on with the new table; a claim of the old one is lost.

        Raises:
            NoTable: This object was closed.
        """
        aside = self._database.start_anew()
        self._tell()
        return aside

    def set_mirrors(self, mirrors: Sequence[tuple[str, bool]], pushed: Collection[str] = ()) -> None:
        """Replace the list of ``(url, required)``, and which of them were pushed to.

        Nothing is written if it is that list (the disk may be full).
        """
        self._set_fact("pushed", sorted(pushed), unset=[])
        if self._set_fact("mirrors", [[url, required] for url, required in mirrors]):
            self._tell()

    def _set_fact(self, name: str, wanted: Sequence[object], *, unset: Sequence[object] | None = None) -> bool:
        """Write a fact, unless it says so already or was never written and is ``unset`` then; whether it was."""
        with suppress(BrokenTable):
            found = self._database.read_fact(name)
            if (unset if found is None else found) == wanted:
                return False
        self._database.write_fact(name, wanted)
        return True

    def knows_mirrors(self) -> bool:
        """Whether the list of mirrors was ever written: a table that was just made does not know which there are.

        Raises:
            BrokenTable: The list does not read back as it was written.
        """
        return self._database.read_fact("mirrors") is not None

    def mirrors(self) -> list[MirrorRow]:
        """Return the mirrors in configured order; none either where nobody has told (:meth:`knows_mirrors`).

        Raises:
            BrokenTable: The list does not read back as it was written.
        """
        pushed = self._database.read_fact("pushed") or ()
        return [MirrorRow(url, required, url in pushed) for url, required in self._database.read_fact("mirrors") or ()]

    def set_unasked(self, mirrors: Collection[str]) -> None:
        """Keep which mirrors the start that runs has not asked yet for what was verified there before."""
        self._set_fact("unasked", sorted(mirrors), unset=[])

    def unasked(self) -> set[str]:
        """Return what :meth:`set_unasked` kept.

        Raises:
            BrokenTable: The fact does not read back as it was written.
        """
        return set(self._database.read_fact("unasked") or ())

    def mirror_identity(self, url: str) -> str | None:
        """Return which place a mirror was when it was first met; None if it never was.

        Raises:
            BrokenTable: The fact does not read back as it was written.
        """
        try:
            found = self._database.read_fact(f"mirror {url}")
        except BrokenTable as error:
            hint = "See that the mirror is mounted, then move the table away: the next start rebuilds it."
            raise BrokenTable(error.message, hint=hint) from error
        return None if found is None else str(found)

    def remember_mirror_identity(self, url: str, identity: str) -> str:
        """Keep which place a mirror is, unless that is known already; return what is known then."""
        self._database.write_fact(f"mirror {url}", identity, replace=False)
        return self.mirror_identity(url) or identity

    # -- reading --------------------------------------------------------------------------------------------

    def records(
        self, *, save_id: str | None = None, mirror: str | None = None, state: RecordState | None = None
    ) -> list[UploadRecord]:
        """Return the sound records, oldest save first; broken ones are logged and left out (see ``broken_rows``)."""
        with self._database.reading() as connection:
            return reports.records(connection, save_id, mirror, state)

    def lease_left_s(self, record: UploadRecord) -> float:
        """Return for how many seconds a record is left to its worker; 0 where its lease ran out."""
        if record.lease_until_ms is None or record.lease_boot != self._clock.boot_id:
            return 0.0
        return max(0.0, (record.lease_until_ms - self._clock.now_ms()) / 1000)

    def saves(self) -> list[SaveRow]:
        """Return the sound saves, oldest first, released or not."""
        with self._database.reading() as connection:
            return reports.saves(connection)

    def standing(self, save_id: str) -> tuple[MirrorStanding, ...]:
        """Say for each mirror, configured or met before, what is durably known of a save. No record means not durable.

        Raises:
            BrokenTable: The list of mirrors or the save's row is broken.
        """
        configured = [row.url for row in self.mirrors()]
        with self._database.reading() as connection:
            return reports.standing(connection, save_id, configured)

    def history(self, save_id: str | None = None) -> list[Transition]:
        """Return every transition that is kept, oldest first."""
        with self._database.reading() as connection:
            return reports.history(connection, save_id)

    def summary(self) -> Summary:
        """Return counts and bytes per mirror and state, and the oldest save that each mirror waits for."""
        with self._database.reading() as connection:
            return reports.summary(connection)

    def broken_rows(self) -> list[BrokenRow]:
        """Read every row and return those that do not check."""
        with self._database.reading() as connection:
            return rows.all_rows(connection)[2]

    def drop_broken_rows(self) -> list[BrokenRow]:
        """Take broken rows out, so that a reconcile adds them anew as pending. Returns what they held."""
        with self._database.change("drop_broken_rows") as connection:
            broken = rows.all_rows(connection)[2]
            for row in broken:
                reports.take_out_broken(connection, row, self._clock.utc())
        self._tell()
        return broken

    def check_pages(self) -> None:
        """Read the whole file and compare pages and indexes; rows may still be broken one by one.

        Raises:
            BrokenTable: Something does not fit: the table cannot be used, nor mended row by row.
        """
        with self._database.reading() as connection:
            found = connection.execute(statement("look over pages and indexes")).fetchall()
            if found != [("ok",)]:
                raise BrokenTable(f"{self.path} is not a sound table: {found[0][0]}")

    def check(self) -> None:
        """Read the whole file and compare pages, indexes and rows.

        Raises:
            BrokenTable: Something does not fit.
        """
        self.check_pages()
        with self._database.reading() as connection:
            broken = rows.all_rows(connection)[2]
        if broken:
            raise BrokenTable(
                f"{len(broken)} rows of {self.path} are broken, first {broken[0].table} {broken[0].number}"
            )
