"""The progress of a stage, for its callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["OnProgress", "StageProgress"]


@dataclass(frozen=True)
class StageProgress:
    """The progress of a download; the first report comes before the first byte.

    Attributes:
        received_bytes: Bytes that this call has downloaded and verified.
        kept_bytes: Bytes that an interrupted call had left, and that this call has verified.
        checking: The name of an existing file or directory that is being compared with its checksums; else empty.
    """

    step: int
    received_bytes: int
    kept_bytes: int
    total_bytes: int
    checking: str = ""


OnProgress: TypeAlias = Callable[[StageProgress], None]
