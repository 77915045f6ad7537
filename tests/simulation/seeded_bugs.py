"""Protocol bugs, planted one at a time, to see that the simulation finds them.

Rules:
* Each is a change that a hurried developer might make, by one replaced function, undone afterwards.
* They are planted in campaigns and in a test of their own, never anywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ckptmirror.core.errors import StoreTemporary
from ckptmirror.core.model import Digest, Meta
from ckptmirror.core.retention import MirrorSafety
from ckptmirror.core.start import decide, lineage
from ckptmirror.flow.retention import reconcile, rotation
from ckptmirror.flow.save import commit
from ckptmirror.flow.start import claim
from ckptmirror.flow.upload.artifact import ArtifactUpload
from ckptmirror.flow.upload.meta import MetaUpload
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores.base import ObjectInfo

__all__ = ["SEEDED_BUGS", "planted"]

Bug = tuple[Any, str, Callable[[Any], Any]]
"""Where a name lies, the name, and what makes the wrong thing of the right one."""


def _all_safe(_right: Any) -> Any:
    def save_safety(_table: Any, mirrors: Any, _save_id: str) -> tuple[MirrorSafety, ...]:
        return tuple(MirrorSafety(mirror.url, mirror.required, True, True) for mirror in mirrors)

    return save_safety


def _no_reason(_right: Any) -> Any:
    return lambda *_: None


def _fork_ignored(right: Any) -> Any:
    return lambda way, _left_at, saves: right(way, {}, saves)


def _deletes_by_name(_right: Any) -> Any:
    return lambda path, *_: os.path.lexists(path)


def _releases_without_meta(_right: Any) -> Any:
    def discard(table: UploadsTable, save_ids: Any) -> int:
        for save_id in save_ids:
            table.release_save(save_id)
        return 0

    return discard


def _ignores_unknown(right: Any) -> Any:
    def enter(run: claim.RunClaim, mirror: Any, changed: Any) -> None:
        there, _ = claim.read_mirror_attempts(mirror)
        if there is not None:
            known = run._claim.known | {attempt.id for attempt in there.attempts}
            run._claim = replace(run._claim, known=known)
        right(run, mirror, changed)

    return enter


def _all_count(right: Any) -> Any:
    def count(evidence: Any) -> Any:
        counted = right(evidence)
        order = lineage.lineage(counted.known.values(), counted.saves)
        return replace(counted, counting=frozenset(counted.known), order=order)

    return count


def _fault_is_success(right: Any) -> Any:
    def create(upload: ArtifactUpload, name: str, digest: Digest, meta: Meta) -> ObjectInfo | None:
        try:
            found: ObjectInfo | None = right(upload, name, digest, meta)
        except StoreTemporary:
            return ObjectInfo(name, digest.size_bytes, 1, digest.crc32c, {"ckptmirror-save": meta.save_id})
        return found

    return create


SEEDED_BUGS: dict[str, list[Bug]] = {
    "rotation does not ask whether a save is on the mirror": [
        (rotation, "save_safety", _all_safe),
        (rotation, "why_not_safe", _no_reason),
    ],
    "rotation trusts the table and does not ask the mirror again": [(rotation, "why_not_safe", _no_reason)],
    "the lineage ignores where an attempt was left": [(lineage, "_on_lineage", _fork_ignored)],
    "the meta goes to the mirror before its artifacts": [
        (ArtifactUpload, "_create", _fault_is_success),
        (MetaUpload, "_check_artifacts", _no_reason),  # which would notice, and have them sent again
    ],
    "what a crash left is discarded by name": [(commit, "_holds", _deletes_by_name)],
    "a reconcile releases records without a meta": [
        (UploadsTable, "discard_unreleased", _releases_without_meta),
        (reconcile, "remove_uncommitted", _no_reason),
    ],
    "a claim ignores attempts that it does not know": [(claim.RunClaim, "_enter", _ignores_unknown)],
    "an attempt counts from its claim": [(decide, "count", _all_count)],
    "a start trusts any save while a mirror is silent": [
        (decide._Start, "_vouches_for", lambda _: lambda *_args: True),
        (decide, "rival_of", _no_reason),
    ],
    "another save's object counts as ours": [(ArtifactUpload, "_is_right", lambda _: lambda *_args: True)],
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Plant one for the body."""
    right = [(place, name, getattr(place, name)) for place, name, _ in SEEDED_BUGS[bug]]
    try:
        for (place, name, found), (_, _, wrong) in zip(right, SEEDED_BUGS[bug], strict=True):
            setattr(place, name, wrong(found))
        yield
    finally:
        for place, name, found in right:
            setattr(place, name, found)
