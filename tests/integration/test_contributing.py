"""What CONTRIBUTING.md says of adding a verb, a store and a kind, done on a copy of the house."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.test_examples import blocks_of
from tests.kit.cli import clean_environment

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
PAGE = HOME / "CONTRIBUTING.md"
LIMIT_S = 120.0
FILES = {block.mark.removeprefix("file: "): block for block in blocks_of(PAGE) if block.mark.startswith("file: ")}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and of its contract suites, with the files of the page in it."""
    folder = tmp_path_factory.mktemp("house")
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HOME / "ckptmirror", folder / "ckptmirror", ignore=leave)
    shutil.copytree(HOME / "tests" / "contract", folder / "tests" / "contract", ignore=leave)
    shutil.copytree(HOME / "tests" / "kit", folder / "tests" / "kit", ignore=leave)
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(HOME / name, folder / name)
    for path, block in FILES.items():
        assert not (folder / path).exists(), f"{path} is there by now: let the page add something else"
        (folder / path).write_text(block.text)
    return folder


def run(house: Path, *command: str, **env: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=house,
        env=clean_environment(PYTHONPATH=str(house), **env),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_adds_a_verb_and_a_store():
    assert sorted(FILES) == ["ckptmirror/cli/steps.py", "ckptmirror/stores/ram.py"]


def test_what_the_page_adds_is_as_the_house_wants_its_code(house: Path):
    ruff = str(Path(sys.executable).with_name("ruff"))
    run(house, ruff, "check", "--no-cache", *FILES)
    run(house, ruff, "format", "--no-cache", "--check", *FILES)
    with suppress(OSError):  # what `make check` found out of torch, if it ran; a file may just be on its way there
        shutil.copytree(HOME / ".mypy_cache", house / ".mypy_cache")
    run(house, sys.executable, "-m", "mypy", "--strict", *FILES)


def test_a_verb_is_found_by_its_file_alone(house: Path):
    assert re.search(r"^  steps ", run(house, sys.executable, "-m", "ckptmirror", "--help"), re.MULTILINE)
    said = run(house, sys.executable, "-m", "ckptmirror", "steps", "--root", str(house), "--json")
    assert json.loads(said) == {"root": str(house), "steps": []}


def test_a_store_is_found_by_its_file_alone_and_passes_the_contract(house: Path):
    (block,) = [block for block in blocks_of(PAGE) if "CKPTMIRROR_CONTRACT_URL" in block.text]
    found = re.fullmatch(r"CKPTMIRROR_CONTRACT_URL='(.*)' .venv/bin/python -m pytest -q (.*)\n", block.text)
    assert found, "the page says how"
    pytest_options = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    said = run(house, sys.executable, "-m", "pytest", "-q", *pytest_options, found[2], CKPTMIRROR_CONTRACT_URL=found[1])
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 30
    assert "failed" not in said


def kind_places() -> list[tuple[str, str]]:
    return re.findall(r"^\| `([\w/]+\.py)`: `(\w+)` \|", PAGE.read_text(), re.MULTILINE)


def test_the_places_that_know_a_kind_are_those_of_the_page():
    places = kind_places()
    assert len(places) == 6
    for path, name in places:
        assert name in names_that_know_dcp(HOME / "ckptmirror" / path), f"{path}: {name}"


def test_no_other_place_outside_the_formats_lists_the_kinds():
    listed = {path for path, _ in kind_places()}
    package = HOME / "ckptmirror"
    for path in package.rglob("*.py"):
        place = path.relative_to(package).as_posix()
        if place.endswith(("/legacy_listing.py", "/legacy_references.py")):
            continue  # what older writers left has the kinds of then
        if not place.startswith(("formats/", "testing/")) and names_that_know_dcp(path):
            assert place in listed, f"{place} knows the kinds too; CONTRIBUTING.md does not say so"


def names_that_know_dcp(path: Path) -> set[str]:
    """The module's own names whose value mentions the kind ``dcp``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and getattr(node, "value", None) is not None:
            values = [inner.value for inner in ast.walk(node.value) if isinstance(inner, ast.Constant)]
            if "dcp" in values:
                found.add(target.id)
    return found
