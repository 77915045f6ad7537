"""The file of settings: its place, its content, and the line that sets each key.

Rules:
* It is the nearest ``ckptmirror.toml``, or ``pyproject.toml`` with ``[tool.ckptmirror]``, in the directory where the
  search begins or above it. The search ends at the root of a repository and at the home directory, and before a
  directory such as ``/tmp``, into which every user may put a file. In one directory ``ckptmirror.toml`` comes first;
  files are never merged.
* An error about the file is one sentence with the line.
* The standard parser does not report lines, so it parses longer and longer beginnings of the file. The statement after
  which a key first appears sets that key. This is exact, because an incomplete statement is not valid TOML.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import ConfigError

__all__ = ["FILE_NAME", "SettingsFile", "find_file", "named_file"]

FILE_NAME = "ckptmirror.toml"
_PROJECT_NAME = "pyproject.toml"
_SECTION = ("tool", "ckptmirror")
_HINT = "Correct the file, then see it with `ckptmirror config`."


@dataclass(frozen=True)
class SettingsFile:
    """The settings of a file, as written.

    Attributes:
        lines: The line of each key, from 1: ``root``, ``retention.keep_last``, ``mirrors[1].url``.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def where(self, key: str = "") -> str:
        """Return where a key is set, as ``file:line``; below the working directory with the relative path."""
        shown = self.path
        with contextlib.suppress(ValueError, OSError):
            shown = shown.relative_to(Path.cwd())
        return f"{shown}:{self.lines[key]}" if key in self.lines else str(shown)


def named_file(path: Path, variable: str) -> SettingsFile | None:
    """Read the file that a variable names.

    Raises:
        ConfigError: It does not exist, cannot be read, or is not valid TOML.
    """
    path = path.absolute()
    if not _mode(path):
        raise ConfigError(f"{variable}: there is no {path}.", hint=f"Correct {variable}, or unset it.")
    return _read(path, _SECTION if path.name == _PROJECT_NAME else ())


def find_file(directory: str | Path | None = None) -> SettingsFile | None:
    """Find and read the file that applies to a directory (None: the working directory); None if there is none.

    Raises:
        ConfigError: It cannot be read, or is not valid TOML.
    """
    try:
        start = Path(directory or Path.cwd()).absolute()
    except FileNotFoundError:
        return None  # the working directory was removed
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - pathlib's raises where nobody has one
    for place in (start, *start.parents):
        if place != start and _is_for_everyone(place):
            return None  # every user may put a file into /tmp
        if _mode(place / FILE_NAME):
            return _read(place / FILE_NAME)
        if _mode(place / _PROJECT_NAME) and (found := _read(place / _PROJECT_NAME, _SECTION)) is not None:
            return found
        if _mode(place / ".git") or _mode(place / ".hg") or place == home:
            return None
    return None


def _mode(path: Path) -> int:
    """Return the mode of a file or directory; 0 if there is none, or it may not be read."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _is_for_everyone(place: Path) -> bool:
    mode = _mode(place)
    return bool(mode & stat.S_ISVTX and mode & stat.S_IWOTH)


def _read(path: Path, section: Sequence[str] = ()) -> SettingsFile | None:
    """Read a table of a file, or the whole file if ``section`` is empty; None if the file has no such table."""
    text = _text(path)
    if section and section[-1] not in text:
        return None  # other errors in it are not for us to report
    try:
        values = _inner(tomllib.loads(text), section)
    except RecursionError as error:
        raise ConfigError(f"{SettingsFile(path, {}, {}).where()}: this is nested too deeply.", hint=_HINT) from error
    except tomllib.TOMLDecodeError as error:
        what = re.sub(r" \(at .*\)$", "", str(error))
        at = re.search(r"at line (\d+)", str(error))
        line = int(at[1]) if at else text.rstrip().count("\n") + 1
        raise ConfigError(
            f"{SettingsFile(path, {}, {'': line}).where()}: this is not TOML: {what}.", hint=_HINT
        ) from error
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(f"{SettingsFile(path, {}, {}).where()}: {'.'.join(section)} is not a table.", hint=_HINT)
    return SettingsFile(path, values, _lines(text, section, values))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8, as TOML is.", hint=_HINT) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint=_HINT) from error


def _lines(text: str, section: Sequence[str], values: Mapping[str, Any]) -> dict[str, int]:
    lines = text.split("\n")
    head = re.compile(r"\s*\[+\s*" + r"\s*\.\s*".join(map(re.escape, section)) + r"\b") if section else None
    begin = next((number for number, line in enumerate(lines) if head and head.match(line)), 0)
    wanted, found, known = set(_keys(values)), dict[str, int](), begin
    for end in range(begin + 1, len(lines) + 1):
        try:
            table = _inner(tomllib.loads("\n".join(lines[begin:end])), section)
        except tomllib.TOMLDecodeError:
            continue  # it ends within a statement
        for key in _keys(table or {}):
            found.setdefault(key, known + 1)
        if wanted <= found.keys():
            break
        known = end
    return found


def _keys(value: Any, name: str = "") -> Iterator[str]:
    if name:
        yield name
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _keys(inner, f"{name}[{number}]")


def _inner(table: Any, section: Sequence[str]) -> Any:
    for key in section:
        table = table.get(key) if isinstance(table, dict) else None
    return table
