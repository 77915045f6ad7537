"""The life of an upload record: its states and the legal transitions between them.

Rules:
* A transition that is not in ``TRANSITIONS`` is illegal; staying in a state is not a transition.
* ``removed`` is final: a tombstone is never replaced.
* Only ``verified`` means that a mirror has the file. Everything else means: not known to be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from ckptmirror.core.errors import IllegalTransition

__all__ = ["SETTLED", "TRANSITIONS", "WAITING", "RecordState", "can_go", "check_transition", "state_diagram"]


class RecordState(StrEnum):
    """The state of the upload of one file to one mirror."""

    PENDING = "pending"  # to be uploaded; nobody holds it
    UPLOADING = "uploading"  # a worker holds it, for the time of its lease
    VERIFIED = "verified"  # the mirror was asked and answered with the same size and crc32c
    FAILED = "failed"  # a permanent fault; waits for `ckptmirror drain` or the next start
    SKIPPED = "skipped"  # policy leaves this save out on this mirror
    REMOVED = "removed"  # retention removed the save from the mirror and left a tombstone


WAITING = (RecordState.PENDING, RecordState.UPLOADING, RecordState.FAILED)  # not on the mirror, and meant to be
SETTLED = (RecordState.VERIFIED, RecordState.REMOVED, RecordState.SKIPPED)  # on the mirror, or not meant to be
_S = RecordState

TRANSITIONS: Mapping[tuple[RecordState, RecordState], str] = MappingProxyType(
    {
        (_S.PENDING, _S.UPLOADING): "A worker claimed it.",
        (_S.UPLOADING, _S.VERIFIED): "The mirror, asked after the upload, shows the same size and crc32c.",
        (_S.UPLOADING, _S.PENDING): "The lease ran out, or the fault is temporary.",
        (_S.UPLOADING, _S.FAILED): "The fault is permanent.",
        (_S.FAILED, _S.PENDING): "`ckptmirror retry` or `drain`, or a new start, which tries once more.",
        (_S.VERIFIED, _S.PENDING): "A reconcile found the object gone or changed, or `verify --deep` found it damaged.",
        (_S.PENDING, _S.SKIPPED): "A policy leaves this save out.",
        (_S.UPLOADING, _S.SKIPPED): "A policy leaves this save out; what was sent so far is abandoned.",
        (_S.FAILED, _S.SKIPPED): "A policy leaves this save out.",
        (_S.VERIFIED, _S.SKIPPED): "A policy leaves this save out; the object is an orphan that retention ages out.",
        (_S.SKIPPED, _S.PENDING): "Nodes that were away are back, or the mirror lost what this node had sent.",
        (_S.PENDING, _S.REMOVED): "The mirror has a tombstone of this save.",
        (_S.UPLOADING, _S.REMOVED): "The mirror has a tombstone of this save.",
        (_S.VERIFIED, _S.REMOVED): "Retention removed the save from the mirror and left a tombstone.",
        (_S.FAILED, _S.REMOVED): "The mirror has a tombstone of this save.",
        (_S.SKIPPED, _S.REMOVED): "The mirror has a tombstone of this save.",
    }
)


def can_go(old: RecordState, new: RecordState) -> bool:
    """Whether a record may go from ``old`` to ``new``."""
    return (old, new) in TRANSITIONS


def check_transition(old: RecordState, new: RecordState) -> None:
    """Check that a record may go from ``old`` to ``new``.

    Raises:
        IllegalTransition: It may not; the message names the legal states.
    """
    if can_go(old, new):
        return
    ways = ", ".join(to.value for (start, to) in TRANSITIONS if start is old) or "nowhere"
    raise IllegalTransition(f"An upload record that is {old.value} cannot become {new.value}: it can go to {ways}.")


def state_diagram() -> str:
    """Return the states and transitions as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {_S.PENDING.value}"]
    lines += [f"    {old.value} --> {new.value}: {_label(why)}" for (old, new), why in TRANSITIONS.items()]
    return "\n".join([*lines, f"    {_S.REMOVED.value} --> [*]"]) + "\n"


def _label(sentence: str) -> str:
    """Return a label without semicolons, which end it in Mermaid, and backquotes, which have a meaning there."""
    return sentence.rstrip(".").replace(";", ",").replace("`", "'")
