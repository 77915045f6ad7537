"""What a changed command means for a start: its settings are remembered before a load, and compared after it.

Rules:
* The settings of a save stay in force after a load, and the next save records them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmirror.core.command_changes import Command, changes, config_changes, in_force
from ckptmirror.core.model import Meta
from ckptmirror.core.plain_values import plain_values

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["remember_command", "settle_command"]


def remember_command(state: TrainState) -> None:
    """Remember what this command built, before anything is loaded."""
    from ckptmirror.formats.command import remember

    remember(state)


def settle_command(state: TrainState, meta: Meta, report: LoadReport) -> tuple[str, ...]:
    """Put the settings of a save that was loaded in force; return a line for each that this command built otherwise."""
    from ckptmirror.formats.command import command_of, put_in_force

    record = command_of(state, as_built=True)
    here, saved = Command.parse(record, range(len(record["groups"]))), report.command.of_parts(report.loaded)
    put_in_force(state, in_force(saved, here))
    return changes(saved, here) + config_changes(meta.training_config, plain_values(state.training_config or {}))
