"""Claiming a run: one list of attempts per place, by which a newer attempt fences an older one.

The list lies in ``.ckptmirror/attempts.json`` of the root and in ``writer.json`` of each mirror

Rules:
* Lists only grow. Every write carries the generation that was read; a lost race is read again, a bounded number of
  times.
* An attempt is added *undecided* to the root's own list, then to each mirror that answers, before anything is listed,
  voted or loaded; its parent is written when that is known, here first. Undecided attempts do not count in the lineage.
* Until it is decided the root's list gains nothing but this attempt: what it did not know is how a branch that ran
  apart is told from the mirrors' (``core.lineage.join_lists``).
* Whoever meets an attempt that it did not know when it claimed is fenced, for good, and notes it for the next start.
* A mirror that was down is claimed later, before anything is uploaded there.
* A list that is lost is rebuilt from the metas of its place, before anything is written there; an old one of the root
  is completed from the metas of what was saved there. One of a later version is never taken for lost.
* Where nothing at all is known, a new run begins only if every required mirror answered: otherwise an outage would
  start a second run beside the first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    CkptMirrorError,
    ConfigError,
    LineageError,
    NotAuthorised,
    PreconditionFailed,
    StorePermanent,
    Temporary,
)
from ckptmirror.core.lineage import merge_attempts, next_number, told_by_drain
from ckptmirror.core.model import Attempt, AttemptList, Meta, SaveRef, new_id
from ckptmirror.flow.places.attempt_lists import (
    attempts_here,
    check_run,
    join,
    met_here,
    not_one_run,
    note_met,
    read_mirror_attempts,
    told_here,
    with_kept,
)
from ckptmirror.flow.places.catalog import rebuild_attempts
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.local import files

__all__ = ["RunClaim", "publish_attempts"]

_RACES_LIMIT = 20
_UNKNOWN = "a rewind or a start over that nothing was saved after would not be known"
_log = logging.getLogger("ckptmirror.claim")


class _MetUnknownAttempt(Exception):
    def __init__(self, mirror: Mirror, unknown: Sequence[Attempt]) -> None:
        self.mirror, self.unknown = mirror, unknown


class RunClaim:
    """This process's attempt at the run, as the lists show it.

    Attributes:
        attempt: This attempt; ``attempt.decided`` becomes True with :meth:`decide`.
        known: Every attempt known when the claim was made, without this one, and those that it adopted.
        apart: Those of them that ran apart from the mirrors (``core.lineage.join_lists``), or were adopted.
        told_here: The root's own list as this start found it, nothing of it rebuilt; empty where it cannot be read.
        met: What earlier attempts of this root were fenced by, as far as they noted it.
        lost: What a list that was lost may have told, and nothing else does; in words.
        unclaimed: Mirrors that did not answer yet, by URL, with the reason.
        fenced: The reason, once a newer attempt was met.
    """

    def __init__(self, root: Path, known: AttemptList, attempt: Attempt) -> None:
        self.root = root
        self.known = known
        self.attempt = attempt
        self.apart: frozenset[str] = frozenset()
        self.told_here = AttemptList(known.run_id)
        self.met = AttemptList(known.run_id)
        self.lost: tuple[str, ...] = ()
        self.unclaimed: dict[str, str] = {}
        self.fenced: str | None = None
        self._lock = threading.Lock()
        self._mirror_locks: dict[str, threading.Lock] = {}

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.known.run_id

    @property
    def attempts(self) -> AttemptList:
        """Every attempt that counts for this process: those known at the claim, and itself.

        Until this attempt is decided, and so outnumbers them, those that ran apart from the mirrors do not count.
        """
        kept = [a for a in self.known.attempts if self.attempt.decided or a.id not in self.apart]
        return AttemptList(self.run_id, (*kept, self.attempt))

    @classmethod
    def make(cls, root: Path, mirrors: Sequence[Mirror], kept: Sequence[Meta] = ()) -> RunClaim:
        """Claim the run: read all lists, then add an undecided attempt to each mirror that answers, in order.

        The caller holds the root lock. If no mirror answers, the local list alone serves.

        Args:
            root: The local root.
            mirrors: Its mirrors.
            kept: What lies in the persistent directory: it tells of attempts as the root's own metas do.

        Raises:
            ConfigError: A mirror belongs to another run.
            Temporary: A required mirror does not answer, and nothing else says which run this is.
            BrokenMeta: A list is broken, and no other tells what it told.
            AttemptFenced: Another attempt claims the same run at the same time, and is newer.
        """
        for _ in range(_RACES_LIMIT):
            claim = cls._read(root, mirrors, kept)
            begins_run = not claim.known.attempts  # then another may win the race to begin it, and to name it
            if not begins_run:
                claim._write_undecided()
            try:
                claim._announce_first(mirrors)
                if begins_run:
                    claim._check_begun(mirrors)
            except _MetUnknownAttempt:  # lost the race for the first mirror: nothing of ours stands on any yet
                if not begins_run:
                    claim._write(claim.told_here)
                continue
            if begins_run:
                claim._write_undecided()
            return claim
        raise AttemptFenced("Other attempts of this run keep starting at the same time.")

    @classmethod
    def look(cls, root: Path, mirrors: Sequence[Mirror]) -> RunClaim | None:
        """Read all lists as :meth:`make` does, and write nothing; None where nothing tells of any run.

        Raises what :meth:`make` raises for what it reads.
        """
        claim = cls._read(root, mirrors)
        return claim if claim.known.attempts else None

    @classmethod
    def _read(cls, root: Path, mirrors: Sequence[Mirror], kept: Sequence[Meta] = ()) -> RunClaim:
        lists: list[AttemptList] = []
        silent: dict[str, CkptMirrorError] = {}
        lost: list[str] = []
        is_told = (root / names.ATTEMPTS_NAME).exists()
        told = told_here(root)
        try:
            local, broken = attempts_here(root)
        except LineageError as error:
            raise not_one_run(root, error) from error
        for mirror in mirrors:
            try:
                listed, _ = read_mirror_attempts(mirror, mend=True)
                there = listed if listed is not None else rebuild_attempts([mirror])
            except LineageError as error:
                raise not_one_run(root, error) from error
            except (Temporary, NotAuthorised) as error:
                silent[mirror.url] = error
                continue
            except StorePermanent as error:
                if mirror.required:
                    raise
                silent[mirror.url] = error
                continue
            if listed is not None:
                broken, is_told = None, True  # here is what the root's own list told
            elif there is not None:
                lost.append(mirror.url)
            if there is not None:
                check_run(mirror, there, [*filter(None, [local]), *lists], root)
                lists.append(there)
        if broken is not None:
            raise broken
        local = with_kept(root, kept, local, lists)
        if local is not None and not is_told:
            lost.append(str(root))
        try:
            known, apart = join(local, merge_attempts(*lists) if lists else None, root)
        except LineageError as error:
            raise not_one_run(root, error) from error
        if known is None:
            for mirror in _asked(mirrors):
                if mirror.url in silent:
                    raise silent[mirror.url]
            known = AttemptList(new_id())
        claim = cls(root, known, Attempt(new_id(), next_number(known), None, decided=False))
        claim.apart = apart
        claim.lost = tuple(f"{place} had no list of attempts, and it was rebuilt: {_UNKNOWN}" for place in lost)
        claim.told_here = told or AttemptList(known.run_id)
        claim.met = met_here(root, known.run_id)
        claim.unclaimed = {url: str(error) for url, error in silent.items()}
        return claim

    def _check_begun(self, mirrors: Sequence[Mirror]) -> None:
        """A run begins, and gets its name, only once every mirror that counts has taken it down."""
        told = [mirror for mirror in mirrors if mirror.url not in self.unclaimed]
        for mirror in _asked(mirrors):
            if mirror.url not in self.unclaimed:
                continue
            try:
                self._announce(mirror, mend=True)  # perhaps only the answer was lost
            except ConfigError:
                if told:
                    raise
                raise _MetUnknownAttempt(mirror, ()) from None  # another began the run meanwhile
            del self.unclaimed[mirror.url]
            told.append(mirror)

    def adopt(self, strangers: Sequence[Attempt], mirrors: Sequence[Mirror]) -> None:
        """Take in attempts that no list tells of, since a person decided to continue from a save of theirs.

        This attempt is claimed anew, with a higher number than theirs. Nobody is told of them before it is decided.

        Raises:
            AttemptFenced: A newer attempt was met.
            LineageError: They contradict what is known.
        """
        earlier = AttemptList(self.run_id, (self.attempt,))
        self.known = merge_attempts(self.known, earlier, AttemptList(self.run_id, tuple(strangers)))
        self.apart |= {attempt.id for attempt in strangers}
        self.told_here = merge_attempts(self.told_here, earlier)
        self.attempt = Attempt(new_id(), next_number(self.known), None, decided=False)
        self._write_undecided()
        try:
            self._announce_first(mirrors)
        except _MetUnknownAttempt as met:
            raise self._fence(met) from None

    def _announce_first(self, mirrors: Sequence[Mirror]) -> None:
        announced = False
        for mirror in mirrors:
            if mirror.url in self.unclaimed:
                continue
            try:
                self._announce(mirror, mend=True)
                announced = True
            except (Temporary, NotAuthorised, StorePermanent) as error:
                self._pass_by(mirror, error)
            except _MetUnknownAttempt as met:
                if announced:
                    raise self._fence(met) from None
                raise
            except ConfigError:
                if announced or self.known.attempts:
                    raise
                raise _MetUnknownAttempt(mirror, ()) from None  # lost the race to begin the run: read its lists

    def decide(self, parent: SaveRef | None, mirrors: Sequence[Mirror]) -> None:
        """Record where this attempt starts from, in the root and then on each mirror that answers.

        A mirror that does not answer, now or when the run was claimed, is told before the next upload there.

        Raises:
            AttemptFenced: A newer attempt was met. This one is as undecided as before then.
        """
        if parent is not None:
            before = {attempt.id: attempt for attempt in self.known.attempts if attempt.decided}.get(parent.attempt)
            if before is None or before.number >= self.attempt.number:  # the lineage could not be followed any more
                raise LineageError(f"No list tells of attempt {parent.attempt[:8]}, which saved step {parent.step}.")
        undecided = self.attempt
        self.attempt = replace(self.attempt, parent=parent, decided=True)
        try:
            self._write(self.attempts)
        except BaseException:
            self.attempt = undecided
            raise
        for mirror in mirrors:
            if mirror.url in self.unclaimed:
                continue
            try:
                self.confirm(mirror)
            except AttemptFenced:
                self.attempt = undecided
                self._write_undecided()
                raise
            except (Temporary, NotAuthorised, StorePermanent) as error:
                self._pass_by(mirror, error)

    def _pass_by(self, mirror: Mirror, error: CkptMirrorError) -> None:
        """Leave a mirror to be claimed later: one that is required may only be silent."""
        if mirror.required and isinstance(error, StorePermanent):
            raise error
        self.unclaimed[mirror.url] = str(error)

    def confirm(self, mirror: Mirror) -> None:
        """Ask the mirror whether this attempt is still the newest, and claim it there if that was not done yet.

        Raises:
            AttemptFenced: It is not. Raised at every later call too.
            StoreTemporary: The mirror does not answer.
        """
        with self._lock:
            mirror_lock = self._mirror_locks.setdefault(mirror.url, threading.Lock())
        with mirror_lock:  # one for each: a mirror that does not answer holds up nobody else's
            if self.fenced is not None:
                raise AttemptFenced(self.fenced)
            try:
                self._announce(mirror)
            except _MetUnknownAttempt as met:
                raise self._fence(met) from None
            except LineageError as error:
                raise ConfigError(f"{mirror.url}: {error}", hint="Give each run a mirror prefix of its own.") from error
            self.unclaimed.pop(mirror.url, None)

    def _fence(self, met: _MetUnknownAttempt) -> AttemptFenced:
        newest = max(met.unknown, key=lambda attempt: (attempt.number, attempt.id))
        note_met(self.root, self.run_id, met.unknown)
        self.fenced = (
            f"Attempt {newest.number} ({newest.id[:8]}) of this run has started and is listed on {met.mirror.url}; "
            f"this is attempt {self.attempt.number} ({self.attempt.id[:8]})."
        )
        return AttemptFenced(self.fenced)

    def _announce(self, mirror: Mirror, *, mend: bool = False) -> None:
        """Make the mirror's list hold everything known and this attempt as it stands."""
        known_ids = {attempt.id for attempt in (*self.known.attempts, self.attempt)}
        for _ in range(_RACES_LIMIT):
            listed, generation = read_mirror_attempts(mirror, mend=mend)
            there = listed if listed is not None else rebuild_attempts([mirror])
            if there is not None:
                check_run(mirror, there, [self.known], self.root)
            unknown = [a for a in there.attempts if a.id not in known_ids] if there else []
            if unknown:
                raise _MetUnknownAttempt(mirror, unknown)
            wanted = merge_attempts(there, self.attempts) if there else self.attempts
            if listed is not None and attempts_to_bytes(listed) == attempts_to_bytes(wanted):
                return
            try:
                mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
            except PreconditionFailed:
                continue  # another writer, or our own write whose answer was lost: the next read tells
            return
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} keeps changing.")

    def _write_undecided(self) -> None:
        self._write(merge_attempts(self.told_here, AttemptList(self.run_id, (self.attempt,))))

    def _write(self, attempts: AttemptList) -> None:
        path = self.root / names.ATTEMPTS_NAME
        files.write_bytes(path, attempts_to_bytes(attempts), save_id=new_id(), replace=True)


def _asked(mirrors: Sequence[Mirror]) -> list[Mirror]:
    """Those that must answer before a run begins: the required ones, or all where none is."""
    return [mirror for mirror in mirrors if mirror.required] or list(mirrors)


def publish_attempts(root: Path, mirror: Mirror) -> None:
    """Tell the mirror of the root's decided attempts, unless it went on without them (``told_by_drain``).

    For a drain, which is no attempt itself.

    Raises:
        StoreTemporary: The mirror does not answer.
        ConfigError: The mirror belongs to another run, or saves of several runs lie in the root.
    """
    try:
        local, _ = attempts_here(root)
        if local is None:
            return
        _publish(root, local, mirror)
    except LineageError as error:
        raise not_one_run(root, error) from error


def _publish(root: Path, local: AttemptList, mirror: Mirror) -> None:
    for _ in range(_RACES_LIMIT):
        listed, generation = read_mirror_attempts(mirror)
        there = listed if listed is not None else rebuild_attempts([mirror])
        if there is not None:
            check_run(mirror, there, [local], root)
            join(local, there, root)  # says which attempts ran apart
        wanted = told_by_drain(local, there or AttemptList(local.run_id))
        if listed is not None and attempts_to_bytes(listed) == attempts_to_bytes(wanted):
            return
        try:
            mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
        except PreconditionFailed:
            continue
        return
    raise Temporary(f"{mirror.url}/{names.WRITER_NAME} keeps changing.")
