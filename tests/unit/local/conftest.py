"""What several tests of the local disk need: a system call trace."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest


@pytest.fixture
def run_traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[str]]]:
    """Run a command under strace; return its output and the lines traced after it looked for ``/begin``."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    report = tmp_path_factory.mktemp("trace") / "trace"

    def run(command: list[str], calls: str, *, inject: str = "") -> tuple[str, list[str]]:
        options = ["-f", "-qq", "-y", "-s", "0", "-e", "signal=none", "-o", str(report), "-e", f"trace=access,{calls}"]
        if inject:
            options += ["-e", f"inject={inject}"]
        done = subprocess.run(["strace", *options, *command], capture_output=True, text=True, timeout=120)
        if "ptrace" in done.stderr and "not permitted" in done.stderr:
            pytest.skip("this machine does not allow tracing")
        assert done.returncode == 0, done.stderr
        lines = report.read_text().splitlines()
        begin = next(number for number, line in enumerate(lines) if '"/begin"' in line)
        return done.stdout, [line for line in lines[begin + 1 :] if "access(" not in line]

    return run
