"""The reference pages say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import click
import pytest

from ckptmirror.cli._program import program
from ckptmirror.core import errors, names
from ckptmirror.flow.save.emergency_files import note_path
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.observe.timeline_bars import BarKind, Outcome
from tests.kit.cli import run
from tests.kit.roots import fail_uploads, make_mirrored, make_pending, require
from tests.kit.saves import FIRST_ATTEMPT, put_attempts
from tests.kit.source_texts import texts_of
from tests.kit.training import saved_run

HOME = Path(__file__).resolve().parents[2]
REFERENCE = HOME / "docs" / "reference"
PAGES = [*sorted(HOME.glob("*.md")), *sorted((HOME / "docs").rglob("*.md")), HOME / "deploy" / "README.md"]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row but the heads."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not is_head:
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            found.append([cell.strip().replace(r"\|", "|") for cell in cells])
    return found


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)$", (REFERENCE / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_table_of_exit_codes_is_that_of_the_errors():
    listed = {
        int(code): {name for name in re.split(r",\s*", classes) if name}
        for code, _, classes in rows((REFERENCE / "exit-codes.md").read_text())
    }
    classes = [getattr(errors, name) for name in errors.__all__]
    by_code: dict[int, set[str]] = {code: set() for code in (0, 130, 143)}
    for cls in classes:
        by_code.setdefault(cls.exit_code, set()).add(cls.__name__)
    assert listed == by_code


def verbs() -> list[str]:
    return program.list_commands(click.Context(program))


def test_the_page_of_the_command_line_has_every_verb_and_every_option():
    pages = sections("cli.md")
    assert pages.pop("Progress")
    assert pages.pop("DIR and URL")
    assert pages.pop("Tables")
    assert sorted(pages) == verbs()
    for verb, text in pages.items():
        command = program.get_command(click.Context(program), verb)
        assert command is not None
        options = [p for p in command.params if isinstance(p, click.Option) and p.name != "verbose"]
        said = {row[0].split("`")[1]: row for row in rows(text)}
        assert set(said) == {option.opts[-1] for option in options}
        for option in options:
            is_said = "required" in said[option.opts[-1]][1]
            assert option.required == is_said, f"{verb} {option.opts[-1]}"


def test_the_table_of_places_is_that_of_the_verbs():
    said = {}
    for listed, usage, options, _ in rows(sections("cli.md")["DIR and URL"]):
        for verb in re.findall(r"`([\w-]+)`", listed):
            said[verb] = usage.replace("VERB", verb).strip("`"), set(re.findall(r"`(--\w+)`", options))
    found = {}
    for verb in verbs():
        command = program.get_command(click.Context(program), verb)
        assert command is not None
        places = [p.metavar for p in command.params if isinstance(p, click.Argument)]
        if places:
            both = {"--root", "--mirror"} & {name for p in command.params for name in p.opts if not p.multiple}
            both |= {"--mirror"} if verb == "verify" else set()
            found[verb] = " ".join([verb, *map(str, places)]), both
    assert said == found


def in_a_run(root: Path, url: str) -> Path:
    """A root whose run names a required mirror."""
    put_attempts(root, [FIRST_ATTEMPT], required=(url,))
    UploadsTable.open(root / names.TABLE_NAME, create=True).close()
    return root


def fields(verb: str) -> set[str]:
    found = set()
    for row in rows(sections("json.md")[verb]):
        found |= set(re.findall(r"`([^`]+)`", row[0]))
    return found


def shape(value: object, prefix: str = "") -> set[str]:
    """Every key of an object, and of all objects of a list below it as ``list.key``; they all have the same."""
    assert isinstance(value, dict)
    found = set()
    for key, inner in value.items():
        found.add(prefix + key)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            shapes = [shape(one, f"{prefix}{key}.") for one in inner]
            assert all(one == shapes[0] for one in shapes), key
            found |= shapes[0]
    return found


def fail_one(folder: Path) -> Path:
    """A root, one upload of which failed for good."""
    root, _ = make_pending(folder, f"file://{folder}/mirror", 100, kinds=("model",))
    fail_uploads(root, "model_000100.pt")
    return root


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What each verb prints with ``--json``."""
    folder = tmp_path_factory.mktemp("json")
    root, url, _ = make_mirrored(folder, 100, 200, kinds=("model",))
    require(root, url)
    saved_run(folder / "trained", (1, 2))
    commands = {
        "push": ["push", "--root", root, "--mirror", url],
        "drain": ["drain", "--root", root],
        "ls": ["ls", root],
        "diff": ["diff", folder / "trained" / "dcp_000001", folder / "trained"],
        "status": ["status", "--root", root],
        "stage": ["stage", "--step", "100", "--mirror", url, "--dest", folder / "eval"],
        "rotate": ["rotate", "--root", root, "--keep-last", "1"],
        "timeline": ["timeline", "--root", root],
        "config": ["config"],
        "verify": ["verify", "--root", root, "--mirror", url, "--deep"],
        "retry": ["retry", "--root", fail_one(folder / "failed")],
        "rewind": ["rewind", "--root", make_pending(folder / "more", url + "2", 100, 200)[0], "--step", "100"],
        "forget-mirror": ["forget-mirror", "--root", in_a_run(folder / "run", url + "3"), "--url", url + "3"],
    }
    return {verb: json.loads(run(*arguments, "--json").stdout) for verb, arguments in commands.items()}


def test_the_fields_of_json_are_those_of_the_page(said: dict[str, dict[str, object]]):
    more = {"verify", "diff", "retry", "rewind", "config", "forget-mirror"}
    assert set(sections("json.md")) == {"stage", "ls", "status", "drain and push", "rotate", "timeline"} | more
    assert set(said["stage"]) == fields("stage")
    assert shape(said["ls"]) == fields("ls")
    assert set(said["drain"]) == set(said["push"]) == fields("drain and push")
    assert set(said["rotate"]) == {field for field in fields("rotate")}
    assert set(said["status"]) == fields("status")
    assert shape(said["config"]) == fields("config")
    assert shape(said["verify"]) == fields("verify")
    assert set(said["diff"]) == fields("diff")
    assert set(said["retry"]) == fields("retry")
    assert set(said["rewind"]) == fields("rewind")
    assert set(said["forget-mirror"]) == fields("forget-mirror")
    assert shape(said["timeline"]) | {"clock_jumps.at_utc", "clock_jumps.by_s"} == fields("timeline")


def test_every_verb_that_has_json_is_compared_with_the_page(said: dict[str, dict[str, object]]):
    commands = {verb: program.get_command(click.Context(program), verb) for verb in verbs()}
    assert set(said) == {verb for verb, one in commands.items() if one and any(p.name == "as_json" for p in one.params)}


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "list": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def is_of_type(value: object, said: str) -> bool:
    """Whether a value is what a cell such as ``int or null`` or ``list of strings`` says."""
    for one in said.split(" or "):
        whole, _, inner = one.partition(" of ")
        if isinstance(value, TYPES[whole]) and (isinstance(value, bool) == (whole == "bool")):
            return not inner or all(is_of_type(item, inner.removesuffix("s")) for item in value)  # type: ignore[attr-defined]
    return False


def values_at(facts: dict[str, object], path: str) -> list[object]:
    """Every value that a field of the page has in an output."""
    here: list[object] = [facts]
    for key in path.split("."):
        here = [item for one in here for item in (one if isinstance(one, list) else [one])]
        here = [one[key] for one in here if isinstance(one, dict)]
    return here


def test_the_values_of_json_have_the_types_of_the_page(said: dict[str, dict[str, object]]):
    seen = 0
    for verb, facts in said.items():
        for row in rows(sections("json.md")[{"drain": "drain and push", "push": "drain and push"}.get(verb, verb)]):
            names_, types = re.findall(r"`([^`]+)`", row[0]), row[1].split(", ")
            for name, kind in zip(names_, types * len(names_) if len(types) == 1 else types, strict=False):
                if kind == "any":
                    continue
                for value in values_at(facts, name):
                    assert is_of_type(value, kind), f"{verb}: {name} is {value!r}, not {kind}"
                    seen += 1
    assert seen > 200


def test_the_objects_inside_json_have_the_fields_of_the_page(said: dict[str, dict[str, object]]):
    for verb, field in (
        ("status", "saves"),
        ("status", "mirrors"),
        ("rotate", "keep"),
        ("rotate", "deleted"),
        ("rewind", "superseded"),
    ):
        cells = {row[0].strip("`"): row[2] for row in rows(sections("json.md")[verb])}
        inner = said[verb][field]
        assert isinstance(inner, list)
        assert set(inner[0]) == set(re.findall(r"`([^`]+)`", cells[field])), field


def test_what_a_retry_says_of_a_mirror_is_on_the_page(said: dict[str, dict[str, object]]):
    (mirror,) = said["retry"]["mirrors"]  # type: ignore[misc]  # a list of one object
    cells = {row[0].strip("`"): row[2] for row in rows(sections("json.md")["retry"])}
    assert {*mirror, *mirror["files"][0]} == set(re.findall(r"`([^`]+)`", cells["mirrors"]))


def test_every_kind_and_outcome_of_a_bar_is_on_the_page():
    cells = {row[0].strip("`"): row[2] for row in rows(sections("json.md")["timeline"])}
    assert re.findall(r"`([^`]+)`", cells["bars.kind"]) == list(get_args(BarKind))
    assert re.findall(r"`([^`]+)`", cells["bars.outcome"]) == list(get_args(Outcome))


def test_the_names_on_disk_are_those_that_the_code_makes():
    plain, tagged = names.SaveName(200), names.SaveName(200, "1f0c9a2e")
    made = {
        plain.meta,
        plain.model,
        plain.optim(3),
        plain.extra(3),
        plain.tensors(3),
        plain.dcp_dir,
        names.emergency_dir_name(200, "20260102T030405Z"),
        names.LATEST_NAME,
        tagged.model,
        tagged.meta,
        names.SaveName(1234567).model,
        names.ATTEMPTS_NAME,
        names.MET_NAME,
        names.HEALTH_NAME,
        names.STATUS_NAME,
        names.TABLE_NAME,
        f"{names.TABLE_NAME}-reserve",
        names.TABLE_NOTE_NAME,
        str(note_path(Path(), "1f0c9a2e" + "0" * 24)),
        names.LOCK_NAME,
        names.TRASH_DIR,
        names.EVENTS_NAME,
        names.OLDER_EVENTS_NAME,
        names.WRITER_NAME,
        names.diverged_name("5f0c9a2e" * 4),
        names.part_name(200, "1f0c9a2e" + "0" * 24, 1, 2),
        names.tmp_name(plain.model, "1f0c9a2e" + "0" * 24),
    }
    listed = {row[0].strip("`") for row in rows((REFERENCE / "on-disk.md").read_text())}
    assert listed == made
    for name in listed:
        if not name.startswith((names.CONTROL_DIR, names.HEALTH_DIR)) and name != names.WRITER_NAME:
            assert names.parse_name(name) is not None, name


def inline_code(page: Path) -> list[str]:
    """What a page says between single backquotes, outside its blocks of code."""
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", outside)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_a_command_that_a_page_mentions_has_the_options_that_it_mentions(page: Path):
    for code in inline_code(page):
        verb = re.match(r"ckptmirror ([a-z]+(?:-[a-z]+)*)\b", code)
        if verb:
            command = program.get_command(click.Context(program), verb[1])
            assert command is not None, code
            options = {name for parameter in command.params for name in parameter.opts}
            assert set(re.findall(r"(?<= )--[a-z-]+", code)) <= options | {"--help"}, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_a_target_or_a_file_that_a_page_mentions_is_there(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (HOME / "Makefile").read_text(), re.MULTILINE))
    for code in inline_code(page):
        if code.startswith("make "):
            assert code.split()[1] in targets, code
        named = re.fullmatch(
            r"(?:tests|ckptmirror|docs|deploy|core|flow|local|stores|formats|ranks|cli|observe)/[\w./*-]+", code
        )
        if named:
            places = (HOME, HOME / "ckptmirror")
            assert any(list(place.glob(code.rstrip("/"))) for place in places), f"{code} is not there"


def test_the_messages_that_the_page_of_several_nodes_quotes_are_those_of_the_code():
    page = (HOME / "docs" / "guide" / "several-nodes.md").read_text()
    quoted = [row[0].split("`")[1] for row in rows(page.partition("## What a failure looks like")[2])]
    texts = [" ".join(text.split()) for path in (HOME / "ckptmirror").rglob("*.py") for text in texts_of(path, "…")]
    assert len(quoted) >= 10
    for message in quoted:
        pattern = re.compile(".+".join(map(re.escape, message.split("…"))))
        assert any(pattern.search(text) for text in texts), message
