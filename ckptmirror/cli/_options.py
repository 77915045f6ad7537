"""Options and printing that several verbs share.

Rules:
* A wrong value is a usage error (exit code 2) that names the option, raised before anything is opened.
* Options that are left out come from the settings (``ckptmirror/config.py``). Every verb reads them, because they say
  which signatures it demands; so a broken file is reported at once, even if the option is given.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptmirror.core.errors import ConfigError, UsageError
from ckptmirror.core.setting_checks import WrongValue, directory_path

if TYPE_CHECKING:
    from ckptmirror.config import Settings
    from ckptmirror.flow.places.mirrors import MirrorSpec

__all__ = [
    "DIRECTORY",
    "configured_place",
    "demanding_signatures",
    "json_option",
    "mirror_option",
    "need_mirror",
    "print_json",
    "root_option",
    "seconds_option",
    "settings",
    "show_verbose",
    "step_option",
    "verbose_option",
]

_SETTINGS = "ckptmirror.settings"
_PLACED = "ckptmirror.placed."
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any] | click.Command)


class _Directory(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a URL, which would be taken for a directory named after its scheme."""
        try:
            directory_path(os.fspath(value))
        except WrongValue as wrong:
            self.fail(f"it {wrong.why}. {wrong.hint}", param, ctx)
        return super().convert(value, param, ctx)


DIRECTORY = _Directory(path_type=Path, file_okay=False)


def step_option(what: str, *, latest: bool = False, required: bool = False) -> Callable[[_Decorated], _Decorated]:
    """Add ``--step``: an int, or ``"latest"`` where that is allowed."""

    def parse(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
        if value is None or (latest and value == "latest"):
            return value
        from ckptmirror.core.names import parse_step

        try:
            return parse_step(value)
        except UsageError as error:
            raise click.BadParameter(f"{error} {error.hint}", context, parameter) from error

    return click.option("--step", callback=parse, required=required, metavar="N|latest" if latest else "N", help=what)


def settings() -> Settings:
    """Return the settings of this call from the file and the environment; they are read once."""
    kept = click.get_current_context().meta
    if _SETTINGS not in kept:
        from ckptmirror.config import load_settings

        kept[_SETTINGS] = load_settings()
    found: Settings = kept[_SETTINGS]
    return found


def demanding_signatures(command: click.Command) -> None:
    """Have a verb sign and believe what the settings say, whether it has an option for a setting or not."""
    callback = command.callback
    if callback is None or hasattr(callback, _SETTINGS):
        return

    @wraps(callback)
    def with_keys(**given: Any) -> Any:
        known = settings()
        if known["signing_key"] or known["verify_keys"]:
            from ckptmirror.local.keys import use_keys

            use_keys(known["signing_key"], known["verify_keys"])
        return callback(**given)

    setattr(with_keys, _SETTINGS, True)
    command.callback = with_keys


def root_option(function: _Decorated) -> _Decorated:
    """Add ``--root``, and DIR in place of it, as an absolute path."""

    def resolve(context: click.Context, parameter: click.Parameter, root: Path | None) -> Path:
        root = _one_of(context, "DIR", "--root", root)
        configured = None if context.resilient_parsing else settings()["root"]
        return Path(parameter.type.convert(root or configured or Path(), parameter, context)).absolute()

    option = click.option(
        "--root",
        type=DIRECTORY,
        callback=resolve,
        help="The directory that the trainer saves to; same as DIR.  "
        "[default: the setting root, else the current directory]",
    )
    return _placed("DIR", click.Path(file_okay=False))(option(function))


def mirror_option(function: _Decorated) -> _Decorated:
    """Add ``--mirror``, and URL in place of it; :func:`need_mirror` decides what applies without either."""

    def resolve(context: click.Context, _parameter: click.Parameter, mirror: str | None) -> str | None:
        found: str | None = _one_of(context, "URL", "--mirror", mirror)
        return found

    what = "The mirror, such as gs://bucket/run-17; same as URL.  [default: from the setting mirrors]"
    option = click.option("--mirror", metavar="URL", callback=resolve, help=what)
    return _placed("URL", click.STRING)(option(function))


def _placed(place: str, kind: Any) -> Callable[[_Decorated], _Decorated]:
    """Add an argument in place of an option. A URL alone is accepted even where DIR would come before it."""

    def keep(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        takes_url = any(one.name == "url" for one in context.command.params)
        if value is not None:
            key = _PLACED + ("URL" if takes_url and "://" in value else place)
            if key in context.meta:
                raise click.UsageError("DIR comes before URL.", context)
            context.meta[key] = value

    return click.argument(
        place.lower(),
        type=kind,
        required=False,
        metavar=f"[{place}]",
        is_eager=True,
        expose_value=False,
        callback=keep,
    )


def _one_of(context: click.Context, place: str, option: str, named: Any) -> Any:
    placed = context.meta.get(_PLACED + place)
    if placed is not None and named is not None:
        raise click.UsageError(f"Give {place} or {option}, not both.", context)
    return named if placed is None else placed


def seconds_option(name: str, target: str, what: str, *, default: float) -> Callable[[_Decorated], _Decorated]:
    """Add an option that takes a number of seconds."""
    what += "  [default: never]" if default == float("inf") else f"  [default: {default:g}]"
    return click.option(name, target, type=_seconds, default=default, metavar="SECONDS", help=what)


def _seconds(value: Any) -> float:
    """Return a number of seconds, 0 or more; ``inf`` is one."""
    try:
        seconds = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number of seconds.") from None
    if not seconds >= 0:
        raise click.BadParameter("it must be 0 or more.")
    return seconds


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


def need_mirror(url: str | None, *, to_read: bool, root: Path | None = None) -> MirrorSpec:
    """Return the mirror of ``--mirror``, with the limits that are set for it, or the one that is set.

    Args:
        url: The value of ``--mirror``.
        to_read: Whether to take the first one if several are set.
        root: The root to mirror: no mirror inside it is suggested.
    """
    from ckptmirror.flow.places.mirrors import mirror_specs

    known: tuple[MirrorSpec, ...] = settings()["mirrors"]
    if url is not None:
        try:
            (given,) = mirror_specs([url])
        except ConfigError as error:
            inside = "" if root is None else rf" or file://{re.escape(str(root))}(/[^ ]*)?(?=\.$)"
            error.hint = re.sub(inside, "", error.hint)
            raise
        return next((spec for spec in known if spec.url == given.url), given)
    if not known:
        raise ConfigError(
            "No mirror is given.",
            hint="Pass --mirror URL, or set mirrors in ckptmirror.toml, or CKPTMIRROR_MIRROR (CKPTMIRROR_MIRRORS for "
            "several).",
        )
    if len(known) > 1 and not to_read:
        raise ConfigError(
            f"{len(known)} mirrors are set: {', '.join(s.url for s in known)}.", hint="Pass --mirror URL."
        )
    return known[0]


def configured_place() -> str:
    """Return the place that a verb reads if none is given: the first mirror set, else the root, else this directory."""
    known = settings()
    return known["mirrors"][0].url if known["mirrors"] else str(known["root"] or ".")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object to stdout."""
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))
