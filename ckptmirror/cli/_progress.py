"""Progress of a transfer on stderr: a bar on a terminal, one plain line every 30 s elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ckptmirror.cli._options import size

__all__ = ["Show", "progress"]

_LINE_EVERY_S = 30.0


class Show(Protocol):
    """Shows how far a transfer is."""

    def __call__(self, done_bytes: int, total_bytes: int, note: str = "") -> None:
        """Show ``done_bytes`` of ``total_bytes``."""
        ...


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Show]:
    """Show a transfer's progress with speed and time left; nothing at all if ``quiet``."""
    if quiet:
        yield lambda done_bytes, total_bytes, note="": None
    elif sys.stderr.isatty():
        with _bar(title) as show:
            yield show
    else:
        yield _lines(title)


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
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None, note="")

        def show(done_bytes: int, total_bytes: int, note: str = "") -> None:
            bars.update(task, completed=done_bytes, total=total_bytes, note=note)

        yield show


def _lines(title: str) -> Show:
    started = time.monotonic()
    last = started

    def show(done_bytes: int, total_bytes: int, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LINE_EVERY_S:
            return
        last = now
        speed = size(int(done_bytes / (now - started)))
        print(f"{title}: {size(done_bytes)} of {size(total_bytes)}, {speed}/s {note}".rstrip(), file=sys.stderr)

    return show
