"""The words in which a test tells the server what to break.

Rules:
* A fault says which requests it meets (method, operation, object, nth) and what then goes wrong; the first armed fault
  of the script that meets a request is the only one it suffers.
* A fault lives in the server's memory: a restarted server is a healthy one.
* Standard library only: the client side of a test and the server both read this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

__all__ = ["OPERATIONS", "Fault"]

OPERATIONS = (
    "bucket.get",
    "bucket.insert",
    "bucket.list",
    "bucket.delete",
    "object.get",
    "object.media",
    "object.list",
    "object.delete",
    "object.patch",
    "upload.media",
    "upload.multipart",
    "upload.start",
    "upload.put",
    "upload.status",
    "upload.cancel",
    "token",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Which requests (an empty matcher meets all):

    Attributes:
        operation: One of ``OPERATIONS``, or a pattern such as ``upload.*``.
        method: HTTP method.
        object: A regular expression searched in the object's name.
        nth: The first matching request that suffers, counted from 1.
        times: How many matching requests suffer from there on; 0 means all.

    What goes wrong (several may be combined):

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
        corrupt_byte_at: One byte at this offset of the object is inverted: on its way out for downloads, on the disk
            after its checksums were taken for uploads.
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
        re.compile(self.object)

    def meets(self, operation: str, method: str, name: str) -> bool:
        """Whether the matchers (apart from ``nth`` and ``times``) meet a request."""
        return (
            (not self.operation or fnmatchcase(operation, self.operation))
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
