"""The words in which a test tells the server what to break.

Rules:
* A fault says which requests it meets (method, operation, object, nth) and what then goes wrong; the first armed fault
  of the script that meets a request is the only one it suffers.
* A fault that can do nothing to the operation that it names is refused, and a pattern meets only those of its
  operations to which all of the fault can happen: no word of a script is ignored.
* A fault lives in the server's memory: a restarted server is a healthy one.
* Standard library only: the client side of a test and the server both read this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

__all__ = ["OPERATIONS", "Fault"]

OPERATIONS = (
    "bucket.get",
    "bucket.insert",
    "bucket.list",
    "bucket.delete",
    "bucket.patch",
    "bucket.layout",
    "bucket.permissions",
    "bucket.policy",
    "bucket.set_policy",
    "object.get",
    "object.media",
    "object.list",
    "object.delete",
    "object.patch",
    "object.compose",
    "object.rewrite",
    "object.copy",
    "object.move",
    "object.restore",
    "folder.get",
    "folder.list",
    "folder.insert",
    "folder.delete",
    "batch",
    "upload.media",
    "upload.multipart",
    "upload.start",
    "upload.put",
    "upload.status",
    "upload.cancel",
    "token",
)

_UPLOADS = frozenset({"upload.media", "upload.multipart", "upload.put"})  # requests that carry an object's bytes
_BYTES = _UPLOADS | {"object.media"}
_BODYLESS = frozenset({"bucket.delete", "object.delete", "folder.delete", "upload.start", "upload.cancel"})
_WHERE: Mapping[str, frozenset[str]] = {  # what is not named here can happen everywhere
    "after_bytes": _BYTES,
    "reset_after_bytes": _BYTES,
    "keep_bytes": frozenset({"upload.put"}),
    "slow_bytes_per_s": _BYTES,
    "truncate_after_bytes": frozenset(OPERATIONS) - _BODYLESS,
    "corrupt_byte_at": _BYTES | {"upload.status"},
    "corrupt_received_byte_at": _UPLOADS,
    "unauthorised_after_s": frozenset(OPERATIONS) - {"token"},
}
_EFFECTS = (
    "status",
    "reset_after_bytes",
    "keep_bytes",
    "stall_s",
    "stall_answer_s",
    "slow_bytes_per_s",
    "truncate_after_bytes",
    "corrupt_byte_at",
    "corrupt_received_byte_at",
    "unauthorised_after_s",
    "lose_answer",
    "kill",
)
_ENDS = ("status", "unauthorised_after_s", "reset_after_bytes", "truncate_after_bytes", "lose_answer", "kill")
_NOT_NEGATIVE = (
    "retry_after_s",
    "after_bytes",
    "reset_after_bytes",
    "keep_bytes",
    "stall_s",
    "stall_answer_s",
    "truncate_after_bytes",
    "corrupt_byte_at",
    "corrupt_received_byte_at",
    "unauthorised_after_s",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Which requests (an empty matcher meets all):

    Attributes:
        operation: One of ``OPERATIONS``, or a pattern such as ``upload.*``.
        method: HTTP method.
        object: A regular expression searched in the object's name: of a copy, the source's, of a composition, the
            destination's.
        nth: The first matching request that suffers, counted from 1.
        times: How many matching requests suffer from there on; 0 means all. One whose body ends before the byte at
            which the fault would strike takes its turn too, but does not count as ``fired``.

    What goes wrong (several may be combined). Bytes of a request's body are counted in the object's bytes that it
    carries, from 0 at the first of them: of a resumable chunk from the chunk's first, of a multipart upload from the
    first of the second part, whatever the envelope around it. Bytes of a download are those of the answer's body:

    Attributes:
        status: Answer with this status instead of doing anything.
        body: The text of that answer; the service's JSON error if None.
        retry_after_s: Its Retry-After header.
        after_bytes: Status, stall and kill strike after this many bytes of the request's body (uploads) or of the
            answer's (downloads; stall and kill only), not at the start.
        reset_after_bytes: The connection is reset (RST) after this many bytes of the body (before the work where there
            is none). What an upload sent until then is kept as the service keeps it, in multiples of 256 KiB.
        keep_bytes: Of a resumable chunk only this much is taken, in multiples of 256 KiB, and the 308 says so; a last
            chunk does not end its upload. The service may do so at any time.
        stall_s: Nothing happens for this long, then the request goes on.
        stall_answer_s: The work is done at once, the answer waits for this long.
        slow_bytes_per_s: The body moves at this rate.
        truncate_after_bytes: The answer announces its full length and ends, in order, after this many bytes.
        corrupt_byte_at: One byte at this offset of the object (not of the chunk or range) is inverted: on its way out
            for downloads, on the disk after its checksums were taken for uploads.
        corrupt_received_byte_at: One byte at this offset of the body is inverted on its way into the server.
        unauthorised_after_s: 401 from this many seconds after the fault was set, for every token that existed before
            that moment (and for no token); with ``times=0`` until a fresh one from ``POST /token`` is used.
        lose_answer: Do the work, then reset the connection instead of answering.
        kill: The server kills itself with SIGKILL, before it did the work or after the work and before the answer.
    """

    operation: str = ""
    method: str = ""
    object: str = ""
    nth: int = 1
    times: int = 1
    status: int | None = None
    body: str | None = None
    retry_after_s: int | None = None
    after_bytes: int | None = None
    reset_after_bytes: int | None = None
    keep_bytes: int | None = None
    stall_s: float = 0.0
    stall_answer_s: float = 0.0
    slow_bytes_per_s: float | None = None
    truncate_after_bytes: int | None = None
    corrupt_byte_at: int | None = None
    corrupt_received_byte_at: int | None = None
    unauthorised_after_s: float | None = None
    lose_answer: bool = False
    kill: Literal["", "before_work", "after_work"] = ""

    def __post_init__(self) -> None:
        if self.operation and not any(fnmatchcase(known, self.operation) for known in OPERATIONS):
            raise ValueError(f"no operation matches {self.operation!r}; there are {', '.join(OPERATIONS)}")
        if self.nth < 1 or self.times < 0:
            raise ValueError("nth counts from 1 and times is not negative")
        if self.kill not in ("", "before_work", "after_work"):
            raise ValueError(f"kill is 'before_work' or 'after_work', not {self.kill!r}")
        if self.status is not None and not 200 <= self.status <= 599:
            raise ValueError(f"no answer has the status {self.status}")
        if self.slow_bytes_per_s is not None and self.slow_bytes_per_s <= 0:
            raise ValueError("slow_bytes_per_s is more than 0")
        for name in _NOT_NEGATIVE:
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is not negative")
        re.compile(self.object)
        for reason in self._contradictions():
            raise ValueError(reason)
        reasons = [self.why_not(known) for known in OPERATIONS if self._names(known)]
        if all(reasons):
            raise ValueError(reasons[0])

    @property
    def effects(self) -> frozenset[str]:
        """The fields that say what goes wrong."""
        defaults = {f.name: f.default for f in fields(self)}
        return frozenset(name for name in _EFFECTS if getattr(self, name) != defaults[name])

    def _contradictions(self) -> Iterator[str]:
        """Why this can go wrong on no operation at all."""
        effects = self.effects
        if not effects:
            yield "nothing goes wrong"
        for name in ("body", "retry_after_s"):
            if getattr(self, name) is not None and (self.status is None or "unauthorised_after_s" in effects):
                yield f"{name} belongs to a status"
        refuses = bool(effects & {"status", "unauthorised_after_s"}) or self.kill == "before_work"
        if self.after_bytes is not None and not refuses and not self.stall_s:
            yield "after_bytes belongs to a status, a stall or a kill before the work"
        if "unauthorised_after_s" in effects and self.status not in (None, 401):
            yield "unauthorised_after_s answers with 401"
        ends = [name for name in _ENDS if name in effects]
        if len(ends) > 1 and ends != ["status", "unauthorised_after_s"]:
            yield f"a request ends once, not by {' and '.join(ends)}"
        if refuses and self.after_bytes is None:
            late = effects - {*ends, "stall_s"}
        else:
            late = effects & {"stall_answer_s"} if refuses or "reset_after_bytes" in effects else frozenset()
        if late:
            yield f"{', '.join(sorted(late))}: the request has ended before"
        if "keep_bytes" in effects and effects & {"truncate_after_bytes", "corrupt_byte_at"}:
            yield "a chunk of which a part is kept ends no upload, and its answer has no body"

    def why_not(self, operation: str) -> str:
        """Why a part of this cannot happen to an operation; empty if all of it can."""
        for name, operations in _WHERE.items():
            value = getattr(self, name)
            at_once = name == "reset_after_bytes" and value == 0
            if value is not None and operation not in operations and not at_once:
                return f"{name}={value!r} can do nothing to {operation}"
        effects = self.effects
        if operation == "object.media":
            if self.after_bytes is not None and effects & {"status", "unauthorised_after_s"}:
                return f"after_bytes: the status of {operation} goes before the first byte"
            bytewise = effects & {"slow_bytes_per_s", "corrupt_byte_at"}
            if (bytewise or self.after_bytes is not None) and (self.lose_answer or self.kill == "after_work"):
                return f"of an {operation} whose answer is lost no byte is sent"
        elif self.corrupt_byte_at is not None and effects & {"status", "unauthorised_after_s", "reset_after_bytes"}:
            return f"corrupt_byte_at: this {operation} stores nothing"
        return ""

    def _names(self, operation: str) -> bool:
        return not self.operation or fnmatchcase(operation, self.operation)

    def meets(self, operation: str, method: str, name: str) -> bool:
        """Whether the matchers (apart from ``nth`` and ``times``) meet a request to which all of this can happen."""
        return (
            self._names(operation)
            and not self.why_not(operation)
            and (not self.method or self.method.upper() == method)
            and (not self.object or re.search(self.object, name) is not None)
        )

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the defaults, as sent to ``POST /_faults``."""
        return {f.name: value for f in fields(self) if (value := asdict(self)[f.name]) != f.default}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Fault:
        """Read one item of the list that ``POST /_faults`` takes.

        Raises:
            ValueError: An unknown key or a value that makes no sense.
        """
        unknown = set(item) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"a fault has no {', '.join(sorted(unknown))}")
        return cls(**item)
