"""``torchrun --nnodes``: nodes train and save together, and after one of them died torchrun starts all again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror.flow.places.catalog import local_catalog

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("train_on_nodes.py")
LIMIT_S = 150.0  # below the limit of a test, so that the logs are seen
# Agents that share torchrun's store count restarts each for itself, and ranks then wait for one another's first start.
SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def torchrun(base: Path, nodes: int, ranks: int, *arguments: object, restarts: int = 0) -> str:
    """Run the script on nodes of some ranks each; return what rank 0 printed."""
    base.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for node in range(nodes):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(node == 0)}"),
            *(f"--max-restarts={restarts}", "--monitor-interval=0.2", str(SCRIPT), str(base), *map(str, arguments)),
        ]
        environment = {**os.environ, **SETTINGS, "NODE_ROOT": str(base / f"disk-{node}")}
        with (base / f"agent-{node}.log").open("w") as log:
            agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [agent.wait(LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    logs = [(base / f"agent-{node}.log").read_text() for node in range(nodes)]
    assert codes == [0] * nodes, "\n".join(logs)
    (line,) = [line for log in logs for line in log.splitlines() if line.startswith("from step")]
    return line


def test_nodes_that_torchrun_starts_again_end_where_one_run_ends(tmp_path: Path) -> None:
    straight = torchrun(tmp_path / "straight", 2, 2, 4, 0)
    cut = torchrun(tmp_path / "cut", 2, 2, 4, 3, restarts=1)
    assert straight.partition(": ")[0] == "from step 1 to 4"
    assert cut.partition(": ")[2] == straight.partition(": ")[2]
    assert cut.partition(": ")[0] in ("from step 3 to 4", "from step 4 to 4")
    for node in range(2):
        parts = local_catalog(tmp_path / "cut" / f"disk-{node}").parts
        assert {meta.node for meta in parts.values()} <= {0, 1}
        assert max(meta.step for meta in parts.values()) == 4
