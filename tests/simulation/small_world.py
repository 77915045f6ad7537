"""A small world: two hosts with a root each, two mirrors, a few attempts; and the evidence that one who acts there has.

Rules:
* A state is a value, and so is everything in it.
* ``standing_saves`` judges: it is written from the documents and shares nothing with ``core.start.lineage``.
* An attempt saves one kind, at steps 1, 2 and 3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from ckptmirror.core.model import Attempt, AttemptList, SaveRef
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.decide import Wish
from ckptmirror.core.start.evidence import DISK, Copy, Evidence, Heard, ListFound, Origin, Row, Voice
from ckptmirror.core.start.lineage import SaveFacts

URLS = ("A", "B")
AUTO, START_OVER = Wish(), Wish("scratch", force=True)
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """What may happen beside starts, saves, uploads, drains, outages and deaths.

    Attributes:
        begun: It begins with attempt 1 running on host 0, its first save everywhere; else with nothing.
        loses: A disk may be lost.
        restores: A root may be replaced by a copy of it without its last save.
        reconfigures: Mirror A may leave the configuration, and come back.
        rewinds: A person may go back to an earlier step, once.
        starts_over: A person may start over, once.
        claims_at_once: Nothing happens between the parts of one claim, but that it dies.
        commits_at_once: Nothing happens between the question whether to commit and the commit.
        attempts: How many starts there are at most.
    """

    begun: bool = False
    loses: bool = True
    restores: bool = False
    reconfigures: bool = False
    rewinds: bool = False
    starts_over: bool = False
    claims_at_once: bool = True
    commits_at_once: bool = True
    attempts: int = 3
    last_step: int = 3


class Disk(NamedTuple):
    """What is on a host: its root's identity, list and saves.

    Attributes:
        met: What fenced attempts of this root.
        uploaded: The ids of the attempts of which this host committed a save on a mirror.
    """

    root: str = ""
    run: str | None = None
    listed: frozenset[Attempt] = frozenset()
    required: tuple[str, ...] = ()
    completed: frozenset[str] = frozenset()
    met: frozenset[Attempt] = frozenset()
    uploaded: frozenset[str] = frozenset()
    copies: frozenset[Copy] = frozenset()


class Mirror(NamedTuple):
    """A mirror's list, and its committed saves."""

    run: str | None = None
    listed: frozenset[Attempt] = frozenset()
    required: tuple[str, ...] = ()
    saves: frozenset[SaveFacts] = frozenset()


Disks = tuple[Disk, Disk]
Mirrors = tuple[Mirror, Mirror]


class Choice(NamedTuple):
    """What a start decided: the save that it continues from, or None for step 0."""

    parent: SaveFacts | None
    needs_all: bool
    by_person: bool


class Actor(NamedTuple):
    """A process: an attempt, or a drain (``attempt`` is "drain").

    Attributes:
        known: The ids of the attempts that it heard of before it claimed.
        needs: The mirrors that have to take its claim.
        for_mirrors: The ids of the attempts that it adds to the lists of mirrors.
        unwritten: The root's list while a run begins: it is written last.
        commit: What it asked for and was granted: the index of the mirror, and the save.
    """

    attempt: str
    host: int
    phase: Literal["chose", "claims", "runs", "commits"]
    wish: Wish = AUTO
    choice: Choice | None = None
    run: str | None = None
    known: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    step: int = 0
    for_mirrors: frozenset[str] = frozenset()
    unwritten: Disk | None = None
    commit: tuple[int, SaveFacts] | None = None


class State(NamedTuple):
    """Everything. ``decided``: the attempt by which a person decided, once every mirror took it down."""

    disks: Disks
    mirrors: Mirrors
    up: tuple[bool, bool] = (True, True)
    configured: tuple[str, ...] = URLS
    actors: tuple[Actor, ...] = ()
    started: int = 0
    decided: str = ""


class Step(NamedTuple):
    """One thing that happened, and what was wrong about it ("": nothing)."""

    what: str
    after: State
    wrong: str = ""


class Sight(NamedTuple):
    """What one host sees: its disk, and the mirrors that are configured and answer."""

    root: str
    disk: Disk
    mirrors: tuple[Mirror | None, Mirror | None]
    configured: tuple[str, ...]


# -- the judge -----------------------------------------------------------------------------------------------


def standing_saves(mirrors: Mirrors) -> tuple[SaveFacts, ...]:
    """The saves on the mirrors that are on the lineage, the newest last: DESIGN and LINEAGE, for one kind."""
    known = {one.id: one for mirror in mirrors for one in mirror.listed}
    saves = mirrors[0].saves | mirrors[1].saves
    saved = {save.attempt for save in saves}
    lists = {url: mirror.listed for url, mirror in zip(URLS, mirrors, strict=True)}
    counting = [
        one
        for one in known.values()
        if one.id in saved or (one.by_person and all(one in lists[url] for url in one.required))
    ]
    if not counting:
        return ()
    at = max(counting, key=lambda one: (one.number, one.id))
    last = {at.id: 99}
    while at.parent is not None:
        last[at.parent.attempt] = at.parent.number
        at = known[at.parent.attempt]
    on_it = [save for save in saves if save.number <= last.get(save.attempt, 0)]
    return tuple(sorted(on_it, key=lambda save: (save.step, known[save.attempt].number, save.attempt)))


# -- evidence ------------------------------------------------------------------------------------------------


def evidence_of(sight: Sight) -> Evidence:
    """What a survey would find."""
    rows = [_disk_row(sight.disk)]
    for url, mirror in zip(URLS, sight.mirrors, strict=True):
        required, was_required = url in sight.configured, url in sight.disk.required
        if mirror is not None:
            rows.append(_mirror_row(url, mirror, was_required))
        elif required or was_required:
            reach = Reach.SILENT if required else Reach.DROPPED
            rows.append(Row(url, "mirror", reach, required=required, was_required=was_required))
    return Evidence(tuple(rows), sight.root)


@functools.cache
def _disk_row(disk: Disk) -> Row:
    continued = {one.parent.save_id for one in disk.listed if one.parent is not None and one.id in disk.completed}
    made = {
        copy.save.attempt for copy in disk.copies if copy.origin is not Origin.STAGED or copy.save.save_id in continued
    }
    heard = [
        Heard(one, frozenset(voice for voice, holds in _voices(one, disk, made).items() if holds))
        for one in in_order(disk.listed | disk.met)
    ]
    return Row(
        DISK,
        "disk",
        listed=ListFound.SOUND if disk.listed else ListFound.NONE,
        run_id=disk.run,
        names_required=disk.required,
        heard=tuple(heard),
        copies=tuple(sorted(disk.copies, key=lambda copy: copy.save.save_id)),
    )


def _voices(one: Attempt, disk: Disk, made: set[str]) -> dict[Voice, bool]:
    return {
        Voice.CLAIMED: one in disk.listed,
        Voice.COUNTS: one.id in made,
        Voice.COMPLETED: one.id in disk.completed,
        Voice.UPLOADED: one.id in disk.uploaded,
        Voice.FENCED_US: one in disk.met,
    }


@functools.cache
def _mirror_row(url: str, mirror: Mirror, was_required: bool) -> Row:
    saved = {save.attempt for save in mirror.saves}
    return Row(
        url,
        "mirror",
        required=True,
        was_required=was_required,
        listed=ListFound.SOUND if mirror.listed else ListFound.NONE,
        run_id=mirror.run,
        names_required=mirror.required,
        heard=tuple(
            Heard(one, frozenset({Voice.CLAIMED, Voice.COUNTS} if one.id in saved else {Voice.CLAIMED}))
            for one in in_order(mirror.listed)
        ),
        copies=tuple(Copy(save, Origin.REMOTE) for save in sorted(mirror.saves, key=lambda save: save.save_id)),
    )


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    return sorted(attempts, key=lambda one: (one.number, one.id))


def list_of(mirror: Mirror) -> AttemptList | None:
    return AttemptList(mirror.run, tuple(in_order(mirror.listed)), mirror.required) if mirror.run is not None else None


def ids_of(attempts: Iterable[Attempt]) -> set[str]:
    return {one.id for one in attempts}


# -- changing values -----------------------------------------------------------------------------------------


def put_at(pair: tuple[T, T], index: int, value: T) -> tuple[T, T]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


def put_disk(state: State, host: int, disk: Disk) -> State:
    return state._replace(disks=put_at(state.disks, host, disk))


def without(state: State, actor: Actor) -> State:
    return state._replace(actors=tuple(one for one in state.actors if one.attempt != actor.attempt))


def with_actor(state: State, actor: Actor) -> State:
    others = [one for one in state.actors if one.attempt != actor.attempt]
    return state._replace(actors=tuple(sorted([*others, actor], key=lambda one: one.attempt)))


def restored(disk: Disk, root: str) -> Disk:
    """The root as an older copy has it: without its last save, and what only that save's attempt left."""
    numbers = {one.id: one.number for one in disk.listed}
    last = max(disk.copies, key=lambda copy: (numbers[copy.save.attempt], copy.save.number))
    copies = frozenset(Copy(copy.save, Origin.COPIED) for copy in disk.copies if copy != last)
    listed = disk.listed
    if last.save.attempt not in {copy.save.attempt for copy in copies}:
        listed = frozenset(one for one in listed if one.number < numbers[last.save.attempt])
    ids = ids_of(listed)
    return Disk(root, disk.run, listed, disk.required, disk.completed & ids, disk.met, disk.uploaded & ids, copies)


def to_upload(disk: Disk, mirror: Mirror) -> list[SaveFacts]:
    here = {copy.save for copy in disk.copies if copy.origin is not Origin.STAGED}
    return sorted(here - mirror.saves, key=lambda save: (save.step, save.attempt))


def made_here(save: SaveFacts) -> Copy:
    return Copy(save, Origin.SAVED_HERE)


@functools.cache
def a_save(attempt: str, number: int, step: int) -> SaveFacts:
    return SaveFacts(f"{attempt}.{step}", attempt, number, step, ("dcp",))


def ref_of(save: SaveFacts) -> SaveRef:
    return SaveRef(save.attempt, save.number, save.step, save.save_id)


def step_of(save: SaveFacts | None) -> int:
    return save.step if save is not None else 0


def named(save: SaveFacts | None) -> str:
    return f"save {save.save_id}" if save is not None else "step 0"
