"""Saved values back into what the training holds: objects, tensors in place, containers of them, plain values.

Rules:
* A save and a load walk the same containers: :func:`state_of` takes an object's state wherever it lies in dicts, lists,
  tuples and deques, and :class:`Giver` gives it back at the same place.
* Tensors are filled in place where shape and dtype agree, DTensors as they are sharded here; dicts, lists and deques
  keep their identity; all else is replaced.
* What lives here (an object, a DTensor) and cannot be given its state is an error; what the save lacks is left alone,
  reported and logged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.formats.live import load_model, warn_missing
from ckptmirror.formats.names import live_values
from ckptmirror.formats.rank_files import RankFiles, is_mapping, is_sequence, rebuilt
from ckptmirror.formats.shards import Piece, fill, piece_of, region_of

__all__ = ["Giver", "knows_its_position", "state_of"]

log = logging.getLogger(__name__)

Path_ = tuple[Hashable, ...]


def state_of(part: Any, where: str, *, objects_only: bool = False) -> Any:
    """Return what to save of a part: an object's state, that of each one in a container, a value itself.

    Args:
        part: A value, an object with ``state_dict`` and ``load_state_dict``, or containers of them.
        where: Its place in the state, for messages.
        objects_only: Whether a plain value is a mistake: a load could not give it back.

    Raises:
        UsageError: An object could not be given its state back.
    """
    if isinstance(part, torch.nn.Module):
        return live_values(part)
    if _has(part, "state_dict"):
        if not _has(part, "load_state_dict"):
            raise UsageError(
                f"{where} is a {type(part).__qualname__} with state_dict() but without load_state_dict().",
                hint="Give it load_state_dict(), or save what its state_dict() returns.",
            )
        return part.state_dict()
    if is_mapping(part):
        return rebuilt(part, {k: state_of(v, f"{where}.{k}", objects_only=objects_only) for k, v in part.items()})
    if is_sequence(part):
        return rebuilt(part, [state_of(v, f"{where}[{i}]", objects_only=objects_only) for i, v in enumerate(part)])
    if objects_only:
        raise UsageError(f"{where} is a {type(part).__qualname__}, without state_dict() and load_state_dict().")
    return part


def knows_its_position(dataloader: Any) -> bool:
    """Whether a data loader has a state; others are left alone."""
    return _has(dataloader, "state_dict") and _has(dataloader, "load_state_dict")


class Giver:
    """Gives what lies in the files of ``source`` to live values; ``missing`` collects what the files lack."""

    def __init__(self, source: RankFiles) -> None:
        self.source = source
        self.missing: list[str] = []

    def give(self, now: Any, path: Path_, where: str) -> Any:
        """Return the live value after it was given what is saved at ``path``: itself wherever that is possible.

        Raises:
            UsageError: It does not take it.
            IntegrityError: The files are broken.
        """
        saved = self.source.value(path)
        if _has(now, "load_state_dict"):
            self._give_object(now, saved, path, where)
            return now
        if isinstance(now, torch.Tensor) and isinstance(saved, (torch.Tensor, Piece)):
            return self._give_tensor(now, saved, path, where)
        if is_mapping(now) and type(now) is type(saved):
            return self._give_mapping(now, saved, path, where)
        if is_sequence(now) and type(now) is type(saved):
            return self._give_sequence(now, saved, path, where)
        if (alive := _alive(now)) is not None:
            raise UsageError(
                f"{where} holds a {alive} here and was saved as a {_kind(saved)}: it cannot be given its state.",
                hint="Build it as it was, or load without this part of the state.",
            )
        if dist.is_available() and dist.is_initialized() and _holds(saved, lambda leaf: isinstance(leaf, Piece)):
            log.warning("%s was saved sharded; nothing here says how to shard it, so every rank holds all of it", where)
        return self.source.whole(path)

    def give_values(self, now: dict[str, Any], path: Path_, where: str) -> None:
        """Give the user's own dict its values; whatever the save lacks stays in it and is reported."""
        saved = self.source.value(path)
        if not isinstance(saved, Mapping):
            raise IntegrityError(f"The save holds a {type(saved).__name__} in the place of {where}.")
        for key in saved:
            now[key] = self.give(now.get(key), (*path, key), f"{where}.{key}")
        for key in [key for key in now if key not in saved]:
            self.lacks(f"{where}.{key}")

    def _give_object(self, target: Any, saved: Any, path: Path_, where: str) -> None:
        try:
            if isinstance(target, torch.nn.Module):
                if not isinstance(saved, Mapping):
                    raise UsageError(f"{where} is a module here and was saved as a {_kind(saved)}.")
                load_model(target, saved, lambda name: self.source.others((*path, name)))
            else:
                like = target.state_dict() if _may_be_sharded(saved) else None
                target.load_state_dict(self.source.whole(path, like))
        except CkptMirrorError:
            raise
        except Exception as error:  # an object of the user's; whatever it raises, the answer is the same
            raise UsageError(
                f"The {where} does not take its saved state: {type(error).__name__}: {error}",
                hint=f'Build it as it was, or load without it: exclude=("{where.split(".")[0].split("[")[0]}",).',
            ) from error

    def _give_tensor(self, now: torch.Tensor, saved: torch.Tensor | Piece, path: Path_, where: str) -> Any:
        first = saved if isinstance(saved, Piece) else piece_of(saved)
        if now.is_meta and isinstance(now, DTensor):
            raise UsageError(f"{where} is on the meta device here: give it memory before loading.")
        if tuple(now.shape) == first.region.shape and now.dtype == first.data.dtype and _takes_values(now, first.data):
            local = now.to_local() if isinstance(now, DTensor) else now
            others = (other for other in self.source.others(path) if isinstance(other, Piece))
            fill(local, region_of(now), _chain(first, others), where)
            return now
        if isinstance(now, DTensor) and tuple(now.shape) != first.region.shape:
            raise UsageError(
                f"{where} has the shape {first.region.shape} in the checkpoint and {tuple(now.shape)} here, sharded."
            )
        return self.source.whole(path, now)

    def _give_mapping(self, now: Any, saved: Any, path: Path_, where: str) -> Any:
        given = {key: self.give(now.get(key), (*path, key), f"{where}.{key}") for key in saved}
        for key, value in now.items():
            if key not in saved and _alive(value) is not None:
                self.lacks(f"{where}.{key}")
                given[key] = value
        now.clear()
        for key, value in given.items():
            now[key] = value
        return now

    def _give_sequence(self, now: Any, saved: Any, path: Path_, where: str) -> Any:
        if len(now) != len(saved) and (alive := _alive(now)) is not None:
            raise UsageError(
                f"The save and the state have not the same number of {where}s: {len(saved)} and {len(now)}, which hold "
                f"a {alive}.",
                hint="Build them as they were, or load without this part of the state.",
            )
        live = list(now)
        given = (
            list(self.source.whole(path))
            if all(map(_is_plain, live))
            else [
                self.give(live[index] if index < len(live) else None, (*path, index), f"{where}[{index}]")
                for index in range(len(saved))
            ]
        )
        if isinstance(now, tuple) or (isinstance(now, deque) and now.maxlen != saved.maxlen):
            return rebuilt(saved, given)
        now.clear()
        now.extend(given)
        return now

    def lacks(self, where: str) -> None:
        """Report that the save lacks what is at ``where``."""
        self.missing.append(warn_missing(where, "state; it stays as it is"))


def _has(value: Any, name: str) -> bool:
    return hasattr(value, name) and not isinstance(value, type)


def _alive(value: Any) -> str | None:
    """Return the kind of the first object or DTensor in ``value`` that must be given its state in place."""
    if _has(value, "load_state_dict") or isinstance(value, DTensor):
        return type(value).__qualname__
    items = value.values() if is_mapping(value) else value if is_sequence(value) else ()
    return next((kind for kind in map(_alive, items) if kind is not None), None)


def _is_plain(value: Any) -> bool:
    """Whether nothing in ``value`` can be filled: it is replaced."""
    return not (isinstance(value, torch.Tensor) or is_mapping(value) or is_sequence(value)) and _alive(value) is None


def _takes_values(now: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether ``now`` has memory of its own for every value."""
    if now.is_meta or now.layout != torch.strided or saved.layout != torch.strided:
        return False
    return not any(step == 0 and size > 1 for step, size in zip(now.stride(), now.shape, strict=True))


def _may_be_sharded(saved: Any) -> bool:
    """Whether the live state must be asked how it is sharded: only where it may be, as asking may cost something."""
    several = dist.is_available() and dist.is_initialized()

    def maybe(leaf: Any) -> bool:
        return isinstance(leaf, Piece) or (several and isinstance(leaf, torch.Tensor) and leaf.is_floating_point())

    return _holds(saved, maybe)


def _holds(tree: Any, wanted: Callable[[Any], bool]) -> bool:
    if is_mapping(tree):
        return any(_holds(item, wanted) for item in tree.values())
    return any(_holds(item, wanted) for item in tree) if is_sequence(tree) else wanted(tree)


def _kind(saved: Any) -> str:
    return "DTensor" if isinstance(saved, Piece) else type(saved).__name__


def _chain(first: Piece, others: Iterator[Piece]) -> Iterator[Piece]:
    yield first
    yield from others
