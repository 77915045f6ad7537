"""Progress of a transfer on stderr: a bar on a terminal, one plain line every 30 s elsewhere.

Rules:
* stdout has only data, so progress is shown with ``--json`` too.
* A terminal that cannot move its cursor (``TERM=dumb``) is "elsewhere".
* A bar disappears when the transfer ends, however it ended, and the cursor comes back. Lines printed or logged to
  stderr meanwhile appear above it.
* Elsewhere a transfer of less than 30 s prints nothing; a longer one ends with a summary line.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptmirror.cli._streams import raw_stderr
from ckptmirror.cli._terminal import moves_cursor
from ckptmirror.cli._transfer_speed import Pace

__all__ = ["LINE_EVERY_S", "Lines", "progress"]

LINE_EVERY_S = 30.0
_LOOKS_PER_S = 4
_STOP_WAIT_S = 1.0


@contextmanager
def progress(title: str) -> Iterator[Pace]:
    """Show the transfer that is reported to the yielded ``Pace``."""
    pace = Pace(title)
    if moves_cursor():
        with _bar(pace):
            yield pace
    else:
        with Lines(pace).shown():
            yield pace


@contextmanager
def _bar(pace: Pace) -> Iterator[None]:
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.table import Column
    from rich.text import Text

    class PaceColumn(ProgressColumn):
        """A column with one of the texts of the pace."""

        max_refresh = 0.2

        def __init__(self, what: str) -> None:
            self._what = what
            super().__init__(Column(no_wrap=True))

        def render(self, task: Task) -> Text:  # noqa: ARG002 - the interface is rich's
            return Text(str(getattr(pace, self._what)()))

    class Shown(Progress):
        """The bar, and below it the other activity."""

        def get_renderables(self) -> Iterator[RenderableType]:
            for task in self.tasks:
                task.completed, task.total = pace.done_bytes, pace.total_bytes
            yield self.make_tasks_table(self.tasks)
            besides = pace.besides_text()
            if besides:
                yield Text(f"  {besides}", no_wrap=True, overflow="ellipsis")

    columns = [PaceColumn("amount_text"), PaceColumn("speed_text"), PaceColumn("left_text")]
    bars = Shown(
        "{task.description}",
        BarColumn(bar_width=20),
        *columns,
        console=Console(file=raw_stderr()),
        refresh_per_second=_LOOKS_PER_S,
        transient=True,
    )
    bars.add_task(pace.title, total=None)
    with bars:
        yield


class Lines:
    """Plain lines on stderr.

    Args:
        pace: The transfer that they show.
        every_s: Seconds between them; None: ``LINE_EVERY_S``.
    """

    def __init__(self, pace: Pace, every_s: float | None = None) -> None:
        self._pace = pace
        self._every_s = LINE_EVERY_S if every_s is None else every_s
        self._over = threading.Event()
        self._said = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Print a line now and then while the body runs."""
        thread = threading.Thread(target=self._say, name="ckptmirror-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_STOP_WAIT_S)
        if self._said:
            print(self._pace.sum_line(), file=sys.stderr, flush=True)

    def _say(self) -> None:
        while not self._over.wait(self._every_s):
            self._said = True
            try:
                print(self._pace.line(), file=sys.stderr, flush=True)
            except OSError:
                return  # stderr has no reader
