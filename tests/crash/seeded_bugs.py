"""Known bugs, each planted by replacing one function in a child process. The campaigns' checks must find every one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.model import Meta, top_names
from ckptmirror.core.retention import MirrorSafety
from ckptmirror.flow.retention import reconcile, rotation
from ckptmirror.flow.save import commit, save
from ckptmirror.flow.start import bring
from ckptmirror.flow.upload.artifact import ArtifactUpload
from ckptmirror.local import crashpoints, directories, files, trash
from ckptmirror.local.uploads import UploadsTable, rows
from ckptmirror.stores import file as file_store

__all__ = ["BUGS"]


def plant(place: Any, name: str, value: Any) -> None:
    """Replace an attribute that is there; a bug in something that is gone would prove nothing."""
    assert hasattr(place, name), f"{place.__name__} has no {name}"
    setattr(place, name, value)


def the_meta_is_written_first() -> None:
    def publish(this: commit.SaveCommit) -> None:
        root, meta = this._root, this.meta
        files.write_bytes(this._meta_path, meta_to_bytes(meta), save_id=meta.save_id)
        for name in top_names(meta.artifacts):
            directories.rename_noreplace(root / names.tmp_name(name, meta.save_id), root / name, label="save.publish")
        directories.fsync_dir(root)
        this._table.release_save(meta.save_id)
        commit.point_latest(root, meta)

    plant(commit.SaveCommit, "publish", publish)


def a_save_replaces_another() -> None:
    def rename(source: Path, target: Path, *, label: str = "file.publish") -> None:
        with crashpoints.around(label):
            if target.is_dir():
                target.rename(target.with_name("old-" + target.name))
            os.rename(source, target)

    plant(save, "free_tag", lambda *_: "")
    plant(files, "rename_noreplace", rename)


def latest_is_swapped_before_the_commit() -> None:
    honest = commit.SaveCommit.publish

    def publish(this: commit.SaveCommit) -> None:
        for name in top_names(this.meta.artifacts)[:1]:
            directories.replace_link(this._root / names.LATEST_NAME, name)
        honest(this)

    plant(commit.SaveCommit, "publish", publish)


def nothing_of_a_cut_short_save_is_removed() -> None:
    plant(reconcile, "remove_uncommitted", lambda *_: None)


def whatever_has_the_name_is_removed() -> None:
    plant(commit, "_holds", lambda *_: True)


def records_are_verified_before_the_upload() -> None:
    def send(self: Any) -> None:
        meta = self._local_meta()
        digest = next(a.digest for a in meta.artifacts if a.path == self._record.path)
        info = file_store.ObjectInfo(self._record.path, digest.size_bytes, 1, digest.crc32c)
        self._verify(info, digest)

    plant(ArtifactUpload, "send", send)


def the_mirrors_meta_goes_first() -> None:
    honest = UploadsTable._next

    def meta_first(self: Any, connection: Any, mirror: str, exclude: Any) -> Any:
        waiting = rows.iterate_records(connection, "read all records in a state", {"state": "pending"})
        return next((r for r in waiting if r.role == "meta"), None) or honest(self, connection, mirror, exclude)

    plant(UploadsTable, "_next", meta_first)


def what_arrives_is_not_compared() -> None:
    plant(file_store, "_verify", lambda *_: None)


def rotation_is_blind() -> None:
    def safe(table: Any, mirrors: Sequence[Any], save_id: str) -> tuple[MirrorSafety, ...]:
        return tuple(MirrorSafety(mirror.url, mirror.required, True, True, "") for mirror in mirrors)

    plant(rotation, "save_safety", safe)
    plant(rotation, "why_not_safe", lambda *_: None)


def rotation_deletes_in_place() -> None:
    def delete(root: Path, table: UploadsTable, meta: Meta) -> None:
        for name in (*top_names(meta.artifacts), names.SaveName(meta.step, meta.tag).meta):
            trash.move_to_trash(root, root / name)
        table.forget_save(meta.save_id)

    plant(rotation, "_delete", delete)


def an_interrupted_rotation_is_forgotten() -> None:
    plant(rotation, "_finish", lambda *_: [])


def a_repair_that_was_cut_short_is_forgotten() -> None:
    plant(bring, "being_brought", lambda _root: None)


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        the_meta_is_written_first,
        a_save_replaces_another,
        latest_is_swapped_before_the_commit,
        nothing_of_a_cut_short_save_is_removed,
        whatever_has_the_name_is_removed,
        records_are_verified_before_the_upload,
        the_mirrors_meta_goes_first,
        what_arrives_is_not_compared,
        rotation_is_blind,
        rotation_deletes_in_place,
        an_interrupted_rotation_is_forgotten,
        a_repair_that_was_cut_short_is_forgotten,
    )
}
