"""Before training starts: whether the disk of each node can hold the saves that its retention keeps, and one more.

Rules:
* The size of a save is estimated from the live state (``formats.save_size``); each node counts what its own ranks will
  write, and looks at its own disk. ``core.retention`` decides.
* It is only said. A start never fails because of it, nor because a size could not be estimated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptmirror.core.model import Kind
from ckptmirror.core.retention import Shortage, shortage
from ckptmirror.flow.retention.rotation import gather
from ckptmirror.flow.start.leader import Node
from ckptmirror.local.free_space import free_bytes
from ckptmirror.ranks.base import Ranks

if TYPE_CHECKING:
    from ckptmirror.formats.train_state import TrainState

__all__ = ["say_if_disk_is_small"]

_log = logging.getLogger("ckptmirror.resume")


def say_if_disk_is_small(ranks: Ranks, node: Node | None, state: TrainState, kinds: Sequence[Kind]) -> None:
    """Warn on each node whose disk is too small for its retention. Every rank calls this.

    Args:
        ranks: All ranks.
        node: Set on the leader of each node.
        state: What will be saved.
        kinds: The kinds of a save.
    """
    mine = _estimated(state, kinds, ranks)
    of_ranks = ranks.exchange(mine, what="estimate the size of a save")
    if node is None:
        return
    try:
        found = _shortage_on(node, sum(of_ranks[rank] for rank in ranks.node_ranks))
    except Exception as error:  # noqa: BLE001 - the other ranks go on to train, and would wait for this one
        _log.warning("%s: it is not known whether the disk has room for the next saves: %s", node.root, error)
        return
    if found is not None:
        where = f"node {ranks.node} of {ranks.nodes} (from 0): " if ranks.nodes > 1 else ""
        _log.warning("%s%s", where, _sentence(node, found))


def _estimated(state: TrainState, kinds: Sequence[Kind], ranks: Ranks) -> int:
    from ckptmirror.formats.save_size import estimated_bytes

    try:
        return estimated_bytes(state, kinds, rank=ranks.rank, world_size=ranks.world_size)
    except Exception as error:  # noqa: BLE001 - a user's state may be anything, and the other ranks wait for an answer
        _log.warning("the size of a save is not known before the first one: %s", error)
        return 0


def _shortage_on(node: Node, save_bytes: int) -> Shortage | None:
    attempts = node.claim.attempts if node.claim is not None else None
    statuses, _ = gather(node.root, node.table, node.mirrors, attempts)
    return shortage(
        statuses,
        node.retention,
        has_required=any(mirror.required for mirror in node.mirrors),
        save_bytes=save_bytes,
        free_bytes=free_bytes(node.root),
    )


def _sentence(node: Node, found: Shortage) -> str:
    there = f"{found.free_bytes} bytes are free"
    if found.saves == 1:
        return (
            f"the disk of {node.root} has no room for one more save of this state: it needs about "
            f"{found.needed_bytes} bytes, and {there}. Without a required mirror and keep_last nothing is deleted: "
            "saves will be skipped. Free space there, or choose a root on a larger disk."
        )
    return (
        f"the disk of {node.root} cannot hold keep_last + 1 = {found.saves} saves of this state: they need about "
        f"{found.needed_bytes} bytes; {there}, and rotation may free {found.freeable_bytes}. Older saves will be "
        "deleted early once the mirrors have them, and saves that find no room are skipped. Lower keep_last, or choose "
        "a root on a larger disk."
    )
