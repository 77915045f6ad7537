"""``ckptmirror ls``: the saves of a root or a mirror."""

from __future__ import annotations

import dataclasses

import click

from ckptmirror.cli._options import json_option, print_json, size


@click.command()
@click.argument("place", envvar="CKPTMIRROR_MIRROR", metavar="[DIR|URL]")
@json_option
def command(place: str, as_json: bool) -> int:
    """List the saves of a directory or a mirror: current, replaced, superseded, and what is incomplete, with why.

    \b
    Examples:
      ckptmirror ls gs://bucket/run-17
      ckptmirror ls /local-ssd/run-17 --json
    """
    from ckptmirror.flow.resolve import list_checkpoints

    listed = list_checkpoints(place)
    if as_json:
        print_json({"place": place, "saves": [dataclasses.asdict(line) for line in listed]})
        return 0
    for line in listed:
        step = "?" if line.step is None else str(line.step)
        kinds = "+".join(line.kinds) or "-"
        print(
            f"{step:>9}  {kinds:<10} {size(line.size_bytes):>10}  {line.standing:<11} {line.save_id[:8]:<8}  {line.why}".rstrip()
        )
    return 0
