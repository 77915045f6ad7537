"""The numbers of saves and snapshots within an attempt: of one lineage, what was saved later has the greater one.

Rules:
* Each step has numbers of its own: its saves take the first of them, in order, and a snapshot the last. So ranks that
  ask no other give one number to their parts, whichever saves each of them called, or has begun. Only steps that go
  back, a save after a snapshot of the same step, and a seventh save of one step make it depend on saves.
* Of one step, what came last has the greatest number: a save, a snapshot, and a save after that.
"""

from __future__ import annotations

__all__ = ["number_of_save", "number_of_snapshot"]

_OF_A_STEP = 8  # with the largest step there is, a number still fits into 64 bits


def number_of_save(step: int, given: int) -> int:
    """Return the number that a rank asks for a save: the ranks take the greatest, once all begin it.

    Args:
        step: Its step.
        given: The greatest number so far, of a save that all ranks began or of this rank's snapshots; 0 for none.
    """
    return max(_OF_A_STEP * step + 1, given + 1)


def number_of_snapshot(step: int, begun: int) -> int:
    """Return the number of an emergency snapshot.

    Args:
        step: Its step.
        begun: The number of the last save that all ranks began; 0 for none.
    """
    return max(_OF_A_STEP * (step + 1) - 1, begun + 1)
