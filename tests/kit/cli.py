"""Runs the real command line in processes of its own, and reads how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import CkptMirrorError

CONSOLE_SCRIPT = Path(sys.executable).with_name("ckptmirror")
AS_MODULE = (sys.executable, "-m", "ckptmirror")
LIMIT_S = 60.0
IMPATIENT = {"CKPTMIRROR_RETRY_S": "0.5"}  # for tests of what is said in the end where nobody answers


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without anything that would point a verb somewhere else."""
    ours = ("CKPTMIRROR_", "STORAGE_", "GOOGLE_", "CLOUDSDK_", "GCE_", "NO_GCE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return kept | {"CKPTMIRROR_RETRY_S": os.environ.get("CKPTMIRROR_RETRY_S", "8")} | more


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end."""
    return subprocess.run(
        [*AS_MODULE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=clean_environment(**(env or {})),
        cwd=cwd,
        check=False,
        **more,
    )


def start(
    *arguments: str | Path, env: Mapping[str, str] | None = None, python: Sequence[str] = (), **more: Any
) -> subprocess.Popen[str]:
    """Start a verb."""
    command = [sys.executable, *python, "-m", "ckptmirror", *map(str, arguments)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    return subprocess.Popen(command, env=clean_environment(**(env or {})), **options)


def assert_tells(ended: subprocess.CompletedProcess[str], exit_code: int, *words: str, stdout: str | None = "") -> None:
    """The verb ended with this code and one sentence and a hint that hold these words; never with a traceback."""
    assert ended.returncode == exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    if stdout is not None:
        assert ended.stdout == stdout
    for word in words:
        assert word in ended.stderr, ended.stderr
    if exit_code not in (0, 2):
        lines = ended.stderr.splitlines()
        at = max(number for number, line in enumerate(lines) if line.startswith("ckptmirror: "))
        assert lines[at + 1].startswith("  "), f"no hint: {ended.stderr}"


def assert_explains(error: CkptMirrorError, exit_code: int, *words: str) -> None:
    assert error.exit_code == exit_code
    assert error.hint
    for word in words:
        assert word in str(error)
