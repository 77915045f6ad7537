"""Values of the model that each rank has of its own under one name, such as experts: which they are, and their place.

A save has one value under each name. Of a declared name it is that of the first rank, so that a kind is a whole model.
The other ranks keep theirs, and what their optimizers hold for it, in their ``extra_*`` files, under :data:`KEY`.

Rules:
* Patterns match names of parameters and buffers as a shell matches file names: ``experts.*``.
* The save says which names these are. A load goes by it, whatever the state declares.
* They belong to a rank, so another number of ranks cannot load them.
* Nothing here looks into a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckptmirror.core.errors import IntegrityError, UsageError

__all__ = [
    "KEY",
    "Own",
    "check_patterns",
    "matching",
    "names_in",
    "only",
    "own_for",
    "recorded",
    "told",
    "with_own",
    "without",
]

KEY = "per_rank"
_NAMED = 4

Optimizer = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
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

    def refuse_other_ranks(self, rank: int, world_size: int) -> None:
        """Refuse to load it on another rank than the one that had it.

        Raises:
            UsageError: The number of ranks is another one.
            IntegrityError: The file is that of another rank.
        """
        if world_size != self.world_size:
            raise UsageError(
                f"Each rank of the save had values of its own of {_some(self.patterns)} (per_rank), and it had "
                f"{_ranks(self.world_size)}: {_ranks(world_size)} cannot load it.",
                hint=f"Start with {_ranks(self.world_size)}. Or start without these values: load the rest with "
                'exclude=("model", "optimizer"), and merge the model yourself; load_checkpoint() returns rank 0\'s.',
            )
        if rank != self.rank:
            raise IntegrityError(
                f"The save has no file with the values that rank {rank} had of its own of {_some(self.patterns)} "
                f"(per_rank); that of rank {self.rank} was found."
            )

    def refuse_other_names(self, live: Collection[str], here: Collection[str]) -> None:
        """Refuse to load it where this rank has others of these values than the rank that wrote it.

        Args:
            live: All names of the live model.
            here: What the names of the save are called there.

        Raises:
            UsageError: Other names match the patterns here, as in another split into stages.
        """
        lacking = sorted(set(here).difference(live))
        if differ := lacking or sorted(set(matching(self.patterns, live)).difference(here)):
            where = "in the model here" if lacking else "in what the save has of this rank"
            raise UsageError(
                f"Each rank of the save had values of its own of {_some(self.patterns)} (per_rank), and {differ[0]} is "
                f"not {where}.",
                hint="Build the model, and split it into stages, as it was when it was saved.",
            )

    def state_of(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with ``own``, this rank's, in place of what all ranks share of these names."""
        return {**_others(shared, self.names), **own} if self.is_here else dict(shared)


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


def only(parts: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return what :func:`with_own` returned, without what is under other names than these."""
    state = (parts["optimizer"] or {}).get("state") or {}
    model, state = ({name: held[name] for name in names if name in held} for held in (parts["model"], state))
    return {"model": model, "optimizer": {"state": state}}


def own_for(target: Any, extra: Any) -> Own | None:
    """Return what a rank's file says of its own values; None if there are none, or if the target wants none.

    Args:
        target: Who loads, and what.
        extra: The contents of its file, or of another rank's if it has none.

    Raises:
        UsageError: Another number of ranks saved them.
        IntegrityError: It is not what a save writes there, or is another rank's.
    """
    wants_optimizer = target.state.optimizer is not None and "optimizer" not in target.exclude
    if (own := _own_in(extra)) is None or not (wants_optimizer or "model" not in target.exclude):
        return None
    own.refuse_other_ranks(target.rank, target.world_size)
    return own


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
