"""``ckptmirror rotate``: delete local saves that policy no longer wants and that are provably on the mirrors."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckptmirror.cli._options import json_option, print_json, root_option


@click.command()
@root_option
@click.option("--keep-last", type=click.IntRange(min=1), required=True, metavar="N", help="Keep the newest N steps.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep every step divisible by N.")
@click.option("--keep-best", type=click.IntRange(min=1), metavar="N", help="Keep the N best steps by --metric.")
@click.option("--metric", help="The metric that --keep-best goes by.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="What is best.")
@click.option("--dry-run", is_flag=True, help="Print the plan and delete nothing.")
@json_option
def command(
    root: Path,
    keep_last: int,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
    mode: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete local saves that are verified, now, on every required mirror. Everything else is kept, with the reason.

    \b
    Examples:
      ckptmirror rotate --root /local-ssd/run-17 --keep-last 2 --dry-run
      ckptmirror rotate --root /local-ssd/run-17 --keep-last 2 --keep-best 1 --metric val_loss
    """
    from ckptmirror.core.retention import Retention
    from ckptmirror.flow.rotate import rotate_root

    retention = Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best or 0,
        metric=metric,
        mode="max" if mode == "max" else "min",
    )
    plan = rotate_root(root.absolute(), retention, dry_run=True)
    lines = {save_id: ("keep", reason) for save_id, reason in plan.plan.keep.items()}
    lines |= {save_id: ("delete", reason) for save_id, reason in plan.plan.delete.items()}
    lines |= {save_id: ("refuse", reason) for save_id, reason in plan.refused.items()}
    if not as_json:
        for save_id, (verb, reason) in lines.items():
            print(f"{verb:<7} step {plan.steps[save_id]} ({save_id[:8]}): {reason}")
    report = plan if dry_run else rotate_root(root.absolute(), retention)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "keep": report.plan.keep,
                "delete": report.plan.delete,
                "refuse": report.refused,
                "deleted": [{"step": step, "save_id": save_id} for step, save_id in report.deleted],
            }
        )
    elif not dry_run:
        print(f"{len(report.deleted)} saves deleted", file=sys.stderr)
        for save_id in report.plan.delete.keys() & report.refused.keys():
            print(f"refused step {report.steps[save_id]} ({save_id[:8]}): {report.refused[save_id]}", file=sys.stderr)
    return 0
