"""``torchrun --nnodes 2:3``: a node joins a job that trains, and leaves it without a word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.nodes.test_torchrun_on_nodes import LIMIT_S, SETTINGS
from tests.nodes.train_elastic import new_state, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("train_elastic.py")
IN_HASTE = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Agents:
    """``torchrun`` on each node."""

    def __init__(self, base: Path) -> None:
        self.base, self.running = base, list[subprocess.Popen[bytes]]()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self) -> None:
        node = len(self.running)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=9"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--monitor-interval=0.2"),
            *(f"--rdzv-conf=is_host={int(node == 0)},{IN_HASTE}", str(SCRIPT), str(self.base)),
        ]
        environment = {**os.environ, **SETTINGS, "NODE_ROOT": str(self.base / f"disk-{node}")}
        with (self.base / f"agent-{node}.log").open("w") as log:
            self.running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

    def logs(self) -> str:
        return "\n".join((self.base / f"agent-{node}.log").read_text() for node in range(len(self.running)))

    def kill(self, node: int) -> None:
        """Kill an agent and its rank, which has a session of its own."""
        agent = psutil.Process(self.running[node].pid)
        for process in (agent, *agent.children(recursive=True)):
            process.kill()


def test_a_node_joins_a_job_and_leaves_it_and_no_mirrored_step_is_trained_again(tmp_path: Path) -> None:
    mirrored = {ranks: tmp_path / f"trains on {ranks}" for ranks in (2, 3)}
    for fifo in mirrored.values():
        os.mkfifo(fifo)
    agents = Agents(tmp_path)
    try:
        agents.start()
        agents.start()
        before = int(mirrored[2].read_text())
        agents.start()
        on_three = int(mirrored[3].read_text())
        (tmp_path / "left").touch()
        agents.kill(2)
        codes = [agent.wait(LIMIT_S) for agent in agents.running[:2]]
    finally:
        for node in range(len(agents.running)):
            with suppress(psutil.NoSuchProcess):
                agents.kill(node)
    assert codes == [0, 0], agents.logs()
    first, last, total = (tmp_path / "end").read_text().split()
    assert before < on_three < int(first)
    state = new_state()
    expected = [train(state, step) for step in range(1, int(last) + 1)]
    assert float(total) == pytest.approx(expected[-1], rel=1e-3)  # three ranks round a mean in another way
    assert expected[-2] != pytest.approx(expected[-1], rel=1e-3)
