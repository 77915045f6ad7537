"""Logging about a save or a mirror: the fields of ``core/log_fields.py`` go with the sentence."""

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
    event: str | None = None,
    rank: int | None = None,
    mirror: str | None = None,
) -> _Adapter:
    """Return ``log``, each line of which carries these fields.

    Args:
        save: Whatever has some of ``step``, ``kinds``, ``save_id``, ``mirror`` and ``rank``: a meta, a record, a row.
        event: Name of the class of event that is emitted too.
        rank: Which rank it was.
        mirror: URL.
    """
    return _Adapter(
        log,
        about(
            event=event,
            step=getattr(save, "step", None),
            kinds=getattr(save, "kinds", None) or (),
            rank=rank if rank is not None else getattr(save, "rank", None),
            mirror=mirror if mirror is not None else getattr(save, "mirror", None),
            save_id=getattr(save, "save_id", None),
        ),
    )
