"""Transfer progress: the bytes that this process is sending now, and the mirrors that it waits for.

Rules:
* It is for looking at, and nothing is decided by it: a table says what is verified.
* Bytes that a mirror had already when an upload was continued lie at its place, and were not moved.
* It is told by several threads. Whoever reads it gets one picture of one moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptmirror.stores.base import Source

__all__ = ["Held", "Seen", "UnderWay", "Wait", "WatchedUpload"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A mirror that is waited for.

    Attributes:
        reason: What it last said, or why it could not be asked.
        retry_in_s: When it is asked again; 0 or less: it is being asked now.
    """

    mirror: str
    reason: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """A file that another process is sending.

    Attributes:
        path: In the root.
        holder: ``process 1234``, with its host where that is another.
        left_s: When others may send it, unless that process goes on meanwhile.
    """

    path: str
    holder: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at what is under way.

    Attributes:
        there_bytes: What the mirrors have of the files under way, whoever sent it.
        moved_bytes: What this process has moved since it began, of any file; it never falls.
        sending: Files of which bytes are missing on the mirror.
        verifying: Files that are all there and are not verified yet.
        waits: The mirrors that are waited for, by URL.
    """

    there_bytes: int = 0
    moved_bytes: int = 0
    sending: int = 0
    verifying: int = 0
    waits: tuple[Wait, ...] = ()


class UnderWay:
    """Keeps what is under way.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._files: dict[tuple[object, str], tuple[int, int]] = {}  # bytes there, bytes in all
        self._moved_bytes = 0
        self._waits: dict[str, tuple[str, float]] = {}

    def reached(self, file: object, mirror: str, position: int, size_bytes: int, *, was_there: bool) -> None:
        """A file is sent up to ``position``; ``was_there``: the mirror had so much before."""
        with self._lock:
            before = self._files.get((file, mirror), (0, 0))[0]
            if was_there or position > before:
                self._files[file, mirror] = position, size_bytes
            if not was_there and position > before:
                self._moved_bytes += position - before
                self._waits.pop(mirror, None)

    def over(self, file: object, mirror: str) -> None:
        """A file is verified, or put back."""
        with self._lock:
            self._files.pop((file, mirror), None)

    def waits(self, mirror: str, delay_s: float, error: Exception) -> None:
        """A mirror did not answer, and is asked again in ``delay_s`` seconds."""
        with self._lock:
            self._waits[mirror] = str(error), self._clock() + delay_s

    def answered(self, mirror: str) -> None:
        """A mirror answers again."""
        with self._lock:
            self._waits.pop(mirror, None)

    def seen(self) -> Seen:
        """Return what is under way at this moment."""
        with self._lock:
            now_s = self._clock()
            return Seen(
                there_bytes=sum(there for there, _ in self._files.values()),
                moved_bytes=self._moved_bytes,
                sending=sum(there < size for there, size in self._files.values()),
                verifying=sum(there >= size for there, size in self._files.values()),
                waits=tuple(Wait(url, why, at_s - now_s) for url, (why, at_s) in sorted(self._waits.items())),
            )


class WatchedUpload:
    """The bytes of one file on their way to one mirror, and the callbacks that a store gets with them.

    A first reading that begins in the middle, or one that begins anew, says how much the mirror has. What is read is
    not sent yet: stores read ahead.
    """

    def __init__(self, source: Source, under_way: UnderWay, file: object, mirror: str) -> None:
        self._source = source
        self._under_way = under_way
        self._key = file, mirror
        self._read_to: int | None = None

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""
        return self._source.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``."""
        if self._read_to is None or offset < self._read_to:
            self._at(offset, was_there=True)
        count = self._source.read_into(offset, buffer)
        self._read_to = offset + count
        return count

    def acknowledged(self, position: int) -> None:
        """The mirror has so many bytes."""
        self._at(position, was_there=self._read_to is None)

    def sent(self, position: int) -> None:
        """So many bytes are on the wire."""
        self._at(position, was_there=False)

    def _at(self, position: int, *, was_there: bool) -> None:
        self._under_way.reached(*self._key, position, self.size_bytes, was_there=was_there)
