"""``ckptmirror rotate``: delete local saves that policy no longer wants and that are provably on the mirrors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._next_command import with_places
from ckptmirror.cli._options import json_option, print_json, root_option, settings
from ckptmirror.core.errors import RefusedOnlyCopy, UsageError
from ckptmirror.core.uncommitted import is_behind_text

if TYPE_CHECKING:
    from ckptmirror.flow.retention.rotation import RotationReport

_HINT_OF_NODES = "What another node has still to upload, `ckptmirror drain` on that node uploads."


@exit_codes(5, 6, 7, 10, 11, 12)
@click.command(short_help="Delete local saves that every required mirror has.")
@root_option
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the newest N steps.  [default: retention.keep_last]",
)
@click.option(
    "--keep-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep every step divisible by N.  [default: retention.keep_every]",
)
@click.option(
    "--keep-best",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep the N best steps by --metric.  [default: retention.keep_best]",
)
@click.option("--metric", metavar="NAME", help="The metric that --keep-best uses.  [default: retention.metric]")
@click.option(
    "--mode", type=click.Choice(["min", "max"]), help="Which value of the metric is best.  [default: retention.mode]"
)
@click.option("--dry-run", is_flag=True, help="Print the plan and delete nothing.")
@json_option
def command(
    root: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metric: str | None,
    mode: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Delete local saves that are verified, now, on every required mirror. Everything else is kept, with the reason.

    Options that you leave out come from the settings under retention, if the settings name this same root (or if they
    name none, and the root is the current directory). keep-last must be set in one of the two.
    The plan is printed first. Exit code 7 means that something was kept because it may be the only copy.

    \b
    Examples:
      ckptmirror rotate /local-ssd/run-17 --keep-last 2 --dry-run
      ckptmirror rotate --keep-last 2 --keep-best 1 --metric val_loss
    """
    from ckptmirror.config import load_settings
    from ckptmirror.flow.retention.rotation import rotate_root
    from ckptmirror.observe.journal import bus_with_journal

    is_of_the_settings = root == (settings()["root"] or Path()).absolute()
    environ = None if is_of_the_settings else {"CKPTMIRROR_CONFIG": os.devnull}  # what else they say is of another run

    if keep_best is not None and metric is None and load_settings(environ=environ).retention.metric is None:
        raise UsageError(
            "--keep-best needs --metric NAME.", hint="NAME is a metric that the trainer gives to save(metrics=...)."
        )
    flags = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best, "metric": metric, "mode": mode}
    retention = load_settings({f"retention.{name}": given for name, given in flags.items()}, environ=environ).retention
    if retention.keep_last is None:
        raise UsageError(
            "The number of steps to keep is not set.",
            hint="Pass --keep-last N, or set retention.keep_last for the run.",
        )
    plan = rotate_root(root, retention, dry_run=True)
    if not as_json:
        _print_plan(plan)
    for warning in plan.plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    report = plan if dry_run else rotate_root(root, retention, bus=bus_with_journal(root, "rotate"))
    if as_json:
        print_json(_facts(report, dry_run))
    if dry_run:
        return 0
    print(f"{len(report.deleted)} saves deleted", file=sys.stderr)
    for save_id, reason in report.refused.items():
        print(f"kept step {report.steps[save_id]} ({save_id[:8]}): {reason}", file=sys.stderr)
    hints = [_HINT_OF_NODES if is_behind_text(reason) else RefusedOnlyCopy.hint for reason in report.refused.values()]
    for hint in dict.fromkeys(hints):
        print("  " + with_places(hint, {"root": root}), file=sys.stderr)
    return RefusedOnlyCopy.exit_code if report.refused else 0


def _print_plan(plan: RotationReport) -> None:
    lines = [
        (plan.steps[save_id], save_id, verb, reason)
        for verb, saves in (("keep", plan.plan.keep), ("delete", plan.plan.delete), ("refuse", plan.plan.refuse))
        for save_id, reason in saves.items()
    ]
    for step, save_id, verb, reason in sorted(lines):
        print(f"{verb:<7} step {step} ({save_id[:8]}): {reason}")
    sys.stdout.flush()


def _facts(report: RotationReport, dry_run: bool) -> dict[str, Any]:
    def listed(saves: dict[str, str]) -> list[dict[str, Any]]:
        return [{"step": report.steps[i], "save_id": i, "reason": reason} for i, reason in saves.items()]

    return {
        "dry_run": dry_run,
        "keep": listed(report.plan.keep),
        "delete": listed(report.plan.delete),
        "refuse": listed(report.refused),
        "deleted": [{"step": step, "save_id": save_id} for step, save_id in report.deleted],
        "warnings": list(report.plan.warnings),
    }
