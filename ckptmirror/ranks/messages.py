"""The messages that ranks send each other in one exchange, as bytes.

Rules:
* A report is one rank's value or error; the answer is either every rank's value or one refusal for all.
* An error travels as text, never as a pickled object, since the receiver may not have its class.
* Reports carry the exchange's purpose and number, so that two exchanges can never be confused.
* Values are pickled: they come from the same job, which runs the same code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptmirror.core import errors
from ckptmirror.core.errors import CkptMirrorError, RankFailed, UsageError, WaitTimeout
from ckptmirror.core.rank_names import rank_name

__all__ = [
    "MAX_VALUE_BYTES",
    "Answer",
    "Failure",
    "Report",
    "decide",
    "failure_of",
    "pack_value",
    "refusal",
    "unpack_value",
]

MAX_VALUE_BYTES = 256 * 1024 * 1024
_MESSAGE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's error, as text."""

    kind: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank sends in an exchange: ``value`` (pickled) or ``failure``."""

    number: int
    what: str
    value: bytes
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What all ranks receive.

    Attributes:
        outcome: "values", or why there are none: "failed" (the channel is still good), or "late", "missing", "mixed"
            (it is not).
        values: Every rank's pickled value, by rank.
        failures: The errors, by rank.
        reason: One sentence, except for "values" and "failed".
    """

    outcome: Literal["values", "failed", "late", "missing", "mixed"]
    values: tuple[bytes, ...] = ()
    failures: Mapping[int, Failure] | None = None
    reason: str = ""


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


def unpack_value(data: bytes) -> Any:
    """Return what :func:`pack_value` packed on another rank of this job."""
    return pickle.loads(data)  # noqa: S301  sent by the same job's ranks


def failure_of(error: BaseException) -> Failure:
    """Convert an error to text."""
    text = str(error) or type(error).__name__
    if not isinstance(error, CkptMirrorError):
        text = f"{type(error).__name__}: {text}"
    return Failure(type(error).__name__, text[:_MESSAGE_CHARS], getattr(error, "hint", ""))


def decide(reports: Sequence[Report]) -> Answer:
    """Turn every rank's report, by rank, into the answer that all of them get."""
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
    return Answer("values", values=tuple(report.value for report in reports))


def refusal(answer: Answer, what: str, nodes_of_ranks: Sequence[int] = ()) -> CkptMirrorError:
    """Return the error that a rank without an error of its own raises on ``answer``.

    It names the ranks that failed; where ``nodes_of_ranks`` has the node of each rank, also their nodes. If all errors
    are of one ckptmirror class, its exit code, hint and flags are kept.
    """
    if answer.outcome == "late":
        return WaitTimeout(f"{what}: {answer.reason}")
    failures = answer.failures or {}
    if not failures:
        return RankFailed(f"{what}: {answer.reason}")
    first = sorted(failures.items())[:8]
    text = "; ".join(f"{rank_name(rank, nodes_of_ranks)} failed: {failure.message}" for rank, failure in first)
    if len(failures) > 8:
        text += f"; and {len(failures) - 8} more ranks"
    error = RankFailed(f"{what}: {text}")
    kinds = {failure.kind for failure in failures.values()}
    kind = getattr(errors, kinds.pop(), None) if len(kinds) == 1 else None
    if isinstance(kind, type) and issubclass(kind, CkptMirrorError):
        vars(error).update(exit_code=kind.exit_code, temporary=kind.temporary, lacks_room=kind.lacks_room)
        error.hint = next(iter(failures.values())).hint or kind.hint
    return error
