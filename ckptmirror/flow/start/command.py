"""What a changed command means for a start: its settings are remembered before a load, and compared after it.

Rules:
* The settings of a save stay in force after a load, but for those that ``command_wins`` names; the next save records
  the settings in force.
* A learning rate that wins is the one from which a schedule begins: the rate that was loaded is scaled by new/old.
* A scheduler's setting that wins is set on the scheduler; the rate goes on from where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ckptmirror.core.command_changes import (
    Command,
    Settings,
    changes,
    check_known,
    config_changes,
    in_force,
    new_rate,
)
from ckptmirror.core.model import Meta
from ckptmirror.core.plain_values import plain_values

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["remember_command", "settle_command"]


def remember_command(state: TrainState, wins: Collection[str]) -> None:
    """Remember what this command built, before anything is loaded.

    Raises:
        UsageError: It has none of a setting that is to win.
    """
    from ckptmirror.formats.command import remember

    remember(state)
    check_known(wins, _built(state))


def settle_command(state: TrainState, meta: Meta, report: LoadReport, wins: Collection[str]) -> tuple[str, ...]:
    """Set what wins, and record which settings are in force after a load.

    Returns:
        A line for each setting that this command built otherwise.
    """
    from ckptmirror.formats.command import put_in_force

    here, saved = _built(state), report.command.of_parts(report.loaded)
    if wins:
        _set(state, saved, here, wins)
    put_in_force(state, in_force(saved, here, wins))
    config = plain_values(state.training_config or {})
    return changes(saved, here, wins) + config_changes(meta.training_config, config)


def _built(state: TrainState) -> Command:
    from ckptmirror.formats.command import command_of

    record = command_of(state, as_built=True)
    return Command.parse(record, range(len(record["groups"])))


def _set(state: TrainState, saved: Command, here: Command, wins: Collection[str]) -> None:
    from ckptmirror.formats.command import schedulers_of
    from ckptmirror.formats.optimizer_state import optimizers_of

    schedulers = schedulers_of(state)
    for at, one in schedulers.items():
        for name in here.schedulers[at].keys() & set(wins):
            attribute = name if hasattr(one, name) else f"_{name}"
            setattr(one, attribute, _like(getattr(one, attribute), here.schedulers[at][name]))
    position = 0
    for optimizer in optimizers_of(state.optimizer):
        of_optimizer = [one for one in schedulers.values() if getattr(one, "optimizer", None) is optimizer]
        for index, group in enumerate(optimizer.param_groups):
            built = here.groups[position]
            recorded = saved.groups[position] if len(saved.groups) == len(here.groups) else {}
            position += 1
            for name in group.keys() & built.keys() & set(wins) - {"lr"}:
                _put(group, name, built[name])
            if "lr" in wins and "lr" in built:
                _set_rate(group, index, of_optimizer, built, recorded)
        for one in of_optimizer if "lr" in wins else ():
            if len(getattr(one, "_last_lr", ())) == len(optimizer.param_groups):
                one._last_lr = [_copy(group["lr"]) for group in optimizer.param_groups]


def _set_rate(group: dict[str, Any], index: int, schedulers: Sequence[Any], built: Settings, saved: Settings) -> None:
    """Set the learning rate of a group, and where its schedule begins."""
    base = built.get("initial_lr", built["lr"])
    lists = [one.base_lrs for one in schedulers if index < len(getattr(one, "base_lrs", ()))]
    known = [*(rates[index] for rates in lists), group.get("initial_lr"), saved.get("initial_lr", saved.get("lr"))]
    bases = [float(one) for one in known if one is not None]
    rate = new_rate(float(group["lr"]), bases, base) if bases else base
    for rates in lists:
        _put(rates, index, base)
    if "initial_lr" in group:
        _put(group, "initial_lr", base)
    if rate is not None:
        _put(group, "lr", rate)


def _put(held: Any, at: Any, value: Any) -> None:
    """Set a value of a dict or a list; a tensor keeps its memory, since a compiled step may use it."""
    if hasattr(held[at], "fill_"):
        held[at].fill_(value)
    else:
        held[at] = _like(held[at], value)


def _like(now: Any, value: Any) -> Any:
    """Return a recorded value, which has tuples only, in the kind of container that it has in a live object."""
    return type(now)(value) if isinstance(now, list | Counter) and isinstance(value, tuple) else value


def _copy(rate: Any) -> Any:
    return rate.clone() if hasattr(rate, "clone") else rate
