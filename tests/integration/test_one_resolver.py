"""Whatever a person types means the same at every entry point: one function takes it apart, one picks the save."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click
import pytest

import ckptmirror
from ckptmirror import (
    CheckpointManager,
    find_local_checkpoint_steps,
    list_checkpoints,
    load_checkpoint,
    resolve_checkpoint_reference,
    resolve_resume_path,
    stage_checkpoint_step,
)
from ckptmirror.cli._program import program
from ckptmirror.core.errors import BrokenMeta, CheckpointNotFound, CkptMirrorError, IntegrityError, UsageError
from ckptmirror.flow.places.reference import locate
from ckptmirror.flow.places.resolve import resolve_for_load
from ckptmirror.flow.places.select import choosable, choose
from tests.kit.cli import run
from tests.kit.faults import flip_bit
from tests.kit.legacy import save_legacy
from tests.kit.training import new_state, running, saved_run

pytestmark = pytest.mark.long

PACKAGE = Path(ckptmirror.__file__).parent

# Everything that a user can hand a reference, or the place of saves, to. A new one has to be added here, with a test.
TAKES_A_REFERENCE = {
    "CheckpointManager.load",
    "CheckpointManager.resume",  # policy
    "list_checkpoints",
    "load_checkpoint",
    "resolve_checkpoint_reference",
}
ARGUMENTS_OF_VERBS = {("diff", "first"), ("diff", "second"), ("ls", "place"), ("verify", "reference")}


# -- the same table through every entry point --------------------------------------------------------------------------


@dataclass
class Place:
    """A root with two steps, one broken save, an older writer's folder and a mirror."""

    root: Path
    references: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    root, url = folder / "root", f"file://{folder}/mirror"
    saved_run(root, (1, 2), url)
    saved_run(folder / "broken", (3,))
    flip_bit(folder / "broken" / "meta_000003.json", 40)
    saved_run(folder / "short", (4,))
    (folder / "short" / "model_000004.pt").write_bytes(b"short")
    save_legacy(folder / "old", 200)
    (folder / "link").symlink_to(root / "dcp_000001")
    (folder / "notes.txt").write_text("hello")
    (folder / "empty").mkdir()
    return Place(
        root,
        {
            "dcp": f"{root}/dcp_000001",
            "dcp with a slash": f"{root}/dcp_000001/",
            "model": f"{root}/model_000001.pt",
            "meta": f"{root}/meta_000002.json",
            "latest": f"{root}/latest",
            "directory": str(root),
            "link": f"{folder}/link",
            "older": f"{folder}/old/dist_ckpt_000200",
            "older meta": f"{folder}/old/dist_ckpt_000200/meta.json",
            "older directory": f"{folder}/old",
            "mirror": url,
            "object": f"{url}/model_000001.pt",
            "missing object": f"{url}/dcp_000009",
            "missing": f"{root}/dcp_000009",
            "empty": f"{folder}/empty",
            "foreign": f"{folder}/notes.txt",
            "a part": f"{root}/optim_000001_rank0.pt",
            "broken meta": f"{folder}/broken/dcp_000003",
            "not whole": f"{folder}/short/model_000004.pt",
        },
    )


Answer = tuple[int, str] | type[CkptMirrorError]
MEANS: dict[str, Answer] = {
    "dcp": (1, "dcp"),
    "dcp with a slash": (1, "dcp"),
    "model": (1, "model"),
    "meta": (2, "dcp"),
    "latest": (2, "dcp"),
    "directory": (2, "dcp"),
    "link": (1, "dcp"),
    "older": (200, "dcp"),
    "older meta": (200, "dcp"),
    "older directory": (200, "dcp"),
    "mirror": (2, "dcp"),
    "object": (1, "model"),
    "missing object": CheckpointNotFound,
    "missing": CheckpointNotFound,
    "empty": CheckpointNotFound,
    "foreign": UsageError,
    "a part": UsageError,
    "broken meta": BrokenMeta,
    "not whole": IntegrityError,
}


def answer(function: Callable[[], tuple[int, str]]) -> Answer:
    try:
        return function()
    except CkptMirrorError as error:
        return type(error)


@pytest.mark.parametrize("name", MEANS)
def test_a_reference_means_the_same_at_every_entry_point(name: str, place: Place, tmp_path: Path) -> None:
    reference = place.references[name]

    def resolved() -> tuple[int, str]:
        found = resolve_checkpoint_reference(reference)
        return found.step, found.kind

    def loaded() -> tuple[int, str]:
        found = load_checkpoint(reference)
        return found.meta.step, found.kind

    def given() -> tuple[int, str]:
        with running(tmp_path / "new") as manager:
            state = new_state(seed=3)
            state.optimizer = state.scheduler = None
            found = manager.load(state, reference, exclude=("model",))
            return found.step, found.kind

    expected = answer(resolved)
    assert expected == MEANS[name]
    assert answer(loaded) == answer(given) == expected


@pytest.mark.parametrize("name", MEANS)
def test_the_verbs_take_a_reference_apart_like_the_rest(name: str, place: Place) -> None:
    reference = place.references[name]
    expected = answer(lambda: (resolve_checkpoint_reference(reference).step, ""))
    verified = run("verify", reference, "--json")
    listed = run("ls", reference, "--json")
    compared = run("diff", reference, reference, "--json")
    if isinstance(expected, tuple) and not name.startswith("older"):
        assert verified.returncode == listed.returncode == compared.returncode == 0
        assert json.loads(compared.stdout)["first"]["step"] == expected[0]
        steps = {save["step"] for save in json.loads(verified.stdout)["saves"]}
        assert expected[0] in steps
        assert steps == {save["step"] for save in json.loads(listed.stdout)["saves"]}
    elif isinstance(expected, tuple):
        assert verified.returncode == 3  # nobody can verify what has no checksums
        assert [save["step"] for save in json.loads(listed.stdout)["saves"]] == [expected[0]]
    elif name != "a part":  # which is enough to say what to verify, and nothing that can be loaded
        assert verified.returncode == expected.exit_code
    if name == "missing":
        assert listed.returncode == verified.returncode


# -- the one function is the one that runs -----------------------------------------------------------------------------


@contextmanager
def running_through(*functions: Callable[..., Any]) -> Iterator[set[str]]:
    """Collect the names of those of ``functions`` whose own code runs meanwhile, in any thread."""
    wanted = {function.__code__: function.__name__ for function in functions}
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            seen.add(wanted[frame.f_code])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as the library has it


def test_every_entry_point_runs_through_the_one_function(place: Place, tmp_path: Path) -> None:
    path = place.root / "dcp_000001"
    state = new_state()

    def through(function: Callable[[], Any]) -> set[str]:
        with running_through(resolve_for_load, locate, choose, choosable) as seen:
            function()
        return seen

    both = {"resolve_for_load", "locate"}
    assert through(lambda: load_checkpoint(path)) == both
    with running(tmp_path / "new") as manager:
        manager.resume(state)
        assert through(lambda: manager.load(state, path)) == both
        assert "choose" in through(lambda: manager.load(state, place.root))
    with running(place.root, str(place.references["mirror"])) as manager:
        assert through(lambda: manager.load(state, 1)) == {"choose", "choosable"}
        assert both <= through(lambda: manager.resume(state, policy=path))
    assert through(lambda: list_checkpoints(path)) == {"locate"}
    assert "choosable" in through(lambda: find_local_checkpoint_steps(place.root))
    assert "choosable" in through(lambda: resolve_resume_path(place.root))
    url = place.references["mirror"]
    assert "choose" in through(lambda: stage_checkpoint_step(url, step=1, dest=tmp_path / "eval"))
    for verb in (["verify", str(path)], ["ls", str(path)]):
        assert "locate" in through(lambda verb=verb: program.main(verb, standalone_mode=False))


def test_whoever_takes_a_reference_is_in_the_table() -> None:
    found = set()
    for name in ckptmirror.__all__:
        offered = getattr(ckptmirror, name)
        if inspect.isfunction(offered) and _takes(offered):
            found.add(name)
    found |= {
        f"CheckpointManager.{name}"
        for name, method in inspect.getmembers(CheckpointManager, callable)
        if _takes(method)
    }
    assert found == TAKES_A_REFERENCE
    assert _arguments() == ARGUMENTS_OF_VERBS


def _arguments() -> set[tuple[str, str | None]]:
    context = click.Context(program)
    commands = {verb: program.get_command(context, verb) for verb in program.list_commands(context)}
    return {
        (verb, parameter.name)
        for verb, command in commands.items()
        if command is not None
        for parameter in command.params
        if isinstance(parameter, click.Argument) and parameter.expose_value  # DIR and URL stand for an option
    }


def _takes(function: Callable[..., Any]) -> bool:
    try:
        return bool({"reference", "root_or_url", "policy"} & set(inspect.signature(function).parameters))
    except (TypeError, ValueError):
        return False


# -- and nobody else takes names apart ---------------------------------------------------------------------------------

PARSERS = {
    "parse_name",
    "parse_artifact_path",
    "readlink",
    "read_inventory",
    "local_catalog",
    "mirror_catalog",
    "choose",
}
# Where a person's words come in: these hand them on as they are.
SURFACE = ["cli", "integrations", "manager.py", "config.py", "__init__.py", "__main__.py"]
# Who reads a link: one that a person typed only ``reference``; a start and a rotation look at the root's ``latest``.
FOLLOWS_LINKS = {"flow/places/reference.py", "flow/start/resume.py", "flow/retention/rotation.py"}
# Who tells a path from a URL in a reference.
TELLS_URLS = {"flow/places/reference.py"}


def modules(*below: str) -> Iterator[tuple[str, ast.Module]]:
    for one in below or (".",):
        path = PACKAGE / one
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text())


def called(tree: ast.Module) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}


def test_where_a_persons_words_come_in_nothing_takes_names_apart() -> None:
    guilty = {name: called(tree) & PARSERS for name, tree in modules(*SURFACE)}
    assert {name: calls for name, calls in guilty.items() if calls} == {}


def test_only_the_one_module_follows_a_link_that_a_person_typed() -> None:
    assert {name for name, tree in modules("flow") if "readlink" in called(tree)} == FOLLOWS_LINKS


def test_references_are_taken_apart_in_one_module() -> None:
    assert {name for name, tree in modules("flow", "cli", "manager.py") if "locate" in called(tree)} == {
        "flow/places/reference.py",
        "flow/places/resolve.py",
        "flow/fetch/stage.py",
        "flow/verify/verify.py",
        "flow/start/resume_policy.py",
    }
    tells = set()
    for name, tree in modules("flow", "manager.py"):
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Compare)
                and isinstance(node.left, ast.Constant)
                and node.left.value == "://"
                and isinstance(node.comparators[0], ast.Name)
            ):
                tells.add(name)
    assert tells == TELLS_URLS
