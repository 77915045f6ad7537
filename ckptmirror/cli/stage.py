"""``ckptmirror stage``: bring one step from a mirror to this host, verified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import (
    DIRECTORY,
    json_option,
    mirror_option,
    need_mirror,
    print_json,
    seconds_option,
    step_option,
)
from ckptmirror.cli._progress import progress

if TYPE_CHECKING:
    from ckptmirror.core.events import EventBus
    from ckptmirror.flow.fetch.stage_progress import StageProgress


@exit_codes(3, 4, 5, 6, 7, 10, 11, 12)
@click.command(short_help="Download a step from a mirror, verified.")
@step_option("The step; latest means the newest of the lineage.", latest=True, required=True)
@click.option(
    "--kind",
    type=click.Choice(["dcp", "model"]),
    help="Which kind to download; fails if the step does not have it.  [default: dcp, then model]",
)
@mirror_option
@click.option(
    "--dest", type=DIRECTORY, default=Path(), help="The directory to download into.  [default: the current directory]"
)
@click.option("--full", is_flag=True, help="Also download the optimizer, extra and tensors files.")
@click.option("--refresh", is_flag=True, help="Verify what is staged, and replace stale copies of this step.")
@click.option("--superseded", is_flag=True, help="Allow a save that is off the lineage.")
@seconds_option("--wait", "wait_s", "Wait up to this long for the step to appear.", default=0.0)
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
    """Download a step from a mirror, verify every block, and print its path.

    \b
    Examples:
      ckptmirror stage gs://bucket/run-17 --step 200 --dest /scratch/eval
      ckptmirror stage --step latest --kind dcp --wait 600 --json
    """
    from ckptmirror.flow.fetch.stage import stage_checkpoint_step

    spec = need_mirror(mirror, to_read=True)
    with progress("stage") as pace:
        pace.doing(f"looking for step {step} on {spec.url}")
        staged = stage_checkpoint_step(
            spec,
            step=step,  # type: ignore[arg-type]  # an int or "latest": the option checks it
            dest=dest,
            require_kind=kind,  # type: ignore[arg-type]  # click.Choice has checked it
            refresh=refresh,
            full=full,
            superseded=superseded,
            wait_s=wait_s,
            bus=_journal(dest.absolute()),
            on_progress=lambda at: pace(*_shown(at)),
            on_wait=pace.waiting,
        )
    if as_json:
        print_json({"path": str(staged.path), "step": staged.step, "kind": staged.kind})
    else:
        print(staged.path)
    return 0


def _shown(at: StageProgress) -> tuple[int, int, int, str]:
    done = at.received_bytes + at.kept_bytes
    if at.checking:
        return done, at.total_bytes, at.received_bytes, f"comparing {at.checking} with its checksums"
    return done, at.total_bytes, at.received_bytes, "putting it in place" if done == at.total_bytes else ""


def _journal(dest: Path) -> EventBus:
    """Return a bus that writes to the run's journal if a trainer saves to ``dest``, else one that does not."""
    from ckptmirror.core.events import EventBus
    from ckptmirror.flow.fetch.destination import is_training_root

    if not is_training_root(dest):
        return EventBus()
    from ckptmirror.observe.journal import bus_with_journal

    return bus_with_journal(dest, "stage")
