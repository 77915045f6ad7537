"""What a rank gets of a value of which each rank of a save has its own, where an object or a function can merge them.

Rules:
* An object with ``merge_state_dicts(states, rank, world_size)``, as the data loader or anywhere in extra, gets the
  states of all ranks in every load. What it returns is its saved state from then on.
* A value of extra for which the state has a function in ``merge_extra`` is merged if the number of ranks has changed.
  So is the average of a value that each rank has of its own, by the function that ``per_rank`` has for that.
* Everything is merged before anything of it is loaded: a load reads one rank's file, with the merged values in it.
* Files of other ranks are read only when their state is asked for. A function gets a list, as torch's take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from ckptmirror.core.containers import TreePath, has, item_at, place, placed_leaves, takes_state
from ckptmirror.core.errors import CkptMirrorError, UsageError
from ckptmirror.core.per_rank import function_for, name_of_average, saved_names
from ckptmirror.formats.base import LoadTarget
from ckptmirror.formats.names import live_values
from ckptmirror.formats.rank_files import RankFiles
from ckptmirror.formats.state_tree import state_of

__all__ = ["merged", "merged_keys", "merges"]

_ABSENT = object()


def merges(value: Any) -> bool:
    """Whether an object can merge the states that each rank has of it."""
    return takes_state(value) and has(value, "merge_state_dicts")


def merged_keys(target: LoadTarget) -> frozenset[Any]:
    """Return the keys of extra whose values are merged, all or in part, where the number of ranks has changed."""
    extra = target.state.extra or {}
    inside = {path[0] for path, leaf in placed_leaves(extra) if path and merges(leaf)}
    return frozenset(inside | (target.state.merge_extra or {}).keys())


def merged(source: RankFiles, target: LoadTarget) -> RankFiles:
    """Return the files, with the merged values in place of those of the rank that reads.

    Raises:
        UsageError: An object or a function does not merge what the save has.
        IntegrityError: A file is broken, or has not what the others have.
    """
    values = target.merged
    tree = source.tree()

    def merge(by: Callable[..., Any], path: TreePath, where: str, ranks: Sequence[int] | None = None) -> None:
        if path not in values and item_at(tree, path, _ABSENT) is not _ABSENT:
            of_ranks = _RankValues(source, path, source.ranks if ranks is None else ranks)
            values[path] = _merge(by, of_ranks if ranks is None else of_ranks.or_none(), target, where)

    for name in ("dataloader", "extra"):
        part = getattr(target.state, name)
        for path, leaf in placed_leaves(part) if name not in target.exclude else ():
            if merges(leaf):
                merge(leaf.merge_state_dicts, (name, *path), place(part, path, name))
    if "extra" not in target.exclude and source.world_size != target.world_size:
        for key, function in (target.state.merge_extra or {}).items():
            merge(function, ("extra", key), f"extra.{key}", source.ranks)
    averages = _of_averages(source, target)
    live = state_of(target.state.ema, "ema") if averages else None
    for path, function, ranks in averages:
        where = f"ema.{'.'.join(map(str, path))}"
        merge(function, ("ema", *path), where, ranks)
        _check_shape(values["ema", *path], item_at(live, path), where)
    return source.replaced(values) if values else source


def _of_averages(source: RankFiles, target: LoadTarget) -> list[tuple[TreePath, Callable[..., Any], list[int]]]:
    """Return the places of the averages of what ranks had of their own, what merges that, and the ranks that had it."""
    if source.world_size == target.world_size or target.state.ema is None or "ema" in target.exclude:
        return []
    of_ranks = {rank: saved_names(source.tree(rank)) for rank in source.ranks}  # a stage has names of its own
    names = frozenset[str]().union(*of_ranks.values())
    if not all("ema" in source.tree(rank) for rank, own in of_ranks.items() if own):
        return []  # an earlier version saved those of rank 0 alone
    of_all = live_values(target.state.model)
    found = []
    for path, _ in placed_leaves(source.tree().get("ema")) if names else ():
        name = name_of_average(path, names, of_all)
        if name and (function := function_for(target.state.per_rank, name)) is not None:
            found.append((path, function, [rank for rank in source.ranks if name in of_ranks[rank]]))
    return found


def _merge(by: Callable[..., Any], states: Sequence[Any], target: LoadTarget, where: str) -> Any:
    try:
        return by(states, target.rank, target.world_size)
    except CkptMirrorError:
        raise
    except Exception as error:  # the user's own code may raise anything; the answer is the same
        part = where.split(".")[0].split("[")[0]
        raise UsageError(
            f"The {where} of {len(states)} ranks cannot be merged: {type(error).__name__}: {error}",
            hint=f'Correct it, or load without this part of the state: exclude=("{part}",).',
        ) from error


def _check_shape(merged: Any, live: Any, where: str) -> None:
    """Check that a merged average fits; an object may keep another state than it has here, which it judges itself."""
    if hasattr(merged, "shape") and hasattr(live, "shape") and merged.shape != live.shape:
        raise UsageError(
            f"The {where} was merged (per_rank) to the shape {tuple(merged.shape)}, not to {tuple(live.shape)}.",
            hint='Correct the function, or load without the averages: exclude=("ema",).',
        )


class _RankValues(Sequence[Any]):
    """The values that ranks of a save have at one place, by rank."""

    def __init__(self, source: RankFiles, path: TreePath, ranks: Sequence[int]) -> None:
        self._source = source
        self._path = path
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def or_none(self) -> list[Any]:
        """Return all of them, with None for a rank that has none."""
        absent = [item_at(self._source.tree(rank), self._path, _ABSENT) is _ABSENT for rank in self._ranks]
        return [None if is_absent else self[number] for number, is_absent in enumerate(absent)]

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return self._source.of(self._ranks[index]).full_value(self._path)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))
