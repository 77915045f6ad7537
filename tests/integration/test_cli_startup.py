"""No verb imports torch, nor anything else that it does not need: `make bench` has what its start costs in seconds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.cli import clean_environment, start
from tests.kit.roots import make_pending

WAIT_S = 60.0
URL = "gs://a-bucket/run"
ASK_NO_MIRROR = ("status", "timeline", "retry", "config")
HEAVY = ("torch", "numpy", "gcsfs", "fsspec", "aiohttp", "google.cloud.storage", "requests", "tenacity", "rich")


class Listener:
    """A server that takes requests and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(WAIT_S)
        self._asked: list[socket.socket] = []  # open until the end: an error would import what it is handled with
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def wait_for_request(self) -> None:
        connection, _ = self._socket.accept()
        self._asked.append(connection)
        connection.settimeout(WAIT_S)
        assert connection.recv(1)

    def close(self) -> None:
        for one in (self._socket, *self._asked):
            one.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.close()


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


@pytest.mark.parametrize("verb", ["stage", "ls", "push", "drain", "rotate", "verify", "rewind", *ASK_NO_MIRROR])
def test_no_verb_imports_what_it_does_not_need(verb: str, tmp_path: Path, listener: Listener) -> None:
    imported = imported_by(verb, tmp_path, {"STORAGE_EMULATOR_HOST": listener.url}, listener)
    assert not imported & {*HEAVY, "google.auth"}


@pytest.mark.parametrize("verb", ["stage", "drain"])
def test_a_login_costs_the_import_of_google_auth_and_no_more(verb: str, tmp_path: Path, listener: Listener) -> None:
    imported = imported_by(verb, tmp_path, logged_in(tmp_path, listener), listener)
    assert "google.oauth2.credentials" in imported
    assert not imported & set(HEAVY)


def imported_by(verb: str, folder: Path, env: dict[str, str], listener: Listener) -> set[str]:
    """The modules that a verb imports until it asks something of its mirror, or in all if it asks nothing."""
    arguments = arguments_of(verb, folder)
    report = folder / "imports.txt"
    with report.open("w") as stderr:
        process = start(
            *arguments,
            env={"PYTHONUNBUFFERED": "1"} | env,
            python=["-X", "importtime"],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        if verb in ASK_NO_MIRROR:
            assert process.wait(WAIT_S) == 0
        else:
            listener.wait_for_request()
    finally:
        process.kill()
        process.wait()
    imported = {line.rpartition("|")[2].strip() for line in report.read_text().splitlines() if "|" in line}
    assert "ckptmirror.cli" in imported
    return imported


def test_importing_the_package_imports_neither_torch_nor_a_cloud_client() -> None:
    code = "import sys, ckptmirror; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = [*HEAVY, "google", "google.auth", "apsw", "awscrt", "click", "ckptmirror.stores"]
    shown = subprocess.check_output([sys.executable, "-c", code, *heavy], text=True, env=clean_environment())
    assert shown.strip() == "[]"


@pytest.mark.parametrize("arguments", [["stage", "--help"], ["--help"]], ids=" ".join)
def test_asking_for_help_imports_nothing_of_the_rest(arguments: list[str]) -> None:
    code = f"import sys; from ckptmirror.cli import main; code = main({arguments}); "
    rest = ("ckptmirror.flow", "ckptmirror.stores", "ckptmirror.core.events", "apsw")
    code += f"print(code, [n for n in sys.modules if n.startswith({rest})])"
    shown = subprocess.check_output([sys.executable, "-c", code], text=True, env=clean_environment())
    assert shown.splitlines()[-1] == "0 []"
