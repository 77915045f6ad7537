"""How far a stage is, as its callers are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["OnProgress", "StageProgress"]


@dataclass(frozen=True)
class StageProgress:
    """How far a download is; the first is told before the first byte.

    Attributes:
        received_bytes: Downloaded and verified by this call.
        kept_bytes: Found verified in what an interrupted call left.
        checking: What lies there already under this name, and is being compared with its checksums; else empty.
    """

    step: int
    received_bytes: int
    kept_bytes: int
    total_bytes: int
    checking: str = ""


OnProgress: TypeAlias = Callable[[StageProgress], None]
