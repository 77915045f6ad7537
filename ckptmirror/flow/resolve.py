"""Resolve: whatever a person types, turned into a directory (or mirror), a step and a kind.

Rules:
* Every choice between saves is ``choose``'s. A path that names a kind keeps it, whatever else the step has (I4).
* A path is only as good as the meta that names it: what no valid meta names, or what is not whole, is refused with the
  reason (I2). Nothing is unpickled here, and only names, metas and sizes are read.
* ``latest`` is a hint: its target is checked like any other path.
* Directories of the older layout are recognised by a marker of theirs; they are read, never written.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import (
    BrokenMeta,
    CheckpointNotFound,
    CkptMirrorError,
    IntegrityError,
    KindMismatch,
    ObjectNotFound,
    UsageError,
)
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.resumption import KIND_ORDER
from ckptmirror.flow.catalog import META_LIMIT_BYTES, Catalog, local_catalog, mirror_catalog, read_mirror_meta
from ckptmirror.flow.choose import READ_ORDER, choose, lineage_of, not_superseded, warn_of_what_is_broken
from ckptmirror.flow.commit import top_names
from ckptmirror.flow.mirrors import Mirror
from ckptmirror.flow.staging import MAIN_ROLE
from ckptmirror.local import files
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import normalise_url, open_store

__all__ = [
    "CheckpointReference",
    "ListedCheckpoint",
    "by_run",
    "find_local_checkpoint_steps",
    "list_checkpoints",
    "main_path",
    "resolve_checkpoint_reference",
    "resolve_resume_path",
]

_log = logging.getLogger("ckptmirror.choose")
ListedStanding = Literal["current", "replaced", "superseded", "unknown", "incomplete"]


@dataclass(frozen=True)
class CheckpointReference:
    """One checkpoint: where, which step, which kind.

    Attributes:
        dir: The directory that holds the save, or a mirror's URL.
        save_id: None in a directory of the older layout.
        path: On the local disk: the DCP directory, the model file or the emergency directory.
    """

    dir: Path | str
    step: int
    kind: Kind
    save_id: str | None = field(default=None, compare=False)
    path: Path | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ListedCheckpoint:
    """One line of a listing.

    Attributes:
        standing: ``incomplete`` for what is not whole or whose meta is broken; else as the lineage has it.
        why: Why it is incomplete.
        kinds: Empty where the meta cannot be read.
        current_kinds: The kinds for which this save stands for its step.
        place: The meta's path, or its name on the mirror.
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


# -- one reference -------------------------------------------------------------------------------------------


def resolve_checkpoint_reference(
    reference: str | os.PathLike[str] | CheckpointReference, *, require_kind: Kind | None = None
) -> CheckpointReference:
    """Turn what a person types into ``(dir, step, kind)``.

    Takes a ``model_*.pt``, a DCP directory, a meta, an emergency directory, ``latest``, a directory of saves (its
    newest whole save: dcp, then model), a mirror's URL, or the URL of one of these there.

    Raises:
        CheckpointNotFound: There is nothing, or nothing that a valid meta names.
        KindMismatch: It is not of ``require_kind``.
        IntegrityError: It is there, but its meta is broken or a file is missing or of another size.
        UsageError: It is no reference.
    """
    if isinstance(reference, CheckpointReference):
        found = reference
    elif "://" in (text := os.fspath(reference)):
        found = _on_mirror(text, require_kind)
    else:
        found = _on_disk(Path(text).absolute(), require_kind)
    if require_kind is not None and found.kind != require_kind:
        raise KindMismatch(f"{reference} is of kind {found.kind}, not {require_kind}.")
    return found


def _on_disk(path: Path, kind: Kind | None) -> CheckpointReference:
    if not os.path.lexists(path):
        raise CheckpointNotFound(f"{path} does not exist.")
    if path.is_symlink() and names.parse_name(path.name) is not None and path.name == names.LATEST_NAME:
        return _latest(path, kind)
    parsed = names.parse_name(path.name)
    if parsed is None and path.is_symlink() and names.parse_name(path.resolve().name) is not None:
        return _on_disk(path.resolve(), kind)
    if parsed is not None and parsed.role in ("meta", "model", "dcp", "emergency"):
        return _named(path.parent, path.name, kind)
    if parsed is not None and parsed.role == "legacy_dcp":
        return _older_layout(path, parsed.step or 0)
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a checkpoint.", hint="Name a model file, a DCP directory, a meta, or their directory."
        )
    meta, chosen = choose(local_catalog(path), "latest", kind, staged=True)
    return _reference(path, meta, chosen)


def _latest(link: Path, kind: Kind | None) -> CheckpointReference:
    """What the link names; a hint, which a start or a person may have left behind, so a newer save is told of."""
    found = _named(link.parent, _target_of(link), kind)
    with contextlib.suppress(CkptMirrorError):
        newest, _ = choose(local_catalog(link.parent), "latest", staged=True)
        if newest.save_id != found.save_id and found.kind != "emergency":
            saves = (found.step, found.save_id, newest.step, newest.save_id)
            _log.warning("%s names step %d (save %.8s); a reader would take step %d (save %.8s)", link, *saves)
    return found


def _target_of(link: Path) -> str:
    """Where ``latest`` points: one name beside it, of something that can be resumed."""
    target = link.readlink()
    parsed = names.parse_name(str(target))
    if parsed is None or parsed.role not in ("dcp", "model", "emergency"):
        raise CheckpointNotFound(f"{link} points at {target}, which is no checkpoint beside it.")
    return str(target)


def _named(root: Path, name: str, kind: Kind | None) -> CheckpointReference:
    """The save whose meta names ``name``, or is ``name``."""
    if not os.path.lexists(root / name):
        raise CheckpointNotFound(f"{root / name} does not exist.")
    inventory = read_inventory(root)
    for save in inventory.saves:
        if name in (*top_names(save.meta.artifacts), save.meta_path.relative_to(root).parts[0]):
            return _reference(root, save.meta, _kind_of(name, save.meta, kind))
    for save in inventory.incomplete:
        if name in (*top_names(save.meta.artifacts), save.meta_path.relative_to(root).parts[0]):
            raise IntegrityError(f"{root / name} is not whole: {save.why}.")
    for item in inventory.broken:
        if _stem_of(item.path.name) == _stem_of(name):
            raise BrokenMeta(f"{item.path} cannot be trusted: {item.why}")
    raise CheckpointNotFound(f"No valid meta names {root / name}, so nobody can say whether it is whole.")


def _stem_of(name: str) -> tuple[int | None, str]:
    parsed = names.parse_name(name)
    return (parsed.step, parsed.tag) if parsed is not None else (None, "")


def _kind_of(name: str, meta: Meta, kind: Kind | None) -> Kind:
    """The kind that a name says, or, of a meta, the asked or first kind of its save."""
    parsed = names.parse_name(name)
    for one in KIND_ORDER:
        if parsed is not None and parsed.role == MAIN_ROLE[one]:
            return one
    return next(one for one in ((kind,) if kind in meta.kinds and kind else KIND_ORDER) if one in meta.kinds)


def _reference(root: Path, meta: Meta, kind: Kind) -> CheckpointReference:
    return CheckpointReference(root, meta.step, kind, meta.save_id, main_path(root, meta, kind))


def main_path(root: Path, meta: Meta, kind: Kind) -> Path:
    """Return the DCP directory, the model file or the emergency directory of a local save.

    Raises:
        KindMismatch: The save has none.
    """
    for top in _main_tops(meta.artifacts, kind):
        return root / top
    raise KindMismatch(f"Save {meta.save_id[:8]} of step {meta.step} has no file of kind {kind}.")


def _main_tops(artifacts: Iterable[Artifact], kind: Kind) -> Iterable[str]:
    for artifact in artifacts:
        parsed = names.parse_artifact_path(artifact.path)
        if parsed is not None and parsed.top.role == MAIN_ROLE[kind]:
            yield artifact.path.partition("/")[0]


def _older_layout(path: Path, step: int) -> CheckpointReference:
    """``dist_ckpt_000200``: complete when DCP's ``.metadata`` and a ``meta.json`` inside or beside it are there."""
    if not (path / ".metadata").is_file():
        raise CheckpointNotFound(f"{path} has no .metadata, so it is not a whole DCP checkpoint.")
    if not any((place / "meta.json").is_file() for place in (path, path.parent)):
        raise CheckpointNotFound(f"There is no meta.json in or beside {path}, so nobody can say whether it is whole.")
    return CheckpointReference(path.parent, step, "dcp", None, path)


def _on_mirror(url: str, kind: Kind | None) -> CheckpointReference:
    base, _, last = url.rstrip("/").rpartition("/")
    parsed = names.parse_name(last)
    inside = parsed is not None and parsed.role in ("meta", "model", "dcp", "emergency")
    with_url = normalise_url(base if inside else url)
    mirror = Mirror(with_url, False, open_store(with_url))
    try:
        if not inside or parsed is None:
            meta, chosen = choose(mirror_catalog(mirror), "latest", kind)
            return CheckpointReference(with_url, meta.step, chosen, meta.save_id)
        catalog = mirror_catalog(mirror, step=parsed.step)
        named = read_mirror_meta(mirror.store, last)[0].save_id if parsed.role == "meta" else None
    except ObjectNotFound as error:
        raise CheckpointNotFound(f"{with_url} has no {last}.") from error
    finally:
        mirror.store.close()
    for meta in catalog.saves.values():
        if meta.save_id == named or last in {a.object_name.partition("/")[0] for a in meta.artifacts}:
            return CheckpointReference(with_url, meta.step, _kind_of(last, meta, kind), meta.save_id)
    why = "; ".join(f"{name}: {reason}" for name, reason in catalog.problems.items())
    raise CheckpointNotFound(f"No whole save on {with_url} has {last}.{' ' + why if why else ''}")


# -- a root's steps ------------------------------------------------------------------------------------------


def resolve_resume_path(root: Path | str) -> Path | None:
    """Return the newest whole local checkpoint of the lineage, or None; of one save dcp, then model."""
    root = Path(root).absolute()
    if not root.is_dir():
        return None
    catalog = local_catalog(root)
    table = not_superseded(catalog, placed=True)
    if not table:
        return None

    def rank(key: tuple[int, Kind]) -> tuple[int, int, int, int]:
        step, kind = key
        return step, table[key].attempt.number, table[key].save_number, -KIND_ORDER.index(kind)

    newest = max(table, key=rank)
    warn_of_what_is_broken(catalog, table[newest], newest[1])
    return main_path(root, table[newest], newest[1])


def find_local_checkpoint_steps(root: Path | str, kind: Kind | None = None) -> list[int]:
    """Return the steps of the lineage that are whole in ``root``, ascending (of one kind, if given).

    A DCP step counts only with its ``.metadata``, a valid meta, and every artifact with exactly its size.
    """
    root = Path(root).absolute()
    if not root.is_dir():
        return []
    kinds = (kind,) if kind is not None else READ_ORDER
    return sorted({step for step, k in not_superseded(local_catalog(root)) if k in kinds})


def list_checkpoints(root_or_url: Path | str) -> list[ListedCheckpoint]:
    """List everything that looks like a save in a directory or on a mirror, by step, with its standing."""
    if "://" not in str(root_or_url):
        root = Path(root_or_url).absolute()
        if not root.is_dir():
            raise CheckpointNotFound(f"{root} is not a directory.")
        return _listed(local_catalog(root), root)
    url = normalise_url(str(root_or_url))
    mirror = Mirror(url, False, open_store(url))
    try:
        return _listed(mirror_catalog(mirror), None)
    finally:
        mirror.store.close()


def _listed(catalog: Catalog, root: Path | None) -> list[ListedCheckpoint]:
    lines = [line for one in by_run(catalog) for line in _listed_whole(one)]
    for name, why in catalog.problems.items():
        parsed = names.parse_name(Path(name).name)
        step = parsed.step if parsed is not None and parsed.step is not None else -1
        meta_or_none = _meta_at(Path(name)) if root is not None else None
        if meta_or_none is not None:
            lines.append(_line(meta_or_none, "incomplete", why=str(why), place=name))
        else:
            lines.append(ListedCheckpoint(step, (), "incomplete", why=str(why), place=name))
    return sorted(lines, key=lambda line: (line.step, line.attempt, line.number, line.save_id))


def by_run(catalog: Catalog) -> list[Catalog]:
    """A place without a list of attempts may hold saves of several runs, which are put in order each by itself."""
    if catalog.attempts is not None:
        return [catalog]
    runs = dict.fromkeys(meta.run_id for meta in catalog.saves.values())
    return [
        replace(catalog, saves={save_id: meta for save_id, meta in catalog.saves.items() if meta.run_id == run})
        for run in runs
    ]


def _listed_whole(catalog: Catalog) -> list[ListedCheckpoint]:
    order = lineage_of(catalog)
    standings = order.standing_by_save()
    lines = []
    for save_id, meta in catalog.saves.items():
        current = tuple(k for k in meta.kinds if (s := order.current.get((meta.step, k))) and s.save_id == save_id)
        lines.append(_line(meta, standings[save_id], current_kinds=current))
    return lines


def _line(
    meta: Meta, standing: ListedStanding, *, why: str = "", current_kinds: tuple[Kind, ...] = (), place: str = ""
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
        place=place or names.SaveName(meta.step, meta.tag).meta,
    )


def _meta_at(path: Path) -> Meta | None:
    try:
        return meta_from_bytes(files.read_limited(path, META_LIMIT_BYTES))
    except (BrokenMeta, IntegrityError, OSError):
        return None
