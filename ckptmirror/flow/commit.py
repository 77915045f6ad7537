"""Commit: from files that every rank has sealed to a save that exists.

This is the leader's part of a save (DESIGN.md §3, "Save"). Its order is the protocol:

1. every artifact lies sealed (complete, checksummed, fsynced) under its temporary name, and its format has checked it;
2. a record per artifact and mirror is durable in the table, not yet claimable;
3. the artifacts get their final names, never replacing anything, and the directory is fsynced;
4. the meta is written, last: from here the save exists;
5. the records are released to the uploader;
6. ``latest`` is swapped; whether that works decides nothing.

Rules:
* Whatever happens before step 4 leaves no save: what was made is provably ours by the records of step 2, and is
  removed by :func:`remove_uncommitted`, here or at the next start.
* Whatever happens after step 4 leaves a whole save: the next start releases its records.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.flow.mirrors import MirrorSpec
from ckptmirror.local import files
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.uploads import UploadsTable

__all__ = ["commit_save", "free_tag", "remove_uncommitted", "top_names"]

_log = logging.getLogger("ckptmirror.commit")


def free_tag(root: Path, step: int, save_id: str) -> str:
    """Choose the tag of a new save's names: "" if the step's plain names are free, else 8 digits of the save id."""
    for entry in os.scandir(root):
        parsed = names.parse_name(entry.name)
        if parsed is not None and parsed.role != "tmp" and parsed.step == step and not parsed.tag:
            return save_id[:8]
    return ""


def top_names(artifacts: Sequence[Artifact]) -> list[str]:
    """Return the names directly below the root that a save's artifacts occupy, each once."""
    return list(dict.fromkeys(artifact.path.partition("/")[0] for artifact in artifacts))


def commit_save(root: Path, table: UploadsTable, mirrors: Sequence[MirrorSpec], meta: Meta) -> None:
    """Make a sealed save exist. See the module's order.

    Raises:
        IntegrityError: A sealed file does not have the size that was reported.
        NameTaken: Someone else created one of the names meanwhile; nothing of theirs was touched.
        LocalStorageFull: Nothing of the save is left.
    """
    _check_sizes(root, meta)
    table.add_save(
        meta.save_id,
        meta.step,
        meta.kinds,
        meta.artifacts,
        [mirror.url for mirror in mirrors],
        meta_path=names.SaveName(meta.step, meta.tag).meta,
    )
    meta_path = root / names.SaveName(meta.step, meta.tag).meta
    try:
        for name in top_names(meta.artifacts):
            files.rename_noreplace(root / names.tmp_name(name, meta.save_id), root / name, label="save.publish")
        files.fsync_dir(root)
        files.write_bytes(meta_path, meta_to_bytes(meta), save_id=meta.save_id)
    except BaseException:
        if not meta_path.exists():
            made = {artifact.path: (artifact.digest.size_bytes, artifact.digest.crc32c) for artifact in meta.artifacts}
            remove_uncommitted(root, meta.save_id, made)
            table.discard_unreleased([meta.save_id])
        raise
    table.release_save(meta.save_id)
    try:
        files.replace_link(root / names.LATEST_NAME, latest_target(meta))
    except CkptMirrorError as error:  # a hint for people: the save exists, whatever stands in the way of the link
        _log.warning("step %d is committed, but %s does not name it: %s", meta.step, names.LATEST_NAME, error)


def latest_target(meta: Meta) -> str:
    """Return what ``latest`` points at: the DCP directory, else the model file."""
    name = names.SaveName(meta.step, meta.tag)
    return name.dcp_dir if "dcp" in meta.kinds else name.model


def remove_uncommitted(root: Path, save_id: str, made: Mapping[str, tuple[int | None, int | None]]) -> None:
    """Remove what a save without a meta left on disk.

    A temporary carries the save id. What has its final name is removed only where this save's own unreleased records
    name it *and* its bytes have the recorded checksum: a file that someone else put there meanwhile stays.

    Args:
        root: The local root.
        save_id: The save's id.
        made: Size and crc32c by path, from the records.
    """
    for name in dict.fromkeys(path.partition("/")[0] for path in made):
        mine = {path: facts for path, facts in made.items() if path.partition("/")[0] == name}
        paths = [root / names.tmp_name(name, save_id)]
        if all(_holds(root / path, *facts) for path, facts in mine.items()):
            paths.append(root / name)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                files.move_to_trash(root, path)
    files.empty_trash(root)


def _holds(path: Path, size_bytes: int | None, crc32c: int | None) -> bool:
    try:
        digest = digest_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (digest.size_bytes, digest.crc32c) == (size_bytes, crc32c)


def _check_sizes(root: Path, meta: Meta) -> None:
    for artifact in meta.artifacts:
        top, _, below = artifact.path.partition("/")
        sealed = root / names.tmp_name(top, meta.save_id) / below if below else root / names.tmp_name(top, meta.save_id)
        size = _size_of(sealed)
        if size != artifact.digest.size_bytes:
            raise IntegrityError(
                f"{sealed.name} has {size} bytes on disk, but {artifact.digest.size_bytes} were written.",
                hint="The disk lost what was written: check its health, then save again.",
            )


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
