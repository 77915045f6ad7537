"""The lineage: which saves led to where training is now.

Rules:
1. The *way* goes from the attempt with the greatest (number, id) *that counts* back through the parents. The way leaves
   each attempt at the save from which the next one started. A parent's attempt must have a lower number, otherwise the
   data contradicts itself. ``core.start.attempts`` decides which attempts count.
2. A save is on the lineage if its attempt is on the way and one of these holds: the attempt is the newest; the save's
   number is at most that of the save where the way leaves the attempt; or the save adds to that save's step only kinds
   that the step did not have by then.
3. For each (step, kind) the last save is current; earlier ones are replaced.
4. All others are superseded; but if the way ends at an unknown attempt, saves of attempts off the way are unknown.

* Neither a clock nor the order of the inputs has any influence. Undecided attempts do not count.
* If the save where the way leaves an attempt is not among those given, its kinds are unknown and no save adds to its
  step: a guess never lets in what a zombie wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptmirror.core.errors import LineageError
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta, Requirement, SaveRef

__all__ = [
    "Lineage",
    "SaveFacts",
    "Standing",
    "attempts_of_metas",
    "counted_by_a_reader",
    "is_fast_forward",
    "lineage",
    "merge_attempts",
    "next_number",
    "untaken",
]

Standing = Literal["current", "replaced", "superseded", "unknown"]


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What the lineage needs to know about a whole save; ``attempt`` is an id, ``number`` counts within the attempt."""

    save_id: str
    attempt: str
    number: int
    step: int
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Lineage:
    """Saves by their standing.

    Attributes:
        current: The last save on the lineage for each step and kind.
        replaced: Saves on the lineage that are current for none of their kinds; in the order of the lineage.
        superseded: Saves off the lineage; by step, then save id.
        unknown: Saves of attempts that cannot be placed: never chosen, never deleted. By step, then save id.
        way: The attempts from the newest back, as far as they are known.
        complete: Whether the way ends at a start from scratch.
    """

    current: dict[tuple[int, Kind], SaveFacts]
    replaced: tuple[SaveFacts, ...] = ()
    superseded: tuple[SaveFacts, ...] = ()
    unknown: tuple[SaveFacts, ...] = ()
    way: tuple[Attempt, ...] = ()
    complete: bool = False

    def standing_by_save(self) -> dict[str, Standing]:
        """Return the standing of every save by its id."""
        standing: dict[str, Standing] = {save.save_id: "current" for save in self.current.values()}
        standing |= {save.save_id: "replaced" for save in self.replaced}
        standing |= {save.save_id: "superseded" for save in self.superseded}
        return standing | {save.save_id: "unknown" for save in self.unknown}

    def all_on_it(self) -> tuple[SaveFacts, ...]:
        """Return the saves on the lineage, current or replaced; a save that is current in two kinds comes twice."""
        return (*self.current.values(), *self.replaced)

    def on_it(self) -> frozenset[str]:
        """Return the ids of the saves on the lineage, current or replaced."""
        return frozenset(save.save_id for save in self.all_on_it())

    def in_order(self, *kinds: Kind) -> tuple[SaveFacts, ...]:
        """Return the current saves (for any of ``kinds``, if given) along the lineage, oldest first."""
        numbers = {attempt.id: attempt.number for attempt in self.way}
        found = {save.save_id: save for (_, kind), save in self.current.items() if not kinds or kind in kinds}
        return tuple(sorted(found.values(), key=lambda save: (numbers[save.attempt], save.number, save.save_id)))

    def steps(self, *kinds: Kind) -> tuple[int, ...]:
        """Return the steps of the lineage (in any of ``kinds``, if given), ascending."""
        return tuple(sorted({step for step, kind in self.current if not kinds or kind in kinds}))


def lineage(
    attempts: Iterable[Attempt], saves: Sequence[SaveFacts], counting: Collection[str] | None = None
) -> Lineage:
    """Work out the standing of every save.

    Args:
        attempts: The attempts that the lists name; undecided ones are ignored.
        saves: The saves that are whole in the places that were asked.
        counting: The ids of the attempts that count; None: all of them.

    Raises:
        LineageError: A parent's number is not lower, or one id names two different things.
    """
    known = _by_id(attempts)
    facts = _unique_saves(saves)
    way, left_at, complete = _way(known, known.keys() if counting is None else known.keys() & counting)
    numbers = {attempt.id: attempt.number for attempt in way}
    on = _on_lineage(way, left_at, facts)
    ordered = sorted(on, key=lambda save: (numbers[save.attempt], save.number, save.save_id))
    current = {(save.step, kind): save for save in ordered for kind in save.kinds}
    chosen = {save.save_id for save in current.values()}
    on_ids = {save.save_id for save in on}
    off = sorted((s for s in facts if s.save_id not in on_ids), key=lambda save: (save.step, save.save_id))
    return Lineage(
        current={key: current[key] for key in sorted(current)},
        replaced=tuple(save for save in ordered if save.save_id not in chosen),
        superseded=tuple(save for save in off if complete or save.attempt in numbers),
        unknown=tuple(save for save in off if not complete and save.attempt not in numbers),
        way=tuple(way),
        complete=complete,
    )


def _by_id(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    known: dict[str, Attempt] = {}
    for attempt in attempts:
        first = known.setdefault(attempt.id, attempt) if attempt.decided else attempt
        if (first.number, first.parent) != (attempt.number, attempt.parent):
            raise LineageError(f"Attempt {attempt.id[:8]} is listed twice, differently.")
    return known


def _unique_saves(saves: Iterable[SaveFacts]) -> list[SaveFacts]:
    facts: dict[str, SaveFacts] = {}
    for save in saves:
        if facts.setdefault(save.save_id, save) != save:
            raise LineageError(f"Save {save.save_id[:8]} is described twice, differently.")
    return list(facts.values())


def _way(known: dict[str, Attempt], counting: Collection[str]) -> tuple[list[Attempt], dict[str, SaveRef], bool]:
    """Return the attempts on the way, newest first; where the way leaves each; and whether it reaches the beginning."""
    if not counting:
        return [], {}, False
    attempt = max((known[one] for one in counting), key=lambda attempt: (attempt.number, attempt.id))
    way = [attempt]
    left_at: dict[str, SaveRef] = {}
    while attempt.parent is not None:
        before = known.get(attempt.parent.attempt)
        if before is None:
            return way, left_at, False
        if before.number >= attempt.number:  # numbers must fall along the way, or this loop would not end
            raise LineageError(
                f"Attempt {attempt.id[:8]} has the number {attempt.number}, but its parent is of attempt "
                f"{before.id[:8]}, number {before.number}, which is not older."
            )
        left_at[before.id] = attempt.parent
        way.append(before)
        attempt = before
    return way, left_at, True


def _on_lineage(way: Sequence[Attempt], left_at: dict[str, SaveRef], saves: Iterable[SaveFacts]) -> list[SaveFacts]:
    by_attempt: dict[str, list[SaveFacts]] = defaultdict(list)
    for save in saves:
        by_attempt[save.attempt].append(save)
    on: list[SaveFacts] = []
    for attempt in reversed(way):  # oldest first: what a step has by then includes what earlier attempts gave it
        left = left_at.get(attempt.id)
        mine = sorted(by_attempt[attempt.id], key=lambda save: (save.number, save.save_id))
        if left is None:
            on += mine
            continue
        at_left = [save for save in mine if (save.number, save.save_id) == (left.number, left.save_id)]
        on += [save for save in mine if save.number < left.number] + at_left
        if at_left:
            on += _added_kinds(left, mine, {kind for save in on if save.step == left.step for kind in save.kinds})
    return on


def _added_kinds(left: SaveRef, mine: Iterable[SaveFacts], have: set[Kind]) -> list[SaveFacts]:
    """Return the later saves of the step where the way leaves an attempt that add only kinds that the step lacks."""
    added = []
    for save in mine:
        later = save.number > left.number and save.step == left.step
        if later and not have & set(save.kinds):
            added.append(save)
            have |= set(save.kinds)
    return added


def is_fast_forward(
    attempts: Sequence[Attempt], saves: Sequence[SaveFacts], counting: Collection[str], attempt: str
) -> bool:
    """Whether an attempt may begin to count: no save leaves the lineage, and no save that had left it comes back.

    An attempt from before a rewind is therefore not a fast-forward, even if nothing was saved after the rewind. An
    attempt that would not be the newest changes nothing, so it may count.

    Args:
        attempts: All known attempts, including this one.
        saves: The whole saves of the places that were asked, without those of this attempt.
        counting: The ids of the attempts that count.
        attempt: The id of this attempt.
    """
    before, after = lineage(attempts, saves, counting), lineage(attempts, saves, {*counting, attempt})
    if not before.way or after.way[0].id == before.way[0].id:
        return True
    newest = (before.way[0].number, before.way[0].id)
    numbers = {one.id: one.number for one in after.way}
    older = {one.save_id for one in after.all_on_it() if (numbers[one.attempt], one.attempt) <= newest}
    return before.on_it() <= after.on_it() and older <= before.on_it()


def counted_by_a_reader(listed: AttemptList, metas: Iterable[Meta], undecided: Collection[str]) -> set[str]:
    """Return the attempts that count for who reads one place alone: its metas tell them, and what its list decides.

    That is a person's decision, if it was not one that failed, and that a start of this root continued from another
    root's save, if every required mirror took its claim. Of one that continued from a save made here, the metas tell
    enough: what the start could not load may be read in part.

    Args:
        listed: The list of the place.
        metas: Every meta that is there.
        undecided: A person's attempts that not every required mirror took.
    """
    metas = tuple(metas)
    made_here = {meta.save_id for meta in metas if meta.staged_from is None}
    by_person = {one.id for one in listed.attempts if one.by_person and one.id not in undecided}
    parents = {one.id: one.parent.save_id for one in listed.attempts if one.parent is not None}
    from_elsewhere = {one for one in listed.completed if one in parents and parents[one] not in made_here}
    return {meta.attempt.id for meta in metas} | by_person | from_elsewhere


def untaken(listed: AttemptList) -> list[Attempt]:
    """Return the attempts of persons that a root's list does not say every required mirror took."""
    return [one for one in listed.attempts if one.by_person and one.required and one.id not in listed.completed]


def merge_attempts(*lists: AttemptList) -> AttemptList:
    """Return the union of lists of one run, ordered by number. A decided entry of an attempt replaces an undecided one.

    Raises:
        LineageError: The run ids differ, two lists contradict each other, or no list is given.
    """
    if not lists:
        raise LineageError("There is no list of attempts to merge.")
    run_id = lists[0].run_id
    merged: dict[str, Attempt] = {}
    for attempts in lists:
        if attempts.run_id != run_id:
            raise LineageError(f"The lists are of different runs, {run_id[:8]} and {attempts.run_id[:8]}.")
        for attempt in attempts.attempts:
            merged[attempt.id] = _agreed(merged.get(attempt.id, attempt), attempt)
    ordered = tuple(sorted(merged.values(), key=lambda attempt: (attempt.number, attempt.id)))
    requirements = merge_requirements(one for attempts in lists for one in attempts.requirements)
    completed = tuple(dict.fromkeys(one for attempts in lists for one in attempts.completed))
    return AttemptList(run_id, ordered, requirements, completed)


def merge_requirements(requirements: Iterable[Requirement]) -> tuple[Requirement, ...]:
    """Return the newest word on each mirror. A removal is newer than the attempts that it knew, and no other."""
    newest: dict[str, Requirement] = {}
    for one in requirements:
        known = newest.setdefault(one.url, one)
        newest[one.url] = max(known, one, key=lambda word: (word.number, word.is_removed))
    return tuple(newest.values())


def removal(url: str, lists: Sequence[AttemptList]) -> Requirement:
    """Return the word of a person who removes a mirror from the run of these lists."""
    return Requirement(url, max([0, *(next_number(attempts) - 1 for attempts in lists)]), is_removed=True)


def _agreed(one: Attempt, other: Attempt) -> Attempt:
    if one.number != other.number:
        raise LineageError(f"Attempt {one.id[:8]} has the numbers {one.number} and {other.number}.")
    if one.decided and other.decided and one.parent != other.parent:
        raise LineageError(f"Attempt {one.id[:8]} has two different parents.")
    said = one if one.decided else other
    return replace(
        said,
        by_person=one.by_person or other.by_person,
        root=one.root or other.root,
        required=one.required or other.required,
    )


def attempts_of_metas(metas: Iterable[Meta]) -> AttemptList | None:
    """Rebuild a lost list from metas, which carry their attempt; None if there are no metas.

    Raises:
        LineageError: The metas are of different runs, or contradict each other.
    """
    lists = [AttemptList(meta.run_id, (meta.attempt,)) for meta in metas]
    return merge_attempts(*lists) if lists else None


def next_number(attempts: AttemptList) -> int:
    """Return the number of the next attempt: one higher than any in the list, from 0.

    The number of a removal counts too: it may come from an attempt that only another root knows.
    """
    numbers = [one.number for one in attempts.attempts] + [one.number for one in attempts.requirements]
    return max(numbers, default=-1) + 1
