"""The disks of a job's nodes, as the one disk that a start decides about.

Rules:
* A save of several nodes is whole on their disks if each of its parts is whole on one of them, whichever node that is
  now. It is whole in the kinds in which all parts are.
* Its attempt has committed it only if every part is there: a crash may have left some of them.
* A save that was staged in the place of a part is this job's own if another disk of the job has the part that it made.
* Lists only grow, so the union of the nodes' lists is the list. Where one node's is sound, no other is missed.
* All nodes are of one run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ckptmirror.core.errors import ConfigError
from ckptmirror.core.model import KINDS, Attempt, Kind
from ckptmirror.core.start.attempts import count
from ckptmirror.core.start.evidence import Copy, Evidence, Heard, ListFound, Origin, Part, Problem, Row, Voice
from ckptmirror.core.start.lineage import SaveFacts, lineage, merge_requirements

__all__ = ["Torn", "identity_of", "never_whole", "one_disk", "seen_by_its_job", "torn"]

_NAMED = 8  # as many numbers are named
_BEST_LIST = (ListFound.NEWER, ListFound.SOUND, ListFound.BROKEN, ListFound.LOST, ListFound.NONE)
_BEST_ORIGIN = (Origin.SAVED_HERE, Origin.STAGED, Origin.COPIED, Origin.REMOTE)


def identity_of(roots: Sequence[str]) -> str:
    """Return the identity of a job's roots: that of its root, or one that only these roots together have.

    A job on other nodes is another root for the rules of claiming: its disks need not know all that these know.

    Args:
        roots: The identity of each node's root, in any order.
    """
    if len(roots) == 1 or not all(roots):
        return roots[0] if len(roots) == 1 else ""
    return hashlib.sha256(" ".join(["roots", *sorted(roots)]).encode()).hexdigest()[:32]


def seen_by_its_job(evidence: Evidence, attempt: str, jobs: Collection[str]) -> Evidence:
    """Return what a drain on one node found, as a node of the job that made an attempt would judge it.

    If this root was one of that job, the job's other attempts are not those of another root. A node that uploads while
    its job runs sees its own disk alone, too.

    Args:
        evidence: What the drain found.
        attempt: The id of the attempt whose save is to be committed.
        jobs: The identities of the jobs that this root was one of.
    """
    made_by = next((heard.attempt.root for heard in evidence.disk.heard if heard.attempt.id == attempt), "")
    return replace(evidence, root=made_by) if made_by in jobs else evidence


def one_disk(rows: Sequence[Row]) -> Row:
    """Return the row of all nodes' disks together, given the row of each.

    Raises:
        ConfigError: They hold several runs.
    """
    _check_one_run(rows)
    best = min((row.listed for row in rows), key=_BEST_LIST.index)
    parts: dict[str, list[Part]] = {}
    for part in (one for row in rows for one in row.parts):
        parts.setdefault(part.save.save_id, []).append(part)
    copies = _copies([copy for row in rows for copy in row.copies], parts)
    committed = {found[0].save.attempt for found in parts.values() if not _absent(found)}
    committed |= {
        copy.save.attempt for copy in copies if copy.save.save_id in parts and copy.origin is Origin.SAVED_HERE
    }
    whole = {copy.save.save_id: copy.save.kinds for copy in copies}
    return replace(
        rows[0],
        why=next((row.why for row in rows if row.listed is best), ""),
        listed=best,
        run_id=next((row.run_id for row in rows if row.run_id is not None), None),
        run_on=tuple(node for node, row in enumerate(rows) if row.run_id is not None) if len(rows) > 1 else (),
        requirements=merge_requirements(one for row in rows for one in row.requirements),
        heard=_heard(rows, committed),
        copies=copies,
        problems=(*(one for row in rows for one in row.problems), *_problems(parts, whole)),
        parts=tuple(part for found in parts.values() if _absent(found) for part in found),
    )


def never_whole(evidence: Evidence) -> list[SaveFacts]:
    """Return the saves that this job has parts of, and that nothing can make whole: a crash came between their nodes.

    A part is gone for good if the nodes that saved it are those of this job, on the disks that they had, and neither
    these disks nor any mirror has it, nor has a disk a meta that cannot be read and may be its. An emergency snapshot's
    may also be in the persistent directory. Disks without an identity may be any.
    """
    roots = {heard.attempt.id: heard.attempt.root for heard in evidence.disk.heard}
    return [one for one in _whole_nowhere(evidence) if evidence.root and roots.get(one.attempt) == evidence.root]


@dataclass(frozen=True)
class Torn:
    """The saves of which disks of this job have parts, and no disk of this job has the rest, by id.

    Attributes:
        all: All of them, but those of the lineage that wait for this job alone, since a required mirror has the rest. A
            disk that has the rest may come back.
        behind: Those that no place has whole, and that an attempt leaves behind: once it has committed a save on every
            required mirror, nobody continues from these any more.
        cannot_be_on: Mirrors where one cannot become whole any more. A required mirror has it; these were added since,
            or lost it. Or it is on the lineage, and these have a later save of that, or the one that replaced it.
        once_whole: The same of those that wait for this job alone: mirrors without the rest, where one cannot become
            whole any more once a required mirror, which has the rest, has it whole.
    """

    all: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()
    cannot_be_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    once_whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def without(self, save_id: str) -> Torn:
        """Return the same without a save that has been brought whole in the place of its part since."""
        cannot_be_on, once_whole = (
            {one: mirrors for one, mirrors in found.items() if one != save_id}
            for found in (self.cannot_be_on, self.once_whole)
        )
        return Torn(self.all - {save_id}, self.behind - {save_id}, cannot_be_on, once_whole)


def torn(evidence: Evidence, attempt: Attempt) -> Torn:
    """Return the saves of which this job has parts alone.

    Args:
        evidence: What each place reports.
        attempt: The attempt that has claimed the run.
    """
    counted = count(evidence)
    known, counting = {**counted.known, attempt.id: attempt}, {*counted.counting, attempt.id}
    nowhere = [one for one in _whole_nowhere(evidence) if one.kinds != ("emergency",)]
    standing = lineage(known.values(), [*counted.saves, *nowhere], counting).standing_by_save()
    whole = {copy.save.save_id for copy in evidence.disk.copies}
    alone = _parts_alone(evidence)
    current = [save_id for save_id in alone if standing.get(save_id) == "current"]
    ours = {save_id for save_id in current if _waits_for_disks_alone(evidence, alone[save_id])}
    return Torn(
        frozenset(part.save.save_id for part in evidence.disk.parts) - whole - ours,
        frozenset(one.save_id for one in nowhere if standing[one.save_id] == "superseded"),
        _cannot_be_on(evidence, [*counted.saves, *nowhere], known.values(), counting),
        {save_id: places for save_id in ours if (places := _without_rest(evidence, alone[save_id]))},
    )


def _waits_for_disks_alone(evidence: Evidence, parts: Sequence[Part]) -> bool:
    """Whether a required mirror has all parts of a save that no disk of this job has, and no meta of the whole yet."""
    save_id = parts[0].save.save_id
    rows = [row for row in evidence.mirrors() if row.answers and row.required]
    waiting = [row for row in rows if all(one.save_id != save_id for one in row.problems)]
    return not _is_snapshot(parts) and any(not _lacks_share(parts, row.parts_here) for row in waiting)


def _without_rest(evidence: Evidence, parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the mirrors that lack a part of a save which no disk of this job has, and do not have it whole."""
    save_id = parts[0].save.save_id
    rows = [row for row in evidence.mirrors() if row.answers and _lacks_share(parts, row.parts_here)]
    return tuple(row.place for row in rows if all(copy.save.save_id != save_id for copy in row.copies))


def _cannot_be_on(
    evidence: Evidence, saves: Sequence[SaveFacts], known: Iterable[Attempt], counting: Collection[str]
) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    rows = [row for row in evidence.mirrors() if row.answers]
    alone = _parts_alone(evidence)
    of_parts = [parts[0].save for save_id, parts in alone.items() if save_id not in {one.save_id for one in saves}]
    standing = lineage(known, [*saves, *of_parts], counting).standing_by_save()
    for save_id, parts in alone.items():
        has_it = [row for row in rows if any(copy.save.save_id == save_id for copy in row.copies)]
        lack_it = _without_rest(evidence, parts)
        first = parts[0].save.step + (standing[save_id] == "current")  # of what makes up for it
        later = {one.save_id for one in saves if one.step >= first and standing[one.save_id] == "current"}
        later = later if standing[save_id] in ("current", "replaced") else set()
        found[save_id] = tuple(
            row.place
            for row in rows
            if row.place in lack_it
            if any(one.required for one in has_it) or any(copy.save.save_id in later for copy in row.copies)
        )
    return {save_id: places for save_id, places in found.items() if places and not _is_snapshot(alone[save_id])}


def _whole_nowhere(evidence: Evidence) -> list[SaveFacts]:
    """Return the saves that this job has parts of, if every place answers, and none has the rest."""
    if count(evidence).silent or not all(row.answers for row in evidence.mirrors()):
        return []
    whole = {copy.save.save_id for row in evidence.rows for copy in row.copies}
    there = {one for row in evidence.rows for one in row.parts_here}
    alone = _parts_alone(evidence)
    return [found[0].save for save_id, found in alone.items() if save_id not in whole and _lacks_share(found, there)]


def _parts_alone(evidence: Evidence) -> dict[str, list[Part]]:
    """Return the parts of saves of which no disk of this job has the rest, nor a meta that cannot be read."""
    kept = [row for row in evidence.rows if row.sort == "persistent"]
    torn_here = {one.save_id for one in evidence.disk.problems} - {part.save.save_id for part in evidence.disk.parts}
    parts: dict[str, list[Part]] = {}
    for part in (part for row in (evidence.disk, *kept) for part in row.parts):
        if part.save.save_id not in torn_here:
            parts.setdefault(part.save.save_id, []).append(part)
    unknown = {one.step for one in evidence.disk.problems if one.save is None}  # a meta that cannot be read
    unknown_snapshots = unknown | {one.step for row in kept for one in row.problems if one.save is None}
    whole = {copy.save.save_id for copy in evidence.disk.copies}
    return {
        save_id: found
        for save_id, found in parts.items()
        if save_id not in whole
        if not (unknown_snapshots if _is_snapshot(found) else unknown) & {None, found[0].save.step}
    }


def _lacks_share(found: Sequence[Part], there: Collection[tuple[str, int]]) -> bool:
    """Whether a share that is on no disk of this job is not among those that are in other places either."""
    return any((found[0].save.save_id[:8], share) not in there for share in _absent(found))


def _is_snapshot(found: Sequence[Part]) -> bool:
    return found[0].save.kinds == ("emergency",)


def _check_one_run(rows: Sequence[Row]) -> None:
    runs = {row.run_id: number for number, row in reversed(list(enumerate(rows))) if row.run_id is not None}
    if len(runs) > 1:
        held = "; ".join(
            f"node {node} holds run {run[:8]}" for run, node in sorted(runs.items(), key=lambda one: one[1])
        )
        raise ConfigError(
            f"The disks of this job's nodes belong to several runs: {held}.",
            hint="Give each run a root of its own, on every node.",
        )


def _heard(rows: Sequence[Row], committed: Iterable[str]) -> tuple[Heard, ...]:
    found: dict[str, Heard] = {}
    for heard in (one for row in rows for one in row.heard):
        before = found.setdefault(heard.attempt.id, heard)
        said = before.attempt if before.attempt.decided else heard.attempt
        by_person = before.attempt.by_person or heard.attempt.by_person
        said = replace(said, by_person=by_person, root=said.root or heard.attempt.root)
        required = said.required or heard.attempt.required
        found[said.id] = Heard(replace(said, required=required), before.voices | heard.voices)
    for one in committed:
        found[one] = replace(found[one], voices=found[one].voices | {Voice.COUNTS})
    return tuple(found.values())


def _copies(copies: Sequence[Copy], parts: Mapping[str, Sequence[Part]]) -> tuple[Copy, ...]:
    found: dict[str, Copy] = {}
    joined = [_joined(of_save) for of_save in parts.values()]
    made = {part.save.save_id for of_save in parts.values() for part in of_save if part.origin is Origin.SAVED_HERE}
    in_place = {copy for copy in copies if copy.origin is Origin.STAGED and copy.save.save_id in made}
    copies = [replace(copy, origin=Origin.SAVED_HERE) if copy in in_place else copy for copy in copies]
    for copy in (*copies, *(one for one in joined if one.save.kinds)):
        before = found.setdefault(copy.save.save_id, copy)
        kinds = {*before.save.kinds, *copy.save.kinds}
        found[copy.save.save_id] = replace(
            before,
            save=replace(copy.save, kinds=tuple(kind for kind in KINDS if kind in kinds)),
            origin=min(before.origin, copy.origin, key=_BEST_ORIGIN.index),
            unfinished=before.unfinished or copy.unfinished,
            no_proof=before.no_proof and copy.no_proof,
        )
    return tuple(found.values())


def _absent(found: Sequence[Part], kind: Kind | None = None) -> list[int]:
    """Return shares of a save that are on no disk (in a kind, if given): all, or as many as are named, and one more."""
    have = {share for part in found if kind is None or kind in part.kinds for share in part.shares}
    if len(have) == found[0].of:
        return []
    return list(islice((share for share in range(found[0].of) if share not in have), _NAMED + 1))


def _joined(found: Sequence[Part]) -> Copy:
    """Return the save that these parts make up, in the kinds in which all its shares are there."""
    first = found[0]
    kinds = tuple(kind for kind in first.save.kinds if not _absent(found, kind))
    own = all(part.origin is Origin.SAVED_HERE for part in found)
    origin = Origin.SAVED_HERE if own else Origin.COPIED
    return Copy(replace(first.save, kinds=kinds), origin, world_size=first.world_size)


def _problems(parts: Mapping[str, Sequence[Part]], whole: Mapping[str, Sequence[Kind]]) -> Iterator[Problem]:
    for save_id, found in parts.items():
        save = found[0].save
        there = whole.get(save_id, ())
        kinds = tuple(kind for kind in save.kinds if kind not in there)
        if not kinds:
            continue
        if absent := _absent(found):
            unit = "rank" if _is_snapshot(found) else "node"
            numbers = ", ".join(map(str, absent[:_NAMED])) + (", ..." if len(absent) > _NAMED else "")
            which = f"{unit}{'s' if len(absent) > 1 else ''} {numbers}"
            why = f"{found[0].of} {unit}s saved it, and no disk of this job has what {which} of those wrote"
            yield Problem(found[0].name, why, save.step, save_id, kinds, save)
            continue
        torn: dict[tuple[Part, ...], list[Kind]] = {}
        for kind in kinds:
            torn.setdefault(_faulty(found, kind), []).append(kind)
        for faulty, lost in torn.items():
            worst = min(faulty, key=lambda part: part.hindrance)  # what is broken outweighs what may be read later
            why = worst.why
            if len(faulty) > 1:
                why += f", and {len(faulty) - 1} more of its {worst.of} parts are not whole"
            if there:
                why += f"; in kind {'+'.join(there)} it is whole"
            elif len(torn) > 1:
                why += f"; so kind {'+'.join(lost)} is not whole"
            yield Problem(worst.name, why, save.step, save_id, tuple(lost), save, worst.hindrance)


def _faulty(found: Sequence[Part], kind: Kind) -> tuple[Part, ...]:
    """Return a part for each share that is whole nowhere in this kind: one that may be read later, if there is one."""
    have = {share for part in found if kind in part.kinds for share in part.shares}
    best: dict[int, Part] = {}
    for part in found:
        for share in part.shares:
            if share not in have and (share not in best or part.hindrance > best[share].hindrance):
                best[share] = part
    return tuple(dict.fromkeys(best.values()))
