"""Reach: whether a place answered, and what an error of its calls says of that.

Rules:
* A place is *silent* if the same call may succeed later although nobody changed anything.
* It *refused* if it rejects these credentials: a person has to change something first.
* Every other error is an answer: the place would give the same one again.
* What a person has to change follows from the place: there is a login for ``gs://``, and none for a directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from ckptmirror.core.errors import CkptMirrorError, NotAuthorised

__all__ = ["Reach", "access_hint", "reach_after"]


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


def access_hint(places: Iterable[str]) -> str:
    """Return what a person can do about places that refuse these credentials, where the errors are not at hand.

    Args:
        places: Their URLs or paths.
    """
    schemes = {place.partition("://")[0] if "://" in place else "file" for place in places}
    if schemes <= {"gs", "gcs"}:
        return NotAuthorised.hint
    if schemes == {"file"}:
        return "Make the directory accessible to this user; then try again."
    return "Use credentials that are accepted there, or have the permissions changed; then try again."
