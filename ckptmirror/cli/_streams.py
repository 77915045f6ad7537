"""Standard output and error while a verb runs: control characters from a mirror or a file never reach a terminal."""

from __future__ import annotations

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
    """Put both streams behind the filter."""
    earlier = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Printable(stream)) for stream in earlier)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = earlier


def raw_stderr() -> TextIO:
    """Return standard error itself: for a bar that moves the cursor on purpose."""
    return cast(TextIO, getattr(sys.stderr, "raw", sys.stderr))


def raw_stdout() -> TextIO:
    """Return standard output itself, for a table that makes its texts printable one by one and then colours them."""
    return cast(TextIO, getattr(sys.stdout, "raw", sys.stdout))
