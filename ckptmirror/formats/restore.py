"""Restores saved values into the training's live state: objects, tensors in place, containers of them, plain values.

Rules:
* A save and a load walk the same containers: a save takes the state of an object anywhere in dicts, lists, tuples and
  deques (``formats.state_tree``), and :class:`Restorer` loads it into the object at the same place.
* Tensors and arrays are filled in place if shape and dtype agree, DTensors as they are sharded here. Dicts, lists,
  deques, sets and byte arrays keep their identity. Everything else is replaced, and the report says so if other objects
  may hold a reference to the replaced value.
* Lists, and dicts whose keys are not names, become exactly what was saved. A named entry that the save lacks stays.
* Nothing gets two values. Memory that already belongs to the model, an optimizer or an earlier tensor, and a container
  that was restored before, stay unchanged if the save shared them too, and are replaced if not. If they cannot be
  replaced, as with objects, that is an error.
* A member of an enum, and a generator, need a live one at their place (``formats.live_only``).
* A live object or DTensor that cannot take its state is an error. What the save lacks stays, and is reported and
  logged; so is, where only objects are allowed, what the save has and nothing here takes.
* An optimizer's moments are sharded like its live parameters, since its own state is empty before the first step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptmirror.core.containers import (
    TreePath,
    any_leaf,
    changed,
    is_mapping,
    is_sequence,
    leaves,
    place,
    placed_leaves,
    rebuilt,
    takes_state,
)
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.formats.already_filled import Taken, holds, overlaps_itself, same
from ckptmirror.formats.base import Missing
from ckptmirror.formats.buffers import fill_buffer, is_array, is_buffer
from ckptmirror.formats.extra_aliases import aliases_in, in_order
from ckptmirror.formats.generators import is_generator
from ckptmirror.formats.live_only import is_live_only, put_into
from ckptmirror.formats.load_model import Check, load_model
from ckptmirror.formats.names import live_parameters
from ckptmirror.formats.optimizer_state import load_by_key, parameters_by_key, sharded_like
from ckptmirror.formats.rank_files import RankFiles, live_at
from ckptmirror.formats.shards import Piece, fill, fills, local_of, piece_of, region_of, stored
from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS
from ckptmirror.formats.versions import versions_in
from ckptmirror.formats.weights_only_values import has_shards

__all__ = ["Restorer"]

_NUMBERS = (float, int, str, bool, type(None))  # what long lists are made of


@dataclass(eq=False)
class Restorer:
    """Restores the values in the files of ``source`` into live values.

    Attributes:
        source: The files.
        taken: What already has its values; shared by everything that one load restores.
        all_here: The whole live state, to see whether any of it is sharded.
        missing: Lines for the report: what could not be restored.
    """

    source: RankFiles
    taken: Taken
    all_here: Any
    missing: Missing

    def restore(self, now: Any, path: TreePath, where: str) -> Any:
        """Return ``now`` with the values saved at ``path``: the same object if possible, otherwise a new one.

        Raises:
            UsageError: It does not take them.
            IntegrityError: The files are broken.
        """
        saved = self.source.value(path)
        if takes_state(now):
            self._restore_object(now, saved, path, where)
            return now
        if is_live_only(saved):
            return self._restore_live_only(now, saved, where)
        if isinstance(now, torch.Tensor) and isinstance(saved, (torch.Tensor, Piece)):
            return self._restore_tensor(now, saved, path, where)
        if (is_mapping(now) or is_sequence(now)) and type(now) is type(saved):
            return self._restore_container(now, saved, path, where)
        if is_buffer(now, saved):
            return self._restore_buffer(now, saved, path, where)
        if (alive := _kind_alive(now)) is not None:
            raise _cannot_take(where, alive, saved)
        if _has_ranks() and any_leaf(saved, lambda leaf: isinstance(leaf, Piece)):
            self.missing.say(
                f"{where} was saved sharded; nothing here says how to shard it, so every rank holds all of it"
            )
        return self._replaced(now, self._full(path, now, where), where)

    def restore_values(self, now: dict[str, Any], path: TreePath, where: str) -> None:
        """Restore the values of the user's own dict; entries that the save lacks stay and are reported."""
        saved = self.source.value(path)
        if not isinstance(saved, Mapping):
            raise IntegrityError(f"The save holds a {type(saved).__name__} in place of {where}.")
        for key in in_order(now, saved):
            now[key] = self.restore(now.get(key), (*path, key), f"{where}.{key}")
        for key in [key for key in now if key not in saved]:
            self.missing.lacks(f"{where}.{key}")

    def restore_objects(self, now: Any, path: TreePath, where: str, takes: Callable[[Any], bool] = takes_state) -> None:
        """Restore the state of the object ``now``, or of the objects in a container; the containers do not change.

        Args:
            now: An object, or containers of objects.
            path: Where its state is in the files.
            where: Its place in the state, for messages.
            takes: Whether to restore an object.

        Raises:
            UsageError: An object does not take its state.
            IntegrityError: The files are broken.
        """
        saved = self.source.value(path)
        if takes(now):
            self._restore_object(now, saved, path, where)
        elif is_mapping(now) and is_mapping(saved):
            for key, value in now.items():
                if key in saved:
                    self.restore_objects(value, (*path, key), f"{where}.{key}", takes)
                elif any_leaf(value, takes):
                    self.missing.lacks(f"{where}.{key}")
            for key in [key for key in saved if key not in now]:
                self.missing.unused(f"{where}.{key}")
        elif is_sequence(now) and is_sequence(saved):
            if len(now) != len(saved):
                raise _other_number(where, len(saved), len(now), _kind_alive(now))
            for index, (value, item) in enumerate(zip(now, saved, strict=True)):
                if item is not None:
                    self.restore_objects(value, (*path, index), f"{where}[{index}]", takes)
                elif any_leaf(value, takes):
                    self.missing.lacks(f"{where}[{index}]")
        elif any_leaf(now, takes):
            raise _cannot_take(where, _kind_alive(now), saved)
        elif saved is not None:
            self.missing.unused(where)

    def _restore_object(self, target: Any, saved: Any, path: TreePath, where: str) -> None:
        if isinstance(target, torch.amp.GradScaler) and saved and not target.is_enabled():
            self.missing.unused(where)  # a disabled scaler would ignore it silently
            return
        if not isinstance(target, torch.nn.Module):  # modules are tracked by their memory
            if self.taken.knows(target):
                if not self.taken.was_given(target, saved):
                    raise _saved_as_two(where, target)
                return
            self.taken.remember(target, saved)
        try:
            self._load_object(target, saved, path, where)
        except (CkptMirrorError, *DEVICE_ERRORS):
            raise
        except Exception as error:  # a user's object may raise anything; the answer is the same
            raise UsageError(
                f"The {where} does not take its saved state: {type(error).__name__}: {error}",
                hint=f'Build it as it was, or load without it: exclude=("{where.split(".")[0].split("[")[0]}",).',
            ) from error
        self.taken.take(target, where)

    def _load_object(self, target: Any, saved: Any, path: TreePath, where: str) -> None:
        if isinstance(target, torch.nn.Module):
            if not isinstance(saved, Mapping):
                raise UsageError(f"{where} is a module here and was saved as a {_kind(saved)}.")
            load_model(
                target,
                saved,
                lambda name: self.source.others((*path, name)),
                self._memory_check(target, path, where),
                versions_in(self.source.tree(), path),
            )
        elif isinstance(target, torch.optim.Optimizer) and (keyed := parameters_by_key(target, saved)) is not None:
            load_by_key(target, self.source.full_value(path, sharded_like(keyed, saved)), where)
        else:
            like = target.state_dict() if _may_be_sharded(saved) else None
            self._check_shards(saved, like, where)
            target.load_state_dict(self.source.full_value(path, like))

    def _memory_check(self, module: torch.nn.Module, path: TreePath, where: str) -> Check:
        """Return a check that refuses to fill a tensor of ``module`` that another part of the state holds."""
        parameters = {name for name, _ in live_parameters(module)}

        def check(name: str, saved_name: str, now: torch.Tensor, pieces: Iterable[Piece]) -> None:
            owner = self.taken.owner_of(now)
            if owner is None:
                return
            others = self.source.others((*path, saved_name)) if name not in parameters else iter(())
            if self._aliased(path) and (
                holds(local_of(now), region_of(now), pieces, name)
                # each rank has buffers of its own, and the model those of rank 0
                or any(isinstance(other, torch.Tensor) and same(now, other) for other in others)
            ):
                return
            raise UsageError(
                f"{where} shares the memory of its {name} with {owner} here, and was saved apart from it: its values "
                f"would change {owner}, now or later.",
                hint="Give it memory of its own (copy.deepcopy) before resume().",
            )

        return check

    def _aliased(self, path: TreePath) -> bool:
        """Whether the value at a path shared memory with an earlier one when it was saved."""
        return aliases_in(self.source.tree(), path)

    def _check_shards(self, saved: Any, like: Any, where: str) -> None:
        """Refuse to load sharded values as full ones into an object whose own state does not show how to shard them."""
        for path, leaf in placed_leaves(saved) if _has_ranks() else ():
            if isinstance(leaf, Piece) and not _shows_shards(live_at(like, path), leaf):
                if not has_shards(self.all_here):
                    return
                raise UsageError(
                    f"{place(saved, path, where)} was saved sharded, and the state here has no such value yet that "
                    "says how to shard it.",
                    hint="Let the object make its state before it is loaded, or load without this part of the state.",
                )

    def _restore_tensor(self, now: torch.Tensor, saved: torch.Tensor | Piece, path: TreePath, where: str) -> Any:
        first = saved if isinstance(saved, Piece) else piece_of(saved)
        if now.is_meta and isinstance(now, DTensor):
            raise UsageError(f"{where} is on the meta device here: give it memory before loading.")
        if _can_be_filled(now, first):
            pieces = stored(first, lambda: self.source.others(path)).pieces(region_of(now))
            if self.taken.owner_of(now) is None:
                fill(local_of(now), region_of(now), pieces, where)
                self.taken.take(now, where)
                return now
            if self._aliased(path) and holds(local_of(now), region_of(now), pieces, where):
                return now
        if isinstance(now, DTensor) and tuple(now.shape) != first.region.shape:
            raise UsageError(
                f"{where} has the shape {first.region.shape} in the checkpoint and {tuple(now.shape)} here, sharded."
            )
        value = self._fresh(now, path, where)
        return value if self.taken.owner_of(now) is not None else self._replaced(now, value, where)

    def _restore_buffer(self, now: Any, saved: Any, path: TreePath, where: str) -> Any:
        """Fill a set, an array or a byte array."""
        if self.taken.has_buffer(now):
            return now if self._aliased(path) and same(now, saved) else self._fresh(now, path, where)
        if not same(now, saved) and not fill_buffer(now, saved):
            return self._replaced(now, self._fresh(now, path, where), where)
        self.taken.take_buffer(now, where)
        return now

    def _replaced(self, now: Any, value: Any, where: str) -> Any:
        """Return ``value``, and report it if other objects may hold a reference to the one that it replaces."""
        if _is_mutable(now) and not same(now, value):
            kind = type(now).__qualname__
            self.missing.say(
                f"{where}: the {kind} here cannot hold what was saved, another object takes its place",
                f"; what else holds the {kind} does not see it",
            )
        return value

    def _fresh(self, now: Any, path: TreePath, where: str) -> Any:
        """Return the saved value in new memory, sharded like ``now`` and on the same devices."""

        def beside(leaf: Any, below: TreePath) -> Any:
            live = live_at(now, below) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) else None
            return leaf.to(live.device) if isinstance(live, torch.Tensor) and not live.is_meta else leaf

        return changed(self._full(path, now, where, now), beside)

    def _full(self, path: TreePath, now: Any, where: str, like: Any = None) -> Any:
        """Return the saved value with its pieces joined, and with the live values that parts of it stand for."""
        value = self.source.full_value(path, like)
        if not any_leaf(value, is_live_only):
            return value

        def alive(leaf: Any, below: TreePath) -> Any:
            if not is_live_only(leaf):
                return leaf
            return self._restore_live_only(live_at(now, below), leaf, place(value, below, where))

        return changed(value, alive)

    def _restore_live_only(self, now: Any, saved: Any, where: str) -> Any:
        """Set a generator, or return a member of the enum that ``now`` is a member of."""
        if is_generator(now):
            if self.taken.knows(now) and not self.taken.was_given(now, saved):
                raise _saved_as_two(where, now)
            self.taken.remember(now, saved)
        return put_into(now, saved, where)

    def _restore_container(self, now: Any, saved: Any, path: TreePath, where: str) -> Any:
        if not isinstance(now, tuple):
            if self.taken.knows(now):
                holds_objects = any_leaf(now, takes_state)  # which can only be filled
                if (self._aliased(path) or holds_objects) and self.taken.was_given(now, saved):
                    return now
                if holds_objects:
                    raise _saved_as_two(where, now)
                return self._fresh(now, path, where)
            self.taken.remember(now, saved)
        give = self._restore_mapping if is_mapping(now) else self._restore_sequence
        return give(now, saved, path, where)

    def _restore_mapping(self, now: Any, saved: Any, path: TreePath, where: str) -> Any:
        given = {}
        for key in saved:  # no comprehension, which would add a frame per level
            given[key] = self.restore(now.get(key), (*path, key), f"{where}.{key}")
        named = type(now) in (dict, OrderedDict)
        for key, value in now.items():
            if key not in saved and ((named and type(key) is str) or _kind_alive(value) is not None):
                self.missing.lacks(f"{where}.{key}")
                given[key] = value
        now.clear()
        for key, value in given.items():
            now[key] = value
        if isinstance(now, defaultdict):
            now.default_factory = saved.default_factory
        if isinstance(now, OrderedDict):
            vars(now).update(vars(saved))  # the versions of modules whose state it is
        return now

    def _restore_sequence(self, now: Any, saved: Any, path: TreePath, where: str) -> Any:
        if len(now) != len(saved) and (alive := _kind_alive(now)) is not None:
            raise _other_number(where, len(saved), len(now), alive)
        live = list(now)
        if all(map(_is_plain, live)) and not any_leaf(
            saved, lambda leaf: isinstance(leaf, Piece) or is_live_only(leaf)
        ):
            given = list(self.source.full_value(path))
        else:
            given = []
            for index in range(len(saved)):
                value = live[index] if index < len(live) else None
                given.append(self.restore(value, (*path, index), f"{where}[{index}]"))
        if isinstance(now, tuple):
            return rebuilt(saved, given)
        if isinstance(now, deque) and now.maxlen != saved.maxlen:
            return self._replaced(now, rebuilt(saved, given), where)
        now.clear()
        now.extend(given)
        return now


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


def _saved_as_two(where: str, now: Any) -> UsageError:
    return UsageError(
        f"{where} is a {type(now).__qualname__} that has another place in the state too, and was saved with other "
        "values there: it cannot be given both.",
        hint="Build one for each place before resume().",
    )


def _kind_alive(value: Any) -> str | None:
    """Return the class name of the first object, DTensor or generator in ``value``, which is restored in place."""
    alive = (leaf for leaf in leaves(value) if takes_state(leaf) or isinstance(leaf, DTensor) or is_generator(leaf))
    return next((type(leaf).__qualname__ for leaf in alive), None)


def _is_plain(value: Any) -> bool:
    """Whether nothing in ``value`` can be filled, so that it is replaced."""
    return type(value) in _NUMBERS or (not _is_mutable(value) and _kind_alive(value) is None)


def _is_mutable(value: Any) -> bool:
    """Whether the contents of ``value`` can change, so that everyone who holds a reference sees the new ones."""
    if isinstance(value, torch.Tensor) or is_mapping(value) or type(value) in (list, deque, set, bytearray):
        return True
    return is_array(value) or (is_sequence(value) and any(map(_is_mutable, value)))


def _can_be_filled(now: torch.Tensor, saved: Piece) -> bool:
    """Whether ``now`` is of the saved form, has separate memory for every value, and may be written."""
    is_alike = tuple(now.shape) == saved.region.shape and now.dtype == saved.data.dtype
    return is_alike and fills(saved.data) and fills(now) and not now.is_inference() and not overlaps_itself(now)


def _may_be_sharded(saved: Any) -> bool:
    """Whether ``saved`` may be sharded, so that the live state must be asked how; asking may be expensive."""
    has_ranks = _has_ranks()
    return any(
        isinstance(leaf, Piece) or (has_ranks and isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        for leaf in leaves(saved)
    )


def _shows_shards(live: Any, saved: Piece) -> bool:
    """Whether a live value says how ``saved`` is to be sharded here, or that it is not."""
    return isinstance(live, torch.Tensor) and (not isinstance(live, DTensor) or tuple(live.shape) == saved.region.shape)


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _kind(saved: Any) -> str:
    return "DTensor" if isinstance(saved, Piece) else type(saved).__name__
