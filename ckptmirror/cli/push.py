"""``ckptmirror push``: mirror the saves of a root to a mirror."""

from __future__ import annotations

from pathlib import Path

import click

from ckptmirror.cli._options import (
    interrupt_on_sigterm,
    json_option,
    mirror_option,
    need_mirror,
    root_option,
    step_type,
)
from ckptmirror.cli._progress import progress
from ckptmirror.cli.drain import print_report


@click.command()
@root_option
@mirror_option
@click.option("--step", type=step_type(), help="Only the saves of this step.")
@click.option("--timeout", "timeout_s", type=float, default=float("inf"), metavar="SECONDS", help="Stop waiting then.")
@json_option
def command(root: Path, mirror: str | None, step: int | None, timeout_s: float, as_json: bool) -> int:
    """Mirror whole saves of a root to a mirror, verified; what is there already is not sent again.

    \b
    Examples:
      ckptmirror push --root /local-ssd/run-17 --mirror gs://bucket/run-17
      ckptmirror push --root /local-ssd/run-17 --mirror file:///nfs/run-17 --step 5000
    """
    from ckptmirror.flow.drain import push

    interrupt_on_sigterm()
    with progress("push", quiet=as_json) as show:
        report = push(
            root,
            need_mirror(mirror),
            step=step,
            timeout_s=timeout_s,
            on_progress=lambda at: show(at.bytes_done, at.bytes_total),
        )
    return print_report(root, report, as_json)
