"""``ckptmirror config``: every setting, its value, and where that comes from."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

from ckptmirror.cli._exit_codes import exit_codes
from ckptmirror.cli._options import json_option, print_json, settings
from ckptmirror.core.errors import ConfigError


@exit_codes(10)
@click.command(short_help="Show every setting, its value, and where it comes from.")
@json_option
def command(as_json: bool) -> int:
    """Show every setting, its value, and where the value comes from: the default, a line of the file, or a variable.

    If a setting is wrong, it says which one, where, and what would be right, and exits with 10.

    \b
    Examples:
      ckptmirror config
      ckptmirror config --json | jq '.settings[] | select(.source != "default")'
    """
    try:
        found = settings()
    except ConfigError as error:  # not the command that just failed
        error.hint = re.sub(r"(, then see|: `ckptmirror config`) .*", ".", error.hint)
        raise
    from ckptmirror.config import SETTINGS  # with what it stands on already imported

    rows = [(setting, _plain(found[setting.name]), found.values[setting.name].source) for setting in SETTINGS]
    if as_json:
        facts = [
            {"name": setting.name, "value": value, "source": source, "variable": setting.variable, "flag": setting.flag}
            for setting, value, source in rows
        ]
        print_json({"file": None if found.file is None else str(found.file), "settings": facts})
        return 0
    for setting, value, source in rows:
        first, *more = _lines(value)
        print(f"{setting.name:<21} {first:<40} {source}")
        for line in more:
            print(f"{'':<21} {line}")
    print(f"configuration file: {found.file or 'none in this directory or above it'}", file=sys.stderr)
    return 0


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    from dataclasses import asdict

    from ckptmirror.flow.places.mirrors import MirrorSpec

    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, MirrorSpec):
        return asdict(value)
    return value if isinstance(value, int | float | None) else str(value)


def _lines(value: Any) -> list[str]:
    """Return a value as a file would have it, a mirror to a line."""
    if value and isinstance(value, list) and isinstance(value[0], dict):
        return [_mirror(one) for one in value]
    return ["none" if value is None else json.dumps(value, ensure_ascii=False)]


def _mirror(facts: dict[str, Any]) -> str:
    options = {"required": facts["required"]} if not facts["required"] else {}
    limits = {key: value for key, value in facts.items() if key.endswith("_per_s") and value is not None}
    options |= {key: int(value) if value.is_integer() else value for key, value in limits.items()}
    return ", ".join([facts["url"], *(f"{key} = {json.dumps(value)}" for key, value in options.items())])
