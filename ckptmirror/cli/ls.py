"""``ckptmirror ls``: the saves of a root or a mirror."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._human_text import age_text, size
from ckptmirror.cli._options import DIRECTORY, configured_place, json_option, print_json
from ckptmirror.cli._tables import SAVE_COLUMNS, Cell, Column, print_table, standing_style

if TYPE_CHECKING:
    from ckptmirror.flow.places.resolve import ListedCheckpoint


_COLUMNS = (*SAVE_COLUMNS, Column("AGE", only_for_people=True), Column("WHY"))


@exit_codes(3, 5, 6, 10, 12)
@click.command(short_help="List the saves of a directory or a mirror.")
@click.argument("place", required=False, metavar="[DIR|URL]")
@click.option("--root", type=DIRECTORY, help="A directory, as DIR.  [default: see above]")
@click.option("--mirror", metavar="URL", help="A mirror, as URL.  [default: see above]")
@json_option
def command(place: str | None, root: Path | None, mirror: str | None, as_json: bool) -> int:
    """List the saves of a directory or a mirror: current, replaced, superseded, and incomplete, with the reason.

    It also says which save is quarantined: starts failed from it in a row, so a start goes back past it.

    Without DIR or URL, it lists the first mirror in the settings, else the root in the settings, else this directory.

    \b
    Examples:
      ckptmirror ls gs://bucket/run-17
      ckptmirror ls /local-ssd/run-17 --json
    """
    from ckptmirror.flow.places.resolve import list_checkpoints

    given = [str(one) for one in (place, root, mirror) if one is not None]
    if len(given) > 1:
        raise click.UsageError("Give only one of: DIR or URL, --root, --mirror.", click.get_current_context())
    place = given[0] if given else configured_place()
    listed = list_checkpoints(place)
    if as_json:
        print_json({"place": place, "saves": [_facts(line) for line in listed]})
        return 0
    print_table(_COLUMNS, [_cells(line) for line in listed])
    if not listed:
        print(f"{place} holds no saves", file=sys.stderr)
    return 0


def _cells(line: ListedCheckpoint) -> list[Cell]:
    return [
        "?" if line.step < 0 else str(line.step),
        "+".join(line.kinds) or "-",
        size(line.size_bytes),
        (line.standing, standing_style(line.standing)),
        line.save_id[:8],
        age_text(line.created_at_utc),
        line.why,
    ]


def _facts(line: ListedCheckpoint) -> dict[str, Any]:
    return {
        "step": None if line.step < 0 else line.step,
        "kinds": list(line.kinds),
        "current_kinds": list(line.current_kinds),
        "standing": line.standing,
        "why": line.why,
        "save_id": line.save_id,
        "attempt": None if line.attempt < 0 else line.attempt,
        "number": line.number,
        "size_bytes": line.size_bytes,
        "metrics": dict(line.metrics),
        "created_at_utc": line.created_at_utc,
        "staged_from": line.staged_from,
        "place": line.place,
        "quarantined": line.quarantined,
    }
