"""Checks the values of settings, and suggests what an unknown name was probably meant to be.

Rules:
* A check returns the value, or raises an error that says what the value is and what it must be. It converts only
  numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckptmirror.core.errors import UsageError

__all__ = [
    "WrongValue",
    "above_0",
    "check_kind",
    "checked_seconds",
    "directory_path",
    "kinds",
    "nearest",
    "one_of",
    "text",
    "whole",
    "wrong_value",
    "yes_or_no",
]

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)(::[A-Za-z0-9+.-]*)*:/+")  # one slash, if somebody made a Path of it


class WrongValue(ValueError):
    """What is wrong with a value; ``at`` is the place inside it, such as ``[1].url``; ``hint`` may say what to do."""

    def __init__(self, why: str, at: str = "", hint: str = "") -> None:
        super().__init__(why)
        self.why, self.at, self.hint = why, at, hint


def wrong_value(given: Any, must: str, at: str = "") -> WrongValue:
    """Return the error that says what a value is and what it must be."""
    shown = repr(given) if isinstance(given, str) else "a table" if isinstance(given, dict) else str(given)
    if isinstance(given, bool):
        shown = shown.lower()
    return WrongValue(f"is {shown}; it must be {must}", at)


def text(given: Any) -> str:
    """Check that a value is a text and not empty."""
    if not isinstance(given, str) or not given:
        raise wrong_value(given, "text")
    return given


def check_kind(given: object, known: Sequence[str]) -> None:
    """Check that a kind which a caller asks for, if any, is one of those that there are.

    Raises:
        UsageError: It is not.
    """
    if given is not None and not (isinstance(given, str) and given in known):
        raise UsageError(f"There is no kind {given!r}.", hint=f"The kinds are {', '.join(known)}.")


def checked_seconds(given: object, name: str = "timeout_s") -> float:
    """Return the limit of a wait, in seconds; below 0, as what is left of a deadline may be, it does not wait.

    Raises:
        UsageError: It is not a number.
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or math.isnan(given):
        raise UsageError(
            f"{name} is {given!r}; it must be a number of seconds.", hint=f"Write {name}=600.0, for example."
        )
    return max(0.0, float(given))


def directory_path(given: str) -> str:
    """Check the path of a directory. A URL is refused: it would name a directory called after its scheme."""
    url = _URL.match(given)
    if url is None:
        return given
    hint = "Give a directory on this machine's disk, and the URL as a mirror: mirrors=[...], or --mirror."
    if url[1].lower() == "file":
        rest = given[url.end() :]
        hint = f"Write the path alone: /{'directory' if '@' in rest else rest}"
    raise WrongValue(f"is a {url[1]}:// URL; it must be the path of a directory", hint=hint)  # it may hold a password


def whole(least: int, *, none: bool = False) -> Callable[[Any], int | None]:
    """Check a whole number of at least ``least``.

    Args:
        least: The smallest allowed value.
        none: Also accept the word "none" and return None, since TOML and the environment have no None.
    """

    def check(given: Any) -> int | None:
        if none and given == "none":
            return None
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise wrong_value(given, f"a whole number from {least} up" + (', or "none"' if none else ""))
        return given

    return check


def above_0(given: Any) -> float:
    """Check a number above 0."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise wrong_value(given, "a number above 0")
    return float(given)


def yes_or_no(given: Any) -> bool:
    """Check a truth value."""
    if not isinstance(given, bool):
        raise wrong_value(given, "true or false")
    return given


def one_of(*words: str) -> Callable[[Any], str]:
    """Return a check that a value is one of these words."""

    def check(given: Any) -> str:
        if given not in words:
            raise wrong_value(given, " or ".join(f'"{word}"' for word in words))
        return str(given)

    return check


def kinds(given: Any) -> tuple[str, ...]:
    """Check the list of kinds that a save writes."""
    names = list(given) if isinstance(given, list | tuple) else []
    if names not in (["dcp"], ["model"], ["dcp", "model"], ["model", "dcp"]):
        raise wrong_value(given, 'a list of "dcp", "model" or both')
    return tuple(names)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the known name, in any table, that was probably meant; list all of them if none is similar.

    Args:
        name: What the user wrote.
        known: The known names.
        prefix: A prefix that all of them share, which does not count as similarity.
    """
    from difflib import get_close_matches  # needed only after a mistake

    name, names = name.removeprefix(prefix), [one.removeprefix(prefix) for one in known]
    by_last = {one.rpartition(".")[2]: one for one in names}
    close = [one for one in names if len(name) > 3 and name in one] or get_close_matches(name, names, 1)
    close = close or [by_last[last] for last in get_close_matches(name.rpartition(".")[2], by_last, 1)]
    return f"(did you mean {prefix}{close[0]}?)" if close else f"(there are {', '.join(known)})"
