"""What the command of a training built: the classes and the settings of its optimizers and schedulers.

Every save records it, so that a start with a changed command is noticed: a state that another class saved is refused
before anything is loaded, and other settings are reported (``core.command_changes``).

Rules:
* A class goes by its name alone, since a module may move.
* Settings are recorded as the command built them, before training or a scheduler changes them: :func:`remember` is
  called at the start of a run. After a load, those of the save are in force.
* A scheduler's settings are its public attributes with plain values, but those that it changes while training.
* Several optimizers are saved by the names of their parameters, so they may stand in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckptmirror.core.command_changes import Command
from ckptmirror.core.containers import place, placed_leaves, takes_state
from ckptmirror.formats.optimizer_state import optimizers_of

__all__ = [
    "KEY",
    "Settings",
    "command_of",
    "put_in_force",
    "remember",
    "schedulers_of",
]

KEY = "command"
_PLAIN = (bool, int, float, str, type(None))
_KINDS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_CHANGING = {"last_epoch", "base_lrs", "T_cur", "T_i", "best", "mode_worse", "num_bad_epochs", "cooldown_counter"}

Settings = Mapping[str, Any]
_built: WeakKeyDictionary[Any, list[Settings]] = WeakKeyDictionary()  # by optimizer, of each group; by scheduler, of it
_in_force: WeakKeyDictionary[Any, list[Settings]] = WeakKeyDictionary()  # the same after a load


def remember(state: Any) -> None:
    """Remember the settings of the state's optimizers and schedulers, of each the first time that it is seen."""
    for one in (*optimizers_of(state.optimizer), *schedulers_of(state).values()):
        if isinstance(one, _KINDS):
            _built.setdefault(one, _settings_now(one))


def command_of(state: Any, *, as_built: bool = False) -> dict[str, Any]:
    """Return what a save records: class name by place, the settings in force of all groups in order, and by scheduler.

    Args:
        state: The live state.
        as_built: Return the settings that the command built instead.
    """

    def known(one: Any) -> list[Settings]:
        count = len(getattr(one, "param_groups", [one]))
        found = [of.get(one, []) for of in ([_built] if as_built else [_in_force, _built]) if isinstance(one, _KINDS)]
        return next((each for each in found if len(each) == count), None) or _settings_now(one)

    groups = [dict(group) for one in optimizers_of(state.optimizer) for group in known(one)]
    schedulers = {at: dict(known(one)[0]) for at, one in schedulers_of(state).items()}
    return {"classes": dict(_classes_of(state)), "groups": groups, "schedulers": schedulers}


def put_in_force(state: Any, command: Command) -> None:
    """Record that these settings are in force, of groups and schedulers as :func:`command_of` lists them."""
    groups = list(command.groups)
    for one in optimizers_of(state.optimizer):
        count = len(one.param_groups)
        if isinstance(one, _KINDS):
            _in_force[one] = groups[:count]
        groups = groups[count:]
    _in_force.update({one: [command.schedulers[at]] for at, one in schedulers_of(state).items()})


def schedulers_of(state: Any) -> dict[str, Any]:
    """Return torch's schedulers in a state by place, also those that another one holds."""

    def within(at: str, one: Any) -> dict[str, Any]:
        inner = {f"{at}.schedulers[{number}]": each for number, each in enumerate(_held(one))}
        return {at: one} | {place: each for at, one in inner.items() for place, each in within(at, one).items()}

    found = [within(at, one) for at, one in _placed(state) if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
    return {at: one for each in found for at, one in each.items()}


def _classes_of(state: Any) -> Iterator[tuple[str, str]]:
    return ((at, _class_of(one)) for at, one in _placed(state))


def _placed(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers and schedulers of a state after their places."""
    for part in ("optimizer", "scheduler", "extra"):
        objects = getattr(state, part)
        try:
            found = list(placed_leaves(objects)) if objects is not None else []
        except RecursionError:  # without an end: a save refuses it, by name
            continue
        for path, value in found:
            if isinstance(value, _KINDS) or (part != "extra" and takes_state(value)):
                yield place(objects, path, part), value


def _class_of(value: Any) -> str:
    """Return an object's class, with the classes of the schedulers that it holds."""
    inside = [_class_of(one) for one in _held(value)]
    return type(value).__name__ + (f"({', '.join(inside)})" if inside else "")


def _held(one: Any) -> list[Any]:
    items = [each for items in _attributes(one).values() if isinstance(items, (list, tuple)) for each in items]
    return [each for each in items if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]


def _attributes(one: Any) -> dict[str, Any]:
    return getattr(one, "__dict__", {})


def _settings_now(one: Any) -> list[Settings]:
    """Return the settings of each group of an optimizer, or of a scheduler, as they are now."""
    if not isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        held, left_out = one.param_groups, {"params"}
    else:
        named = {"milestones" if name == "_milestones" else name: value for name, value in _attributes(one).items()}
        own = {name: value for name, value in named.items() if not name.startswith("_")}
        held, left_out = [own], _CHANGING
    return [
        {name: _plain(value) for name, value in group.items() if name not in left_out and _is_plain(value)}
        for group in held
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Counter):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    value = sorted(value.elements()) if isinstance(value, Counter) else value
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
