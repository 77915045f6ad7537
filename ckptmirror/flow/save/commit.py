"""Commit: turns the files that every rank has sealed into a save that exists.

This is the leader's part of a save (DESIGN.md §3, "Save"). The order is the protocol:

1. Every artifact is sealed (complete, checksummed, fsynced) under its temporary name, and its format has checked it.
2. The leader writes a record for each artifact and mirror to the table, not yet claimable, and seals the meta under its
   temporary name.
3. The artifacts get their final names, never replacing anything, and the directory is fsynced.
4. The meta gets its final name, last. From here the save exists.
5. The records are released to the uploader.
6. ``latest`` is swapped. A failure here does not matter.

Rules:
* A failure before step 4 leaves no save. The records of step 2 (or, without mirrors or with a lost table, the sealed
  meta) prove which files are ours, and :func:`remove_uncommitted` removes them, here or at the next start.
* A failure after step 4 leaves a whole save, and the save does not fail: the next start releases its records.
* Steps 3 and 4 hold a lock against a rotation that finishes an earlier one, because equal bytes under a name do not
  show which save wrote them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.errors import CkptMirrorError, IntegrityError
from ckptmirror.core.model import Artifact, Meta, top_names
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.places.trash import empty_trash
from ckptmirror.local import checksummed_writer, directories, files, trash
from ckptmirror.local.checksums import digest_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.listing import Listing
from ckptmirror.local.lock import exclusive
from ckptmirror.local.save_logger import save_logger

if TYPE_CHECKING:  # code that only reads a mirror imports this file and needs no table
    from ckptmirror.local.uploads import UploadsTable

__all__ = [
    "NAMES_LOCK_NAME",
    "SaveCommit",
    "claimed_by_others",
    "commit_save",
    "free_tag",
    "in_order_of_upload",
    "made_by",
    "may_be_meta_of",
    "point_latest",
    "remove_uncommitted",
    "stray_below",
]

NAMES_LOCK_NAME = f"{names.CONTROL_DIR}/names.lock"
"""Held while a save's files get their names, and by a rotation while it removes those of a save without a meta."""

_NAMES_WAIT_S = 60.0
_log = logging.getLogger("ckptmirror.commit")


def free_tag(root: Path, step: int, save_id: str) -> str:
    """Choose the tag of a new save's names: "" if the step's plain names are free, else 8 digits of the save id."""
    return save_id[:8] if step in names.plain_steps(path.name for path in root.iterdir()) else ""


def commit_save(root: Path, table: UploadsTable, mirrors: Sequence[MirrorSpec], meta: Meta) -> None:
    """Commit a sealed save of one node; see :class:`SaveCommit`."""
    commit = SaveCommit(root, table, mirrors, meta)
    commit.prepare()
    commit.publish()
    commit.release()


class SaveCommit:
    """The commit of a sealed save, or of a node's part of one, in the order that the module describes.

    Where a job has several nodes, all of them prepare before any publishes, and one that cannot publish lets the others
    withdraw what they published. So only a crash leaves a save of which some nodes have their part and others do not.
    """

    def __init__(self, root: Path, table: UploadsTable, mirrors: Sequence[MirrorSpec], meta: Meta) -> None:
        self.meta = meta
        self._root = root
        self._table = table
        self._mirrors = mirrors
        self._meta_path = root / names.SaveName(meta.step, meta.tag).meta
        self._sealed: checksummed_writer.ArtifactWriter | None = None

    def prepare(self) -> None:
        """Do the steps up to 2. A failure leaves nothing of the save.

        Raises:
            IntegrityError: A sealed file does not have the size that was reported.
            LocalStorageFull: The disk is full.
        """
        meta = self.meta
        _check_sizes(self._root, meta)
        self._table.add_save(
            meta.save_id,
            meta.step,
            meta.kinds,
            in_order_of_upload(meta),
            [mirror.url for mirror in self._mirrors],
            meta_path=self._meta_path.name,
        )
        with self._taken_back_on_failure():
            self._sealed = checksummed_writer.ArtifactWriter(self._meta_path, meta.save_id)
            self._sealed.write(meta_to_bytes(meta))
            self._sealed.seal()

    def publish(self) -> None:
        """Do the steps 3 and 4. A failure before step 4 leaves nothing of the save.

        Raises:
            NameTaken: Another process created one of the names meanwhile; its files are untouched.
            LocalStorageFull: The disk is full.
        """
        meta, root = self.meta, self._root
        assert self._sealed is not None, "it was prepared"
        with self._taken_back_on_failure(), exclusive(root / NAMES_LOCK_NAME, timeout_s=_NAMES_WAIT_S):
            for name in top_names(meta.artifacts):
                directories.rename_noreplace(
                    root / names.tmp_name(name, meta.save_id), root / name, label="save.publish"
                )
            directories.fsync_dir(root)
            self._sealed.publish()

    def release(self) -> None:
        """Do the steps 5 and 6. A failure is only logged."""
        meta, root = self.meta, self._root
        try:
            self._table.release_save(meta.save_id)
        except (CkptMirrorError, OSError) as error:  # the save exists: the next reconcile releases its records
            save_logger(_log, meta).error(
                "step %d is committed, but its uploads are not released yet: %s; the next start releases them, or "
                "`ckptmirror drain --root %s`",
                meta.step,
                error,
                quote(str(root)),
            )
        try:
            point_latest(root, meta)
        except (CkptMirrorError, OSError) as error:  # only a hint for people: the save exists without the link
            save_logger(_log, meta).warning(
                "step %d is committed, but %s does not name it: %s", meta.step, names.LATEST_NAME, error
            )

    def take_back(self) -> None:
        """Remove what was done of a save that does not exist. The caller raises the reason."""
        if not may_be_meta_of(self._meta_path, self.meta.save_id):
            _take_back(self._root, self._table, self.meta)
        if self._sealed is not None:
            self._sealed.abandon()

    def withdraw(self) -> None:
        """Remove this node's published part of a save of which another node could publish none.

        The meta goes first: without it, what a crash leaves is that of a save that never existed. The records go even
        if they are released: who repairs the records of what is on this disk may have met the part meanwhile.
        """
        try:
            trash.move_to_trash(self._root, self._meta_path)
            directories.fsync_dir(self._root)
        except (OSError, CkptMirrorError) as error:
            save_logger(_log, self.meta).warning(
                "this node's part of the failed save of step %d stays until the next start: %s", self.meta.step, error
            )
            return
        self.take_back()
        try:
            self._table.forget_save(self.meta.save_id, "withdrawn: another node could not commit its part")
        except (OSError, CkptMirrorError) as error:
            save_logger(_log, self.meta).warning(
                "the records of the failed save of step %d stay until the next start: %s", self.meta.step, error
            )

    @contextlib.contextmanager
    def _taken_back_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.take_back()
            raise


def _take_back(root: Path, table: UploadsTable, meta: Meta) -> None:
    """Remove the published files of a failed save. The caller raises the save's own error, not one from here."""
    try:
        remove_uncommitted(root, meta.save_id, made_by(meta))
        table.discard_unreleased([meta.save_id])
    except (OSError, CkptMirrorError) as error:  # its records stay too: they tell the next start what to remove
        save_logger(_log, meta).warning(
            "files of the failed save of step %d stay until the next start: %s", meta.step, error
        )


def may_be_meta_of(path: Path, save_id: str) -> bool:
    """Whether ``path`` may be the meta of this save; True also if a file is there that cannot be read."""
    try:
        return meta_from_bytes(files.read_limited(path, META_LIMIT_BYTES)).save_id == save_id
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (CkptMirrorError, OSError):
        return True


def claimed_by_others(root: Path, save_id: str) -> set[str]:
    """Return the names directly below the root that belong to other saves, by their metas."""
    inventory = read_inventory(root)
    others = [save.meta for save in (*inventory.saves, *inventory.incomplete) if save.meta.save_id != save_id]
    return {name for meta in others for name in top_names(meta.artifacts)}


def in_order_of_upload(meta: Meta) -> list[Artifact]:
    """Return the artifacts in the order in which a node sends them.

    Every node has a copy of what belongs to no single rank. The first sends it at once, the others after the rest: by
    then they find it on the mirror, and do not all send it at the same time.
    """
    return sorted(meta.artifacts, key=lambda artifact: meta.node != 0 and artifact.rank is None)


def point_latest(root: Path, meta: Meta) -> bool:
    """Point ``latest`` at the DCP directory, else at the model file; return False if this node has neither.

    Raises:
        LocalStorageFull: There is no room for a link.
        OSError: The link cannot be replaced.
    """
    name, here = names.SaveName(meta.step, meta.tag), top_names(meta.artifacts)
    target = next((one for one in (name.dcp_dir, name.model) if one in here), None)
    if target is not None:
        directories.replace_link(root / names.LATEST_NAME, target)
    return target is not None


def made_by(meta: Meta) -> dict[str, tuple[int | None, int | None]]:
    """Return the files that a save creates: size and crc32c by path."""
    return {artifact.path: (artifact.digest.size_bytes, artifact.digest.crc32c) for artifact in meta.artifacts}


def remove_uncommitted(root: Path, save_id: str, made: Mapping[str, tuple[int | None, int | None]]) -> None:
    """Remove the files that a save without a meta left on disk.

    A temporary carries the save id. A file with its final name is removed only if this save's own unreleased records or
    sealed meta name it, no other save's meta names it, *and* its bytes have the recorded checksum. So a file that
    another process put there meanwhile stays.

    Args:
        root: The local root.
        save_id: The save's id.
        made: Size and crc32c by path, from the records or the sealed meta.
    """
    claimed = claimed_by_others(root, save_id)
    for name in dict.fromkeys(path.partition("/")[0] for path in made):
        mine = {path: facts for path, facts in made.items() if path.partition("/")[0] == name}
        paths = [root / names.tmp_name(name, save_id)]
        all_there = all(_holds(root / path, *facts) for path, facts in mine.items())
        if all_there and name not in claimed and stray_below(root, [name], mine) is None:
            paths.append(root / name)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                trash.move_to_trash(root, path)
    empty_trash(root)


def stray_below(root: Path, tops: Iterable[str], ours: Collection[str]) -> str | None:
    """Name a file in a save's directories that is not part of the save; None if there is none."""
    listing = Listing(root)
    for top in tops:
        for path in listing.files_below(top) if listing.is_dir(top) else ():
            if path not in ours:
                return f"{path} is not part of the save: move it away, so that the save can be deleted"
    return None


def _holds(path: Path, size_bytes: int | None, crc32c: int | None) -> bool:
    """Whether a regular file with these bytes is there; False if it cannot be read."""
    try:
        digest = digest_file(path)
    except (CkptMirrorError, OSError):
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
                hint="The disk lost written data: check its health, then save again.",
            )


def _size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
