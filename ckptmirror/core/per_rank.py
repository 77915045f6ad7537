"""Values of the model that each rank has of its own under one name, such as experts: which they are, and their place.

A save has one value under each name. Of a declared name it is that of the first rank, so that a kind is a whole model.
The other ranks keep theirs, and what their optimizers hold for it, in their ``extra_*`` files, under :data:`KEY`.

Rules:
* Patterns match names of parameters and buffers as a shell matches file names: ``experts.*``.
* The save says which names these are. A load goes by it, whatever the state declares.
* The ranks of one stage of a model have others of these names than those of another stage, which may have none.
* They belong to a rank, so another number of ranks cannot load them, unless the state has a function that merges them:
  it gets the values of all ranks of the save under one name, this rank and the number of ranks, and returns the rank's
  value. All is merged, and its shape compared, before anything changes.
* Nothing here looks into a value, but at its shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError

__all__ = [
    "KEY",
    "Merge",
    "Own",
    "PerRank",
    "RankExtras",
    "ValueTools",
    "check_patterns",
    "check_per_rank",
    "function_for",
    "matching",
    "name_of_average",
    "names_in",
    "only",
    "own_for",
    "recorded",
    "saved_names",
    "told",
    "with_own",
    "with_record",
    "without",
]

KEY = "per_rank"
_NAMED = 4

Optimizer = Mapping[str, Any] | None
Merge = Callable[[list[Any], int, int], Any]
"""Of the values of all ranks of a save, this rank and the number of ranks: what this rank gets."""
PerRank = Sequence[str] | Mapping[str, Merge | None]
"""Patterns; or patterns with what merges the values if the number of ranks has changed (None: nothing does)."""


@dataclass(frozen=True, slots=True)
class ValueTools:
    """What a merge asks of values.

    Attributes:
        read: Returns a value of the kind, which may not be read yet.
        same: Whether two values are equal.
    """

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True)
class RankExtras:
    """What the ranks of a save had beside the kinds, in their ``extra_*`` files.

    Attributes:
        first: What the file of the rank that loads has, or that of another rank; None if there is none.
        world_size: The number of ranks that saved.
        of_all: Returns each rank that has such a file, with what it has, read one by one.
    """

    first: Any
    world_size: int
    of_all: Callable[[], Iterable[tuple[int, Any]]] = tuple


@dataclass(frozen=True)
class Own:
    """What a rank's file says of the values that each rank has of its own.

    Attributes:
        patterns: What the state declared.
        names: The names that they matched.
        rank: The rank that wrote it.
        world_size: The number of ranks.
        is_here: Whether the file has the values; else they are those of the kind.
        model: The rank's values, by name.
        optimizer: Its optimizer's state, by the name of the parameter.
    """

    patterns: tuple[str, ...]
    names: frozenset[str]
    rank: int
    world_size: int
    is_here: bool
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    def values(self, shared: Mapping[str, Any], like: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        """Return this rank's values of the model, by name.

        Args:
            shared: The values of the kind.
            like: The live values of these names.
        """
        return self.model

    def moments(self, shared: Mapping[str, Any], like: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        """Return this rank's state of the optimizer, by name; the arguments are those of :meth:`values`."""
        return self.optimizer

    def refuse_other_ranks(self, rank: int, world_size: int, new: Mapping[str, str]) -> None:
        """Refuse to load it on another rank than the one that had it.

        ``new`` is what the live model calls the values.

        Raises:
            UsageError: The number of ranks is another one.
            IntegrityError: The file is that of another rank.
        """
        if world_size != self.world_size:
            called = next((there for name, there in sorted(new.items()) if there != name), self.patterns[0])
            raise UsageError(
                f"Each rank of the save had values of its own of {_some(self.patterns)} (per_rank), and it had "
                f"{_ranks(self.world_size)}: {_ranks(world_size)} cannot load it.",
                hint=f"Start with {_ranks(self.world_size)}. Or say how to merge the values of the ranks, with a "
                f"function: per_rank={{{called!r}: merge}}. Or start without these values: "
                f'exclude=("model.{called}",).',
            )
        if rank != self.rank:
            raise IntegrityError(
                f"The save has no file with the values that rank {rank} had of its own of {_some(self.patterns)} "
                f"(per_rank); that of rank {self.rank} was found."
            )

    def refuse_other_names(self, live: Collection[str], here: Collection[str], *, is_renamed: bool = False) -> None:
        """Refuse to load it where this rank has others of these values than the rank that wrote it.

        Args:
            live: All names of the live model.
            here: What the names of the save are called there.
            is_renamed: Whether these are other names, which the patterns of the save do not know.

        Raises:
            UsageError: Other names match the patterns here, as in another split into stages.
        """
        lacking = sorted(set(here).difference(live))
        matched = set(matching(self.patterns, live)) if not is_renamed else set()
        if differ := lacking or sorted(matched.difference(here)):
            where = "in the model here" if lacking else "in what the save has of this rank"
            raise UsageError(
                f"Each rank of the save had values of its own of {_some(self.patterns)} (per_rank), and {differ[0]} is "
                f"not {where}.",
                hint="Build the model, and split it into stages, as it was when it was saved.",
            )

    @property
    def names_of_all(self) -> frozenset[str]:
        """The names that any rank had of its own, as far as it is known."""
        return self.names

    def state_of(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with ``own``, this rank's, in place of what all ranks share of these names."""
        return {**_others(shared, self.names), **own} if self.is_here else dict(shared)


@dataclass(frozen=True)
class _Merged(Own):
    """What a rank has of its own after the number of ranks has changed: merged from what all ranks had.

    Attributes:
        records: What each rank of the save had.
        functions: What merges, by name.
        tools: See there.
    """

    records: tuple[Own, ...] = ()
    functions: Mapping[str, Merge] = field(default_factory=dict)
    tools: ValueTools = field(default_factory=lambda: ValueTools(lambda value: value, lambda one, other: one == other))
    _shapes: dict[str, Any] = field(default_factory=dict)  # of the saved values

    @property
    def names_of_all(self) -> frozenset[str]:
        """The names that any rank had of its own."""
        return frozenset(name for one in self.records for name in one.names)

    def values(self, shared: Mapping[str, Any], like: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the merged values of the model, by name.

        Raises:
            UsageError: A function fails, or returns what does not fit the live value.
        """
        merged = {}
        for name in sorted(self.names):
            held = [one.model if one.is_here else shared for one in self._with(name)]
            values = [self.tools.read(of[name]) for of in held if name in of]
            self._shapes[name] = _shape(values[0]) if values else None
            merged[name] = self._merge(name, name, values, _shape(like.get(name)))
        return merged

    def moments(self, shared: Mapping[str, Any], like: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the merged state of the optimizer, by name; a rank that had none of a name has None there.

        A number (a count of steps) that all ranks have alike is taken as it is.

        Raises:
            UsageError: A function fails, or returns what does not fit.
        """
        merged: dict[str, dict[str, Any]] = {}
        for name in sorted(self.names):
            states = [(one.optimizer if one.is_here else shared).get(name) or {} for one in self._with(name)]
            for key in dict.fromkeys(key for state in states for key in state):
                values = [state.get(key) for state in states]
                if not _shape(values[0]) and all(self.tools.same(values[0], value) for value in values[1:]):
                    result = values[0]
                else:
                    shape = self._shape_of_state(name, values, like)
                    result = self._merge(name, f"the optimizer's {key} of {name}", values, shape)
                if result is not None or all(value is None for value in values):
                    merged.setdefault(name, {})[key] = result
        return merged

    def _with(self, name: str) -> list[Own]:
        return [one for one in self.records if name in one.names]

    def _shape_of_state(self, name: str, values: Sequence[Any], like: Mapping[str, Any]) -> Any:
        """Return the shape that merged state has to have; None if any will do."""
        before, here = self._shapes.get(name), _shape(like.get(name))
        shape = next((_shape(value) for value in values if value is not None), None)
        if before is None or shape is None:
            return None
        return here if shape == before else shape if here == before else None

    def _merge(self, name: str, what: str, values: list[Any], shape: Any) -> Any:
        count = _ranks(len(values))
        hint = f"Correct the function that per_rank has for {name}, or start with {_ranks(len(self.records))}."
        try:
            merged = self.functions[name](values, self.rank, self.world_size)
        except CkptMirrorError:
            raise
        except Exception as error:  # the user's own code may raise anything; the answer is the same
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"{what} of {count} cannot be merged (per_rank): {why}", hint=hint) from error
        is_left_out = merged is None and None in values
        if shape is not None and not is_left_out and _shape(merged) != shape:
            got = f"a {type(merged).__name__}" if _shape(merged) is None else f"the shape {_shape(merged)}"
            raise UsageError(f"{what} of {count} was merged (per_rank) to {got}, not to the shape {shape}.", hint=hint)
        return merged


def check_per_rank(given: Any) -> None:
    """Check what a state declares.

    Raises:
        UsageError: It is not patterns, or has something else than functions for them.
    """
    hint = 'Pass a tuple of patterns: per_rank=("experts.*",), or what merges them: per_rank={"experts.*": merge}.'
    if not isinstance(given, list | tuple | Mapping) or not all(isinstance(one, str) for one in given):
        raise UsageError(f"TrainState.per_rank is {given!r}, not a tuple of patterns.", hint=hint)
    for pattern, merge in given.items() if isinstance(given, Mapping) else ():
        if merge is not None and not callable(merge):
            raise UsageError(f"TrainState.per_rank[{pattern!r}] is {merge!r}, not a function.", hint=hint)


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that match one of the patterns."""
    known = tuple(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in known)]


def check_patterns(patterns: Iterable[str], names: Collection[str]) -> None:
    """Check that every pattern matches a name.

    Raises:
        UsageError: One matches none; names a close one.
    """
    for pattern in patterns:
        if not matching([pattern], names):
            raise UsageError(
                f"per_rank has {pattern!r}, and the model has no parameter or buffer of such a name; "
                f"{_close(pattern, names)}.",
                hint='A pattern matches whole names, as model.state_dict() has them: per_rank=("experts.*",).',
            )


def recorded(snapshot: Any, rank: int, world_size: int, *, is_here: bool) -> dict[str, Any]:
    """Return the extra state of a rank with the record of its own values.

    Args:
        snapshot: All that the rank has. Its extra state has the patterns, and the names that match, if there are any.
        rank: This rank.
        world_size: The number of ranks.
        is_here: Whether to put the values there too; else the kinds have them.
    """
    extra: dict[str, Any] = snapshot.extra
    if KEY not in extra:
        return extra
    names = names_in(extra) if is_here else frozenset()
    state = (snapshot.optimizer or {}).get("state") or {}
    model, moments = ({name: held[name] for name in held if name in names} for held in (snapshot.model, state))
    more = {"rank": rank, "world_size": world_size, "is_here": is_here, "model": model, "optimizer": moments}
    return {**extra, KEY: {**extra[KEY], **more}}


def with_record(tree: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the extra state in a file that has all that a rank held, with the rank's own values in the record.

    Args:
        tree: Its model, its optimizer and its extra state, which has a record without values.
        rank: The rank.

    Raises:
        IntegrityError: It is not what a save writes there.
    """
    try:
        return recorded(SimpleNamespace(**tree), rank, tree["extra"][KEY]["world_size"], is_here=True)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise IntegrityError("A file has a broken record of the values of each rank.") from error


def names_in(extra: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the values that a rank which saves has of its own."""
    return frozenset(extra[KEY]["names"]) if KEY in extra else frozenset()


def without(model: Mapping[str, Any], optimizer: Optimizer, names: Collection[str]) -> tuple[dict[str, Any], Any]:
    """Return a model and an optimizer's state without what they have under some names."""
    if optimizer is not None:
        optimizer = {**optimizer, "state": _others(optimizer["state"], names)}
    return _others(model, names), optimizer


def with_own(model: Mapping[str, Any], optimizer: Optimizer, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model and the optimizer that a rank saves, with the values that its ``extra_*`` file has of them."""
    own = extra.get(KEY) or {"model": {}, "optimizer": {}}
    if own["optimizer"]:
        optimizer = {**(optimizer or {}), "state": {**((optimizer or {}).get("state") or {}), **own["optimizer"]}}
    return {"model": {**model, **own["model"]}, "optimizer": optimizer}


def saved_names(extra: Any) -> frozenset[str]:
    """Return the names of the values that each rank of a save had of its own, by the contents of a rank's file.

    Raises:
        IntegrityError: It is not what a save writes there.
    """
    own = _own_in(extra)
    return own.names if own is not None else frozenset()


def name_of_average(place: Sequence[Any], names: Collection[str], of_all: Collection[str]) -> str:
    """Return which of ``names`` a value at a place in a state of averages is the average of; "" if of none.

    It has that name there, or one that ends with it: ``AveragedModel`` has ``module.`` before the names of the model.
    ``of_all`` has what all ranks share, too, whose names may end with one of ``names``.
    """
    parts = ".".join(map(str, place)).split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((name for name in ends if name in names or name in of_all), "")
    return found if found in names else ""


def function_for(declared: PerRank, name: str) -> Merge | None:
    """Return what merges the values of a name: what the first pattern has that matches it."""
    if not isinstance(declared, Mapping):
        return None
    return next((merge for pattern, merge in declared.items() if fnmatchcase(name, pattern)), None)


def only(parts: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return what :func:`with_own` returned, without what is under other names than these."""
    state = (parts["optimizer"] or {}).get("state") or {}
    model, state = ({name: held[name] for name in names if name in held} for held in (parts["model"], state))
    return {"model": model, "optimizer": {"state": state}}


def own_for(target: Any, saved: RankExtras, tools: ValueTools) -> Own | None:
    """Return what a rank has of its own; None if that is nothing, or if the target wants none of it.

    Args:
        target: Who loads, and what.
        saved: What the ranks of the save had beside the kinds.
        tools: See there.

    Raises:
        UsageError: Another number of ranks saved them, and the state does not have functions that merge them all.
        IntegrityError: It is not what a save writes there, or is another rank's.
    """
    wants_optimizer = target.state.optimizer is not None and "optimizer" not in target.exclude
    if not (wants_optimizer or "model" not in target.exclude):
        return None
    rules = target.rules
    if saved.world_size == target.world_size:
        if (own := _own_in(saved.first)) is not None:
            own.refuse_other_ranks(target.rank, target.world_size, {name: rules.renamed(name) for name in own.names})
        return own
    of_ranks = {rank: one for rank, extra in saved.of_all() if (one := _own_in(extra)) is not None}
    if any((one.rank, one.world_size) != (rank, saved.world_size) for rank, one in of_ranks.items()):
        raise IntegrityError("The files of the ranks do not have what each rank had of its own (per_rank).")
    if not (known := tuple(of_ranks.values())):
        return None
    new = {name: rules.renamed(name) for one in known for name in one.names}
    names = frozenset(name for name, there in new.items() if not (there in target.elsewhere or rules.leaves(there)))
    declared = target.state.per_rank
    functions = {name: merge for name in names if (merge := function_for(declared, new[name])) is not None}
    patterns = tuple(dict.fromkeys(pattern for one in known for pattern in one.patterns))
    if lacking := sorted(names - functions.keys()):
        told = tuple(lacking)
        if not isinstance(declared, Mapping):
            told = tuple(one for one in patterns if matching([one], lacking)) or told
        called = {name: new[name] for name in lacking}
        replace(known[0], patterns=told).refuse_other_ranks(target.rank, target.world_size, called)
    return _Merged(patterns, names, target.rank, target.world_size, True, {}, {}, known, functions, tools)


def _own_in(extra: Any) -> Own | None:
    found = extra.get(KEY) if isinstance(extra, Mapping) else None
    if found is None:
        return None
    try:
        own = Own(**{**found, "patterns": tuple(found["patterns"]), "names": frozenset(found["names"])})
    except (TypeError, KeyError, ValueError) as error:
        raise IntegrityError("A file has a broken record of the values of each rank.") from error
    is_text = all(type(one) is str for one in (*own.patterns, *own.names))
    is_number = type(own.rank) is int and type(own.world_size) is int and type(own.is_here) is bool
    is_named = all(isinstance(held, dict) and held.keys() <= own.names for held in (own.model, own.optimizer))
    if not (is_text and is_number and is_named):
        raise IntegrityError("A file has a broken record of the values of each rank.")
    return own


def told(names: Collection[str]) -> str:
    """Return a text that tells whether two ranks have the same names."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:8]
    return f"{_some(sorted(names))} ({digest})" if names else "nothing"


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return tuple(shape) if shape is not None else None


def _others(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _close(pattern: str, names: Collection[str]) -> str:
    from difflib import get_close_matches  # needed only after a mistake

    parts = [name.split(".") for name in names]
    modules = [".".join(part[:depth]) + ".*" for part in parts for depth in range(1, len(part))]
    close = get_close_matches(pattern, [*names, *dict.fromkeys(modules)], _NAMED)
    return f"close to it are {', '.join(close)}" if close else f"it has {_some(sorted(names))}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _some(patterns: Sequence[str]) -> str:
    more = f" and {len(patterns) - _NAMED} more" if len(patterns) > _NAMED else ""
    return ", ".join(patterns[:_NAMED]) + more
