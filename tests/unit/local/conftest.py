"""What several tests of the local disk need: a system call trace, and small or read-only file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Mount a tmpfs with the given options and return where."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path_factory.mktemp("mounted")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"this machine does not allow mounting: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)
