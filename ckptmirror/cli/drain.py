"""``ckptmirror drain``: finish the pending uploads of a root."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmirror.cli._options import interrupt_on_sigterm, json_option, print_json, root_option, size
from ckptmirror.cli._progress import progress

if TYPE_CHECKING:
    from ckptmirror.flow.drain import DrainReport


@click.command()
@root_option
@click.option("--mirror", "mirrors", multiple=True, metavar="URL", help="Only this mirror (may be repeated).")
@click.option("--timeout", "timeout_s", type=float, default=float("inf"), metavar="SECONDS", help="Stop waiting then.")
@json_option
def command(root: Path, mirrors: tuple[str, ...], timeout_s: float, as_json: bool) -> int:
    """Upload and verify what is pending, with or without a live trainer.

    \b
    Examples:
      ckptmirror drain --root /local-ssd/run-17
      ckptmirror drain --root /local-ssd/run-17 --timeout 600
    """
    from ckptmirror.flow.drain import drain

    interrupt_on_sigterm()
    with progress("drain", quiet=as_json) as show:
        report = drain(
            root, only=mirrors, timeout_s=timeout_s, on_progress=lambda at: show(at.bytes_done, at.bytes_total)
        )
    return print_report(root, report, as_json)


def print_report(root: Path, report: DrainReport, as_json: bool) -> int:
    """Print how a drain ended, and return the exit code: 0 if everything is verified, else 8."""
    at = report.drained
    if as_json:
        print_json({**dataclasses.asdict(report), "root": str(root), "verified": not (report.pending or report.failed)})
    else:
        print(f"{at.files_done} of {at.files_total} files verified ({size(at.bytes_done)} of {size(at.bytes_total)})")
    for line in report.failed:
        print(f"failed: {line}", file=sys.stderr)
    if report.pending:
        print(f"{report.pending} files are still pending; the same command carries on.", file=sys.stderr)
    return 8 if report.pending or report.failed else 0
