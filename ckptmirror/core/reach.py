"""Reach: whether a place answered, and what an error of its calls says of that.

Rules:
* A place is *silent* if the same call may succeed later although nobody changed anything.
* It *refused* if it rejects these credentials: a person has to change something first.
* Every other error is an answer: the place would give the same one again.
"""

from __future__ import annotations

from enum import StrEnum

from ckptmirror.core.errors import CkptMirrorError, NotAuthorised

__all__ = ["Reach", "reach_after"]


class Reach(StrEnum):
    """Whether a place answered."""

    ANSWERED = "answered"
    SILENT = "silent"  # it may hold anything
    REFUSED = "refused"  # it rejects these credentials, and may hold anything
    DROPPED = "dropped"  # not configured, but it was a mirror of this root or a list names it


def reach_after(error: BaseException) -> Reach:
    """Return what an error of a call to a place says of the place; never ``DROPPED``."""
    if isinstance(error, NotAuthorised):
        return Reach.REFUSED
    return Reach.SILENT if isinstance(error, CkptMirrorError) and error.temporary else Reach.ANSWERED
