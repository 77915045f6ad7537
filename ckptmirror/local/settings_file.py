"""The file of settings: its place, its content, and the line that sets each key.

Rules:
* It is the nearest ``ckptmirror.toml``, or ``pyproject.toml`` with ``[tool.ckptmirror]``, in the directory where the
  search begins or above it. The search ends at the root of a repository and at the home directory, and before a
  directory such as ``/tmp``, into which every user may put a file. In one directory ``ckptmirror.toml`` comes first;
  files are never merged.
* It is a regular file of at most 1 MiB (a link to one will do), or ``/dev/null``. One that the search finds is refused
  if another user could have put it there (``own_files``) or may write to it. One that a variable names was chosen by
  the user.
* An error about the file is one sentence with the line.
* The standard parser does not report lines, so each statement is also parsed on its own. Its time grows with the square
  of the parts of a dotted key, so these have a limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from ckptmirror.core.errors import ConfigError
from ckptmirror.local.own_files import is_planted

__all__ = ["FILE_NAME", "SettingsFile", "find_file", "named_file"]

FILE_NAME = "ckptmirror.toml"
_PROJECT_NAME = "pyproject.toml"
_SECTION = ("tool", "ckptmirror")
_HINT = "Correct the file, then see it with `ckptmirror config`."
_LIMIT_BYTES = 1024 * 1024
_MAX_PARTS = 64
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<newline>\n)|(?P<open>[\[{])|(?P<close>[\]}])|(?P<dot>\.)"""
    r"""|(?P<part>"{3}(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?!"")(?:\\.|[^"\\\n])*"|'(?!'')[^'\n]*'|[\w+-]+)"""
    r"""|(?P<endless>["'])|(?P<other>[^\s])""",
    re.DOTALL,
)


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
    return _read(path, _SECTION if path.name == _PROJECT_NAME else (), is_named=True)


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


def _read(path: Path, section: Sequence[str] = (), *, is_named: bool = False) -> SettingsFile | None:
    """Read a table of a file, or the whole file if ``section`` is empty; None if the file has no such table."""
    text = _text(path)
    if section and section[-1] not in text:
        return None  # other errors in it are not for us to report
    if not is_named:
        _check_origin(path)
    try:
        statements = list(_statements(text))
        values = _inner(tomllib.loads(text), section)
        lines = _lines(statements, section)
    except RecursionError as error:
        raise ConfigError(f"{SettingsFile(path, {}, {}).where()}: this is nested too deeply.", hint=_HINT) from error
    except ValueError as error:  # also a number of too many digits
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
    return SettingsFile(path, values, lines)


def _text(path: Path) -> str:
    try:
        # A pipe would block the open.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) and str(path) != os.devnull:
                raise ConfigError(f"{path} cannot be read: it is not a regular file.", hint=_HINT)
            data = file.read(_LIMIT_BYTES + 1)
        if len(data) > _LIMIT_BYTES:
            raise ConfigError(f"{path} has more than {_LIMIT_BYTES} bytes, the limit for a settings file.", hint=_HINT)
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8, as TOML is.", hint=_HINT) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint=_HINT) from error


def _check_origin(path: Path) -> None:
    """Check that only the user, or whoever the user trusts, wrote a file that the search found."""
    try:
        name, facts, place = path.lstat(), path.stat(), path.parent.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint=_HINT) from error
    for found in (name, facts):
        if is_planted(found, place):
            why = f"it belongs to user id {found.st_uid}, in a directory that everyone may write to"
            hint = f"To use it, set CKPTMIRROR_CONFIG={path}; else move it away, or set CKPTMIRROR_CONFIG to another."
            raise ConfigError(f"{path} is not read: {why}.", hint=hint)
    if facts.st_mode & stat.S_IWOTH:
        hint = f"Read it, then `chmod o-w {quote(str(path))}`; or set CKPTMIRROR_CONFIG={path} to use it as it is."
        raise ConfigError(f"{path} is not read: every user may write to it.", hint=hint)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each statement with the line on which it begins. Of text that is not TOML, what it yields means nothing.

    Raises:
        RecursionError: A key has too many parts.
    """
    line, begin, depth, dots = 1, -1, 0, 0
    began = 1  # the line of the statement
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "newline" and depth <= 0 and begin >= 0:
            yield began, text[begin : token.start()]
            begin, depth = -1, 0
        elif kind not in ("newline", "comment") and begin < 0:
            begin, began = token.start(), line
        depth += (kind == "open") - (kind == "close")
        dots = dots + 1 if kind == "dot" else dots if kind == "part" else 0
        if dots >= _MAX_PARTS:
            raise RecursionError
        if kind == "endless":
            return
        line += token[0].count("\n")
    if begin >= 0:
        yield began, text[begin:]


def _lines(statements: Iterable[tuple[int, str]], section: Sequence[str]) -> dict[str, int]:
    found = dict[str, int]()
    head: list[str] = []
    last: dict[str, int] = {}  # the number of the last table of each array of tables
    for line, statement in statements:
        table: Any = tomllib.loads(statement)
        if statement.startswith("["):
            head, table = _head(table, last), {}
        for part in reversed(head):
            table = {part: table}
        for name in _keys(_inner(table, section) or {}):
            found.setdefault(name.removesuffix("]").rpartition("[")[0] or name, line)
            found.setdefault(name, line)
    return found


def _head(table: Any, last: dict[str, int]) -> list[str]:
    """Return the names of a header's tables, each table of an array with its number: ``mirrors[1]``."""
    head: list[str] = []
    while table:
        ((key, table),) = table.items()
        name = ".".join((*head, key))
        if isinstance(table, list):
            last[name] = last.get(name, -1) + 1
            table = table[0]
        head.append(f"{key}[{last[name]}]" if name in last else key)
    return head


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
