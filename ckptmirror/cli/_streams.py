"""Standard output and error while a verb runs: control characters from a mirror or a file never reach a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from ckptmirror.core.printable import printable_text

__all__ = ["printable_streams", "raw_stderr", "raw_stdout"]


class _Printable:
    """A text stream that makes every write printable; everything else is passed to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("a text stream takes text")
        self.raw.write(printable_text(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Put both streams behind the filter. One that was closed before the process began takes everything to nowhere."""
    earlier = sys.stdout, sys.stderr
    for descriptor in range(3):  # so that no file of ours gets the number of a stream
        if not _is_open(descriptor):
            os.open(os.devnull, os.O_RDWR)
    streams = (stream if stream is not None else _nowhere() for stream in earlier)
    sys.stdout, sys.stderr = (cast(TextIO, _Printable(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = earlier


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def raw_stderr() -> TextIO:
    """Return standard error itself: for a bar that moves the cursor on purpose."""
    return cast(TextIO, getattr(sys.stderr, "raw", sys.stderr))


def raw_stdout() -> TextIO:
    """Return standard output itself, for a table that makes its texts printable one by one and then colours them."""
    return cast(TextIO, getattr(sys.stdout, "raw", sys.stdout))
