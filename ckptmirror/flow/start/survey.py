"""The survey of a start: it asks every place what it has and turns the answers into evidence. It knows no rule.

Rules:
* Nothing is written. A place's error becomes a value here: silent, or refused for good.
* Each mirror is asked once for all nodes of the job, all of them in parallel.
* A copy on the disk counts in a kind only if it has everything that a resume from that kind needs. A copy that
  ``stage`` brought for evaluation has no random state and no data position.
* A snapshot is what its ranks left, each a part of its own, whichever places have them: disks, or the persistent
  directory together with disks.
* A save of which each file is in some place can be put together, whatever else these places lack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ckptmirror.core import names
from ckptmirror.core.errors import (
    BrokenMeta,
    CkptMirrorError,
    IntegrityError,
    NewerFormat,
    NotSigned,
    StoreHangs,
    StorePermanent,
)
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.meta_merging import merge_copies
from ckptmirror.core.model import Attempt, AttemptList, Kind, Meta, top_names
from ckptmirror.core.problems import Explained, facts_of, unexplained
from ckptmirror.core.problems import Problem as FoundProblem
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.start.disks import identity_of, one_disk
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
    Sort,
    Voice,
)
from ckptmirror.core.start.lineage import attempts_of_metas
from ckptmirror.core.start.together import has_all, joined, shares_of, told_by
from ckptmirror.core.tensor_lists import loadable, lost_lists
from ckptmirror.core.uncommitted import parts_there
from ckptmirror.flow.places.attempt_lists import diverged_there, read_mirror_attempts
from ckptmirror.flow.places.catalog import Catalog, MetaCache, mirror_catalog, unread_problem
from ckptmirror.flow.places.mirrors import Mirror, counting, counting_rows
from ckptmirror.flow.places.uncommitted import read_parts
from ckptmirror.flow.retention.reconcile import REMOVED_REASON
from ckptmirror.flow.save.emergency_files import is_emergency
from ckptmirror.flow.start.disk_facts import DiskFacts
from ckptmirror.flow.start.patience import Patience
from ckptmirror.local.root_id import RootId

__all__ = ["Survey", "survey"]


@dataclass(frozen=True)
class Seen:
    """What one mirror answered.

    Attributes:
        attempts: Its list; None if it has no list, or one that cannot be trusted.
        listed: The condition of the list.
        generation: The generation of the list's object; 0 if there is none.
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
        seen: What each mirror answered, by URL.
    """

    evidence: Evidence
    metas: Mapping[tuple[str, str], Meta]
    seen: Mapping[str, Seen] = field(default_factory=dict)

    def without(self, places: Collection[str]) -> Survey:
        """Return the same without places that were asked."""
        rows = tuple(row for row in self.evidence.rows if row.place not in places)
        return replace(self, evidence=replace(self.evidence, rows=rows))


def survey(
    disks: Sequence[DiskFacts],
    mirrors: Sequence[Mirror],
    *,
    identity: RootId | None = None,
    persistent: Catalog | None = None,
    cache: MetaCache | None = None,
    reads_parts: bool = False,
    shares: bool = False,
    patience: Patience | None = None,
    awaited: Collection[str] = (),
) -> Survey:
    """Ask every place.

    Args:
        disks: What each node of the job knows of its disk, by node.
        mirrors: The configured mirrors, in order.
        identity: The identity of the job's roots; None: what follows from theirs.
        persistent: The contents of the persistent directory, if there is one.
        cache: Metas that were read from mirrors before.
        reads_parts: Whether to read the parts on mirrors of nodes whose disks are not of this job, where its disks have
            the others.
        shares: Whether nodes share what one of them downloads.
        patience: How long to wait for mirrors; None: for all as long as they are tried.
        awaited: Then the URLs of those that are waited for all the same.

    Raises:
        LineageError: A place without a list holds saves of several runs.
        ConfigError: The disks of the nodes hold several runs.
        StorePermanent: A required mirror refuses for good: there is no such bucket.
    """
    if patience is None:
        patience, awaited = Patience(), [mirror.url for mirror in mirrors]
    seen = patience.ask("saves", mirrors, awaited, partial(_ask, cache=cache), lambda error: Seen(error=error))
    if identity is None:
        own = [disk.identity for disk in disks]
        identity = RootId(identity_of([one.id for one in own]), all(one.is_first for one in own))
    parts = _parts_beside(disks, mirrors, seen) if reads_parts else _PartsBeside()
    return _Rows(disks, mirrors, seen, identity, persistent, parts, shares).survey()


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


@dataclass
class _PartsBeside:
    """The parts on mirrors that no disk has of saves of which disks have others, and no mirror the whole.

    Attributes:
        metas: Those that could be read.
        unread: Those that cannot be read, by mirror. Where one may be whole, no start goes back past its save.
        broken: Those that are damaged, by URL: they are as good as absent.
    """

    metas: list[Meta] = field(default_factory=list)
    unread: dict[str, list[Problem]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)


def _parts_beside(disks: Sequence[DiskFacts], mirrors: Sequence[Mirror], seen: dict[str, Seen]) -> _PartsBeside:
    """Read such parts. A mirror that does not answer any more is silent from then on."""
    here: dict[str, dict[int, Meta]] = {}
    for meta in (meta for disk in disks for meta in disk.catalog.metas()):
        if not meta.is_whole and not is_emergency(meta):
            here.setdefault(meta.save_id[:8], {})[meta.node] = meta
    catalogs = [(mirror, catalog) for mirror in mirrors if (catalog := seen[mirror.url].catalog) is not None]
    for save_id in (save_id for _, catalog in catalogs for save_id in catalog.known):
        here.pop(save_id[:8], None)
    found = _PartsBeside()
    for mirror, catalog in catalogs if here else ():
        try:
            for there in parts_there(catalog.others, catalog.known):
                ours = here.get(there.digits, {})
                absent = {node: name for node, name in there.names.items() if node not in ours}
                if ours and absent:
                    errors: dict[str, CkptMirrorError] = {}
                    found.metas += read_parts(mirror, replace(there, names=absent), errors)
                    other = next(iter(ours.values()))
                    problems = [_part_unread(mirror, name, other, error) for name, error in errors.items()]
                    found.unread.setdefault(mirror.url, []).extend(problems)
                    broken = [one for one, why in errors.items() if _is_damage(why)]
                    found.broken.update(f"{mirror.url}/{name}" for name in broken)
        except CkptMirrorError as error:
            seen[mirror.url] = Seen(seen[mirror.url].attempts, error=error)
    return found


def _is_damage(error: CkptMirrorError) -> bool:
    """Whether a part is damaged, and not one that another version or another key reads."""
    return isinstance(error, IntegrityError) and not isinstance(error, NewerFormat | NotSigned)


def _part_unread(mirror: Mirror, name: str, other: Meta, error: CkptMirrorError) -> Problem:
    """Return the problem with a part on a mirror, given another part of its save: so it may be known as superseded."""
    problem = _problem(f"{mirror.url}/{name}", unread_problem(name, error), other.save_id)
    return replace(problem, kinds=other.kinds, save=facts_of(other))


def _list_of(mirror: Mirror) -> tuple[AttemptList | None, int, ListFound, CkptMirrorError | None]:
    try:
        attempts, generation = read_mirror_attempts(mirror, mend=False)
    except NewerFormat as error:
        return None, 0, ListFound.NEWER, error
    except BrokenMeta as error:
        return None, read_mirror_attempts(mirror, mend=True)[1], ListFound.BROKEN, error
    return attempts, generation, ListFound.NONE if attempts is None else ListFound.SOUND, None


def _why(error: CkptMirrorError | None) -> str:
    """Return why a place did not answer; for one that hangs, with what to look at."""
    if isinstance(error, StoreHangs):
        return f"{error} {error.hint}"
    return str(error) if error is not None else ""


class _Rows:
    """Turns answers into rows."""

    def __init__(
        self,
        disks: Sequence[DiskFacts],
        mirrors: Sequence[Mirror],
        seen: Mapping[str, Seen],
        identity: RootId,
        persistent: Catalog | None,
        parts: _PartsBeside,
        shares: bool,
    ) -> None:
        self._disks = disks
        self._mirrors = mirrors
        self._seen = seen
        self._identity = identity
        self._persistent = persistent
        self._parts_on_mirrors = parts
        self._shares = shares
        self._remote = [one.catalog for one in seen.values() if one.catalog is not None]
        self._catalogs = [*(disk.catalog for disk in disks), *self._remote]
        self._metas = [meta for catalog in self._catalogs for meta in catalog.metas()]
        self._tombstones = [stone for catalog in self._catalogs for stone in catalog.tombstones.values()]
        self._sent = {
            f"{record.mirror}/{record.object or record.path}": record.save_id
            for disk in disks
            for record in disk.metas_sent
        }
        self._found: dict[tuple[str, str], Meta] = {}

    def survey(self) -> Survey:
        disks = [self._labelled(number, self._disk_row(disk)) for number, disk in enumerate(self._disks)]
        rows = [one_disk(self._joinable(disks)), *map(self._mirror_row, self._mirrors), *self._dropped_rows()]
        rows += self._persistent_rows()
        rows += self._anywhere_rows(rows)
        roots = frozenset(disk.identity.id for disk in self._disks if disk.identity.id)
        return Survey(Evidence(tuple(rows), self._identity.id, roots), self._found, self._seen)

    @cached_property
    def _explained(self) -> Explained:
        """What all metas explain: once for all disks, since each has a meta and looks at the names of its own."""
        return Explained.by(self._metas)

    # -- the disks -------------------------------------------------------------------------------------------

    def _joinable(self, rows: Sequence[Row]) -> list[Row]:
        """Merge the metas of the parts, and mark the parts that contradict one another."""
        metas: dict[str, list[Meta]] = {}
        for disk in self._disks:
            for problem in disk.catalog.problems.values():
                if problem.meta is not None and _is_part(problem, disk.run_id):
                    metas.setdefault(problem.meta.save_id, []).append(_whole_part(disk.catalog, problem.meta))
        wrong: dict[str, str] = {}
        for save_id, parts in metas.items():
            try:
                if (whole := joined(parts)) is not None:
                    self._found[(save_id, DISK)] = whole  # also where a disk has a copy
            except BrokenMeta as error:
                wrong[save_id] = str(error)
        return [
            replace(
                row,
                parts=tuple(
                    replace(one, kinds=(), why=wrong[one.save.save_id]) if one.save.save_id in wrong else one
                    for one in row.parts
                ),
            )
            for row in rows
        ]

    def _labelled(self, number: int, row: Row) -> Row:
        """Name the node in front of what is on its disk, where there are several."""
        if len(self._disks) == 1:
            return row
        where = f"node {number}: "
        return replace(
            row,
            why=where + row.why if row.why else "",
            problems=tuple(replace(one, name=where + one.name) for one in row.problems),
            parts=tuple(replace(one, name=where + one.name) for one in row.parts),
        )

    def _disk_row(self, disk: DiskFacts) -> Row:
        catalog, run_id = disk.catalog, disk.run_id
        listed = {attempt.id: attempt for attempt in disk.attempts.attempts} if disk.attempts is not None else {}
        copies, lacking = [], []
        for meta in self._of_run(catalog.saves.values(), run_id):
            kinds = tuple(kind for kind in meta.kinds if has_all(meta, kind, self._on_mirrors(meta.save_id)))
            if kinds:
                origin = self._origin(disk, meta, listed)
                copies.append(self._copy(DISK, meta, origin, kinds, meta.save_id == disk.bringing))
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
        parts = {name for name, one in catalog.problems.items() if _is_part(one, run_id)}
        readable = replace(catalog, problems={n: one for n, one in catalog.problems.items() if n not in parts})
        problems = [*self._problems(readable, run_id, self._learned_save_ids(disk), disk=True), *lacking]
        problems += self._gone(disk)
        completed = disk.attempts.completed if disk.attempts is not None else ()
        continued = {one.parent.save_id for one in listed.values() if one.id in completed and one.parent is not None}
        metas = self._of_run(catalog.metas(), run_id)
        counts = {
            meta.attempt.id
            for meta in metas
            if meta.is_whole
            and (meta.staged_from is None or meta.save_id in continued or disk.listed is not ListFound.SOUND)
        }
        uploaded = {record.save_id for record in disk.metas_sent if record.state is RecordState.VERIFIED}
        heard = self._heard(
            disk.attempts, metas, counts, {meta.attempt.id for meta in metas if meta.save_id in uploaded}
        )
        heard = [
            replace(one, voices=one.voices | {Voice(sign) for sign in disk.signs.get(one.attempt.id, ())})
            for one in heard
        ]
        heard += [Heard(attempt, frozenset({Voice.FENCED_US})) for attempt in disk.met.attempts]
        sent_on = {record.save_id for record in disk.metas_sent if record.state is not RecordState.SKIPPED}
        given_up = {record.save_id for record in disk.metas_sent} - sent_on
        found = self._parts(catalog, run_id, lambda meta: self._origin(disk, meta, listed))
        return replace(
            self._row(DISK, "disk", disk.attempts, disk.listed, disk.why, run_id),
            heard=tuple(heard),
            copies=tuple(copies),
            problems=tuple(problems),
            parts=tuple(replace(part, is_given_up=part.save.save_id in given_up) for part in found),
        )

    def _parts(self, catalog: Catalog, run_id: str | None, origin: Callable[[Meta], Origin]) -> Iterator[Part]:
        for name, problem in catalog.problems.items():
            meta = problem.meta
            if meta is None or not _is_part(problem, run_id):
                continue
            kinds = catalog.parts[meta.save_id].kinds if meta.save_id in catalog.parts else ()
            shares, of = shares_of(meta)
            whole = Part(
                facts_of(meta),
                kinds,
                shares,
                of,
                origin(meta),
                name,
                problem.why if kinds != meta.kinds else "",
                problem.hindrance,
                meta.world_size,
            )
            if not is_emergency(meta) or kinds:
                yield whole
                continue
            good = shares_of(_whole_part(catalog, meta))[0]  # of each rank alone
            if good:
                yield replace(whole, kinds=meta.kinds, shares=good, why="")
            yield replace(whole, shares=tuple(share for share in shares if share not in good))

    def _origin(self, disk: DiskFacts, meta: Meta, listed: Mapping[str, Attempt]) -> Origin:
        if meta.staged_from is not None:
            return Origin.STAGED
        made_by = listed[meta.attempt.id].root if meta.attempt.id in listed else ""
        ours = made_by == self._identity.id if made_by else disk.identity.is_first
        return Origin.SAVED_HERE if ours else Origin.COPIED

    def _on_mirrors(self, save_id: str) -> list[Meta]:
        return [catalog.saves[save_id] for catalog in self._remote if save_id in catalog.saves]

    def _gone(self, disk: DiskFacts) -> list[Problem]:
        """Return the saves that the table records as committed, but of which no answering place has anything left."""
        catalog = disk.catalog
        known = {row.save_id: (row.step, row.meta_path, row.kinds) for row in disk.saves if row.released}
        forgotten: dict[str, tuple[int, str, tuple[Kind, ...]]] = {}
        for moved in disk.metas_moved:
            if moved.new is None and moved.reason == REMOVED_REASON:
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
            row = self._row(mirror.url, "mirror", seen.attempts, seen.listed, _why(seen.error), None, reach)
            return replace(row, heard=tuple(self._heard(seen.attempts, (), ())))
        catalog = seen.catalog
        rebuilt = seen.attempts if seen.attempts is not None else attempts_of_metas(catalog.metas())
        run_id = rebuilt.run_id if rebuilt is not None else None
        metas = self._of_run(catalog.metas(), run_id)
        saves = self._of_run(catalog.saves.values(), run_id)
        row = self._row(mirror.url, "mirror", seen.attempts, seen.listed, _why(seen.error), run_id)
        heard = self._heard(seen.attempts, metas, {meta.attempt.id for meta in metas})
        diverged, broken = diverged_there(catalog.others), self._parts_on_mirrors.broken
        return replace(
            row,
            heard=tuple(
                replace(one, voices=one.voices | {Voice.DIVERGED}) if one.attempt.id in diverged else one
                for one in heard
            ),
            copies=tuple(self._copy(mirror.url, meta, Origin.REMOTE, meta.kinds) for meta in saves),
            problems=(*self._problems(catalog, run_id, self._sent), *self._parts_on_mirrors.unread.get(mirror.url, ())),
            removed=tuple(catalog.tombstones),
            parts_here=tuple(_parts_among(one for one in catalog.others if f"{mirror.url}/{one}" not in broken)),
        )

    def _dropped_rows(self) -> list[Row]:
        configured = {mirror.url for mirror in self._mirrors}
        return [
            Row(url, "mirror", Reach.DROPPED, "it is no longer configured", was_required=True)
            for url in sorted(self._was_required - configured)
        ]

    @cached_property
    def _was_required(self) -> set[str]:
        """Return the mirrors that counted at the last start and have saves. One that was only pushed to did not."""
        known = [(disk, [row for row in disk.mirrors if row.required or not row.pushed]) for disk in self._disks]
        return {url for disk, rows in known for url in counting_rows(rows) if url in disk.verified_on}

    # -- the persistent directory ----------------------------------------------------------------------------

    def _persistent_rows(self) -> list[Row]:
        catalog = self._persistent
        if catalog is None:
            return []
        rows = []
        runs = sorted({meta.run_id for meta in catalog.metas()})
        for run_id in runs:
            metas = self._of_run(catalog.metas(), run_id)
            saves = [whole for meta in metas if (whole := self._with_what_disks_have(catalog, meta)) is not None]
            counts = {meta.attempt.id for meta in (*metas, *saves) if meta.is_whole}
            rows.append(
                Row(
                    catalog.place,
                    "persistent",
                    run_id=run_id,
                    heard=tuple(self._heard(None, metas, counts)),
                    copies=tuple(self._copy(catalog.place, meta, Origin.REMOTE, meta.kinds) for meta in saves),
                    problems=tuple(
                        one for one in self._problems(catalog, run_id, {}, loose=False) if one.save is not None
                    ),
                    parts=tuple(self._parts(catalog, run_id, lambda _: Origin.REMOTE)),
                    parts_here=tuple(_snapshot_parts(catalog, run_id)),
                )
            )
        metas = [meta for disk in self._disks for meta in disk.catalog.metas() if is_emergency(meta)]
        here = {f"{catalog.place}/{top}" for meta in metas for top in top_names(meta.artifacts)}
        unknown = [
            one
            for one in self._problems(catalog, None, {}, loose=False)
            if one.save is None and one.name not in here  # else it is the unfinished copy of what a disk has
        ]
        if unknown:
            rows.append(Row(catalog.place, "persistent", problems=tuple(unknown)))
        return rows

    def _with_what_disks_have(self, kept: Catalog, meta: Meta) -> Meta | None:
        """Return a snapshot if the directory has it whole, or together with the disks; else None."""
        if meta.save_id in kept.saves:
            return meta
        places = [kept, *(disk.catalog for disk in self._disks)]
        metas = [(place, one) for place in places for one in place.metas() if one.save_id == meta.save_id]
        name = top_names(
            meta.artifacts
        )  # ranks that found no agreed name may have chosen two: then none is copied back
        found = [place.whole_ranks(one) for place, one in metas if top_names(one.artifacts) == name]
        with contextlib.suppress(BrokenMeta):
            return joined(found)
        return None

    # -- all places together ---------------------------------------------------------------------------------

    def _anywhere_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the row of what all places have together, of every save that is in several.

        Where nodes share what one of them gets from the only place, it may have been damaged on the way: then each gets
        its own from there. Of a snapshot, a rank's part has to be whole in one place; another row says so.
        """
        beside = [*self._remote, *([self._persistent] if self._persistent is not None else [])]
        places = list(enumerate([*(disk.catalog for disk in self._disks), *beside]))  # nodes may give disks one name
        runs = {row.run_id for row in rows if row.sort != "persistent"}
        metas: dict[str, dict[int, list[Meta]]] = {}
        for at, place in places:
            for meta in place.metas():
                if meta.run_id in runs:
                    metas.setdefault(meta.save_id, {}).setdefault(at, []).append(meta)
        sent: dict[str, list[Meta]] = {}
        for part in self._parts_on_mirrors.metas:
            sent.setdefault(part.save_id, []).append(part)
        here = {copy.save.save_id: copy for copy in rows[0].copies}
        entire = {copy.save.save_id: copy.save.kinds for row in rows for copy in row.copies if not copy.no_proof}
        with_loose = [at for at, place in places if place.loose]
        copies, heard = [], []
        for save_id, found in metas.items():
            parts = sent.get(save_id, [])
            of_places = [*(meta for of_place in found.values() for meta in of_place), *parts]
            save = told_by(of_places, self._found.get((save_id, DISK)), self._on_mirrors(save_id))
            if save is None or (is_emergency(save) and save_id not in entire):
                continue
            is_shared = len(self._disks) > 1 and (self._shares or is_emergency(save))
            if len({*found, *with_loose}) < 2 and not is_shared:
                continue
            if entire.get(save_id) != save.kinds:
                there = {path for at, place in places for path in place.files_of(save, found.get(at, ()))}
                kinds, lists = loadable(save, [one for one in save.artifacts if names.plain(one.path) not in there])
                save = save.narrowed(kinds, lists)
            if parts:  # every node has committed its part, so the save is committed
                heard.append(Heard(save.attempt, frozenset({Voice.NAMED, Voice.COUNTS})))
            if save.kinds:
                copy = here.get(save_id)
                origin = copy.origin if copy is not None else self._origin_of(save, found)
                copies.append(self._copy(ANYWHERE, save, origin, save.kinds))
        return [Row(ANYWHERE, "anywhere", heard=tuple(heard), copies=tuple(copies))] if copies or heard else []

    def _origin_of(self, save: Meta, found: Mapping[int, Sequence[Meta]]) -> Origin:
        """Return how a save got to the disks of this job, given the metas there; whatever is left of it."""
        made: set[int] = set()
        for at, disk in enumerate(self._disks):
            attempts = disk.attempts.attempts if at in found and disk.attempts is not None else ()
            listed = {attempt.id: attempt for attempt in attempts}
            own = [meta for meta in found.get(at, ()) if self._origin(disk, meta, listed) is Origin.SAVED_HERE]
            made.update(*(shares_of(meta)[0] for meta in own))
        return Origin.SAVED_HERE if len(made) == shares_of(save)[1] else Origin.REMOTE

    # -- what the rows have in common ------------------------------------------------------------------------

    def _row(
        self,
        place: str,
        sort: Sort,
        attempts: AttemptList | None,
        listed: ListFound,
        why: str,
        run_id: str | None,
        reach: Reach = Reach.ANSWERED,
    ) -> Row:
        required = counting([(mirror.url, mirror.required) for mirror in self._mirrors])
        return Row(
            place,
            sort,
            reach,
            why=why,
            required=place in required,
            was_required=place in self._was_required,
            listed=listed,
            run_id=run_id,
            requirements=attempts.requirements if attempts is not None else (),
        )

    def _of_run(self, metas: Iterable[Meta], run_id: str | None) -> list[Meta]:
        return [meta for meta in metas if meta.run_id == run_id]

    def _heard(
        self,
        attempts: AttemptList | None,
        metas: Iterable[Meta],
        counts: Collection[str],
        uploaded: Collection[str] = (),
    ) -> list[Heard]:
        listed = attempts if attempts is not None else AttemptList("")
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
        on_another_disk = self._found.get((meta.save_id, place))
        self._found[(meta.save_id, place)] = merge_copies(on_another_disk, meta) if on_another_disk else meta
        no_proof = bool(lost_lists(meta))
        return Copy(replace(facts_of(meta), kinds=kinds), origin, unfinished, meta.world_size, no_proof)

    def _problems(
        self,
        catalog: Catalog,
        run_id: str | None,
        save_ids: Mapping[str, str],
        *,
        loose: bool = True,
        disk: bool = False,
    ) -> list[Problem]:
        def named(name: str) -> str:
            return name if disk or not loose else f"{catalog.place}/{name}"

        found = []
        for name, problem in catalog.problems.items():
            if problem.meta is not None and problem.meta.run_id != run_id:
                continue  # below
            found.append(_problem(named(name), problem, save_ids.get(named(name), "")))
        steps = {problem.step for problem in catalog.problems.values()}  # the files of a broken meta look loose
        if loose:
            left = unexplained(catalog.others, self._explained, self._tombstones)
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

    def _learned_save_ids(self, disk: DiskFacts) -> dict[str, str]:
        """Return the save ids of a disk's metas that cannot be read, as far as the table knows them."""
        place = disk.catalog.place
        found = {f"{place}/{row.meta_path}": row.save_id for row in disk.saves}
        for moved in disk.metas_moved:  # the save may have been brought under other names since
            found.setdefault(f"{place}/{moved.path}", moved.save_id)
        return found


def _parts_among(listed: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in listed:
        parsed = names.parse_name(name)
        if parsed is not None and parsed.role == "part":
            yield parsed.tag, parsed.part - 1


def _snapshot_parts(catalog: Catalog, run_id: str) -> Iterator[tuple[str, int]]:
    for meta in (problem.meta for problem in catalog.problems.values()):
        if meta is not None and meta.run_id == run_id:
            yield from ((meta.save_id[:8], rank) for rank in shares_of(meta)[0])


def _is_part(problem: FoundProblem, run_id: str | None) -> bool:
    """Whether it is a part of a save of this run: what one of several nodes wrote, or what is left of a snapshot."""
    meta = problem.meta
    return meta is not None and meta.run_id == run_id and (is_emergency(meta) or not meta.is_whole)


def _whole_part(catalog: Catalog, meta: Meta) -> Meta:
    """Return what is whole of a part: of a snapshot, that of each rank is a part of its own."""
    return catalog.whole_ranks(meta) if is_emergency(meta) else meta


def _problem(name: str, found: FoundProblem, save_id: str) -> Problem:
    facts = facts_of(found.meta) if found.meta is not None else None
    return Problem(name, found.why, found.step, found.save_id or save_id, found.kinds, facts, found.hindrance)
