"""Options and printing that several verbs share."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from ckptmirror.core.errors import CkptMirrorError, ConfigError
from ckptmirror.core.names import parse_step

__all__ = ["json_option", "mirror_option", "need_mirror", "print_json", "root_option", "size", "step_type"]


class StepType(click.ParamType):
    """A step as a person types it, or ``latest`` where that is allowed."""

    name = "step"

    def __init__(self, latest: bool) -> None:
        self._latest = latest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the step as an int, or ``"latest"``."""
        if isinstance(value, int):
            return value
        if self._latest and value == "latest":
            return "latest"
        try:
            return parse_step(value)
        except CkptMirrorError as error:
            self.fail(f"{error} {error.hint}", param, ctx)


def step_type(*, latest: bool = False) -> StepType:
    """Return the click type of a step."""
    return StepType(latest)


def root_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--root``."""
    return click.option(
        "--root",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="CKPTMIRROR_ROOT",
        default=Path(),
        help="The directory that the trainer saves to.  [env: CKPTMIRROR_ROOT; default: here]",
    )(function)


def mirror_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--mirror``."""
    return click.option(
        "--mirror",
        envvar="CKPTMIRROR_MIRROR",
        metavar="URL",
        help="The mirror, such as gs://bucket/run-17.  [env: CKPTMIRROR_MIRROR]",
    )(function)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)


def need_mirror(mirror: str | None) -> str:
    """Return the mirror, or say how to give one."""
    if not mirror:
        raise ConfigError("No mirror is given.", hint="Pass --mirror URL, or set CKPTMIRROR_MIRROR.")
    return mirror


def print_json(value: Any) -> None:
    """Print one JSON object to stdout."""
    print(json.dumps(value, indent=2, sort_keys=True, default=str))


def size(size_bytes: int) -> str:
    """Return a size for people: ``1.4 GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end a verb as Ctrl-C does: cleanly, with exit code 143."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        print("ckptmirror: terminated; the same command continues where it stopped.", file=sys.stderr)
        raise SystemExit(143)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
