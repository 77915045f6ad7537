"""Catalog: the whole saves of a root or a mirror, ordered by the lineage.

Rules:
* A kind of a save is listed if and only if one valid meta exists and, in the same place, every artifact that a load of
  the kind needs exists with exactly its size (I2). Everything else is reported with the reason, and never chosen.
* A list of tensors that is lost is reported, and the save is listed without it (``core.tensor_lists``).
* A meta counts only under a name of its own save: elsewhere it would be a second one, or hide that save.
* A save counts as a copy (to keep, to send, to let another be deleted) only if all of its kinds are listed: ``whole``.
* What one of several nodes wrote of a save is a part. Its node keeps and sends it like a save, and nobody reads it as
  one: on a disk it is a problem for readers, until :meth:`Catalog.with_parts` takes it for a save.
* Nothing is ordered by time. A place that does not answer raises; it is not empty.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_or_tombstone_from_bytes
from ckptmirror.core.errors import (
    BrokenMeta,
    CkptMirrorError,
    IntegrityError,
    NewerFormat,
    NotAuthorised,
    NotSigned,
    ObjectNotFound,
    StorePermanent,
    StoreTemporary,
)
from ckptmirror.core.lost_parts import how_to_go_on, parts_lost, without_parts
from ckptmirror.core.model import Artifact, AttemptList, Kind, Meta, Tombstone
from ckptmirror.core.problems import Hindrance, Problem, facts_of
from ckptmirror.core.reach import Reach, reach_after
from ckptmirror.core.start.lineage import Lineage, attempts_of_metas, counted_by_a_reader, lineage, untaken
from ckptmirror.core.tensor_lists import loadable
from ckptmirror.flow.places.attempt_lists import listed_attempts, read_list_of_a_root, read_mirror_attempts
from ckptmirror.flow.places.mirrors import Mirror, opened_mirror
from ckptmirror.flow.places.object_match import why_differs
from ckptmirror.local.daemon_pool import run_jobs
from ckptmirror.local.inventory import Item, read_inventory
from ckptmirror.local.listing import Listing
from ckptmirror.local.root_id import read_root_id
from ckptmirror.stores import normalise_url
from ckptmirror.stores.base import ObjectInfo, Store

__all__ = [
    "Catalog",
    "MetaCache",
    "catalogs_on",
    "facts_of",
    "listed_among",
    "local_catalog",
    "mirror_catalog",
    "part_word",
    "read_mirror_meta",
    "rebuild_attempts",
    "unread_problem",
]

META_LIMIT_BYTES = 64 * 1024 * 1024
_READERS = 8
_FEW = 8  # up to this many single files are asked for one by one, more by a listing
_FEW_AMONG_OTHERS = 64  # the same for the files of one of several nodes: the listing has those of all nodes
_NAMED = 8  # as many ranks are named
_PAGE = 1000  # names in one answer
_OTHERS = 8  # names that a listing may have for each that is asked about


@dataclass(frozen=True)
class Catalog:
    """The saves of one place.

    Attributes:
        place: A root's path or a mirror's URL, for messages.
        attempts: The place's own list; empty if it has none.
        saves: By save id, each with only the kinds that are whole, and without lost lists of tensors.
        problems: Broken metas, and saves with the kinds that are not whole, by name (on a disk: by path).
        tombstones: Saves that retention removed, by save id.
        meta_names: On a mirror, the name of each listed save's meta, by save id.
        torn: The ids of the listed saves, and parts, of which something else is not whole.
        parts: On a disk, this node's parts of saves of several nodes, by save id, as ``saves``.
        damaged: What is damaged of each save that is not whole, by save id.
        others: On a disk, the names that look like a save's and that no meta names; on a mirror, all names.
        loose: The sizes of the files that look like a save's and that no meta here names, by path, in bytes.
        undecided: In a root, a person's attempts that were made there and that not every required mirror took.
    """

    place: str
    attempts: AttemptList | None
    saves: Mapping[str, Meta]
    problems: Mapping[str, Problem] = field(default_factory=dict)
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    meta_names: Mapping[str, str] = field(default_factory=dict)
    torn: frozenset[str] = frozenset()
    parts: Mapping[str, Meta] = field(default_factory=dict)
    damaged: Mapping[str, tuple[Artifact, ...]] = field(default_factory=dict)
    loose: Mapping[str, int] = field(default_factory=dict)
    undecided: frozenset[str] = frozenset()

    @property
    def whole(self) -> dict[str, Meta]:
        """The saves that are whole in all of their kinds, by save id."""
        return {save_id: meta for save_id, meta in self.saves.items() if save_id not in self.torn}

    def whole_ranks(self, snapshot: Meta) -> Meta:
        """Return what this place has of an emergency snapshot: the files of the ranks whose part is whole here."""
        if snapshot.save_id in self.saves or snapshot.save_id in self.parts:
            return snapshot
        damaged = self.damaged.get(snapshot.save_id, snapshot.artifacts)
        torn = {one.rank for one in damaged}
        return replace(snapshot, artifacts=tuple(one for one in snapshot.artifacts if one.rank not in torn))

    def address_of(self, meta: Meta) -> str:
        """Return the path of a listed save's meta, or its name on the mirror; of a snapshot, the path of its directory.

        On a mirror, the save's own name may be another save's.
        """
        own = names.SaveName(meta.step, meta.tag).meta
        if "://" in self.place:
            return self.meta_names.get(meta.save_id, own)
        if meta.kinds == ("emergency",):
            own = meta.artifacts[0].path.partition("/")[0] if meta.artifacts else ""
        return str(Path(self.place, own))

    def metas_of(self, save_id: str) -> list[Meta]:
        """Return every meta of a save that could be read; one that is not whole may have two."""
        return [meta for meta in self.metas() if meta.save_id == save_id]

    def files_of(self, save: Meta, metas: Sequence[Meta]) -> dict[str, Artifact]:
        """Return which files of a save are here in their full size, by their plain paths.

        A file that no meta here names may be one: what its meta said may be known from elsewhere.

        Args:
            save: All of the save.
            metas: What metas there are of it here.
        """
        if not metas:
            return self._loose_files_of(save)
        if not any(save.save_id in judged for judged in (self.saves, self.parts, self.damaged)):
            return {}  # another meta contradicts it
        damaged = self.damaged.get(save.save_id, ())
        wanted = {names.plain(one.path): one.digest for one in save.artifacts}
        here = {names.plain(one.path): one for meta in metas for one in meta.artifacts if one not in damaged}
        return {path: one for path, one in here.items() if path in wanted and one.digest.agrees_with(wanted[path])}

    def _loose_files_of(self, save: Meta) -> dict[str, Artifact]:
        found = {}
        for artifact in save.artifacts if self.loose else ():
            for path in _own_names(artifact.path, save.save_id):
                if self.loose.get(path) == artifact.digest.size_bytes:
                    found[names.plain(path)] = replace(artifact, path=path, object=None)
        return found

    def with_parts(self, besides: Collection[str] = ()) -> Catalog:
        """Return the catalog in which parts are saves, except ``besides``.

        For what keeps and sends them, not for what reads them.
        """
        parts = {save_id: meta for save_id, meta in self.parts.items() if save_id not in besides}
        whole = parts.keys() - self.torn
        problems = {name: one for name, one in self.problems.items() if one.save_id not in whole}
        left = {save_id: meta for save_id, meta in self.parts.items() if save_id in besides}
        return replace(self, saves={**self.saves, **parts}, parts=left, problems=problems)

    def without(self, exclude: Collection[str]) -> Catalog:
        """Return the catalog for a load without some parts of the state: what lost only their files is listed."""
        saves, problems = dict(self.saves), dict(self.problems)
        for name, problem in self.problems.items():
            damaged = self.damaged.get(problem.save_id)
            if problem.meta is None or not problem.meta.is_whole or damaged is None or problem.save_id in self.saves:
                continue
            left = without_parts(problem.meta, damaged, exclude)
            if left.kinds:
                saves[problem.save_id] = left
                problems[name] = replace(problem, kinds=tuple(k for k in problem.kinds if k not in left.kinds))
        return replace(self, saves=saves, problems=problems, torn=self.torn | (saves.keys() - self.saves.keys()))

    def metas(self) -> list[Meta]:
        """Return every meta that could be read, also those of saves that are not whole."""
        broken = [problem.meta for problem in self.problems.values() if problem.meta is not None]
        return [*self.saves.values(), *broken]

    @property
    def known(self) -> list[str]:
        """The ids of the saves that a meta or a tombstone names."""
        return [*self.tombstones, *(meta.save_id for meta in self.metas())]

    def lineage(self, attempts: AttemptList | None = None) -> Lineage:
        """Order the saves by ``attempts``, which then all count; None: by the place's own list and its metas.

        What counts then is decided by ``core.start.lineage.counted_by_a_reader``.
        """
        saves = [facts_of(meta) for meta in self.saves.values()]
        if attempts is not None:
            return lineage(attempts.attempts, saves)
        listed = self.attempts if self.attempts is not None else AttemptList("")
        return lineage(listed.attempts, saves, counted_by_a_reader(listed, self.metas(), self.undecided))


def _own_names(path: str, save_id: str) -> tuple[str, str]:
    """Return the names that a file of a save may have in a place: without the save's tag, and with it."""
    return names.untagged(path), names.tagged(names.untagged(path), save_id)


def local_catalog(root: Path, *, with_attempts: bool = True) -> Catalog:
    """List the root's saves; reads names, metas and sizes only."""
    inventory = read_inventory(root)
    problems = {str(item.path): _problem_of_item(root, item) for item in inventory.broken}
    problems |= {
        str(save.meta_path): _problem_in(
            save.meta,
            save.kinds,
            save.why + how_to_go_on(save.meta, parts_lost(save.meta, save.damaged) if not save.kinds else ()),
            "unreadable" if save.unreadable else "",
        )
        for save in inventory.incomplete
    }
    problems |= {
        str(save.meta_path): Problem.of(save.meta, part_word(save.meta))
        for save in inventory.saves
        if not save.meta.is_whole
    }
    torn = {one.meta.save_id: one.meta.narrowed(one.kinds, one.lost) for one in inventory.incomplete if one.kinds}
    found = {save.meta.save_id: save.meta for save in inventory.saves} | torn
    saves = {save_id: meta for save_id, meta in found.items() if meta.is_whole}
    parts = {save_id: meta for save_id, meta in found.items() if not meta.is_whole}
    others = [item.path.name for item in inventory.foreign if item.loose] + [path.name for path in inventory.legacy]
    attempts = listed_attempts(root) if with_attempts else None
    damaged = {one.meta.save_id: one.damaged for one in inventory.incomplete if one.damaged}
    return Catalog(
        str(root),
        attempts,
        saves,
        problems,
        others=tuple(others),
        torn=frozenset(torn),
        parts=parts,
        damaged=damaged,
        loose=_loose_files(root, others),
        undecided=_undecided_on(root, attempts),
    )


def _loose_files(root: Path, tops: Iterable[str]) -> dict[str, int]:
    listing = Listing(root)
    paths = [path for top in tops for path in (listing.files_below(top) if listing.is_dir(top) else [top])]
    return {path: size for path in paths if (size := listing.size_bytes(path)) is not None}


def _undecided_on(root: Path, attempts: AttemptList | None) -> frozenset[str]:
    """Return what a person began here and a mirror did not take. Of what others began, this list does not tell it."""
    found = untaken(attempts) if attempts is not None else []
    own = read_root_id(root).id if found else ""
    return frozenset(one.id for one in found if own and one.root == own)


def part_word(meta: Meta) -> str:
    """Say what a part is."""
    if meta.kinds == ("emergency",):
        there = {one.rank for one in meta.artifacts}
        count = meta.world_size - len(there)  # as the meta says, however many that is: no list of them all
        some = ", ".join(map(str, islice((rank for rank in range(meta.world_size) if rank not in there), _NAMED)))
        more = ", ..." if count > _NAMED else ""
        return f"{count} of {meta.world_size} ranks left nothing of it here (ranks {some}{more})"
    return f"node {meta.node} of {meta.nodes} nodes (counted from 0) wrote this; the others have the rest"


def _problem_in(meta: Meta, whole: Sequence[Kind], why: str, hindrance: Hindrance = "") -> Problem:
    """The problem of a save in the kinds that are not whole. In which a part is, tells nothing about its save."""
    if not whole:
        return Problem.of(meta, why, hindrance)
    kinds = tuple(kind for kind in meta.kinds if kind not in whole)
    if not kinds:
        return replace(Problem.of(meta, f"{why}; no load needs it", hindrance), kinds=())
    elsewhere = f"; in kind {'+'.join(whole)} it is whole" if meta.is_whole else ""
    return replace(Problem.of(meta, why + elsewhere, hindrance), kinds=kinds)


def _problem_of_item(root: Path, item: Item) -> Problem:
    parsed = names.parse_name(item.path.relative_to(root).parts[0])
    step = parsed.step if parsed is not None else None
    hindrance: Hindrance = "unreadable" if item.unreadable else ""
    if parsed is not None and parsed.role == "emergency":
        return Problem(item.why, step, kinds=("emergency",), hindrance=hindrance, not_signed=item.not_signed)
    return Problem(item.why, step, hindrance=hindrance, not_signed=item.not_signed)


MetaCache = dict[tuple[str, str, int], Meta | Tombstone]
"""Metas already read, by mirror, name and generation: an object of one generation never changes."""


def mirror_catalog(
    mirror: Mirror, *, step: int | None = None, with_attempts: bool = True, cache: MetaCache | None = None
) -> Catalog:
    """List the mirror's saves; only those of ``step``, if it is given and the mirror has a list of attempts.

    A lost list is rebuilt from all metas, whatever the step.

    Args:
        mirror: Whose saves.
        step: Only the saves of this step.
        with_attempts: Read the mirror's list of attempts too.
        cache: Metas already read; this call adds those that it reads.

    Raises:
        BrokenMeta: The list of attempts cannot be trusted.
        StoreTemporary: The mirror does not answer.
    """
    attempts = of_a_root = None
    if with_attempts and (attempts := read_mirror_attempts(mirror)[0]) is None:
        step, attempts = None, (of_a_root := read_list_of_a_root(mirror))
    prefix = "" if step is None else f"meta_{names.SaveName(step).stem}"
    listed = {info.name: info for info in mirror.store.list(prefix)}
    metas = [name for name in listed if (parsed := names.parse_name(name)) is not None and parsed.role == "meta"]
    if step is not None:
        metas = [name for name in metas if _step_of(name) == step]
    saves: dict[str, Meta] = {}
    problems: dict[str, Problem] = {}
    tombstones: dict[str, Tombstone] = {}
    meta_names: dict[str, str] = {}
    answers = _read_metas(mirror, [listed[name] for name in metas], cache if cache is not None else {})
    answers = [_of_its_name(name, answer) for name, answer in zip(metas, answers, strict=True)]
    found = [(name, meta) for name, meta in zip(metas, answers, strict=True) if isinstance(meta, Meta)]
    for name, answer in zip(metas, answers, strict=True):
        if isinstance(answer, Tombstone):
            tombstones[answer.save_id] = answer
        elif isinstance(answer, CkptMirrorError):
            problems[name] = unread_problem(name, answer)
    others = tuple(listed)
    if step is not None:
        listed = _objects_named(mirror.store, [one.object_name for _, meta in found for one in meta.artifacts])
    torn: list[tuple[str, Meta]] = []
    damaged: dict[str, tuple[Artifact, ...]] = {}
    for name, meta in found:
        missing = _missing(meta, listed)
        if missing and meta.save_id not in damaged:
            damaged[meta.save_id] = tuple(missing)
        if not meta.is_whole:
            problems[name] = Problem.of(meta, part_word(meta))
        elif missing:
            kinds, lost = loadable(meta, missing)
            problems[name] = _problem_in(meta, kinds, next(iter(missing.values())))
            if kinds:
                torn.append((name, meta.narrowed(kinds, lost)))
        elif meta.save_id in saves:
            problems[name] = Problem.of(meta, f"a second meta of save {meta.save_id[:8]}")
        else:
            saves[meta.save_id] = meta
            meta_names[meta.save_id] = name
    torn = [(name, meta) for name, meta in torn if meta.save_id not in saves]
    saves |= {meta.save_id: meta for _, meta in torn}
    meta_names |= {meta.save_id: name for name, meta in torn}
    ids = frozenset(meta.save_id for _, meta in torn)
    named = {one.object_name for _, meta in found for one in meta.artifacts}
    loose = {
        name: one.size_bytes
        for name, one in listed.items()
        if name not in named and names.parse_artifact_path(name) is not None
    }
    return Catalog(
        mirror.url,
        attempts,
        saves,
        problems,
        tombstones,
        others,
        meta_names,
        torn=ids,
        damaged=damaged,
        loose=loose,
        undecided=frozenset(one.id for one in untaken(of_a_root)) if of_a_root is not None else frozenset(),
    )


def catalogs_on(urls: Iterable[str]) -> list[Catalog]:
    """Return what each mirror that answers has."""
    found = []
    for url in dict.fromkeys(normalise_url(url) for url in urls):
        with opened_mirror(url, retry=False) as mirror, contextlib.suppress(CkptMirrorError):
            found.append(mirror_catalog(mirror))
    return found


def _of_its_name(name: str, answer: Meta | Tombstone | CkptMirrorError) -> Meta | Tombstone | CkptMirrorError:
    """Return what a meta's object holds; an error if that is the meta of a save that cannot have this name."""
    if isinstance(answer, CkptMirrorError):
        return answer
    own = [names.SaveName(answer.step, tag).meta for tag in ("", answer.save_id[:8])]
    return answer if name in own else BrokenMeta(f"It holds the meta of {own[0]}, save {answer.save_id[:8]}.")


def unread_problem(name: str, error: CkptMirrorError) -> Problem:
    """Return the problem of a place with a meta that could not be read."""
    not_signed = isinstance(error, NotSigned)
    return Problem(str(error), _step_of(name), hindrance=_hindrance(error), not_signed=not_signed)


def _hindrance(error: CkptMirrorError) -> Hindrance:
    """Say what hinders reading a meta that may still be valid; "" if the meta itself is broken or gone."""
    if reach_after(error) is Reach.REFUSED:
        return "refused"
    unreadable = isinstance(error, NewerFormat | StorePermanent) and not isinstance(error, ObjectNotFound)
    return "unreadable" if unreadable else ""


def read_mirror_meta(store: Store, name: str) -> tuple[Meta | Tombstone, ObjectInfo]:
    """Read one meta from a mirror.

    Raises:
        BrokenMeta: It is not valid.
        ObjectNotFound: It does not exist.
    """
    data, info = store.read(name, limit_bytes=META_LIMIT_BYTES)
    return meta_or_tombstone_from_bytes(data), info


def first_missing(meta: Meta, objects: Mapping[str, ObjectInfo]) -> str | None:
    """Say which artifact of a mirror's meta is not there with exactly its size; None if all are."""
    return next(iter(_missing(meta, objects).values()), None)


def _missing(meta: Meta, objects: Mapping[str, ObjectInfo]) -> dict[Artifact, str]:
    found: dict[Artifact, str] = {}
    for artifact in meta.artifacts:
        why = why_differs(artifact, objects.get(artifact.object_name), by_size=True)
        if why is not None:
            found[artifact] = f"{artifact.object_name} {why}"
    return found


def objects_of(store: Store, meta: Meta, *kinds: Kind) -> dict[str, ObjectInfo]:
    """Ask the mirror about every object of a save (only of ``kinds``, if given); return those that exist, by name."""
    wanted = meta.artifacts_of(*kinds) if kinds else meta.artifacts
    few = _FEW if meta.is_whole else _FEW_AMONG_OTHERS
    return _objects_named(store, [artifact.object_name for artifact in wanted], few)


def _objects_named(store: Store, wanted: Iterable[str], few: int = _FEW) -> dict[str, ObjectInfo]:
    """Ask about objects in as few requests as possible: one page of a listing answers for up to 1,000 objects.

    A directory is listed with all that is below it, and so are a step's files that share a prefix: a meta may name a
    directory for each of its files. A few single files are asked for one by one.
    """
    by_start: dict[str, list[str]] = {}
    for name in dict.fromkeys(wanted):
        directory, slash, _ = name.partition("/")
        by_start.setdefault(directory + slash if slash else _start_of(name), []).append(name)
    found: dict[str, ObjectInfo] = {}
    for start, alike in by_start.items():
        in_directory = start.endswith("/") and few == _FEW
        if in_directory or len(alike) > few:
            found |= listed_among(store, start, alike)
        else:
            found |= _asked_one_by_one(store, alike)
    return found


def listed_among(store: Store, prefix: str, wanted: Iterable[str]) -> dict[str, ObjectInfo]:
    """Ask about objects that begin with ``prefix``, by a listing. If it has many more, by one request for each.

    So the requests follow from what is asked, and not from what other nodes or an earlier year left there.
    """
    remaining = set(wanted)
    found: dict[str, ObjectInfo] = {}
    most = _PAGE + _OTHERS * len(remaining)
    for number, info in enumerate(store.list(prefix) if remaining else ()):
        if info.name in remaining:
            remaining.remove(info.name)
            found[info.name] = info
        if not remaining:
            break
        if number >= most:
            return found | _asked_one_by_one(store, sorted(remaining))
    return found


def _asked_one_by_one(store: Store, wanted: Sequence[str]) -> dict[str, ObjectInfo]:
    found: dict[str, ObjectInfo] = {}

    def ask(name: str) -> None:
        if (info := store.stat(name)) is not None:
            found[name] = info

    run_jobs(wanted, ask, name="ckptmirror-ask", workers=_READERS)
    return found


def _start_of(name: str) -> str:
    """Return the prefix that the files of one role and step share: ``optim_000200`` of ``optim_000200_rank3.pt``."""
    match = re.match(r"[a-z]+_[0-9]+", name)
    return match[0] if match is not None else name


def _step_of(name: str) -> int | None:
    parsed = names.parse_name(name)
    return parsed.step if parsed is not None else None


def _read_metas(
    mirror: Mirror, wanted: Sequence[ObjectInfo], cache: MetaCache
) -> list[Meta | Tombstone | CkptMirrorError]:
    """Read metas. One that cannot be read is returned as its error, and does not stop the others.

    Raises:
        StoreTemporary: The mirror does not answer.
        NotAuthorised: It refuses all of them.
    """
    answers: dict[str, Meta | Tombstone | CkptMirrorError] = {}

    def read(info: ObjectInfo) -> None:
        key = (mirror.url, info.name, info.generation)
        answer = cache[key] if key in cache else _meta_or_reason(mirror.store, info.name)
        answers[info.name] = answer
        if not isinstance(answer, CkptMirrorError):
            cache[key] = answer

    run_jobs(wanted, read, name="ckptmirror-list", workers=_READERS)
    refused = [answer for answer in answers.values() if isinstance(answer, NotAuthorised)]
    if refused and len(refused) == len(answers):
        raise refused[0]
    return [answers[info.name] for info in wanted]


def _meta_or_reason(store: Store, name: str) -> Meta | Tombstone | CkptMirrorError:
    try:
        try:
            return read_mirror_meta(store, name)[0]
        except ObjectNotFound:
            if store.stat(name) is None:
                return ObjectNotFound("it was removed while the mirror was listed")
            return read_mirror_meta(store, name)[0]  # the answer was wrong, or it was replaced at that moment
    except ObjectNotFound as error:
        raise StoreTemporary(f"{name} appears and disappears.") from error
    except (IntegrityError, StorePermanent, NotAuthorised) as error:
        return error


def rebuild_attempts(mirrors: Sequence[Mirror]) -> AttemptList | None:
    """Rebuild the lost list of mirrors from their metas, each of which records its attempt; None if there are none.

    Raises:
        LineageError: The metas belong to several runs.
    """
    catalogs = [mirror_catalog(mirror, with_attempts=False) for mirror in mirrors]
    return attempts_of_metas(meta for catalog in catalogs for meta in catalog.metas())
