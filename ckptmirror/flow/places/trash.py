"""Emptying a root's trash, except for what an interrupted replacement still needs.

Rules:
* The files that a meta in the trash names may be deleted, unless a meta outside the trash names them too. The next
  stage of that step relies on it to make room (``fetch.destination``). So such a meta stays until its files are gone.
* Everything else is deleted.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.flow.places.catalog import META_LIMIT_BYTES
from ckptmirror.local import files, trash
from ckptmirror.local.inventory import Inventory, read_inventory

__all__ = ["empty_trash", "parsed_in_trash"]

_log = logging.getLogger("ckptmirror.trash")


def parsed_in_trash(entry: Path) -> names.ParsedName | None:
    """Parse the name that an entry of the trash had before."""
    return names.parse_name(entry.name.rpartition(".")[0])


def empty_trash(root: Path) -> None:
    """Empty the root's trash, except for metas whose files are still in the root.

    An entry that cannot be deleted is logged and stays; it must not block a start or a rotation.
    """
    trash_dir = root / names.TRASH_DIR
    if not trash_dir.is_dir():
        return
    inventory: Inventory | None = None
    for entry in sorted(trash_dir.iterdir()):
        parsed = parsed_in_trash(entry)
        if parsed is not None and parsed.role == "meta":
            inventory = inventory or read_inventory(root)
            if _condemns(inventory, entry):
                continue
        try:
            trash.remove_tree_in_trash(root, entry)
        except CkptMirrorError as error:
            _log.error("cannot delete %s from the trash: %s", entry.name, error)


def _condemns(inventory: Inventory, entry: Path) -> bool:
    try:
        meta = meta_from_bytes(files.read_limited(entry, META_LIMIT_BYTES))
    except (CkptMirrorError, FileNotFoundError):
        return False
    standing = {artifact.path for save in (*inventory.saves, *inventory.incomplete) for artifact in save.meta.artifacts}
    unnamed = {item.path.relative_to(inventory.root).parts[0] for item in inventory.foreign}
    return any(a.path not in standing and a.path.partition("/")[0] in unnamed for a in meta.artifacts)
