"""What the parts of a save hand to one another: the request, the host copy, the plan, the leader's side.

Rules:
* Values only; what is done with them is in ``save.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmirror.core.errors import BrokenTable, CkptMirrorError, NoTable
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.mirrors import MirrorSpec
from ckptmirror.local.uploads import UploadsTable

if TYPE_CHECKING:
    from ckptmirror.formats.base import Snapshot
    from ckptmirror.ranks.host_copy import Lease

__all__ = ["TABLE_BROKE", "Copied", "LeaderSide", "Plan", "SaveRequest"]

TABLE_BROKE = (BrokenTable, NoTable)


@dataclass(frozen=True)
class SaveRequest:
    """What the caller asked for, beside the state."""

    step: int
    kinds: tuple[Kind, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0  # within the attempt; set by the saver, the same on every rank since all save in the same order


def _give_up(error: CkptMirrorError) -> None:
    raise error


@dataclass
class LeaderSide:
    """What only the node's leader has: the table, who must hear of a commit, and who makes a broken table anew."""

    table: UploadsTable
    mirrors: Sequence[MirrorSpec]
    fenced: Callable[[], str | None]
    on_commit: Callable[[Meta], None]
    renew_table: Callable[[CkptMirrorError], None] = _give_up


@dataclass(frozen=True)
class Plan:
    """What the ranks agree on before anything is written."""

    request: SaveRequest
    save_id: str
    free: bool


@dataclass(frozen=True)
class Copied:
    """What the training thread hands to the background: the host copy, and the training config as it was."""

    snapshot: Snapshot
    lease: Lease
    config: Mapping[str, Any]
