"""What a start sees: the catalogs of the disk and of the mirrors that answered, taken together.

Rules:
* A copy on the disk counts only if it holds all that the save has of its kind: what ``stage`` brought for evaluation
  has no random numbers and no data position, and training does not continue from that.
* What is whole in one place is no problem in another.
* Saves of another run are never candidates, and never nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, NotAuthorised, StorePermanent, Temporary
from ckptmirror.core.lineage import Lineage, SaveFacts, lineage
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta
from ckptmirror.core.resumption import DISK, Problem, unexplained
from ckptmirror.flow.places.catalog import Catalog, local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.reconcile import REMOVED_REASON, being_brought
from ckptmirror.flow.start.claim import RunClaim
from ckptmirror.local.uploads import UploadsTable

__all__ = ["Places", "look_everywhere"]


@dataclass
class Places:
    """Everything the leader sees: the catalogs of the disk and of the mirrors that answered.

    Attributes:
        silent: Mirrors that did not answer, with the reason.
        unfinished: The save whose copy on the disk an earlier start was mending when it was killed: files of it may
            be broken still, so a mirror's comes first.
        persistent: The emergency snapshots in the persistent directory, if there is one.
        save_ids: Whose meta lies under which name, with its place before it, as far as the table knows.
    """

    run_id: str
    disk: Catalog
    mirrors: dict[str, Catalog] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    save_ids: dict[str, str] = field(default_factory=dict)
    unfinished: str | None = None
    persistent: Catalog | None = None

    def metas(self) -> dict[tuple[str, Kind], dict[str, Meta]]:
        """For each save id and kind: the meta by place, best place first."""
        found: dict[tuple[str, Kind], dict[str, Meta]] = {}
        elsewhere = [(catalog.place, catalog) for catalog in self._elsewhere()]
        for place, catalog in ((DISK, self.disk), *elsewhere):
            for meta in catalog.saves.values():
                for kind in meta.kinds if meta.run_id == self.run_id else ():
                    if place != DISK or self._holds_all(meta, kind):
                        found.setdefault((meta.save_id, kind), {})[place] = meta
        for (save_id, _), places in found.items():
            if save_id == self.unfinished and DISK in places:
                places[DISK] = places.pop(DISK)
        return found

    def went_on_from(self, newest: Attempt | None, told_here: AttemptList, heard_of: Collection[Attempt]) -> set[str]:
        """The saves on this disk that were made here, or that the newest attempt of the run continued from.

        None of them count if the root's own list does not tell of that attempt: then the run went on elsewhere, or the
        list is lost, and what lies here may have come from anywhere. Nor if it does not tell of a newer one that was
        heard of, undecided or when it fenced an attempt of this root: a mirror that is silent knows what became of it.

        Args:
            newest: The newest decided attempt of all that are known.
            told_here: The root's own list, as this start found it.
            heard_of: What all lists together told then, and what earlier attempts of this root have met.
        """
        told = {attempt.id for attempt in told_here.attempts}
        if newest is None or newest.id not in told:
            return set()
        if any((a.number, a.id) > (newest.number, newest.id) and a.id not in told for a in heard_of):
            return set()
        ours = [meta for meta in self.disk.saves.values() if meta.run_id == self.run_id]
        if any(meta.attempt.number >= newest.number and meta.attempt.id not in told for meta in ours):
            return set()  # somebody brought a save of an attempt that is at least as new
        parent = newest.parent.save_id if newest.parent is not None else None
        return {
            meta.save_id
            for meta in self.disk.saves.values()
            if (meta.staged_from is None and meta.attempt.id in told) or meta.save_id == parent
        }

    def _holds_all(self, meta: Meta, kind: Kind) -> bool:
        """Whether a local copy has every file that a resume from this kind needs."""
        if not meta.partial or meta.staged_from is None:
            return True
        mine = {names.untagged(artifact.path) for artifact in meta.artifacts_of(kind)}
        copies = [there.saves[meta.save_id] for there in self.mirrors.values() if meta.save_id in there.saves]
        if elsewhere := [copy for copy in copies if kind in copy.kinds]:
            return all({names.untagged(a.path) for a in other.artifacts_of(kind)} <= mine for other in elsewhere)
        name = names.SaveName(meta.step)
        needed = {name.extra(rank) for rank in range(meta.world_size)}
        return needed <= mine and (kind != "model" or name.optim(0) in mine)

    def order(self, attempts: Sequence[Attempt]) -> Lineage:
        """The lineage of all places together."""
        facts: dict[str, SaveFacts] = {}
        for (save_id, kind), metas in self.metas().items():
            meta = next(iter(metas.values()))
            kinds = facts[save_id].kinds if save_id in facts else ()
            facts[save_id] = SaveFacts(
                save_id=save_id, attempt=meta.attempt.id, number=meta.save_number, step=meta.step, kinds=(*kinds, kind)
            )
        return lineage([attempt for attempt in attempts if attempt.decided], list(facts.values()))

    def whole(self) -> set[str]:
        """The ids of the saves that can be resumed from in some place."""
        return {save_id for save_id, _ in self.metas()}

    def problems(self) -> dict[str, Problem]:
        """Everything of this run that looks like a save and is whole nowhere, by place and name."""
        found = dict(self.disk.problems) | (dict(self.persistent.problems) if self.persistent is not None else {})
        for url, catalog in self.mirrors.items():
            found |= {f"{url}/{name}": problem for name, problem in catalog.problems.items()}
        for name, problem in found.items():
            found[name] = replace(problem, save_id=problem.save_id or self.save_ids.get(name, ""))
        whole = self.whole()
        for meta in self.disk.saves.values():
            if meta.run_id == self.run_id and meta.save_id not in whole:
                name = f"{self.disk.place}/{names.SaveName(meta.step, meta.tag).meta}"
                found[name] = Problem.of(meta, f"a copy staged from {meta.staged_from} that lacks files of the save")
        return {
            name: problem
            for name, problem in found.items()
            if problem.save_id not in whole and (problem.meta is None or problem.meta.run_id == self.run_id)
        }

    def learn_save_ids(self, table: UploadsTable) -> None:
        """Look up whose metas those are that cannot be read."""
        self.save_ids = {f"{self.disk.place}/{row.meta_path}": row.save_id for row in table.saves()}
        if any(not problem.save_id and name not in self.save_ids for name, problem in self.disk.problems.items()):
            for moved in table.history():  # of a save that was brought under other names since
                if moved.path.startswith("meta_"):
                    self.save_ids.setdefault(f"{self.disk.place}/{moved.path}", moved.save_id)
        if any(not problem.save_id for there in self.mirrors.values() for problem in there.problems.values()):
            self.save_ids |= {
                f"{record.mirror}/{record.object or record.path}": record.save_id
                for record in table.records()
                if record.role == "meta"
            }

    def gone(self, table: UploadsTable, *, ever: bool = False) -> dict[str, Problem]:
        """Saves that the table knows as committed, and of which nothing is left in any place that answers.

        Args:
            table: Of this root.
            ever: Also those that were forgotten at an earlier start, before a mirror had them.
        """
        known = {row.save_id: (row.step, row.meta_path, row.kinds) for row in table.saves() if row.released}
        if ever:
            for moved in table.history():
                if moved.new is None and moved.reason == REMOVED_REASON and moved.path.startswith("meta_"):
                    known.setdefault(moved.save_id, (moved.step, moved.path, ("dcp", "model")))
        here = {meta.save_id for meta in self._all_metas()}
        here |= {stone for there in self.mirrors.values() for stone in there.tombstones}
        why = "the table knows it as committed here, and its meta is gone"
        return {
            f"{self.disk.place}/{path}": Problem(why, step, save_id, kinds)
            for save_id, (step, path, kinds) in known.items()
            if save_id not in here and f"{self.disk.place}/{path}" not in self.disk.problems
        }

    def remains(self) -> dict[str, Problem]:
        """What does not belong to any save of this run, and shows that the place is not empty."""
        found: dict[str, Problem] = {}
        catalogs = (self.disk, *self.mirrors.values())
        metas = self._all_metas()
        tombstones = [stone for there in catalogs for stone in there.tombstones.values()]
        for there in catalogs:
            told = {problem.step for problem in there.problems.values()}  # of a broken meta the files are loose
            loose = unexplained(there.others, metas, tombstones)
            found |= {f"{there.place}/{name}": one for name, one in loose.items() if one.step not in told}
            others = [*there.saves.values(), *(one.meta for one in there.problems.values() if one.meta is not None)]
            for meta in others:
                if meta.run_id != self.run_id:
                    name = f"{there.place}/{names.SaveName(meta.step, meta.tag).meta}"
                    found[name] = Problem.of(meta, f"a save of another run, {meta.run_id[:8]}")
        return found

    def attempts_to(self, meta: Meta) -> list[Attempt]:
        """The attempt of a save, and those before it, as far as metas tell of them."""
        known = {other.attempt.id: other.attempt for other in self._all_metas() if other.run_id == self.run_id}
        way = [meta.attempt]
        while way[-1].parent is not None and way[-1].parent.attempt in known:
            earlier = known[way[-1].parent.attempt]
            if earlier.number >= way[-1].number:
                break  # the data contradicts itself, which deciding will say
            way.append(earlier)
        return way

    def _elsewhere(self) -> list[Catalog]:
        return [*self.mirrors.values(), *([self.persistent] if self.persistent is not None else [])]

    def _all_metas(self) -> list[Meta]:
        catalogs = (self.disk, *self._elsewhere())
        broken = [problem.meta for there in catalogs for problem in there.problems.values()]
        return [meta for there in catalogs for meta in there.saves.values()] + [m for m in broken if m is not None]


def look_everywhere(
    root: Path, mirrors: Sequence[Mirror], claim: RunClaim, persistent: Catalog | None = None
) -> Places:
    """Look at the disk and at every mirror that answers; what is in the persistent directory was looked at before.

    Raises:
        StoreTemporary: A required mirror answered a moment ago, and does not any more.
    """
    places = Places(claim.run_id, local_catalog(root), unfinished=being_brought(root), persistent=persistent)
    for mirror in mirrors:
        if mirror.url in claim.unclaimed:
            places.silent[mirror.url] = claim.unclaimed[mirror.url]
            continue
        try:
            places.mirrors[mirror.url] = mirror_catalog(mirror)
        except (Temporary, NotAuthorised, BrokenMeta, StorePermanent) as error:
            if mirror.required:  # it answered a moment ago: what it holds is asked for, not guessed
                raise
            places.silent[mirror.url] = str(error)
    return places
