"""What the methods of ``CheckpointManager`` are given, checked and put into the words of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ckptmirror.core import events
from ckptmirror.core.errors import CkptMirrorError, ConfigError, UsageError
from ckptmirror.core.model import SAVED_KINDS, Kind
from ckptmirror.core.names import MAX_STEP
from ckptmirror.local import files
from ckptmirror.ranks import StopRequest, node_key_of

__all__ = ["checked_kinds", "checked_step", "node_key", "stop_event"]


def node_key(root: Path) -> tuple[str, BaseException | None]:
    """Ranks that share one root are one node, however each spells its path; a rank without a root says so later."""
    try:
        files.make_dirs(root)
        return node_key_of(root), None
    except (OSError, CkptMirrorError) as error:
        return str(root), error


def stop_event(stop: StopRequest, rank: int) -> events.StopRequested:
    """Return the event of a request to stop."""
    left_s = stop.remaining_s
    if math.isinf(left_s):
        return events.StopRequested(reason=stop.reason or "", rank=rank)
    return events.StopRequested(reason=stop.reason or "", rank=rank, deadline_s=left_s, age_s=stop.grace_s - left_s)


def checked_kinds(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """Return the kinds to save, in order.

    Raises:
        ConfigError: They are not a sequence of kinds, each once.
    """
    if isinstance(kinds, str) or not kinds or len(set(kinds)) != len(kinds) or not set(kinds) <= set(SAVED_KINDS):
        raise ConfigError(f"kinds is {kinds!r}; it is a sequence of {' and '.join(map(repr, SAVED_KINDS))}.")
    return tuple(kind for kind in SAVED_KINDS if kind in kinds)


def checked_step(step: int) -> int:
    """Return a step to save at.

    Raises:
        UsageError: It is none.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"{step!r} is not a step: give an int from 0 to {MAX_STEP}.")
    return step
