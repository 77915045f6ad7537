"""``ckptmirror stage``: bring one step from a mirror to this host, verified."""

from __future__ import annotations

from pathlib import Path

import click

from ckptmirror.cli._options import interrupt_on_sigterm, json_option, mirror_option, need_mirror, print_json, step_type
from ckptmirror.cli._progress import progress


@click.command()
@click.option("--step", type=step_type(latest=True), required=True, metavar="N|latest", help="Which step.")
@click.option("--kind", type=click.Choice(["dcp", "model"]), help="Which kind; without it dcp, then model.")
@mirror_option
@click.option("--dest", type=click.Path(path_type=Path), default=Path(), help="Where to.  [default: here]")
@click.option("--full", is_flag=True, help="Also optimizer, extra and tensors files.")
@click.option("--refresh", is_flag=True, help="Replace stale staged copies of this step.")
@click.option("--superseded", is_flag=True, help="Allow a save that is off the lineage.")
@click.option("--wait", "wait_s", type=float, default=0.0, metavar="SECONDS", help="Wait for the step to appear.")
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
      ckptmirror stage --step latest --mirror gs://bucket/run-17 --json
    """
    from ckptmirror.flow.stage import stage_checkpoint_step

    interrupt_on_sigterm()
    with progress("stage", quiet=as_json) as show:
        staged = stage_checkpoint_step(
            need_mirror(mirror),
            step=step,  # type: ignore[arg-type]  # an int or "latest": the option's type sees to it
            dest=dest,
            require_kind=kind,  # type: ignore[arg-type]  # click.Choice has checked it
            refresh=refresh,
            full=full,
            superseded=superseded,
            wait_s=wait_s,
            on_progress=lambda at: show(at.received_bytes + at.kept_bytes, at.total_bytes),
        )
    if as_json:
        print_json({"path": str(staged.path), "step": staged.step, "kind": staged.kind})
    else:
        print(staged.path)
    return 0
