"""The numbers of saves within an attempt: of one lineage, what was saved later has the greater one.

Rules:
* The number of an emergency snapshot follows from its step. So ranks that ask no other give one number to their parts,
  whichever saves each of them called. Only several saves of one step, or steps that go back, make it depend on saves.
* Of one step, what came last has the greatest number: a save, a snapshot, and a save after that.
"""

from __future__ import annotations

__all__ = ["number_of_save", "number_of_snapshot"]


def number_of_save(step: int, given: int) -> int:
    """Return the number that a rank asks for a save: the ranks take the greatest, once all begin it.

    Args:
        step: Its step.
        given: The greatest number so far, of a save that all ranks began or of this rank's snapshots; 0 for none.
    """
    return max(4 * step + 2, given + 1)


def number_of_snapshot(step: int, begun: int) -> int:
    """Return the number of an emergency snapshot.

    Args:
        step: Its step.
        begun: The number of the last save that all ranks began; 0 for none.
    """
    return max(4 * step + 3, begun + 1)
