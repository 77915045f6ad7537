"""Claiming a run: one list of attempts per place, by which a newer attempt fences an older one.

The list lies in ``.ckptmirror/attempts.json`` of the root and in ``writer.json`` of each mirror

Rules:
* Lists only grow. Every write carries the generation that was read; a lost race is read again, a bounded number of
  times.
* An attempt is added *undecided* to each mirror that answers before anything is listed, voted or loaded; its parent is
  written when that is known. Undecided attempts do not count in the lineage.
* Whoever meets an attempt that it did not know when it claimed is fenced, for good.
* A mirror that was down is claimed later, before anything is uploaded there.
* A list that is lost is rebuilt from the metas of its place. Where nothing at all is known, a new run begins only if
  every required mirror answered: otherwise an outage would start a second run beside the first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, attempts_to_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenMeta,
    CkptMirrorError,
    ConfigError,
    LineageError,
    NotAuthorised,
    ObjectNotFound,
    PreconditionFailed,
    StorePermanent,
    Temporary,
)
from ckptmirror.core.lineage import join_lists, merge_attempts, next_number, told_by_drain
from ckptmirror.core.model import Attempt, AttemptList, SaveRef, new_id
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c

__all__ = ["RunClaim", "publish_attempts", "read_local_attempts", "read_mirror_attempts"]

_LIST_LIMIT_BYTES = 16 * 1024 * 1024
_RACES_LIMIT = 20
_log = logging.getLogger("ckptmirror.claim")


def read_local_attempts(root: Path) -> AttemptList | None:
    """Read the root's list of attempts; None if there is none.

    Raises:
        BrokenMeta: The list cannot be trusted.
    """
    try:
        data = files.read_limited(root / names.ATTEMPTS_NAME, _LIST_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    return attempts_from_bytes(data)


def read_mirror_attempts(mirror: Mirror, *, mend: bool = False) -> tuple[AttemptList | None, int]:
    """Read a mirror's list of attempts and its generation; ``(None, 0)`` if there is none.

    Args:
        mirror: Whose list.
        mend: A list that cannot be trusted counts as lost, to be rebuilt and replaced at its generation. Only a new
            start may do that: a running attempt would drop a newer one from the list, and so escape being fenced.

    Raises:
        BrokenMeta: The list cannot be trusted.
        StoreTemporary: The mirror does not answer.
    """
    try:
        data, info = mirror.store.read(names.WRITER_NAME, limit_bytes=_LIST_LIMIT_BYTES)
    except ObjectNotFound:
        return None, 0
    if info.crc32c is not None and crc32c(data) != info.crc32c:  # broken on its way here: nothing to mend there
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} arrived broken.")
    try:
        return attempts_from_bytes(data), info.generation
    except BrokenMeta as error:
        if not mend:
            raise BrokenMeta(
                f"{mirror.url}/{names.WRITER_NAME} is broken: {error}",
                hint="The next start of the trainer rebuilds it.",
            ) from error
        _log.error("%s/%s is broken and is rebuilt: %s", mirror.url, names.WRITER_NAME, error)
        return None, info.generation


class _MetUnknownAttempt(Exception):
    def __init__(self, mirror: Mirror, unknown: Sequence[Attempt]) -> None:
        self.mirror, self.unknown = mirror, unknown


class RunClaim:
    """This process's attempt at the run, as the lists show it.

    Attributes:
        attempt: This attempt; ``attempt.decided`` becomes True with :meth:`decide`.
        known: Every attempt known when the claim was made, without this one. It never changes.
        apart: Those of them that ran apart from the mirrors (``core.lineage.join_lists``).
        unclaimed: Mirrors that did not answer yet, by URL, with the reason.
        fenced: The reason, once a newer attempt was met.
    """

    def __init__(self, root: Path, known: AttemptList, attempt: Attempt) -> None:
        self.root = root
        self.known = known
        self.attempt = attempt
        self.apart: frozenset[str] = frozenset()
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
    def make(
        cls,
        root: Path,
        mirrors: Sequence[Mirror],
        rebuild: Callable[[Path | None, Sequence[Mirror]], AttemptList | None],
    ) -> RunClaim:
        """Claim the run: read all lists, then add an undecided attempt to each mirror that answers, in order.

        The caller holds the root lock. If no mirror answers, the local list alone serves. ``rebuild`` is given the
        places whose lists are lost.

        Raises:
            ConfigError: A mirror belongs to another run.
            Temporary: A required mirror does not answer, and nothing else says which run this is.
            BrokenMeta: A list is broken, and no other tells what it told.
            AttemptFenced: Another attempt claims the same run at the same time, and is newer.
        """
        for _ in range(_RACES_LIMIT):
            claim = cls._read(root, mirrors, rebuild)
            try:
                claim._announce_first(mirrors)
            except _MetUnknownAttempt:
                continue  # lost the race for the first mirror: nothing of ours stands anywhere yet
            return claim  # the root's own list is written when it is decided
        raise AttemptFenced("Other attempts of this run keep starting at the same time.")

    @classmethod
    def _read(
        cls,
        root: Path,
        mirrors: Sequence[Mirror],
        rebuild: Callable[[Path | None, Sequence[Mirror]], AttemptList | None],
    ) -> RunClaim:
        lists: list[AttemptList] = []
        silent: dict[str, CkptMirrorError] = {}
        without: list[Mirror] = []
        local, broken = _read_local_or_reason(root)
        for mirror in mirrors:
            try:
                there, _ = read_mirror_attempts(mirror, mend=True)
            except (Temporary, NotAuthorised) as error:
                silent[mirror.url] = error
                continue
            except StorePermanent as error:
                if mirror.required:
                    raise
                silent[mirror.url] = error
                continue
            if there is None:
                without.append(mirror)
            else:
                _check_run(mirror, there, [*filter(None, [local]), *lists], root)
                lists.append(there)
        if broken is not None and not lists:
            raise broken
        try:
            known, apart = _join(local, merge_attempts(*lists) if lists else None, root)
            rebuilt = [rebuild(root if local is None else None, without)] if without or local is None else []
            found = [one for one in (known, *rebuilt) if one is not None]
            known = merge_attempts(*found) if found else None
        except LineageError as error:
            raise ConfigError(
                f"{root} and its mirrors do not tell of one run: {error}",
                hint="Give each run a root and a mirror prefix of its own.",
            ) from error
        if known is None:
            for mirror in mirrors:
                if mirror.required and mirror.url in silent:
                    raise silent[mirror.url]
            known = AttemptList(new_id())
        claim = cls(root, known, Attempt(new_id(), next_number(known), None, decided=False))
        claim.apart = apart
        if broken is not None:
            claim._write_local()  # nothing that could be read stands there
        claim.unclaimed = {url: str(error) for url, error in silent.items()}
        return claim

    def _announce_first(self, mirrors: Sequence[Mirror]) -> None:
        announced = False
        for mirror in mirrors:
            if mirror.url in self.unclaimed:
                continue
            try:
                self._announce(mirror, mend=True)
                announced = True
            except (Temporary, NotAuthorised) as error:
                self.unclaimed[mirror.url] = str(error)
            except _MetUnknownAttempt as met:
                if announced:
                    raise self._fence(met) from None
                raise
            except ConfigError:
                if announced or self.known.attempts:
                    raise
                raise _MetUnknownAttempt(mirror, ()) from None  # lost the race to begin the run: read its lists

    def decide(self, parent: SaveRef | None, mirrors: Sequence[Mirror]) -> None:
        """Record where this attempt starts from, on each mirror that answers and locally.

        A mirror that does not answer, now or when the run was claimed, is told before the next upload there.

        Raises:
            AttemptFenced: A newer attempt was met.
        """
        self.attempt = replace(self.attempt, parent=parent, decided=True)
        for mirror in mirrors:
            if mirror.url in self.unclaimed:
                continue
            try:
                self.confirm(mirror)
            except (Temporary, NotAuthorised) as error:
                self.unclaimed[mirror.url] = str(error)
        self._write_local()

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
        self.fenced = (
            f"Attempt {newest.number} ({newest.id[:8]}) of this run has started and is listed on {met.mirror.url}; "
            f"this is attempt {self.attempt.number} ({self.attempt.id[:8]})."
        )
        return AttemptFenced(self.fenced)

    def _announce(self, mirror: Mirror, *, mend: bool = False) -> None:
        """Make the mirror's list hold everything known and this attempt as it stands."""
        known_ids = {attempt.id for attempt in (*self.known.attempts, self.attempt)}
        for _ in range(_RACES_LIMIT):
            there, generation = read_mirror_attempts(mirror, mend=mend)
            if there is not None:
                _check_run(mirror, there, [self.known], self.root)
            unknown = [a for a in there.attempts if a.id not in known_ids] if there else []
            if unknown:
                raise _MetUnknownAttempt(mirror, unknown)
            wanted = merge_attempts(there, self.attempts) if there else self.attempts
            if there is not None and attempts_to_bytes(there) == attempts_to_bytes(wanted):
                return
            try:
                mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
            except PreconditionFailed:
                continue  # another writer, or our own write whose answer was lost: the next read tells
            return
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} keeps changing.")

    def _write_local(self) -> None:
        path = self.root / names.ATTEMPTS_NAME
        data = attempts_to_bytes(self.attempts)
        files.write_bytes(path, data, save_id=self.attempt.id, replace=True)


def _read_local_or_reason(root: Path) -> tuple[AttemptList | None, BrokenMeta | None]:
    try:
        return read_local_attempts(root), None
    except BrokenMeta as error:
        path = root / names.ATTEMPTS_NAME
        _log.error("%s is broken (%s): what the mirrors list is used instead", path, error)
        return None, BrokenMeta(
            f"{path} is broken, and no mirror has a list: {error}",
            hint="Move it away, and the list is rebuilt from the saves; a rewind that nothing was saved after is lost.",
        )


def _join(
    on_disk: AttemptList | None, on_mirrors: AttemptList | None, root: Path
) -> tuple[AttemptList | None, frozenset[str]]:
    if on_disk is None or on_mirrors is None:
        return on_disk or on_mirrors, frozenset()
    known, apart = join_lists(on_disk, on_mirrors)
    for attempt in known.attempts:
        if attempt.id in apart:
            _log.error(
                "attempt %d (%s) ran from %s while the mirrors were out of reach, and the run went on without it: its "
                "saves are superseded. `ckptmirror ls %s` lists them; each can be resumed by its save id.",
                attempt.number,
                attempt.id[:8],
                root,
                root,
            )
    return known, apart


def _check_run(mirror: Mirror, there: AttemptList, others: Sequence[AttemptList], root: Path) -> None:
    for other in others:
        if other.run_id != there.run_id:
            raise ConfigError(
                f"{mirror.url} holds run {there.run_id[:8]}, but {root} or an earlier mirror holds run "
                f"{other.run_id[:8]}.",
                hint="Give each run a root and a mirror prefix of its own.",
            )


def publish_attempts(root: Path, mirror: Mirror) -> None:
    """Tell the mirror of the decided attempts that the root lists, unless a start unknown to the root was there.

    For a drain, which is no attempt itself.

    Raises:
        StoreTemporary: The mirror does not answer.
        ConfigError: The mirror belongs to another run.
    """
    local = read_local_attempts(root)
    if local is None:
        return
    for _ in range(_RACES_LIMIT):
        there, generation = read_mirror_attempts(mirror)
        if there is not None:
            _check_run(mirror, there, [local], root)
            _join(local, there, root)  # says which attempts ran apart
        wanted = told_by_drain(local, there or AttemptList(local.run_id))
        if there is not None and attempts_to_bytes(there) == attempts_to_bytes(wanted):
            return
        try:
            mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
        except PreconditionFailed:
            continue
        return
    raise Temporary(f"{mirror.url}/{names.WRITER_NAME} keeps changing.")
