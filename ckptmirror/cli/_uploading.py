"""The output of ``drain`` and ``push``: why they wait, while they wait, and the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.cli._human_text import behind_text, duration_text, on_no_mirror, plain_reason, size
from ckptmirror.cli._next_command import with_places
from ckptmirror.cli._options import print_json
from ckptmirror.cli._terminal import moves_cursor
from ckptmirror.core.errors import DeadlinePassed, NotAuthorised, Temporary
from ckptmirror.core.printable import printable_line
from ckptmirror.core.reach import access_hint
from ckptmirror.core.uncommitted import is_behind_text, is_held_back_text, is_superseded_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmirror.cli._transfer_speed import Pace
    from ckptmirror.core import events
    from ckptmirror.flow.drain import Drained, DrainReport
    from ckptmirror.flow.upload.transfer_progress import Held

__all__ = ["print_report", "reporting_bus", "showing"]


def showing(pace: Pace) -> Callable[[Drained], None]:
    """Return a callback that shows the progress of a drain: the uploads to all mirrors together."""
    printed: set[str] = set()

    def show(at: Drained) -> None:
        for wait in at.seen.waits:
            waits = is_behind_text(wait.reason) or is_held_back_text(wait.reason)
            if waits and wait.reason not in printed and not moves_cursor():  # a bar shows it
                printed.add(wait.reason)
                whom = " for another node" if is_behind_text(wait.reason) else ""
                print(f"waiting{whom}: {behind_text(wait.reason, is_over=False)}", file=sys.stderr, flush=True)
        doing = []
        if at.seen.sending:
            doing.append(f"sending {_files(at.seen.sending)}")
        if at.seen.verifying:
            doing.append(f"verifying {_files(at.seen.verifying)} on the mirror")
        if at.held and not doing:
            doing.append(_held_text(at.held))
        done = min(at.bytes_done + at.seen.there_bytes, at.bytes_total)
        pace(done, at.bytes_total, at.seen.moved_bytes, ", ".join(doing))
        pace.waits(at.seen.waits)

    return show


def _held_text(held: Sequence[Held]) -> str:
    """Name the file with the longest wait."""
    last = max(held, key=lambda one: one.left_s)
    more = f" and {_files(len(held) - 1)} more" if len(held) > 1 else ""
    until = f"taken over in {duration_text(last.left_s)} unless it continues"
    return f"waiting for {last.holder}, which is sending {last.path}{more}; {until}"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def reporting_bus(root: Path, verb: str) -> events.EventBus:
    """Return a bus that prints why files wait, once for each mirror and sort of fault, and writes the journal."""
    from ckptmirror.core import events
    from ckptmirror.observe.journal import bus_with_journal

    bus = bus_with_journal(root, verb)
    printed: set[tuple[str, str]] = set()

    def report(event: events.Event) -> None:
        if isinstance(event, events.MirrorUnreachable) and not event.refused:
            sort = event.reason.partition(":")[0]
            if (event.mirror, sort) not in printed and not moves_cursor():  # a bar shows it
                printed.add((event.mirror, sort))
                print(f"waiting for {event.mirror}: {plain_reason(event.reason)}", file=sys.stderr, flush=True)

    bus.subscribe(report)
    return bus


def _grouped(failed: Sequence[str]) -> list[str]:
    """Join the files that failed for the same reason into one line."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for line in failed:
        url, path, reason = [*line.split(": ", 2), "", ""][:3]
        by_reason.setdefault((url, reason), []).append(path)
    lines = []
    for (url, reason), paths in by_reason.items():
        path, others = paths[0], paths[1:]
        what = f"{path} and {_files(len(others))} more" if others else path
        lines.append(": ".join(part for part in (url, what, reason) if part))
    return lines


def print_report(root: Path, report: DrainReport, as_json: bool) -> int:
    """Print how a drain ended, and return the exit code: 0 only if everything is verified."""
    at, given = report.drained, {"root": root}
    if as_json:
        print_json(
            {
                "root": str(root),
                "verified": report.is_verified,
                "files_done": at.files_done,
                "files_total": at.files_total,
                "bytes_done": at.bytes_done,
                "bytes_total": at.bytes_total,
                "pending": report.pending,
                "awaited": list(report.awaited),
                "failed": list(report.failed),
                "refused": dict(report.refused),
                "left": dict(report.left),
                "emergency_step": report.emergency_step,
                "emergency_copy": str(report.emergency_copy) if report.emergency_copy is not None else None,
                "emergency_here": report.emergency_here,
                "emergency_whole": report.emergency_whole,
                "unasked": {url: str(error) for url, error in report.unasked.items()},
            }
        )
    else:
        print(f"{at.files_done} of {at.files_total} files verified ({size(at.bytes_done)} of {size(at.bytes_total)})")
    for line in _grouped(report.failed):
        print(f"failed: {printable_line(line)}", file=sys.stderr)
    if not all(map(is_superseded_text, report.failed)):  # such a line says itself what can be done
        print("Fix what failed; then run the same command again.", file=sys.stderr)
    for url, count in report.left.items():
        print(f"Left for {url}, which is no longer a mirror of {root}: {_files(count)}.", file=sys.stderr)
    if report.emergency_step is not None:
        what = on_no_mirror(report.emergency_step, report.emergency_copy, report.emergency_here, report.emergency_whole)
        print(f"ckptmirror: {what}.", file=sys.stderr)
    if report.pending:
        print(f"Still pending: {_files(report.pending)}; the same command continues.", file=sys.stderr)
    for line in report.awaited:
        whom = " for another node" if is_behind_text(line) else ""
        print(f"Waiting{whom}: {with_places(behind_text(line), given)}", file=sys.stderr)
    for url, reason in report.refused.items():
        said = f"ckptmirror: {url}: {plain_reason(reason)}"
        print(f"{said}\n  {with_places(access_hint([url]), given)}", file=sys.stderr)
    for url, error in report.unasked.items():
        what = "could not be asked whether it still has what was verified there"
        print(
            f"ckptmirror: {url} {what}: {error}" + (f"\n  {with_places(error.hint, given)}" if error.hint else ""),
            file=sys.stderr,
        )
    if report.refused:
        return NotAuthorised.exit_code
    for error in report.unasked.values():
        if not isinstance(error, Temporary):
            return error.exit_code
    return 0 if report.is_verified else DeadlinePassed.exit_code
