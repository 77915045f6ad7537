"""Verification: what follows from the damaged and unreadable saves of a place, and which command repairs them.

Rules:
* A save that is not whole counts unless it is surely off the lineage: a superseded or replaced save is never chosen, so
  its damage is reported but changes no exit code. A save that cannot be placed counts.
* An emergency snapshot that is not whole counts only while no whole save of the lineage is as new, since it only
  bridges the time until the next save.
* Damage outweighs what could not be read, since it does not go away by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from ckptmirror.core.model import SAVED_KINDS, Attempt, Kind
from ckptmirror.core.start.lineage import SaveFacts, Standing, lineage

__all__ = [
    "Outcome",
    "State",
    "Verdict",
    "delete_command",
    "kinds_to_stage",
    "outcome",
    "repair_command",
    "standing_if_whole",
    "still_needed",
    "worst",
]

State = Literal["whole", "damaged", "unreadable", "refused"]
"""``unreadable``: an error kept it from being read, so it may be whole; ``refused``: the mirror denies us access."""

Outcome = State
_WORST_FIRST: tuple[State, ...] = ("damaged", "refused", "unreadable", "whole")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one save in one place; ``step`` is None if unknown."""

    step: int | None
    kinds: tuple[Kind, ...]
    standing: Standing
    state: State


def worst(states: Iterable[State]) -> State:
    """Return the state that outweighs the others; ``whole`` if there are none."""
    return min(states, key=_WORST_FIRST.index, default="whole")


def still_needed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the saves that are not whole, but that a run could continue from or an evaluation could read."""
    newest = max(
        (v.step for v in verdicts if v.state == "whole" and v.standing == "current" and v.step is not None), default=-1
    )
    return [
        verdict
        for verdict in verdicts
        if verdict.state != "whole"
        and verdict.standing in ("current", "unknown")
        and not (verdict.kinds == ("emergency",) and verdict.step is not None and verdict.step <= newest)
    ]


def outcome(verdicts: Sequence[Verdict]) -> Outcome:
    """Return the overall result of verifying one place."""
    return worst(verdict.state for verdict in still_needed(verdicts))


def standing_if_whole(attempts: Sequence[Attempt], saves: Iterable[SaveFacts], save: SaveFacts) -> Standing:
    """Return the standing that a save which is not whole would have if it were.

    Args:
        attempts: The decided attempts.
        saves: The whole saves of the place.
        save: The save that is not whole.
    """
    others = [other for other in saves if other.save_id != save.save_id]
    return lineage(attempts, [*others, save]).standing_by_save()[save.save_id]


def kinds_to_stage(kinds: Sequence[Kind], damaged: Iterable[Sequence[Kind]]) -> tuple[Kind, ...]:
    """Return the fewest kinds whose staging replaces every damaged artifact.

    Args:
        kinds: The kinds of the save.
        damaged: For each damaged artifact, the kinds that need it; empty if the meta is damaged, which needs all kinds.
    """
    possible = [kind for kind in SAVED_KINDS if kind in kinds]
    needs = [[kind for kind in possible if kind in wanted] for wanted in damaged]
    if not needs:
        return tuple(possible)
    chosen: list[Kind] = []
    for wanted in sorted(needs, key=len):  # first those that leave no choice
        if wanted and not set(chosen) & set(wanted):
            chosen.append(wanted[0])
    return tuple(kind for kind in possible if kind in chosen)


def delete_command(address: str) -> str:
    """Return the command that deletes a file, or an object of a bucket; "" if none is known."""
    if address.startswith("gs://"):
        return f"gcloud storage rm {quote(address)}"
    return "" if "://" in address else f"rm {quote(address)}"


def repair_command(
    *,
    step: int,
    kinds: Sequence[Kind],
    standing: Standing,
    place: str,
    root: str | None = None,
    mirror: str | None = None,
    is_known: bool = True,
) -> str:
    """Return the command that restores a damaged copy of a save from a good one; "" if no command can.

    Args:
        step: The save's step.
        kinds: The kinds to stage (``kinds_to_stage``).
        standing: The save's standing.
        place: Where the damaged copy is: a directory, or a mirror's URL.
        root: For damage on a mirror: the directory that a good copy is sent from.
        mirror: The mirror that holds a good copy, which is staged into the directory. None: the directory has one.
        is_known: For damage on a mirror: whether the root's table knows that mirror.
    """
    send = ""
    if root is not None:
        push = f"ckptmirror push --root {quote(root)} --mirror {quote(place)} --step {step}"
        send = f"ckptmirror drain --root {quote(root)}" if is_known else push
    if mirror is None:
        return send
    rest = "" if standing == "current" else " --superseded"
    rest += f" --mirror {quote(mirror)} --dest {quote(root or place)}"
    stages = [f"ckptmirror stage --step {step} --kind {kind} --full --refresh{rest}" for kind in kinds]
    return " && ".join([*stages, send] if stages and send else stages)
