"""Which classes and settings this command built otherwise than the command whose state a save has.

Rules:
* Settings are compared as the commands built them, not as training or a scheduler changed them since. A learning rate
  under a scheduler is the one that it began from (``initial_lr``).
* Only settings that both commands have are compared: another version of torch may have more.
* After a load, the save's settings are in force, and the next save records these. So a changed command is reported at
  each start, until it is as it was or its settings are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptmirror.core.errors import UsageError

__all__ = [
    "NO_COMMAND",
    "Command",
    "changes",
    "check_known",
    "checked_wins",
    "config_changes",
    "in_force",
    "new_rate",
    "refuse_other_classes",
    "refuse_other_order",
]

Settings = Mapping[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_BASE = "initial_lr"
_EXAMPLE = 'Write command_wins=("lr",), for example.'


@dataclass(frozen=True)
class Command:
    """The settings that a command built.

    Attributes:
        groups: Of each parameter group of the optimizers, in order.
        schedulers: Of each scheduler, by its place in the state.
    """

    groups: tuple[Settings, ...] = ()
    schedulers: Mapping[str, Settings] = field(default_factory=dict)

    @classmethod
    def parse(cls, record: Any, order: Sequence[int] | None = None) -> Command:
        """Return what a save recorded, without what is not plain.

        Args:
            record: From the file.
            order: Which recorded group each live one is; None if there are none to compare.
        """
        if not isinstance(record, Mapping):
            return cls()
        groups, schedulers = record.get("groups"), record.get("schedulers")
        listed = groups if isinstance(groups, list | tuple) else ()
        return cls(
            tuple(_plain(listed[index]) for index in order or () if index < len(listed)),
            {str(at): _plain(one) for at, one in schedulers.items()} if isinstance(schedulers, Mapping) else {},
        )

    def of_parts(self, parts: Container[str]) -> Command:
        """Return the settings of these parts of the state alone."""
        groups = self.groups if "optimizer" in parts else ()
        return Command(groups, {at: one for at, one in self.schedulers.items() if _part_of(at) in parts})


NO_COMMAND = Command()


def refuse_other_classes(saved: Any, command: Settings, exclude: Container[str]) -> None:
    """Refuse to load what an optimizer or a scheduler of another class saved.

    Args:
        saved: What a save recorded of its command; None if the save does not have it.
        command: The same of this command.
        exclude: The parts that are not loaded.

    Raises:
        UsageError: A class differs; the message has both, with their settings.
    """
    if not isinstance(saved, Mapping) or not isinstance(saved.get("classes"), Mapping):
        return
    here, there = command["classes"], saved["classes"]
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
            raise _other_class(part, was, now, saved, command)


def refuse_other_order(
    plans: Sequence[Sequence[tuple[int, Any]]], saved: Mapping[str, Any], *, is_scheduled: bool, some_elsewhere: bool
) -> None:
    """Refuse groups in another order than they were saved in, where a scheduler will be loaded.

    Groups may be missing where other ranks hold some of the parameters.

    Raises:
        UsageError: The order differs; the message lists both orders.
    """
    order = [index for plan in plans for index, _ in plan]
    in_order = sorted(order) if some_elsewhere else list(range(len(order)))
    if order == in_order or not is_scheduled:
        return
    groups = [_title(group, index) for index, group in enumerate(saved["param_groups"])]
    raise UsageError(
        "The optimizer's parameter groups are not in the order in which they were saved, and a scheduler goes by the "
        f"order. Saved: {'; '.join(groups)}. Here: {'; '.join(groups[index] for index in order)}.",
        hint='Build them in the saved order, or load without the scheduler: exclude=("scheduler",).',
    )


def _title(group: Mapping[str, Any], index: int) -> str:
    name = group.get("name")
    params = [str(param) for param in group.get("params", ())]
    held = params[0] + (f" and {len(params) - 1} more" if len(params) > 1 else "") if params else "empty"
    return f"{index}: {name} ({held})" if isinstance(name, str) else f"{index}: {held}"


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


def changes(saved: Command, here: Command, wins: Collection[str] = ()) -> tuple[str, ...]:
    """Return a line for each setting that differs: both values, and whose is used.

    Args:
        saved: The settings in force in the save.
        here: What this command built.
        wins: The settings of which this command's are used.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    groups = list(zip(saved.groups, here.groups, strict=False)) if len(saved.groups) == len(here.groups) else []
    for number, (old, new) in enumerate(groups):
        for change in _differences(_with_base(old), _with_base(new)):
            found.setdefault(change, []).append(number)
    lines = []
    for change, numbers in found.items():
        of = "" if len(numbers) == len(groups) else f" group {', '.join(map(str, numbers))}"
        lines.append(_line(f"optimizer{of}", change, wins))
    for at in saved.schedulers.keys() & here.schedulers.keys():
        lines += [_line(at, change, wins) for change in _differences(saved.schedulers[at], here.schedulers[at])]
    return tuple(sorted(lines))


def config_changes(saved: Settings, here: Settings, where: str = "training_config") -> tuple[str, ...]:
    """Return a line for each value of the training config that differs. A load changes none of them."""
    lines: list[str] = []
    for name in sorted(saved.keys() | here.keys()):
        old, new = saved.get(name), here.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += config_changes(old, new, f"{where}.{name}")
        elif old != new:
            texts = [_short(one[name]) if name in one else "nothing" for one in (saved, here)]
            lines.append(f"{where}: {name} {texts[0]} in the save, {texts[1]} in this command")
    return tuple(lines)


def in_force(saved: Command, here: Command, wins: Collection[str] = ()) -> Command:
    """Return the settings that are in force after a load: the save's, where it has them, but for those of ``wins``."""
    kept = {*wins, _BASE} if "lr" in wins else {*wins}
    groups = saved.groups if len(saved.groups) == len(here.groups) else ({},) * len(here.groups)
    return Command(
        tuple(_over(old, new, kept) for old, new in zip(groups, here.groups, strict=True)),
        {at: _over(saved.schedulers.get(at, {}), new, kept) for at, new in here.schedulers.items()},
    )


def _over(old: Settings, new: Settings, kept: Container[str]) -> Settings:
    return {**new, **{name: value for name, value in old.items() if name in new and name not in kept}}


def checked_wins(wins: Collection[str]) -> tuple[str, ...]:
    """Return the names of the settings that are to win.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(wins, str) or not isinstance(wins, Collection):
        raise UsageError(f"command_wins is {wins!r}; it must be a tuple of names.", hint=_EXAMPLE)
    return tuple(wins)


def check_known(wins: Collection[str], here: Command) -> None:
    """Check that a command has the settings that are to win.

    Raises:
        UsageError: It has not; the message lists what it has.
    """
    has = {name for one in (*here.groups, *here.schedulers.values()) for name in one} - {_BASE}
    if unknown := [name for name in wins if name not in has]:
        raise UsageError(
            f"command_wins holds {', '.join(map(repr, unknown))}; it must be a tuple of names among the settings of "
            f"this command's optimizers and schedulers: {', '.join(sorted(has)) or 'it has none'}.",
            hint=_EXAMPLE,
        )


def new_rate(now: float, bases: Sequence[float], built: float) -> float | None:
    """Return a group's learning rate, so that a schedule goes on from the same place with a new base.

    Args:
        now: The rate that was loaded.
        bases: What the schedule began from, as the scheduler, the group and the save have it. One may be this
            command's already, where a part of the state was not loaded.
        built: What this command's schedule begins from.

    Returns:
        The rate; None if it is to stay.
    """
    old = next((base for base in bases if base != built), None)
    if old is None:
        return None
    return built if old in (0, now) else now * built / old


def _with_base(group: Settings) -> Settings:
    rest = {name: value for name, value in group.items() if name != _BASE}
    return {**rest, "lr": group.get(_BASE, group["lr"])} if "lr" in group else rest


def _differences(old: Settings, new: Settings) -> Iterator[tuple[str, str, str]]:
    for name in old:
        if name in new and old[name] != new[name]:
            yield name, _short(old[name]), _short(new[name])


def _line(where: str, change: tuple[str, str, str], wins: Collection[str]) -> str:
    name, old, new = change
    whose = "this command's" if name in wins else "the save's"
    return f"{where}: {name} {old} in the save, {new} in this command: {whose} is used"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _plain(settings: Any) -> Settings:
    if not isinstance(settings, Mapping):
        return {}
    return {str(name): _as_tuple(value) for name, value in settings.items() if _is_plain(value)}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
