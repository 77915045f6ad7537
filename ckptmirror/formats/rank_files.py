"""One file per rank, read by any number of ranks: this rank's own first, the others only if it does not suffice.

Rules:
* Files are mapped, not read. Values that are kept are copied out of the map, so that a deleted file frees its space.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.containers import TreePath, changed, item_at, with_item
from ckptmirror.core.errors import IntegrityError, UnsafePickle, UsageError
from ckptmirror.core.model import Meta
from ckptmirror.formats.shards import read_pieces, spread
from ckptmirror.formats.tensor_bytes import has_plain_bytes
from ckptmirror.untrusted.tensor_files import load_pt

__all__ = ["Copies", "RankFiles", "check_device", "live_at", "moved", "named_file", "rank_files"]

_ABSENT = object()
_FREE_AGAIN_BYTES = 64 << 20  # of memory that a file shows more than once; beyond it
_TIMES_AGAIN = 4  # times as much as the file holds


def named_file(root: Path, named: Container[str] | None, path: str) -> Path:
    """Return a file of a save. Only what its meta names (all, if it has none) has been verified.

    Raises:
        IntegrityError: The meta does not name it.
    """
    if named is not None and path not in named:
        raise IntegrityError(f"{root / path} is not read: the meta of the save does not name it.")
    return root / path


def rank_files(root: Path, meta: Meta, name_of: Callable[[int], str], rank: int = 0) -> RankFiles | None:
    """Return the ranks' files in one role, of those that ``meta`` names; None if it names none.

    Args:
        root: The directory with the files of the save.
        meta: The save.
        name_of: Returns the file's name, for a rank.
        rank: The rank that reads.
    """
    named = {artifact.path for artifact in meta.artifacts}
    ranks = {artifact.rank for artifact in meta.artifacts if artifact.rank is not None}  # not each below world_size:
    paths = {one: root / name_of(one) for one in ranks if one < meta.world_size and name_of(one) in named}  # 10**7 fit
    return RankFiles(paths, rank, world_size=meta.world_size) if paths else None


class RankFiles:
    """The files that the ranks of a save wrote in one role.

    Args:
        paths: Path by rank.
        rank: The rank that reads: its file is the first, else that of the lowest rank.
        at: The place in the files that is seen from here as the top.
        trees: The contents by rank, as far as they were read.
        world_size: How many ranks saved them; by default those in ``paths``. A node may have only some of the files.
    """

    def __init__(
        self,
        paths: Mapping[int, Path],
        rank: int,
        at: TreePath = (),
        trees: dict[int, Any] | None = None,
        *,
        world_size: int | None = None,
    ) -> None:
        self._paths = paths
        self._own = rank if rank in paths else min(paths)
        self._at = at
        self._trees = {} if trees is None else trees
        self.world_size = len(paths) if world_size is None else world_size

    def tree(self, rank: int | None = None) -> Any:
        """Return the decoded contents of one rank's file, by default the first; None if nothing is there."""
        rank = self._own if rank is None else rank
        if rank not in self._paths:
            raise IntegrityError(
                f"The file of rank {rank} is not among {sorted(p.name for p in self._paths.values())}."
            )
        if rank not in self._trees:
            self._trees[rank] = read_pieces(load_pt(self._paths[rank], mmap=True))
        return item_at(self._trees[rank], self._at)

    @property
    def ranks(self) -> list[int]:
        """The ranks whose files are here."""
        return sorted(self._paths)

    def of(self, rank: int) -> RankFiles:
        """Return the same files, of which that of ``rank`` is the first."""
        return RankFiles(self._paths, rank, self._at, self._trees, world_size=self.world_size)

    def below(self, key: str) -> RankFiles:
        """Return the same files, seen from what they have at ``key``."""
        return RankFiles(self._paths, self._own, (*self._at, key), self._trees, world_size=self.world_size)

    def replaced(self, values: Mapping[TreePath, Any]) -> RankFiles:
        """Return the same files, seen with other values at some paths of the first one."""
        self.tree()
        tree = self._trees[self._own]
        for path, value in values.items():
            tree = with_item(tree, (*self._at, *path), value)
        trees = {**self._trees, self._own: tree}
        return RankFiles(self._paths, self._own, self._at, trees, world_size=self.world_size)

    def value(self, path: TreePath) -> Any:
        """Return what is at ``path`` in the first file, pieces as they are.

        Raises:
            IntegrityError: Nothing is there.
        """
        value = item_at(self.tree(), path, _ABSENT)
        if value is _ABSENT:
            raise IntegrityError(f"{self._paths[self._own].name} has no {self._name(path)}.")
        return value

    def others(self, path: TreePath) -> Iterator[Any]:
        """Yield the value at ``path`` in the other ranks' files, reading each file only when needed."""
        for rank in self.ranks:
            if rank != self._own:
                yield item_at(self.tree(rank), path)

    def full_value(self, path: TreePath, like: Any = None) -> Any:
        """Return the value at ``path`` with its pieces joined.

        Args:
            path: Keys and indices from the top.
            like: A live tensor, or a tree of them like the value: saved tensors of the same shape are sharded like it.
        """
        own = Copies()

        def full(value: Any, below: TreePath) -> Any:
            live = live_at(like, below)
            live = live if isinstance(live, torch.Tensor) else None
            at = (*path, *below)
            result = spread(value, lambda: self.others(at), live, self._name(at))
            return own.copy(result) if result is value else result

        return changed(self.value(path), full)

    def _name(self, path: TreePath) -> str:
        return ".".join(map(str, (*self._at, *path)))


class Copies:
    """Copies values one by one; memory that a file shows again and again is copied only so often."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._again_left_bytes = _FREE_AGAIN_BYTES

    def copy(self, value: Any) -> Any:
        """Return a copy.

        Raises:
            UnsafePickle: The file holds far less than what it shows.
        """
        if isinstance(value, torch.Tensor) and has_plain_bytes(value) and not value.is_meta:
            memory = value.untyped_storage()
            is_again = memory.data_ptr() in self._seen
            self._seen.add(memory.data_ptr())
            self._again_left_bytes -= value.nbytes if is_again else -_TIMES_AGAIN * memory.nbytes()
            if self._again_left_bytes < 0:
                raise UnsafePickle("It has one tensor in so many places that copies would take much more memory.")
        return copy.deepcopy(value)


def live_at(like: Any, path: TreePath) -> Any:
    """Return what a live tree has at ``path``, or None; below a tensor, every path leads to that tensor."""
    for key in path:
        if isinstance(like, torch.Tensor):
            break
        like = item_at(like, (key,))
    return like


def check_device(map_location: str) -> None:
    """Check that tensors can be moved to a device; a torch without CUDA raises an AssertionError.

    Raises:
        UsageError: This machine has none of that name, or cannot use it.
    """
    try:
        torch.empty(0, device=map_location)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"map_location is {map_location!r}, and this machine cannot use such a device: {error}",
            hint='Write map_location="cpu", or the name of a device that this machine has.',
        ) from error


def moved(tree: Any, device: str) -> Any:
    """Return ``tree`` with its tensors on ``device``."""

    def move(leaf: Any, _: TreePath) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf

    return changed(tree, move)
