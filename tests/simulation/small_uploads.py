"""What may happen at the mirrors of a small world: nodes upload saves and parts and merge them, and drains do so too.

Rules:
* A node asks ``core.start`` before it commits, by evidence of its own disk and of the mirrors that answer. To send its
  part of a save of its own attempt it only asks the mirror's list.
* Parts become a save by ``core.meta_merging``.
* Whoever commits a whole save has put its attempt on the mirror's list. For a part a drain lists nothing.
* A step says what was wrong about it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from ckptmirror.core import meta_merging
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import Attempt, AttemptList
from ckptmirror.core.start import attempts as rules
from ckptmirror.core.start.disks import identity_of, seen_by_its_job
from ckptmirror.core.start.evidence import Evidence
from ckptmirror.core.start.lineage import SaveFacts
from tests.simulation.small_world import (
    URLS,
    Actor,
    Disk,
    Mirror,
    Sight,
    State,
    Step,
    World,
    evidence_of,
    ids_of,
    in_order,
    list_of,
    meta_of,
    part_name,
    part_of,
    put_at,
    put_disk,
    standing_saves,
    to_upload,
    with_actor,
    without,
)

__all__ = ["Uploads", "left_by", "root_of"]


class Uploads:
    """The steps at the mirrors. Answers of ``core.start`` are kept: the same evidence comes again and again."""

    def __init__(self, world: World) -> None:
        self.world = world
        kept = functools.cache
        self._evidence: Callable[[Sight], Evidence] = kept(evidence_of)
        self._listed = kept(self._write_mirror_list)
        self._may_commit = kept(lambda sight, attempt: rules.may_commit(self._evidence(sight), attempt))
        self._may_drain = kept(lambda sight, url, save: rules.may_drain(self._evidence(sight), url, save))
        self._is_left = kept(lambda sight, url, one, save: rules.left_behind(self._evidence(sight), url, one, save))
        self._drained = kept(self._list_for_drain)
        self._standing = kept(standing_saves)
        self._attempts: dict[Attempt, Attempt] = {}

    def _at_mirror(self, state: State, actor: Actor, node: int, index: int) -> Iterator[Step]:
        url, mirror, disk = URLS[index], state.mirrors[index], state.disks[node]
        if unknown := self._unknown(state, actor, index):
            after = put_disk(state, node, disk._replace(met=disk.met | unknown))
            yield Step(f"{actor.attempt} fenced at {url}", left_by(after, actor, node))
        elif actor.attempt not in ids_of(mirror.listed):
            after = self._told(state, disk, actor, index)
            yield Step(f"{actor.attempt} claims {url} late", after, self._lost(state, after))
        else:
            yield from self._uploads(state, actor, node, index)

    def _uploads(self, state: State, actor: Actor, node: int, index: int) -> Iterator[Step]:
        disk, mirror = state.disks[node], state.mirrors[index]
        found = {part.save.attempt for part in disk.parts if part.save in mirror.saves} - disk.uploaded
        if found:
            after = put_disk(state, node, disk._replace(uploaded=disk.uploaded | found))
            yield Step(f"node {node} finds its saves on {URLS[index]}", after)
        for save in to_upload(disk, mirror):
            if self._is_waiting(disk, mirror, save):
                continue
            if save.attempt == actor.attempt and self._is_to_publish(disk, mirror, save):
                after = put_at(state.mirrors, index, self._with_part(disk, mirror, save))
                what = f"{actor.attempt} sends its part of {save.save_id} from node {node} to {URLS[index]}"
                yield Step(what, state._replace(mirrors=after))
                return
            may = self._verdict(state, actor, node, index, save)
            if may == "commit":
                yield self._granted(state, actor, node, index, save)
                return
            if may == "fenced" and save.attempt == actor.attempt:
                yield Step(f"{actor.attempt} fenced at {URLS[index]}: no fast-forward", left_by(state, actor, node))
                return

    def _is_waiting(self, disk: Disk, mirror: Mirror, save: SaveFacts) -> bool:
        """Whether a part is there already, and others are not."""
        part = part_of(disk, save)
        if part is None:
            return False
        there = {name for name, _, _ in mirror.parts}
        wanted = [part_name(save, share, part.of) for share in range(part.of)]
        return wanted[part.shares[0]] in there and not there.issuperset(wanted)

    def _verdict(self, state: State, actor: Actor, node: int, index: int, save: SaveFacts) -> str:
        """An attempt asks before its first commit on a mirror.

        What earlier ones left it uploads as a drain does, but nothing that would fence the attempt itself.
        """
        roots = frozenset(root_of(state.disks[host], actor.attempt, host) for host in actor.job or (node,))
        sight = self._sight(state, (node,))._replace(root=actor.root or state.disks[node].root, roots=roots)
        if save.attempt == actor.attempt:
            if save.attempt in state.disks[node].uploaded and any(
                there.attempt == save.attempt for there in state.mirrors[index].saves
            ):
                return "commit"
            return self._may_commit(sight, save.attempt).may
        if not _is_drain(actor) and self._is_left(sight, URLS[index], actor.attempt, save):
            return "behind"
        return self._may_drain(sight, URLS[index], save).may

    def _granted(self, state: State, actor: Actor, node: int, index: int, save: SaveFacts) -> Step:
        where = f" of node {node}" if part_of(state.disks[node], save) is not None else ""
        what = f"{actor.attempt} uploads {save.save_id}{where} to {URLS[index]}"
        asked = actor._replace(phase="commits", commit=(node, index, save))
        after = with_actor(self._lists_what_it_commits(state, actor, node, index, save), asked)
        if not self.world.commits_at_once:
            return Step(f"{what}, pauses", after)
        (done,) = self._commits(after, asked)
        return Step(what, done.after, done.wrong)

    def _commits(self, state: State, actor: Actor) -> Iterator[Step]:
        assert actor.commit is not None
        node, index, save = actor.commit
        if index not in self._answering(state):
            return
        listed = self._lists_what_it_commits(state, actor, node, index, save)
        mirror, wrong = self._with_upload(listed.disks[node], listed.mirrors[index], save)
        after = without(listed, actor)._replace(mirrors=put_at(state.mirrors, index, mirror))
        if save in mirror.saves:
            disk = after.disks[node]
            after = put_disk(after, node, disk._replace(uploaded=disk.uploaded | {save.attempt}))
            if any(save.save_id in one.skipped for one in after.disks):
                wrong = "a save that was given up is committed"
            if save.attempt not in ids_of(mirror.listed):
                wrong = "a save is committed whose attempt the mirror does not list"
        if not _is_drain(actor):
            after = with_actor(after, actor._replace(phase="runs", commit=None))
        lost = self._lost(state, after)
        if not self.world.commits_at_once and self._verdict(state, actor, node, index, save) != "commit":
            lost = ""  # it paused between the question and its commit: what no create-only store can close
        yield Step(f"{actor.attempt} commits {save.save_id} on {URLS[index]}", after, wrong or lost)

    def _with_upload(self, disk: Disk, mirror: Mirror, save: SaveFacts) -> tuple[Mirror, str]:
        """The mirror with a save, or with this disk's part of it and with what all parts that are there make."""
        part = part_of(disk, save)
        if part is None:
            return mirror._replace(saves=mirror.saves | {save}), ""
        mirror = self._with_part(disk, mirror, save)
        if self._is_to_publish(disk, mirror, save):
            return mirror, ""
        parts = self._parts_of(mirror, save, part.of)
        try:
            merged = meta_merging.merge_parts([meta_of(*one, part.of) for one in parts]) if parts else None
        except BrokenMeta:
            merged = None
        if merged is None:
            return mirror, ""
        made = {(merged.save_id, one.rank) for one in merged.artifacts}
        wrong = ""
        if {one for one, _ in parts} != {save}:
            wrong = "parts of several saves are merged"
        elif made != {(save.save_id, share) for share in range(part.of)}:
            wrong = "a save is committed without one part"
        elif not made <= mirror.files:
            wrong = "a meta names files that are not there"
        return mirror._replace(saves=mirror.saves | {save}), wrong

    def _is_to_publish(self, disk: Disk, mirror: Mirror, save: SaveFacts) -> bool:
        """Whether this disk has a part of the save that the mirror lacks."""
        part = part_of(disk, save)
        return part is not None and part_name(save, part.shares[0], part.of) not in {
            name for name, _, _ in mirror.parts
        }

    def _with_part(self, disk: Disk, mirror: Mirror, save: SaveFacts) -> Mirror:
        """The mirror with this disk's part of a save, or first with the part's files; it commits nothing."""
        part = part_of(disk, save)
        assert part is not None
        share = part.shares[0]
        name, mine = part_name(save, share, part.of), (save.save_id, share)
        if self.world.sends_files and mine not in mirror.files and not self._may_publish(mirror, mine):
            return mirror._replace(files=mirror.files | {mine})
        if name not in {one for one, _, _ in mirror.parts}:
            mirror = mirror._replace(parts=mirror.parts | {(name, save, share)})
        return mirror if self.world.sends_files else mirror._replace(files=mirror.files | {mine})

    def _parts_of(self, mirror: Mirror, save: SaveFacts, of: int) -> list[tuple[SaveFacts, int]]:
        """The parts that a node finds under the names of a save's parts; none, if it has to wait for one."""
        there = {name: (one, share) for name, one, share in mirror.parts}
        wanted = [part_name(save, share, of) for share in range(of)]
        return [there[name] for name in wanted] if there.keys() >= set(wanted) else []

    def _may_publish(self, mirror: Mirror, mine: tuple[str, int]) -> bool:
        """Whether a node may publish a part: its files are verified there."""
        return mine in mirror.files

    def _drains(self, state: State, host: int) -> Iterator[Step]:
        for index in self._answering(state):
            found = self._next_drained(state, host, index)
            if found is not None:
                yield self._granted(*found)

    def _next_drained(self, state: State, host: int, index: int) -> tuple[State, Actor, int, int, SaveFacts] | None:
        sight = self._sight(state, (host,))
        if state.mirrors[index].run not in (None, sight.disk.run):
            return None
        for save in to_upload(sight.disk, state.mirrors[index]):
            if self._is_waiting(sight.disk, state.mirrors[index], save):
                continue
            root = seen_by_its_job(self._evidence(sight), save.attempt, sight.disk.jobs).root
            if self._may_drain(sight._replace(root=root), URLS[index], save).may == "commit":
                drain = Actor(f"drain {host}", (host,), "runs")
                return self._lists_what_it_commits(state, drain, host, index, save), drain, host, index, save
        return None

    def _lists_what_it_commits(self, state: State, actor: Actor, node: int, index: int, save: SaveFacts) -> State:
        """The state after the attempt of a save that is about to be whole on a mirror is on the list there."""
        disk, mirror = state.disks[node], state.mirrors[index]
        if mirror.run is not None and save not in self._with_upload(disk, mirror, save)[0].saves:
            return state
        if _is_drain(actor):
            return state._replace(
                mirrors=put_at(state.mirrors, index, self._drained(self._sight(state, (node,)), index, save))
            )
        if save.attempt in ids_of(mirror.listed):
            return state
        return self._told(state, disk, actor, index, save.attempt)

    def _list_for_drain(self, sight: Sight, index: int, save: SaveFacts) -> Mirror:
        mirror, disk = sight.mirrors[index], sight.disk
        assert mirror is not None
        assert disk.run is not None
        made_by = next(one for one in disk.listed if one.id == save.attempt)
        told = rules.drained_list(self._evidence(sight), URLS[index], made_by, disk.run, list_of(mirror))
        return mirror._replace(run=told.run_id, listed=self._one_of_each(told.attempts), requirements=told.requirements)

    def _told(self, state: State, disk: Disk, actor: Actor, index: int, earlier: str = "") -> State:
        """The state after an attempt has put itself on a mirror's list, and an earlier one whose save it completes."""
        told = self._listed(disk, actor, state.mirrors[index], earlier)
        after = state._replace(mirrors=put_at(state.mirrors, index, told))
        is_back = state.removed and URLS[index] == "B" and "A" in state.configured
        return after._replace(removed=None) if is_back else after

    def _write_mirror_list(self, disk: Disk, actor: Actor, mirror: Mirror, earlier: str) -> Mirror:
        assert disk.run is not None
        entry = next(one for one in disk.listed if one.id == actor.attempt)
        root_list = AttemptList(disk.run, tuple(in_order(disk.listed)), disk.requirements)
        claim = rules.Claim(entry, root_list, known=actor.known, for_mirrors=actor.for_mirrors, needs=actor.needs)
        told = rules.mirror_list(rules.with_earlier(claim, earlier), list_of(mirror))
        return mirror._replace(run=told.run_id, listed=self._one_of_each(told.attempts), requirements=told.requirements)

    # -- saves and uploads

    # -- what is seen

    def _sight(self, state: State, nodes: tuple[int, ...], attempt: str = "") -> Sight:
        answering = self._answering(state)
        seen = [mirror if index in answering else None for index, mirror in enumerate(state.mirrors)]
        roots = [root_of(state.disks[host], attempt, host) for host in nodes]
        disks = tuple(state.disks[host] for host in nodes)
        return Sight(identity_of(roots), disks, (seen[0], seen[1]), state.configured, frozenset(roots))

    def _answering(self, state: State) -> list[int]:
        return [index for index, url in enumerate(URLS) if state.up[index] and url in state.configured]

    def _unknown(self, state: State, actor: Actor, index: int) -> frozenset[Attempt]:
        return frozenset(one for one in state.mirrors[index].listed if one.id not in actor.known)

    def _lost(self, before: State, after: State) -> str:
        """What nobody decided: a save that stood on the mirrors does not stand any more."""
        if before.removed:
            return ""
        lost = set(self._standing(before.mirrors)) - set(self._standing(after.mirrors))
        return "a save that stood on the mirrors is superseded" if lost else ""

    def _one_of_each(self, attempts: Iterable[Attempt]) -> frozenset[Attempt]:
        """Equal attempts as one object, which makes states quick to compare."""
        return frozenset(self._attempts.setdefault(one, one) for one in attempts)


def _is_drain(actor: Actor) -> bool:
    return actor.attempt.startswith("drain")


def root_of(disk: Disk, attempt: str, host: int) -> str:
    return disk.root or f"root {host} of {attempt}"


def left_by(state: State, actor: Actor, node: int) -> State:
    """The state after a node of a job ended."""
    unready = {node, *actor.todo} if actor.phase == "joins" else {node}
    nodes = tuple(one for one in actor.nodes if one not in unready)
    if not nodes:
        return without(state, actor)
    left = actor._replace(nodes=nodes, todo=tuple(one for one in actor.todo if one in nodes), crippled=True)
    if actor.commit is not None and actor.commit[0] != node:
        return with_actor(state, left)
    return with_actor(state, left if left.todo else left._replace(phase="runs", save=None, commit=None))
