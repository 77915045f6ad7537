"""deploy/slurm/train.sbatch, run by a shell: Slurm's two programs are stand-ins, everything else is real."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "train.sbatch"
LIMIT_S = 180.0
# One task on each node, which gets the signals that srun gets.
SRUN = """
import os, signal, subprocess, sys
assert sys.argv[1:3] == ["--kill-on-bad-exit=0", "--wait=0"]  # else the first task that ends ends all others
count = int(os.environ["SLURM_NNODES"])
tasks = [subprocess.Popen(sys.argv[3:], env=os.environ | {"SLURM_NODEID": str(node)}) for node in range(count)]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import pathlib, sys
match sys.argv[1:]:
    case ["show", "hostnames", "here[1-2]"]:
        print("127.0.0.1\\n127.0.0.1")
    case ["requeue", job]:
        pathlib.Path("queued").write_text(job)
    case other:
        sys.exit(f"scontrol {other}")
"""


def free_job() -> int:
    """The number of a job whose port nobody listens at."""
    for job in range(os.getpid() % 1000, 2000):
        with socket.socket() as port:
            try:
                port.bind(("127.0.0.1", 29400 + job % 1000))
            except OSError:
                continue
            return job
    raise AssertionError("no port is free")


def start(folder: Path) -> subprocess.Popen[str]:
    """Run the job as Slurm would on its first node; ranks print to its stdout."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o700)
    shutil.copyfile(Path(__file__).with_name("train_until_stopped.py"), folder / "train.py")
    slurm = {"SLURM_JOB_NODELIST": "here[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(free_job())}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"LOCAL_SSD": str(folder / "disk"), "PATH": path, "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("w")
    return subprocess.Popen(
        ["bash", str(SCRIPT)],
        env=os.environ | slurm | more,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )


def test_a_job_that_slurm_signals_leaves_a_snapshot_queues_itself_again_and_continues(tmp_path: Path) -> None:
    job = start(tmp_path)
    try:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("step 3 "):
                break
        job.send_signal(signal.SIGUSR1)
        rest = job.stdout.read()
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
        assert (tmp_path / "queued").exists()
        last = max(map(int, re.findall(r"^step (\d+) after None$", rest, re.MULTILINE)), default=3)
        for node in range(2):
            (snapshot,) = (tmp_path / f"disk-{node}").glob("emergency_step_*")
            assert snapshot.name.startswith(f"emergency_step_{last:06d}-")
        job = start(tmp_path)
        assert job.stdout is not None
        said = job.stdout.read()
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
        assert said.splitlines() == [f"step {last + 1} after emergency"] * 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
