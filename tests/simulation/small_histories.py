"""What may happen in a small world, one step at a time.

Rules:
* Places change here. Whatever a start, a commit or a drain *decides* is asked of ``core.start``, by evidence made of
  what the actor can see.
* The steps from a state always come in the same order.
* A step says what was wrong about it; a state at rest, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from ckptmirror.core.model import Attempt, AttemptList
from ckptmirror.core.start import attempts as rules
from ckptmirror.core.start import decide
from ckptmirror.core.start.decide import Refuse, Try, Wish
from ckptmirror.core.start.evidence import Copy, Evidence, Origin
from ckptmirror.core.start.lineage import SaveFacts
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
    evidence_of,
    ids_of,
    in_order,
    list_of,
    made_here,
    named,
    put_at,
    put_disk,
    ref_of,
    restored,
    standing_saves,
    step_of,
    to_upload,
    with_actor,
    without,
)

__all__ = ["Histories"]


class Histories:
    """The steps of a world. Answers of ``core.start`` are kept: the same evidence comes again and again."""

    def __init__(self, world: World) -> None:
        self.world = world
        kept = functools.cache
        self._evidence: Callable[[Sight], Evidence] = kept(evidence_of)
        self._choice = kept(self._ask_for_choice)
        self._heard = kept(lambda sight: frozenset(rules.count(self._evidence(sight)).heard))
        self._run_of = kept(lambda sight: decide.run_of(self._evidence(sight)))
        self._claimed = kept(self._write_root_list)
        self._listed = kept(self._write_mirror_list)
        self._may_commit = kept(lambda sight, attempt: rules.may_commit(self._evidence(sight), attempt))
        self._may_drain = kept(lambda sight, url, save: rules.may_drain(self._evidence(sight), url, save))
        self._drained = kept(self._list_for_drain)
        self._standing = kept(standing_saves)
        self._settled = kept(self._drain_everything)
        self._at_rest = kept(self._judge_rest)
        self._attempts: dict[Attempt, Attempt] = {}

    def beginning(self) -> State:
        """The first state."""
        if not self.world.begun:
            return State((Disk(), Disk()), (Mirror(), Mirror()))
        first = Attempt("1", 0, None, root="root of 1")
        save = a_save(first.id, 1, 1)
        listed = frozenset({first})
        one = frozenset({first.id})
        disk = Disk(first.root, "run 1", listed, URLS, one, uploaded=one, copies=frozenset({made_here(save)}))
        mirror = Mirror("run 1", listed, URLS, frozenset({save}))
        runs = Actor("1", 0, "runs", AUTO, Choice(None, True, False), "run 1", one, for_mirrors=one, step=1)
        return State((disk, Disk()), (mirror, mirror), actors=(runs,), started=1)

    def steps(self, state: State) -> Iterator[Step]:
        """What may happen next."""
        for step in self._single(state):
            yield from self._at_once(step)

    def _at_once(self, step: Step) -> Iterator[Step]:
        """Go on with a claim that was begun, in every way, if nothing else is to happen in between."""
        mid = [actor for actor in step.after.actors if actor.phase in ("chose", "claims")]
        if not mid or not self.world.claims_at_once:
            yield step
            return
        for more in self._acts(step.after, mid[0]):
            yield from self._at_once(Step(f"{step.what}, {more.what}", more.after, step.wrong or more.wrong))

    def _single(self, state: State) -> Iterator[Step]:
        yield from self._misfortunes(state)
        for host in (0, 1):
            busy = [actor for actor in state.actors if actor.host == host]
            if not busy:
                yield from self._starts(state, host)
                yield from self._drains(state, host)
        for actor in state.actors:
            yield from self._acts(state, actor)

    def _misfortunes(self, state: State) -> Iterator[Step]:
        for index, url in enumerate(URLS):
            word = "down" if state.up[index] else "up"
            yield Step(f"{url} {word}", state._replace(up=put_at(state.up, index, not state.up[index])))
        if self.world.reconfigures and not state.actors:
            other = ("B",) if state.configured == URLS else URLS
            yield Step(f"configured {'+'.join(other)}", state._replace(configured=other))
        for host, disk in enumerate(state.disks):
            if any(actor.host == host for actor in state.actors):
                continue
            if self.world.loses and disk != Disk():
                yield Step(f"disk {host} lost", put_disk(state, host, Disk()))
            if self.world.restores and len(disk.copies) > 1 and not disk.root.startswith("copy"):
                copied = restored(disk, f"copy {host} {state.started}")
                yield Step(f"root {host} restored from an older copy", put_disk(state, host, copied))

    # -- starts

    def _starts(self, state: State, host: int) -> Iterator[Step]:
        if state.started >= self.world.attempts:
            return
        attempt = str(state.started + 1)
        sight = self._sight(state, host, attempt)
        for wish in self._wishes(state, sight):
            choice = self._choice(sight, wish)
            if choice is None:
                continue
            run = self._run_of(sight) or f"run {attempt}"
            actor = Actor(attempt, host, "chose", wish, choice, run, self._heard(sight))
            what = f"{attempt} on {host} chooses {named(choice.parent)}{' by a person' if choice.by_person else ''}"
            after = state._replace(started=state.started + 1)
            yield Step(what, with_actor(after, actor), self._wrong_choice(state, choice))

    def _wishes(self, state: State, sight: Sight) -> list[Wish]:
        wishes = [AUTO]
        if not state.decided and self.world.rewinds:
            steps = self._steps_of_lineage(sight)
            wishes += [Wish(step) for step in steps[-2:-1]]
        if not state.decided and self.world.starts_over and (sight.disk.listed or any(sight.mirrors)):
            wishes.append(START_OVER)
        return wishes

    def _steps_of_lineage(self, sight: Sight) -> tuple[int, ...]:
        return rules.count(self._evidence(sight)).order.steps()

    def _ask_for_choice(self, sight: Sight, wish: Wish) -> Choice | None:
        move = decide.next_move(self._evidence(sight), wish)
        if isinstance(move, Refuse):
            return None
        if isinstance(move, Try):
            return Choice(move.save, move.needs_all, move.by_person)
        assert isinstance(move, decide.Scratch), move
        return Choice(None, True, move.by_person)

    def _wrong_choice(self, state: State, choice: Choice) -> str:
        if choice.by_person:
            return ""
        if choice.parent is None:
            return "a start at step 0 although a save stands on a mirror" if self._standing(state.mirrors) else ""
        if state.decided and self._answering(state):
            known = {one.id: one for place in (*state.disks, *state.mirrors) for one in place.listed}
            way, at = set(), known.get(choice.parent.attempt)
            while at is not None:
                way.add(at.id)
                at = known.get(at.parent.attempt) if at.parent is not None else None
            back_to = known[state.decided].parent
            if state.decided not in way and choice.parent.step > (back_to.step if back_to is not None else 0):
                return "a person's decision is undone"
        return ""

    def _acts(self, state: State, actor: Actor) -> Iterator[Step]:
        if actor.phase == "chose":
            yield from self._claims_root(state, actor)
        else:
            yield Step(f"{actor.attempt} dies", without(state, actor))
            if actor.phase == "claims":
                yield from self._claims_mirror(state, actor)
            elif actor.phase == "commits":
                yield from self._commits(state, actor)
            else:
                yield from self._runs(state, actor)

    def _claims_root(self, state: State, actor: Actor) -> Iterator[Step]:
        assert actor.choice is not None
        sight = self._sight(state, actor.host, actor.attempt)
        if self._choice(sight, actor.wish) != actor.choice or self._heard(sight) - actor.known:
            yield Step(f"{actor.attempt} starts over", without(state, actor))
            return
        disk, claim = self._claimed(sight, actor)
        wrong = self._wrong_claim(state, actor.choice) if any(sight.mirrors) else ""
        claims = actor._replace(phase="claims", known=claim.known, needs=claim.needs, for_mirrors=claim.for_mirrors)
        claims = claims._replace(step=step_of(actor.choice.parent))
        if sight.disk.run is None and actor.run == f"run {actor.attempt}":
            claims = claims._replace(unwritten=disk)
            yield Step(f"{actor.attempt} begins {actor.run}", with_actor(state, claims), wrong)
        else:
            after = with_actor(put_disk(state, actor.host, disk), claims)
            yield Step(f"{actor.attempt} claims root {actor.host}", after, wrong)

    def _wrong_claim(self, state: State, choice: Choice) -> str:
        stands = self._standing(state.mirrors)
        if choice.by_person or not stands or stands[-1].step <= step_of(choice.parent):
            return ""
        return "a start claims the run from a save older than one that stands on the mirrors"

    def _write_root_list(self, sight: Sight, actor: Actor) -> tuple[Disk, rules.Claim]:
        choice, disk = actor.choice, sight.disk
        assert choice is not None
        assert actor.run is not None
        parent = ref_of(choice.parent) if choice.parent is not None else None
        entry = Attempt(actor.attempt, 0, parent, by_person=choice.by_person)
        claim = rules.claim_from(self._evidence(sight), entry, actor.run, needs_all=choice.needs_all)
        copies = disk.copies
        if choice.parent is not None and choice.parent not in {copy.save for copy in copies}:
            copies |= {Copy(choice.parent, Origin.STAGED)}
        listed = self._one_of_each(claim.root_list.attempts)
        required, completed = claim.root_list.required, frozenset(claim.root_list.completed)
        return Disk(sight.root, actor.run, listed, required, completed, disk.met, disk.uploaded, copies), claim

    def _claims_mirror(self, state: State, actor: Actor) -> Iterator[Step]:
        assert actor.choice is not None
        disk = actor.unwritten or state.disks[actor.host]
        answering = self._answering(state)
        unasked = [i for i in answering if actor.attempt not in ids_of(state.mirrors[i].listed)]
        if any(URLS.index(url) not in answering for url in actor.needs):
            yield Step(f"{actor.attempt} gives up: a mirror fell silent", without(state, actor))
        elif not unasked:
            if all(actor.attempt in ids_of(state.mirrors[URLS.index(url)].listed) for url in disk.required):
                disk = disk._replace(completed=disk.completed | {actor.attempt})
            after = put_disk(state, actor.host, disk)
            yield Step(f"{actor.attempt} runs", with_actor(after, actor._replace(phase="runs", unwritten=None)))
        elif self._unknown(state, actor, unasked[0]):
            yield Step(f"{actor.attempt} starts over at {URLS[unasked[0]]}", without(state, actor))
        else:
            index = unasked[0]
            mirror = self._listed(disk, actor, state.mirrors[index])
            after = state._replace(mirrors=put_at(state.mirrors, index, mirror))
            wrong = ""
            if actor.choice.by_person:
                after = after._replace(decided=actor.attempt if len(unasked) == 1 else after.decided)
            else:
                wrong = self._lost(state, after)
            yield Step(f"{actor.attempt} claims {URLS[index]}", with_actor(after, actor), wrong)

    def _write_mirror_list(self, disk: Disk, actor: Actor, mirror: Mirror) -> Mirror:
        assert disk.run is not None
        entry = next(one for one in disk.listed if one.id == actor.attempt)
        root_list = AttemptList(disk.run, tuple(in_order(disk.listed)), disk.required)
        claim = rules.Claim(entry, root_list, known=actor.known, for_mirrors=actor.for_mirrors, needs=actor.needs)
        told = rules.mirror_list(claim, list_of(mirror))
        return Mirror(told.run_id, self._one_of_each(told.attempts), told.required, mirror.saves)

    # -- saves and uploads

    def _runs(self, state: State, actor: Actor) -> Iterator[Step]:
        disk = state.disks[actor.host]
        for index in self._answering(state):
            url, mirror = URLS[index], state.mirrors[index]
            if unknown := self._unknown(state, actor, index):
                after = put_disk(state, actor.host, disk._replace(met=disk.met | unknown))
                yield Step(f"{actor.attempt} fenced at {url}", without(after, actor))
            elif actor.attempt not in ids_of(mirror.listed):
                told = self._listed(disk, actor, mirror)
                after = state._replace(mirrors=put_at(state.mirrors, index, told))
                yield Step(f"{actor.attempt} claims {url} late", after, self._lost(state, after))
            else:
                yield from self._uploads(state, actor, index)
        if actor.step < self.world.last_step:
            number = 1 + sum(copy.save.attempt == actor.attempt for copy in disk.copies)
            save = a_save(actor.attempt, number, actor.step + 1)
            after = put_disk(state, actor.host, disk._replace(copies=disk.copies | {made_here(save)}))
            yield Step(f"{actor.attempt} saves {save.step}", with_actor(after, actor._replace(step=save.step)))

    def _uploads(self, state: State, actor: Actor, index: int) -> Iterator[Step]:
        for save in to_upload(state.disks[actor.host], state.mirrors[index]):
            may = self._verdict(state, actor.host, actor.attempt, index, save)
            if may == "commit":
                yield self._granted(state, actor, index, save)
                return
            if may == "fenced" and save.attempt == actor.attempt:
                yield Step(f"{actor.attempt} fenced at {URLS[index]}: no fast-forward", without(state, actor))
                return

    def _verdict(self, state: State, host: int, attempt: str, index: int, save: SaveFacts) -> str:
        """An attempt asks before its first commit on a mirror; what earlier ones left it uploads as a drain does."""
        sight = self._sight(state, host)
        if save.attempt == attempt:
            if any(there.attempt == attempt for there in state.mirrors[index].saves):
                return "commit"
            return self._may_commit(sight, attempt).may
        return self._may_drain(sight, URLS[index], save).may

    def _granted(self, state: State, actor: Actor, index: int, save: SaveFacts) -> Step:
        what = f"{actor.attempt} uploads {save.save_id} to {URLS[index]}"
        asked = actor._replace(phase="commits", commit=(index, save))
        after = with_actor(state, asked)
        if not self.world.commits_at_once:
            return Step(f"{what}, pauses", after)
        (done,) = self._commits(after, asked)
        return Step(what, done.after, done.wrong)

    def _commits(self, state: State, actor: Actor) -> Iterator[Step]:
        assert actor.commit is not None
        index, save = actor.commit
        if index not in self._answering(state):
            return
        mirror, disk = state.mirrors[index], state.disks[actor.host]
        mirrors = put_at(state.mirrors, index, mirror._replace(saves=mirror.saves | {save}))
        after = put_disk(without(state, actor), actor.host, disk._replace(uploaded=disk.uploaded | {save.attempt}))
        after = after._replace(mirrors=mirrors)
        if not actor.attempt.startswith("drain"):
            after = with_actor(after, actor._replace(phase="runs", commit=None))
        wrong = self._lost(state, after)
        if not self.world.commits_at_once and self._verdict(state, actor.host, actor.attempt, index, save) != "commit":
            wrong = ""  # it paused between the question and its commit: what no create-only store can close
        yield Step(f"{actor.attempt} commits {save.save_id} on {URLS[index]}", after, wrong)

    def _drains(self, state: State, host: int) -> Iterator[Step]:
        for index in self._answering(state):
            found = self._next_drained(state, host, index)
            if found is not None:
                yield self._granted(*found)

    def _next_drained(self, state: State, host: int, index: int) -> tuple[State, Actor, int, SaveFacts] | None:
        sight = self._sight(state, host)
        if state.mirrors[index].run not in (None, sight.disk.run):
            return None
        for save in to_upload(sight.disk, state.mirrors[index]):
            if self._may_drain(sight, URLS[index], save).may == "commit":
                after = state._replace(mirrors=put_at(state.mirrors, index, self._drained(sight, index, save)))
                return after, Actor(f"drain {host}", host, "runs"), index, save
        return None

    def _list_for_drain(self, sight: Sight, index: int, save: SaveFacts) -> Mirror:
        mirror, disk = sight.mirrors[index], sight.disk
        assert mirror is not None
        assert disk.run is not None
        made_by = next(one for one in disk.listed if one.id == save.attempt)
        told = rules.drained_list(self._evidence(sight), URLS[index], made_by, disk.run, list_of(mirror))
        return Mirror(told.run_id, self._one_of_each(told.attempts), told.required, mirror.saves)

    # -- what is seen

    def _sight(self, state: State, host: int, attempt: str = "") -> Sight:
        disk = state.disks[host]
        answering = self._answering(state)
        seen = [mirror if index in answering else None for index, mirror in enumerate(state.mirrors)]
        return Sight(disk.root or f"root of {attempt}", disk, (seen[0], seen[1]), state.configured)

    def _answering(self, state: State) -> list[int]:
        return [index for index, url in enumerate(URLS) if state.up[index] and url in state.configured]

    def _unknown(self, state: State, actor: Actor, index: int) -> frozenset[Attempt]:
        return frozenset(one for one in state.mirrors[index].listed if one.id not in actor.known)

    def _lost(self, before: State, after: State) -> str:
        """What nobody decided: a save that stood on the mirrors does not stand any more."""
        lost = set(self._standing(before.mirrors)) - set(self._standing(after.mirrors))
        return "a save that stood on the mirrors is superseded" if lost else ""

    def _one_of_each(self, attempts: Iterable[Attempt]) -> frozenset[Attempt]:
        """Equal attempts as one object, which makes states quick to compare."""
        return frozenset(self._attempts.setdefault(one, one) for one in attempts)

    # -- when all is quiet

    def wrong_at_rest(self, state: State) -> str:
        """What is wrong once nobody runs, everything answers, and both roots are drained."""
        if state.actors:
            return ""
        if len({place.run for place in (*state.disks, *state.mirrors)} - {None}) > 1:
            return "" if self.world.reconfigures else "two runs"  # a mirror was left out while the run began on it
        disks, mirrors = self._settled(state.disks, state.mirrors)
        return self._at_rest(disks, mirrors, bool(state.decided))

    def _drain_everything(self, disks: Disks, mirrors: Mirrors) -> tuple[Disks, Mirrors]:
        state = State(disks, mirrors)
        while True:
            found = [self._next_drained(state, host, index) for host in (0, 1) for index in (0, 1)]
            first = next((one for one in found if one is not None), None)
            if first is None:
                return state.disks, state.mirrors
            after, _, index, save = first
            mirror = after.mirrors[index]
            state = after._replace(mirrors=put_at(after.mirrors, index, mirror._replace(saves=mirror.saves | {save})))

    def _judge_rest(self, disks: Disks, mirrors: Mirrors, decided: bool) -> str:
        stands = self._standing(mirrors)
        saves = {copy.save for disk in disks for copy in disk.copies} | mirrors[0].saves | mirrors[1].saves
        continued = {one.parent for place in (*disks, *mirrors) for one in place.listed if one.parent is not None}
        is_lost = not stands and not continued <= {ref_of(save) for save in saves}  # then a person has to decide
        for disk in (*disks, Disk()):
            choice = self._choice(Sight(disk.root or "another root", disk, mirrors, URLS), AUTO)
            if choice is None and is_lost:
                continue
            if choice is None:
                return "a start waits for ever"
            if choice.parent != (stands[-1] if stands else None):
                return "starts disagree with what stands on the mirrors, when all is drained"
            if (
                choice.parent is not None
                and not decided
                and any(save.attempt == choice.parent.attempt and save.number > choice.parent.number for save in saves)
            ):
                return "a start leaves a later save of the same attempt behind"
        return ""
