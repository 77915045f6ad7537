"""An answer over HTTP, received within limits: the answer to each of our requests, and of the client library's.

Rules:
* Headers, and whatever else comes before, between and after a body, have a limit. A body has the limit that its reader
  passes: a page of a listing, one answer of any other kind, or exactly the range that was asked for.
* From its first byte on, an answer must keep to ``LEAST_BYTES_PER_S``, over windows as long as the time limit of one
  receive. Before the first byte, and between two receives, that time limit alone counts.
* Nothing is decoded. No request accepts a Content-Encoding, so an answer that has one is refused, and none is larger in
  memory than it was on the wire.
* A broken rule is an :class:`AnswerRefusedError`, which counts as a broken connection: the connection is closed, and
  the error is temporary, because a proxy on the way may be the cause.
"""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ANSWER_BYTES",
    "LEAST_BYTES_PER_S",
    "PAGE_BYTES",
    "Answer",
    "AnswerRefusedError",
    "AnswerTooLargeError",
    "Pace",
]

ANSWER_BYTES = 1024 * 1024  # any answer but a page of a listing and the bytes of an object
PAGE_BYTES = 8 * 1024 * 1024
LEAST_BYTES_PER_S = 4096
_AROUND_BYTES = 128 * 1024  # headers, and what the buffer below reads ahead
_CHUNKS_SHARE = 8  # of a body in chunks, their framing may be an eighth


class AnswerRefusedError(http.client.HTTPException):
    """An answer that is slower, shorter or otherwise encoded than allowed."""


class AnswerTooLargeError(AnswerRefusedError):
    """An answer that is larger than allowed."""


@dataclass
class Pace:
    """Whether what is received keeps to the least speed.

    Attributes:
        window_s: Over how long the speed is judged.
        clock: Seconds, monotonic.
    """

    window_s: float
    clock: Callable[[], float]
    _began_s: float | None = None
    _bytes: int = 0

    def received(self, size_bytes: int) -> None:
        """Count so many bytes, received now.

        Raises:
            AnswerRefusedError: The last window was too slow.
        """
        now_s = self.clock()
        if self._began_s is None:
            self._began_s = now_s
        self._bytes += size_bytes
        taken_s = now_s - self._began_s
        if taken_s < self.window_s:
            return
        if self._bytes < LEAST_BYTES_PER_S * taken_s:
            raise AnswerRefusedError(f"an answer came too slowly: {self._bytes} bytes in {taken_s:.0f} s")
        self._began_s, self._bytes = now_s, 0


class Answer(http.client.HTTPResponse):
    """The answer to one request.

    Args:
        connected: The connection's socket.
        method: The request's method.
        pace: Judges its speed.
    """

    def __init__(self, connected: socket.socket, debuglevel: int = 0, method: str | None = None, *, pace: Pace) -> None:
        super().__init__(connected, debuglevel, method)
        buffered: Any = self.fp
        self._metered = _Metered(buffered.detach(), pace)
        self.fp = io.BufferedReader(self._metered)

    def begin(self) -> None:
        """Read the status and the headers.

        Raises:
            AnswerRefusedError: The body is encoded.
        """
        super().begin()
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise AnswerRefusedError(f"an answer is encoded ({encoding[:40]!a}), and no encoding was accepted")

    def expect(self, size_bytes: int) -> None:
        """Let so many bytes of the body be received."""
        self._metered.left_bytes += size_bytes + size_bytes // _CHUNKS_SHARE

    def read_whole(self, limit_bytes: int = ANSWER_BYTES) -> bytes:
        """Return the whole body.

        Raises:
            AnswerTooLargeError: It is larger than the limit.
            AnswerRefusedError: It was cut short.
        """
        self.expect(limit_bytes)
        data = self.read(limit_bytes + 1) if (self.length or 0) <= limit_bytes else None
        if data is None or len(data) > limit_bytes:
            raise AnswerTooLargeError(f"an answer is larger than {limit_bytes} bytes")
        if self.length:
            raise AnswerRefusedError(f"an answer was cut {self.length} bytes short")
        return data


class _Metered(io.RawIOBase):
    """The bytes of a connection, counted as they arrive."""

    def __init__(self, received: Any, pace: Pace) -> None:
        self._received = received
        self._pace = pace
        self.left_bytes = _AROUND_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._received.readinto(memoryview(buffer)[: self.left_bytes + 1])
        if count > self.left_bytes:
            raise AnswerTooLargeError("an answer does not end where it should")
        self.left_bytes -= count
        self._pace.received(count)
        return count

    def close(self) -> None:
        self._received.close()
        super().close()
