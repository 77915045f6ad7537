"""``ckptmirror push``: mirror the saves of a root to a mirror."""

from __future__ import annotations

from pathlib import Path

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import (
    DIRECTORY,
    json_option,
    mirror_option,
    need_mirror,
    root_option,
    seconds_option,
    step_option,
)
from ckptmirror.cli._progress import progress
from ckptmirror.cli._uploading import print_report, reporting_bus, showing


@exit_codes(3, 5, 6, 7, 8, 10, 11, 12)
@click.command(short_help="Mirror whole saves of a root to a mirror.")
@root_option
@mirror_option
@step_option("Only the saves of this step.  [default: all]")
@click.option(
    "--state-dir",
    type=DIRECTORY,
    help="Where to put the pending-uploads table: a directory on this node's own disk, for a root on a network file "
    "system. Later verbs follow the root's note of it.  [default: in the root]",
)
@seconds_option("--timeout", "timeout_s", "Stop waiting after this time; the rest stays pending.", default=float("inf"))
@json_option
def command(
    root: Path, mirror: str | None, step: int | None, state_dir: Path | None, timeout_s: float, as_json: bool
) -> int:
    """Copy whole saves of a root to a mirror, and verify them. What is already there is not sent again.

    \b
    Examples:
      ckptmirror push /local-ssd/run-17 gs://bucket/run-17
      ckptmirror push --root /local-ssd/run-17 --mirror /nfs/run-17 --step 5000
    """
    from ckptmirror.flow.drain import push

    spec = need_mirror(mirror, to_read=False, root=root)
    with progress("push") as pace:
        report = push(
            root,
            spec,
            step=step,
            timeout_s=timeout_s,
            state_dir=state_dir,
            bus=reporting_bus(root, "push"),
            on_progress=showing(pace),
        )
    return print_report(root, report, as_json)
