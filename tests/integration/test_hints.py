"""Every mistake that a person can make at a verb ends in a sentence, and a next step that helps.

Rules, of every row:
* What is said holds the phrase; so does the hint.
* No command that a hint names is the one that failed: it would fail again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from ckptmirror.cli._program import program
from ckptmirror.cli._uploading import print_report
from ckptmirror.flow.drain import Drained, DrainReport
from ckptmirror.local.lock import RootLock
from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import IMPATIENT, run
from tests.kit.roots import fail_uploads, make_mirrored, make_pending, require
from tests.kit.saves import make_save

pytestmark = pytest.mark.long

NO_LOGIN = {"NO_GCE_CHECK": "true", "GCE_METADATA_HOST": "127.0.0.1:1"}
NOBODY = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
SAVES_TO = "Give the directory that the trainer saves to."


@dataclass(frozen=True)
class Scene:
    """What the rows are about: ``{name}`` in a row is one of these."""

    folder: Path
    env: dict[str, str]

    def fill(self, text: str) -> str:
        names = re.findall(r"{(\w+)}", text)
        return text.format(**{name: self.folder / name for name in names} | {"url": f"file://{self.folder}/m/mirror"})


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("hints")
    root, url, _ = make_mirrored(folder / "m", 100, 200, kinds=("model",))
    require(root, url)
    assert run("drain", root).returncode == 0
    for name in ("locked", "broken"):
        other, there, _ = make_mirrored(folder / f"of-{name}", 100, 200, kinds=("model",))
        require(other, there)
        (folder / name).symlink_to(other)
    (folder / "root").symlink_to(root)
    (folder / "empty").mkdir()
    (folder / "file").write_text("x")
    make_save(folder / "staged", 100)
    (folder / "pending").symlink_to(make_pending(folder / "p", f"file://{folder}/pm", 100, kinds=("model",))[0])
    (folder / "lost").symlink_to(make_pending(folder / "l", "gs://no-such-bucket/run", 100, kinds=("model",))[0])
    (folder / "broken" / ".ckptmirror" / "uploads.db").write_bytes(b"rubbish" * 1000)
    (folder / "failed").symlink_to(make_pending(folder / "f", f"file://{folder}/fm", 100, kinds=("model",))[0])
    fail_uploads(folder / "failed", "model_000100.pt")
    lock = RootLock((folder / "locked").resolve())
    lock.acquire({"pid": os.getpid(), "host": "here", "since": "now"})
    with GcsServerProcess(folder / "gcs") as server:
        yield Scene(folder, server.environment | IMPATIENT)
    lock.release()


ROWS = [
    # a root that is not there, or is none
    *((f"{verb} {{nope}}{more}", 10, "does not exist", SAVES_TO) for verb, more in (
        ("status", ""), ("drain", ""), ("retry", ""), ("timeline", ""), ("rotate", " --keep-last 1"))),
    ("rewind {nope} --step 100", 10, "does not exist", "To rewind the run from a fresh disk, add --mirror"),
    ("push {nope} {url}", 3, "does not exist", SAVES_TO),
    ("ls {nope}", 3, "does not exist", "Check the path."),
    ("ls bucket/run", 3, "does not exist", "To read a mirror, write gs://bucket/run."),
    ("ls gs:/bucket/run", 3, "does not exist", "write gs://bucket/run."),
    ("verify {nope}", 3, "does not exist", "Check the path."),
    ("verify --root {nope}", 3, "is not a directory", SAVES_TO),
    ("ls {file}", 3, "is not a checkpoint", "Name a model file"),
    ("status {file}", 2, "is a file", ""),
    *((f"{verb} {{empty}}{more}", 10, "no trainer has saved there", SAVES_TO) for verb, more in (
        ("status", ""), ("drain", ""), ("retry", ""), ("rotate", " --keep-last 1"))),
    ("push {empty} {url}", 3, "holds no whole save", SAVES_TO),
    ("verify {empty}", 3, "holds no saves", "Check the directory or the URL."),
    ("status {url}", 2, "must be the path of a directory", "Write the path alone"),
    *((f"{verb} --root m/mirror{more}", 10, "is a mirror, not a directory that a trainer saves to", "ckptmirror ls")
      for verb, more in (("status", ""), ("drain", ""), ("push", " --mirror {url}"), ("rotate", " --keep-last 1"))),
    # a mirror that is written wrong, or is not there
    ("stage gs:/bucket/run --step 1", 10, "'gs:/bucket/run' is not a URL or an absolute path", "Write gs://bucket/run."),
    ("push {root} bucket/run", 10, "'bucket/run' is not a URL or an absolute path", "Write gs://bucket/run"),
    ("ls 'gs://bucket/run gs://other/run'", 10, "several URLs in one", 'mirrors=["gs://one/run", "gs://two/run"]'),
    ("ls 'gs://bucket/run;gs://other/run'", 10, "several URLs in one", "a comma in CKPTMIRROR_MIRRORS"),
    ("push . sub", 10, "'sub' is not a URL or an absolute path", "Write gs://sub.\n"),
    ("verify {root}/nothing.pt", 3, "nothing.pt does not exist", "Check the path.\n"),
    ("ls file:///nowhere/x", 10, "There is no mirror at /nowhere/x: /nowhere does not exist.", "Correct the URL"),
    ("drain {root} --timeout soon", 2, "'soon' is not a number of seconds", ""),
    ("drain {root} --timeout -1", 2, "it must be 0 or more", ""),
    ("rewind {root} --save zz", 2, "'zz' is not a save id", "Give at least 8 of its hex digits"),
    *((f"{verb} {{staged}}{more}", 10, "has saves, but no pending-uploads table", "saves there, start it")
        for verb, more in (("status", ""), ("rotate", " --keep-last 1"))),
    ("ls oss://b/x", 10, "oss:// needs the package ossfs", "pip install ossfs"),
    ("push {root} s4://b/x", 10, "There is no store for s4:// URLs", "Use gs:// or file://"),
    ("stage gs:// --step 1", 10, "does not name a valid bucket", "Write gs://bucket/prefix."),
    ("stage --step 1", 10, "No mirror is given", "Pass --mirror URL"),
    *((f"{line}", 10, "bucket does not exist", "Correct the mirror's URL, or create the bucket.") for line in (
        "ls gs://no-such-bucket/run", "stage gs://no-such-bucket/run --step 1", "verify gs://no-such-bucket/run",
        "push {root} gs://no-such-bucket/run", "rewind {lost} --step 100")),
    ("drain {lost}", 8, "bucket does not exist", "Fix what failed; then run the same command again."),
    ("drain {root} --mirror gs://bucket/other", 10, "is not a mirror of", "push --mirror gs://bucket/other"),
    ("retry {root} --mirror gs://bucket/other", 10, "is not a mirror of", "Its mirrors: file://"),
    # a step, kind or save that is not there
    ("stage {url} --step 150 --dest {e}", 3, "The nearest are 100, 200.", "ckptmirror ls file://"),
    ("stage {url} --step 200 --kind dcp --dest {e}", 4, "it has model", "ckptmirror ls file://"),
    ("rewind {root} --step 150", 3, "The nearest are 100, 200.", "ckptmirror ls /"),
    ("rewind {root} --save deadbeef", 3, "No whole save has an id that starts with", "ckptmirror ls /"),
    ("push {root} {url} --step 150", 3, "no whole save of step 150", "ckptmirror ls /"),
    ("verify {root} --step 150", 3, "The nearest are 100, 200.", "ckptmirror ls /"),
    ("retry {root} --step 150", 3, "no save of step 150", "ckptmirror ls /"),
    ("ls {root}/model_000150.pt", 3, "does not exist", "ckptmirror ls /"),
    # somebody else is here
    ("rewind {locked} --step 100", 11, "being written by another process", "Stop that process"),
    # what is broken
    *((f"{verb} {{broken}}{more}", 6, "is damaged", "The next start of the trainer") for verb, more in (
        ("status", ""), ("drain", ""), ("retry", ""), ("rotate", " --keep-last 1"))),
    ("rotate {root} --keep-last 1 --keep-best 1", 2, "--keep-best needs --metric NAME", "save(metrics=...)"),
    ("rotate {root}", 2, "number of steps to keep is not set", "Pass --keep-last N"),
]  # fmt: skip


def words_of(line: str, scene: Scene) -> list[str]:
    return shlex.split(scene.fill(line))


def means(words: list[str]) -> object:
    """What a command line asks for, however it is written; None where it is not understood."""
    verb = program.get_command(click.Context(program), words[0])
    assert verb is not None
    try:
        with verb.make_context(words[0], words[1:], resilient_parsing=True) as context:
            return words[0], context.params, {k: str(v) for k, v in context.meta.items()}
    except click.UsageError:
        return None


def assert_helps(words: list[str], ended, exit_code: int, said: str, hint: str) -> None:  # type: ignore[no-untyped-def]
    assert ended.returncode == exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert said in ended.stderr
    assert hint in ended.stderr
    for command in re.findall(r"`(ckptmirror [^`]+)`", ended.stderr):
        named = shlex.split(command)[1:]
        asked = means(named)
        assert asked is not None, f"the hint names a command that is not understood: {command}"
        assert asked != means(words), f"the hint names the command that failed: {command}"


@pytest.mark.parametrize(("line", "exit_code", "said", "hint"), ROWS, ids=[row[0] for row in ROWS])
def test_a_mistake_is_told_with_a_next_step_that_helps(
    line: str, exit_code: int, said: str, hint: str, scene: Scene
) -> None:
    words = words_of(line, scene)
    assert_helps(words, run(*words, env=scene.env, cwd=scene.folder), exit_code, said, hint)


@pytest.mark.parametrize("line", ["ls {u}", "stage {u} --step 1", "verify {u}", "push {root} {u}"])
@pytest.mark.parametrize(
    ("env", "exit_code", "said", "hint"),
    [
        (NO_LOGIN, 12, "No credentials", "gcloud auth application-default login"),
        (NOBODY, 5, "Connection refused", "Check the network and the mirror's URL, then try again"),
    ],
    ids=["no credentials", "nobody answers"],
)
def test_a_mirror_that_cannot_be_asked_is_told_with_a_next_step_that_helps(
    line: str, env: dict[str, str], exit_code: int, said: str, hint: str, scene: Scene
) -> None:
    words = words_of(line.replace("{u}", "gs://some-bucket/run"), scene)
    ended = run(*words, env=env | IMPATIENT | {"HOME": str(scene.folder)}, cwd=scene.folder)
    assert_helps(words, ended, exit_code, said, hint)
    assert "drain" not in ended.stderr, "there is nothing to drain"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("file:///nfs/run", "Make the directory accessible to this user; then try again."),
        ("gs://some-bucket/run", "Log in (`gcloud auth application-default login`)"),
    ],
)
def test_the_advice_of_a_drain_that_was_refused_follows_from_the_mirror(
    url: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = DrainReport(Drained(0, 1, 0, 9), 1, (), refused={url: "NotAuthorised: x.pt: Permission denied"})
    assert print_report(tmp_path, report, as_json=False) == 12
    assert f"{url}: x.pt: Permission denied\n  {hint}" in capsys.readouterr().err


def test_status_names_what_sends_what_is_pending(scene: Scene) -> None:
    for name, then in (("pending", "sends them"), ("failed", "fix the cause, then")):
        first = run("status", scene.folder / name).stdout.splitlines()[0]
        assert first.startswith("NOT SAFE: 5 files")
        assert then in first
        assert f"`ckptmirror drain --root {scene.folder / name}`" in first
