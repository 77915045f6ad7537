"""Emptying a root's trash, except for what an interrupted replacement still needs.

Rules:
* The files that a meta in the trash names may be deleted, unless a meta outside the trash names them too. The next
  stage of that step relies on it to make room (``fetch.destination``). So such a meta stays until its files are gone.
* What a standing meta names, and a crash kept from being replaced, stays until a reconcile puts it back.
* Everything else is deleted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Artifact, Meta, top_names
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.local import files, trash
from ckptmirror.local.inventory import Inventory, read_inventory

__all__ = ["empty_trash", "not_replaced", "parsed_in_trash"]

_log = logging.getLogger("ckptmirror.trash")


def parsed_in_trash(entry: Path) -> names.ParsedName | None:
    """Parse the name that an entry of the trash had before."""
    return names.parse_name(entry.name.rpartition(".")[0])


def not_replaced(inventory: Inventory) -> Iterator[tuple[Path, str, Meta]]:
    """Yield what a crash kept from being replaced: its place in the trash, its name before, and the meta that names it.

    It has all files of the name, of their sizes, and nothing has the name now.
    """
    for save in inventory.incomplete:
        for top in top_names(save.meta.artifacts):
            if not os.path.lexists(inventory.root / top):
                mine = [one for one in save.meta.artifacts if one.path.partition("/")[0] == top]
                found = next((entry for entry in inventory.trash if _is_whole(entry, top, mine)), None)
                if found is not None:
                    yield found, top, save.meta


def empty_trash(root: Path) -> None:
    """Empty the root's trash, except for metas whose files are still in the root, and for what was not replaced.

    An entry that cannot be deleted is logged and stays; it must not block a start or a rotation.
    """
    trash_dir = root / names.TRASH_DIR
    if not trash_dir.is_dir():
        return
    inventory: Inventory | None = None
    for entry in sorted(trash_dir.iterdir()):
        parsed = parsed_in_trash(entry)
        if parsed is not None and (parsed.role == "meta" or _has_meta(root, parsed)):
            inventory = inventory or read_inventory(root)
            is_needed = _condemns if parsed.role == "meta" else _is_not_replaced
            if is_needed(inventory, entry):
                continue
        try:
            trash.remove_tree_in_trash(root, entry)
        except CkptMirrorError as error:
            _log.error("cannot delete %s from the trash: %s", entry.name, error)


def _has_meta(root: Path, parsed: names.ParsedName) -> bool:
    return parsed.step is not None and (root / names.SaveName(parsed.step, parsed.tag).meta).exists()


def _is_not_replaced(inventory: Inventory, entry: Path) -> bool:
    return any(found == entry for found, _, _ in not_replaced(inventory))


def _is_whole(entry: Path, top: str, artifacts: Sequence[Artifact]) -> bool:
    """Whether an entry of the trash had a name, and has all files there of their sizes."""
    if entry.name.rpartition(".")[0] != top[:200]:
        return False
    paths = [entry / below if (below := one.path.partition("/")[2]) else entry for one in artifacts]
    return all(
        path.is_file() and not path.is_symlink() and path.stat().st_size == one.digest.size_bytes
        for path, one in zip(paths, artifacts, strict=True)
    )


def _condemns(inventory: Inventory, entry: Path) -> bool:
    try:
        meta = meta_from_bytes(files.read_limited(entry, META_LIMIT_BYTES))
    except (CkptMirrorError, FileNotFoundError):
        return False
    standing = {artifact.path for save in (*inventory.saves, *inventory.incomplete) for artifact in save.meta.artifacts}
    unnamed = {item.path.relative_to(inventory.root).parts[0] for item in inventory.foreign}
    return any(a.path not in standing and a.path.partition("/")[0] in unnamed for a in meta.artifacts)
