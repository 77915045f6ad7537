"""What a stranger installs: the wheel and what it declares, alone in an empty environment, far from this checkout.

torch comes from where `make setup` takes it: the version of constraints.txt, from TORCH_INDEX if that is set.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptmirror.stores import open_store
from ckptmirror.testing import GcsServerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

HOME = Path(__file__).resolve().parents[2]
OURS = ("CKPTMIRROR_", "STORAGE_", "GOOGLE_", "CLOUDSDK_", "PYTHON", "VIRTUAL_ENV", "PYTEST_")
URL = "gs://bucket/team"


@dataclass(frozen=True)
class Place:
    """A directory with a ``home`` that is empty; commands run there, with nothing of this environment's."""

    folder: Path

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        environment |= {"HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", **variables}
        return subprocess.run(
            [*map(str, command)], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    def done(self, *command: str | Path, **variables: str) -> str:
        ended = self.run(*command, **variables)
        assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def make_environment(self, name: str) -> Path:
        """Make an empty environment; return the directory of its programs."""
        self.done(sys.executable, "-m", "venv", self.folder / name)
        return self.folder / name / "bin"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "home").mkdir()
    return Place(folder)


@pytest.fixture(scope="module")
def built(place: Place) -> Path:
    """The directory with the wheel and the source archive, as `make build` makes them."""
    programs = place.make_environment("builder")
    if (asked := place.run(programs / "pip", "install", "--quiet", "build")).returncode != 0:
        pytest.skip(f"no package index can be reached from here: {asked.stderr.strip().splitlines()[-1]}")
    place.done(programs / "python", "-m", "build", "--outdir", place.folder / "dist", HOME)
    return place.folder / "dist"


@pytest.fixture(scope="module")
def programs(place: Place, built: Path) -> Path:
    """The programs of an environment with the wheel and nothing that it does not declare."""
    programs = place.make_environment("empty")
    constraints = ["-c", HOME / "constraints.txt"]
    if index := os.environ.get("TORCH_INDEX"):
        place.done(programs / "pip", "install", "--quiet", "--no-compile", *constraints, "--index-url", index, "torch")
    place.done(programs / "pip", "install", "--quiet", "--no-compile", *constraints, *built.glob("*.whl"))
    return programs


def test_the_wheel_holds_the_package_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", "ckptmirror"], cwd=HOME, capture_output=True, text=True, check=False)
    package = set(listed.stdout.splitlines()) or {name for name in names if name.startswith("ckptmirror/")}
    assert {"ckptmirror/py.typed", "ckptmirror/__init__.py"} < package
    assert any(re.fullmatch(r"ckptmirror/local/uploads/sql/migrations/\d{4}_\w+\.sql", name) for name in package)
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {name.rpartition("/")[2] for name in names - package} == {
        "LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt"
    }  # fmt: skip


def test_the_source_archive_holds_what_builds_tests_and_documents_the_package(built: Path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    included = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*included["include"], "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {"ckptmirror/py.typed", "tests/conftest.py", "docs/testing.md", ".ci/run"} < names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_environment_has_only_what_is_declared(place: Place, programs: Path):
    place.done(programs / "pip", "check")
    installed = {one["name"].lower() for one in json.loads(place.done(programs / "pip", "list", "--format", "json"))}
    assert {"ckptmirror", "torch", "numpy"} < installed
    assert not installed & {"pytest", "hypothesis", "psutil"}, "this is the environment of the tests"


def test_every_verb_says_what_it_does(place: Place, programs: Path):
    verbs = re.findall(r"^  ([a-z]+)  ", place.done(programs / "ckptmirror", "--help"), re.MULTILINE)
    assert {"demo", "stage", "status"} < set(verbs)
    for verb in verbs:
        assert "Usage: ckptmirror" in place.done(programs / "ckptmirror", verb, "--help")


def test_two_ranks_save_and_resume(place: Place, programs: Path):
    root, notes = place.folder / "local-ssd", place.folder / "notes.jsonl"
    for steps in ("10", "20"):
        place.done(
            programs / "torchrun", "--standalone", "--nproc-per-node=2", "-m", "ckptmirror.integrations.plain_loop",
            "--root", root, "--mirror", f"file://{place.folder}/mirror", "--steps", steps, "--notes", notes,
        )  # fmt: skip
    starts = [note for line in notes.read_text().splitlines() if (note := json.loads(line))["event"] == "start"]
    assert [(start["step"], start["kind"]) for start in starts] == [(0, None), (10, "dcp")]
    assert "20" in place.done(programs / "ckptmirror", "ls", f"file://{place.folder}/mirror")


def test_the_demo_tells_its_story_on_a_bucket_and_removes_what_it_made_there_and_nothing_else(
    place: Place, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GcsServerProcess(tmp_path / "gcs", buckets=["bucket"]) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        theirs = {"theirs.txt": b"1", "ckptmirror-demo-20200101-000000-00000000/run/meta_000010.json": b"2"}
        store = open_store(URL)
        before = [store.write(name, data, if_generation=0) for name, data in theirs.items()]
        server.clear_log()
        told = place.done(programs / "ckptmirror", "demo", "--mirror", URL, **server.environment)
        found = re.search(r"Everything is under (\S+)\. ", told)
        assert found
        assert found[1].startswith(f"{URL}/ckptmirror-demo-")
        assert f"it continued from step 60 of {found[1]}/run" in told
        assert f"both continued from step 60; what a node lacked came from {found[1]}/nodes" in told
        assert "Done, after" in told
        assert re.search(rf"The demo removed its \d{{2,}} objects \(.*\) from {found[1]}\.", told)
        assert sorted(store.list(), key=lambda info: info.name) == sorted(before, key=lambda info: info.name)
        changed = [entry for entry in server.log() if entry["method"] in ("POST", "PUT", "PATCH", "DELETE")]
        prefix = found[1].removeprefix("gs://bucket/")
        assert changed
        assert {entry["object"].startswith(prefix) for entry in changed if entry.get("object")} == {True}
        deletes = [entry for entry in changed if entry["operation"] == "object.delete"]
        assert deletes
        assert all("ifGenerationMatch" in entry["query"] for entry in deletes)
