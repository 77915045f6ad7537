"""The survey of a start: it asks every place what it has and turns the answers into evidence. It knows no rule.

Rules:
* Nothing is written. A place's error becomes a value here: silent, or refused for good.
* Each mirror is asked once, all of them in parallel.
* A copy on the disk counts in a kind only if it has everything that a resume from that kind needs. A copy that
  ``stage`` brought for evaluation has no random state and no data position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, CkptMirrorError, IntegrityError, NewerFormat, StoreHangs, StorePermanent
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta
from ckptmirror.core.problems import Problem as FoundProblem
from ckptmirror.core.problems import facts_of, unexplained
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.start.evidence import DISK, Copy, Evidence, Heard, ListFound, Origin, Problem, Row, Voice
from ckptmirror.core.start.lineage import attempts_of_metas
from ckptmirror.flow.places.attempt_lists import met_here, read_local_attempts, read_mirror_attempts
from ckptmirror.flow.places.catalog import Catalog, MetaCache, local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror, counting, counting_rows
from ckptmirror.flow.retention.reconcile import REMOVED_REASON, being_brought
from ckptmirror.local.root_id import RootId
from ckptmirror.local.uploads import UploadsTable

__all__ = ["Survey", "survey"]


@dataclass(frozen=True)
class Seen:
    """What one place answered.

    Attributes:
        attempts: Its list; None if it has no list, or one that cannot be trusted.
        listed: The condition of the list.
        generation: The generation of the list's object on a mirror; 0 if there is none.
        catalog: The saves that it has; None if it did not answer.
        error: Why it did not answer, or why its list cannot be trusted.
    """

    attempts: AttemptList | None = None
    listed: ListFound = ListFound.NONE
    generation: int = 0
    catalog: Catalog | None = None
    error: CkptMirrorError | None = None


@dataclass(frozen=True)
class Survey:
    """The evidence, and the values behind it.

    Attributes:
        metas: Every meta, by save id and place.
        seen: What each place answered, by name: ``DISK``, or a mirror's URL.
    """

    evidence: Evidence
    metas: Mapping[tuple[str, str], Meta]
    seen: Mapping[str, Seen] = field(default_factory=dict)


def survey(
    root: Path,
    mirrors: Sequence[Mirror],
    table: UploadsTable | None,
    identity: RootId,
    persistent: Catalog | None = None,
    cache: MetaCache | None = None,
) -> Survey:
    """Ask every place.

    Args:
        root: The local root, under its lock.
        mirrors: The configured mirrors, in order.
        table: The root's table; None if it has none.
        identity: The root's identity.
        persistent: The contents of the persistent directory, if there is one.
        cache: Metas that were read from mirrors before.

    Raises:
        LineageError: A place without a list holds saves of several runs.
        StorePermanent: A required mirror refuses for good: there is no such bucket.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(mirrors))) as pool:
        answers = list(pool.map(lambda mirror: _ask(mirror, cache), mirrors))
    seen = {DISK: _look_here(root)} | {mirror.url: one for mirror, one in zip(mirrors, answers, strict=True)}
    return _Rows(root, mirrors, seen, table, identity, persistent).survey()


def _ask(mirror: Mirror, cache: MetaCache | None) -> Seen:
    attempts = None
    try:
        attempts, generation, listed, error = _list_of(mirror)
        catalog = mirror_catalog(mirror, with_attempts=False, cache=cache)
    except CkptMirrorError as failure:
        is_tolerated = isinstance(failure, StorePermanent) and not mirror.required
        if reach_after(failure) is Reach.ANSWERED and not is_tolerated:
            raise
        return Seen(attempts, error=failure)
    if listed is ListFound.NONE and catalog.metas():
        listed = ListFound.LOST
    return Seen(attempts, listed, generation, catalog, error)


def _list_of(mirror: Mirror) -> tuple[AttemptList | None, int, ListFound, CkptMirrorError | None]:
    try:
        attempts, generation = read_mirror_attempts(mirror, mend=False)
    except NewerFormat as error:
        return None, 0, ListFound.NEWER, error
    except BrokenMeta as error:
        return None, read_mirror_attempts(mirror, mend=True)[1], ListFound.BROKEN, error
    return attempts, generation, ListFound.NONE if attempts is None else ListFound.SOUND, None


def _look_here(root: Path) -> Seen:
    attempts, listed = None, ListFound.SOUND
    error: CkptMirrorError | None = None
    try:
        attempts = read_local_attempts(root)
    except NewerFormat as failure:
        listed, error = ListFound.NEWER, failure
    except (IntegrityError, OSError) as failure:
        listed, error = ListFound.BROKEN, BrokenMeta(f"{root / names.ATTEMPTS_NAME} is broken: {failure}")
    catalog = local_catalog(root, with_attempts=False)
    if attempts is None and listed is ListFound.SOUND:
        listed = ListFound.LOST if catalog.metas() else ListFound.NONE
    return Seen(attempts, listed, 0, catalog, error)


def _why(error: CkptMirrorError | None) -> str:
    """Return why a place did not answer; for one that hangs, with what to look at."""
    if isinstance(error, StoreHangs):
        return f"{error} {error.hint}"
    return str(error) if error is not None else ""


class _Rows:
    """Turns answers into rows."""

    def __init__(
        self,
        root: Path,
        mirrors: Sequence[Mirror],
        seen: Mapping[str, Seen],
        table: UploadsTable | None,
        identity: RootId,
        persistent: Catalog | None,
    ) -> None:
        self._root = root
        self._mirrors = mirrors
        self._seen = seen
        self._saves = table.saves() if table is not None else []
        self._history = table.history() if table is not None else []
        self._records = table.records() if table is not None else []
        self._verified = [record for record in self._records if record.state is RecordState.VERIFIED]
        self._known_mirrors = table.mirrors() if table is not None else []
        self._identity = identity
        self._persistent = persistent
        self._catalogs = [one.catalog for one in seen.values() if one.catalog is not None]
        self._metas = [meta for catalog in self._catalogs for meta in catalog.metas()]
        self._tombstones = [stone for catalog in self._catalogs for stone in catalog.tombstones.values()]
        self._save_ids = self._learned_save_ids()
        self._found: dict[tuple[str, str], Meta] = {}

    def survey(self) -> Survey:
        rows = [self._disk_row(), *map(self._mirror_row, self._mirrors), *self._dropped_rows()]
        rows += self._persistent_rows()
        return Survey(Evidence(tuple(rows), self._identity.id), self._found, self._seen)

    # -- the disk --------------------------------------------------------------------------------------------

    def _disk_row(self) -> Row:
        seen = self._seen[DISK]
        catalog = self._catalog(DISK)
        run_id = self._run_id(seen, catalog)
        unfinished = being_brought(self._root)
        listed = {attempt.id: attempt for attempt in seen.attempts.attempts} if seen.attempts is not None else {}
        copies, lacking = [], []
        for meta in self._of_run(catalog.saves.values(), run_id):
            kinds = tuple(kind for kind in meta.kinds if self._has_all(meta, kind))
            if kinds:
                copies.append(self._copy(DISK, meta, self._origin(meta, listed), kinds, meta.save_id == unfinished))
            else:
                lacking.append(
                    Problem(
                        f"{catalog.place}/{names.SaveName(meta.step, meta.tag).meta}",
                        f"a copy staged from {meta.staged_from} that lacks files of the save",
                        meta.step,
                        meta.save_id,
                        meta.kinds,
                        facts_of(meta),
                    )
                )
        problems = [*self._problems(DISK, catalog, run_id), *lacking, *self._gone(catalog)]
        completed = seen.attempts.completed if seen.attempts is not None else ()
        continued = {one.parent.save_id for one in listed.values() if one.id in completed and one.parent is not None}
        counts = {
            meta.attempt.id
            for meta in self._of_run(catalog.metas(), run_id)
            if meta.staged_from is None or meta.save_id in continued or seen.listed is not ListFound.SOUND
        }
        uploaded = {record.save_id for record in self._verified if record.role == "meta"}
        heard = self._heard(
            seen,
            self._of_run(catalog.metas(), run_id),
            counts,
            {meta.attempt.id for meta in catalog.metas() if meta.save_id in uploaded and meta.run_id == run_id},
        )
        if run_id is not None:
            heard += [Heard(attempt, frozenset({Voice.FENCED_US})) for attempt in met_here(self._root, run_id).attempts]
        row = self._row(DISK, "disk", seen, run_id)
        return replace(row, heard=tuple(heard), copies=tuple(copies), problems=tuple(problems))

    def _origin(self, meta: Meta, listed: Mapping[str, Attempt]) -> Origin:
        if meta.staged_from is not None:
            return Origin.STAGED
        made_by = listed[meta.attempt.id].root if meta.attempt.id in listed else ""
        ours = made_by == self._identity.id if made_by else self._identity.is_first
        return Origin.SAVED_HERE if ours else Origin.COPIED

    def _has_all(self, meta: Meta, kind: Kind) -> bool:
        """Whether a local copy has every file that a resume from this kind reads."""
        if not meta.partial or meta.staged_from is None:
            return True
        mine = {names.untagged(artifact.path) for artifact in meta.artifacts_of(kind)}
        copies = [c.saves[meta.save_id] for c in self._catalogs[1:] if meta.save_id in c.saves]
        if elsewhere := [copy for copy in copies if kind in copy.kinds]:
            return all({names.untagged(a.path) for a in other.artifacts_of(kind)} <= mine for other in elsewhere)
        name = names.SaveName(meta.step)
        needs_optim = kind == "model"
        if meta.world_size > len(mine) or (needs_optim and name.optim(0) not in mine):
            return False
        return all(name.extra(rank) in mine for rank in range(meta.world_size))

    def _gone(self, catalog: Catalog) -> list[Problem]:
        """Return the saves that the table records as committed, but of which no answering place has anything left."""
        known = {row.save_id: (row.step, row.meta_path, row.kinds) for row in self._saves if row.released}
        forgotten: dict[str, tuple[int, str, tuple[Kind, ...]]] = {}
        for moved in self._history:
            if moved.new is None and moved.reason == REMOVED_REASON and moved.path.startswith("meta_"):
                forgotten.setdefault(moved.save_id, (moved.step, moved.path, ("dcp", "model")))
        there = {meta.save_id for meta in self._metas} | {stone.save_id for stone in self._tombstones}
        if self._persistent is not None:
            there |= self._persistent.saves.keys()
        why = "the table knows it as committed here, and its meta is gone"
        return [
            Problem(f"{catalog.place}/{path}", why, step, save_id, kinds, is_save=save_id in known)
            for save_id, (step, path, kinds) in (forgotten | known).items()
            if save_id not in there and f"{catalog.place}/{path}" not in catalog.problems
        ]

    # -- mirrors ---------------------------------------------------------------------------------------------

    def _mirror_row(self, mirror: Mirror) -> Row:
        seen = self._seen[mirror.url]
        if seen.catalog is None:
            is_refused = seen.error is not None and reach_after(seen.error) is Reach.REFUSED
            reach = Reach.REFUSED if is_refused else Reach.SILENT
            return replace(self._row(mirror.url, "mirror", seen, None, reach), heard=tuple(self._heard(seen, (), ())))
        catalog = seen.catalog
        run_id = self._run_id(seen, catalog)
        metas = self._of_run(catalog.metas(), run_id)
        saves = self._of_run(catalog.saves.values(), run_id)
        row = self._row(mirror.url, "mirror", seen, run_id)
        return replace(
            row,
            heard=tuple(self._heard(seen, metas, {meta.attempt.id for meta in metas})),
            copies=tuple(self._copy(mirror.url, meta, Origin.REMOTE, meta.kinds) for meta in saves),
            problems=tuple(self._problems(mirror.url, catalog, run_id)),
            removed=tuple(catalog.tombstones),
        )

    def _dropped_rows(self) -> list[Row]:
        configured = {mirror.url for mirror in self._mirrors}
        return [
            Row(url, "mirror", Reach.DROPPED, "it is no longer configured", was_required=True)
            for url in sorted(self._was_required() - configured)
        ]

    def _was_required(self) -> set[str]:
        """Return the mirrors that counted at the last start and have saves."""
        used = {record.mirror for record in self._verified}
        return set(counting_rows(self._known_mirrors)) & used

    # -- the persistent directory ----------------------------------------------------------------------------

    def _persistent_rows(self) -> list[Row]:
        catalog = self._persistent
        if catalog is None:
            return []
        rows = []
        runs = sorted({meta.run_id for meta in catalog.metas()})
        for run_id in runs:
            saves = self._of_run(catalog.saves.values(), run_id)
            metas = self._of_run(catalog.metas(), run_id)
            rows.append(
                Row(
                    catalog.place,
                    "persistent",
                    run_id=run_id,
                    heard=tuple(self._heard(Seen(), metas, {meta.attempt.id for meta in metas})),
                    copies=tuple(self._copy(catalog.place, meta, Origin.REMOTE, meta.kinds) for meta in saves),
                    problems=tuple(
                        one
                        for one in self._problems(catalog.place, catalog, run_id, loose=False)
                        if one.save is not None
                    ),
                )
            )
        unknown = [one for one in self._problems(catalog.place, catalog, None, loose=False) if one.save is None]
        if unknown:
            rows.append(Row(catalog.place, "persistent", problems=tuple(unknown)))
        return rows

    # -- what the rows have in common ------------------------------------------------------------------------

    def _row(self, place: str, sort: str, seen: Seen, run_id: str | None, reach: Reach = Reach.ANSWERED) -> Row:
        required = counting([(mirror.url, mirror.required) for mirror in self._mirrors])
        attempts = seen.attempts
        return Row(
            place,
            "disk" if sort == "disk" else "mirror",
            reach,
            why=_why(seen.error),
            required=place in required,
            was_required=place in self._was_required(),
            listed=seen.listed,
            run_id=run_id,
            names_required=attempts.required if attempts is not None else (),
            forgets=attempts.forgotten if attempts is not None else (),
        )

    def _catalog(self, place: str) -> Catalog:
        catalog = self._seen[place].catalog
        assert catalog is not None
        return catalog

    def _run_id(self, seen: Seen, catalog: Catalog) -> str | None:
        if seen.attempts is not None:
            return seen.attempts.run_id
        rebuilt = attempts_of_metas(catalog.metas())
        return rebuilt.run_id if rebuilt is not None else None

    def _of_run(self, metas: Iterable[Meta], run_id: str | None) -> list[Meta]:
        return [meta for meta in metas if meta.run_id == run_id]

    def _heard(
        self, seen: Seen, metas: Iterable[Meta], counts: Collection[str], uploaded: Collection[str] = ()
    ) -> list[Heard]:
        listed = seen.attempts if seen.attempts is not None else AttemptList("")
        heard = {attempt.id: attempt for attempt in listed.attempts}
        voices: dict[str, set[Voice]] = {
            attempt.id: {Voice.CLAIMED if attempt.decided else Voice.UNDECIDED} for attempt in listed.attempts
        }
        for meta in metas:
            attempt = heard.setdefault(meta.attempt.id, meta.attempt)
            if not attempt.decided:
                heard[attempt.id] = meta.attempt
            voices.setdefault(meta.attempt.id, {Voice.NAMED})
        for one in counts:
            voices[one].add(Voice.COUNTS)
        for one in uploaded:
            voices[one].add(Voice.UPLOADED)
        for one in set(listed.completed) & voices.keys():
            voices[one].add(Voice.COMPLETED)
        return [Heard(heard[one], frozenset(said)) for one, said in voices.items()]

    def _copy(self, place: str, meta: Meta, origin: Origin, kinds: tuple[Kind, ...], unfinished: bool = False) -> Copy:
        self._found[(meta.save_id, place)] = meta
        return Copy(replace(facts_of(meta), kinds=kinds), origin, unfinished, meta.world_size)

    def _problems(self, place: str, catalog: Catalog, run_id: str | None, *, loose: bool = True) -> list[Problem]:
        def named(name: str) -> str:
            return name if place == DISK or not loose else f"{catalog.place}/{name}"

        found = []
        for name, problem in catalog.problems.items():
            if problem.meta is not None and problem.meta.run_id != run_id:
                continue  # below
            found.append(_problem(named(name), problem, self._save_ids.get(named(name), "")))
        steps = {problem.step for problem in catalog.problems.values()}  # the files of a broken meta look loose
        if loose:
            left = unexplained(catalog.others, self._metas, self._tombstones)
            found += [
                replace(_problem(f"{catalog.place}/{name}", one, ""), is_save=False)
                for name, one in left.items()
                if one.step not in steps
            ]
            for meta in catalog.metas():
                if meta.run_id != run_id:
                    name = f"{catalog.place}/{names.SaveName(meta.step, meta.tag).meta}"
                    why = f"a save of another run, {meta.run_id[:8]}"
                    found.append(Problem(name, why, meta.step, meta.save_id, meta.kinds, facts_of(meta), is_save=False))
        return found

    def _learned_save_ids(self) -> dict[str, str]:
        """Return the save ids of metas that cannot be read, as far as the table knows them."""
        here = self._catalog(DISK)
        found = {f"{here.place}/{row.meta_path}": row.save_id for row in self._saves}
        if any(not one.save_id and name not in found for name, one in here.problems.items()):
            for moved in self._history:  # the save may have been brought under other names since
                if moved.path.startswith("meta_"):
                    found.setdefault(f"{here.place}/{moved.path}", moved.save_id)
        if any(not one.save_id for there in self._catalogs[1:] for one in there.problems.values()):
            found |= {
                f"{record.mirror}/{record.object or record.path}": record.save_id
                for record in self._records
                if record.role == "meta"
            }
        return found


def _problem(name: str, found: FoundProblem, save_id: str) -> Problem:
    facts = facts_of(found.meta) if found.meta is not None else None
    return Problem(name, found.why, found.step, found.save_id or save_id, found.kinds, facts, found.hindrance)
