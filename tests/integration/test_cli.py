"""The command line as a person and a script meet it: real processes, real exit codes, what is on which stream."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptmirror.cli._program import program
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local.lock import RootLock
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import AS_MODULE, CONSOLE_SCRIPT, assert_tells, clean_environment, run
from tests.kit.roots import make_mirrored, make_pending, require
from tests.kit.saves import make_save
from tests.kit.terminal import OnTerminal, bare

VERBS = [
    "config",
    "demo",
    "diff",
    "drain",
    "forget-mirror",
    "ls",
    "push",
    "retry",
    "rewind",
    "rotate",
    "stage",
    "status",
    "timeline",
    "verify",
]


# -- every verb ---------------------------------------------------------------------------------------------


def test_there_are_these_verbs_and_python_m_is_the_console_script():
    context = click.Context(program)
    assert program.list_commands(context) == VERBS
    shown = [subprocess.check_output([*command, "--help"], text=True) for command in ([CONSOLE_SCRIPT], AS_MODULE)]
    assert shown[0] == shown[1]
    assert all(re.search(rf"^  {verb} ", shown[0], re.MULTILINE) for verb in VERBS)
    for command in ([CONSOLE_SCRIPT], AS_MODULE):
        assert subprocess.run([*command, "nope"], stderr=subprocess.DEVNULL, check=False).returncode == 2


def examples_of(verb: str) -> list[str]:
    command = program.get_command(click.Context(program), verb)
    assert command is not None
    text = command.get_help(click.Context(command, info_name=f"ckptmirror {verb}"))
    return re.findall(r"^ +(ckptmirror .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_in_a_help_text_is_accepted(verb: str):
    examples = examples_of(verb)
    assert examples, f"`ckptmirror {verb} --help` shows no example"
    for example in examples:
        words = shlex.split(example.partition("|")[0])
        assert words[1] == verb
        command = program.get_command(click.Context(program), verb)
        assert command is not None
        command.make_context(verb, words[2:])


def test_stage_prints_exactly_the_path(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200)
    for kind, name in (("dcp", "dcp_000200"), ("model", "model_000200.pt")):
        ended = run("stage", "--step", "000200", "--kind", kind, "--mirror", url, "--dest", "eval", cwd=tmp_path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{tmp_path}/eval/{name}\n", "")
        assert (tmp_path / "eval" / name).exists()


def test_stage_takes_the_latest_step_and_the_mirror_of_the_environment(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    ended = run("stage", "--step", "latest", "--dest", tmp_path / "e", env={"CKPTMIRROR_MIRROR": url})
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path}/e/model_000200.pt\n")


def test_ls_lists_a_root_a_mirror_and_what_the_environment_names(tmp_path: Path):
    root, url, metas = make_mirrored(tmp_path, 100, 200)
    listed = run("ls", root)
    assert listed.returncode == 0
    assert listed.stderr == ""
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["100", "200"]
    assert metas[1].save_id[:8] in listed.stdout
    for same in (
        run("ls", url),
        run("ls", env={"CKPTMIRROR_MIRROR": url, "CKPTMIRROR_ROOT": "/nowhere"}),
        run("ls", env={"CKPTMIRROR_ROOT": str(root)}),
        run("ls", cwd=root),
    ):
        assert (same.returncode, same.stdout, same.stderr) == (0, listed.stdout, "")


def test_ls_says_what_is_incomplete_and_why(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    (tmp_path / "mirror" / "model_000200.pt").unlink()
    (root / "meta_000100.json").write_text("{}")
    assert re.search(r"200 .* incomplete .* model_000200.pt is missing", run("ls", url).stdout)
    assert re.search(r"100  - .* incomplete ", run("ls", root).stdout)


def test_ls_of_an_empty_place_says_so_on_stderr(tmp_path: Path):
    ended = run("ls", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", f"{tmp_path} holds no saves\n")


def test_status_says_first_what_is_not_safe_and_drain_makes_it_so(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, 200)
    env = {"CKPTMIRROR_ROOT": str(root)}
    before = run("status", env=env)
    assert before.returncode == 0
    assert before.stdout.startswith("NOT SAFE: 14 files (")
    drained = run("drain", env=env)
    assert (drained.returncode, drained.stderr) == (0, "")
    assert drained.stdout.startswith("14 of 14 files verified (")
    after = run("status", env=env).stdout.splitlines()
    assert after[0] == "safe: every save is verified on every required mirror"
    assert after[1] == "newest step 200, newest safe step 200"
    assert all(line.endswith("safe") for line in after[2:])


def test_status_does_not_call_a_save_without_records_safe(tmp_path: Path):
    root = drained_root(tmp_path, 100)
    make_save(root, 200, ("model",), number=2)
    said = run("status", "--root", root).stdout
    assert said.startswith("NOT SAFE: there are saves that are not queued for upload yet")
    assert "newest step 200, newest safe step 100" in said
    assert run("drain", "--root", root).returncode == 0
    assert run("status", "--root", root).stdout.startswith("safe")


def test_push_mirrors_a_root_that_no_trainer_made_and_sends_nothing_twice(tmp_path: Path):
    root, _, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    url = f"file://{tmp_path}/second"
    one = run("push", "--root", root, "--mirror", url, "--step", "100")
    assert one.returncode == 0, one.stderr
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "second").rglob("model_*")}
    assert [path.name for path in first] == ["model_000100.pt"]
    both = run("push", "--root", root, "--mirror", url)
    assert (both.returncode, both.stderr) == (0, "")
    assert all(path.stat().st_mtime_ns == at for path, at in first.items())
    assert [line.split()[0] for line in run("ls", url).stdout.splitlines()] == ["100", "200"]


def drained_root(tmp_path: Path, *steps: int) -> Path:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", *steps, kinds=("model",))
    assert run("drain", "--root", root).returncode == 0
    return root


def test_rotate_dry_run_prints_the_plan_and_deletes_nothing(tmp_path: Path):
    root = drained_root(tmp_path, 100, 200, 300)
    before = sorted(path for path in root.rglob("*_000*"))
    ended = run("rotate", "--root", root, "--keep-last", "1", "--dry-run")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line.split()[:3] for line in ended.stdout.splitlines()] == [
        ["delete", "step", "100"],
        ["delete", "step", "200"],
        ["keep", "step", "300"],
    ]
    assert sorted(path for path in root.rglob("*_000*")) == before


def test_rotate_prints_the_plan_before_it_deletes(tmp_path: Path):
    """A plan that could not be printed is not carried out."""
    root = drained_root(tmp_path, 100, 200)
    ended = run("rotate", "--root", root, "--keep-last", "1")
    assert (ended.returncode, ended.stderr) == (0, "1 saves deleted\n")
    assert ended.stdout.splitlines()[0].startswith("delete  step 100 (")
    assert [line.split()[0] for line in run("ls", root).stdout.splitlines()] == ["200"]
    broken = drained_root(tmp_path / "again", 100, 200)
    with open("/dev/full", "w") as full:
        unread = subprocess.run(
            [*AS_MODULE, "rotate", "--root", str(broken), "--keep-last", "1"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
    assert unread.returncode == 1
    assert "Traceback" not in unread.stderr
    assert (broken / "model_000100.pt").exists(), "a plan that could not be printed was carried out"


def test_rotate_keeps_what_may_be_the_only_copy_and_exits_with_7(tmp_path: Path):
    root = drained_root(tmp_path, 100, 200)
    (tmp_path / "mirror" / "model_000100.pt").unlink()
    ended = run("rotate", "--root", root, "--keep-last", "1")
    assert ended.returncode == 7
    assert "kept step 100" in ended.stderr
    assert "ckptmirror status" in ended.stderr
    assert (root / "model_000100.pt").exists()


def test_rotate_keeps_the_best(tmp_path: Path):
    ended = run("rotate", "--root", drained_root(tmp_path, 100, 200), "--keep-last", "1", "--keep-best", "1")
    assert_tells(ended, 2, "metric")


# -- --json -------------------------------------------------------------------------------------------------


def test_json_is_one_object_on_stdout_and_nothing_else(tmp_path: Path):
    root, url, metas = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    require(root, url)

    def said(*arguments: str | Path, exit_code: int = 0) -> dict[str, object]:
        ended = run(*arguments, "--json")
        assert ended.returncode == exit_code, ended.stderr
        found = json.loads(ended.stdout)
        assert isinstance(found, dict)
        return found

    assert said("push", "--root", root, "--mirror", url)["verified"] is True
    assert said("drain", "--root", root)["pending"] == 0
    saves = said("ls", root)["saves"]
    assert isinstance(saves, list)
    assert [(save["step"], save["save_id"]) for save in saves] == [(meta.step, meta.save_id) for meta in metas]
    assert said("status", "--root", root)["newest_safe_step"] == 200
    dest = tmp_path / "eval"
    staged = said("stage", "--step", "100", "--mirror", url, "--dest", dest)
    assert staged == {"path": f"{dest}/model_000100.pt", "step": 100, "kind": "model"}
    planned = said("rotate", "--root", root, "--keep-last", "1", "--dry-run")
    assert planned["deleted"] == []
    deleted = said("rotate", "--root", root, "--keep-last", "1")["deleted"]
    assert deleted == [{"step": 100, "save_id": metas[0].save_id}]


def test_json_of_an_error_is_an_exit_code_and_an_empty_stdout(tmp_path: Path):
    assert_tells(run("status", "--root", tmp_path, "--json"), 10, "no pending-uploads table")


# -- exit codes and usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nope", "No such command 'nope'"),
        ("stage", "Missing option '--step'"),
        ("stage --step two --mirror file:///m", "'two' is not a step. Give a step as digits"),
        ("stage --step 1.5 --mirror file:///m", "is not a step"),
        ("stage --step -1 --mirror file:///m", "is not a step"),
        ("push --step latest --mirror file:///m", "is not a step"),
        ("stage --step 1 --kind zip --mirror file:///m", "'zip' is not one of 'dcp', 'model'"),
        ("stage --step 1 --wait -3 --mirror file:///m", "--wait"),
        ("drain --timeout soon", "--timeout"),
        ("rotate", "--keep-last"),
        ("rotate --keep-last 0", "--keep-last"),
        ("ls a b", "unexpected extra argument"),
        ("status --bogus", "No such option"),
    ],
)
def test_a_usage_error_names_the_option_and_exits_with_2(arguments: str, words: str, tmp_path: Path):
    assert_tells(run(*arguments.split(), cwd=tmp_path), 2, words)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("stgae", "Did you mean `ckptmirror stage`?"),
        ("statsu", "Did you mean `ckptmirror status`?"),
        ("re", "Did you mean `ckptmirror retry` or `ckptmirror rewind`?"),
        ("list", "Did you mean `ckptmirror ls`?"),
        ("download", "Did you mean `ckptmirror stage`?"),
        ("upload", "Did you mean `ckptmirror push`?"),
        ("xyzzy", "The commands are config, demo, diff, drain, "),
    ],
)
def test_a_mistyped_verb_gets_a_suggestion(typed: str, meant: str):
    assert_tells(run(typed), 2, f"No such command '{typed}'. {meant}")


@pytest.mark.parametrize(("verb", "typed", "meant"), [("status", "--rot", "--root"), ("stage", "--mirorr", "--mirror")])
def test_a_mistyped_option_gets_a_suggestion(verb: str, typed: str, meant: str):
    assert_tells(run(verb, typed, "x"), 2, "Did you mean", meant)  # click 8.4 quotes the option, 8.1 does not


def test_a_mirror_must_be_given(tmp_path: Path):
    assert_tells(run("stage", "--step", "1", cwd=tmp_path), 10, "No mirror is given", "CKPTMIRROR_MIRROR")


def test_the_root_lock_of_a_live_trainer_is_respected(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    lock = RootLock(root)
    lock.acquire({"pid": os.getpid(), "host": "here", "since": "now"})
    try:
        ended = run("stage", "--step", "200", "--mirror", url, "--dest", root)
    finally:
        lock.release()
    assert_tells(ended, 11, str(os.getpid()))


def test_drain_beside_a_live_trainer_shares_the_table(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    lock = RootLock(root)
    lock.acquire({"pid": os.getpid(), "host": "here", "since": "now"})
    try:
        ended = run("drain", "--root", root)
    finally:
        lock.release()
    assert ended.returncode == 0, ended.stderr


def test_drain_exits_with_8_when_a_file_failed_for_good_and_names_it(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    root, _ = make_pending(tmp_path, "gs://test-bucket/run", 100, kinds=("model",))
    gcs_server.faults([Fault(operation="upload.*", object="model_000100", times=0, status=400)])
    ended = run("drain", "--root", root, env=gcs_server.environment)
    assert ended.returncode == 8
    assert re.search(r"failed: gs://test-bucket/run: model_000100.pt: .*400", ended.stderr)
    gcs_server.clear_faults()
    assert run("drain", "--root", root, env=gcs_server.environment).returncode == 0


def test_drain_stops_waiting_at_its_timeout_says_why_it_waited_and_continues(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    root, _ = make_pending(tmp_path, "gs://test-bucket/run", 100, kinds=("model",), sidecars=False)
    gcs_server.kill()
    ended = run("drain", "--root", root, "--timeout", "0", env=gcs_server.environment)
    assert ended.returncode == 8
    assert "Still pending: 2 files; the same command continues." in ended.stderr
    gcs_server.start()
    assert run("drain", "--root", root, env=gcs_server.environment).returncode == 0


def test_every_class_of_error_has_a_code_of_the_table():
    def below(cls: type[CkptMirrorError]) -> list[type[CkptMirrorError]]:
        return [cls, *(one for sub in cls.__subclasses__() for one in below(sub))]

    assert {cls.exit_code for cls in below(CkptMirrorError)} <= {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12}
    assert all(cls.hint for cls in below(CkptMirrorError))


def test_verbose_is_taken_after_the_verb_and_shows_the_traceback_of_an_error(tmp_path: Path):
    for arguments in (["-v", "status", "--root", str(tmp_path)], ["status", "-v", "--root", str(tmp_path)]):
        ended = run(*arguments)
        assert ended.returncode == 10
        assert "Traceback" in ended.stderr


# -- DIR and URL in place of options ------------------------------------------------------------------------


@pytest.mark.long
def test_a_directory_or_a_url_may_stand_where_an_option_would(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, 200, kinds=("model",))
    env = {"CKPTMIRROR_ROOT": "/nowhere", "CKPTMIRROR_MIRROR": "file:///nowhere"}
    staged = run("stage", url, "--step", "200", "--dest", tmp_path / "e", env=env)
    assert (staged.returncode, staged.stdout) == (0, f"{tmp_path}/e/model_000200.pt\n"), staged.stderr
    pushed = run("push", root, url, env=env)
    assert pushed.returncode == 0, pushed.stderr
    require(root, url)
    for verb, *more in (
        ("status",),
        ("drain",),
        ("retry",),
        ("timeline",),
        ("rotate", "--keep-last", "1", "--dry-run"),
        ("rewind", "--step", "100", "--dry-run"),
    ):
        placed, named = run(verb, root, *more, env=env), run(verb, "--root", root, *more, env=env)
        assert placed.returncode == 0, placed.stderr
        assert (placed.stdout, placed.stderr) == (named.stdout, named.stderr)
    for option, place in (("--root", str(root)), ("--mirror", url)):
        assert run("ls", option, place, env=env).stdout == run("ls", place, env=env).stdout


def test_the_url_alone_may_follow_push_where_the_root_is_known(tmp_path: Path):
    root, url, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    pushed = run("push", url, env={"CKPTMIRROR_ROOT": str(root)})
    assert (pushed.returncode, pushed.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("status", "/a", "--root", "/a"), "Give DIR or --root, not both."),
        (("drain", "--root", "/a", "/b"), "Give DIR or --root, not both."),
        (("stage", "gs://b/r", "--mirror", "gs://b/r", "--step", "1"), "Give URL or --mirror, not both."),
        (("push", "/a", "gs://b/r", "--root", "/a"), "Give DIR or --root, not both."),
        (("push", "gs://b/r", "/a"), "DIR comes before URL"),
        (("push", "gs://b/r", "--mirror", "gs://b/r"), "Give URL or --mirror, not both."),
        (("ls", "/a", "--root", "/a"), "Give only one of: DIR or URL, --root, --mirror."),
        (("ls", "--mirror", "gs://b/r", "--root", "/a"), "Give only one of: DIR or URL, --root, --mirror."),
        (("status", "gs://b/r"), "it is a gs:// URL"),
        (("drain", "--root", "gs://b/r"), "it is a gs:// URL"),
        (("status", __file__), "is a file"),
    ],
)
def test_a_place_that_is_given_twice_or_is_of_the_wrong_sort_is_a_usage_error(arguments: tuple[str, ...], words: str):
    assert_tells(run(*arguments), 2, words)


# -- streams ------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path):
    root, _, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [*AS_MODULE, "ls", str(root)], stdout=writing, stderr=subprocess.PIPE, text=True, env=clean_environment()
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_stdout_that_cannot_be_written_is_a_sentence(tmp_path: Path):
    root, _, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*AS_MODULE, "ls", str(root)], stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[0] == "ckptmirror: No space left on device"


def test_progress_is_a_bar_on_a_terminal_and_leaves_stdout_alone(tmp_path: Path):
    _, url, _ = make_mirrored(tmp_path, 200, kinds=("model",), size_bytes=300_000)
    with OnTerminal("stage", "--step", "200", "--mirror", url, "--dest", tmp_path / "e") as terminal:
        exit_code, stdout, shown = terminal.end()
    assert (exit_code, stdout) == (0, f"{tmp_path}/e/model_000200.pt\n")
    assert "stage" in shown
    assert "\x1b[" in shown
    assert "293.0 KiB of 293.0 KiB" in bare(shown)


def test_main_can_be_called_inside_another_program(capsys: pytest.CaptureFixture[str]):
    code = "import signal; from ckptmirror.cli import main; before = signal.getsignal(signal.SIGTERM); "
    code += "assert main(['nope']) == 2; assert signal.getsignal(signal.SIGTERM) is before"
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL, env=clean_environment())


def test_a_verb_whose_output_goes_nowhere_does_its_work(tmp_path: Path):
    """It ended with an AttributeError, after a drain too that had sent everything."""
    root, url, _ = make_mirrored(tmp_path, 100, 200)
    require(root, url)
    for verb in ("drain", "status --json", "ls", "verify"):
        shell = f"{shlex.join(AS_MODULE)} {verb} {shlex.quote(str(root))} >&- <&-"
        ended = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, env=clean_environment())
        assert ended.returncode == 0, ended.stderr
    nowhere = subprocess.run(["sh", "-c", f"{shlex.join(AS_MODULE)} ls {root} >&- 2>&-"], env=clean_environment())
    assert nowhere.returncode == 0
