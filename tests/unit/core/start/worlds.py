"""Worlds: one true history of a run, of which a start sees a part.

A history is drawn event by event and played by the rules themselves (``next_move``, ``claim_from``, ``may_commit``), so
the places never contradict one another more than real ones do.

* It can make: two roots; mirrors M (required), N (required, or not there) and O (optional, or not there); a persistent
  directory; starts by nobody and by persons (a step, a save id, start over) while any mirrors are silent; saves of both
  kinds, of one, and emergency snapshots; commits on some mirrors and not on others; deaths, fenced attempts, zombies;
  drains; disks that are lost, and restored from an older copy; copies that were staged; saves that are not whole,
  cannot be read, or were removed by retention; lists that are lost, broken, or an older version of themselves; mirrors
  that left the configuration of one root.
* It cannot make: two runs; lists of ckptmirror 0.1.0; several nodes or ranks; two attempts that claim at the same
  moment; a commit that comes after the question whether it may; bytes that turn out broken only as they are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from ckptmirror.core.model import Attempt, AttemptList, Kind, SaveRef
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.attempts import claim_from, count, drained_list, may_commit, may_drain, mirror_list
from ckptmirror.core.start.decide import Scratch, Try, Wish, next_move
from ckptmirror.core.start.evidence import (
    DISK,
    Copy,
    Evidence,
    Heard,
    ListFound,
    Origin,
    Problem,
    Row,
    Voice,
)
from ckptmirror.core.start.lineage import SaveFacts, merge_attempts
from tests.unit.core.core_builders import id_of
from tests.unit.core.start.builders import KEPT, RUN, M, N, O

__all__ = ["Mirror", "Root", "World", "worlds"]


_OF_METAS = {Voice.NAMED, Voice.COUNTS}  # a meta tells neither the root of its attempt nor whether a person decided


@dataclass
class Place:
    """What a place holds: saves by id, whole or not, and its list."""

    listing: AttemptList | None = None
    lost: ListFound = ListFound.LOST
    saves: dict[str, tuple[SaveFacts, Origin]] = field(default_factory=dict)
    damaged: dict[str, Problem] = field(default_factory=dict)
    removed: list[SaveFacts] = field(default_factory=list)

    def facts(self) -> list[SaveFacts]:
        """Every save that is named here, whole or not, or removed."""
        broken = [one.save for one in self.damaged.values() if one.save is not None]
        return [*(save for save, _ in self.saves.values()), *broken, *self.removed]


@dataclass
class Mirror(Place):
    """A mirror; ``up``: it answers now."""

    url: str = M
    up: bool = True
    before: AttemptList | None = None


@dataclass
class Root(Place):
    """A root, its table, and the attempt that runs in it."""

    identity: str = ""
    mirrors: tuple[str, ...] = ()
    last_mirrors: tuple[str, ...] = ()
    completed: frozenset[str] = frozenset()
    uploaded: set[str] = field(default_factory=set)
    met: set[str] = field(default_factory=set)
    live: str = ""
    live_knows: frozenset[str] = frozenset()
    kept_copy: Root | None = None


@dataclass
class World:
    """All places, and what is true."""

    mirrors: dict[str, Mirror]
    roots: list[Root]
    persistent: Place = field(default_factory=Place)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    saves: dict[str, SaveFacts] = field(default_factory=dict)
    clock: int = 0

    def fresh(self, what: str) -> str:
        """Return a new id."""
        self.clock += 1
        return id_of(f"{what} {self.clock}")

    # -- what a start sees -----------------------------------------------------------------------------------

    def see(self, root: Root, *, silent: Iterable[str] = (), unseen: Iterable[str] = ()) -> Evidence:
        """Return the evidence of a root now; ``silent`` do not answer, ``unseen`` were never configured."""
        urls = [url for url in root.mirrors if url not in unseen]
        required = [url for url in urls if url != O] or urls
        rows = [self._disk(root)]
        for url in urls:
            was = url in root.last_mirrors and url != O
            if url in silent or not self.mirrors[url].up:
                rows.append(Row(url, "mirror", Reach.SILENT, "503", url in required, was))
            else:
                rows.append(replace(self._mirror(self.mirrors[url]), required=url in required, was_required=was))
        for url in sorted({*root.last_mirrors} - {*urls, *unseen}):
            rows.append(Row(url, "mirror", Reach.DROPPED, was_required=url != O))
        if self.persistent.saves or self.persistent.damaged:
            rows.append(self._row(self.persistent, KEPT, "persistent", {Voice.COUNTS: self._counts(self.persistent)}))
        return Evidence(tuple(rows), root.identity)

    def _disk(self, root: Root) -> Row:
        counts = {save.attempt for save, origin in root.saves.values() if origin is not Origin.STAGED}
        counts |= {one.save.attempt for one in root.damaged.values() if one.save is not None}
        listed = root.listing.attempts if root.listing is not None else ()
        counts |= {one.parent.attempt for one in listed if one.parent is not None and one.root == root.identity}
        completed = root.completed if root.listing is not None else frozenset()
        voices = {Voice.COUNTS: counts, Voice.COMPLETED: completed, Voice.UPLOADED: root.uploaded}
        return self._row(root, DISK, "disk", voices | {Voice.FENCED_US: root.met})

    def _mirror(self, mirror: Mirror) -> Row:
        return self._row(mirror, mirror.url, "mirror", {Voice.COUNTS: self._counts(mirror)})

    def _counts(self, place: Place) -> set[str]:
        return {save.attempt for save in place.facts()}

    def _row(self, place: Place, name: str, sort: str, voices: dict[Voice, Iterable[str]]) -> Row:
        heard: dict[str, set[Voice]] = {}
        for one in place.listing.attempts if place.listing is not None else ():
            heard.setdefault(one.id, set()).add(Voice.CLAIMED)
        for save in [save for save, _ in place.saves.values()] + [p.save for p in place.damaged.values() if p.save]:
            if Voice.CLAIMED not in heard.setdefault(save.attempt, set()):
                heard[save.attempt].add(Voice.NAMED)
        for voice, group in voices.items():
            for one in group:
                if voice is not Voice.COUNTS or one in heard:  # a tombstone does not tell what its attempt was
                    heard.setdefault(one, set()).add(voice)
        listed = [
            replace(self.attempts[one], by_person=False, root="", required=())
            if said <= _OF_METAS
            else self.attempts[one]
            for one, said in heard.items()
        ]
        lost = place.lost if any(Voice.NAMED in one for one in heard.values()) else ListFound.NONE
        return Row(
            name,
            sort,  # type: ignore[arg-type]
            listed=ListFound.SOUND if place.listing is not None else lost if sort != "persistent" else ListFound.NONE,
            run_id=RUN if heard else None,
            requirements=place.listing.requirements if place.listing is not None else (),
            heard=tuple(Heard(one, frozenset(heard[one.id])) for one in listed),
            copies=tuple(Copy(save, origin) for save, origin in place.saves.values()),
            problems=tuple(place.damaged.values()),
            removed=tuple(save.save_id for save in place.removed),
        )

    # -- what happens ----------------------------------------------------------------------------------------

    def start(self, root: Root, wish: Wish) -> None:
        """Start by the rules; a start that refuses leaves no trace."""
        root.live = ""
        seen = self.see(root)
        move = next_move(seen, wish)
        if not isinstance(move, Try | Scratch):
            return
        chosen = move.save if isinstance(move, Try) else None
        parent = SaveRef(chosen.attempt, chosen.number, chosen.step, chosen.save_id) if chosen is not None else None
        entry = Attempt(self.fresh("attempt"), 0, parent, by_person=move.by_person)
        needs_all = move.needs_all if isinstance(move, Try) else True
        adopted = move.adopt if isinstance(move, Try) else ()
        claim = claim_from(seen, entry, RUN, needs_all=needs_all, adopted=adopted)
        answering = {row.place for row in seen.answering()}
        if not set(claim.needs) <= answering:
            return
        self.attempts[entry.id] = claim.attempt
        root.listing = claim.root_list
        for url in root.mirrors:
            if url in answering:
                mirror = self.mirrors[url]
                mirror.before, mirror.listing = mirror.listing, mirror_list(claim, mirror.listing)
        if chosen is not None and chosen.save_id not in root.saves:
            root.damaged.pop(chosen.save_id, None)
            root.saves[chosen.save_id] = (chosen, Origin.STAGED)
        if needs_all:
            root.completed |= {entry.id}
            root.listing = replace(root.listing, completed=tuple(sorted(root.completed)))
        root.last_mirrors = root.mirrors
        root.live, root.live_knows = entry.id, claim.known

    def save(self, root: Root, kinds: tuple[Kind, ...], ahead: int) -> None:
        """Save in the attempt that runs in a root."""
        attempt = self.attempts[root.live]
        mine = [save for save in self.saves.values() if save.attempt == attempt.id]
        last = max((save.step for save in mine), default=attempt.parent.step if attempt.parent is not None else 0)
        save = SaveFacts(self.fresh("save"), attempt.id, len(mine) + 1, last + ahead, kinds)
        self.saves[save.save_id] = save
        root.saves[save.save_id] = (save, Origin.SAVED_HERE)
        if kinds == ("emergency",):
            self.persistent.saves[save.save_id] = (save, Origin.REMOTE)

    def upload(self, root: Root, url: str) -> None:
        """Commit what the running attempt saved on a mirror, as far as it may."""
        mirror = self.mirrors[url]
        strange = {one.id for one in mirror.listing.attempts} - root.live_knows if mirror.listing is not None else set()
        if strange:
            root.met |= strange
            root.live = ""
            return
        for save in self._to_upload(root, mirror):
            if save.attempt != root.live:
                continue
            verdict = may_commit(self.see(root), save.attempt)
            if verdict.may == "fenced":
                root.live = ""
            if verdict.may != "commit":
                return
            listed = (
                [one for one in root.listing.attempts if one.id == root.live or not one.by_person]
                if root.listing
                else []
            )
            ours = AttemptList(RUN, tuple(listed), root.listing.requirements if root.listing else ())
            mirror.listing = merge_attempts(mirror.listing, ours) if mirror.listing is not None else ours
            self._commit(root, mirror, save)

    def drain(self, root: Root, url: str) -> None:
        """Commit what a root has on a mirror, while nothing runs there."""
        mirror = self.mirrors[url]
        for save in self._to_upload(root, mirror):
            seen = self.see(root)
            if may_drain(seen, url, save).may == "commit":
                mirror.listing = drained_list(seen, url, self.attempts[save.attempt], RUN, mirror.listing)
                self._commit(root, mirror, save)

    def _to_upload(self, root: Root, mirror: Mirror) -> list[SaveFacts]:
        gone = {save.save_id for save in mirror.facts()}
        here = [save for save, origin in root.saves.values() if origin is not Origin.STAGED]
        return [save for save in here if save.save_id not in gone and save.kinds != ("emergency",)]

    def _commit(self, root: Root, mirror: Mirror, save: SaveFacts) -> None:
        mirror.saves[save.save_id] = (save, Origin.REMOTE)
        root.uploaded.add(save.attempt)

    def lose(self, root: Root) -> None:
        """Lose a disk."""
        root.__dict__.update(Root(identity=self.fresh("root"), mirrors=root.mirrors).__dict__)

    def copy_root(self, root: Root) -> None:
        """Keep a copy of a root, which may be restored later."""
        root.kept_copy = None
        root.kept_copy = copy.deepcopy(root)

    def restore(self, root: Root) -> None:
        """Restore a root from its copy: its identity is another, and it made nothing here."""
        older = root.kept_copy
        if older is None:
            return
        root.__dict__.update(copy.deepcopy(older).__dict__)
        root.identity, root.live, root.uploaded, root.met = self.fresh("root"), "", set(), set()
        root.saves = {
            one: (save, Origin.COPIED if origin is Origin.SAVED_HERE else origin)
            for one, (save, origin) in root.saves.items()
        }

    def damage(self, place: Place, save_id: str, how: str) -> None:
        """A save is not whole any more, or cannot be read."""
        save, _ = place.saves.pop(save_id)
        name = f"meta_{save.step:06d}-{save_id[:8]}"
        hindrance = "unreadable" if how == "unreadable" else ""
        facts = save if how != "meta" else None
        place.damaged[save_id] = Problem(name, how, save.step, save_id, save.kinds, facts, hindrance)  # type: ignore[arg-type]

    def retire(self, mirror: Mirror) -> None:
        """Retention removes the oldest save of the lineage from a mirror, if that has two newer ones."""
        whole = Root(listing=mirror.listing, mirrors=tuple(self.mirrors))
        kept = [save for save in count(self.see(whole)).order.in_order() if save.save_id in mirror.saves]
        if len(kept) > 2:
            mirror.removed.append(mirror.saves.pop(kept[0].save_id)[0])


KINDS: tuple[tuple[Kind, ...], ...] = (("dcp",), ("dcp", "model"), ("model",), ("emergency",))
CALM = ["start", "save", "save", "upload", "upload", "goes on", "goes on", "goes on", "up or down", "up or down", "die"]
EVENTS = [
    *CALM,
    *[
        "drain",
        "damage",
        "damage",
        "die",
        "lose",
        "copy",
        "restore",
        "damage",
        "a person",
        "list",
        "configure",
        "retire",
        "stage",
    ],
]


@st.composite
def worlds(draw: st.DrawFn, *, calm: bool = False) -> World:
    """Return a world after a history; calm: nothing was damaged, lost or reconfigured."""
    urls = (M, *draw(st.sampled_from([(), (N,), (N,), (O,), (N, O)])))
    world = World({url: Mirror(url=url) for url in urls}, [])
    world.roots = [Root(identity=world.fresh("root"), mirrors=urls) for _ in range(2)]
    root = world.roots[0]
    for event in [
        "start",
        "save",
        "upload",
        *draw(st.lists(st.sampled_from(CALM if calm else EVENTS), min_size=4, max_size=24)),
    ]:
        if (
            event in ("start", "goes on", "a person", "drain", "lose", "restore", "configure", "copy")
            and len(world.attempts) > 0
        ):
            root = draw(st.sampled_from(world.roots))
        mirror = world.mirrors[draw(st.sampled_from(urls))]
        match event:
            case "start" if len(world.attempts) < 5:
                world.start(root, Wish())
            case "goes on" if len(world.attempts) < 5:
                world.start(root, Wish())
                if root.live:
                    world.save(root, draw(st.sampled_from(KINDS)), 100)
                if root.live and mirror.up and mirror.url in root.mirrors:
                    world.upload(root, mirror.url)
            case "a person" if len(world.attempts) < 5:
                named = [save.save_id for save in world.saves.values()]
                steps = [save.step for save in world.saves.values()]
                world.start(root, Wish(draw(st.sampled_from(["scratch", *named, *steps])), force=True))
            case "save" if root.live:
                world.save(root, draw(st.sampled_from(KINDS)), draw(st.sampled_from([0, 100, 100, 200])))
            case "upload" if root.live and mirror.up and mirror.url in root.mirrors:
                world.upload(root, mirror.url)
            case "drain" if not root.live and mirror.up and mirror.url in root.mirrors and root.listing is not None:
                world.drain(root, mirror.url)
            case "up or down":
                mirror.up = not mirror.up
            case "die":
                root.live = ""
            case "lose":
                world.lose(root)
            case "copy":
                world.copy_root(root)
            case "restore":
                world.restore(root)
            case "damage":
                place: Place = draw(st.sampled_from([root, mirror, world.persistent]))
                if place.saves:
                    how = draw(st.sampled_from(["torn", "meta", "unreadable"]))
                    world.damage(place, draw(st.sampled_from(sorted(place.saves))), how)
            case "list":
                place = draw(st.sampled_from([root, mirror]))
                if place is mirror and mirror.before is not None and draw(st.booleans()):
                    mirror.listing = mirror.before
                else:
                    place.listing, place.lost = None, draw(st.sampled_from([ListFound.LOST, ListFound.BROKEN]))
                    root.completed = frozenset() if place is root else root.completed
            case "configure" if len(urls) > 1:
                root.mirrors = draw(st.sampled_from([urls, urls[1:], urls[:1]]))
            case "retire":
                world.retire(mirror)
            case "stage" if mirror.saves:
                save, _ = mirror.saves[draw(st.sampled_from(sorted(mirror.saves)))]
                root.saves.setdefault(save.save_id, (save, Origin.STAGED))
    return world
