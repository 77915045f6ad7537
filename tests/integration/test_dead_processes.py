"""A process that was killed is dead, also where nobody has reaped it: its uploads are free, and `status` says so.

The trainer is a real process that leads a root and is sending a file when it is killed.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.local.processes import is_alive, started
from tests.kit.cli import LIMIT_S, clean_environment, run
from tests.kit.roots import make_pending
from tests.kit.terminal import OnTerminal, bare

pytestmark = pytest.mark.long

TRAINER = """
import os, sys, threading
from pathlib import Path
from ckptmirror.core import events
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.decide import Wish
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.flow.start.bring import Bringer
from ckptmirror.flow.start.leader import Node
from tests.kit.faulty_store import FaultyStore, StoreFault

class ForEver(threading.Event):
    def wait(self, timeout=None):
        is_sending.set()
        return super().wait()

root, url, is_sending = Path(sys.argv[1]), sys.argv[2], threading.Event()
node = Node(root, [MirrorSpec(url)], Retention(), events.EventBus())
stuck = StoreFault("upload", times=0, hold=ForEver())
node.mirrors = [Mirror(one.url, one.required, FaultyStore(one.store, [stuck])) for one in node.mirrors]
bringer = Bringer(node, Wish(), events.EventBus())
node.start(bringer.claim(bringer.next()))
is_sending.wait()
print(os.getpid(), flush=True)
threading.Event().wait()
"""

# A parent as PID 1 of many a container: it gets the orphans, and reaps none.
NEVER_REAPS = """
import ctypes, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
parent = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
subprocess.run([sys.executable, "-c", parent, *sys.argv[1:]], check=True)
sys.stdin.read()
"""


@contextmanager
def trainer(root: Path, url: str, *, orphaned: bool) -> Iterator[int]:
    """A trainer that is sending a file; its process id. Whoever started it does not reap it before the end."""
    command = [sys.executable, "-c", TRAINER, str(root), url]
    if orphaned:
        command = [sys.executable, "-c", NEVER_REAPS, *command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=clean_environment(), **pipes) as process:  # type: ignore[call-overload]
        pid = int(process.stdout.readline())
        try:
            yield pid
        finally:
            for one in {pid, process.pid}:
                os.kill(one, signal.SIGKILL)


def kill(pid: int) -> None:
    """Kill a process and wait until it is over, without reaping it."""
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    ready, _, _ = select.select([handle], [], [], LIMIT_S)
    assert ready
    os.close(handle)
    os.kill(pid, 0)  # nobody has reaped it


@pytest.mark.parametrize("orphaned", [False, True], ids=["its parent waits for nothing", "PID 1 never reaps"])
def test_a_drain_takes_over_at_once_what_a_killed_unreaped_trainer_was_sending(orphaned: bool, tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    with trainer(root, f"file://{tmp_path}/mirror", orphaned=orphaned) as pid:
        kill(pid)
        ended = run("drain", "--root", root)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("5 of 5 files verified")


def test_a_drain_says_whom_it_waits_for_and_takes_over_when_that_process_dies(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    with (
        trainer(root, f"file://{tmp_path}/mirror", orphaned=False) as pid,
        OnTerminal("drain", "--root", root, columns=200) as terminal,
    ):
        terminal.until(rf"waiting for process {pid}, which is sending \w+_000100\S* .*; taken over in \d min")
        kill(pid)
        exit_code, stdout, shown = terminal.end()
    assert exit_code == 0, bare(shown)
    assert stdout.startswith("5 of 5 files verified")


def test_status_calls_no_killed_trainer_running(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    with trainer(root, f"file://{tmp_path}/mirror", orphaned=False) as pid:
        assert re.search(rf"^trainer: running \(pid {pid}\b", run("status", "--root", root).stdout, re.MULTILINE)
        assert json.loads(run("status", "--root", root, "--json").stdout)["trainer_alive"] is True
        kill(pid)
        for said in (run("status", "--root", root), run("status", "--root", root, "--json")):
            assert said.returncode == 0
        assert json.loads(said.stdout)["trainer_alive"] is False
        said = run("status", "--root", root)
        assert re.search(rf"^trainer: died while running \(pid {pid}\b", said.stdout, re.MULTILINE), said.stdout
    said = run("status", "--root", root)  # and now its number is nobody's
    assert "trainer: died while running" in said.stdout


def test_a_process_that_got_the_number_of_a_dead_trainer_is_not_taken_for_it(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    with trainer(root, f"file://{tmp_path}/mirror", orphaned=False) as pid:
        kill(pid)
    path = root / names.STATUS_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": os.getpid()}))
    assert "trainer: died while running" in run("status", "--root", root).stdout


def test_a_trainer_in_another_container_of_the_machine_is_not_called_dead(tmp_path: Path):
    """They share the name of the host, and not the numbers of processes."""
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    with trainer(root, f"file://{tmp_path}/mirror", orphaned=False) as pid:
        path = root / names.STATUS_NAME
        said = json.loads(path.read_text())
        assert said["pid_namespace"] == str(Path("/proc/self/ns/pid").readlink())
        path.write_text(json.dumps(said | {"pid": 2**22 + 1, "pid_namespace": "pid:[1]"}))
        assert "trainer: running" in run("status", "--root", root).stdout
        assert json.loads(run("status", "--root", root, "--json").stdout)["trainer_alive"] is None
        kill(pid)


def test_nothing_is_said_of_a_trainer_on_another_machine(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    facts = {
        "status": "running",
        "pid": 2**22 + 1,
        "host": "elsewhere",
        "started": "1",
        "at_utc": "2026-01-01T00:00:00+00:00",
    }
    (root / names.STATUS_NAME).write_text(json.dumps(facts))
    assert re.search(r"^trainer: running \(pid \d+ on elsewhere", run("status", "--root", root).stdout, re.MULTILINE)
    assert json.loads(run("status", "--root", root, "--json").stdout)["trainer_alive"] is None


def test_a_process_is_alive_until_it_ends_reaped_or_not():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    began = started(process.pid)
    assert began
    assert is_alive(process.pid, began)
    assert is_alive(process.pid)
    assert not is_alive(process.pid, "1")
    kill(process.pid)
    assert not is_alive(process.pid, began)
    assert not is_alive(process.pid)
    process.communicate()
    assert not is_alive(process.pid, began)
