"""`ckptmirror demo --mirror` (`make demo MIRROR=`): the same story on a mirror of the user's, left as it was."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror.cli._demo_place import DemoPlace, make_place
from ckptmirror.core.errors import NameTaken, NotAuthorised
from ckptmirror.stores import open_store
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import assert_tells, clean_environment, run, start

HOME = Path(__file__).resolve().parents[2]
URL = "gs://bucket/team"


SERVER_OF_ITS_OWN = """
import sys
from pathlib import Path
from ckptmirror.cli._demo_processes import server_beside
from ckptmirror.stores import open_store
with server_beside(Path(sys.argv[1])) as server:
    server.clear_faults()
    print(list(open_store("gs://demo", retry=False).list()))
"""


def test_the_server_beside_a_demo_is_reached_where_everything_else_goes_through_a_proxy(tmp_path: Path):
    nowhere = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    script = [sys.executable, "-c", SERVER_OF_ITS_OWN, str(tmp_path)]
    said = subprocess.run(script, env=clean_environment(**nowhere), capture_output=True, text=True, check=False)
    assert (said.stdout, said.stderr, said.returncode) == ("[]\n", "", 0)


def target_command(target: str, **variables: str) -> list[str]:
    """What a target of the Makefile runs last, with this interpreter."""
    said = subprocess.run(
        [
            *("make", "-n", "--no-print-directory", target, "VENV=VENV"),
            *(f"{name}={value}" for name, value in variables.items()),
        ],
        capture_output=True,
        text=True,
        cwd=HOME,
        check=True,
    )
    last = said.stdout.splitlines()[-1].replace("'", "")
    assert last.startswith("VENV/bin/ckptmirror ")
    return [sys.executable, "-m", *last.removeprefix("VENV/bin/").split()]


@pytest.mark.parametrize(
    ("mirror", "exit_code", "words"),
    [
        ("gs://no-such-bucket/x", 10, ["does not exist"]),
        ("gs://guarded/x", 12, ["wants credentials"]),
        ("memory://x", 10, ["only mirror"]),
        ("fsspec+memory://x", 10, ["only mirror"]),
        ("nonsense", 10, ["URL"]),
        ("/nowhere/x", 10, ["/nowhere/x as its mirror: it does not exist", "mkdir -p /nowhere/x"]),
    ],
)
def test_the_demo_says_at_once_what_keeps_it_from_a_mirror(
    mirror: str, exit_code: int, words: list[str], tmp_path: Path
) -> None:
    access = {"tokens": {}, "anonymous": {"permissions": ["storage.objects.get"], "buckets": ["guarded"]}}
    if "no-such" in mirror:
        access["anonymous"] = {"roles": ["roles/storage.objectUser"]}
    with GcsServerProcess(tmp_path / "gcs", buckets=["guarded"], access=access) as server:
        ended = run("demo", "--mirror", mirror, env={**server.environment, "CKPTMIRROR_GCS_CREDENTIALS": "anonymous"})
    assert_tells(ended, exit_code, *words)


def test_the_place_of_a_demo_is_new_each_time_and_must_be_empty(tmp_path: Path) -> None:
    first, second = make_place(str(tmp_path)), make_place(f"file://{tmp_path}/")
    assert first.url != second.url
    assert first.url.startswith(f"file://{tmp_path}/ckptmirror-demo-")
    first.check_empty()
    store = open_store(first.url)
    store.write("x", b"theirs", if_generation=0)
    with pytest.raises(NameTaken, match="not empty"):
        first.check_empty()
    assert store.read("x", limit_bytes=10)[0] == b"theirs"


def test_a_kept_demo_says_what_there_is_and_how_to_remove_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_place(str(tmp_path))
    place.check_empty()
    open_store(f"{place.url}/run").write("x", b"12345", if_generation=0)
    neighbour = tmp_path / "neighbour"
    neighbour.write_text("theirs")
    place.leave(keep=True)
    said = capsys.readouterr().out
    assert re.search(r"\d objects \(\d+ B\) are kept", said)
    subprocess.run(said.splitlines()[-1].split(), check=True)
    assert list(tmp_path.iterdir()) == [neighbour]


def test_a_demo_in_a_directory_leaves_no_folder_and_no_lock_file_behind(tmp_path: Path) -> None:
    place = make_place(str(tmp_path))
    place.check_empty()
    open_store(f"{place.url}/run").write("a/b", b"12345", if_generation=0)
    place.leave(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_cannot_remove_its_objects_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with GcsServerProcess(tmp_path / "gcs", buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        place = make_place(URL)
        open_store(f"{place.url}/run").write("x", b"12345", if_generation=0)
        server.faults([Fault(operation="object.delete", status=403, times=0)])
        with pytest.raises(NotAuthorised):
            place.leave(keep=False)
    said = capsys.readouterr().err
    assert f"1 objects (5 B) may be under {place.url}" in said
    assert place.removal in said


@pytest.mark.timeout(120)
def test_an_interrupted_demo_does_not_promise_to_continue_and_says_where_its_objects_are(tmp_path: Path) -> None:
    (tmp_path / "nfs").mkdir()
    process = start("demo", "--mirror", tmp_path / "nfs", env={"TMPDIR": str(tmp_path)})
    try:
        assert process.stdout is not None
        found = re.search(r"Everything is under (\S+)\.", process.stdout.readline())
        assert found
        assert "train" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "continues" not in stderr
    said = f"the same command starts over, elsewhere; its objects may be under {found[1]}; `rm -r "
    assert said in stderr.splitlines()[-1]


def test_without_a_mirror_the_target_asks_for_none() -> None:
    assert target_command("demo")[1:] == ["-m", "ckptmirror", "demo"]
    assert target_command("demo", MIRROR=URL)[1:] == ["-m", "ckptmirror", "demo", "--mirror", URL]


def test_the_command_that_removes_a_demo_from_a_bucket_names_its_place_alone() -> None:
    assert DemoPlace("gs://bucket/a/b").removal == "gcloud storage rm --recursive gs://bucket/a/b"
