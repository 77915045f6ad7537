"""What the demo runs (its server, trainers, verbs), and what the trainers noted.

Rules:
* Each process has a log in the demo's folder; a trainer also has its notes there.
* No process is left when a trainer failed or the demo was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.testing import GcsServerProcess

__all__ = ["BUCKET", "EVERY", "FalseSentence", "Processes", "server_beside"]

BUCKET = "demo"
EVERY = 10  # steps between saves
_KEEP_LAST = 2
_LEAVE_S = 40.0  # torchrun gives its workers 30


class FalseSentence(CkptMirrorError):
    """The demo would have told something that is not so."""

    hint = "The files of this demo are kept; the log of every process is beside them."


@contextlib.contextmanager
def server_beside(folder: Path) -> Iterator[GcsServerProcess]:
    """Run the strict server; whatever is started meanwhile talks to it and to nothing else."""
    with GcsServerProcess(folder / "gcs", buckets=[BUCKET]) as server:
        os.environ.update(server.environment)
        for variable in ("NO_PROXY", "no_proxy"):
            os.environ[variable] = ",".join(filter(None, [os.environ.get(variable), "127.0.0.1"]))
        yield server


class Processes:
    """Starts the demo's processes.

    Args:
        folder: Holds their logs and notes.
        limit_s: How long one may take.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder = folder
        self._limit_s = limit_s

    def train(
        self, name: str, root: Path, mirror: str, *, steps: int, crash_at: str = "", sigterm_at: int | None = None
    ) -> int:
        """Train with two ranks under torchrun, which share one root; return the exit code.

        Args:
            crash_at: The crash point at which a rank kills itself with SIGKILL.
            sigterm_at: Send SIGTERM to rank 0 once it has done this step.
        """
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        process = self._start(
            name, [*torchrun, *self._trainer(name, root, mirror, steps)], {"CKPTMIRROR_CRASH_AT": crash_at}
        )
        try:
            if sigterm_at is not None:
                self._wait_for_step(name, sigterm_at, process)
                os.kill(self.note(name, "start")["pid"], signal.SIGTERM)
            return self._ended(name, process)
        finally:
            _end(process)

    def train_on_nodes(self, name: str, roots: Sequence[Path], mirror: str, *, steps: int) -> list[int]:
        """Train with one rank on each of several nodes, each with a root of its own; return the exit codes."""
        port = _free_port()
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, root in enumerate(roots):
                meeting_place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                numbers = {"RANK": str(rank), "WORLD_SIZE": str(len(roots))}
                trainer = self._trainer(name, root, mirror, steps)
                ranks.append(self._start(f"{name}-node-{rank}", trainer, meeting_place | numbers))
            return [self._ended(f"{name}-node-{rank}", process) for rank, process in enumerate(ranks)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a ``ckptmirror`` verb."""
        return self.python(f"cli-{arguments[0]}", "-m", "ckptmirror", *arguments)

    def python(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python to its end; its stderr goes to the log."""
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.run(
                [sys.executable, *arguments],
                env=_environment(environment),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )

    # -- what trainers noted --------------------------------------------------------------------------------

    def note(self, name: str, event: str) -> dict[str, Any]:
        """Return a trainer's last note of one event."""
        found = [note for note in self._notes(name) if note["event"] == event]
        if not found:
            raise FalseSentence(f"The trainer {name} never came to {event!r}; see {name}*.log.")
        return found[-1]

    def losses(self, name: str) -> dict[int, str]:
        """Return the losses of a trainer by step."""
        return {note["step"]: note["loss"] for note in self._notes(name) if note["event"] == "step"}

    def _notes(self, name: str) -> list[dict[str, Any]]:
        notes = self._folder / f"{name}.jsonl"
        text = notes.read_text() if notes.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    # -- one process ----------------------------------------------------------------------------------------

    def _trainer(self, name: str, root: Path, mirror: str, steps: int) -> list[str]:
        arguments = ["-m", "ckptmirror.integrations.plain_loop", "--root", str(root), "--mirror", mirror]
        arguments += ["--steps", str(steps), "--save-every", str(EVERY), "--keep-last", str(_KEEP_LAST)]
        return [*arguments, "--notes", str(self._folder / f"{name}.jsonl")]

    def _start(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], env=_environment(environment), stdout=log, stderr=subprocess.STDOUT
            )

    def _ended(self, name: str, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process and return its exit code."""
        try:
            return process.wait(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            raise FalseSentence(f"{name} did not end within {self._limit_s:.0f} s; see {name}.log.") from None

    def _wait_for_step(self, name: str, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the trainer has noted a step."""
        deadline = time.monotonic() + self._limit_s
        while time.monotonic() < deadline and process.poll() is None:
            if max(self.losses(name), default=0) >= step:
                return
            time.sleep(0.02)
        raise FalseSentence(f"The trainer {name} never came to step {step}; see {name}.log.")


def _environment(more: dict[str, str]) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def _free_port() -> int:
    """Return a port that nobody listens at; the ranks of several nodes meet there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End torchrun so that it ends its workers, which would go on without it: they have sessions of their own."""
    launcher.terminate()
    try:
        launcher.wait(timeout=_LEAVE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
