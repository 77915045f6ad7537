"""Nodes in network namespaces of their own: their link is cut in a save, all say so in time, and torchrun goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmirror.testing import GcsServerProcess
from tests.crash.campaign import FULL
from tests.nodes.links import Link, linked_nodes
from tests.nodes.test_torchrun_on_nodes import LIMIT_S, SETTINGS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("train_over_links.py")
PORT = 29411  # in the namespaces of this test alone
PLACES = ("before", "prepare", "publish")


@pytest.fixture
def link() -> Iterator[Link]:
    with linked_nodes() as link:
        yield link


class Agents:
    """``torchrun`` on both nodes."""

    def __init__(self, link: Link, base: Path, *arguments: object) -> None:
        self.base = base
        base.mkdir()
        for node in (0, 1):
            for what in ("cut", "heal"):
                os.mkfifo(base / f"{what}-{node}")
        self.agents = [self._agent(link, node, *arguments) for node in (0, 1)]

    def _agent(self, link: Link, node: int, *arguments: object) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={link.address(0)}:{PORT}", "--monitor-interval=0.2"),
            *(f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr={link.address(node)}"),
            *(str(SCRIPT), str(self.base), *map(str, arguments)),
        ]
        environment = {
            **os.environ,
            **SETTINGS,
            **link.environment(node),
            "NODE_ROOT": str(self.base / f"disk-{node}"),
            "PYTHONFAULTHANDLER": "1",
        }
        with (self.base / f"agent-{node}.log").open("w") as log:
            return subprocess.Popen(link.within(node, command), env=environment, stdout=log, stderr=subprocess.STDOUT)

    def open(self, what: str) -> list[int]:
        """Wait until both ranks wait at their FIFO, and hold it open."""
        return [os.open(self.base / f"{what}-{node}", os.O_WRONLY) for node in (0, 1)]

    def logs(self) -> list[str]:
        return [(self.base / f"agent-{node}.log").read_text() for node in (0, 1)]

    def end(self) -> str:
        """Wait for the end; return what rank 0 printed."""
        codes = [agent.wait(LIMIT_S) for agent in self.agents]
        assert codes == [0, 0], "\n".join(self.logs())
        (line,) = [line for log in self.logs() for line in log.splitlines() if line.startswith("from step")]
        return line

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()


def close(gates: list[int]) -> None:
    for gate in gates:
        os.close(gate)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What rank 0 prints where no link is cut."""
    with linked_nodes() as link:
        straight = Agents(link, tmp_path_factory.mktemp("straight") / "job", 3, 0, PLACES[0])
        try:
            return straight.end()
        finally:
            straight.kill()


@pytest.mark.parametrize("place", PLACES if FULL else PLACES[2:])
def test_a_link_that_is_cut_in_a_save_fails_it_on_both_nodes_and_the_job_goes_on_after_it_is_back(
    place: str, expected: str, link: Link, tmp_path: Path
) -> None:
    agents = Agents(link, tmp_path / "cut", 3, 2, place)
    try:
        gates = agents.open("cut")
        link.cut()
        close(gates)
        gates = agents.open("heal")  # the ranks come here by their own limits: the link is still cut
        failed = [line for log in agents.logs() for line in log.splitlines() if " fails: " in line]
        link.heal()
        close(gates)
        line = agents.end()
    finally:
        agents.kill()
    assert len(failed) == 2
    for one in failed:
        assert "The save of step 2 failed" in one
        slow = ("rank 1 on node 1 did not take part within", "rank 0 on node 0 did not answer within")
        assert any(word in one for word in slow)
    assert line.partition(": ")[2] == expected.partition(": ")[2]
    resumed = "from step 3 to 3" if place == "publish" else "from step 2 to 3"
    assert line.partition(": ")[0] == resumed


class Partition:
    """A job of two nodes, without torchrun, whose mirror is reached through the link from node 1."""

    def __init__(self, link: Link, base: Path) -> None:
        self._link, self.base = link, base
        self._running: list[subprocess.Popen[bytes]] = []
        for node in (0, 1):
            for what in ("cut", "heal"):
                os.mkfifo(base / f"{what}-{node}")
        url = f"http://{link.address(0)}:{PORT + 1}"
        self.environment = {
            **GcsServerProcess(base).environment,
            "STORAGE_EMULATOR_HOST": url,
            "MIRROR": "gs://bucket/run",
        }
        place = ["--dir", str(base / "gcs"), "--host", link.address(0), "--port", str(PORT + 1), "--bucket", "bucket"]
        (base / "gcs").mkdir()
        server = [sys.executable, "-m", "ckptmirror.testing.gcs", *place]
        self._running.append(subprocess.Popen(link.within(0, server), stdout=subprocess.PIPE))
        assert self._running[0].stdout is not None
        assert self._running[0].stdout.readline()  # it listens

    def rank(self, rank: int, size: int, *arguments: object) -> subprocess.Popen[bytes]:
        """Begin a rank; it is on the node of its number."""
        job = {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": rank, "MASTER_PORT": PORT + 2 + size, "STAYS": "yes"}
        job |= {"MASTER_ADDR": self._link.address(0), "NODE_ROOT": self.base / f"disk-{rank}", "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **self.environment, **self._link.environment(rank)}
        environment |= {name: str(value) for name, value in job.items()}
        command = [sys.executable, str(SCRIPT), str(self.base), *map(str, arguments)]
        with self.log(rank, size).open("w") as log:
            within = self._link.within(rank, command)
            self._running.append(subprocess.Popen(within, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return self._running[-1]

    def log(self, rank: int, size: int) -> Path:
        return self.base / f"rank-{rank}-of-{size}.log"

    def metas(self) -> set[str]:
        """The names of the metas and parts on the mirror."""
        found = (
            "from ckptmirror.stores import open_store; print(*(o.name for o in open_store('gs://bucket/run').list('')))"
        )
        done = subprocess.run(
            self._link.within(0, [sys.executable, "-c", found]),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return {name for name in done.stdout.split() if "meta_" in name}

    def kill(self) -> None:
        for process in reversed(self._running):
            process.kill()
            process.wait()


def test_a_node_that_was_cut_off_and_comes_back_after_the_run_went_on_commits_nothing(
    link: Link, tmp_path: Path
) -> None:
    job = Partition(link, tmp_path)
    try:
        old = [job.rank(rank, 2, 3, 2, "publish") for rank in (0, 1)]
        gates = [os.open(tmp_path / f"cut-{node}", os.O_WRONLY) for node in (0, 1)]
        link.cut()
        close(gates)
        gates = [os.open(tmp_path / f"heal-{node}", os.O_WRONLY) for node in (0, 1)]  # each holds its part of step 2
        old[0].kill()
        old[0].wait()
        assert job.rank(0, 1, 3, 0, "before").wait(LIMIT_S) == 0, job.log(0, 1).read_text()
        assert "from step 2 to 3" in job.log(0, 1).read_text()
        before = job.metas()
        link.heal()
        close(gates)
        old[1].wait(LIMIT_S)
        assert "has started and is listed on gs://bucket/run" in job.log(1, 2).read_text()
        assert job.metas() == before
    finally:
        job.kill()
