"""Progress of a transfer on stderr: a bar on a terminal, one plain line every 30 s elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from ckptmirror.cli._options import size

__all__ = ["LINE_EVERY_S", "Show", "progress"]

LINE_EVERY_S = 30.0
Show: TypeAlias = Callable[[int, int], None]
"""Shows how far a transfer is: bytes done, bytes in all."""


@contextmanager
def progress(title: str) -> Iterator[Show]:
    """Show a transfer's progress with speed (and, on a terminal, the time left)."""
    if sys.stderr.isatty():
        with _bar(title) as show:
            yield show
    else:
        yield plain_lines(title)


@contextmanager
def _bar(title: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done_bytes, total_bytes: bars.update(task, completed=done_bytes, total=total_bytes)


def plain_lines(title: str, clock: Callable[[], float] = time.monotonic) -> Show:
    """Return what prints a line every ``LINE_EVERY_S`` seconds of ``clock``."""
    started = last = clock()

    def show(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = clock()
        if now - last >= LINE_EVERY_S:
            last = now
            speed = size(int(done_bytes / (now - started)))
            print(f"{title}: {size(done_bytes)} of {size(total_bytes)}, {speed}/s", file=sys.stderr, flush=True)

    return show
