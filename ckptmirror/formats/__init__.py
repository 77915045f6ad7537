"""What the bytes are: one file per kind of save.

Rules:
* Nothing here imports torch until a format is asked for.
* A kind is found by its name: ``formats/<kind>.py`` has a module-level ``FORMAT``.
"""

from __future__ import annotations

import importlib
from typing import cast

from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import KINDS
from ckptmirror.formats.base import Format, LoadReport, LoadTarget, Snapshot, WriteContext
from ckptmirror.formats.train_state import TrainState

__all__ = ["Format", "LoadReport", "LoadTarget", "Snapshot", "TrainState", "WriteContext", "get_format"]


def get_format(kind: str) -> Format:
    """Return the format of ``kind``, importing it (and torch) now.

    Raises:
        UsageError: There is no such kind.
    """
    if kind not in KINDS:
        raise UsageError(f"There is no kind {kind!r}; the kinds are {', '.join(KINDS)}.")
    return cast(Format, importlib.import_module(f"ckptmirror.formats.{kind}").FORMAT)
