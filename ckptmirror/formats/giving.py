"""Saved values back into what the training holds: objects, tensors in place, containers of them, plain values.

Rules:
* A save and a load walk the same containers: :func:`state_of` takes an object's state wherever it lies in dicts, lists,
  tuples and deques, and :class:`Giver` gives it back at the same place.
* Tensors are filled in place where shape and dtype agree, DTensors as they are sharded here; dicts, lists and deques
  keep their identity; all else is replaced.
* What lives here (an object, a DTensor) and cannot be given its state is an error; what the save lacks is left alone,
  reported and logged. So is, where only objects may lie, what the save has and nothing here takes.
* An optimizer's moments follow its live parameters, as its own state is empty before the first step.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.formats.live import load_model, warn_missing, warn_unused
from ckptmirror.formats.names import live_values
from ckptmirror.formats.optimizer_state import load_by_key, parameters_by_key, state_by_key
from ckptmirror.formats.rank_files import RankFiles, below, is_mapping, is_sequence, rebuilt
from ckptmirror.formats.shards import Piece, fill, piece_of, region_of

__all__ = ["Giver", "state_of"]

log = logging.getLogger(__name__)

Path_ = tuple[Hashable, ...]

_LOAD = "load_state_dict"


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
    if isinstance(part, torch.optim.Optimizer):
        return state_by_key(part, where)
    if _has(part, "state_dict"):
        if not _has(part, _LOAD):
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


class Giver:
    """Gives what lies in the files of ``source`` to live values; ``missing`` collects what could not be given.

    Args:
        source: The files.
        all_here: All that lives here, to see whether anything of it is sharded.
    """

    def __init__(self, source: RankFiles, all_here: Any = None) -> None:
        self.source = source
        self.all_here = all_here
        self.missing: list[str] = []

    def give(self, now: Any, path: Path_, where: str) -> Any:
        """Return the live value after it was given what is saved at ``path``: itself wherever that is possible.

        Raises:
            UsageError: It does not take it.
            IntegrityError: The files are broken.
        """
        saved = self.source.value(path)
        if _has(now, _LOAD):
            self._give_object(now, saved, path, where)
            return now
        if isinstance(now, torch.Tensor) and isinstance(saved, (torch.Tensor, Piece)):
            return self._give_tensor(now, saved, path, where)
        if is_mapping(now) and type(now) is type(saved):
            return self._give_mapping(now, saved, path, where)
        if is_sequence(now) and type(now) is type(saved):
            return self._give_sequence(now, saved, path, where)
        if (alive := _alive(now)) is not None:
            raise _cannot_take(where, alive, saved)
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

    def give_objects(
        self, now: Any, path: Path_, where: str, takes: Callable[[Any], bool] = lambda value: _has(value, _LOAD)
    ) -> None:
        """Give the object ``now``, or those in a container of them, their state; the containers stay as they are.

        Args:
            now: An object, or containers of them.
            path: Where its state lies in the files.
            where: Its place in the state, for messages.
            takes: Whether an object is to be given its state.

        Raises:
            UsageError: It does not take it.
            IntegrityError: The files are broken.
        """
        saved = self.source.value(path)
        if takes(now):
            self._give_object(now, saved, path, where)
        elif is_mapping(now) and is_mapping(saved):
            for key, value in now.items():
                if key in saved:
                    self.give_objects(value, (*path, key), f"{where}.{key}", takes)
                elif _any(value, takes):
                    self.lacks(f"{where}.{key}")
            for key in [key for key in saved if key not in now]:
                self.unused(f"{where}.{key}")
        elif is_sequence(now) and is_sequence(saved):
            if len(now) != len(saved):
                raise _other_number(where, len(saved), len(now), _alive(now))
            for index, (value, item) in enumerate(zip(now, saved, strict=True)):
                if item is not None:
                    self.give_objects(value, (*path, index), f"{where}[{index}]", takes)
                elif _any(value, takes):
                    self.lacks(f"{where}[{index}]")
        elif _any(now, takes):
            raise _cannot_take(where, _alive(now), saved)
        elif saved is not None:
            self.unused(where)

    def _give_object(self, target: Any, saved: Any, path: Path_, where: str) -> None:
        try:
            if isinstance(target, torch.nn.Module):
                if not isinstance(saved, Mapping):
                    raise UsageError(f"{where} is a module here and was saved as a {_kind(saved)}.")
                load_model(target, saved, lambda name: self.source.others((*path, name)))
            elif isinstance(target, torch.optim.Optimizer) and (keyed := parameters_by_key(target, saved)) is not None:
                load_by_key(target, self.source.whole(path, {"state": keyed}), where)
            else:
                like = target.state_dict() if _may_be_sharded(saved) else None
                self._check_shards(saved, like, where)
                target.load_state_dict(self.source.whole(path, like))
        except CkptMirrorError:
            raise
        except Exception as error:  # an object of the user's; whatever it raises, the answer is the same
            raise UsageError(
                f"The {where} does not take its saved state: {type(error).__name__}: {error}",
                hint=f'Build it as it was, or load without it: exclude=("{where.split(".")[0].split("[")[0]}",).',
            ) from error

    def _check_shards(self, saved: Any, like: Any, where: str) -> None:
        """Refuse to give an object whole what was sharded, where its state does not say how to shard it again."""
        if dist.is_available() and dist.is_initialized():
            unlike = next(_unlike(saved, like, where), None)
            if unlike is not None and _any(self.all_here, _is_sharded):
                raise UsageError(
                    f"{unlike} was saved sharded, and the state here has no such value yet that says how to shard it.",
                    hint="Let the object make its state before it is loaded, or load without this part of the state.",
                )

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
        if isinstance(now, defaultdict):
            now.default_factory = saved.default_factory
        return now

    def _give_sequence(self, now: Any, saved: Any, path: Path_, where: str) -> Any:
        if len(now) != len(saved) and (alive := _alive(now)) is not None:
            raise _other_number(where, len(saved), len(now), alive)
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

    def unused(self, where: str) -> None:
        """Report that nothing here takes what the save has at ``where``."""
        self.missing.append(warn_unused(where))


def _has(value: Any, name: str) -> bool:
    return hasattr(value, name) and not isinstance(value, type)


def _any(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether anything in ``value``, itself or in containers, is ``wanted``."""
    items = value.values() if is_mapping(value) else value if is_sequence(value) else ()
    return wanted(value) or any(_any(item, wanted) for item in items)


def _is_sharded(value: Any) -> bool:
    tensors = value.parameters() if isinstance(value, torch.nn.Module) else (value,)
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def _unlike(saved: Any, like: Any, where: str) -> Iterator[str]:
    """Yield the places of the pieces in ``saved`` for which ``like`` has no tensor, or one of another shape sharded."""
    if isinstance(saved, Piece):
        shape = saved.region.shape
        if not isinstance(like, torch.Tensor) or (isinstance(like, DTensor) and tuple(like.shape) != shape):
            yield where
    elif is_mapping(saved):
        for key, item in saved.items():
            yield from _unlike(item, below(like, key), f"{where}.{key}")
    elif is_sequence(saved):
        for index, item in enumerate(saved):
            yield from _unlike(item, below(like, index), f"{where}[{index}]")


def _cannot_take(where: str, alive: str | None, saved: Any) -> UsageError:
    return UsageError(
        f"{where} holds a {alive} here and was saved as a {_kind(saved)}: it cannot be given its state.",
        hint="Build it as it was, or load without this part of the state.",
    )


def _other_number(where: str, saved: int, now: int, alive: str | None) -> UsageError:
    what = f", which hold a {alive}" if alive is not None else ""
    return UsageError(
        f"The save and the state have not the same number of {where}s: {saved} and {now}{what}.",
        hint="Build them as they were, or load without this part of the state.",
    )


def _alive(value: Any) -> str | None:
    """Return the kind of the first object or DTensor in ``value`` that must be given its state in place."""
    if _has(value, _LOAD) or isinstance(value, DTensor):
        return type(value).__qualname__
    items = value.values() if is_mapping(value) else value if is_sequence(value) else ()
    return next((kind for kind in map(_alive, items) if kind is not None), None)


def _is_plain(value: Any) -> bool:
    """Whether nothing in ``value`` can be filled: it is replaced."""
    return not (isinstance(value, torch.Tensor) or is_mapping(value) or is_sequence(value)) and _alive(value) is None


def _takes_values(now: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether ``now`` has memory of its own for every value, and may be written."""
    if now.is_meta or now.is_inference() or now.layout != torch.strided or saved.layout != torch.strided:
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
