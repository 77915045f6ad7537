"""Ownership: the last check before a deletion that a save's files still have the saved bytes."""

from __future__ import annotations

from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Artifact, Meta, top_names
from ckptmirror.flow.save.commit import stray_below
from ckptmirror.flow.save.emergency_files import another_snapshot_in, is_emergency, meta_paths
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.listing import Listing

__all__ = ["stray_in", "why_not_ours"]


def why_not_ours(root: Path, meta: Meta) -> str | None:
    """Say which of a save's files another program changed or added; None if there is none.

    The inventory has compared the sizes. Bytes are read only if a file changed after the meta was written.
    """
    committed = [_changed_ns(root / path) for path in meta_paths(meta)]
    for artifact in meta.artifacts:
        changed_ns = _changed_ns(root / artifact.path)
        if changed_ns is None or not all(committed):
            return f"{artifact.path} disappeared while it was checked"
        if changed_ns > min(filter(None, committed)) and not _holds(root, artifact):
            return f"{artifact.path} was changed after the save was committed"
    return stray_in(root, meta)


def stray_in(root: Path, meta: Meta) -> str | None:
    """Name a file in a save's directories that is not part of it; None if there is none.

    Part of an emergency snapshot is also what a rank left that was killed before it wrote its meta.
    """
    tops = top_names(meta.artifacts)
    ours = {*meta_paths(meta), *(artifact.path for artifact in meta.artifacts)}
    if is_emergency(meta):
        if (other := another_snapshot_in(root, meta)) is not None:
            return other
        ours |= {f"{top}/{name}" for top in tops for name in Listing(root).names(top) if names.is_of_a_rank(name)}
    return stray_below(root, tops, ours)


def _holds(root: Path, artifact: Artifact) -> bool:
    try:
        return digest_file(root / artifact.path).crc32c == artifact.digest.crc32c
    except (CkptMirrorError, OSError):
        return False


def _changed_ns(path: Path) -> int | None:
    try:
        return path.lstat().st_ctime_ns
    except OSError:  # it is gone, or a file system does not answer
        return None
