"""Verification: what it means that some saves of a place are whole and others are not.

Rules:
* A save that is not whole counts unless it is surely off the lineage: what is superseded or replaced is never chosen,
  so its damage is told and changes no exit code. What cannot be placed counts.
* An emergency snapshot that is not whole counts only while no whole save of the lineage is as new: it was to bridge
  the time until then.
* Damage outweighs what could not be read, for it will not pass by itself.
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
    "counting",
    "delete_command",
    "kinds_to_stage",
    "outcome",
    "repair_command",
    "standing_if_whole",
    "worst",
]

State = Literal["whole", "damaged", "unreadable", "refused"]
"""``unreadable``: nobody knows, something kept it from being read; ``refused``: the mirror does not let us read it."""

Outcome = State
_WORST_FIRST: tuple[State, ...] = ("damaged", "refused", "unreadable", "whole")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of one save in one place; ``step`` is None where nothing tells it."""

    step: int | None
    kinds: tuple[Kind, ...]
    standing: Standing
    state: State


def worst(states: Iterable[State]) -> State:
    """Return the state that outweighs the others; ``whole`` if there are none."""
    return min(states, key=_WORST_FIRST.index, default="whole")


def counting(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return what is not whole and could be what a run continues from, or what an evaluation reads."""
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
    """Say how a verification of one place ended."""
    return worst(verdict.state for verdict in counting(verdicts))


def standing_if_whole(attempts: Sequence[Attempt], saves: Iterable[SaveFacts], save: SaveFacts) -> Standing:
    """Return the standing that a save which is not whole would have, were it whole.

    Args:
        attempts: The decided ones.
        saves: The whole saves of the place.
        save: Whose standing is asked.
    """
    others = [other for other in saves if other.save_id != save.save_id]
    return lineage(attempts, [*others, save]).standing_by_save()[save.save_id]


def kinds_to_stage(kinds: Sequence[Kind], damaged: Iterable[Sequence[Kind]]) -> tuple[Kind, ...]:
    """Return the fewest kinds, of those that can be staged, that bring every damaged artifact again.

    Args:
        kinds: Of the save.
        damaged: For each damaged artifact the kinds that need it; none: the meta itself is damaged, and all are needed.
    """
    possible = [kind for kind in SAVED_KINDS if kind in kinds]
    needs = [[kind for kind in possible if kind in wanted] for wanted in damaged]
    if not needs:
        return tuple(possible)
    chosen: list[Kind] = []
    for wanted in sorted(needs, key=len):  # what leaves no choice first
        if wanted and not set(chosen) & set(wanted):
            chosen.append(wanted[0])
    return tuple(kind for kind in possible if kind in chosen)


def delete_command(address: str) -> str:
    """Return the command that deletes a file, or an object of a bucket; "" where none is known."""
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
    """Return the command that brings a damaged copy of a save back from a good one; "" where none can.

    Args:
        step: Of the save.
        kinds: In which kinds it is to be staged (``kinds_to_stage``).
        standing: Its standing.
        place: The damaged copy's: a directory, or a mirror's URL.
        root: For damage on a mirror: the directory that holds a good copy.
        mirror: For damage in a directory: the mirror that holds a good copy.
        is_known: For damage on a mirror: whether the root's table knows that mirror.
    """
    if mirror is not None:
        rest = "" if standing == "current" else " --superseded"
        rest += f" --mirror {quote(mirror)} --dest {quote(place)}"
        return " && ".join(f"ckptmirror stage --step {step} --kind {kind} --full --refresh{rest}" for kind in kinds)
    if root is None:
        return ""
    if is_known:
        return f"ckptmirror drain --root {quote(root)}"
    return f"ckptmirror push --root {quote(root)} --mirror {quote(place)} --step {step}"
