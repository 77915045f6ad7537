"""Which attempts count, which mirrors are silent, and what may be committed: the rules for claiming a run.

An attempt *fences* from its claim, and *counts* from its first committed save. Rules, in the order of the code:

1. A place's list names attempts. A lost or broken list is rebuilt from all the metas in that place. If a meta names an
   attempt that a sound list lacks, the attempt is a *stranger*: a start never follows it unless a person names its
   save.
2. A run depends on its required mirrors: those in the configuration, those that a list names, and those that were
   required at this root's last start. A required mirror that does not answer, or is not configured, is *silent*.
3. An attempt counts if a mirror that answers has a committed save of it. A person's attempt counts once every mirror
   that had to take its claim lists it, or this root saw that they all did; while one of them is silent, the attempt is
   *doubtful*. If a mirror was required then, one of these roots' that no mirror lists does not count: it failed.
4. Other attempts can count as well: first those whose save this root's table recorded on a mirror that is now silent,
   since they counted there; then those whose saves exist only on this disk, or whose parts do that no mirror has, and
   then in the persistent directory. Of each, the newest is added first, since it knew the older ones and may have left
   them behind, and only if it is a fast-forward of what counts so far. The rest *ran apart*.
5. A *rival* is an attempt of another root that any place has heard of, newer than this root's newest attempt on the way
   that has a committed save on a mirror, as shown by an answering mirror or by this root's table.
6. A commit on a mirror must be a fast-forward over all answering mirrors, otherwise the attempt is fenced. An attempt
   that does not yet count on any mirror waits while a mirror is silent and there is a rival. On a mirror that has no
   save of it yet, it finishes none that it has left behind: that would fence the attempt itself. Nor does a drain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptmirror.core.model import KINDS, Attempt, AttemptList, Requirement
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.evidence import Evidence, ListFound, Row, Voice
from ckptmirror.core.start.lineage import (
    Lineage,
    SaveFacts,
    is_fast_forward,
    lineage,
    merge_attempts,
    merge_requirements,
    next_number,
)

__all__ = [
    "Claim",
    "Counted",
    "Verdict",
    "claim_from",
    "count",
    "drained_list",
    "is_settled",
    "left_behind",
    "may_commit",
    "may_drain",
    "mirror_list",
    "overtaken_by",
    "rival_of",
    "with_earlier",
]

_REBUILT = (ListFound.LOST, ListFound.NONE, ListFound.BROKEN)
_NOT_CONFIGURED = "it is not configured"


@dataclass(frozen=True)
class Counted:
    """The state of a run, as a start or a commit sees it.

    Attributes:
        known: The attempts that can be followed, by id.
        heard: Every attempt that any place names, by id.
        counting: The ids of the attempts that count.
        apart: The ids of the attempts that have saves here but do not count.
        doubtful: A person's attempts that may or may not count: a silent mirror would decide.
        silent: The places that should answer and do not, with the reason.
        saves: Every save that some place can resume from.
        order: The lineage of those saves.
    """

    known: Mapping[str, Attempt]
    heard: Mapping[str, Attempt]
    counting: frozenset[str]
    apart: frozenset[str]
    doubtful: tuple[Attempt, ...]
    silent: Mapping[str, str]
    saves: tuple[SaveFacts, ...]
    order: Lineage

    @property
    def strangers(self) -> tuple[SaveFacts, ...]:
        """The saves whose attempts no list names; by step, then save id."""
        return tuple(save for save in (*self.order.superseded, *self.order.unknown) if save.attempt not in self.known)


def count(evidence: Evidence, *, mirrors_only: bool = False) -> Counted:
    """Decide which attempts count.

    Args:
        evidence: What each place reports of one run.
        mirrors_only: Leave out attempts that count only on this disk or in the persistent directory. A commit does.

    Raises:
        LineageError: The lists contradict one another.
    """
    rows = evidence.answering()
    mirrors = [row for row in rows if row.sort == "mirror"]
    known = _known(evidence.rows)
    silent = _silent(evidence)
    counting = {one for row in mirrors for one in _ids(row, Voice.COUNTS)} & known.keys()
    decided, doubtful = _of_persons(evidence, known, silent)
    counting |= decided
    saves = facts_of_rows(mirrors)
    here = [row for row in rows if row.sort != "mirror"]
    apart: set[str] = set()
    if not mirrors_only:
        uploaded = _ids(evidence.disk, Voice.UPLOADED)
        theirs = (uploaded | {one for row in here for one in _ids(row, Voice.COUNTS)}) & known.keys() - counting
        mine = facts_of_rows(here)
        on_disk = {one for row in here if row.sort != "persistent" for one in _ids(row, Voice.COUNTS)}
        newest_first = sorted((known[one] for one in theirs), key=_age, reverse=True)
        for attempt in sorted(newest_first, key=lambda one: (one.id not in uploaded, one.id not in on_disk)):
            if is_fast_forward(list(known.values()), saves, counting, attempt.id):
                counting.add(attempt.id)
                saves = _merged([*saves, *(save for save in mine if save.attempt == attempt.id)])
            else:
                apart.add(attempt.id)
        saves = facts_of_rows(rows)
    return Counted(
        known=known,
        heard={heard.attempt.id: heard.attempt for row in evidence.rows for heard in row.heard} | known,
        counting=frozenset(counting),
        apart=frozenset(apart),
        doubtful=doubtful,
        silent=silent,
        saves=tuple(saves),
        order=lineage(known.values(), saves, counting),
    )


def _age(attempt: Attempt) -> tuple[int, str]:
    return attempt.number, attempt.id


def _ids(row: Row, voice: Voice) -> set[str]:
    return {heard.attempt.id for heard in row.heard if voice in heard.voices}


def _known(rows: Iterable[Row]) -> dict[str, Attempt]:
    found: list[Attempt] = []
    for row in rows:
        for heard in row.heard:
            listed = heard.voices & {Voice.CLAIMED, Voice.COMPLETED}
            rebuilt = Voice.NAMED in heard.voices and row.listed in _REBUILT
            saved_here = row.sort != "mirror" and Voice.COUNTS in heard.voices
            if heard.attempt.decided and (listed or rebuilt or saved_here):
                found.append(heard.attempt)
    merged = merge_attempts(*(AttemptList("", (attempt,)) for attempt in found)) if found else AttemptList("")
    return {attempt.id: attempt for attempt in merged.attempts}


def _silent(evidence: Evidence) -> dict[str, str]:
    """Rule 2."""
    named = {one.url for one in evidence.requirements if not one.is_removed}
    removed = {one.url for one in evidence.requirements if one.is_removed}  # after the last start that required it
    silent = {
        row.place: row.why or row.reach.value
        for row in evidence.mirrors()
        if not row.answers and (row.required or (row.was_required and row.place not in removed) or row.place in named)
    }
    return silent | {url: _NOT_CONFIGURED for url in sorted(named) if evidence.row(url) is None}


def _of_persons(
    evidence: Evidence, known: Mapping[str, Attempt], silent: Mapping[str, str]
) -> tuple[set[str], tuple[Attempt, ...]]:
    """Rule 3 for a person's attempts: return those that count, and those that are doubtful."""
    completed = {one for row in evidence.answering() for one in _ids(row, Voice.COMPLETED)}
    sound = [row for row in evidence.mirrors() if row.answers and row.listed is ListFound.SOUND]
    claimed = {row.place: _ids(row, Voice.CLAIMED) for row in sound}  # once: a list may name 100,000
    listed = {one for ids in claimed.values() for one in ids}
    own = {evidence.root, *evidence.roots}
    counting: set[str] = set()
    doubtful: list[Attempt] = []
    for attempt in known.values():
        if not attempt.by_person:
            continue
        if attempt.id in completed:
            counting.add(attempt.id)
            continue
        if all(attempt.id in ids for place, ids in claimed.items() if place in attempt.required):
            if silent.keys() & set(attempt.required):
                doubtful.append(attempt)
            elif attempt.id in listed or not attempt.required or attempt.root not in own:
                counting.add(attempt.id)
    return counting, tuple(doubtful)


def facts_of_rows(rows: Iterable[Row]) -> list[SaveFacts]:
    """Return the saves that any of these places can resume from, each with all kinds that some place has."""
    return _merged(copy.save for row in rows for copy in row.copies)


def _merged(saves: Iterable[SaveFacts]) -> list[SaveFacts]:
    found: dict[str, SaveFacts] = {}
    for save in saves:
        kinds = {*save.kinds, *(found[save.save_id].kinds if save.save_id in found else ())}
        found[save.save_id] = replace(save, kinds=tuple(kind for kind in KINDS if kind in kinds))
    return list(found.values())


# -- this root and others ------------------------------------------------------------------------------------


def is_own(evidence: Evidence, attempt: Attempt) -> bool:
    """Whether this root made an attempt: its entry names the root, or (in an older list) a save of it was made here.

    What a person recorded on one node's root is the whole job's: it was recorded for all nodes.
    """
    return not others_of(evidence, [attempt])


def others_of(evidence: Evidence, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts that this root did not make (:func:`is_own`), in one pass: a list may name 100,000."""
    saved_here = _ids(evidence.disk, Voice.COUNTS)

    def is_mine(one: Attempt) -> bool:
        if not one.root:
            return one.id in saved_here
        return one.root == evidence.root or (one.by_person and one.root in evidence.roots)

    return [one for one in attempts if not is_mine(one)]


def rival_of(evidence: Evidence, counted: Counted, attempt: str) -> Attempt | None:
    """Return the newest attempt that may have continued elsewhere (rule 5); None if there is none.

    Args:
        evidence: What each place reports of one run.
        counted: What :func:`count` returned for it.
        attempt: The id of the attempt whose save should be continued from, or committed.
    """
    saved = {one for row in evidence.mirrors() for one in _ids(row, Voice.COUNTS)} | _ids(evidence.disk, Voice.UPLOADED)
    others = others_of(evidence, counted.heard.values())
    foreign = {one.id for one in others}
    ours: Attempt | None = counted.heard.get(attempt)
    while ours is not None and (ours.id in foreign or ours.id not in saved):
        before = counted.heard.get(ours.parent.attempt) if ours.parent is not None else None
        ours = before if before is not None and _age(before) < _age(ours) else None  # strangers may form a circle
    return max((one for one in others if ours is None or _age(one) > _age(ours)), key=_age, default=None)


# -- claiming ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """What a start writes, once it has loaded and verified.

    Attributes:
        attempt: The new entry.
        root_list: The new list of this root.
        known: The ids of all attempts that any place named. Any other attempt fences this one.
        for_mirrors: The ids of the attempts that mirrors' lists should name. An attempt of this root that died before
            its first save is not among them, unless a mirror already lists it; nor is a person's attempt that does not
            count, since only its own claim adds it.
        needs: The mirrors that must take the claim, or the start fails. The others can take it later.
        roots: The identity of each node's root, as the evidence of the start has them.
    """

    attempt: Attempt
    root_list: AttemptList
    known: frozenset[str]
    for_mirrors: frozenset[str]
    needs: tuple[str, ...]
    roots: frozenset[str] = frozenset()


def claim_from(
    evidence: Evidence, attempt: Attempt, run_id: str, *, needs_all: bool, adopted: Sequence[Attempt] = ()
) -> Claim:
    """Work out what a start has to write.

    Args:
        evidence: What the start based its choice on.
        attempt: The new attempt without its number, root and required mirrors.
        run_id: The id of the run, or a new one.
        needs_all: Whether every required mirror must take the claim.
        adopted: Strangers that a person decided to continue from.

    Raises:
        LineageError: The lists contradict one another.
    """
    counted = count(evidence)
    configured = [row.place for row in evidence.mirrors() if row.required and row.reach is not Reach.DROPPED]
    heard = AttemptList(run_id, tuple(counted.heard.values()))
    counting = [one for one in counted.known.values() if one.id in counted.counting]
    completed = _ids(evidence.disk, Voice.COMPLETED) | _taken_by_all(evidence, counting)
    known = AttemptList(run_id, tuple(counted.known.values()), evidence.requirements, tuple(sorted(completed)))
    known = merge_attempts(known, AttemptList(run_id, tuple(adopted)))
    number = max(next_number(heard), next_number(known))
    requires = merge_requirements([*(Requirement(url, number) for url in configured), *evidence.requirements])
    required = tuple(one.url for one in requires if not one.is_removed)
    entry = replace(attempt, number=number, root=evidence.root, required=required if attempt.by_person else ())
    on_mirrors = {heard.attempt.id for row in evidence.mirrors() for heard in row.heard if not heard.attempt.by_person}
    return Claim(
        attempt=entry,
        for_mirrors=frozenset({entry.id, *on_mirrors, *counted.counting, *(one.id for one in adopted)}),
        root_list=merge_attempts(known, AttemptList(run_id, (entry,), requires)),
        known=frozenset({one.id for one in (*heard.attempts, *known.attempts)} | {entry.id}),
        needs=required if needs_all else (),
        roots=evidence.roots,
    )


def _taken_by_all(evidence: Evidence, counting: Iterable[Attempt]) -> set[str]:
    """Return the attempts of persons that every mirror which had to take them lists now: of these no doubt is left.

    A mirror that was taken out of the run since need not. If it answers all the same, and does not list one, that one
    is not among those that count.
    """
    removed = {one.url for one in evidence.requirements if one.is_removed}
    listed = {
        row.place: _ids(row, Voice.CLAIMED)
        for row in evidence.mirrors()
        if row.answers and row.listed is ListFound.SOUND
    }
    asked = {one.id: {*one.required} - removed for one in counting if one.by_person}
    return {one for one, urls in asked.items() if urls and all(one in listed.get(url, ()) for url in urls)}


def with_earlier(claim: Claim, attempt: str) -> Claim:
    """Return the claim with an earlier attempt, and those that it came from, among those that mirrors should list.

    A running attempt that completes a save of an earlier one lists that one by this, as a drain does: a save whose
    attempt no list names would be a stranger's. What this root does not know stays a stranger's.
    """
    known = {one.id: one for one in claim.root_list.attempts}
    return replace(claim, for_mirrors=claim.for_mirrors | _way_of(known, attempt))


def _way_of(known: Mapping[str, Attempt], attempt: str) -> set[str]:
    """Return the ids of a known attempt and of those that it came from."""
    way: set[str] = set()
    at = known.get(attempt)
    while at is not None and at.id not in way:  # strangers may form a circle
        way.add(at.id)
        at = known.get(at.parent.attempt) if at.parent is not None else None
    return way


def mirror_list(claim: Claim, there: AttemptList | None) -> AttemptList:
    """Return the list that a mirror should hold after the claim."""
    listed = tuple(one for one in claim.root_list.attempts if one.id in claim.for_mirrors)
    ours = replace(claim.root_list, attempts=listed, completed=())
    return merge_attempts(there, ours) if there is not None else ours


def drained_list(
    evidence: Evidence, mirror: str, attempt: Attempt, run_id: str, there: AttemptList | None
) -> AttemptList:
    """Return the list that a mirror should hold before a drain commits a save of an attempt there.

    The drain adds every attempt that this root knows. If the mirror lists attempts that this root does not know, it
    adds only the one attempt. A person's attempt is added by its own claim, or once it counts.
    """
    counted = count(evidence)
    here = {
        heard.attempt.id
        for heard in evidence.disk.heard
        if heard.voices & {Voice.CLAIMED, Voice.COUNTS} and heard.attempt.id in counted.known
    }
    row = evidence.row(mirror)
    strange = (_ids(row, Voice.CLAIMED) if row is not None else set()) - here
    listed = [
        counted.known[one]
        for one in ({attempt.id} if strange else here | {attempt.id})
        if one in counted.known and (not counted.known[one].by_person or one in counted.counting)
    ]
    ours = AttemptList(run_id, tuple(listed) or (attempt,), evidence.disk.requirements)
    return merge_attempts(there, ours) if there is not None else merge_attempts(ours)


# -- committing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether an attempt's save may be committed on a mirror; if not, why not.

    Attributes:
        may: "wait": not while places are silent; "behind": not before ``rival`` has a save there; "fenced": never.
        why: The reason.
        waits_for: The silent places.
        rival: The attempt that keeps it from being committed, if one does.
    """

    may: Literal["commit", "wait", "behind", "fenced"]
    why: str = ""
    waits_for: tuple[str, ...] = ()
    rival: Attempt | None = None


def may_commit(evidence: Evidence, attempt: str) -> Verdict:
    """Decide whether a save of an attempt may be committed on a mirror now (rule 6).

    Args:
        evidence: The root's list, and what every answering mirror lists and holds.
        attempt: The id of the attempt, which has been claimed.

    Raises:
        LineageError: The lists contradict one another.
    """
    counted = count(evidence, mirrors_only=True)
    if counted.silent and attempt not in counted.counting:
        rival = rival_of(evidence, counted, attempt)
        if rival is not None:
            return Verdict(
                "wait", "another root may have saved on a mirror that is silent", tuple(counted.silent), rival
            )
    if not is_fast_forward(list(counted.known.values()), counted.saves, counted.counting, attempt):
        newest = counted.order.way[0]
        return Verdict("fenced", f"attempt {newest.number} ({newest.id[:8]}) has committed, and did not start from it")
    return Verdict("commit")


def has_save_on(evidence: Evidence, mirror: str, attempt: str) -> bool:
    """Return whether a mirror has a committed save of an attempt."""
    there = evidence.row(mirror)
    return there is not None and attempt in _ids(there, Voice.COUNTS)


def left_behind(evidence: Evidence, mirror: str, attempt: str, save: SaveFacts) -> bool:
    """Return whether a save of an earlier attempt would put one that has none on this mirror yet off the lineage there.

    The saves that it has on other mirrors do not help: once those are lost, this one alone says what counts. A person's
    attempt that counts by its claim needs none.

    Args:
        evidence: What each place reports.
        mirror: The mirror.
        attempt: The id of the attempt, which has been claimed.
        save: A whole save that is on no mirror, or would be whole on one.

    Raises:
        LineageError: The lists contradict one another.
    """
    if has_save_on(evidence, mirror, attempt):
        return False
    counted = count(evidence, mirrors_only=True)
    if attempt in _of_persons(evidence, counted.known, counted.silent)[0]:
        return False
    known = list(counted.known.values())
    before = counted.counting - {attempt}
    saves = [one for one in counted.saves if one.attempt != attempt]
    if not is_fast_forward(known, saves, before, attempt):
        return False
    return not is_fast_forward(known, _merged([*saves, save]), {*before, save.attempt}, attempt)


def is_settled(evidence: Evidence) -> bool:
    """Return whether the newest attempt that any place names counts, and has a save on every mirror that answers.

    If so, no verdict on a commit changes before a list does. If not, a commit of a listed attempt may change one.

    Raises:
        LineageError: The lists contradict one another.
    """
    counted = count(evidence, mirrors_only=True)
    newest = max(counted.heard.values(), key=_age, default=None)
    if newest is None or newest.id not in counted.counting:
        return False
    return all(newest.id in _ids(row, Voice.COUNTS) for row in evidence.mirrors() if row.answers)


def overtaken_by(evidence: Evidence, mirror: str, save: SaveFacts) -> Attempt | None:
    """Return the newest attempt that a mirror lists, if it has no save on any yet and this one would fence it.

    It may be training at this moment, or have died soon after its claim: no list tells. One that is not newer than the
    save's attempt, and of another root, will not know that one when it finds it listed.

    Raises:
        LineageError: The lists contradict one another.
    """
    there = evidence.row(mirror)
    counted = count(evidence, mirrors_only=True)
    listed = _ids(there, Voice.CLAIMED) & counted.known.keys() if there is not None else set()
    newest = max((counted.known[one] for one in listed), key=_age, default=None)
    if newest is None or newest.id in {save.attempt, *counted.counting}:
        return None
    made_by = counted.known.get(save.attempt)
    if made_by is not None and _age(made_by) > _age(newest):
        return newest if newest.root != made_by.root and newest.id not in _way_of(counted.known, made_by.id) else None
    return newest if left_behind(evidence, mirror, newest.id, save) else None


def may_drain(evidence: Evidence, mirror: str, save: SaveFacts) -> Verdict:
    """Decide whether a drain, which is not an attempt, may commit a save from this disk on a mirror.

    Beyond :func:`may_commit`: a drain commits nothing while a person's attempt is doubtful, and it adds an attempt to a
    list that names others only if every required mirror answers. It finishes no save that a newer attempt, of which
    this disk has saves too, has left behind, before that one has a save on the mirror. It may commit a superseded save
    of an attempt that counts, since that changes nothing.

    Raises:
        LineageError: The lists contradict one another.
    """
    counted = count(evidence, mirrors_only=True)
    silent = tuple(counted.silent)
    if counted.doubtful:
        return Verdict("wait", "a person may have decided otherwise", silent, counted.doubtful[0])
    made_by = counted.known.get(save.attempt)
    if made_by is not None and made_by.by_person and made_by.id not in counted.counting:
        return Verdict("wait", "a person's decision is not on every mirror yet", silent, made_by)
    there = evidence.row(mirror)
    listed = _ids(there, Voice.CLAIMED) if there is not None else set()
    ours = {heard.attempt.id for heard in evidence.disk.heard}
    if silent and save.attempt not in listed and listed - ours:
        return Verdict("wait", "the mirror lists attempts that this root does not know", silent)
    if silent:
        rival = rival_of(evidence, counted, save.attempt)
        if rival is not None:
            return Verdict("wait", "another root may have saved on a mirror that is silent", silent, rival)
    verdict = may_commit(evidence, save.attempt)
    newer = _newer_here(evidence, counted, save.attempt) if verdict.may == "commit" else []
    for one in newer:
        if left_behind(evidence, mirror, one.id, save):
            return Verdict("behind", "a newer attempt continued without it", rival=one)
    return verdict


def _newer_here(evidence: Evidence, counted: Counted, attempt: str) -> list[Attempt]:
    """Return the attempts newer than this one of which the disk has saves, or parts that may still be made whole.

    The newest comes first.
    """
    made = _ids(evidence.disk, Voice.COUNTS)
    made |= {part.save.attempt for part in evidence.disk.parts if not part.is_given_up}
    known = [counted.known[one] for one in made if one in counted.known]
    this = counted.known.get(attempt)
    return sorted((one for one in known if this is not None and _age(one) > _age(this)), key=_age, reverse=True)
