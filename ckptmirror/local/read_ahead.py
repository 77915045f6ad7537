"""Reads a source while the previous piece is being sent, so that disk and network do not wait for each other.

Rules:
* One thread reads, one buffer ahead; the memory is two reused buffers, whatever the length.
* An error of the reader is raised to the caller that takes the bytes.
* After the iterator is closed no read is running, so the source may be closed and the buffers reused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckptmirror.local.direct_io import kept_buffer

__all__ = ["read_ahead"]

_ReadInto = Callable[[int, memoryview], int]


def read_ahead(read_into: _ReadInto, offset: int, end: int) -> Generator[memoryview]:
    """Yield the bytes from ``offset`` to ``end`` in order; each piece is valid until the next one is requested.

    It ends early if the source does. A caller that stops before the end closes it.

    Args:
        read_into: Fills a buffer from an offset and returns how many bytes it read, short only at the source's end.
        offset: Where to begin.
        end: Where to end.
    """
    if offset >= end:
        return
    with kept_buffer() as buffer, kept_buffer() as spare, ThreadPoolExecutor(1, "ckptmirror-read") as executor:
        reader = _Reader(executor, read_into)
        wanted = buffer[: end - offset]
        read = reader.begin(offset, wanted)
        while offset < end:
            count = read()
            piece = wanted[:count]
            offset += count
            is_short = count < len(wanted)
            buffer, spare = spare, buffer
            wanted = buffer[: end - offset]
            if offset < end and not is_short:
                read = reader.begin(offset, wanted)
            if count:
                yield piece
            if is_short:
                return


class _Reader:
    def __init__(self, executor: ThreadPoolExecutor, read_into: _ReadInto) -> None:
        self._executor: ThreadPoolExecutor | None = executor
        self._read_into = read_into

    def begin(self, offset: int, wanted: memoryview) -> Callable[[], int]:
        """Begin to read; return a function that waits for the result."""
        if self._executor is not None:
            try:
                return self._executor.submit(self._read_into, offset, wanted).result
            except RuntimeError:  # no more threads: the machine's limit, or the end of the interpreter
                self._executor = None  # for good: the job that it could not start is in its queue
        return partial(self._read_into, offset, wanted)
