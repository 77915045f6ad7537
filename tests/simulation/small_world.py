"""A small world: hosts with a root each, two mirrors, a few attempts; and the evidence that one who acts there has.

Rules:
* A state is a value, and so is everything in it.
* An attempt is a job on one host or on several. On several, each is a node: it has a part of every save on its disk.
* ``standing_saves`` judges: it is written from the documents and shares nothing with ``core.start.lineage``.
* An attempt saves one kind, at steps 1, 2 and 3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from ckptmirror.core import names
from ckptmirror.core.model import Artifact, Attempt, AttemptList, Digest, Meta, Requirement, SaveRef
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.decide import Wish
from ckptmirror.core.start.disks import one_disk
from ckptmirror.core.start.evidence import (
    ANYWHERE,
    DISK,
    Copy,
    Evidence,
    Heard,
    ListFound,
    Origin,
    Part,
    Problem,
    Row,
    Voice,
)
from ckptmirror.core.start.lineage import SaveFacts

URLS = ("A", "B")
AUTO, START_OVER = Wish(), Wish("scratch", force=True)
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """What may happen beside starts, saves, uploads, drains, outages and deaths.

    Attributes:
        jobs: The hosts of each job that may start, in the order of their nodes.
        begun: It begins with attempt 1 running as the first of these jobs, its first save everywhere; else with
            nothing.
        mirrors: How many of the two mirrors are configured.
        outages: A mirror may fall silent, and come back.
        loses: A disk may be lost.
        restores: A root may be replaced by a copy of it without its last save.
        reconfigures: Mirror A may leave the configuration, and come back.
        forgets: A person may take mirror A out of the run, once; a start that requires it again brings it back.
        rewinds: A person may go back to an earlier step, once.
        starts_over: A person may start over, once.
        claims_at_once: Nothing happens between the parts of one claim, but that it dies.
        commits_at_once: Nothing happens between the question whether to commit and the commit.
        publishes_at_once: Nothing happens between the nodes' commits of one save on their disks, but that all die.
        survives: The other nodes of a job go on when one dies: they commit on their disks what was agreed, and upload.
        rots: A part on a disk may be damaged, once.
        stages: A person may stage a save from a mirror into a root, in the place of what that has of it, once.
        sends_files: The files of a part are sent in a step of their own, before the part.
        reports: An attempt may report a step of training; then it may diverge, or end in order.
        attempts: How many starts there are at most.
    """

    jobs: tuple[tuple[int, ...], ...] = ((0,), (1,))
    begun: bool = False
    mirrors: int = 2
    outages: bool = True
    loses: bool = True
    restores: bool = False
    reconfigures: bool = False
    forgets: bool = False
    rewinds: bool = False
    starts_over: bool = False
    claims_at_once: bool = True
    commits_at_once: bool = True
    publishes_at_once: bool = True
    survives: bool = False
    rots: bool = False
    stages: bool = False
    sends_files: bool = False
    reports: bool = False
    attempts: int = 3
    last_step: int = 3


class Disk(NamedTuple):
    """What is on a host: its root's identity, list and saves.

    Attributes:
        met: What fenced attempts of this root.
        uploaded: The ids of the attempts of which this host committed a save on a mirror.
        rotten: The ids of the saves of which the part here is damaged.
        skipped: The ids of the saves whose parts here are given up.
        jobs: The identities of the jobs of several nodes that this root was one of.
        reported: The ids of the attempts that reported a step of training here.
        ended: The ids of those that ended in order here.
    """

    root: str = ""
    run: str | None = None
    listed: frozenset[Attempt] = frozenset()
    requirements: tuple[Requirement, ...] = ()
    completed: frozenset[str] = frozenset()
    met: frozenset[Attempt] = frozenset()
    uploaded: frozenset[str] = frozenset()
    copies: frozenset[Copy] = frozenset()
    parts: frozenset[Part] = frozenset()
    rotten: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    reported: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()

    @property
    def required(self) -> tuple[str, ...]:
        """The mirrors that its list and its table call required."""
        return tuple(one.url for one in self.requirements if not one.is_removed)


class Mirror(NamedTuple):
    """A mirror's list, and its committed saves.

    Attributes:
        files: The save id and the share of each part whose files are there.
        parts: The object's name, the save and the share of each part.
        diverged: The ids of the attempts that diverged.
    """

    run: str | None = None
    listed: frozenset[Attempt] = frozenset()
    requirements: tuple[Requirement, ...] = ()
    saves: frozenset[SaveFacts] = frozenset()
    files: frozenset[tuple[str, int]] = frozenset()
    parts: frozenset[tuple[str, SaveFacts, int]] = frozenset()
    diverged: frozenset[str] = frozenset()


Disks = tuple[Disk, ...]
Mirrors = tuple[Mirror, Mirror]


class Choice(NamedTuple):
    """What a start decided: the save that it continues from, or None for step 0; and the place that it loads."""

    parent: SaveFacts | None
    needs_all: bool
    by_person: bool
    place: str = ""


class Actor(NamedTuple):
    """A process: an attempt, or a drain (``attempt`` is "drain").

    Attributes:
        nodes: The hosts where it lives; the first one leads.
        job: The hosts where it began, in the order of its nodes.
        root: The identity of its roots.
        known: The ids of the attempts that it heard of before it claimed.
        needs: The mirrors that have to take its claim.
        for_mirrors: The ids of the attempts that it adds to the lists of mirrors.
        unwritten: The root's list while a run begins: it is written last.
        made: How many saves it has made.
        todo: The nodes that have still to record the claim, or to commit ``save`` on their disks.
        abandoned: The ids of the saves that it gives up.
        crippled: Whether a node of it died: it saves nothing more.
        commit: What it asked for and was granted: the host, the index of the mirror, and the save.
    """

    attempt: str
    nodes: tuple[int, ...]
    phase: Literal["chose", "claims", "joins", "runs", "publishes", "commits"]
    wish: Wish = AUTO
    choice: Choice | None = None
    run: str | None = None
    known: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    root: str = ""
    job: tuple[int, ...] = ()
    step: int = 0
    made: int = 0
    for_mirrors: frozenset[str] = frozenset()
    unwritten: Disk | None = None
    todo: tuple[int, ...] = ()
    save: SaveFacts | None = None
    abandoned: frozenset[str] = frozenset()
    crippled: bool = False
    commit: tuple[int, int, SaveFacts] | None = None


class State(NamedTuple):
    """Everything.

    Attributes:
        decided: The attempt by which a person decided, once every mirror took it down.
        removed: Whether a person has taken mirror A out of the run; None once a start has required it again, and B has
            recorded that. In between nothing that is on A alone is missed.
    """

    disks: Disks
    mirrors: Mirrors
    up: tuple[bool, bool] = (True, True)
    configured: tuple[str, ...] = URLS
    actors: tuple[Actor, ...] = ()
    started: int = 0
    decided: str = ""
    removed: bool | None = False


class Step(NamedTuple):
    """One thing that happened, and what was wrong about it ("": nothing)."""

    what: str
    after: State
    wrong: str = ""


class Sight(NamedTuple):
    """What a job or one host sees: its disks, and the mirrors that are configured and answer."""

    root: str
    disks: Disks
    mirrors: tuple[Mirror | None, Mirror | None]
    configured: tuple[str, ...]
    roots: frozenset[str]  # of each node of the job

    @property
    def disk(self) -> Disk:
        """The disk of the first host."""
        return self.disks[0]


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
    rows = [one_disk([_disk_row(disk) for disk in sight.disks])]
    known = {one.save.save_id for disk in sight.disks for one in (*disk.copies, *disk.parts)}
    known |= {save.save_id for mirror in sight.mirrors if mirror is not None for save in mirror.saves}
    for url, mirror in zip(URLS, sight.mirrors, strict=True):
        required, was_required = url in sight.configured, any(url in disk.required for disk in sight.disks)
        if mirror is not None:
            loose = tuple(
                Problem(f"{url}/{name}", "no meta names it", save.step, is_save=False)
                for name, save, _ in sorted(mirror.parts, key=lambda part: part[0])
                if save.save_id not in known
            )
            rows.append(replace(_mirror_row(url, mirror, was_required), problems=loose))
        elif required or was_required:
            reach = Reach.SILENT if required else Reach.DROPPED
            rows.append(Row(url, "mirror", reach, required=required, was_required=was_required))
    return Evidence(tuple(rows), sight.root, sight.roots)


def evidence_of_start(sight: Sight) -> Evidence:
    """What the survey of a start would find: it knows what all places have together, parts on mirrors among that."""
    evidence = evidence_of(sight)
    known = {one.id: one for disk in sight.disks for one in disk.listed}
    on_disks = {copy.save.save_id: copy for copy in evidence.disk.copies}
    copies, heard = [], []
    for save in sorted(put_together(sight), key=lambda save: save.save_id):
        copies.append(on_disks.get(save.save_id, Copy(save, Origin.REMOTE)))
        if not any(copy.save == save for row in evidence.answering() for copy in row.copies):
            heard.append(Heard(known[save.attempt], frozenset({Voice.NAMED, Voice.COUNTS})))
    row = Row(ANYWHERE, "anywhere", heard=tuple(heard), copies=tuple(copies))
    return replace(evidence, rows=(*evidence.rows, row)) if copies else evidence


def put_together(sight: Sight) -> set[SaveFacts]:
    """The saves that disks have parts of, and that are whole on these disks together with the mirrors that answer."""
    there = [mirror for mirror in sight.mirrors if mirror is not None]
    shares: dict[SaveFacts, set[int]] = {}
    wanted: dict[SaveFacts, int] = {}
    for part in (part for disk in sight.disks for part in disk.parts):
        wanted[part.save] = part.of
        sent = {share for mirror in there for _, save, share in mirror.parts if save == part.save}
        shares.setdefault(part.save, set()).update(part.shares, sent)
    committed = {save for mirror in there for save in mirror.saves}
    return {save for save, of in wanted.items() if save in committed or len(shares[save]) == of}


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
        requirements=disk.requirements,
        heard=tuple(heard),
        copies=tuple(sorted(disk.copies, key=lambda copy: copy.save.save_id)),
        parts=tuple(
            replace(part, is_given_up=part.save.save_id in disk.skipped)
            for part in sorted(disk.parts, key=lambda part: part.save.save_id)
        ),
    )


def _voices(one: Attempt, disk: Disk, made: set[str]) -> dict[Voice, bool]:
    return {
        Voice.CLAIMED: one in disk.listed,
        Voice.COUNTS: one.id in made,
        Voice.COMPLETED: one.id in disk.completed,
        Voice.UPLOADED: one.id in disk.uploaded,
        Voice.FENCED_US: one in disk.met,
        Voice.REPORTED: one.id in disk.reported,
        Voice.ENDED: one.id in disk.ended,
    }


def _voices_there(one: Attempt, mirror: Mirror, saved: set[str]) -> dict[Voice, bool]:
    return {Voice.CLAIMED: True, Voice.COUNTS: one.id in saved, Voice.DIVERGED: one.id in mirror.diverged}


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
        requirements=mirror.requirements,
        heard=tuple(
            Heard(one, frozenset(voice for voice, holds in _voices_there(one, mirror, saved).items() if holds))
            for one in in_order(mirror.listed)
        ),
        copies=tuple(Copy(save, Origin.REMOTE) for save in sorted(mirror.saves, key=lambda save: save.save_id)),
        parts_here=tuple(sorted((save.save_id, share) for _, save, share in mirror.parts)),
    )


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    return sorted(attempts, key=lambda one: (one.number, one.id))


def list_of(mirror: Mirror) -> AttemptList | None:
    return (
        AttemptList(mirror.run, tuple(in_order(mirror.listed)), mirror.requirements) if mirror.run is not None else None
    )


def ids_of(attempts: Iterable[Attempt]) -> set[str]:
    return {one.id for one in attempts}


# -- changing values -----------------------------------------------------------------------------------------


def put_at(pair: tuple[T, T], index: int, value: T) -> tuple[T, T]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


def put_disk(state: State, host: int, disk: Disk) -> State:
    return state._replace(disks=(*state.disks[:host], disk, *state.disks[host + 1 :]))


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
    return Disk(root, disk.run, listed, disk.requirements, disk.completed & ids, disk.met, disk.uploaded & ids, copies)


def staged(disk: Disk, save: SaveFacts) -> Disk:
    """The root after a person staged a save there, in the place of what it had of it."""
    copies = frozenset(copy for copy in disk.copies if copy.save != save) | {Copy(save, Origin.STAGED)}
    return disk._replace(copies=copies, parts=frozenset(part for part in disk.parts if part.save != save))


def to_upload(disk: Disk, mirror: Mirror) -> list[SaveFacts]:
    """The saves that a mirror lacks, but what is given up, and what was damaged here before its files went."""
    here = {copy.save for copy in disk.copies if copy.origin is not Origin.STAGED}
    for part in disk.parts:
        is_sent = mirror.files.issuperset((part.save.save_id, share) for share in part.shares)
        if part.save.save_id not in disk.skipped and (is_sent or part.save.save_id not in disk.rotten):
            here.add(part.save)
    return sorted(here - mirror.saves, key=lambda save: (save.step, save.attempt))


def with_save(disk: Disk, save: SaveFacts, share: int, of: int) -> Disk:
    """The disk of a node with its share of a save; the only node of a job has the save."""
    if of == 1:
        return disk._replace(copies=disk.copies | {Copy(save, Origin.SAVED_HERE)})
    part = Part(save, save.kinds, (share,), of, Origin.SAVED_HERE, f"part {share} of {save.save_id}")
    return disk._replace(parts=disk.parts | {part})


def with_job(disk: Disk, root: str) -> Disk:
    """The disk of a node of the job whose roots have this identity together; of a job on one node, it is the root's."""
    return disk._replace(jobs=disk.jobs | {root})


def part_of(disk: Disk, save: SaveFacts) -> Part | None:
    return next((part for part in disk.parts if part.save == save), None)


def part_name(save: SaveFacts, share: int, of: int) -> str:
    return names.part_name(save.step, f"{int(save.attempt):04}{save.step:04}".ljust(32, "0"), share + 1, of)


@functools.cache
def meta_of(save: SaveFacts, share: int, of: int) -> Meta:
    """The meta of a part: it names one file."""
    path = f"{names.SaveName(save.step).dcp_dir}/__{share}_0.distcp"
    file = Artifact(path, save.kinds, share, Digest(1, int(save.attempt), 65536, (int(save.attempt),)))
    attempt = Attempt(save.attempt, 0, None)
    return Meta("run", attempt, save.step, save.save_id, save.number, save.kinds, of, of, share, (file,))


@functools.cache
def a_save(attempt: str, number: int, step: int) -> SaveFacts:
    return SaveFacts(f"{attempt}.{step}", attempt, number, step, ("dcp",))


def ref_of(save: SaveFacts) -> SaveRef:
    return SaveRef(save.attempt, save.number, save.step, save.save_id)


def step_of(save: SaveFacts | None) -> int:
    return save.step if save is not None else 0


def named(save: SaveFacts | None) -> str:
    return f"save {save.save_id}" if save is not None else "step 0"
