"""Logging about a save or a mirror, with the fields of ``core/log_fields.py``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ckptmirror.core.log_fields import about

__all__ = ["save_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


def save_logger(
    log: logging.Logger,
    save: object = None,
    *,
    step: int | None = None,
    event: str | None = None,
    rank: int | None = None,
    mirror: str | None = None,
) -> _Adapter:
    """Return ``log`` with these fields on each line.

    Args:
        save: An object with some of ``step``, ``kinds``, ``save_id``, ``mirror`` and ``rank``: a meta, a record, a row.
        step: The step, if no object has it.
        event: The class name of the event that is emitted too.
        rank: The rank.
        mirror: URL.
    """
    return _Adapter(
        log,
        about(
            event=event,
            step=step if step is not None else getattr(save, "step", None),
            kinds=getattr(save, "kinds", None) or (),
            rank=rank if rank is not None else getattr(save, "rank", None),
            mirror=mirror if mirror is not None else getattr(save, "mirror", None),
            save_id=getattr(save, "save_id", None),
        ),
    )
