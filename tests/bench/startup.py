"""What a verb costs before it does anything: CPU seconds of all its threads up to its first request, or in all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.bench.contest import Contestant, Measured, measure
from tests.kit.cli import AS_MODULE, clean_environment
from tests.kit.roots import make_pending

__all__ = ["measure_startup"]

_URL = "gs://a-bucket/run"
_WAIT_S = 60.0
Run = Callable[[], Mapping[str, float]]


def measure_startup(directory: Path, rounds: int) -> list[Measured]:
    """Measure a verb that asks no mirror, two that do, and what the cloud's client costs by its import alone."""
    root, _ = make_pending(directory, _URL, 100, 200, sidecars=False)
    stage = ["stage", "--step", "200", "--mirror", _URL, "--dest", str(directory / "eval")]
    client = "import google.cloud.storage"
    contestants = [
        Contestant("an empty program", "limit", _to_end([sys.executable, "-c", "pass"])),
        Contestant("status", "ours", _to_end([*AS_MODULE, "status", "--root", str(root)])),
        Contestant("drain", "ours", _to_first_request([*AS_MODULE, "drain", "--root", str(root)])),
        Contestant("stage", "ours", _to_first_request([*AS_MODULE, *stage])),
        Contestant(client, "peer", _to_end([sys.executable, "-c", client])),
    ]
    return measure(contestants, rounds)


def _to_end(command: Sequence[str]) -> Run:
    def run() -> Mapping[str, float]:
        process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        return {"start: CPU": usage.ru_utime + usage.ru_stime}

    return run


def _to_first_request(command: Sequence[str]) -> Run:
    def run() -> Mapping[str, float]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_WAIT_S)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            process = subprocess.Popen(command, env=clean_environment(STORAGE_EMULATOR_HOST=url))
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1)
                    return {"start: CPU": _cpu_s(process.pid)}
            finally:
                process.kill()
                process.wait()

    return run


def _cpu_s(pid: int) -> float:
    """What a process has used, over all its threads; ``/proc/PID/stat`` counts in hundredths of a second only."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:  # a kernel without schedstat
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
