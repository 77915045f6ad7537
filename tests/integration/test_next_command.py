"""What a hint or a warning names as the next command can be pasted: verb, options and place are right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from ckptmirror.cli._next_command import with_places
from ckptmirror.cli._program import program
from ckptmirror.core import errors
from ckptmirror.observe.log import LINES
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import run
from tests.kit.roots import fail_uploads, make_mirrored, make_pending
from tests.kit.source_texts import texts_of

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
PACKAGE = HOME / "ckptmirror"
_COMMAND = re.compile(r"`(ckptmirror [a-z]+[^`]*)`")
STAND_INS = {"N": "1", "ID": "1f0c9a2e", "URL": "gs://bucket/run"}


def filled(text: str) -> str:
    """A text with a value for every place that is filled in when it is shown."""
    return re.sub(r"%(?:\(\w+\))?[-.0-9]*[sdfr]|\{\}", "1", text)


def named_commands() -> dict[str, str]:
    """Every command that a text of the package names, with where."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in texts_of(path, "1"):
            for command in _COMMAND.findall(text):
                found[" ".join(command.replace("%(at_root)s", " --root /a").split())] = str(path.relative_to(HOME))
    return found


def is_accepted(command: str) -> bool:
    """Whether there is such a verb, and it takes these options and no more places."""
    words = [STAND_INS.get(word, word) for word in shlex.split(filled(command))]
    verb = program.get_command(click.Context(program), words[1])
    if verb is None:
        return False
    rest = [word for word in words[2:] if word not in ("…", "--help")]
    with verb.make_context(words[1], rest, resilient_parsing=True) as context:
        left = list(context.args)
    known = {name for parameter in verb.params for name in parameter.opts} | {"--help"}
    return not left and {word for word in words if word.startswith("--")} <= known


def test_a_command_that_a_text_names_is_accepted_by_the_command_line():
    named = named_commands()
    assert len(named) > 20
    assert {command: where for command, where in named.items() if not is_accepted(command)} == {}


ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_says_what_happened_and_what_to_do(cls: type[errors.CkptMirrorError]):
    message = str(cls())
    assert message[0].isupper()
    assert message.endswith(".")
    assert cls.hint.endswith(".")
    assert len(cls.hint.split()) >= 4


WARNINGS = [cls for cls, (level, _) in LINES.items() if level >= 40]


@pytest.mark.parametrize("cls", WARNINGS, ids=lambda cls: cls.__name__)
def test_an_event_that_is_an_error_says_why(cls: type):
    assert "%(reason)s" in LINES[cls][1]


# -- with the place that a verb was about -------------------------------------------------------------------


def commands_of(text: str) -> list[list[str]]:
    return [shlex.split(command) for command in _COMMAND.findall(text)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_the_hint_of_every_error_is_completed_and_still_accepted(cls: type[errors.CkptMirrorError]):
    given = {"root": Path("/local ssd/it's"), "mirror": "gs://bucket/run-17", "step": 200, "dest": None}
    for words in commands_of(with_places(cls.hint, given)):
        verb = program.get_command(click.Context(program), words[1])
        assert verb is not None
        with verb.make_context(words[1], words[2:], resilient_parsing=True) as context:
            if words[1] in ("ls", "verify"):
                assert "/local ssd/it's" in (context.params.get("place"), context.params.get("reference"))
                continue
            if "root" in context.params:
                assert context.params["root"] == Path("/local ssd/it's")
            if "mirror" in context.params:
                assert context.params["mirror"] == "gs://bucket/run-17"
            if "step" in context.params:
                assert context.params["step"] == 200


def test_what_a_hint_says_itself_stays():
    given = {"root": Path("/a"), "step": 7}
    assert with_places("See `ckptmirror status --root /b`.", given) == "See `ckptmirror status --root /b`."
    assert with_places("See `ckptmirror --help`.", given) == "See `ckptmirror --help`."
    assert with_places("See `ckptmirror ls`.", {}) == "See `ckptmirror ls`."
    assert with_places("See `ckptmirror ls`.", given) == "See `ckptmirror ls /a`."
    assert with_places("Then `ckptmirror drain`.", {"root": Path("/a b")}) == "Then `ckptmirror drain --root '/a b'`."


@pytest.mark.parametrize("verb", program.list_commands(click.Context(program)))
def test_a_hint_may_name_any_verb(verb: str):
    completed = with_places(f"Then `ckptmirror {verb} --json`.", {"root": Path("/a")})
    assert completed in (f"Then `ckptmirror {verb} --json`.", f"Then `ckptmirror {verb} --json --root /a`.")
    takes_root = any("--root" in one.opts for one in program.get_command(click.Context(program), verb).params)  # type: ignore[union-attr]
    assert ("--root" in completed) == (takes_root and verb not in ("ls", "verify"))


def pasted(stderr: str, env: dict[str, str], cwd: Path) -> int:
    """Run the first command that an error names, as it stands there; return its exit code."""
    (words, *_) = commands_of(stderr)
    return run(*words[1:], env=env, cwd=cwd).returncode


def test_the_command_that_an_error_of_a_verb_names_works_when_pasted(tmp_path: Path):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    root, url, _ = make_mirrored(tmp_path / "it's here", 200, kinds=("model",))
    for arguments in (
        ("stage", "--step", "100", "--mirror", url, "--dest", tmp_path / "e"),
        ("stage", "--step", "200", "--kind", "dcp", "--mirror", url, "--dest", tmp_path / "e"),
        ("verify", root, "--step", "100"),
    ):
        ended = run(*arguments, cwd=elsewhere)
        assert ended.returncode in (3, 4), ended.stderr
        assert unquote(commands_of(ended.stderr)[0][-1]) in (url, str(root)), ended.stderr
        assert pasted(ended.stderr, {}, elsewhere) == 0, ended.stderr


def test_drain_status_and_retry_name_commands_with_the_root(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    root, _ = make_pending(tmp_path / "with blank", "gs://test-bucket/run", 100, kinds=("model",))
    gcs_server.faults([Fault(operation="upload.*", object="model_000100", times=0, status=400)])
    env = gcs_server.environment
    drained = run("drain", "--root", root, env=env, cwd=tmp_path)
    assert drained.returncode == 8
    said = run("status", "--root", root, cwd=tmp_path).stdout
    gcs_server.clear_faults()
    assert not commands_of(drained.stderr), "it would name the command that failed"
    assert commands_of(said)[0] == ["ckptmirror", "drain", "--root", str(root)]
    assert pasted(said, env, tmp_path) == 0
    more, _ = make_pending(tmp_path / "more of it", f"file://{tmp_path}/m", 100, kinds=("model",))
    fail_uploads(more, "model_000100.pt")
    retried = run("retry", "--root", more, cwd=tmp_path)
    assert commands_of(retried.stderr)[0] == ["ckptmirror", "drain", "--root", str(more)]
    assert pasted(retried.stderr, {}, tmp_path) == 0


def test_a_command_with_a_quote_that_is_not_closed_is_left_as_it_is():
    assert with_places("Run `ckptmirror ls /it's`.", {"root": "/a"}) == "Run `ckptmirror ls /it's`."
