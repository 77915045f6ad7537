"""The house keeps its floors: layers, public names, and words that must not drift."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib import import_module, resources
from pathlib import Path

import click
import pytest

import ckptmirror
from ckptmirror.cli._program import program

HOME = Path(__file__).resolve().parents[2]
PACKAGE = HOME / "ckptmirror"
BIN = Path(sys.executable).parent


def layers_of(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [BIN / "lint-imports", "--config", str(folder / "pyproject.toml"), "--no-cache"]
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from importlinter.cli import lint_imports_command; "
    code += "lint_imports_command()"
    command = [sys.executable, "-c", code, str(folder), *map(str, command[1:])]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def copy_house(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "ckptmirror", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HOME / "pyproject.toml", folder)
    return folder


def test_the_layers_are_kept(tmp_path: Path):
    kept = layers_of(copy_house(tmp_path))
    assert kept.returncode == 0, kept.stdout + kept.stderr


PLANTED = {
    "core imports os": ("core/names.py", "import os"),
    "core imports local": ("core/codec.py", "from ckptmirror.local import files"),
    "flow imports torch": ("flow/save/save.py", "import torch"),
    "cli imports torch": ("cli/stage.py", "import torch"),
    "config imports torch": ("config.py", "import torch"),
    "formats imports data": ("formats/merging.py", "from ckptmirror.data import loader"),
    "untrusted imports formats": ("untrusted/tensor_files.py", "from ckptmirror.formats import base"),
    "untrusted knows saves": ("untrusted/archives.py", "from ckptmirror.core import model"),
    "stores imports formats": ("stores/file.py", "from ckptmirror.formats import base"),
    "formats imports ranks": ("formats/model.py", "from ckptmirror.ranks import base"),
    "stores imports the uploads table": ("stores/memory.py", "from ckptmirror.local import uploads"),
    "local imports stores": ("local/files.py", "from ckptmirror.stores import base"),
    "flow imports cli": ("flow/drain.py", "from ckptmirror.cli import main"),
    "testing imports core": ("testing/fault.py", "from ckptmirror.core import errors"),
    "testing imports manager": ("testing/exact_resume.py", "from ckptmirror.manager import CheckpointManager as M"),
    "integrations imports flow": ("integrations/plain_eval.py", "from ckptmirror.flow.fetch import stage"),
    "arguments imports config": ("arguments.py", "from ckptmirror import config"),
    "places imports save": ("flow/places/catalog.py", "from ckptmirror.flow.save import commit"),
    "places imports upload": ("flow/places/mirrors.py", "from ckptmirror.flow.upload import record"),
    "save imports fetch": ("flow/save/commit.py", "from ckptmirror.flow.fetch import destination"),
    "upload imports fetch": ("flow/upload/artifact.py", "from ckptmirror.flow.fetch import blocks"),
    "fetch imports start": ("flow/fetch/load_state.py", "from ckptmirror.flow.start import resume"),
    "fetch imports retention": ("flow/fetch/stage.py", "from ckptmirror.flow.retention import durability"),
    "retention imports status": ("flow/retention/rotation.py", "from ckptmirror.flow import status"),
    "start imports verify": ("flow/start/leader.py", "from ckptmirror.flow.verify import structure"),
    "verify imports start": ("flow/verify/verify.py", "from ckptmirror.flow.start import claim"),
    "status imports drain": ("flow/status.py", "from ckptmirror.flow import drain"),
}


def test_each_forbidden_import_is_found(tmp_path: Path):
    """All are planted at once, one line a file, so that the checker need run only once; each must be named."""
    house = copy_house(tmp_path)
    for path, line in PLANTED.values():
        with (house / "ckptmirror" / path).open("a") as file:
            file.write(f"\n{line}\n")
    found = layers_of(house)
    assert found.returncode != 0
    said = re.sub(r"\s+", " ", found.stdout)
    for what, (path, line) in PLANTED.items():
        importer = "ckptmirror." + path.removesuffix(".py").replace("/", ".")
        words = line.split()
        imported = words[1] if words[0] == "import" else f"{words[1]}"
        assert re.search(rf"{re.escape(importer)} -> {re.escape(imported)}", said), f"{what} was not found"


def test_public_names_resolve_and_are_those_of_the_table():
    assert sorted(ckptmirror.__all__) == ckptmirror.__all__
    assert set(ckptmirror.__all__) == {*ckptmirror._HOMES, "errors"}
    for name, home in ckptmirror._HOMES.items():
        assert getattr(ckptmirror, name) is getattr(import_module(home), name)
        assert name in import_module(home).__all__
    assert ckptmirror.errors is import_module("ckptmirror.core.errors")
    assert dir(ckptmirror) == ckptmirror.__all__
    with pytest.raises(AttributeError):
        ckptmirror.no_such_name  # noqa: B018


def test_every_module_exports_what_it_has():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                exported = ast.literal_eval(node.value)
                assert len(exported) == len(set(exported)), path
                defined = {name for name in re.findall(r"\w+", path.read_text().replace(ast.unparse(node), ""))}
                assert set(exported) <= defined, path


@pytest.mark.long  # `make check` has said it by then
def test_the_types_ship_and_the_public_surface_is_typed():
    assert resources.files("ckptmirror").joinpath("py.typed").is_file()
    command = [sys.executable, "-m", "mypy", "--strict"]  # as `make check`, whose cache it takes
    command += ["--config-file", str(HOME / "pyproject.toml"), str(HOME / "tests" / "typing" / "public_names.py")]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=HOME, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_typing_file_uses_every_public_name():
    text = (HOME / "tests" / "typing" / "public_names.py").read_text()
    assert {name for name in ckptmirror.__all__ if not re.search(rf"\b{name}\b", text.split(")\n", 1)[1])} == set()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_says_what_it_is_for(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a module says first what it is for"


BANNED = ("sync", "backup", "flush", "cleanup", "persist", "handler", "util", "helper", "misc", "common")
# Names that are somebody else's: an interface that we fill in, or the public surface that DESIGN.md fixes.
NOT_OURS = {"flush", "fsync", "_fsync", "fsync_dir", "fsync_tree", "persistent_id", "persistent_load", "persistent_dir"}


def test_vague_words_are_in_no_name_of_a_file_function_or_class():
    for path in PACKAGE.rglob("*.py"):
        named = [node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")]
        for name in [path.stem, *filter(None, named)]:
            parts = re.findall(r"[a-z]+|[A-Z][a-z]*", name)
            vague = {part.lower() for part in parts} & set(BANNED)
            assert not vague or name in NOT_OURS, f"{path.relative_to(HOME)}: {name}"


def test_the_readme_mentions_every_verb_and_nothing_names_one_that_is_not_there():
    verbs = set(program.list_commands(click.Context(program)))
    readme = (HOME / "README.md").read_text()
    assert all(re.search(rf"`{verb}`|ckptmirror {verb}\b", readme) for verb in verbs)
    pages = [*HOME.glob("*.md"), *(HOME / "docs").rglob("*.md"), *PACKAGE.rglob("*.py")]
    for page in pages:
        named = set(re.findall(r"[`']ckptmirror ([a-z]+(?:-[a-z]+)*)\b", page.read_text()))
        assert named <= verbs, f"{page.relative_to(HOME)} names {named - verbs}"


def test_each_verb_has_an_end_to_end_test_that_make_test_runs():
    listed = re.findall(
        r"^\| `([\w-]+)` \| `(test_\w+\.py)::(test_\w+)` \|$", (HOME / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert [verb for verb, _, _ in listed] == [
        verb for verb in program.list_commands(click.Context(program)) if verb != "demo"
    ]
    for _, name, function in listed:
        text = (HOME / "tests" / "integration" / name).read_text()
        (found,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == function]
        assert isinstance(found, ast.FunctionDef)
        marks = {ast.unparse(mark) for mark in found.decorator_list}
        is_long = "pytestmark = pytest.mark.long" in text or "pytest.mark.long" in marks
        assert not is_long or "pytest.mark.short" in marks, function
