"""The sentences of a start: what it refuses and why, what it skips, and which command decides.

Rules:
* A refusal says what, why and what to do next; a start that waits names what it waits for.
* Each sentence is written here once; ``decide`` chooses when to use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from ckptmirror.core.errors import (
    CheckpointNotFound,
    ConfigError,
    LineageError,
    NotAuthorised,
    RefusedOnlyCopy,
    StoreTemporary,
    Temporary,
    UsageError,
)
from ckptmirror.core.model import Attempt
from ckptmirror.core.nearest_steps import nearest_steps
from ckptmirror.core.problems import Hindrance
from ckptmirror.core.reach import Reach, access_hint
from ckptmirror.core.start.evidence import Evidence, ListFound, Row
from ckptmirror.core.start.lineage import Lineage, SaveFacts
from ckptmirror.core.start.quarantine import Failure, why_quarantined

__all__ = [
    "NOT_BELIEVED",
    "NOT_CONFIGURED",
    "Notice",
    "emergency_needs_ranks",
    "goes_on",
    "missing_step",
    "missing_word",
    "named",
    "named_place",
    "never_step_0",
    "not_answering",
    "not_believed",
    "not_one_run",
    "not_readable",
    "person_in_doubt",
    "quarantined",
    "rival_may_have_saved",
    "unknown_reference",
    "with_root",
]

_LACKS_ROOT = re.compile(r"`ckptmirror (rewind|forget-mirror)(?![^`]*--root)")
NOT_CONFIGURED = "is no longer configured"
NOT_BELIEVED = "is not believed"
_KEYS = "not by a key in verify_keys"
_REFUSES = "does not accept these credentials"


@dataclass(frozen=True)
class Notice:
    """Something that a person should know about a start, whatever the start does.

    Attributes:
        line: The sentence.
        level: The log level; ``error`` if training may be lost.
        step: The step of the copy that cannot be used, if the notice is about one; -1 if its step is unknown.
        save_id: The save of that copy.
        place: Where that copy is.
    """

    line: str
    level: Literal["error", "warning"] = "error"
    step: int | None = None
    save_id: str = ""
    place: str = ""


def named(attempt: Attempt) -> str:
    """Return the name of an attempt for use in a sentence."""
    return f"attempt {attempt.number} ({attempt.id[:8]})"


def with_root(text: str, root: str) -> str:
    """Return the sentence with the root named in its commands, so that they can be pasted."""
    text = text.replace("`ckptmirror ls`", f"`ckptmirror ls {quote(root)}`")
    return _LACKS_ROOT.sub(lambda found: f"{found[0]} --root {quote(root)}", text)


def missing_word(row: Row | None) -> str:
    """Return why a place's answer is missing; a place without a row is not configured."""
    if row is None or row.reach is Reach.DROPPED:
        return NOT_CONFIGURED
    verb = _REFUSES if row.reach is Reach.REFUSED else "does not answer"
    return f"{verb} ({row.why})" if row.why else verb


def not_answering(why: str, silent: Mapping[str, str], *, or_else: str = "") -> StoreTemporary | NotAuthorised:
    """Return the error of a start that needs an answer from places that do not answer.

    Args:
        why: Why the answer is needed.
        silent: For each place, what is wrong: "does not answer (...)".
        or_else: What a person may do without them, where all are optional mirrors.
    """
    url = next(iter(silent)) if len(silent) == 1 else "URL"
    gone = f"if it is gone for good, take it out of the run with `ckptmirror forget-mirror --url {quote(url)}`"
    text = f"{why}{'; '.join(f'{place} {phrase}' for place, phrase in silent.items())}."
    if all(phrase.startswith(_REFUSES) for phrase in silent.values()):
        return NotAuthorised(text, hint=access_hint(silent) + (f" Or {or_else}." if or_else else ""))
    verb = "it is configured again" if NOT_CONFIGURED in silent.values() else "it answers"
    return StoreTemporary(text, hint=f"Start again when {verb}, or {or_else or gone}.")


def rival_may_have_saved(
    rival: Attempt, silent: Mapping[str, str], *, or_else: str = ""
) -> StoreTemporary | NotAuthorised:
    """Return the error of a start while another root's attempt may have saved on a silent mirror."""
    return not_answering(
        f"The run was started elsewhere ({named(rival)}), and may since have saved where no mirror answers now: ",
        silent,
        or_else=or_else,
    )


def person_in_doubt(attempts: Sequence[Attempt], silent: Mapping[str, str]) -> StoreTemporary | NotAuthorised:
    """Return the error of a start while a silent mirror leaves open whether a person's decision counts."""
    names = ", ".join(map(named, attempts))
    return not_answering(f"A person decided where the run continues ({names}), if every mirror recorded that: ", silent)


def not_readable(what: str, why: str, hindrance: Hindrance = "unreadable") -> Temporary | NotAuthorised:
    """Return the error of a start that would go back past something that cannot be read now and may be whole."""
    kind = NotAuthorised if hindrance == "refused" else Temporary
    return kind(
        f"{what} cannot be read now: {why.removesuffix('.')}. It may be whole, and training would be set back from it.",
        hint="Fix what keeps it from being read, or go back on purpose with policy=<step>.",
    )


def emergency_needs_ranks(step: int, saved_by: int, ranks: int) -> RefusedOnlyCopy:
    """Return the error of a start whose newest save is a snapshot that only another number of ranks can load."""
    return RefusedOnlyCopy(
        f"The newest save is the emergency snapshot of step {step}, in which each of {saved_by} ranks has values of "
        f"its own, so only that many can load it; this start has {ranks}. Continuing from an older save would leave "
        "it behind.",
        hint=f"Start with {saved_by} ranks, or go back on purpose with policy=<step>.",
    )


def goes_on(fork: Attempt) -> str:
    """Return the notice of a start that goes on with what a person began where it was asked to begin."""
    at, again = "at step 0", "`ckptmirror rewind --scratch`"
    if fork.parent is not None:
        at = f"from step {fork.parent.step}"
        again = f"`ckptmirror rewind --save {fork.parent.save_id[:8]}`, or give force=True once"
    return (
        f"{named(fork)} began {at}, as this start was asked to, and the run continues what it began, as if the same "
        f"command was started again. To begin {at} once more, run {again}"
    )


def with_what(save_id: str) -> str:
    """Return how a person continues from a save: several nodes that have it together need a start of all of them."""
    one = save_id[:8]
    return f"with policy={one!r}, or, where one disk or a mirror has all of it, `ckptmirror rewind --save {one}`"


def named_place(row: Row) -> str:
    """Return what a person calls a place: of several nodes' disks, those that hold a run."""
    return f"the disk of node {', '.join(map(str, row.run_on))}" if row.run_on else row.place


def not_one_run(error: LineageError | str, places: Iterable[str]) -> ConfigError:
    """Return the error of a start whose places name several runs, or contradict one another."""
    return ConfigError(
        f"{', '.join(places)} do not belong to one run: {error}",
        hint="Give each run a root, a mirror prefix and a persistent directory of its own.",
    )


def unknown_reference(reference: str) -> UsageError:
    """Return the error of a policy that is not a reference."""
    return UsageError(
        f"{reference!r} is neither a step, nor 'latest', nor at least 8 digits of a save id.",
        hint="List steps and save ids with `ckptmirror ls`.",
    )


def missing_step(step: int, order: Lineage) -> CheckpointNotFound:
    """Return the error for a step that does not exist."""
    steps = sorted({there for there, _ in order.current})
    aside = [save for save in (*order.superseded, *order.unknown) if save.step == step]
    if aside:
        return CheckpointNotFound(
            f"Step {step} is off the lineage: training continued from another save.",
            hint=f"Resume it anyway by its save id: {', '.join(save.save_id[:8] for save in aside)}.",
        )
    there_is = nearest_steps(steps, step) or " There is no save at all."
    return CheckpointNotFound(f"There is no save of step {step}.{there_is}")


def never_step_0(what: Sequence[str], *, asked: bool) -> RefusedOnlyCopy:
    """Return the error of a start at step 0 although something was saved.

    Args:
        what: What was saved.
        asked: Whether a person asked for a start from scratch without force.
    """
    listed = "; ".join(what)
    if asked:
        return RefusedOnlyCopy(
            f"There are saves, and starting at step 0 would ignore them: {listed}",
            hint="Add force=True to do it anyway (nothing is deleted), or resume without policy='scratch'.",
        )
    keys = "Check verify_keys first, on every node: what another key signed is not believed. Else "
    begin = f"{keys}repair" if _KEYS in listed else "Repair"
    without = ", continue from one without what it lost, as its line says" if "exclude=" in listed else ""
    return RefusedOnlyCopy(
        f"There are saves, but none of them can be resumed, and step 0 is never a silent fallback: {listed}",
        hint=f"{begin} one, name a whole one (policy=<save id>){without}, or decide with policy='scratch', force=True.",
    )


def not_believed(evidence: Evidence) -> str:
    """Return why a list is not believed, if nothing that any place has is: the keys are another run's; else ""."""
    rows = evidence.answering()
    if any(row.listed is ListFound.SOUND or row.copies or row.parts for row in rows):
        return ""
    return next((row.why for row in rows if row.listed is ListFound.BROKEN and NOT_BELIEVED in row.why), "")


def quarantined(save: SaveFacts, failures: Sequence[Failure], earlier: SaveFacts | None, obstacle: str) -> str:
    """Return the sentence about a quarantined save.

    Args:
        save: The save, which is the newest.
        failures: The starts that failed from it.
        earlier: The save that training goes back to.
        obstacle: Why it does not go back; "": it does.
    """
    what = f"step {save.step} (save {save.save_id[:8]}) is quarantined: {why_quarantined(failures)}"
    if earlier is None or obstacle:
        return f"{what}; training continues from it all the same: {obstacle}"
    return (
        f"{what}; training goes back to step {earlier.step}. If the save is not the cause, stop, and continue from it "
        f"{with_what(save.save_id)}"
    )
