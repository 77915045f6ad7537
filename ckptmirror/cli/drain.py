"""``ckptmirror drain``: finish the pending uploads of a root."""

from __future__ import annotations

from pathlib import Path

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import json_option, root_option, seconds_option, settings
from ckptmirror.cli._progress import progress
from ckptmirror.cli._uploading import print_report, reporting_bus, showing


@exit_codes(5, 6, 8, 10, 11, 12)
@click.command(short_help="Upload and verify what is pending.")
@root_option
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="URL",
    help="Only this mirror (may be repeated).  [default: all of the root's]",
)
@seconds_option("--timeout", "timeout_s", "Stop waiting after this time; the rest stays pending.", default=float("inf"))
@json_option
def command(root: Path, mirrors: tuple[str, ...], timeout_s: float, as_json: bool) -> int:
    """Upload and verify what is pending, with or without a live trainer.

    \b
    Examples:
      ckptmirror drain /local-ssd/run-17
      ckptmirror drain /local-ssd/run-17 --timeout 600
    """
    from ckptmirror.flow.drain import drain

    with progress("drain") as pace:
        report = drain(
            root,
            only=mirrors,
            limits=settings()["mirrors"],
            timeout_s=timeout_s,
            bus=reporting_bus(root, "drain"),
            on_progress=showing(pace),
        )
    return print_report(root, report, as_json)
