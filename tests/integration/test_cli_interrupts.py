"""Ctrl-C and SIGTERM at any moment: one sentence, exit code 130 or 143, and the same command continues."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.cli._interrupts import Interrupted
from tests.kit.cli import LIMIT_S, clean_environment, run, start
from tests.kit.roots import make_mirrored, make_pending

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SENTENCES = {
    signal.SIGINT: "ckptmirror: interrupted; the same command continues where it stopped.\n",
    signal.SIGTERM: "ckptmirror: terminated; the same command continues where it stopped.\n",
}

# Sends the process a signal at its nth change of the disk, whichever thread makes it.
SIGNALLED = """
import os, sys
from ckptmirror.local import crashpoints
at, signum, changes = int(sys.argv[1]), int(sys.argv[2]), 0
def point(name):
    global changes
    changes += 1
    if changes == at:
        os.kill(os.getpid(), signum)
crashpoints.point = point
from ckptmirror.cli import main
sys.argv[1:] = sys.argv[3:]
code = main()
if not at:
    print(changes, file=sys.stderr)
sys.exit(code)
"""


def signalled(at: int, signum: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SIGNALLED, str(at), str(int(signum)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=clean_environment())


def scene_of(verb: str, folder: Path) -> list[str]:
    if verb == "drain":
        root, _ = make_pending(folder, f"file://{folder}/mirror", 100, 200)
        return ["drain", "--root", str(root)]
    root, url, _ = make_mirrored(folder, 200)
    if verb == "push":
        return ["push", "--root", str(root), "--mirror", f"file://{folder}/second"]
    return ["stage", "--step", "200", "--mirror", url, "--dest", str(folder / "eval"), "--full"]


@pytest.mark.parametrize("verb", ["stage", "drain", "push"])
def test_a_signal_at_any_change_of_the_disk_ends_in_a_sentence_and_the_same_command_continues(
    verb: str, tmp_path: Path
):
    arguments = scene_of(verb, tmp_path / "scene")
    prepared = tmp_path / "prepared"
    shutil.copytree(tmp_path / "scene", prepared)
    counted = signalled(0, 0, *arguments)
    assert counted.returncode == 0
    changes = int(counted.stderr.splitlines()[-1])
    assert changes > 20
    for turn, at in enumerate(range(1, changes, max(1, changes // 4))):
        signum = (signal.SIGINT, signal.SIGTERM)[turn % 2]
        shutil.rmtree(tmp_path / "scene")
        shutil.copytree(prepared, tmp_path / "scene")
        ended = signalled(at, signum, *arguments)
        if ended.returncode == 0 and at > changes // 2:
            continue  # threads share the changes out differently each time: this run was over before the signal came
        assert ended.returncode == CODES[signum], (at, ended.stderr)
        assert (ended.stdout, ended.stderr) == ("", SENTENCES[signum])
        again = run(*arguments)
        assert (again.returncode, again.stderr) == (0, "")


class Silent:
    """A server that takes a connection and says nothing."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.settimeout(LIMIT_S)
        self.env = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.socket.getsockname()[1]}"}


@pytest.fixture
def silent() -> Iterator[Silent]:
    found = Silent()
    yield found
    found.socket.close()


@pytest.mark.parametrize("signum", list(CODES))
@pytest.mark.parametrize("verb", ["stage", "ls", "push", "drain", "verify", "rewind"])
def test_a_verb_that_waits_for_a_silent_mirror_leaves_soon(
    verb: str, signum: signal.Signals, silent: Silent, tmp_path: Path
):
    url = "gs://a-bucket/run"
    if verb in ("push", "drain", "rewind"):
        root, _ = make_pending(tmp_path, url, 100)
        more = {"push": ["--mirror", url], "rewind": ["--step", "100"]}.get(verb, [])
        arguments = [verb, "--root", str(root), *more]
    else:
        arguments = (
            ["stage", "--step", "1", "--mirror", url, "--dest", str(tmp_path)] if verb == "stage" else [verb, url]
        )
    process = start(*arguments, env=silent.env)
    try:
        connection, _ = silent.socket.accept()
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=LIMIT_S)  # the mirror does not answer at all
        assert (process.returncode, stdout, stderr) == (CODES[signum], "", SENTENCES[signum])
        connection.close()
    finally:
        process.kill()


def test_a_second_signal_ends_a_verb_at_once(silent: Silent):
    process = start("ls", "gs://a-bucket/run", env=silent.env)
    try:
        silent.socket.accept()[0].close()
        connection, _ = silent.socket.accept()  # tried again: it waits here
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 143
        assert set(stderr.splitlines(keepends=True)) == {SENTENCES[signal.SIGTERM]}
        connection.close()
    finally:
        process.kill()


def test_an_exit_that_takes_longer_than_its_limit_is_told_of_once(capfd: pytest.CaptureFixture[str]):
    interrupted = Interrupted(signal.SIGTERM)
    interrupted.tell()
    interrupted.tell()  # when the time to exit is over
    assert capfd.readouterr().err == SENTENCES[signal.SIGTERM]


def test_what_tests_an_interrupt_hears_it_where_the_caller_ignores_it():
    """A script that runs the tests in the background ignores SIGINT, and so would they."""
    tests = ("tests/unit/local/test_daemon_pool.py", "-k", "interrupt_waits_for_all", "--timeout=60")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    ended = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command],
        cwd=HOME,
        env={name: value for name, value in clean_environment().items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
