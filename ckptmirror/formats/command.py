"""What the command of a training built: the classes of its optimizers and schedulers, and the optimizers' settings.

Every save records it, so that a start with a changed command is noticed: a state that another class saved is refused
before anything is loaded.

Rules:
* A class goes by its name alone, since a module may move.
* Settings are recorded as the command built them, before training or a scheduler changes them: :func:`remember` is
  called at the start of a run.
* Several optimizers are saved by the names of their parameters, so they may stand in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckptmirror.core.errors import UsageError
from ckptmirror.formats.containers import place, placed_leaves, takes_state
from ckptmirror.formats.optimizer_state import optimizers_of

__all__ = ["KEY", "Settings", "command_of", "refuse_other_classes", "remember"]

KEY = "command"
_PLAIN = (bool, int, float, str, type(None))

Settings = Mapping[str, Any]
_built: WeakKeyDictionary[Any, list[Settings]] = WeakKeyDictionary()  # by optimizer: the settings of each group


def remember(state: Any) -> None:
    """Remember the settings of the state's optimizers, of each the first time that it is seen."""
    for one in optimizers_of(state.optimizer):
        if isinstance(one, torch.optim.Optimizer):
            _built.setdefault(one, _groups_of(one))


def command_of(state: Any) -> dict[str, Any]:
    """Return what a save records: class name by place, and the settings of all groups of the optimizers in order."""
    groups = []
    for one in optimizers_of(state.optimizer):
        known = _built.get(one) if isinstance(one, torch.optim.Optimizer) else None
        groups += known if known is not None and len(known) == len(one.param_groups) else _groups_of(one)
    return {"classes": dict(_classes_of(state)), "groups": [dict(group) for group in groups]}


def refuse_other_classes(saved: Any, state: Any, exclude: frozenset[str]) -> None:
    """Refuse to load what an optimizer or a scheduler of another class saved.

    Args:
        saved: What :func:`command_of` returned when it was saved; None if the save does not have it.
        state: The live state.
        exclude: The parts that are not loaded.

    Raises:
        UsageError: A class differs; the message has both, with their settings.
    """
    if not isinstance(saved, Mapping) or not isinstance(saved.get("classes"), Mapping):
        return
    here, there = dict(_classes_of(state)), saved["classes"]
    for part in ("optimizer", "scheduler", "extra"):
        if part in exclude:
            continue
        of_part = [{at: str(name) for at, name in one.items() if _part_of(at) == part} for one in (there, here)]
        was, now = of_part
        if part == "optimizer":
            differs = bool(was and now) and Counter(was.values()) != Counter(now.values())
        else:
            differs = any(was[at] != now[at] for at in was.keys() & now.keys())
        if differs:
            raise _other_class(part, was, now, saved, command_of(state))


def _other_class(
    part: str, was: Mapping[str, str], now: Mapping[str, str], saved: Settings, command: Settings
) -> UsageError:
    texts = [
        ", ".join(
            f"{at} {name}" + (f" ({_settings_text(built)})" if part == "optimizer" else "")
            for at, name in classes.items()
            if part == "optimizer" or was.get(at) != now.get(at)
        )
        for classes, built in ((was, saved), (now, command))
    ]
    return UsageError(
        f"The {part} is of another class than the one that was saved. In the save: {texts[0]}. Here: {texts[1]}.",
        hint=f'Build it as it was, or leave out what was saved: exclude=("{part}",).',
    )


def _settings_text(command: Settings) -> str:
    groups = command.get("groups")
    first = groups[0] if isinstance(groups, Sequence) and groups and isinstance(groups[0], Mapping) else {}
    more = f" and {len(groups) - 1} more groups" if isinstance(groups, Sequence) and len(groups) > 1 else ""
    return ", ".join(f"{name}={value!r}" for name, value in first.items() if value is not None) + more


def _part_of(where: str) -> str:
    return where.split(".")[0].split("[")[0]


def _classes_of(state: Any) -> Iterator[tuple[str, str]]:
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    for part in ("optimizer", "scheduler", "extra"):
        objects = getattr(state, part)
        for path, value in placed_leaves(objects) if objects is not None else ():
            if isinstance(value, kinds) or (part != "extra" and takes_state(value)):
                yield place(objects, path, part), _class_of(value)


def _class_of(value: Any) -> str:
    """Return an object's class, with the classes of the schedulers that it holds."""
    held = [one for items in vars(value).values() if isinstance(items, (list, tuple)) for one in items]
    inside = [_class_of(one) for one in held if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]
    return type(value).__name__ + (f"({', '.join(inside)})" if inside else "")


def _groups_of(one: Any) -> list[Settings]:
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in one.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
