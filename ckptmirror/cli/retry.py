"""``ckptmirror retry``: try failed uploads again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._human_text import size
from ckptmirror.cli._next_command import with_places
from ckptmirror.cli._options import json_option, print_json, root_option, step_option
from ckptmirror.core.printable import printable_line

if TYPE_CHECKING:
    from ckptmirror.flow.upload.retry_failed import Retried, RetriedFile


@exit_codes(3, 6, 10, 11)
@click.command(short_help="Make uploads that failed permanently pending again.")
@root_option
@click.option(
    "--mirror", "mirrors", multiple=True, metavar="URL", help="Only this mirror (may be repeated).  [default: all]"
)
@step_option("Only the saves of this step.  [default: all]")
@json_option
def command(root: Path, mirrors: tuple[str, ...], step: int | None, as_json: bool) -> int:
    """Make uploads that failed permanently pending again, once you have fixed the cause.

    Sends nothing itself: a running trainer does so within seconds; otherwise, run `ckptmirror drain`.

    \b
    Examples:
      ckptmirror retry /local-ssd/run-17
      ckptmirror retry /local-ssd/run-17 --step 5000
    """
    from ckptmirror.flow.upload.retry_failed import retry

    retried = retry(root, mirrors=mirrors, step=step)
    by_mirror: dict[str, list[RetriedFile]] = {}
    for file in retried.files:
        by_mirror.setdefault(file.mirror, []).append(file)
    if as_json:
        print_json(_facts(root, retried, by_mirror))
    for url, files in by_mirror.items():
        if not as_json:
            print(_line(url, files))
        for reason in dict.fromkeys(file.reason for file in files):
            print(f"  had failed: {printable_line(reason)}", file=sys.stderr)
        if not files[0].is_served:
            print(f"  {url} is no longer a mirror of {root}: they are not sent", file=sys.stderr)
    print(_what_next(root, retried), file=sys.stderr)
    return 0


def _line(url: str, files: list[RetriedFile]) -> str:
    steps = sorted({file.step for file in files})
    listed = ", ".join(map(str, steps[:8])) + (", …" if len(steps) > 8 else "")
    which = f"step{'s' if len(steps) > 1 else ''} {listed}"
    return f"{url}: {len(files)} files pending again ({size(sum(file.size_bytes for file in files))}, {which})"


def _what_next(root: Path, retried: Retried) -> str:
    if not retried.files:
        return "nothing had failed"
    if retried.trainer:
        return "the running trainer sends them within seconds; " + with_places(
            "`ckptmirror status` shows the progress", {"root": root}
        )
    sends = with_places("`ckptmirror drain` sends them now", {"root": root})
    return f"{sends}; the next start of the trainer does, too"


def _facts(root: Path, retried: Retried, by_mirror: dict[str, list[RetriedFile]]) -> dict[str, Any]:
    return {
        "root": str(root),
        "retried": len(retried.files),
        "trainer": retried.trainer,
        "mirrors": [
            {
                "url": url,
                "served": files[0].is_served,
                "size_bytes": sum(file.size_bytes for file in files),
                "files": [{"step": file.step, "path": file.path, "reason": file.reason} for file in files],
            }
            for url, files in by_mirror.items()
        ],
    }
