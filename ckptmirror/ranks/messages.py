"""The messages that ranks send each other in one exchange, as bytes.

Rules:
* A report is one rank's value or error; the answer is either every rank's value or one refusal for all.
* An error travels as text, never as a pickled object, since the receiver may not have its class.
* Reports carry the exchange's purpose and number, so that two exchanges can never be confused.
* Equal values of ranks in a row travel once, and a rank gets only what it reads: an answer that has something of each
  rank, and goes to each rank, costs the square of their number.
* Values are pickled: they come from the same job, which runs the same code.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptmirror.core import errors
from ckptmirror.core.errors import CkptMirrorError, RankFailed, UsageError, WaitTimeout
from ckptmirror.core.rank_names import rank_name

__all__ = [
    "MAX_VALUE_BYTES",
    "START_AGAIN",
    "Answer",
    "Failure",
    "Report",
    "Run",
    "decide",
    "failure_of",
    "pack_value",
    "refusal",
]

MAX_VALUE_BYTES = 256 * 1024 * 1024
_MESSAGE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's error, as text."""

    kind: str
    message: str
    hint: str
    says_who: bool = False  # whether the message begins with who failed


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank sends in an exchange: ``value`` (pickled) or ``failure``."""

    number: int
    what: str
    value: bytes
    failure: Failure | None


Run = tuple[int, int, bytes]
"""A rank, how many ranks from it on sent the same value, and that value, pickled."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank receives.

    Attributes:
        outcome: "values", or why there are none: "failed" (the channel is still good), or "late", "missing", "mixed"
            (it is not).
        runs: The values of the ranks that this one reads, in the order of the ranks.
        failures: The errors, by rank.
        reason: One sentence, except for "values" and "failed".
    """

    outcome: Literal["values", "failed", "late", "missing", "mixed"]
    runs: tuple[Run, ...] = ()
    failures: Mapping[int, Failure] | None = None
    reason: str = ""

    def values(self) -> dict[int, Any]:
        """Return the values by rank. Ranks in a row that sent equal ones share one object."""
        found: dict[int, Any] = {}
        for first, count, data in self.runs:
            found |= dict.fromkeys(range(first, first + count), pickle.loads(data))  # noqa: S301  of the same job
        return found

    @classmethod
    def with_values(cls, reports: Sequence[Report], ranks: Iterable[int]) -> Answer:
        """Return the answer with the values of these ranks, given in ascending order.

        Ranks in a row that sent equal values become one run. Values that are equal elsewhere are one object for pickle.
        """
        known: dict[bytes, bytes] = {}
        runs: list[Run] = []
        for rank in ranks:
            data = known.setdefault(reports[rank].value, reports[rank].value)
            if runs and runs[-1][2] is data and runs[-1][0] + runs[-1][1] == rank:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, data)
            else:
                runs.append((rank, 1, data))
        return cls("values", tuple(runs))


def pack_value(value: Any) -> bytes:
    """Pickle ``value``, within the size limit.

    Raises:
        UsageError: It cannot be pickled, or it is too large to be metadata.
    """
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UsageError(f"a {type(value).__name__} cannot be sent to other ranks: {error}") from error
    if len(data) > MAX_VALUE_BYTES:
        raise UsageError(f"a value of {len(data)} bytes is too large to send to other ranks (limit {MAX_VALUE_BYTES})")
    return data


_STOPS = ("KeyboardInterrupt", "SystemExit")
_MIXED_HINT = (
    "Let all ranks make the same calls, in the same order and with the same arguments (the kinds of a save, too); then "
    "start the job again. If they do, read the first error in the log of that rank."
)


def failure_of(error: BaseException) -> Failure:
    """Convert an error to text."""
    text = str(error) or type(error).__name__
    if not isinstance(error, CkptMirrorError):
        text = f"{type(error).__name__}: {text}"
    says_who = isinstance(error, CkptMirrorError) and error.says_who
    return Failure(type(error).__name__, text[:_MESSAGE_CHARS], getattr(error, "hint", ""), says_who)


def decide(reports: Sequence[Report]) -> Answer:
    """Turn every rank's report, by rank, into the answer for a rank that reads all values."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if (report.number, report.what) != (first.number, first.what):
            return Answer(
                "mixed",
                reason=f"rank 0 is at exchange {first.number} ({first.what!r}) but rank {rank} is at exchange "
                f"{report.number} ({report.what!r})",
            )
    failures = {rank: report.failure for rank, report in enumerate(reports) if report.failure is not None}
    if failures:
        return Answer("failed", failures=failures)
    return Answer.with_values(reports, range(len(reports)))


START_AGAIN = "Start the job again: it continues from its newest save."
"""What to do when the ranks of a job do not meet again."""
_IF_SLOW = " If a rank is only slow, raise timeout_s."


def refusal(answer: Answer, what: str, nodes_of_ranks: Sequence[int] = ()) -> CkptMirrorError:
    """Return the error that a rank without an error of its own raises on ``answer``.

    It names the ranks that failed; where ``nodes_of_ranks`` has the node of each rank, also their nodes. If all errors
    are of one ckptmirror class, its exit code, hint and flags are kept.
    """
    if answer.outcome == "late":
        return WaitTimeout(f"{what}: {answer.reason}", hint=START_AGAIN + _IF_SLOW)
    failures = answer.failures or {}
    if not failures:
        error = RankFailed(f"{what}: {answer.reason}", hint=_MIXED_HINT if answer.outcome == "mixed" else None)
        error.is_death = answer.outcome == "missing"
        return error
    first = sorted(failures.items())[:8]
    text = "; ".join(
        failure.message if failure.says_who else f"{rank_name(rank, nodes_of_ranks)} failed: {failure.message}"
        for rank, failure in first
    )
    if len(failures) > 8:
        text += f"; and {len(failures) - 8} more ranks"
    error = RankFailed(f"{what}: {text}")
    kinds = {failure.kind: _own_class(failure.kind) for failure in failures.values()}
    error.is_death = any(own is None for name, own in kinds.items() if name not in _STOPS)
    kind = next(iter(kinds.values())) if len(kinds) == 1 else None
    if kind is not None:
        flags = ("exit_code", "temporary", "lacks_room", "is_seen")
        vars(error).update({flag: getattr(kind, flag) for flag in flags})
        error.hint = next(iter(failures.values())).hint or kind.hint
    return error


def _own_class(name: str) -> type[CkptMirrorError] | None:
    """Return the class of ckptmirror's errors that has this name."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, CkptMirrorError) else None
