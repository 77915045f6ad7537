"""The lists of tensors that ranks wrote beside a save, with a fingerprint of each: on this disk, or on a mirror.

Rules:
* A list is compared with its checksum before it is parsed.
* From a mirror only the lists come, not the tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from ckptmirror.core.errors import CheckpointNotFound, CkptMirrorError, IntegrityError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.core.tensor_lists import is_list, lost_lists
from ckptmirror.core.tensor_proof import Summed, read_list
from ckptmirror.flow.fetch.load import meta_of
from ckptmirror.flow.fetch.partial import receive_whole
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import opened_mirror
from ckptmirror.flow.places.reference import CheckpointReference, list_hint
from ckptmirror.local import files
from ckptmirror.local.checksums import crc32c

__all__ = ["all_lists", "lists_of", "read_tensor_list"]


def lists_of(meta: Meta, kind: Kind) -> Mapping[int, Artifact]:
    """Return the lists that a save names, by rank."""
    return {one.rank: one for one in meta.artifacts_of(kind) if is_list(one.path) and one.rank is not None}


def read_tensor_list(root: Path, artifact: Artifact) -> list[Summed]:
    """Read a rank's list.

    Raises:
        IntegrityError: It is lost, or is not what was saved, or no list.
    """
    path = root / artifact.path
    try:
        data = files.read_limited(path, artifact.digest.size_bytes)
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is lost.") from error
    if len(data) != artifact.digest.size_bytes or crc32c(data) != artifact.digest.crc32c:
        raise IntegrityError(f"{path} is not what was saved.")
    try:
        return read_list(data)
    except CkptMirrorError as error:
        raise IntegrityError(f"{path} is not a list of tensors: {error.message}") from error


def all_lists(found: CheckpointReference) -> list[list[Summed]]:
    """Return the list of each rank of a save.

    Raises:
        CheckpointNotFound: The save is gone.
        IntegrityError: A list is not what was saved.
        StoreTemporary: The mirror does not answer.
    """
    with _at_hand(found) as (root, lists):
        return [read_tensor_list(root, one) for one in lists]


@contextmanager
def _at_hand(found: CheckpointReference) -> Iterator[tuple[Path, list[Artifact]]]:
    if isinstance(found.dir, Path):
        if found.save_id is None:
            raise CheckpointNotFound(
                f"{found.path} is a legacy checkpoint, which has no list of its tensors.",
                hint="Only saves that ckptmirror wrote can be compared.",
            )
        yield found.dir, _every_list(meta_of(found.dir, found), found)
        return
    with opened_mirror(found.dir) as mirror:
        meta = mirror_catalog(mirror, step=found.step).saves.get(found.save_id or "")
        if meta is None:
            raise CheckpointNotFound(f"Step {found.step} is no longer whole on {found.dir}.", hint=list_hint(found.dir))
        with tempfile.TemporaryDirectory(prefix="ckptmirror-") as name:
            lists = _every_list(meta, found)
            receive_whole(mirror, meta, Path(name), lists)
            yield Path(name), lists


def _every_list(meta: Meta, found: CheckpointReference) -> list[Artifact]:
    if lost := lost_lists(meta):
        raise IntegrityError(f"{found.dir} has lost {SaveName(meta.step, meta.tag).tensors(lost[0])}.")
    lists = list(lists_of(meta, found.kind).values())
    if not lists:
        places = f"--mirror {quote(str(meta.staged_from))} --dest {quote(str(found.dir))}"
        raise CheckpointNotFound(
            f"{found.dir} has no list of the tensors of step {meta.step}, so nothing can be compared.",
            hint=f"If staged, `ckptmirror stage --full --step {meta.step} --kind {found.kind} {places}` adds it.",
        )
    return lists
