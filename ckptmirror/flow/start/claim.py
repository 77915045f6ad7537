"""Claiming a run: after a start has loaded, it adds its attempt to the lists of its root and of each mirror.

``core.start.attempts`` holds the rules; this module reads, compares and swaps lists.

Rules:
* Lists only grow. Every write carries the generation that was read; after a lost race the list is read again, a bounded
  number of times.
* A start that finds an attempt or a save that it has not seen starts over. A running attempt that finds an unknown
  attempt is fenced for good, and records it for the next start.
* A mirror that did not answer is claimed later, before anything is sent to it.
* An attempt's first commit on a mirror asks all mirrors. So does each commit of an earlier attempt's save, and each
  commit of a drain, which is not an attempt. They ask anew unless nothing can have changed since.
* Whoever commits a whole save lists its attempt on that mirror first. A node's part commits nothing, so that for a part
  a drain lists nothing, except where the list is lost: an attempt that is training would be fenced for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes
from ckptmirror.core.errors import (
    AttemptFenced,
    CkptMirrorError,
    ConfigError,
    LineageError,
    NodeBehind,
    NotAuthorised,
    PreconditionFailed,
    StorePermanent,
    StoreTemporary,
    Temporary,
)
from ckptmirror.core.model import AttemptList, Meta, new_id
from ckptmirror.core.problems import facts_of
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.start.attempts import (
    Claim,
    Verdict,
    drained_list,
    has_save_on,
    is_settled,
    left_behind,
    may_commit,
    may_drain,
    mirror_list,
    overtaken_by,
    with_earlier,
)
from ckptmirror.core.start.decide import run_of
from ckptmirror.core.start.disks import seen_by_its_job
from ckptmirror.core.start.explain import with_root, with_what
from ckptmirror.core.uncommitted import held_back_text, superseded_text
from ckptmirror.flow.places.attempt_lists import attempts_here, check_run, not_one_run, note_met, read_mirror_attempts
from ckptmirror.flow.places.catalog import MetaCache, rebuild_attempts
from ckptmirror.flow.places.mirrors import Mirror, counting
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.flow.start.patience import Patience
from ckptmirror.flow.start.survey import Survey, survey
from ckptmirror.local import files
from ckptmirror.local.root_id import RootId, note_job, read_root_id
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.uploads import UploadsTable

__all__ = ["DrainConfirmation", "RunClaim", "StartOver", "check_of_run"]

_RACES_LIMIT = 20
_log = logging.getLogger("ckptmirror.claim")


class StartOver(Exception):
    """An attempt or a save has appeared since the survey; the text names it."""


class _Places:
    """The places that a commit asks; each meta is read once."""

    def __init__(
        self,
        root: Path,
        table: UploadsTable,
        mirrors: Sequence[Mirror],
        cache: MetaCache,
        identity: Callable[[], RootId] | None = None,
        roots: frozenset[str] = frozenset(),
    ) -> None:
        self._root = root
        self._table = table
        self._mirrors = mirrors
        self._cache = cache
        self._identity = identity or (lambda: read_root_id(root))
        self._roots = roots  # of all nodes of the job
        self._last: tuple[dict[str, int | str], Survey] | None = None
        self._patience = Patience()

    def survey(self, mirror: Mirror) -> Survey:
        """Ask all places, for a commit on a mirror, unless no list has changed, and no verdict can change without that.

        That mirror is waited for, and so are those that count; see :class:`Patience`.
        """
        awaited = {mirror.url, *counting((one.url, one.required) for one in self._mirrors)}
        lists = self._patience.ask("list", self._mirrors, awaited, _list_of, str)
        if self._last is not None and self._last[0] == lists:
            return self._last[1]
        here = look_at_disk(self._root, self._table, self._identity())
        seen = survey([here], self._mirrors, cache=self._cache, patience=self._patience, awaited=awaited)
        if self._roots:
            seen = replace(seen, evidence=replace(seen.evidence, roots=self._roots))
        self._last = (lists, seen) if is_settled(seen.evidence) and not self._patience.is_late() else None
        return seen

    def check_earlier(self, mirror: Mirror, attempt: str, meta: Meta) -> None:
        """Check that an attempt may commit a save of an earlier one.

        Raises:
            NodeBehind: It would fence this attempt, which has committed nothing on the mirror yet; or see
                :meth:`check_drained`, whose errors it raises, too.
        """
        seen = self.survey(mirror)
        if left_behind(seen.evidence, mirror.url, attempt, facts_of(meta)):
            raise NodeBehind(
                f"Step {meta.step} is of an earlier attempt, and training did not continue from it: it waits "
                f"until {mirror.url} has a save of this attempt."
            )
        self.check_drained(mirror, meta, seen)

    def check_drained(self, mirror: Mirror, meta: Meta, seen: Survey) -> None:
        """Check that a save of an earlier attempt may be committed.

        Raises:
            NodeBehind: It must wait for a save of a newer attempt that left it behind.
            StoreTemporary: It must wait for a silent mirror.
            StorePermanent: Never: the run continued without the save.
        """
        verdict = may_drain(seen.evidence, mirror.url, facts_of(meta))
        if verdict.may == "behind" and verdict.rival is not None:
            attempt = f"attempt {verdict.rival.number} ({verdict.rival.id[:8]})"
            way = with_root(with_what(meta.save_id), str(self._root))
            raise NodeBehind(held_back_text(meta.step, mirror.url, attempt, way))
        if verdict.may == "wait":
            raise self.waiting(verdict)
        if verdict.may == "fenced":
            way = with_root(f"Leave it here, or continue from it {with_what(meta.save_id)}.", str(self._root))
            why = superseded_text(meta.step, mirror.url, verdict.why)
            raise StorePermanent(f"{why} {way}", hint="There is nothing to mend.")  # a record keeps only the message

    def waiting(self, verdict: Verdict) -> StoreTemporary:
        """Return the error of a commit that waits for silent mirrors."""
        rival = f" (attempt {verdict.rival.number}, {verdict.rival.id[:8]})" if verdict.rival is not None else ""
        why = f"Nothing is committed before {', '.join(verdict.waits_for)} answers: {verdict.why}{rival}."
        configured = {mirror.url for mirror in self._mirrors}
        for url in [one for one in verdict.waits_for if one not in configured][:1]:
            push = f"`ckptmirror push --root {quote(str(self._root))} --mirror {quote(url)}`"
            why += f" Nobody asks {url} from here: start with it, or {push} makes it known."
        gone = "If it is gone for good, take it out with `ckptmirror forget-mirror --url URL`."
        return StoreTemporary(why, hint=with_root(gone, str(self._root)))


def _list_of(mirror: Mirror) -> int | str:
    """Return the generation of a mirror's list, or why it does not answer."""
    try:
        return read_mirror_attempts(mirror)[1]
    except CkptMirrorError as error:
        return str(error)


def _not_taken_down(mirror: Mirror, error: CkptMirrorError) -> CkptMirrorError:
    """Return the error of a start when a mirror that must take its claim does not."""
    why = f"{mirror.url} must record where training continues, but does not: {error.message}"
    return (NotAuthorised if reach_after(error) is Reach.REFUSED else StoreTemporary)(why, hint=error.hint)


class RunClaim:
    """This process's attempt, and the lists that name it.

    Attributes:
        attempt: This attempt.
        unclaimed: The mirrors whose lists do not name it yet, by URL, with the reason.
        fenced: Why the attempt is fenced, once a newer attempt was found.
    """

    def __init__(
        self, root: Path, table: UploadsTable, mirrors: Sequence[Mirror], claim: Claim, cache: MetaCache
    ) -> None:
        self.root = root
        self.attempt = claim.attempt
        self.unclaimed: dict[str, str] = {}
        self.fenced: str | None = None
        self._claim = claim
        self._mirrors = mirrors
        self._own_id = read_root_id(root).id
        self._places = _Places(root, table, mirrors, cache, self._identity, claim.roots)
        self._begins = False
        self._required_by: dict[str, int] = {}  # mirror: the number of the newest attempt before that required it
        self._may_commit: set[str] = set()  # mirrors that have a save of this attempt
        self._lock = threading.Lock()
        self._mirror_locks: dict[str, threading.Lock] = {}

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._claim.root_list.run_id

    @property
    def attempts(self) -> AttemptList:
        """Every attempt that this process knows, including its own."""
        return self._claim.root_list

    @property
    def record(self) -> Claim:
        """What other nodes of the job record of this claim."""
        return self._claim

    def join(self, unclaimed: Mapping[str, str]) -> None:
        """Record, on another node of the job, the claim that the job's leader made.

        Args:
            unclaimed: The mirrors that have not recorded it, as the leader says.
        """
        self.unclaimed.update(unclaimed)
        self._write_here(self._claim.root_list)

    def _identity(self) -> RootId:
        """The identity of the job's roots, as long as this root is the one that it was."""
        own = read_root_id(self.root)
        return RootId(self.attempt.root, own.is_first) if own.id == self._own_id else own

    def make(self, seen: Survey) -> None:
        """Add the attempt to the root's list, then to the list of each answering mirror, in order.

        The caller holds the root lock.

        Args:
            seen: The survey that the claim is based on.

        Raises:
            StartOver: An attempt or a save has appeared since the survey.
            StoreTemporary: A mirror that must take the claim stopped answering.
        """
        self._begins = run_of(seen.evidence) is None
        in_order = self._probed() if self.attempt.by_person and not self._begins else self._mirrors
        self._required_by = {one.url: one.number for one in seen.evidence.disk.requirements if not one.is_removed}
        if not self._begins:  # else the first mirror names the run: if two starts begin it at once, one starts over
            self._write_here(self._claim.root_list)
        claimed: set[str] = set()
        for mirror in in_order:
            error = seen.seen[mirror.url].error if seen.seen[mirror.url].catalog is None else None
            if error is None:
                try:
                    self._enter(mirror, StartOver)
                    claimed.add(mirror.url)
                    continue
                except CkptMirrorError as failure:
                    if reach_after(failure) is Reach.ANSWERED and not isinstance(failure, StorePermanent):
                        raise
                    error = failure
            if mirror.url in self._claim.needs:
                raise _not_taken_down(mirror, error) from error
            if mirror.required and isinstance(error, StorePermanent):
                raise error
            self.unclaimed[mirror.url] = str(error)
        mine = self._claim.root_list
        if claimed.issuperset(mine.required):  # one of them may no longer be configured, so it was not asked
            mine = replace(mine, completed=(*mine.completed, self.attempt.id))
        self._write_here(mine)

    def _probed(self) -> list[Mirror]:
        """Let each mirror show that it takes writes, and return them in the order in which they take a person's claim.

        Where all but one list it, an eval host of such a mirror already goes back, and nobody has. So each mirror that
        must take it first takes its own list once more; one that has no list is the first to take the claim.

        Raises:
            StoreTemporary: One does not take it, or does not answer any more.
            NotAuthorised: One refuses it.
        """
        needs = [mirror for mirror in self._mirrors if mirror.url in self._claim.needs]
        without: list[Mirror] = []
        for mirror in needs if len(needs) > 1 else ():
            try:
                there, generation = read_mirror_attempts(mirror, mend=True)
                if there is None:
                    without.append(mirror)
                else:
                    mirror.store.write(names.WRITER_NAME, attempts_to_bytes(there), if_generation=generation)
            except PreconditionFailed:
                continue  # somebody else writes there
            except CkptMirrorError as error:
                raise _not_taken_down(mirror, error) from error
        return [*without, *(mirror for mirror in self._mirrors if mirror not in without)]

    def confirm(self, mirror: Mirror, meta: Meta | None = None, *, is_part: bool = False) -> None:
        """Check that this attempt may continue on a mirror, and add it to the mirror's list if it is not there yet.

        Args:
            mirror: The mirror to check.
            meta: The save to commit there; None before sending files.
            is_part: Only a node's part is written, which commits nothing.

        Raises:
            AttemptFenced: A newer attempt has started. Every later call raises this too.
            NodeBehind: The save is of an earlier attempt, and on a mirror before any of this one it would fence this.
            StoreTemporary: The mirror does not answer, or the commit must wait for a silent mirror.
            StorePermanent: The save belongs to an earlier attempt, and the run continued without it.
        """
        with self._lock:
            mirror_lock = self._mirror_locks.setdefault(mirror.url, threading.Lock())
        with mirror_lock:  # one lock per mirror, so that a mirror that does not answer blocks no other
            if self.fenced is not None:
                raise AttemptFenced(self.fenced)
            self._enter(mirror, None)
            self.unclaimed.pop(mirror.url, None)
            if meta is None:
                return
            if meta.attempt.id != self.attempt.id:
                self._places.check_earlier(mirror, self.attempt.id, meta)
                if not is_part and meta.attempt.id not in self._claim.for_mirrors:
                    self._enter(mirror, None, earlier=meta.attempt.id)
                return
            if is_part or mirror.url in self._may_commit:
                return
            seen = self._places.survey(mirror).evidence
            verdict = may_commit(seen, self.attempt.id)
            if verdict.may == "wait":
                raise self._places.waiting(verdict)
            if verdict.may == "fenced":
                raise self._fence(f"On {mirror.url} {verdict.why}.")
            if has_save_on(seen, mirror.url, self.attempt.id):  # else the commit may fail, and a drain come first
                self._may_commit.add(mirror.url)

    def _fence(self, why: str) -> AttemptFenced:
        self.fenced = f"{why} This is attempt {self.attempt.number} ({self.attempt.id[:8]})."
        return AttemptFenced(self.fenced)

    def _enter(self, mirror: Mirror, changed: type[StartOver] | None, *, earlier: str = "") -> None:
        """Add the attempt to the mirror's list, after checking that the list names no unknown attempt.

        Args:
            mirror: Whose list.
            changed: What a start raises if the list names an unknown attempt; None: this attempt is fenced.
            earlier: The id of an earlier attempt to add as well.
        """
        claim = with_earlier(self._claim, earlier) if earlier else self._claim
        for _ in range(_RACES_LIMIT):
            there, generation = read_mirror_attempts(mirror, mend=changed is not None)
            list_there = there if there is not None else rebuild_attempts([mirror])
            if list_there is not None:
                if self._begins and changed is not None and list_there.run_id != self.run_id:
                    raise changed(f"another start has begun run {list_there.run_id[:8]} on {mirror.url}")
                check_run(mirror, list_there, [self._claim.root_list], self.root)
            if changed is not None:
                self._tell_of_older_state(mirror, there)
            unknown = [
                one
                for one in (list_there.attempts if list_there is not None else ())
                if one.id not in self._claim.known
            ]
            if unknown:
                newest = max(unknown, key=lambda attempt: (attempt.number, attempt.id))
                who, where = f"Attempt {newest.number} ({newest.id[:8]})", mirror.url
                why = f"{who} of this run has started and is listed on {where}."
                if changed is None and newest.number <= self.attempt.number:  # or a drain has listed it
                    why = f"{who} of this run, of which this one did not know, is listed on {where}."
                if changed is not None:
                    raise changed(why)
                note_met(self.root, self.run_id, unknown)
                raise self._fence(why)
            try:
                wanted = mirror_list(claim, there)
            except LineageError as error:
                raise ConfigError(f"{mirror.url}: {error}", hint="Give each run a mirror prefix of its own.") from error
            if there is not None and attempts_to_bytes(there) == attempts_to_bytes(wanted):
                return
            try:
                mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
            except PreconditionFailed:
                continue  # another writer, or our own write whose answer was lost: the next read shows which
            return
        raise Temporary(f"{mirror.url}/{names.WRITER_NAME} keeps changing.")

    def _tell_of_older_state(self, mirror: Mirror, there: AttemptList | None) -> None:
        """Log an error if a required mirror's list lacks the newest attempt that it had to record: lists only grow."""
        mine, number = self._claim.root_list, self._required_by.get(mirror.url)
        if there is None or mirror.url not in mine.required:
            return
        listed = {one.id for one in there.attempts}
        completed = [one for one in mine.attempts if one.id in mine.completed and one.number == number]
        lost = [one for one in completed if one.id not in listed]
        if lost:
            save_logger(_log, mirror=mirror.url).error(
                "%s had recorded attempt %d (%s), and its list does not name it now: the mirror shows an older state. "
                "Somebody restored or replayed it; compare `ckptmirror ls` of this root and of the mirror",
                mirror.url,
                lost[-1].number,
                lost[-1].id[:8],
            )

    def _write_here(self, attempts: AttemptList) -> None:
        self._claim = replace(self._claim, root_list=attempts)
        note_job(self.root, self.attempt.root)
        path = self.root / names.ATTEMPTS_NAME
        files.write_bytes(path, attempts_to_bytes(attempts), save_id=new_id(), replace=True)


def check_of_run(root: Path, mirror: Mirror) -> tuple[AttemptList | None, int]:
    """Check that a mirror holds no other run than this root; return its list and the list's generation.

    Raises:
        ConfigError: It holds another run.
        StoreTemporary: It does not answer.
    """
    there, generation = read_mirror_attempts(mirror)
    try:
        here, _ = attempts_here(root)
        list_there = there if there is not None else rebuild_attempts([mirror])
    except LineageError as error:
        raise not_one_run(root, error) from error
    if list_there is not None and here is not None:
        check_run(mirror, list_there, [here], root)
    return there, generation


class DrainConfirmation:
    """The check that a drain makes before it sends or commits. A drain is not an attempt and is never fenced.

    Args:
        root: The root to drain.
        table: Its table.
        mirrors: All mirrors of the root, including those that this drain does not send to.
    """

    def __init__(self, root: Path, table: UploadsTable, mirrors: Sequence[Mirror]) -> None:
        self._root = root
        self._places = _Places(root, table, mirrors, {})
        self._told: set[tuple[str, str]] = set()

    def __call__(self, mirror: Mirror, meta: Meta | None = None, *, is_part: bool = False) -> None:
        """Check that a save, or a node's part of it, may be published; add a whole save's attempt to the mirror's list.

        Raises:
            StoreTemporary: The mirror does not answer, or the commit must wait for a silent mirror.
            StorePermanent: The run continued without the save.
            ConfigError: The mirror belongs to another run.
        """
        there, generation = check_of_run(self._root, mirror)
        if meta is None:
            return
        seen = self._places.survey(mirror)
        row = seen.evidence.row(mirror.url)
        if there is not None and row is not None and any(one.save.save_id == meta.save_id for one in row.copies):
            return  # it is committed there already
        jobs = read_root_id(self._root).jobs
        seen = replace(seen, evidence=seen_by_its_job(seen.evidence, meta.attempt.id, jobs))
        self._places.check_drained(mirror, meta, seen)
        if is_part and there is not None:
            return
        if not is_part:
            self._tell_of_an_overtaken_attempt(mirror, meta, seen)
        wanted = drained_list(seen.evidence, mirror.url, meta.attempt, meta.run_id, there)
        if there is None or attempts_to_bytes(there) != attempts_to_bytes(wanted):
            try:
                mirror.store.write(names.WRITER_NAME, attempts_to_bytes(wanted), if_generation=generation)
            except PreconditionFailed as error:
                raise Temporary(f"{mirror.url}/{names.WRITER_NAME} has been changed since.") from error

    def _tell_of_an_overtaken_attempt(self, mirror: Mirror, meta: Meta, seen: Survey) -> None:
        """Log once that a job, if it trains, will be fenced by this commit (docs/adr/0014)."""
        attempt = overtaken_by(seen.evidence, mirror.url, facts_of(meta))
        if attempt is None or (mirror.url, meta.save_id) in self._told:
            return
        self._told.add((mirror.url, meta.save_id))
        begins = f"from step {attempt.parent.step}" if attempt.parent is not None else "at step 0"
        save_logger(_log, mirror=mirror.url).warning(
            "%s lists attempt %d (%s), which began %s and has no save there yet; the run now continues from step %d. "
            "If that attempt still trains, it stops at its first commit: start it again, and it continues from step %d",
            mirror.url,
            attempt.number,
            attempt.id[:8],
            begins,
            meta.step,
            meta.step,
        )
