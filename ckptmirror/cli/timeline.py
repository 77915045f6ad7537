"""``ckptmirror timeline``: saves, uploads, commits, rotations and stages of a run as bars over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import json_option, print_json, root_option
from ckptmirror.core.errors import LocalStorageUnwritable, UsageError

if TYPE_CHECKING:
    from ckptmirror.observe.timeline import Timeline
    from ckptmirror.observe.timeline_bars import Bar

_ENDINGS = (".svg", ".html")


def _checked_out(_context: click.Context, _parameter: click.Parameter, out: Path | None) -> Path | None:
    if out is not None and out.suffix.lower() not in _ENDINGS:
        raise UsageError(
            f"--out {out}: a timeline is drawn as .svg or .html.", hint="Give --out a name such as run.svg."
        )
    return out


@exit_codes(6, 10)
@click.command(short_help="List, or draw, what happened when.")
@root_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_checked_out,
    metavar="FILE.svg|.html",
    help="Draw into this one file; an existing file is replaced.  [default: lines on stdout]",
)
@json_option
def command(root: Path, out: Path | None, as_json: bool) -> int:
    """Show what happened when: saves, uploads, commits on the mirrors, rotations, stages, attempts.

    Reads only the local disk; a trainer may be running. Without --out and --json, it prints one line per event.

    \b
    Examples:
      ckptmirror timeline /local-ssd/run-17
      ckptmirror timeline /local-ssd/run-17 --out run-17.svg
      ckptmirror timeline --json | jq '.bars[] | select(.outcome == "failed")'
    """
    from ckptmirror.observe.history import read_history
    from ckptmirror.observe.timeline import build_timeline

    timeline = build_timeline(read_history(root))
    for problem in timeline.problems:
        click.echo(f"warning: {problem}", err=True)
    if out is not None:
        _write(timeline, root, out)
    if as_json:
        print_json(_facts(timeline, root))
    elif out is not None:
        print(out)
    else:
        from ckptmirror.cli._timeline_drawing import bar_text, summary

        for bar in timeline.bars:
            print(bar_text(bar))
        click.echo(summary(timeline), err=True)
    return 0


def _write(timeline: Timeline, root: Path, out: Path) -> None:
    from ckptmirror.cli._timeline_drawing import draw
    from ckptmirror.cli._timeline_page import page
    from ckptmirror.core.model import new_id
    from ckptmirror.local import files

    heading = f"{root.name or root}: what happened when"
    drawn = draw(timeline, heading)
    text = page(timeline, heading, drawn) if out.suffix.lower() == ".html" else drawn
    out = out.absolute()
    if not out.parent.exists():
        raise LocalStorageUnwritable(
            f"Cannot write {out}: {out.parent} does not exist.",
            hint="Create it, or choose another path.",
        )
    files.write_bytes(out, text.encode("utf-8"), save_id=new_id(), replace=True)


def _facts(timeline: Timeline, root: Path) -> dict[str, Any]:
    from ckptmirror.core.journal import utc_text

    return {
        "root": str(root),
        "begin_utc": utc_text(timeline.begin_s),
        "end_utc": utc_text(timeline.end_s),
        "clock_jumps": [{"at_utc": utc_text(jump.at_s), "by_s": round(jump.by_s, 3)} for jump in timeline.jumps],
        "lost_lines": timeline.lost_lines,
        "problems": list(timeline.problems),
        "bars": [_bar_facts(bar) for bar in timeline.bars],
    }


def _bar_facts(bar: Bar) -> dict[str, Any]:
    from ckptmirror.core.journal import utc_text

    return {
        "kind": bar.kind,
        "step": bar.step,
        "rank": bar.rank,
        "mirror": bar.mirror,
        "save_id": bar.save_id,
        "attempt": bar.attempt,
        "by": bar.by,
        "begin_utc": utc_text(bar.begin_s),
        "end_utc": None if bar.end_s is None else utc_text(bar.end_s),
        "until_utc": utc_text(bar.until_s),
        "duration_s": None if bar.end_s is None else round(bar.end_s - bar.begin_s, 6),
        "outcome": bar.outcome,
        "tries": bar.tries,
        "reason": bar.reason,
    }
