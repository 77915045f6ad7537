"""Quarantine: which saves start after start failed from, so that auto-resume goes back past them.

Rules:
* A start from a save *failed* if it reported a step of training, did not commit a save, and either reported a loss that
  is not finite (it *diverged*) or ended without saying so (it *died*).
* A start that reported no step says nothing about its save: the command may be wrong, or a node not ready. It is left
  out of the row. So a run that never reports has no quarantine.
* A start that ended in order (a stop request, ``close``) or committed a save ends the row. So does one whose save
  ckptmirror failed on any rank: it got to its next save, and what ends it then follows from that.
* A start that died counts only if the next start of the run was on the same root: another start may have fenced it, and
  where a job comes back on other machines, the old ones may have been the cause.
* A save that a person chose, or that a start went back to, is never quarantined. So a person's release holds, and
  starts by themselves never go back further than one save without a new one.
* What is not known never adds to a row. Nothing here lets anything be deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ckptmirror.core.errors import BackgroundSaveFailed, CkptMirrorError, RankFailed
from ckptmirror.core.model import Attempt
from ckptmirror.core.start.evidence import Evidence, Voice

__all__ = [
    "FAILED_STARTS",
    "Failure",
    "chosen_saves",
    "is_of_training",
    "quarantine_changes",
    "quarantined",
    "quarantined_at",
    "why_quarantined",
]

FAILED_STARTS = 3
"""How many starts in a row have to fail. Two may be chance; each more costs another start that is known to fail."""


@dataclass(frozen=True)
class Failure:
    """A start that failed before its next save, and whether it diverged (otherwise it died)."""

    attempt: Attempt
    diverged: bool

    @property
    def step(self) -> int:
        """The step of the save that it started from."""
        assert self.attempt.parent is not None
        return self.attempt.parent.step


def quarantined(
    attempts: Collection[Attempt],
    voices: Mapping[str, Collection[Voice]],
    saved: Collection[str],
    *,
    root: str | None = None,
) -> dict[str, tuple[Failure, ...]]:
    """Return the saves that are quarantined, by id, each with the starts that failed from it, oldest first.

    Args:
        attempts: Every attempt that is known.
        voices: How the disk of this root knows of each, by id; and which of them diverged, according to any place.
        saved: The ids of the attempts of which some place has a committed save.
        root: The identity of the root that would start next; None: the root of the newest attempt.
    """
    in_order = sorted(attempts, key=_age)
    next_root = {one.id: after.root for one, after in pairwise(in_order)}
    if in_order and root is not None:
        next_root[in_order[-1].id] = root
    chosen = chosen_saves(in_order)
    rows: dict[str, list[Failure]] = {}
    for one in in_order:
        if one.parent is None or one.parent.save_id in chosen:
            continue
        row = rows.setdefault(one.parent.save_id, [])
        said = voices.get(one.id, ())
        if one.id in saved or Voice.SAVED in said:
            row.clear()
        elif Voice.DIVERGED in said:
            row.append(Failure(one, diverged=True))
        elif Voice.ENDED in said:
            row.clear()
        elif Voice.REPORTED in said and next_root.get(one.id, one.root) == one.root:
            row.append(Failure(one, diverged=False))
    return {save_id: tuple(row) for save_id, row in rows.items() if len(row) >= FAILED_STARTS}


def quarantined_at(evidence: Evidence, attempts: Collection[Attempt]) -> dict[str, tuple[Failure, ...]]:
    """Return the saves that are quarantined for a start that has this evidence, as :func:`quarantined`."""
    voices = {one.attempt.id: one.voices for one in evidence.disk.heard}
    for one in evidence.heard_as(Voice.DIVERGED):
        voices[one] = voices.get(one, frozenset()) | {Voice.DIVERGED}
    saved = evidence.heard_as(Voice.COUNTS) | evidence.heard_as(Voice.UPLOADED)
    return quarantined(attempts, voices, saved, root=evidence.root)


def quarantine_changes(
    evidence: Evidence, attempts: Collection[Attempt], claimed: Attempt
) -> tuple[dict[str, tuple[Failure, ...]], dict[str, tuple[Failure, ...]]]:
    """Return the saves that the last attempt put into quarantine, and those that a new attempt releases.

    So over the starts of a run each comes once.

    Args:
        evidence: What the new start has surveyed.
        attempts: Every attempt that it knows, without its own.
        claimed: Its own.
    """
    now = quarantined_at(evidence, attempts)
    before = quarantined_at(evidence, sorted(attempts, key=_age)[:-1])
    chosen = chosen_saves([claimed])
    return (
        {save_id: failures for save_id, failures in now.items() if save_id not in before},
        {save_id: failures for save_id, failures in now.items() if save_id in chosen},
    )


def chosen_saves(attempts: Iterable[Attempt]) -> frozenset[str]:
    """Return the ids of the saves that a person chose to continue from, or that a start went back to."""
    return frozenset(one.parent.save_id for one in attempts if one.by_person and one.parent is not None)


def is_of_training(error: BaseException | None) -> bool:
    """Whether an error may be the fault of the save that training started from: not a stop, nor ckptmirror's own.

    That another rank died is such an error too, also if a save in the background was what noticed it.
    """
    cause = error.__cause__ if isinstance(error, BackgroundSaveFailed) else error
    if isinstance(cause, RankFailed):
        return cause.is_death
    return isinstance(error, Exception) and not isinstance(error, CkptMirrorError)


def why_quarantined(failures: Collection[Failure]) -> str:
    """Return why a save is quarantined, for use in a sentence."""
    diverged = [one.attempt.number for one in failures if one.diverged]
    died = [one.attempt.number for one in failures if not one.diverged]
    how = [f"{_numbered(died)} died"] if died else []
    how += [f"{_numbered(diverged)} reported a loss that is not finite"] if diverged else []
    return f"{len(failures)} starts in a row failed from it before their next save ({', '.join(how)})"


def _numbered(numbers: list[int]) -> str:
    return f"attempt{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _age(attempt: Attempt) -> tuple[int, str]:
    return attempt.number, attempt.id
