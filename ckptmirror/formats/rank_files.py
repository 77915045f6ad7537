"""One file per rank, read by any number of ranks: this rank's own first, the others only if it does not suffice.

Rules:
* Files are mapped, not read. Values that are kept are copied out of the map, so that a deleted file frees its space.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.containers import TreePath, changed, item_at
from ckptmirror.formats.shards import read_pieces, spread
from ckptmirror.formats.tensor_files import load_pt

__all__ = ["RankFiles", "live_at", "moved"]

_ABSENT = object()


class RankFiles:
    """The files that the ranks of a save wrote in one role.

    Args:
        paths: Path by rank.
        rank: The rank that reads.
    """

    def __init__(self, paths: Mapping[int, Path], rank: int) -> None:
        if not paths:
            raise IntegrityError("The save names no file to read.")
        self._paths = paths
        self._own = rank if rank in paths else min(paths)
        self._trees: dict[int, Any] = {}

    def tree(self, rank: int | None = None) -> Any:
        """Return the decoded contents of one rank's file, by default this rank's, else the lowest rank's."""
        rank = self._own if rank is None else rank
        if rank not in self._paths:
            raise IntegrityError(
                f"The file of rank {rank} is not among {sorted(p.name for p in self._paths.values())}."
            )
        if rank not in self._trees:
            self._trees[rank] = read_pieces(load_pt(self._paths[rank], mmap=True))
        return self._trees[rank]

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote the files."""
        return sorted(self._paths)

    def of(self, rank: int) -> RankFiles:
        """Return the same files, reading those of ``rank`` first."""
        return RankFiles(self._paths, rank)

    def value(self, path: TreePath) -> Any:
        """Return what is at ``path`` in the first file, pieces as they are.

        Raises:
            IntegrityError: Nothing is there.
        """
        value = item_at(self.tree(), path, _ABSENT)
        if value is _ABSENT:
            raise IntegrityError(f"{self._paths[self._own].name} has no {'.'.join(map(str, path))}.")
        return value

    def others(self, path: TreePath) -> Iterator[Any]:
        """Yield the value at ``path`` in the other ranks' files, reading each file only when needed."""
        for rank in sorted(self._paths):
            if rank != self._own:
                yield item_at(self.tree(rank), path)

    def full_value(self, path: TreePath, like: Any = None) -> Any:
        """Return the value at ``path`` with its pieces joined.

        Args:
            path: Keys and indices from the top.
            like: A live tensor, or a tree of them like the value: saved tensors of the same shape are sharded like it.
        """

        def full(value: Any, below: TreePath) -> Any:
            live, at = live_at(like, below), (*path, *below)
            live = live if isinstance(live, torch.Tensor) else None
            result = spread(value, lambda: self.others(at), live, ".".join(map(str, at)))
            return copy.deepcopy(result) if result is value else result

        return changed(self.value(path), full)


def live_at(like: Any, path: TreePath) -> Any:
    """Return what a live tree has at ``path``, or None; below a tensor, every path leads to that tensor."""
    for key in path:
        if isinstance(like, torch.Tensor):
            break
        like = item_at(like, (key,))
    return like


def moved(tree: Any, device: str) -> Any:
    """Return ``tree`` with its tensors on ``device``."""
    return changed(tree, lambda leaf, _: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
