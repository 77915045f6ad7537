"""Load a checkpoint in one process, without a process group: for evaluation, export and a look inside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import CheckpointNotFound, UsageError
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.catalog import local_catalog
from ckptmirror.flow.resolve import CheckpointReference, resolve_checkpoint_reference
from ckptmirror.local.checksums import verify_file

__all__ = ["LoadedCheckpoint", "load_checkpoint"]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint as plain values.

    Attributes:
        model: Whole tensors by clean name, ready for ``module.load_state_dict``.
        optimizer: State keyed by parameter name, or None if the save holds none (or it was not staged).
        extra: What rank 0 saved beside them, or None.
        meta: The save's meta.
        kind: The kind that was read.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any] | None
    meta: Meta
    kind: Kind


def load_checkpoint(reference: str | Path | CheckpointReference, map_location: str = "cpu") -> LoadedCheckpoint:
    """Read a checkpoint on local disk, every byte verified first.

    Args:
        reference: What :func:`resolve_checkpoint_reference` takes or returned: a model file, a DCP directory, a meta,
            ``latest``, or a directory that holds saves. An explicit kind is never replaced by another.
        map_location: Device of the tensors.

    Raises:
        CheckpointNotFound: There is no whole save there.
        IntegrityError: A file is not what was saved.
    """
    from ckptmirror.formats.whole import read_extra, read_whole

    found = resolve_checkpoint_reference(reference)
    if not isinstance(found.dir, Path):
        raise UsageError(f"{reference} is not on this disk.", hint="Bring it here with `ckptmirror stage` first.")
    root, meta = found.dir, _meta_of(found.dir, found)
    for artifact in meta.artifacts_of(found.kind):
        verify_file(root / artifact.path, artifact.digest)
    model, optimizer = read_whole(root, meta, found.kind, map_location)
    extra = read_extra(root, meta, map_location)
    return LoadedCheckpoint(model, optimizer, extra, meta, found.kind)


def _meta_of(root: Path, found: CheckpointReference) -> Meta:
    if found.save_id is None:
        raise UsageError(
            f"{found.path} was written by an older layout, which has no checksums.",
            hint="Read it with torch.distributed.checkpoint.load.",
        )
    meta = local_catalog(root).saves.get(found.save_id)
    if meta is None:
        raise CheckpointNotFound(f"Step {found.step} (save {found.save_id[:8]}) is not whole in {root} any more.")
    return meta
