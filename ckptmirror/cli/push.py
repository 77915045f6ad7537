"""``ckptmirror push``: mirror the saves of a root to a mirror."""

from __future__ import annotations

from pathlib import Path

import click

from ckptmirror.cli._options import json_option, mirror_option, need_mirror, root_option, seconds_option, step_option
from ckptmirror.cli._progress import progress
from ckptmirror.cli._uploading import print_report, telling_bus


@click.command()
@root_option
@mirror_option
@step_option("Only the saves of this step.")
@seconds_option("--timeout", "timeout_s", "Stop waiting then.", default=float("inf"))
@json_option
def command(root: Path, mirror: str | None, step: int | None, timeout_s: float, as_json: bool) -> int:
    """Mirror whole saves of a root to a mirror, verified; what is there already is not sent again.

    \b
    Examples:
      ckptmirror push --root /local-ssd/run-17 --mirror gs://bucket/run-17
      ckptmirror push --root /local-ssd/run-17 --mirror file:///nfs/run-17 --step 5000
    """
    from ckptmirror.flow.drain import push

    spec = need_mirror(mirror, to_read=False)
    with progress("push") as show:
        report = push(
            root,
            spec,
            step=step,
            timeout_s=timeout_s,
            bus=telling_bus(root, "push"),
            on_progress=lambda at: show(at.bytes_done, at.bytes_total),
        )
    return print_report(root, report, as_json)
