"""Settings: one set of names for Python, the file, the environment and the flags, and where each value comes from.

In rising order of priority: the default, the file, ``CKPTMIRROR_*`` (with an underscore for a dot in a name), the flag.

Rules:
* ``SETTINGS`` lists every setting; an unknown key or variable is an error that names the nearest one.
* The file is the one that ``local/settings_file.py`` finds, or that ``CKPTMIRROR_CONFIG`` names.
* A value comes whole from the highest source that has it; an empty variable counts as unset. Lists are not merged.
* A path in a file is relative to the file, any other path to the working directory; ``~`` is the home directory.
* Every mistake is a ``ConfigError`` that says where it is and what would be right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmirror.core import setting_checks as checks
from ckptmirror.core.errors import ConfigError
from ckptmirror.core.model import SAVED_KINDS
from ckptmirror.core.retention import Retention
from ckptmirror.flow.places.mirrors import MirrorSpec, mirror_specs
from ckptmirror.local.settings_file import FILE_NAME, SettingsFile, find_file, named_file

__all__ = ["FILE_VARIABLE", "SETTINGS", "Setting", "Settings", "Value", "load_settings"]

FILE_VARIABLE = "CKPTMIRROR_CONFIG"
_PREFIX = "CKPTMIRROR_"
_NO_SETTINGS = ("CKPTMIRROR_CRASH_", "CKPTMIRROR_CAMPAIGN")  # control crash tests
_STORES_OWN = (  # as Google's own variables, read where a store is opened
    "CKPTMIRROR_GCS_CREDENTIALS",
    "CKPTMIRROR_GCS_ENDPOINT",
    "CKPTMIRROR_RETRY_S",
)
_HINT = "Correct it, then see every setting with `ckptmirror config`."
_UNSET_HINT = "Unset it, or correct its name: `ckptmirror config` lists every setting."


# -- two values that are ours alone -------------------------------------------------------------------------


def _path(given: Any) -> Path:
    if not isinstance(given, str | Path) or not str(given) or "\0" in str(given):
        raise checks.wrong_value(given, "a path")
    try:
        return Path(checks.directory_path(str(given))).expanduser()
    except RuntimeError as error:
        raise checks.wrong_value(given, "a path; there is no user of that name") from error


def _paths(given: Any) -> tuple[Path, ...]:
    if not isinstance(given, list | tuple):
        raise checks.wrong_value(given, "a list of paths")
    return tuple(map(_path, given))


def _mirrors(given: Any) -> tuple[MirrorSpec, ...]:
    if isinstance(given, list | tuple):
        given = [_mirror(one, f"[{number}]") for number, one in enumerate(given)]
    elif not isinstance(given, str):  # a single URL gets a message of its own, which does not repeat it
        raise checks.wrong_value(given, "a list of URLs, or of tables with a url")
    return tuple(mirror_specs(given))


_MIRROR: dict[str, Callable[[Any], Any]] = {
    "url": checks.text,
    "required": checks.yes_or_no,
    "bytes_per_s": checks.above_0,
    "requests_per_s": checks.above_0,
}


def _mirror(given: Any, at: str) -> MirrorSpec:
    if isinstance(given, str):
        given = {"url": given}
    if not isinstance(given, dict) or "url" not in given:
        raise checks.wrong_value(given, "a URL, or a table with a url", at)
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _MIRROR:
            raise checks.WrongValue(f"is nothing that a mirror has {checks.nearest(key, _MIRROR)}", f"{at}.{key}")
        try:
            checked[key] = _MIRROR[key](value)
        except checks.WrongValue as wrong:
            raise checks.WrongValue(wrong.why, f"{at}.{key}") from wrong
    try:
        (spec,) = mirror_specs([MirrorSpec(**checked)])
    except ConfigError as error:
        why = str(error).rstrip(".")
        first = why.partition(" ")[0]
        why = first.lower() + why.removeprefix(first) if first in ("A", "The", "There") else why  # it is mid-sentence
        raise checks.WrongValue(f"is not understood: {why}", at, error.hint) from error
    return spec


# -- what the text of a variable means ----------------------------------------------------------------------


def _number(text: str) -> int | float | str:
    """Convert a text to a number; return it unchanged if it is not one, for the check to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _truth(text: str) -> bool | str:
    """Convert a text to a truth value; return it unchanged if it is not one, for the check to refuse."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# -- the settings -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: As in Python and in the file; the part before a dot is a table.
        default: The value if no source sets one.
        meaning: One line, for the reference.
        check: Converts a value from a file or a flag, or refuses it.
        read: Converts the text of a variable to the value that a file would hold.
        flag: The command-line flag, if there is one.
    """

    name: str
    default: Any
    meaning: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    flag: str = ""

    @property
    def variable(self) -> str:
        """The name of its environment variable."""
        return _PREFIX + self.name.replace(".", "_").upper()


SETTINGS: tuple[Setting, ...] = (
    Setting("root", None, "the directory on local disk that the run saves to", _path, flag="--root"),
    Setting("mirrors", (), "the mirrors that get a copy of every save", _mirrors, _listed, flag="--mirror"),
    Setting("kinds", SAVED_KINDS, "the kinds that a save writes", checks.kinds, _listed),
    Setting(
        "mode",
        "async",
        "`async`: a save returns after the host copy; `blocking`: after the commit",
        checks.one_of("async", "blocking"),
    ),
    Setting(
        "state_dir", None, "node-local directory for the uploads table, if the root is on a network file system", _path
    ),
    Setting(
        "persistent_dir", None, "where emergency snapshots are copied to, on a disk that outlives the machine", _path
    ),
    Setting("signing_key", None, "PEM file with the Ed25519 private key that signs what is committed", _path),
    Setting("verify_keys", (), "PEM files with public keys: only what one of them signed is believed", _paths, _listed),
    Setting("workers_per_mirror", 2, "upload threads for each mirror", checks.whole(1), _number),
    Setting(
        "share_downloads",
        False,
        "at a start of several nodes, what several of them need is fetched by one, which sends it to the others",
        checks.yes_or_no,
        _truth,
    ),
    Setting("timeout_s", 600.0, "how long a rank waits for another rank, in seconds", checks.above_0, _number),
    Setting(
        "retention.keep_last",
        None,
        "keep this many of the newest steps on local disk; `none` keeps all",
        checks.whole(1, none=True),
        _number,
        flag="--keep-last",
    ),
    Setting(
        "retention.keep_every",
        None,
        "also keep steps divisible by this",
        checks.whole(1, none=True),
        _number,
        flag="--keep-every",
    ),
    Setting(
        "retention.keep_best",
        0,
        "also keep this many steps with the best metric",
        checks.whole(0),
        _number,
        "--keep-best",
    ),
    Setting("retention.metric", None, "a name that you pass in `save(metrics=…)`", checks.text, flag="--metric"),
    Setting(
        "retention.mode",
        "min",
        "whether the smallest or the largest value is best",
        checks.one_of("min", "max"),
        flag="--mode",
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
_BY_VARIABLE["CKPTMIRROR_MIRROR"] = _BY_NAME["mirrors"]  # named like the flag


@dataclass(frozen=True, slots=True)
class Value:
    """A value, and where it comes from: ``default``, ``ckptmirror.toml:4``, ``CKPTMIRROR_ROOT`` or ``--root``."""

    value: Any
    source: str


@dataclass(frozen=True)
class Settings:
    """Every setting with its value.

    Attributes:
        values: By name, in the order of ``SETTINGS``.
        file: The file that was read; None if there is none.
    """

    values: Mapping[str, Value]
    file: Path | None

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    @property
    def retention(self) -> Retention:
        """What to keep on local disk."""
        inside = {name: value for name, value in self.values.items() if name.startswith("retention.")}
        try:
            return Retention(**{name.partition(".")[2]: value.value for name, value in inside.items()})
        except ConfigError as error:
            where = dict.fromkeys(value.source for value in inside.values() if value.source != "default")
            raise ConfigError(f"{', '.join(where)}: retention: {error}", hint=error.hint) from error

    def manager_arguments(self) -> dict[str, Any]:
        """Return what a manager takes: ``CheckpointManager(**load_settings().manager_arguments())``.

        Raises:
            ConfigError: No root is set.
        """
        if self["root"] is None:
            raise ConfigError(
                "No root is set.", hint=f"Set root in {FILE_NAME}, or set CKPTMIRROR_ROOT; then `ckptmirror config`."
            )
        return {name: self[name] for name in self.values if "." not in name} | {"retention": self.retention}


# -- where they come from -----------------------------------------------------------------------------------


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    directory: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Gather the settings of this process.

    Args:
        flags: Values from the program's command line, by name of the setting; None means not given.
        directory: Where the search for the file begins; None: the working directory.
        environ: The environment; None: that of this process.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    values = {setting.name: Value(setting.default, "default") for setting in SETTINGS}
    found = named_file(Path(named), FILE_VARIABLE) if (named := environ.get(FILE_VARIABLE)) else find_file(directory)
    if found is not None:
        values |= _of_file(found)
    values |= _of_environment(environ)
    if not isinstance(flags, Mapping | None):
        raise ConfigError(f"flags is {flags!r}; it must be a dict of settings.", hint='Write flags={"root": "..."}.')
    for name, given in (flags or {}).items():
        if given is not None:
            source = _BY_NAME[name].flag if name in _BY_NAME else ""
            values[name] = _checked(name, given, _always(source or name))
    settings = Settings(values, found.path if found is not None else None)
    _ = settings.retention  # finds contradictions now, not at the first deletion
    return settings


def _of_file(file: SettingsFile) -> dict[str, Value]:
    tables = {name.partition(".")[0] for name in _BY_NAME if "." in name}
    flat: dict[str, Any] = {}
    for key, given in file.values.items():
        if key not in tables:
            flat[key] = given
        elif isinstance(given, dict):
            flat |= {f"{key}.{inner}": value for inner, value in given.items()}
        else:
            raise ConfigError(f"{file.where(key)}: {key} {checks.wrong_value(given, f'a table, [{key}]')}.", hint=_HINT)
    values = {name: _checked(name, given, file.where) for name, given in flat.items()}
    for name in {"root", "state_dir", "persistent_dir", "signing_key"} & values.keys():
        values[name] = Value(file.path.parent / values[name].value, values[name].source)
    if (keys := values.get("verify_keys")) is not None:
        values["verify_keys"] = Value(tuple(file.path.parent / path for path in keys.value), keys.source)
    return values


def _of_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(_PREFIX) or variable.startswith(_NO_SETTINGS):
            continue
        if variable in (FILE_VARIABLE, *_STORES_OWN):
            continue
        if variable not in _BY_VARIABLE:
            near = checks.nearest(variable, _BY_VARIABLE, _PREFIX)
            raise ConfigError(f"{variable} is set, but there is no such setting {near}.", hint=_UNSET_HINT)
        setting = _BY_VARIABLE[variable]
        if text and setting.name in values:
            twice = f"{values[setting.name].source} and {variable} are both set, and mean the same."
            raise ConfigError(twice, hint="Unset one of them.")
        if text:
            values[setting.name] = _checked(setting.name, setting.read(text), _always(variable))
    return values


def _always(source: str) -> Callable[[str], str]:
    return lambda _: source


def _checked(name: str, given: Any, where: Callable[[str], str]) -> Value:
    if name not in _BY_NAME:
        raise ConfigError(f"{where(name)}: there is no setting {name} {checks.nearest(name, _BY_NAME)}.", hint=_HINT)
    try:
        return Value(_BY_NAME[name].check(given), where(name))
    except checks.WrongValue as wrong:
        key = name + wrong.at
        raise ConfigError(f"{where(key)}: {key} {wrong.why}.", hint=wrong.hint or _HINT) from wrong
    except ConfigError as error:
        raise ConfigError(f"{where(name)}: {name}: {error}", hint=error.hint) from error
