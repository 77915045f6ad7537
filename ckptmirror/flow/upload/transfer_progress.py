"""Transfer progress: the bytes that this process is sending now, and the mirrors that it waits for.

Rules:
* It is only for display. The table decides what is verified.
* Bytes that a mirror already had when an upload continued count as there, but not as moved.
* Several threads report to it. A reader gets one consistent picture.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptmirror.stores.base import Source

__all__ = ["Held", "Transfers", "UnderWay", "Wait", "WatchedUpload"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for a mirror that does not answer.

    Attributes:
        reason: Its last error, or why it could not be asked.
        retry_in_s: Seconds until it is asked again; 0 or less: it is being asked now.
    """

    mirror: str
    reason: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """A file that another process is sending.

    Attributes:
        path: Its path in the root.
        holder: ``process 1234``, with its host if it is another machine.
        left_s: Seconds until others may send it, unless that process continues.
    """

    path: str
    holder: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers at one moment.

    Attributes:
        there_bytes: Bytes of the current files that the mirrors have, whichever process sent them.
        moved_bytes: Bytes of any file that this process has moved since it began; never decreases.
        sending: Files that the mirror does not have all bytes of.
        verifying: Files whose bytes are all there, and that are not verified yet.
        waits: The waits for mirrors that do not answer, by URL.
    """

    there_bytes: int = 0
    moved_bytes: int = 0
    sending: int = 0
    verifying: int = 0
    waits: tuple[Wait, ...] = ()


class UnderWay:
    """Keeps the current transfers and waits.

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
        """Note that a mirror did not answer, and is asked again in ``delay_s`` seconds."""
        with self._lock:
            self._waits[mirror] = str(error), self._clock() + delay_s

    def due_s(self, mirror: str) -> float:
        """Return in how many seconds a mirror is asked again; infinity if nothing waits for that."""
        with self._lock:
            _, due_s = self._waits.get(mirror, ("", 0.0))
            left_s = due_s - self._clock()
        return left_s if left_s > 0 else math.inf

    def answered(self, mirror: str) -> None:
        """Note that a mirror answers again."""
        with self._lock:
            self._waits.pop(mirror, None)

    def seen(self) -> Transfers:
        """Return the transfers at this moment."""
        with self._lock:
            now_s = self._clock()
            return Transfers(
                there_bytes=sum(there for there, _ in self._files.values()),
                moved_bytes=self._moved_bytes,
                sending=sum(there < size for there, size in self._files.values()),
                verifying=sum(there >= size for there, size in self._files.values()),
                waits=tuple(Wait(url, why, at_s - now_s) for url, (why, at_s) in sorted(self._waits.items())),
            )


class WatchedUpload:
    """The source of one file that is sent to one mirror, with the progress callbacks that a store calls.

    If the first read, or a restarted one, begins in the middle, the mirror has the bytes before it. Bytes that were
    read are not sent yet: stores read ahead.
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
        """Note that the mirror has ``position`` bytes."""
        self._at(position, was_there=self._read_to is None)

    def sent(self, position: int) -> None:
        """Note that ``position`` bytes are on the wire."""
        self._at(position, was_there=False)

    def _at(self, position: int, *, was_there: bool) -> None:
        self._under_way.reached(*self._key, position, self.size_bytes, was_there=was_there)
