"""Where a start begins: which saves to try, in which order, and whether starting at step 0 is allowed.

Rules:
* The newest save of the lineage first; of one step, DCP before the model file before an emergency snapshot.
* At an equal save the disk is preferred; then the mirrors in configured order.
* Superseded and unknown saves are never chosen by ``auto``; a person may ask for a superseded one by its id.
* Starting at 0 needs the answer of every required mirror, and either no committed save anywhere or a recorded decision
  to start from scratch. Anything that looks like a save but is broken forbids it: a person decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptmirror.core.errors import CheckpointNotFound, RefusedOnlyCopy, StoreTemporary, UsageError
from ckptmirror.core.lineage import Lineage, SaveFacts
from ckptmirror.core.model import Kind

__all__ = ["DISK", "Candidate", "candidates", "check_fresh_start", "check_scratch"]

DISK = "disk"
KIND_ORDER: tuple[Kind, ...] = ("dcp", "model", "emergency")


@dataclass(frozen=True)
class Candidate:
    """One save in one kind, and the places that hold it whole, best first (``DISK`` or a mirror's URL)."""

    save: SaveFacts
    kind: Kind
    places: tuple[str, ...]


def candidates(
    order: Lineage, places: Mapping[tuple[str, Kind], Sequence[str]], reference: str | int | None = None
) -> list[Candidate]:
    """List what to try, best first.

    Args:
        order: The saves of all places together.
        places: For each save id and kind, where it is whole.
        reference: None for ``auto``; a step; ``"latest"``; or a save id (8 digits or more).

    Raises:
        CheckpointNotFound: The reference names nothing that is whole.
        UsageError: The reference is ambiguous.
    """
    current = sorted(order.current.items(), key=lambda item: (-item[0][0], KIND_ORDER.index(item[0][1])))
    wanted = [(kind, save) for (_, kind), save in current]
    if isinstance(reference, int):
        wanted = [(kind, save) for kind, save in wanted if save.step == reference]
        if not wanted:
            raise _missing_step(reference, order)
    elif reference is not None and reference != "latest":
        wanted = _by_id(reference, order)
    return [
        Candidate(save, kind, tuple(places[(save.save_id, kind)]))
        for kind, save in wanted
        if places.get((save.save_id, kind))
    ]


def _by_id(reference: str, order: Lineage) -> list[tuple[Kind, SaveFacts]]:
    if len(reference) < 8 or not all(char in "0123456789abcdef" for char in reference):
        raise UsageError(
            f"{reference!r} is neither a step, nor 'latest', nor at least 8 digits of a save id.",
            hint="List steps and save ids with `ckptmirror ls`.",
        )
    everything = {save.save_id: save for save in (*order.current.values(), *order.replaced, *order.superseded)}
    found = [save for save_id, save in everything.items() if save_id.startswith(reference)]
    if not found:
        raise CheckpointNotFound(f"No save id starts with {reference}.")
    if len(found) > 1:
        raise UsageError(f"{len(found)} save ids start with {reference}.", hint="Give more digits.")
    return [(kind, found[0]) for kind in KIND_ORDER if kind in found[0].kinds]


def _missing_step(step: int, order: Lineage) -> CheckpointNotFound:
    steps = sorted({there for there, _ in order.current})
    nearest = sorted(sorted(steps, key=lambda there: abs(there - step))[:4])
    aside = [save for save in order.superseded if save.step == step]
    if aside:
        return CheckpointNotFound(
            f"Step {step} is off the lineage: training went on from an earlier save.",
            hint=f"Resume it all the same by its save id: {', '.join(save.save_id[:8] for save in aside)}.",
        )
    there_is = f"The nearest are {', '.join(map(str, nearest))}." if nearest else "There is no save at all."
    return CheckpointNotFound(f"There is no save of step {step}. {there_is}")


def check_scratch(order: Lineage, problems: Mapping[str, str]) -> None:
    """Check that a start over, which a person asked for without force, leaves no training behind.

    Raises:
        RefusedOnlyCopy: There are saves, or things that look like saves; lists some.
    """
    steps = sorted({step for step, _ in order.current})
    listed = [f"step {step}" for step in steps[-5:]]
    listed += [f"step {save.step} (save {save.save_id[:8]})" for save in (*order.superseded, *order.unknown)][:5]
    listed += [f"{name}: {why}" for name, why in list(problems.items())[:5]]
    if listed:
        raise RefusedOnlyCopy(
            "Starting at step 0 would leave what is saved behind: " + "; ".join(listed),
            hint="Add force=True to do it all the same (nothing is deleted), or resume without policy='scratch'.",
        )


def check_fresh_start(
    order: Lineage,
    *,
    decided_scratch: bool,
    continued_from: int | None,
    silent_required: Collection[str],
    problems: Mapping[str, str],
) -> None:
    """Check that nothing can be resumed because there is nothing, not because it cannot be seen.

    Args:
        order: The saves of all places together; its ``current`` has nothing that could be loaded.
        decided_scratch: The newest decided attempt's way ends at a recorded start from scratch.
        continued_from: The step that the newest decided attempt continued from: then there was a save. None if it
            started from scratch, or if there is no attempt.
        silent_required: Required mirrors that did not answer.
        problems: Everything that looks like a save and is not whole, with the reason.

    Raises:
        StoreTemporary: A required mirror did not answer.
        RefusedOnlyCopy: There are saves, but none can be resumed; lists them.
    """
    if silent_required:
        raise StoreTemporary(
            f"There is no save on the disk, and {', '.join(silent_required)} does not answer, so it is unknown whether "
            "there are saves there. Starting at step 0 might fork the run.",
            hint="Start again when the mirror answers, or decide with policy='scratch'.",
        )
    if continued_from is not None and not order.current:
        raise RefusedOnlyCopy(
            f"The newest attempt continued from step {continued_from}, but no save of the lineage is there any more.",
            hint="Check the root and the mirror URLs, or decide with policy='scratch', force=True.",
        )
    others = [*order.superseded, *order.replaced, *order.unknown]
    undecided = others if not decided_scratch else list(order.unknown)
    if not problems and not undecided and not order.current:
        return
    listed = [f"{name}: {why}" for name, why in list(problems.items())[:5]]
    listed += [f"step {save.step} (save {save.save_id[:8]})" for save in undecided[:5]]
    raise RefusedOnlyCopy(
        "There are saves, but none of them can be resumed, and step 0 is never a silent fallback: " + "; ".join(listed),
        hint="Mend or name one (policy=<save id>), or decide with policy='scratch', force=True.",
    )
