"""Up to its first request a verb takes under 0.3 s of CPU, and no verb imports torch.

The limit holds for a machine that does the reference work below in ``REFERENCE_S``; a slower one gets more in
proportion. The CPU time is what the kernel counted for all threads of the process when its first request arrived.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli_place import clean_environment, make_pending, start

LIMIT_S = 0.3
REFERENCE_S = 0.035
TRIES = 4
WAIT_S = 60.0
URL = "gs://a-bucket/run"
HEAVY = ("torch", "numpy", "gcsfs", "fsspec", "aiohttp", "google.cloud.storage", "requests", "tenacity", "rich")


def reference_work() -> float:
    """CPU seconds of a fixed amount of pure Python work."""
    started = time.process_time()
    table: dict[int, str] = {}
    for number in range(360_000):
        table[number & 1023] = str(number)
    return time.process_time() - started


def limit_s(more_s: float = 0.0) -> float:
    """The limit on this machine, as fast as it is just now."""
    return (LIMIT_S + more_s) * max(1.0, min(reference_work() for _ in range(3)) / REFERENCE_S)


def cpu_of(code: str) -> float:
    """The least CPU seconds that a process of its own takes for a piece of Python."""
    taken = []
    for _ in range(TRIES):
        process = subprocess.Popen([sys.executable, "-c", code])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        taken.append(usage.ru_utime + usage.ru_stime)
    return min(taken)


@pytest.fixture(scope="module")
def google_s() -> float:
    """What a login costs whoever uses google-auth: its import and the list of certificates."""
    return cpu_of("import ssl, google.oauth2.credentials; ssl.create_default_context()") - cpu_of("pass")


class Listener:
    """A server that takes requests and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(WAIT_S)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def wait_for_request(self) -> socket.socket:
        connection, _ = self._socket.accept()
        connection.settimeout(WAIT_S)
        assert connection.recv(1)
        return connection

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.close()


def cpu_s(pid: int) -> float:
    """What the process has used, over all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:  # a kernel without schedstat
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def logged_in(folder: Path, listener: Listener) -> dict[str, str]:
    """Credentials such as ``gcloud auth application-default login`` leaves, and the listener as the only way out."""
    path = folder / "credentials.json"
    facts = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "t"}
    path.write_text(json.dumps(facts))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(path), "HTTPS_PROXY": listener.url, "https_proxy": listener.url}


def arguments_of(verb: str, folder: Path) -> list[str]:
    if verb == "stage":
        return ["stage", "--step", "200", "--mirror", URL, "--dest", str(folder / "eval")]
    if verb == "ls":
        return ["ls", URL]
    if verb == "config":
        return ["config"]
    if verb == "verify":
        return ["verify", URL]
    root, _ = make_pending(folder, URL, 100, 200, sidecars=False)
    if verb == "rewind":
        return ["rewind", "--root", str(root), "--step", "100"]
    if verb == "rotate":
        _verify_all(root)
        return ["rotate", "--root", str(root), "--keep-last", "1"]
    return [verb, "--root", str(root), *(["--mirror", URL] if verb == "push" else [])]


def _verify_all(root: Path) -> None:
    """Let the table say that everything is on the mirror, so that rotation has something to ask it."""
    from ckptmirror.local.table_place import table_path
    from ckptmirror.local.uploads import UploadsTable

    table = UploadsTable.open(table_path(root))
    while (claim := table.claim("test", URL, lease_s=60.0)) is not None:
        size, crc = claim.record.size_bytes or 1, claim.record.crc32c or 0
        table.verify(claim, object_name=claim.record.path, generation=1, size_bytes=size, crc32c=crc)
    table.close()


@pytest.mark.parametrize("verb", ["stage", "ls", "push", "drain", "rotate", "verify", "rewind"])
def test_a_verb_takes_little_cpu_up_to_its_first_request(verb: str, tmp_path: Path, listener: Listener) -> None:
    _assert_light(verb, arguments_of(verb, tmp_path), {"STORAGE_EMULATOR_HOST": listener.url}, listener, 0.0)


@pytest.mark.parametrize("verb", ["stage", "drain"])
def test_a_login_costs_what_google_auth_costs_and_no_more(
    verb: str, tmp_path: Path, listener: Listener, google_s: float
) -> None:
    _assert_light(verb, arguments_of(verb, tmp_path), logged_in(tmp_path, listener), listener, google_s)


def _assert_light(verb: str, arguments: list[str], env: dict[str, str], listener: Listener, more_s: float) -> None:
    for last in reversed(range(TRIES)):
        process = start(*arguments, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with listener.wait_for_request():
                taken_s = cpu_s(process.pid)
        finally:
            process.kill()
            process.wait()
        limit = limit_s(more_s)
        print(f"{verb}: {taken_s:.3f} s of CPU to the first request; the limit is {limit:.3f} s")
        if taken_s < limit or not last:
            break
    assert taken_s < limit


@pytest.mark.parametrize("verb", ["status", "timeline", "retry", "config"])
def test_a_verb_that_asks_no_mirror_takes_little_cpu_in_all(verb: str, tmp_path: Path) -> None:
    arguments = arguments_of(verb, tmp_path)
    for last in reversed(range(TRIES)):
        process = start(*arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        taken_s, limit = usage.ru_utime + usage.ru_stime, limit_s()
        print(f"{verb}: {taken_s:.3f} s of CPU in all; the limit is {limit:.3f} s")
        if taken_s < limit or not last:
            break
    assert taken_s < limit


@pytest.mark.parametrize(
    "verb", ["stage", "ls", "push", "drain", "rotate", "status", "timeline", "verify", "retry", "rewind", "config"]
)
def test_no_verb_imports_what_it_does_not_need(verb: str, tmp_path: Path, listener: Listener) -> None:
    arguments = arguments_of(verb, tmp_path)
    report = tmp_path / "imports.txt"
    env = {"STORAGE_EMULATOR_HOST": listener.url, "PYTHONUNBUFFERED": "1"}
    with report.open("w") as stderr:
        process = start(*arguments, env=env, python=["-X", "importtime"], stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        if verb not in ("status", "timeline", "retry", "config"):
            listener.wait_for_request().close()
        else:
            assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    imported = {line.rpartition("|")[2].strip() for line in report.read_text().splitlines() if "|" in line}
    assert "ckptmirror.cli" in imported
    assert not imported & set(HEAVY)


def test_importing_the_package_imports_neither_torch_nor_a_cloud_client() -> None:
    code = "import sys, ckptmirror; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = [*HEAVY, "google", "google.auth", "apsw", "awscrt", "click", "ckptmirror.stores"]
    shown = subprocess.check_output([sys.executable, "-c", code, *heavy], text=True, env=clean_environment())
    assert shown.strip() == "[]"


def test_asking_for_help_imports_nothing_of_the_rest() -> None:
    code = "import sys; from ckptmirror.cli import main; code = main(['stage', '--help']); "
    code += "print(code, [n for n in sys.modules if n.startswith(('ckptmirror.flow', 'ckptmirror.stores', 'apsw'))])"
    shown = subprocess.check_output([sys.executable, "-c", code], text=True, env=clean_environment())
    assert shown.splitlines()[-1] == "0 []"
