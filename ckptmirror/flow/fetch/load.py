"""Loads a checkpoint in one process, without a process group: for evaluation, export and inspection.

Rules:
* ``places.resolve`` resolves the reference. An explicit kind is never replaced by another (I4).
* Every byte of a save is verified before it is read. A legacy checkpoint has no checksums, and this is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import CheckpointNotFound, IntegrityError, UsageError
from ckptmirror.core.lost_parts import EXTRA_PARTS
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.training_config import _patch_missing_config_keys
from ckptmirror.flow.fetch.blocks import FileToRead, read_all
from ckptmirror.flow.fetch.partial import fetched_parts, is_read
from ckptmirror.flow.places.catalog import local_catalog, part_word
from ckptmirror.flow.places.legacy_references import look_up_older, meta_of_older
from ckptmirror.flow.places.reference import CheckpointReference, list_hint
from ckptmirror.flow.places.resolve import resolve_for_load
from ckptmirror.local.save_logger import save_logger

__all__ = ["LoadedCheckpoint", "load_checkpoint", "meta_of"]

_log = logging.getLogger("ckptmirror.load")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint as plain values.

    Attributes:
        model: Whole tensors by clean name, ready for ``module.load_state_dict``.
        optimizer: State keyed by parameter name, or None if the save holds none (or it was not staged).
        extra: The ``extra`` state that rank 0 saved, or None.
        meta: The save's meta. For a legacy checkpoint: the contents of its ``meta.json``, without ids and files.
        kind: The kind that was read.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any] | None
    meta: Meta
    kind: Kind


def load_checkpoint(
    reference: str | Path | CheckpointReference,
    map_location: str = "cpu",
    *,
    exclude: Collection[str] = (),
    new_config_keys: Mapping[str, Any] | None = None,
) -> LoadedCheckpoint:
    """Read a checkpoint on a disk or a mirror, every byte verified before it is used.

    From a mirror, only what is wanted is fetched, through a temporary directory (``TMPDIR``) that is then removed.

    Args:
        reference: What :func:`resolve_checkpoint_reference` takes or returned: a model file, a DCP directory, a meta,
            ``latest``, a directory that holds saves, or a mirror's URL. An explicit kind is never replaced by another.
            A legacy checkpoint has no checksums to verify, and this is logged.
        map_location: Device of the tensors.
        exclude: ``"optimizer"`` and ``"extra"``: parts that are neither fetched nor read; they are None. Of a save on a
            disk that a path names, their files may be missing.
        new_config_keys: Keys of the training config that are newer than some checkpoints, each with the value that
            turns it off. If the config in ``meta`` lacks one, it gets that value, and this is logged.

    Raises:
        UsageError: This machine has no such device, or ``exclude`` names something else.
        CheckpointNotFound: There is no whole save there.
        IntegrityError: A file differs from what was saved.
    """
    from ckptmirror.formats.rank_files import check_device

    is_one = isinstance(exclude, str) or not isinstance(exclude, Collection)
    if is_one or any(part not in ("optimizer", "extra") for part in exclude):
        raise UsageError(
            f"exclude is {exclude!r}; it must be a tuple of 'optimizer' and 'extra', or of one of them.",
            hint='Write exclude=("optimizer",).',
        )
    if new_config_keys is not None and not isinstance(new_config_keys, Mapping):
        raise UsageError(
            f"new_config_keys is {new_config_keys!r}; it must be a dict of keys and their values.",
            hint='Write new_config_keys={"use_bias": False}.',
        )
    check_device(map_location)
    found = resolve_for_load(reference, _not_read(exclude))
    if not isinstance(found.dir, Path):
        with fetched_parts(found, exclude) as (root, meta, fetched):
            loaded = replace(_read(root, fetched, found, map_location, exclude), meta=meta)
    elif found.save_id is None:
        loaded = _load_older(found, map_location)
    else:
        loaded = _load(found.dir, found, map_location, exclude)
    config, added = _patch_missing_config_keys(loaded.meta.training_config, new_config_keys or {})
    if not added:
        return loaded
    save_logger(_log, found).warning("step %d was saved before there was %s: off", found.step, ", ".join(added))
    return replace(loaded, meta=replace(loaded.meta, training_config=config))


def _not_read(exclude: Collection[str]) -> tuple[str, ...]:
    return (*exclude, *(EXTRA_PARTS if "extra" in exclude else ()))


def _load(root: Path, found: CheckpointReference, map_location: str, exclude: Collection[str]) -> LoadedCheckpoint:
    meta = meta_of(root, found, _not_read(exclude))
    read = [one for one in meta.artifacts_of(found.kind) if is_read(one, exclude)]
    files = [FileToRead(root / artifact.path, artifact.digest, cached=True) for artifact in read]
    for file, found_wrong in zip(files, read_all(files), strict=True):
        if found_wrong is not None:
            raise IntegrityError(f"{file.path}: {found_wrong.why}.")
    loaded = _read(root, replace(meta, artifacts=tuple(read)), found, map_location, exclude)
    return replace(loaded, meta=meta)


def _read(
    root: Path, verified: Meta, found: CheckpointReference, map_location: str, exclude: Collection[str]
) -> LoadedCheckpoint:
    from ckptmirror.formats.read_full import read_extra, read_full

    with _inconsistent_at_worst(found):
        model, optimizer = read_full(root, verified, found.kind, map_location, exclude)
        extra = read_extra(root, verified, map_location)
    return LoadedCheckpoint(model, optimizer, extra, verified, found.kind)


def _load_older(found: CheckpointReference, map_location: str) -> LoadedCheckpoint:
    from ckptmirror.formats.legacy import read_legacy

    one = look_up_older(found)
    with _inconsistent_at_worst(found):
        state = read_legacy(one.path, one.kind, one.extra, map_location)
        return LoadedCheckpoint(state.model, state.optimizer, state.extra or None, meta_of_older(one), one.kind)


@contextmanager
def _inconsistent_at_worst(found: CheckpointReference) -> Iterator[None]:
    """Blame the file for values that are allowed, but that no save has in this order; not for a device without room."""
    from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS

    try:
        yield
    except DEVICE_ERRORS:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise IntegrityError(f"{found.path} is inconsistent: {type(error).__name__}: {error}") from error


def meta_of(root: Path, found: CheckpointReference, exclude: Collection[str] = ()) -> Meta:
    """Return the meta of the resolved save; for a load without the parts in ``exclude``, it may have lost their files.

    Raises:
        CheckpointNotFound: It has been removed since, or only one node's part of it is here.
    """
    catalog = local_catalog(root).without(exclude)
    meta = catalog.saves.get(found.save_id or "")
    if meta is None and (part := catalog.parts.get(found.save_id or "")) is not None:
        raise CheckpointNotFound(
            f"{root} has only a part of step {found.step}: {part_word(part)}.",
            hint="A snapshot is on no mirror: only a start that finds the other ranks' parts continues from it."
            if part.kinds == ("emergency",)
            else f"Stage the whole save: `ckptmirror stage --step {found.step} --dest DIR --mirror URL`.",
        )
    if meta is None:
        raise CheckpointNotFound(
            f"Step {found.step} (save {(found.save_id or '')[:8]}) is no longer whole in {root}.", hint=list_hint(root)
        )
    return meta
