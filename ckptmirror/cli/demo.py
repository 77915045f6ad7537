"""``ckptmirror demo``: shows everything, on this machine without a cloud, or with the user's own mirror."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._interrupts import next_step_if_interrupted

_OF_THE_SERVICE = ("CKPTMIRROR_GCS_CREDENTIALS", "CKPTMIRROR_GCS_ENDPOINT", "CKPTMIRROR_RETRY_S")


@exit_codes(5, 7, 10, 12)
@click.command(short_help="Show everything on this machine, in about a minute.")
@click.option(
    "--mirror",
    metavar="URL",
    help="Use a mirror of yours, such as gs://bucket/prefix or a directory.  [default: a server beside it]",
)
@click.option("--keep", is_flag=True, help="Keep the files and objects of the demo, and say where they are.")
@click.option(
    "--timeline",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="Draw a timeline, until the disk is lost, into this file.  [default: no file]",
)
def command(mirror: str | None, keep: bool, timeline: Path | None) -> int:
    """Train, get killed, resume, rotate, lose the disk, get preempted, evaluate, lose a node, in about a minute.

    Needs the CPU of two processes, no GPU and no cloud: it starts a strict Google Cloud Storage server of its own.
    With --mirror, it uses that mirror instead, under a new prefix, touches nothing else, and removes what it created.

    \b
    Examples:
      ckptmirror demo
      ckptmirror demo --keep
      ckptmirror demo --mirror gs://bucket/prefix
      ckptmirror demo --timeline demo.svg
    """
    from ckptmirror.cli._demo_place import make_place
    from ckptmirror.cli._demo_processes import server_beside
    from ckptmirror.cli._demo_story import FIRST_DISK, Story

    place = make_place(mirror) if mirror is not None else None
    _leave_settings(with_server=place is None)
    if place is not None:
        place.check_empty()
        print(f"Everything is under {place.url}. Nothing else there is touched.", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="ckptmirror-demo-"))  # mode 0700, whatever the umask: all users share /tmp
    told = False
    again = "the same command starts over" + (f", elsewhere; {place.left}" if place is not None else "")
    with next_step_if_interrupted(again):
        try:
            with server_beside(folder) if place is None else nullcontext() as server:
                Story(folder, server, place).tell()
            told = True
            if timeline is not None:
                shutil.copyfile(folder / FIRST_DISK, timeline)
        except Exception:
            if place is not None:
                place.report_kept()
            raise
        finally:
            if told and not keep:
                shutil.rmtree(folder)
            else:
                print(f"the demo's files are in {folder}", file=sys.stderr)
        if place is not None:
            place.leave(keep=keep)
    return 0


def _leave_settings(*, with_server: bool = True) -> None:
    """Keep the user's settings from the demo's processes, except those needed to reach the user's bucket."""
    for variable in [name for name in os.environ if name.startswith("CKPTMIRROR_")]:
        if with_server or variable not in _OF_THE_SERVICE:
            del os.environ[variable]
    os.environ["CKPTMIRROR_CONFIG"] = os.devnull
