"""What may happen in a small world, one step at a time.

Rules:
* Places change here. Whatever a start, a commit or a drain *decides* is asked of ``core.start``, by evidence made of
  what the actor can see.
* The steps from a state always come in the same order.
* A step says what was wrong about it; a state at rest, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from ckptmirror.core.model import Attempt, AttemptList, Requirement
from ckptmirror.core.start import attempts as rules
from ckptmirror.core.start import decide, disks
from ckptmirror.core.start.decide import Outcome, Refuse, Result, Try, Wish
from ckptmirror.core.start.disks import identity_of
from ckptmirror.core.start.evidence import ANYWHERE, DISK, Copy, Evidence, Origin
from ckptmirror.core.start.lineage import SaveFacts, merge_requirements, removal
from tests.simulation.small_uploads import Uploads, left_by, root_of
from tests.simulation.small_world import (
    AUTO,
    START_OVER,
    URLS,
    Actor,
    Choice,
    Disk,
    Disks,
    Mirror,
    Mirrors,
    Sight,
    State,
    Step,
    World,
    a_save,
    evidence_of_start,
    ids_of,
    in_order,
    list_of,
    named,
    part_name,
    part_of,
    put_at,
    put_disk,
    put_together,
    ref_of,
    restored,
    staged,
    step_of,
    to_upload,
    with_actor,
    with_job,
    with_save,
    without,
)

__all__ = ["Histories"]


class Histories(Uploads):
    """The steps of a world. Answers of ``core.start`` are kept: the same evidence comes again and again."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        kept = functools.cache
        self._start_evidence: Callable[[Sight], Evidence] = kept(evidence_of_start)
        self._choice = kept(self._ask_for_choice)
        self._given_up = kept(
            lambda sight: frozenset(one.save_id for one in disks.never_whole(self._start_evidence(sight)))
        )
        self._heard = kept(lambda sight: frozenset(rules.count(self._start_evidence(sight)).heard))
        self._run_of = kept(lambda sight: decide.run_of(self._start_evidence(sight)))
        self._claimed = kept(self._write_root_list)
        self._settled = kept(self._drain_everything)
        self._at_rest = kept(self._judge_rest)

    def beginning(self) -> State:
        """The first state."""
        nodes = self.world.jobs[0]
        empty = (Disk(),) * (1 + max(host for job in self.world.jobs for host in job))
        required = URLS[: self.world.mirrors]
        state = State(empty, (Mirror(), Mirror()), configured=required)
        if not self.world.begun:
            return state
        roots = [root_of(Disk(), "1", host) for host in nodes]
        first = Attempt("1", 0, None, root=identity_of(roots))
        save = a_save(first.id, 1, 1)
        listed = frozenset({first})
        one = frozenset({first.id})
        requirements = tuple(Requirement(url, first.number) for url in required)
        for share, (host, root) in enumerate(zip(nodes, roots, strict=True)):
            disk = with_job(Disk(root, "run 1", listed, requirements, one, uploaded=one), first.root)
            state = put_disk(state, host, with_save(disk, save, share, len(nodes)))
        mirror = Mirror("run 1", listed, requirements, frozenset({save}))
        if len(nodes) > 1:
            shares = range(len(nodes))
            parts = frozenset((part_name(save, share, len(nodes)), save, share) for share in shares)
            mirror = mirror._replace(parts=parts, files=frozenset((save.save_id, share) for share in shares))
        runs = Actor("1", nodes, "runs", AUTO, Choice(None, True, False), "run 1", one, for_mirrors=one)
        runs = runs._replace(root=first.root, job=nodes, step=1, made=1)
        mirrors = (mirror, mirror if len(required) > 1 else Mirror())
        return with_actor(state._replace(mirrors=mirrors, started=1), runs)

    def steps(self, state: State) -> Iterator[Step]:
        """What may happen next."""
        for step in self._single(state):
            yield from self._at_once(step)

    def _at_once(self, step: Step) -> Iterator[Step]:
        """Go on with a claim, or with a save, that was begun, in every way, if nothing else is to happen in between."""
        phases = {"chose", "claims", "joins"} if self.world.claims_at_once else set()
        phases |= {"publishes"} if self.world.publishes_at_once else set()
        mid = [actor for actor in step.after.actors if actor.phase in phases and not actor.crippled]
        if not mid:
            yield step
            return
        for more in self._acts(step.after, mid[0]):
            yield from self._at_once(Step(f"{step.what}, {more.what}", more.after, step.wrong or more.wrong))

    def _single(self, state: State) -> Iterator[Step]:
        yield from self._misfortunes(state)
        busy = {host for actor in state.actors for host in actor.nodes}
        for nodes in self.world.jobs:
            if busy.isdisjoint(nodes):
                yield from self._starts(state, nodes)
        for host in range(len(state.disks)):
            if host not in busy:
                yield from self._drains(state, host)
        for actor in state.actors:
            yield from self._acts(state, actor)

    def _misfortunes(self, state: State) -> Iterator[Step]:
        for index, url in enumerate(URLS[: self.world.mirrors] if self.world.outages else ()):
            word = "down" if state.up[index] else "up"
            yield Step(f"{url} {word}", state._replace(up=put_at(state.up, index, not state.up[index])))
        if self.world.reconfigures and not state.actors:
            other = ("B",) if state.configured == URLS else URLS
            yield Step(f"configured {'+'.join(other)}", state._replace(configured=other))
        if self.world.forgets and state.removed is False:
            yield from self._removals(state)
        for host, disk in enumerate(state.disks):
            if any(host in actor.nodes for actor in state.actors):
                continue
            if self.world.loses and disk != Disk():
                yield Step(f"disk {host} lost", put_disk(state, host, Disk()))
            if self.world.restores and len(disk.copies) > 1 and not disk.root.startswith("copy"):
                copied = restored(disk, f"copy {host} {state.started}")
                yield Step(f"root {host} restored from an older copy", put_disk(state, host, copied))
            has_staged = any(copy.origin is Origin.STAGED for one in state.disks for copy in one.copies)
            if self.world.stages and disk.run is not None and not has_staged:
                found = {save for index in self._answering(state) for save in state.mirrors[index].saves}
                found = {save for save in found if save.attempt in ids_of(disk.listed)}
                for save in sorted(found - {copy.save for copy in disk.copies}, key=lambda one: one.save_id):
                    yield Step(f"{save.save_id} is staged into root {host}", put_disk(state, host, staged(disk, save)))
            if self.world.rots and not any(one.rotten for one in state.disks):
                for part in sorted(disk.parts, key=lambda one: one.name):
                    rotten = disk._replace(rotten=frozenset({part.save.save_id}))
                    yield Step(f"{part.name} on disk {host} rots", put_disk(state, host, rotten))

    def _removals(self, state: State) -> Iterator[Step]:
        """A person takes mirror A out of the run, at any host: the lists there and on B, if it answers, record it."""
        busy = {host for actor in state.actors for host in actor.nodes}
        there = list_of(state.mirrors[1]) if state.up[1] else None
        for host, disk in enumerate(state.disks):
            if host in busy or disk.run is None or "A" not in disk.required:
                continue
            here = AttemptList(disk.run, tuple(in_order(disk.listed)), disk.requirements)
            word = removal("A", [here, *([there] if there is not None else [])])
            after = put_disk(state, host, disk._replace(requirements=merge_requirements([*disk.requirements, word])))
            if there is not None:
                told = state.mirrors[1]._replace(requirements=merge_requirements([*there.requirements, word]))
                after = after._replace(mirrors=put_at(state.mirrors, 1, told))
            yield Step(f"A is forgotten at {host}", after._replace(removed=True))

    # -- starts

    def _starts(self, state: State, nodes: tuple[int, ...]) -> Iterator[Step]:
        if state.started >= self.world.attempts:
            return
        attempt = str(state.started + 1)
        sight = self._sight(state, nodes, attempt)
        if len({disk.run for disk in sight.disks} - {None}) > 1:
            return  # refused: the disks are of several runs
        for wish in self._wishes(state, sight):
            choice = self._choice(sight, wish)
            if choice is None:
                continue
            run = self._run_of(sight) or f"run {attempt}"
            actor = Actor(attempt, nodes, "chose", wish, choice, run, self._heard(sight), job=nodes)
            where = "+".join(map(str, nodes))
            what = f"{attempt} on {where} chooses {named(choice.parent)}{' by a person' if choice.by_person else ''}"
            after = state._replace(started=state.started + 1)
            wrong = self._wrong_choice(state, sight, choice)
            if wish == AUTO and choice.by_person and choice.parent is not None and not self.world.rots:
                wrong = wrong or self._wrong_way_back(state, sight, choice.parent)
            yield Step(what, with_actor(after, actor), wrong)

    def _wishes(self, state: State, sight: Sight) -> list[Wish]:
        wishes = [AUTO]
        if not state.decided and self.world.rewinds:
            steps = self._steps_of_lineage(sight)
            wishes += [Wish(step) for step in steps[-2:-1]]
        if not state.decided and self.world.starts_over and (sight.disk.listed or any(sight.mirrors)):
            wishes.append(START_OVER)
        if state.decided:  # the same command, started again
            back_to = _listed(state)[state.decided].parent
            again = Wish(back_to.step) if back_to is not None else START_OVER
            settled, _ = decide.settled(self._start_evidence(sight), again)
            wishes += [settled] if not settled.is_auto else []
        return wishes

    def _steps_of_lineage(self, sight: Sight) -> tuple[int, ...]:
        return rules.count(self._start_evidence(sight)).order.steps()

    def _ask_for_choice(self, sight: Sight, wish: Wish) -> Choice | None:
        tried: list[Outcome] = []
        while True:
            move = decide.next_move(self._start_evidence(sight), wish, tried)
            if isinstance(move, Refuse):
                return None
            if isinstance(move, decide.Scratch):
                return Choice(None, True, move.by_person)
            assert isinstance(move, Try), move
            if not self._is_right(sight, move.save, move.place):
                tried.append(Outcome(move.save.save_id, move.kind, move.place, Result.BROKEN, "rotten"))
                continue
            return Choice(move.save, move.needs_all, move.by_person, move.place)

    def _is_right(self, sight: Sight, save: SaveFacts, place: str) -> bool:
        """Whether what a start brings from a place has every right byte."""
        if place not in (DISK, ANYWHERE) or all(self._votes(sight, save)):
            return True
        if place == DISK:
            return False
        parts = [(disk, part) for disk in sight.disks if (part := part_of(disk, save)) is not None]
        whole = {share for disk, part in parts if save.save_id not in disk.rotten for share in part.shares}
        whole |= {share for mirror in sight.mirrors if mirror for one, share in mirror.files if one == save.save_id}
        return whole.issuperset(share for _, part in parts for share in part.shares)

    def _votes(self, sight: Sight, save: SaveFacts) -> list[bool]:
        """Each node's vote on a save that it reads from its disk."""
        return [save.save_id not in disk.rotten for disk in sight.disks]

    def _wrong_way_back(self, state: State, sight: Sight, parent: SaveFacts) -> str:
        """What is wrong about a start that went back by itself."""
        if any(mirror is None for mirror, url in zip(sight.mirrors, URLS, strict=True) if url in state.configured):
            return "a start goes back by itself while a mirror is silent"
        known = {one.id: one for place in (*sight.disks, *sight.mirrors) if place is not None for one in place.listed}
        if any(one.by_person and one.parent == ref_of(parent) for one in known.values()):
            return "a start goes back by itself a second time to one save"
        order = rules.count(self._start_evidence(sight)).order.in_order()
        if parent.step + 1 != order[-1].step:
            return "a start goes back by itself by more than one step"
        left = ref_of(order[-1])
        saved = {save.attempt for save in self._whole_saves(sight.disks)}
        saved |= {save.attempt for mirror in sight.mirrors if mirror is not None for save in mirror.saves}
        failed = {one for disk in sight.disks for one in disk.reported}
        failed -= {one for disk in sight.disks for one in disk.ended}
        failed |= {one for mirror in sight.mirrors if mirror is not None for one in mirror.diverged}
        if not [one for one in known.values() if one.parent == left and one.id in failed - saved]:
            return "a start goes back by itself from a save that no start failed from"
        return ""

    def _wrong_choice(self, state: State, sight: Sight, choice: Choice) -> str:
        if choice.parent is not None:
            if choice.place == DISK and any(choice.parent.save_id in disk.rotten for disk in sight.disks):
                return "a damaged part is loaded"
            if any(choice.parent.save_id in disk.skipped for disk in state.disks):
                return "a save that was given up is resumed"
        if choice.by_person or state.removed:
            return ""
        if self._leaves_newer_behind(state, sight, choice):
            return "a start leaves a newer save behind"
        if choice.parent is None:
            return "a start at step 0 although a save stands on a mirror" if self._standing(state.mirrors) else ""
        if state.decided and self._answering(state):
            known = _listed(state)
            way, at = [], known.get(choice.parent.attempt)
            while at is not None:
                way.append(at)
                at = known.get(at.parent.attempt) if at.parent is not None else None
            decision = known[state.decided]
            back_to = decision.parent
            follows = any(one.parent == back_to and one.number >= decision.number for one in way)
            if not follows and choice.parent.step > (back_to.step if back_to is not None else 0):
                return "a person's decision is undone"
        return ""

    def _leaves_newer_behind(self, state: State, sight: Sight, choice: Choice) -> bool:
        """Whether a start that sees all mirrors passes over the newest save, which nothing there speaks against."""
        seen = [mirror for index, mirror in enumerate(sight.mirrors) if index in self._answering(state)]
        if (
            state.decided
            or len(seen) < self.world.mirrors
            or any(mirror is None for mirror in sight.mirrors[: len(seen)])
        ):
            return False
        known = {one.id: one for place in (*sight.disks, *seen) if place is not None for one in place.listed}
        saves = {save for mirror in seen if mirror is not None for save in mirror.saves}
        saves |= self._whole_saves(sight.disks) | {
            save for save in put_together(sight) if self._is_right(sight, save, ANYWHERE)
        }
        saves = {save for save in saves if save.attempt in known}
        if not saves:
            return False
        newest = max(saves, key=lambda save: (known[save.attempt].number, save.attempt, save.number))
        at, last = known[newest.attempt], {newest.attempt: 99}
        while at.parent is not None and at.parent.attempt in known:
            last[at.parent.attempt] = at.parent.number
            at = known[at.parent.attempt]
        is_ahead = all(save.number <= last.get(save.attempt, 0) for save in self._standing(state.mirrors))
        return is_ahead and choice.parent != newest

    def _acts(self, state: State, actor: Actor) -> Iterator[Step]:
        if actor.phase == "chose":
            yield from self._claims_root(state, actor)
            return
        yield Step(f"{actor.attempt} dies", without(state, actor))
        if self.world.reports and actor.phase == "runs":
            yield from self._reports(state, actor)
        if self.world.survives and actor.phase != "claims" and len(actor.nodes) > 1:
            for node in actor.nodes:
                yield Step(f"node {node} of {actor.attempt} dies", left_by(state, actor, node))
        if actor.phase == "claims":
            yield from self._claims_mirror(state, actor)
        elif actor.phase == "joins":
            yield from self._joins(state, actor)
        elif actor.phase == "publishes":
            yield from self._publishes(state, actor)
        elif actor.phase == "commits":
            yield from self._commits(state, actor)
        else:
            yield from self._runs(state, actor)

    def _reports(self, state: State, actor: Actor) -> Iterator[Step]:
        one, after = frozenset({actor.attempt}), state
        if actor.attempt not in state.disks[actor.nodes[0]].reported:
            for node in actor.nodes:
                after = put_disk(after, node, after.disks[node]._replace(reported=after.disks[node].reported | one))
            yield Step(f"{actor.attempt} reports a step", after)
        else:
            for node in actor.nodes:
                after = put_disk(after, node, after.disks[node]._replace(ended=after.disks[node].ended | one))
            yield Step(f"{actor.attempt} ends", without(after, actor))
            mirrors = tuple(
                mirror._replace(diverged=mirror.diverged | one) if index in self._answering(state) else mirror
                for index, mirror in enumerate(state.mirrors)
            )
            yield Step(f"{actor.attempt} diverges", without(state, actor)._replace(mirrors=(mirrors[0], mirrors[1])))

    def _claims_root(self, state: State, actor: Actor) -> Iterator[Step]:
        assert actor.choice is not None
        sight = self._sight(state, actor.nodes, actor.attempt)
        if self._choice(sight, actor.wish) != actor.choice or self._heard(sight) - actor.known:
            yield Step(f"{actor.attempt} starts over", without(state, actor))
            return
        disk, claim = self._claimed(sight, actor)
        wrong = self._wrong_claim(state, actor.choice) if any(sight.mirrors) else ""
        claims = actor._replace(phase="claims", known=claim.known, needs=claim.needs, for_mirrors=claim.for_mirrors)
        claims = claims._replace(
            step=step_of(actor.choice.parent), root=sight.root, abandoned=self._given_up(sight), todo=actor.nodes[1:]
        )
        if sight.disk.run is None and actor.run == f"run {actor.attempt}":
            claims = claims._replace(unwritten=disk)
            yield Step(f"{actor.attempt} begins {actor.run}", with_actor(state, claims), wrong)
        else:
            leader = actor.nodes[0]
            yield Step(
                f"{actor.attempt} claims root {leader}", with_actor(put_disk(state, leader, disk), claims), wrong
            )

    def _wrong_claim(self, state: State, choice: Choice) -> str:
        stands = self._standing(state.mirrors)
        if choice.by_person or state.removed or not stands or stands[-1].step <= step_of(choice.parent):
            return ""
        return "a start claims the run from a save older than one that stands on the mirrors"

    def _write_root_list(self, sight: Sight, actor: Actor) -> tuple[Disk, rules.Claim]:
        choice, disk = actor.choice, sight.disk
        assert choice is not None
        assert actor.run is not None
        parent = ref_of(choice.parent) if choice.parent is not None else None
        entry = Attempt(actor.attempt, 0, parent, by_person=choice.by_person)
        claim = rules.claim_from(self._start_evidence(sight), entry, actor.run, needs_all=choice.needs_all)
        copies = disk.copies
        if len(sight.disks) == 1 and choice.place not in ("", DISK):
            assert choice.parent is not None
            copies |= {Copy(choice.parent, Origin.STAGED)}
        listed = self._one_of_each(claim.root_list.attempts)
        requirements, completed = claim.root_list.requirements, frozenset(claim.root_list.completed)
        root = root_of(disk, actor.attempt, actor.nodes[0])
        return with_job(disk, sight.root)._replace(
            root=root, run=actor.run, listed=listed, requirements=requirements, completed=completed, copies=copies
        ), claim

    def _claims_mirror(self, state: State, actor: Actor) -> Iterator[Step]:
        assert actor.choice is not None
        leader = actor.nodes[0]
        disk = actor.unwritten or state.disks[leader]
        answering = self._answering(state)
        unasked = [i for i in answering if actor.attempt not in ids_of(state.mirrors[i].listed)]
        if any(URLS.index(url) not in answering for url in actor.needs):
            yield Step(f"{actor.attempt} gives up: a mirror fell silent", without(state, actor))
            return
        if not unasked:
            if all(actor.attempt in ids_of(state.mirrors[URLS.index(url)].listed) for url in disk.required):
                disk = disk._replace(completed=disk.completed | {actor.attempt})
            after = put_disk(state, leader, disk._replace(skipped=disk.skipped | actor.abandoned))
            runs = actor._replace(phase="joins" if actor.todo else "runs", unwritten=None)
            yield Step(f"{actor.attempt} runs", with_actor(after, runs))
        for index in unasked if actor.choice.by_person else unasked[:1]:  # a person's claim: one without a list first
            if self._unknown(state, actor, index):
                yield Step(f"{actor.attempt} starts over at {URLS[index]}", without(state, actor))
                continue
            after = self._told(state, disk, actor, index)
            wrong = ""
            if actor.choice.by_person:
                after = after._replace(decided=actor.attempt if len(unasked) == 1 else after.decided)
            else:
                wrong = self._lost(state, after)
            yield Step(f"{actor.attempt} claims {URLS[index]}", with_actor(after, actor), wrong)

    def _joins(self, state: State, actor: Actor) -> Iterator[Step]:
        told = state.disks[actor.nodes[0]]
        for node in actor.todo:
            disk = state.disks[node]
            disk = with_job(disk, actor.root)._replace(
                root=root_of(disk, actor.attempt, node),
                run=actor.run,
                listed=told.listed,
                requirements=told.requirements,
                completed=told.completed,
                skipped=disk.skipped | actor.abandoned,
            )
            after = with_actor(put_disk(state, node, disk), _done_by(actor, node))
            yield Step(f"{actor.attempt} is recorded on node {node}", after)

    def _runs(self, state: State, actor: Actor) -> Iterator[Step]:
        for node in actor.nodes:
            for index in self._answering(state):
                yield from self._at_mirror(state, actor, node, index)
        if actor.step < self.world.last_step and not actor.crippled:
            save = a_save(actor.attempt, actor.made + 1, actor.step + 1)
            saves = actor._replace(phase="publishes", save=save, todo=actor.nodes, made=save.number)
            if len(actor.nodes) > 1:
                yield Step(f"{actor.attempt} prepares {save.step}", with_actor(state, saves))
            else:
                yield from self._publishes(state, saves)

    def _publishes(self, state: State, actor: Actor) -> Iterator[Step]:
        save = actor.save
        assert save is not None
        for node in actor.todo:
            disk = with_save(state.disks[node], save, actor.job.index(node), len(actor.job))
            after = with_actor(put_disk(state, node, disk), _done_by(actor, node))
            yield Step(f"{actor.attempt} saves {save.step}" + (f" on node {node}" if len(actor.job) > 1 else ""), after)

    # -- when all is quiet

    def wrong_at_rest(self, state: State) -> str:
        """What is wrong once nobody runs, everything answers, and both roots are drained."""
        if state.actors or state.removed:
            return ""
        if len({place.run for place in (*state.disks, *state.mirrors)} - {None}) > 1:
            return "" if self.world.reconfigures else "two runs"  # a mirror was left out while the run began on it
        disks, mirrors = self._settled(state.disks, state.mirrors)
        return self._at_rest(disks, mirrors, bool(state.decided))

    def _drain_everything(self, disks: Disks, mirrors: Mirrors) -> tuple[Disks, Mirrors]:
        state = State(disks, mirrors, configured=URLS[: self.world.mirrors])
        while True:
            hosts = range(len(disks))
            found = [self._next_drained(state, host, index) for host in hosts for index in range(self.world.mirrors)]
            first = next((one for one in found if one is not None), None)
            if first is None:
                return state.disks, state.mirrors
            after, _, host, index, save = first
            mirror, _ = self._with_upload(disks[host], after.mirrors[index], save)
            state = after._replace(mirrors=put_at(after.mirrors, index, mirror))

    def _judge_rest(self, disks: Disks, mirrors: Mirrors, decided: bool) -> str:
        stands = self._standing(mirrors)
        saves = self._whole_saves(disks) | mirrors[0].saves | mirrors[1].saves
        continued = {one.parent for place in (*disks, *mirrors) for one in place.listed if one.parent is not None}
        is_lost = not stands and not continued <= {ref_of(save) for save in saves}  # then a person has to decide
        is_lost |= not stands and any(disk.parts for disk in disks) | any(mirror.files for mirror in mirrors)
        waiting = _held_back(disks, mirrors)
        jobs = [tuple(disks[host] for host in job) for job in self.world.jobs]
        for job in (*jobs, *((Disk(),) * size for size in sorted({len(job) for job in jobs}))):
            roots = [disk.root or f"another root {number}" for number, disk in enumerate(job)]
            choice = self._choice(
                Sight(identity_of(roots), job, mirrors, URLS[: self.world.mirrors], frozenset(roots)), AUTO
            )
            if choice is None and is_lost:
                continue
            if choice is None:
                return "a start waits for ever"
            if choice.parent is not None and choice.by_person and not self.world.rots:
                continue  # it goes back by itself: judged where it starts
            if choice.parent != (stands[-1] if stands else None) and choice.parent not in waiting:
                return "starts disagree with what stands on the mirrors, when all is drained"
            if (
                choice.parent is not None
                and not decided
                and any(
                    save.attempt == choice.parent.attempt and save.number > choice.parent.number
                    for save in saves - waiting
                )
            ):
                return "a start leaves a later save of the same attempt behind"
        return ""

    def _whole_saves(self, disks: Disks) -> set[SaveFacts]:
        """The saves that are whole on disks, whichever jobs can see these."""
        whole = {copy.save for disk in disks for copy in disk.copies}
        shares: dict[tuple[SaveFacts, int], set[int]] = {}
        for disk in disks:
            for part in disk.parts:
                if part.save.save_id not in disk.rotten | disk.skipped:
                    shares.setdefault((part.save, part.of), set()).update(part.shares)
        return whole | {save for (save, of), there in shares.items() if len(there) == of}


def _held_back(disks: Disks, mirrors: Mirrors) -> set[SaveFacts]:
    """The saves of which drains may say that they wait for a newer attempt, of which the same disk has a part.

    What that attempt saved was not completed by any drain. Which of the two goes on, the next start decides.
    """
    held: set[SaveFacts] = set()
    for disk in disks:
        number = {one.id: one.number for one in disk.listed}
        unsent = {save for mirror in mirrors if mirror.run == disk.run for save in to_upload(disk, mirror)}
        newest = max((number[save.attempt] for save in unsent), default=0)
        held |= {save for save in unsent if number[save.attempt] < newest}
    return held


def _listed(state: State) -> dict[str, Attempt]:
    return {one.id: one for place in (*state.disks, *state.mirrors) for one in place.listed}


def _done_by(actor: Actor, node: int) -> Actor:
    """The actor after a node has done what all have to do."""
    todo = tuple(one for one in actor.todo if one != node)
    if todo:
        return actor._replace(todo=todo)
    step = actor.save.step if actor.save is not None else actor.step
    return actor._replace(todo=(), phase="runs", step=step, save=None)
