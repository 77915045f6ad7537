"""What all crash tests share: the story servers, and one trace of everything that changes a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.crash.campaign import LANES, REPOSITORY, StoryServer
from tests.crash.trace import CALLS, Call, calls


@pytest.fixture(scope="session")
def servers() -> Iterator[list[StoryServer]]:
    """Processes with torch imported, each of which forks a child per story."""
    with ExitStack() as stack:
        servers = [StoryServer() for _ in range(LANES)]
        for server in servers:
            stack.callback(server.close)
            server.await_ready()
        yield servers


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Call], list[Path]]:
    """The system calls of a whole life, told in a process of its own under strace; and the directories that count."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    place = tmp_path_factory.mktemp("traced") / "place"
    place.mkdir()
    output = place.parent / "trace"
    command = ["strace", "-f", "-qq", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-o", str(output)]
    told = subprocess.run(
        [*command, sys.executable, "-m", "tests.crash.story_server", "whole_life", str(place)],
        cwd=REPOSITORY,
        env=os.environ | {"CKPTMIRROR_CRASH_MARK": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if "ptrace" in told.stderr.lower():
        pytest.skip(f"no process may be traced here: {told.stderr[-200:]}")
    assert told.returncode == 0, told.stderr[-4000:]
    with open(output, errors="replace") as lines:
        return list(calls(lines)), [place / "root", place / "root2", place / "mirror"]
