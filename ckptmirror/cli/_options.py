"""Options and printing that several verbs share.

Rules:
* A wrong value is a usage error (exit code 2) that names the option, found before anything is opened.
* ``CKPTMIRROR_ROOT`` and ``CKPTMIRROR_MIRROR`` stand in for ``--root`` and ``--mirror``, and the option wins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ckptmirror.core.errors import ConfigError, UsageError
from ckptmirror.core.names import parse_step

__all__ = [
    "json_option",
    "mirror_option",
    "need_mirror",
    "on_this_disk_alone",
    "print_json",
    "root_option",
    "seconds_option",
    "show_verbose",
    "size",
    "step_option",
    "verbose_option",
]

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any] | click.Command)


def step_option(what: str, *, latest: bool = False, required: bool = False) -> Callable[[_Decorated], _Decorated]:
    """Add ``--step``: an int, or ``"latest"`` where that is allowed."""

    def parse(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
        if value is None or (latest and value == "latest"):
            return value
        try:
            return parse_step(value)
        except UsageError as error:
            raise click.BadParameter(f"{error} {error.hint}", context, parameter) from error

    return click.option("--step", callback=parse, required=required, metavar="N|latest" if latest else "N", help=what)


def root_option(function: _Decorated) -> _Decorated:
    """Add ``--root``, as an absolute path."""
    return click.option(
        "--root",
        type=click.Path(path_type=Path, file_okay=False),
        envvar="CKPTMIRROR_ROOT",
        default=Path(),
        callback=lambda _context, _parameter, value: value.absolute(),
        help="The directory that the trainer saves to.  [env: CKPTMIRROR_ROOT; default: here]",
    )(function)


def mirror_option(function: _Decorated) -> _Decorated:
    """Add ``--mirror``."""
    return click.option(
        "--mirror",
        envvar="CKPTMIRROR_MIRROR",
        metavar="URL",
        help="The mirror, such as gs://bucket/run-17.  [env: CKPTMIRROR_MIRROR]",
    )(function)


def seconds_option(name: str, target: str, what: str, *, default: float) -> Callable[[_Decorated], _Decorated]:
    """Add an option that takes a number of seconds."""
    return click.option(name, target, type=click.FloatRange(min=0), default=default, metavar="SECONDS", help=what)


def json_option(function: _Decorated) -> _Decorated:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)


def verbose_option(function: _Decorated) -> _Decorated:
    """Add ``--verbose``, which is taken before and after the verb."""

    def set_level(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            logging.getLogger().setLevel(logging.INFO)

    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=set_level,
        help="Log what happens to stderr, and show tracebacks.",
    )(function)


def show_verbose() -> bool:
    """Whether ``--verbose`` was given."""
    return logging.getLogger().isEnabledFor(logging.INFO)


def need_mirror(mirror: str | None) -> str:
    """Return the mirror, or say how to give one."""
    if not mirror:
        raise ConfigError("No mirror is given.", hint="Pass --mirror URL, or set CKPTMIRROR_MIRROR.")
    return mirror


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object to stdout."""
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def size(size_bytes: int) -> str:
    """Return a size for people: ``1.4 GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def on_this_disk_alone(step: int) -> str:
    """Say what an emergency snapshot that is newer than all else means for who gives this machine back."""
    what = f"the newest state, step {step}, is an emergency snapshot on this disk alone"
    return f"{what}; the next start goes on from it"
