"""One file per rank, read by any number of ranks: this rank's own first, the others only if it does not suffice.

Rules:
* Files are mapped, not read. Values that are kept are copied out of the map, so that a deleted file frees its space.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError
from ckptmirror.formats.shards import read_pieces, spread
from ckptmirror.formats.tensor_files import load_pt

__all__ = ["RankFiles", "below", "is_mapping", "is_sequence", "moved", "rebuilt"]

Key = Hashable


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

    def value(self, path: tuple[Key, ...]) -> Any:
        """Return what is at ``path`` in the first file, pieces as they are.

        Raises:
            IntegrityError: Nothing is there.
        """
        value = self.tree()
        for key in path:
            if not _has(value, key):
                raise IntegrityError(f"{self._paths[self._own].name} has no {'.'.join(map(str, path))}.")
            value = value[key]
        return value

    def others(self, path: tuple[Key, ...]) -> Iterator[Any]:
        """Yield the value at ``path`` in the other ranks' files, reading each file only when needed."""
        for rank in sorted(self._paths):
            if rank != self._own:
                value = self.tree(rank)
                for key in path:
                    value = value[key] if _has(value, key) else None
                yield value

    def full_value(self, path: tuple[Key, ...], like: Any = None) -> Any:
        """Return the value at ``path`` with its pieces joined.

        Args:
            path: Keys and indices from the top.
            like: A live tensor, or a tree of them like the value: saved tensors of the same shape are sharded like it.
        """
        return self._whole(self.value(path), path, like)

    def _whole(self, value: Any, path: tuple[Key, ...], like: Any) -> Any:
        if is_mapping(value):
            return rebuilt(value, {k: self._whole(item, (*path, k), below(like, k)) for k, item in value.items()})
        if is_sequence(value):
            return rebuilt(value, [self._whole(item, (*path, i), below(like, i)) for i, item in enumerate(value)])
        live = like if isinstance(like, torch.Tensor) else None
        result = spread(value, lambda: self.others(path), live, ".".join(map(str, path)))
        return copy.deepcopy(result) if result is value else result


def below(like: Any, key: Any) -> Any:
    """Return what a live tree has at ``key``, or None; below a tensor, every key returns that tensor."""
    return like if isinstance(like, torch.Tensor) else (like[key] if _has(like, key) else None)


def _has(value: Any, key: Any) -> bool:
    if is_sequence(value):
        return isinstance(key, int) and key < len(value)
    return isinstance(value, Mapping) and key in value


def is_mapping(value: Any) -> bool:
    """Whether ``value`` is a container with keys, of a kind that a save marks."""
    return type(value) in (dict, OrderedDict, defaultdict, Counter)


def is_sequence(value: Any) -> bool:
    """Whether ``value`` is a container with positions, of a kind that a save marks."""
    return type(value) in (list, tuple, deque)


def rebuilt(like: Any, items: Any) -> Any:
    """Return ``items`` (a dict or a list) in a new container of the kind of ``like``."""
    if type(like) is OrderedDict:
        ordered = OrderedDict(items)
        vars(ordered).update(vars(like))  # the versions of modules
        return ordered
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, items)
    return deque(items, like.maxlen) if type(like) is deque else type(like)(items)


def moved(tree: Any, device: str) -> Any:
    """Return ``tree`` with its tensors on ``device``."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if is_mapping(tree):
        return rebuilt(tree, {key: moved(value, device) for key, value in tree.items()})
    if is_sequence(tree):
        return rebuilt(tree, [moved(value, device) for value in tree])
    return tree
