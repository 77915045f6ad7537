"""Resolve: turns what a person types into a directory (or mirror), a step and a kind.

Rules:
* ``select`` makes every choice between saves. A path that names a kind keeps it, whatever else the step has (I4).
* A path that no valid meta names, or that is not whole, is refused with the reason (I2). Nothing is unpickled here, and
  only names, metas and sizes are read.
* ``latest`` is a hint: its target is checked like any other path.
* Legacy checkpoints come last, and are logged (``legacy_references``).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptmirror.core import names
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    KindMismatch,
    ObjectNotFound,
    UsageError,
)
from ckptmirror.core.lost_parts import how_to_load, parts_lost, without_parts
from ckptmirror.core.model import KINDS, Artifact, Kind, Meta, top_names
from ckptmirror.core.setting_checks import check_kind
from ckptmirror.core.uncommitted import Uncommitted
from ckptmirror.flow.places.catalog import Catalog, local_catalog, mirror_catalog, read_mirror_meta
from ckptmirror.flow.places.mirrors import opened_mirror
from ckptmirror.flow.places.reference import CheckpointReference, Located, list_hint, locate
from ckptmirror.flow.places.select import (
    MAIN_ROLE,
    READ_ORDER,
    choose,
    lineage_of,
    not_superseded,
    quarantined_in,
    warn_of_what_is_broken,
)
from ckptmirror.flow.places.uncommitted import uncommitted_saves
from ckptmirror.local import directories
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.save_logger import save_logger
from ckptmirror.local.storage_errors import is_there
from ckptmirror.local.table_place import check_is_no_mirror, is_mirror

if TYPE_CHECKING:
    from ckptmirror.local.legacy_listing import OlderCheckpoint

__all__ = [
    "CheckpointReference",
    "ListedCheckpoint",
    "by_run",
    "find_local_checkpoint_steps",
    "list_checkpoints",
    "main_path",
    "resolve_checkpoint_reference",
    "resolve_for_load",
    "resolve_resume_path",
]

_log = logging.getLogger("ckptmirror.choose")
ListedStanding = Literal["current", "replaced", "superseded", "unknown", "older", "incomplete"]
_NO_META_HINT = (
    "If plain torch wrote it, give it a meta.json, as the docs say for legacy checkpoints. If ckptmirror wrote it, its "
    "meta is lost: stage the step again from a mirror."
)
_REFERENCES = ("meta", *KINDS, "legacy_dcp", "legacy_meta")


@dataclass(frozen=True)
class ListedCheckpoint:
    """One line of a listing.

    Attributes:
        standing: ``incomplete`` if it is not whole or its meta is broken; ``older`` for a legacy checkpoint, which has
            no checksums and is not part of any lineage; otherwise its standing in the lineage.
        why: Why it is incomplete, or quarantined.
        size_bytes: Of a mirror's save that waits for nodes: what of it is there.
        kinds: Empty if the meta cannot be read.
        current_kinds: The kinds in which this save is the current one of its step.
        place: The meta's path, or its name on the mirror.
        quarantined: Whether starts failed from it in a row, so that a start goes back past it. A mirror knows only of
            those that diverged.
    """

    step: int
    kinds: tuple[Kind, ...]
    standing: ListedStanding
    save_id: str = ""
    attempt: int = -1
    number: int = 0
    size_bytes: int = 0
    why: str = ""
    current_kinds: tuple[Kind, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_at_utc: str = ""
    staged_from: str | None = None
    place: str = ""
    quarantined: bool = False


# -- one reference -------------------------------------------------------------------------------------------


def resolve_checkpoint_reference(
    reference: str | os.PathLike[str] | CheckpointReference, *, require_kind: Kind | None = None
) -> CheckpointReference:
    """Turn what a person types into ``(dir, step, kind)``.

    Takes a ``model_*.pt``, a DCP directory, a meta, an emergency directory, ``latest``, a directory of saves (its
    newest whole save: dcp, then model), a mirror's URL, or the URL of one of these on a mirror. On a disk it also takes
    a legacy checkpoint, and logs that this has no checksums.

    Raises:
        CheckpointNotFound: It does not exist, or no valid meta names it.
        KindMismatch: It is not of ``require_kind``.
        IntegrityError: Its meta is broken, or a file is missing or has another size.
        UsageError: It is not a reference, or there is no such kind.
    """
    return resolve_for_load(reference, (), require_kind=require_kind)


def resolve_for_load(
    reference: str | os.PathLike[str] | CheckpointReference,
    exclude: Collection[str],
    *,
    require_kind: Kind | None = None,
) -> CheckpointReference:
    """As :func:`resolve_checkpoint_reference`, but a save that a path names may lack what only excluded parts need.

    Args:
        reference: What a person typed.
        exclude: Parts of the state that will not be loaded.
        require_kind: The only kind to return.
    """
    check_kind(require_kind, KINDS)
    if isinstance(reference, CheckpointReference):
        found = reference
    else:
        located = locate(reference)
        if located.parsed is not None and located.parsed.role not in _REFERENCES:
            raise UsageError(
                f"{reference} is only a part of a checkpoint.",
                hint="Name its model file, DCP directory, meta or directory.",
            )
        if isinstance(located.place, Path):
            found = _on_disk(located.place, located, require_kind, exclude)
        else:
            found = _on_mirror(located.place, located, require_kind)
    if require_kind is not None and found.kind != require_kind:
        raise KindMismatch(f"{reference} is of kind {found.kind}, not {require_kind}.", hint=list_hint(found.dir))
    return found


def _on_disk(root: Path, located: Located, kind: Kind | None, exclude: Collection[str]) -> CheckpointReference:
    if located.link is not None:
        return _latest(located.link, root, located.name, kind)
    if located.name:
        return _named(root, located.name, kind, exclude)
    catalog = local_catalog(root)
    if not catalog.saves and not catalog.problems:
        from ckptmirror.flow.places.legacy_references import (
            newest_older,  # imported late, here and below: most verbs never need it
        )

        if (found := newest_older(root, kind)) is not None:
            return found
    if not catalog.saves and (root / ".metadata").is_file():
        raise UsageError(
            f"{root} is a DCP directory, but its name does not say which step it is of.",
            hint="Rename it to dist_ckpt_<six digits>, with a meta.json in it, or read it with torch.",
        )
    meta, chosen = choose(catalog, "latest", kind, staged=True)
    return _reference(root, meta, chosen)


def _latest(link: Path, root: Path, target: str, kind: Kind | None) -> CheckpointReference:
    """Return the save that the link names. A start or a person may have left the link behind: log a newer save."""
    found = _named(root, target, kind)
    with contextlib.suppress(CkptMirrorError):
        newest, _ = choose(local_catalog(root), "latest", staged=True)
        if newest.save_id != found.save_id and found.kind != "emergency":
            saves = (found.step, (found.save_id or "legacy")[:8], newest.step, newest.save_id)
            save_logger(_log, found).warning(
                "%s names step %d (save %.8s); a reader would take step %d (save %.8s)", link, *saves
            )
    return found


def _named(root: Path, name: str, kind: Kind | None, exclude: Collection[str] = ()) -> CheckpointReference:
    """Return the save whose meta names ``name``, or is ``name``."""
    if not is_there(root / name):
        raise CheckpointNotFound(f"{root / name} does not exist.", hint=list_hint(root))
    inventory = read_inventory(root)
    for save in inventory.saves:
        if name in (*top_names(save.meta.artifacts), save.meta_path.relative_to(root).parts[0]):
            return _reference(root, save.meta, _kind_of(name, save.meta, kind))
    for save in inventory.incomplete:
        if name in (*top_names(save.meta.artifacts), save.meta_path.relative_to(root).parts[0]):
            kinds = save.kinds
            if not kinds and save.damaged:
                kinds = without_parts(save.meta, save.damaged, exclude).kinds
            asked = _kind_of(name, save.meta, kind or next(iter(kinds), None))
            if asked not in kinds:
                parts = parts_lost(save.meta, save.damaged) if not kinds else ()
                raise IntegrityError(f"{root / name} is not whole: {save.why}.", hint=how_to_load(save.meta, parts))
            return _reference(root, save.meta, asked)
    for item in inventory.broken:
        if _stem_of(item.path.name) == _stem_of(name):
            raise BrokenMeta(f"{item.path} cannot be trusted: {item.why}")
    from ckptmirror.flow.places.legacy_references import named_older

    if (found := named_older(root, name, kind)) is not None:
        return found
    raise CheckpointNotFound(
        f"{root / name} belongs to no save that ckptmirror knows: no meta file names it.", hint=_NO_META_HINT
    )


def _stem_of(name: str) -> tuple[int | None, str]:
    parsed = names.parse_name(name)
    return (parsed.step, parsed.tag) if parsed is not None else (None, "")


def _kind_of(name: str, meta: Meta, kind: Kind | None) -> Kind:
    """Return the kind that a name says; for a meta, the requested or the first kind of its save."""
    parsed = names.parse_name(name)
    for one in KINDS:
        if parsed is not None and parsed.role == MAIN_ROLE[one]:
            return one
    return next(one for one in ((kind,) if kind in meta.kinds and kind else KINDS) if one in meta.kinds)


def _reference(root: Path, meta: Meta, kind: Kind) -> CheckpointReference:
    return CheckpointReference(root, meta.step, kind, meta.save_id, main_path(root, meta, kind))


def main_path(root: Path, meta: Meta, kind: Kind) -> Path:
    """Return the DCP directory, the model file or the emergency directory of a local save.

    Raises:
        KindMismatch: The save has none.
    """
    for top in _main_tops(meta.artifacts, kind):
        return root / top
    raise KindMismatch(f"Save {meta.save_id[:8]} of step {meta.step} has no file of kind {kind}.", hint=list_hint(root))


def _main_tops(artifacts: Iterable[Artifact], kind: Kind) -> Iterable[str]:
    for artifact in artifacts:
        parsed = names.parse_artifact_path(artifact.path)
        if parsed is not None and parsed.top.role == MAIN_ROLE[kind]:
            yield artifact.path.partition("/")[0]


def _on_mirror(place: str, located: Located, kind: Kind | None) -> CheckpointReference:
    from ckptmirror.flow.places.legacy_references import not_on_a_mirror, older_on_mirror

    parsed, last = located.parsed, located.name
    with opened_mirror(place) as mirror:
        url = mirror.url
        if parsed is None:
            catalog = mirror_catalog(mirror)
            if not catalog.saves and (older := older_on_mirror(catalog.others)):
                raise not_on_a_mirror(url, older[-1][1])
            meta, chosen = choose(catalog, "latest", kind)
            return CheckpointReference(url, meta.step, chosen, meta.save_id)
        if parsed.role in ("legacy_dcp", "legacy_meta"):
            raise not_on_a_mirror(url, last)
        try:
            catalog = mirror_catalog(mirror, step=parsed.step)
            named = read_mirror_meta(mirror.store, last)[0].save_id if parsed.role == "meta" else None
        except ObjectNotFound as error:
            raise CheckpointNotFound(f"{url} has no {last}.", hint=list_hint(url)) from error
    for meta in catalog.saves.values():
        if meta.save_id == named or last in {a.object_name.partition("/")[0] for a in meta.artifacts}:
            return CheckpointReference(url, meta.step, _kind_of(last, meta, kind), meta.save_id)
    why = "; ".join(f"{name}: {reason}" for name, reason in catalog.problems.items())
    raise CheckpointNotFound(f"No whole save on {url} has {last}.{' ' + why if why else ''}", hint=list_hint(url))


# -- a root's steps ------------------------------------------------------------------------------------------


def resolve_resume_path(root: Path | str) -> Path | None:
    """Return the newest whole local checkpoint of the lineage, or None; within a save dcp, then model.

    A legacy checkpoint is not part of the lineage: it is logged, and not returned.

    Raises:
        NoTable: It is a mirror, whose objects may have other names.
        LocalStorageUnwritable: This user may not look there.
    """
    root = directories.absolute_dir(root, "root")
    if not is_there(root) or not root.is_dir():
        return None
    check_is_no_mirror(root)
    catalog = local_catalog(root)
    table = not_superseded(catalog, placed=True)
    if not table:
        from ckptmirror.flow.places.legacy_references import ADOPT_HINT, find_older

        for older in find_older(root)[-1:]:
            _log.warning("nothing to resume in %s: %s is a legacy checkpoint. %s", root, older.path, ADOPT_HINT)
        return None

    def rank(key: tuple[int, Kind]) -> tuple[int, int, int, int]:
        step, kind = key
        return step, table[key].attempt.number, table[key].save_number, -KINDS.index(kind)

    newest = max(table, key=rank)
    warn_of_what_is_broken(catalog, table[newest], newest[1])
    return main_path(root, table[newest], newest[1])


def find_local_checkpoint_steps(root: Path | str, kind: Kind | None = None) -> list[int]:
    """Return the steps of the lineage that are whole in ``root``, ascending (of one kind, if given).

    A DCP step counts only with its ``.metadata``, a valid meta, and every artifact at exactly its size. A legacy
    checkpoint counts with its ``.metadata`` (or its model file) and a ``meta.json`` that describes it.

    A directory that does not exist has no steps: an evaluation may poll it before the first save is there. (A
    :func:`list_checkpoints` of it raises, because it answers a person.)

    Raises:
        UsageError: There is no such kind.
        LocalStorageUnwritable: This user may not look there.
    """
    from ckptmirror.flow.places.legacy_references import older_steps

    check_kind(kind, KINDS)
    root = directories.absolute_dir(root, "root")
    if not is_there(root) or not root.is_dir():
        return []
    kinds = (kind,) if kind is not None else READ_ORDER
    steps = {step for step, k in not_superseded(_catalog_at(root)) if k in kinds}
    return sorted(steps | older_steps(root, kinds))


def _catalog_at(directory: Path) -> Catalog:
    if not is_mirror(directory):
        return local_catalog(directory)
    with opened_mirror(str(directory)) as mirror:
        return mirror_catalog(mirror)


def list_checkpoints(root_or_url: Path | str) -> list[ListedCheckpoint]:
    """List everything that looks like a save in a directory or on a mirror, by step, with its standing.

    For a reference to one checkpoint, list only its step.

    Raises:
        CheckpointNotFound: The place does not exist. To poll a directory that may not exist yet, use
            :func:`find_local_checkpoint_steps`, which returns [] for it.
    """
    try:
        located = locate(root_or_url)
    except UsageError as error:
        raise CheckpointNotFound(error.message, hint=error.hint) from error
    if isinstance(located.place, Path):
        lines = _listed(local_catalog(located.place), located.place)
    else:
        with opened_mirror(located.place) as mirror:
            catalog = mirror_catalog(mirror)
            lines = _listed(catalog, None, uncommitted_saves(mirror, catalog, with_parts=False))
    step = located.parsed.step if located.parsed is not None else None
    return [line for line in lines if step in (None, line.step)]


def _listed(catalog: Catalog, root: Path | None, waiting: Iterable[Uncommitted] = ()) -> list[ListedCheckpoint]:
    from ckptmirror.flow.places.legacy_references import find_older, older_on_mirror

    lines = [line for part in by_run(catalog) for line in _listed_whole(part, root)]
    quarantined = quarantined_in(catalog, root)
    for name, problem in catalog.problems.items():
        parsed = names.parse_name(Path(name).name)
        step = parsed.step if parsed is not None and parsed.step is not None else -1
        if problem.meta is not None:
            rest = problem.meta.narrowed(problem.kinds) if problem.kinds else _lost(problem.meta, catalog)
            of_starts = quarantined.get(rest.save_id)
            why = problem.why if of_starts is None else f"{problem.why}; quarantined: {of_starts}"
            line = _line(rest, "incomplete", name, why=why)
            lines.append(replace(line, quarantined=of_starts is not None))
        else:
            lines.append(ListedCheckpoint(step, (), "incomplete", why=problem.why, place=name))
    for one in waiting:
        name, why = next(iter(one.parts.names.values())), one.parts.problem.why
        lines.append(ListedCheckpoint(one.parts.step, (), "incomplete", size_bytes=one.size_bytes, why=why, place=name))
    lines += [_listed_older(one) for one in (find_older(root) if root is not None else ())]
    for step, name in older_on_mirror(catalog.others) if root is None else ():
        lines.append(ListedCheckpoint(step, ("dcp",), "older", why="copy it to a disk to read it", place=name))
    return sorted(lines, key=lambda line: (line.step, line.attempt, line.number, line.save_id))


def _lost(meta: Meta, catalog: Catalog) -> Meta:
    """Return a save, of which no kind is lost, with only the files that are: lists of tensors."""
    left = catalog.saves.get(meta.save_id) or catalog.parts.get(meta.save_id)
    known = left.paths if left is not None else frozenset()
    return replace(meta, artifacts=tuple(one for one in meta.artifacts if one.path not in known))


def by_run(catalog: Catalog) -> list[Catalog]:
    """Split a catalog without a list of attempts by run: such a place may hold several, each with its own order."""
    if catalog.attempts is not None:
        return [catalog]
    runs = dict.fromkeys(meta.run_id for meta in catalog.saves.values())
    return [
        replace(catalog, saves={save_id: meta for save_id, meta in catalog.saves.items() if meta.run_id == run})
        for run in runs
    ]


def _listed_whole(catalog: Catalog, root: Path | None) -> list[ListedCheckpoint]:
    order = lineage_of(catalog)
    why = quarantined_in(catalog, root)
    standings = order.standing_by_save()
    lines = []
    for save_id, meta in catalog.saves.items():
        current = tuple(k for k in meta.kinds if (s := order.current.get((meta.step, k))) and s.save_id == save_id)
        reason = f"quarantined: {why[save_id]}" if save_id in why else ""
        line = _line(meta, standings[save_id], catalog.address_of(meta), current_kinds=current, why=reason)
        lines.append(replace(line, quarantined=save_id in why))
    return lines


def _line(
    meta: Meta, standing: ListedStanding, place: str, *, why: str = "", current_kinds: tuple[Kind, ...] = ()
) -> ListedCheckpoint:
    return ListedCheckpoint(
        step=meta.step,
        kinds=meta.kinds,
        standing=standing,
        save_id=meta.save_id,
        attempt=meta.attempt.number,
        number=meta.save_number,
        size_bytes=meta.size_bytes,
        why=why,
        current_kinds=current_kinds,
        metrics=dict(meta.metrics),
        created_at_utc=meta.created_at_utc,
        staged_from=meta.staged_from,
        place=place,
    )


def _listed_older(one: OlderCheckpoint) -> ListedCheckpoint:
    return ListedCheckpoint(
        one.step,
        (one.kind,),
        "incomplete" if one.why else "older",
        size_bytes=one.size_bytes,
        why=one.why or "a legacy checkpoint, without checksums",
        metrics=one.meta.metrics,
        place=one.name,
    )
