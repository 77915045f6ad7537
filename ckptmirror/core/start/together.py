"""What the metas of one save tell together, wherever they are: whether the parts are all, and what a whole save has.

Rules:
* A part is one node's share of a save; of an emergency snapshot, each rank has a share.
* A meta that tells all of a save does so in any place; else all parts together do. A copy that was staged for
  evaluation tells of its own files alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.meta_merging import check_same_save, merge_emergency, merge_parts
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.tensor_lists import is_list

__all__ = ["has_all", "joined", "shares_of", "told_by"]


def shares_of(meta: Meta) -> tuple[tuple[int, ...], int]:
    """Return which shares of a save a part has, and how many the save has."""
    if not _is_snapshot(meta):
        return (meta.node,), meta.nodes
    return tuple(sorted({one.rank for one in meta.artifacts if one.rank is not None})), meta.world_size


def joined(parts: Sequence[Meta]) -> Meta | None:
    """Return the save that these parts make up; None if they are not all.

    Raises:
        BrokenMeta: They contradict one another.
    """
    check_same_save(parts)
    of_shares = {shares_of(meta)[0]: meta for meta in parts}
    if len({share for shares in of_shares for share in shares}) < shares_of(parts[0])[1]:
        return None
    return (merge_emergency if _is_snapshot(parts[0]) else merge_parts)(list(of_shares.values()))


def told_by(metas: Sequence[Meta], on_disks: Meta | None, on_mirrors: Sequence[Meta]) -> Meta | None:
    """Return the meta of a whole save, from those that places have of it; None if they do not tell all of it.

    Args:
        metas: All of them, at least one.
        on_disks: What the disks of a job have of it together, if that is all.
        on_mirrors: The metas of its copies on mirrors.
    """
    whole = [meta for meta in metas if meta.is_whole]
    if complete := [meta for meta in whole if not meta.partial]:
        return max(complete, key=lambda meta: len(meta.artifacts))
    if on_disks is not None and not on_disks.partial:
        return on_disks
    if parts := [meta for meta in metas if not meta.is_whole]:
        with contextlib.suppress(BrokenMeta):
            if (save := joined(parts)) is not None:
                return save
    staged = max(whole, key=lambda meta: len(meta.artifacts), default=None)
    if staged is None:
        return None
    return staged.narrowed([kind for kind in staged.kinds if has_all(staged, kind, on_mirrors)])


def has_all(meta: Meta, kind: Kind, on_mirrors: Sequence[Meta]) -> bool:
    """Return whether a copy on a disk has every file that a resume from this kind reads.

    Args:
        meta: The meta of the copy.
        kind: One of its kinds.
        on_mirrors: The metas of the save's copies on mirrors: with one of that kind, it is compared.
    """
    if not meta.partial or meta.staged_from is None:
        return True
    mine = {names.untagged(artifact.path) for artifact in meta.artifacts_of(kind)}
    if elsewhere := [copy for copy in on_mirrors if kind in copy.kinds]:
        needs = [[one.path for one in copy.artifacts_of(kind) if not is_list(one.path)] for copy in elsewhere]
        return all({names.untagged(path) for path in paths} <= mine for paths in needs)
    name = names.SaveName(meta.step)
    if meta.world_size > len(mine) or (kind == "model" and name.optim(0) not in mine):
        return False
    return all(name.extra(rank) in mine for rank in range(meta.world_size))


def _is_snapshot(meta: Meta) -> bool:
    return meta.kinds == ("emergency",)
