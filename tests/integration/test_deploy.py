"""The units in deploy/ name verbs, options and exit codes that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from ckptmirror.cli._program import program
from ckptmirror.core import errors

HOME = Path(__file__).resolve().parents[2]
UNITS = sorted((HOME / "deploy" / "systemd").iterdir())


def settings(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_verb_with_options_that_exist(unit: Path):
    words = shlex.split(settings(unit)["ExecStart"])
    assert words[0].endswith("/bin/ckptmirror")
    command = program.get_command(click.Context(program), words[1])
    assert command is not None
    assert command.make_context(words[1], words[2:]).params["root"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_again_after_what_a_wait_may_mend_and_after_nothing_else(unit: Path):
    again = set(map(int, settings(unit)["RestartForceExitStatus"].split()))
    never = set(map(int, settings(unit)["RestartPreventExitStatus"].split()))
    classes = [getattr(errors, name) for name in errors.__all__]
    assert again == {5, 8, 11}
    assert again | never == {cls.exit_code for cls in classes}
    assert not again & never


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_for_what_is_mounted_from_elsewhere(unit: Path):
    assert "remote-fs.target" in settings(unit)["After"].split()


def test_what_the_readme_lets_a_unit_write_to_is_mounted_first():
    drop_in = (HOME / "deploy" / "README.md").read_text().partition("```ini")[2].partition("```")[0]
    written, waited_for = (re.findall(rf"{name}=(\S+)", drop_in) for name in ("ReadWritePaths", "RequiresMountsFor"))
    assert written == waited_for == ["/nfs/run-17"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program_path = shutil.which("true")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/ckptmirror/bin/ckptmirror", str(program_path)))
    instance = tmp_path / unit.name.replace("@.", "@local\\x2dssd-run\\x2d17.")
    command = ["systemd-analyze", "verify", "--man=no", str(instance)]
    instance.symlink_to(copy.name)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if unit.stem.partition("@")[0] in line]
    assert complaints == []
    assert done.returncode == 0, done.stderr
