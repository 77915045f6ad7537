"""``ckptmirror stage``: bring one step from a mirror to this host, verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmirror.cli._options import json_option, mirror_option, need_mirror, print_json, seconds_option, step_option
from ckptmirror.cli._progress import progress

if TYPE_CHECKING:
    from ckptmirror.core.events import EventBus


@click.command()
@step_option("Which step.", latest=True, required=True)
@click.option("--kind", type=click.Choice(["dcp", "model"]), help="Which kind; without it dcp, then model.")
@mirror_option
@click.option(
    "--dest", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="Where to.  [default: here]"
)
@click.option("--full", is_flag=True, help="Also optimizer, extra and tensors files.")
@click.option("--refresh", is_flag=True, help="Verify what is staged, and replace stale copies of this step.")
@click.option("--superseded", is_flag=True, help="Allow a save that is off the lineage.")
@seconds_option("--wait", "wait_s", "Wait for the step to appear.", default=0.0)
@json_option
def command(
    step: int | str,
    kind: str | None,
    mirror: str | None,
    dest: Path,
    full: bool,
    refresh: bool,
    superseded: bool,
    wait_s: float,
    as_json: bool,
) -> int:
    """Bring a step from a mirror to this host, every block verified, and print its path.

    \b
    Examples:
      ckptmirror stage --step 200 --kind dcp --mirror gs://bucket/run-17 --dest /scratch/eval
      ckptmirror stage --step latest --mirror gs://bucket/run-17 --dest /scratch/eval --wait 600 --json
    """
    from ckptmirror.flow.stage import stage_checkpoint_step

    spec = need_mirror(mirror, to_read=True)
    with progress("stage") as show:
        staged = stage_checkpoint_step(
            spec,
            step=step,  # type: ignore[arg-type]  # an int or "latest": the option sees to it
            dest=dest,
            require_kind=kind,  # type: ignore[arg-type]  # click.Choice has checked it
            refresh=refresh,
            full=full,
            superseded=superseded,
            wait_s=wait_s,
            bus=_journal(dest.absolute()),
            on_progress=lambda at: show(at.received_bytes + at.kept_bytes, at.total_bytes),
        )
    if as_json:
        print_json({"path": str(staged.path), "step": staged.step, "kind": staged.kind})
    else:
        print(staged.path)
    return 0


def _journal(dest: Path) -> EventBus:
    """A stage into a directory that a trainer saves to is a part of that run's history; any other is not."""
    from ckptmirror.core.events import EventBus
    from ckptmirror.flow.destination import is_training_root

    bus = EventBus()
    if is_training_root(dest):
        from ckptmirror.observe.journal import Journal

        bus.subscribe(Journal(dest, "stage"))
    return bus
