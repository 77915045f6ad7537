"""``ckptmirror rewind``: continue the run from an older save, or start it over."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import json_option, print_json, root_option, step_option
from ckptmirror.cli._progress import progress
from ckptmirror.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmirror.core.start.lineage import SaveFacts
    from ckptmirror.flow.start.rewind import RewindPlan, Rewound


@exit_codes(3, 5, 6, 7, 10, 11, 12)
@click.command(short_help="Continue the run from an older save.")
@root_option
@step_option("Go back to this step; it, --save or --scratch is required.")
@click.option(
    "--save",
    metavar="ID",
    help="Go to this save (8 digits or more of its id), which may be superseded; it, --step or --scratch is required.",
)
@click.option(
    "--scratch", is_flag=True, help="Start over: the next start begins at step 0; it, --step or --save is required."
)
@click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    metavar="URL",
    help="A mirror that the root does not know (may be repeated).  [default: those that it knows]",
)
@click.option("--dry-run", is_flag=True, help="Print what would change and record nothing.")
@json_option
def command(
    root: Path,
    step: int | None,
    save: str | None,
    scratch: bool,
    mirrors: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Continue the run from an older save: the next start of the trainer continues there.

    Records a new attempt here and on the mirrors. Nothing is deleted: later saves become superseded. Rotation may
    later delete the local copies that every required mirror holds; ckptmirror does not delete on a mirror yet. To
    return to one of those saves, pass its id to `--save`. No trainer may be running
    here; a trainer of this run on another machine stops committing. If the save is not on this disk, it is brought
    here. Every checksum of it is verified first.

    \b
    Examples:
      ckptmirror rewind /local-ssd/run-17 --step 5000 --dry-run
      ckptmirror rewind /local-ssd/run-17 --step 5000
      ckptmirror rewind /new-disk --step 5000 --mirror gs://bucket/run-17
    """
    if (given := (step is not None) + (save is not None) + scratch) != 1:
        raise UsageError(
            "Give --step N, --save ID or --scratch" + (", only one of them." if given else "."),
            hint="`ckptmirror ls` lists steps and save ids.",
        )
    if save is not None and not re.fullmatch("[0-9a-f]{8,32}", save):
        raise UsageError(
            f"{save!r} is not a save id.", hint="Give at least 8 of its hex digits: `ckptmirror ls` lists save ids."
        )
    from ckptmirror.flow.drain import confirm
    from ckptmirror.flow.start.rewind import plan_rewind, rewind
    from ckptmirror.observe.journal import bus_with_journal

    reference = step if step is not None else save or "scratch"
    plan = plan_rewind(root, reference, mirrors=mirrors)
    if not as_json:
        _print_plan(plan)
    if dry_run:
        if as_json:
            print_json(_facts(root, plan, None, (), plan.silent))
        return 0
    with progress("rewind") as pace:
        rewound = rewind(root, reference, mirrors=mirrors, bus=bus_with_journal(root, "rewind"), on_progress=pace)
        if rewound.save_id:
            confirm(root, rewound.save_id, plan.places)
    if as_json:
        print_json(_facts(root, plan, rewound, rewound.recorded_on, rewound.unreachable))
    _print_rewound(root, rewound)
    return 0


def _print_plan(plan: RewindPlan) -> None:
    if plan.save is not None:
        print(f"continue from {_line(plan.save)}: on {', '.join(plan.places)}")
    else:
        print("start over    at step 0")
    for save in plan.fork.superseded:
        print(f"supersede     {_line(save)}")
    for save in plan.fork.restored:
        print(f"restore       {_line(save)}")
    for url, reason in plan.silent.items():
        print(f"warning: {url} does not answer ({reason}): what only it holds was not seen", file=sys.stderr)
    sys.stdout.flush()


def _line(save: SaveFacts) -> str:
    return f"step {save.step} ({save.save_id[:8]}, {'+'.join(save.kinds)})"


def _print_rewound(root: Path, rewound: Rewound) -> None:
    told = f", recorded on {', '.join(rewound.recorded_on)}" if rewound.recorded_on else ""
    what = f"continues from step {rewound.step} ({rewound.save_id[:8]})" if rewound.save_id else "starts over at step 0"
    print(f"attempt {rewound.attempt} {what}{told}", file=sys.stderr)
    if rewound.save_id and not (rewound.fork.superseded or rewound.fork.restored):
        print(
            f"step {rewound.step} was already the newest save seen; if another machine has a newer one, its next start "
            "leaves that behind",
            file=sys.stderr,
        )
    _warn(rewound.unreachable)
    if undo := _undo(root, rewound):
        print(f"nothing was deleted; to undo it: `{undo}`", file=sys.stderr)
    elif rewound.before_of_all is not None:
        start = f"start all nodes once with manager.resume(state, policy={rewound.before_of_all.save_id[:8]!r})"
        print(f"nothing was deleted; to undo it, {start}", file=sys.stderr)


def _warn(untold: Mapping[str, str]) -> None:
    for url, reason in untold.items():
        print(
            f"warning: {url} has not recorded it yet ({reason}): the next start here, or the same command, does. "
            "Until then do not start the run elsewhere.",
            file=sys.stderr,
        )


def _undo(root: Path, rewound: Rewound) -> str:
    """Return the command that undoes it; "" if there is none: of the newest, this disk has only a node's part."""
    before = rewound.before
    if before is None or rewound.before_of_all is not None:
        return ""
    return f"ckptmirror rewind --root {quote(str(root))} --save {before.save_id[:8]}"


def _facts(
    root: Path, plan: RewindPlan, rewound: Rewound | None, told: tuple[str, ...], untold: Mapping[str, str]
) -> dict[str, Any]:
    fork = rewound.fork if rewound is not None else plan.fork

    def listed(saves: tuple[SaveFacts, ...]) -> list[dict[str, Any]]:
        return [{"step": save.step, "save_id": save.save_id, "kinds": list(save.kinds)} for save in saves]

    return {
        "root": str(root),
        "recorded": rewound is not None,
        "attempt": rewound.attempt if rewound is not None else None,
        "step": plan.save.step if plan.save is not None else 0,
        "save_id": plan.save.save_id if plan.save is not None else None,
        "places": list(plan.places),
        "superseded": listed(fork.superseded),
        "restored": listed(fork.restored),
        "told": list(told),
        "untold": dict(untold),
        "undo": _undo(root, rewound) if rewound is not None else "",
    }
