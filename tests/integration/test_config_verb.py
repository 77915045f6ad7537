"""Settings as a person meets them: a directory with a file, variables, flags, the shell; and the page about them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.config import SETTINGS, load_settings
from tests.integration.test_docs import REFERENCE, rows, sections
from tests.kit.cli import CONSOLE_SCRIPT, assert_tells, clean_environment, run
from tests.kit.roots import make_mirrored, make_pending, require

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
PAGE = (REFERENCE / "configuration.md").read_text()


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ckptmirror.toml").write_text(text)
    return folder


def settings(folder: Path, **variables: str) -> dict[str, tuple[Any, str]]:
    """What ``ckptmirror config --json`` says in a directory: value and source by name."""
    ended = run("config", "--json", cwd=folder, env=variables)
    assert (ended.returncode, ended.stderr) == (0, "")
    return {one["name"]: (one["value"], one["source"]) for one in json.loads(ended.stdout)["settings"]}


# -- the verb -----------------------------------------------------------------------------------------------


@pytest.mark.short
def test_config_shows_each_value_and_where_it_comes_from(tmp_path: Path):
    folder = write(
        tmp_path,
        'root = "/file"\n\n[[mirrors]]\nurl = "gs://bucket/x"\nbytes_per_s = 200e6\n'
        '[[mirrors]]\nurl = "/nfs/x"\nrequired = false\n',
    )
    ended = run("config", cwd=folder, env={"CKPTMIRROR_RETENTION_KEEP_LAST": "3"})
    assert (ended.returncode, ended.stderr) == (0, f"configuration file: {folder}/ckptmirror.toml\n")
    lines = [re.sub(r" {2,}", "  ", line) for line in ended.stdout.splitlines()]
    assert lines[0] == 'root  "/file"  ckptmirror.toml:1'
    assert lines[1] == "mirrors  gs://bucket/x, bytes_per_s = 200000000  ckptmirror.toml:3"
    assert lines[2] == "  file:///nfs/x, required = false"
    assert 'kinds  ["dcp", "model"]  default' in lines
    assert "retention.keep_last  3  CKPTMIRROR_RETENTION_KEEP_LAST" in lines
    assert "retention.metric  none  default" in lines
    assert len(lines) == len(SETTINGS) + 1


def test_config_as_json_has_every_setting_with_value_and_source(tmp_path: Path):
    folder = write(tmp_path, 'root = "runs"\nmirrors = ["/nfs/x"]\n')
    said = settings(folder, CKPTMIRROR_ROOT="/variable")
    assert list(said) == [setting.name for setting in SETTINGS]
    assert said["root"] == ("/variable", "CKPTMIRROR_ROOT")
    mirror = {"url": "file:///nfs/x", "required": True, "bytes_per_s": None, "requests_per_s": None}
    assert said["mirrors"] == ([mirror], "ckptmirror.toml:2")
    assert said["timeout_s"] == (600.0, "default")
    assert settings(folder)["root"] == (f"{folder}/runs", "ckptmirror.toml:1")


def test_config_without_a_file_says_so(tmp_path: Path):
    ended = run("config", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "configuration file: none in this directory or above it\n")


@pytest.mark.parametrize(
    "verb", ["config", "status", "drain", "ls", "timeline", "push", "rotate", "verify", "stage --step 1"]
)
def test_every_verb_says_what_is_wrong_with_the_file(verb: str, tmp_path: Path):
    folder = write(tmp_path, 'root = "/x"\n\n[retention]\nkeep_lst = 2\n')
    ended = run(*verb.split(), cwd=folder)
    assert_tells(
        ended, 10, "ckptmirror: ckptmirror.toml:4: there is no setting retention.keep_lst", "retention.keep_last?"
    )


@pytest.mark.parametrize("verb", ["status --root .", "push --mirror /m --root .", "stage --step 1 --mirror /m"])
def test_a_broken_file_is_told_of_although_the_flag_is_given(verb: str, tmp_path: Path):
    assert_tells(run(*verb.split(), cwd=write(tmp_path, "root =\n")), 10, "ckptmirror.toml:1: this is not TOML")


def test_a_mistyped_variable_is_told_of(tmp_path: Path):
    ended = run("status", cwd=tmp_path, env={"CKPTMIRROR_ROTO": "/x"})
    assert_tells(ended, 10, "CKPTMIRROR_ROTO is set, but there is no such setting (did you mean CKPTMIRROR_ROOT?)")


def test_the_demo_leaves_the_settings_of_its_user_alone(tmp_path: Path):
    code = "from ckptmirror.cli import demo; demo._leave_settings(); from ckptmirror import load_settings; "
    code += "print({value.source for value in load_settings().values.values()})"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=write(tmp_path, "root =\n"),
        env=clean_environment(PYTHONPATH=str(HOME), CKPTMIRROR_ROTO="/x"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "{'default'}\n"), ended.stderr


def test_help_needs_no_settings(tmp_path: Path):
    ended = run("status", "--help", cwd=write(tmp_path, "root =\n"))
    assert (ended.returncode, ended.stderr) == (0, "")


# -- the other verbs ----------------------------------------------------------------------------------------


def test_in_a_configured_directory_no_verb_needs_a_flag(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    require(root, url)
    folder = write(tmp_path / "project", f'root = "../root"\nmirrors = ["{url}"]\nretention.keep_last = 1\n')
    below = folder / "src" / "deep"
    below.mkdir(parents=True)
    assert run("push", cwd=below).returncode == 0
    assert run("drain", cwd=below).returncode == 0
    assert run("status", cwd=below).stdout.startswith("safe: ")
    assert json.loads(run("ls", "--json", cwd=below).stdout)["place"] == url
    assert run("timeline", cwd=below).returncode == 0
    staged = run("stage", "--step", "200", "--dest", "eval", cwd=below)
    assert staged.stdout == f"{below}/eval/model_000200.pt\n"
    planned = json.loads(run("rotate", "--dry-run", "--json", cwd=below).stdout)
    assert [one["step"] for one in planned["delete"]] == [100]
    assert run("rotate", cwd=below).returncode == 0
    assert run("ls", root).stdout.split()[0] == "200"


def test_a_flag_wins_over_a_variable_over_the_file(tmp_path: Path):
    places = {name: make_pending(tmp_path / name, f"file://{tmp_path}/mirror", 100)[0] for name in ("a", "b", "c")}
    folder = write(tmp_path / "project", f'root = "{places["a"]}"\n')

    def shown(*arguments: str | Path, **variables: str) -> str:
        facts = json.loads(run("status", "--json", *arguments, cwd=folder, env=variables).stdout)
        return str(facts["root"])

    assert shown() == str(places["a"])
    assert shown(CKPTMIRROR_ROOT=str(places["b"])) == str(places["b"])
    assert shown("--root", places["c"], CKPTMIRROR_ROOT=str(places["b"])) == str(places["c"])


def test_a_flag_of_rotate_changes_one_setting_and_leaves_the_others(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 150, 200, 250, kinds=("model",))
    require(root, url)
    assert run("push", "--root", root, "--mirror", url).returncode == 0
    folder = write(tmp_path / "project", f'root = "{root}"\n[retention]\nkeep_last = 3\nkeep_every = 100\n')
    planned = json.loads(run("rotate", "--keep-last", "1", "--dry-run", "--json", cwd=folder).stdout)
    assert [one["step"] for one in planned["keep"]] == [100, 200, 250]
    assert [one["step"] for one in planned["delete"]] == [150]


def test_what_to_keep_of_one_root_is_not_said_by_the_settings_of_another(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    require(root, url)
    folder = write(tmp_path / "project", f'root = "{tmp_path}/elsewhere"\n[retention]\nkeep_last = 1\n')
    ended = run("rotate", "--root", root, cwd=folder)
    assert_tells(ended, 2, "The number of steps to keep is not set", "--keep-last")
    assert run("push", "--root", root, "--mirror", url).returncode == 0
    write(root, "[retention]\nkeep_last = 1\n")
    planned = json.loads(run("rotate", "--dry-run", "--json", cwd=root).stdout)
    assert [one["step"] for one in planned["delete"]] == [100]


def test_rotate_wants_to_be_told_how_many_steps_to_keep(tmp_path: Path):
    folder = write(tmp_path, 'root = "/x"\n[retention]\nkeep_every = 100\n')
    ended = run("rotate", cwd=folder)
    assert_tells(ended, 2, "The number of steps to keep is not set", "--keep-last", "retention.keep_last")


def test_stage_and_ls_read_from_the_first_of_several_mirrors_and_push_asks_which(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    folder = write(tmp_path / "project", f'root = "{root}"\nmirrors = ["{url}", "{tmp_path}/other"]\n')
    assert run("stage", "--step", "100", "--dest", "eval", cwd=folder).returncode == 0
    assert run("ls", cwd=folder).stdout == run("ls", url).stdout
    assert_tells(
        run("push", cwd=folder), 10, f"2 mirrors are set: {url}, file://{tmp_path}/other.", "Pass --mirror URL"
    )
    assert not (tmp_path / "other").exists()
    assert run("push", "--mirror", tmp_path / "other", cwd=folder).returncode == 0


def test_push_takes_a_mirror_as_optional_where_the_file_says_so(tmp_path: Path):
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    mirror = f"{{ url = '{tmp_path}/other', required = false }}"
    folder = write(tmp_path / "project", f'root = "{root}"\nmirrors = [{mirror}]\n')
    shutil.rmtree(root / ".ckptmirror")
    assert run("push", cwd=folder).returncode == 0
    status = json.loads(run("status", "--json", cwd=folder).stdout)
    assert status["mirrors"] == [{"url": f"file://{tmp_path}/other", "required": False, "pushed": True}]


@pytest.mark.parametrize("verb", ["drain", "push", "stage"])
def test_a_verb_keeps_to_the_limits_that_are_set_for_a_mirror(verb: str, tmp_path: Path):
    """At one call in ten minutes none of them gets further than its first calls."""
    if verb == "drain":
        make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    else:
        make_mirrored(tmp_path, 100, kinds=("model",))
    url = f"{tmp_path}/mirror" if verb != "push" else f"{tmp_path}/empty"
    text = f"root = '../root'\nmirrors = [{{ url = '{url}', requests_per_s = RATE }}]\n"
    arguments = ["stage", "--step", "100", "--dest", "eval"] if verb == "stage" else [verb]
    slow = write(tmp_path / "slow", text.replace("RATE", str(1 / 600)))
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            [CONSOLE_SCRIPT, *arguments], cwd=slow, env=clean_environment(), capture_output=True, timeout=3, check=False
        )
    fast = write(tmp_path / "fast", text.replace("RATE", "10000"))
    assert run(*arguments, cwd=fast).returncode == 0


# -- from Python --------------------------------------------------------------------------------------------

TRAINER = """
import sys, torch
from ckptmirror import CheckpointManager, TrainState, load_settings

flags = {"retention.keep_last": int(sys.argv[1]) if sys.argv[1:] else None}
model = torch.nn.Linear(2, 2)
state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters()))
with CheckpointManager(**load_settings(flags).manager_arguments()) as manager:
    manager.resume(state)
    for step in (1, 2, 3):
        manager.save(step, state)
        manager.wait("mirrored")
    manager.rotate()
print(manager.root, manager.kinds, manager.mode)
"""


def train(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TRAINER, *arguments],
        cwd=folder,
        env=clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(HOME), **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_a_trainer_without_arguments_takes_what_the_verbs_take(tmp_path: Path):
    folder = write(
        tmp_path / "project",
        'root = "root"\nmirrors = ["/nowhere"]\nkinds = ["model"]\nmode = "blocking"\nretention.keep_last = 2\n',
    )
    variables = {"CKPTMIRROR_MIRRORS": str(tmp_path / "mirror")}
    ended = train(folder, **variables)
    assert (ended.returncode, ended.stdout) == (0, f"{folder}/root ('model',) blocking\n"), ended.stderr
    status = json.loads(run("status", "--json", cwd=folder, env=variables).stdout)
    assert [save["step"] for save in status["saves"]] == [2, 3]
    assert status["mirrors"] == [{"url": f"file://{tmp_path}/mirror", "required": True, "pushed": False}]
    assert status["unsafe_files"] == 0


@pytest.mark.long
def test_a_trainer_hands_its_own_flags_on(tmp_path: Path):
    folder = write(tmp_path / "project", 'root = "root"\nkinds = ["model"]\nretention.keep_last = 2\n')
    ended = train(folder, "1", CKPTMIRROR_MIRRORS=str(tmp_path / "mirror"))
    assert ended.returncode == 0, ended.stderr
    assert [save["step"] for save in json.loads(run("status", "--json", cwd=folder).stdout)["saves"]] == [3]


@pytest.mark.long
def test_a_trainer_without_a_root_is_told_how_to_give_one(tmp_path: Path):
    ended = train(tmp_path)
    assert ended.returncode != 0
    said, hint = ended.stderr.splitlines()[-2:]
    assert said.endswith("ConfigError: No root is set.")
    assert "CKPTMIRROR_ROOT" in hint


# -- the shell ----------------------------------------------------------------------------------------------

COMPLETE = """
eval "$(_CKPTMIRROR_COMPLETE=bash_source ckptmirror)"
complete -p ckptmirror >/dev/null
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_ckptmirror_completion ckptmirror
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], ["stage", "status"]),
        (["config", "--j"], ["--json"]),
        (["stage", "--ki"], ["--kind"]),
        (["stage", "--kind", ""], ["dcp", "model"]),
        (["rotate", "--keep-last", "2", "--me"], ["--metric"]),
    ],
)
def test_bash_completes_verbs_options_and_values_also_where_the_file_is_broken(
    words: list[str], offered: list[str], tmp_path: Path
):
    folder = write(tmp_path, "root =\n")
    path = f"{CONSOLE_SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", COMPLETE, "bash", "ckptmirror", *words],
        cwd=folder,
        env=clean_environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == offered


# -- the page -----------------------------------------------------------------------------------------------


def test_the_table_of_the_page_is_that_of_the_code():
    table = PAGE.partition("## Settings")[2].partition("## Mirrors")[0]

    def cell(text: str) -> str:
        return f"`{text}`" if text else ""

    def default(value: object) -> str:
        return "none" if value is None else json.dumps(list(value) if isinstance(value, tuple) else value)

    assert rows(table) == [
        [cell(s.name), cell(s.variable), cell(s.flag), cell(default(s.default)), s.meaning] for s in SETTINGS
    ]


def test_the_table_of_the_page_about_mirrors_names_what_a_mirror_has():
    table = PAGE.partition("## Mirrors")[2].partition("## Which file")[0]
    from ckptmirror import MirrorSpec

    assert [row[0].strip("`") for row in rows(table)] == list(MirrorSpec.__dataclass_fields__)


def test_every_flag_of_a_setting_is_a_flag_of_a_verb():
    text = "".join(sections("cli.md").values())
    assert all(f"| `{setting.flag}`" in text for setting in SETTINGS if setting.flag)


def test_every_file_on_the_page_can_be_read(tmp_path: Path):
    blocks = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`(mirrors = \[.*?\])`", PAGE)
    assert len(blocks) == 2
    assert len(inline) == 1
    for number, text in enumerate([*blocks, *inline]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ("pyproject.toml" if "[tool." in text else "ckptmirror.toml")).write_text(text)
        found = load_settings(directory=folder, environ={})
        assert found.file is not None
        assert found["mirrors"]


def test_the_error_on_the_page_is_what_is_said(tmp_path: Path):
    (shown,) = re.findall(r"\n\n```\n(.*?)```\n", PAGE, re.DOTALL)
    folder = write(tmp_path, 'root = "/x"\n\n[retention]\nkeep_lst = 2\n')
    assert run("status", cwd=folder).stderr == shown
    assert run("config", cwd=folder).stderr == shown.partition(",")[0] + ".\n", "not the command that just failed"
