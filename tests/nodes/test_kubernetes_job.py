"""deploy/kubernetes/train.yaml: its agents, started again as the job's pods are; one of them is asked to stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.crash.campaign import FULL

pytestmark = pytest.mark.long

JOB = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "train.yaml"
LIMIT_S = 150.0  # below the limit of a test, so that the logs are seen


class Pod:
    """A pod of an indexed job with ``restartPolicy: OnFailure``: it is done once its container ends with 0."""

    def __init__(self, base: Path, index: int, port: int) -> None:
        _, job = yaml.safe_load_all(JOB.read_text())
        template = job["spec"]["template"]["spec"]
        assert template["restartPolicy"] == "OnFailure"
        (container,) = template["containers"]
        self.log = base / f"pod-{index}.log"
        self._command = self._agent(container["command"], index, port)
        given = {one["name"]: one["value"] for one in container["env"]}
        mine = {"LOCAL_SSD": str(base / "disk"), "SLURM_NODEID": str(index), "OMP_NUM_THREADS": "1"}
        self._environment = os.environ | given | mine
        self._running: Any = None
        self.is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _agent(self, command: list[str], index: int, port: int) -> list[str]:
        """The command of the container, where all nodes are one machine."""
        agent, *words, script = command
        assert (agent, script) == ("torchrun", "train.py")
        here = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{port}"}
        words = [f"{name}={here.get(name, value)}" for name, _, value in (word.partition("=") for word in words)]
        more = ["--monitor-interval=0.2", f"--rdzv-conf=is_host={int(index == 0)}"]
        return [
            *(sys.executable, "-m", "torch.distributed.run", *words, *more),
            str(Path(__file__).with_name("train_until_stopped.py")),
        ]

    def _run(self) -> None:
        code = None
        while code != 0 and not self.is_done.is_set():
            with self.log.open("a") as log:
                self._running = subprocess.Popen(
                    self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
                )
                code = self._running.wait()
        self.is_done.set()

    def terminate(self) -> None:
        """What the kubelet does when a pod has to go."""
        self._running.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self.is_done.set()
        self._running.terminate()
        self._thread.join(LIMIT_S)


@pytest.mark.parametrize("asked", [0, 1] if FULL else [1])
def test_a_job_of_which_one_pod_is_asked_to_stop_goes_on_from_the_snapshot(asked: int, tmp_path: Path) -> None:
    """The pod that was not asked is not done, since its ranks end with another code than 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = [Pod(tmp_path, index, port) for index in range(2)]
    try:
        ticks = threading.Event()
        while not all(pod.log.exists() and "step 3 " in pod.log.read_text() for pod in pods):
            ticks.wait(0.05)
        pods[asked].terminate()
        ends = [pod.is_done.wait(LIMIT_S) for pod in pods]
        said = [pod.log.read_text() for pod in pods]
        assert ends == [True, True], "\n".join(said)
        for index, text in enumerate(said):
            steps = [int(step) for step in re.findall(r"^.*step (\d+) after None$", text, re.MULTILINE)]
            assert f"step {steps[-1] + 1} after emergency" in text, f"pod {index}: {text}"
    finally:
        for pod in pods:
            pod.end()
