"""The commands that hints name, ready to be pasted: with the root, the mirror and the step of the verb that failed.

Rules:
* A command is between backquotes, as in every hint. Its own options stay; missing ones are filled in from the options
  of the verb that failed, quoted for a shell.
* A command for another node stays as it is: its root may have another path.
* ``ls`` and ``verify`` get the place that the failed verb used: its root, else its mirror.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import Any

import click

from ckptmirror.core.errors import CkptMirrorError

__all__ = ["completing_hints", "with_places"]

_COMMAND = re.compile(r"`(ckptmirror [^`]+)`(?! (?:there|on (?:that|the|any))\b)")
_PLACES = ("root", "mirror", "dest")
_LOOKING = ("ls", "verify")


def completing_hints(command: click.Command) -> None:
    """Make the errors that a verb raises name commands that can be pasted."""
    callback = command.callback
    if callback is None or hasattr(callback, "__wrapped__"):
        return
    command.callback = _completing(callback)


def _completing(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def completed(**given: Any) -> Any:
        try:
            return callback(**given)
        except CkptMirrorError as error:
            error.hint = with_places(error.hint, given)
            raise

    return completed


def with_places(hint: str, given: Mapping[str, Any]) -> str:
    """Return ``hint`` with its commands completed from the parameters of a verb."""
    return _COMMAND.sub(lambda found: f"`{_completed(found[1], given)}`", hint)


def _completed(command: str, given: Mapping[str, Any]) -> str:
    try:
        words = shlex.split(command)
    except ValueError:  # a name in it has a quote of its own
        return command
    verb = words[1]
    step = given.get("step")
    if isinstance(step, int):
        words = [str(step) if (before, word) == ("--step", "N") else word for before, word in pairwise(["", *words])]
    if "--help" in words or "--verbose" in words:
        return command
    places = {"root": given.get("root"), "mirror": _mirror(given), "dest": given.get("dest")}
    if places["mirror"] is not None:
        words = [places["mirror"] if word == "URL" else word for word in words]
    if verb in _LOOKING:
        place = places["root"] or given.get("place") or given.get("reference") or places["mirror"] or places["dest"]
        return shlex.join([*words, str(place)] if len(words) == 2 and place is not None else words)
    for name in _places_of(verb):
        if places[name] is not None and f"--{name}" not in words:
            words += [f"--{name}", str(places[name])]
    return shlex.join(words)


def _places_of(verb: str) -> list[str]:
    """Return the places that a verb takes as options."""
    command = import_module(f"ckptmirror.cli.{verb.replace('-', '_')}").command
    return [
        name
        for name in _PLACES
        for parameter in command.params
        if f"--{name}" in parameter.opts and not parameter.multiple
    ]


def _mirror(given: Mapping[str, Any]) -> str | None:
    """Return the one mirror that a verb was given."""
    several: Sequence[str] = given.get("mirrors") or []
    mirror = given.get("mirror") or (several[0] if len(several) == 1 else None)
    return None if mirror is None else str(mirror)
