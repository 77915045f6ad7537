"""Places and words that cannot be meant: a step, a root, a destination, a variable. A sentence, a hint, a code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmirror import (
    CheckpointManager,
    errors,
    find_local_checkpoint_steps,
    load_settings,
    resolve_resume_path,
    stage_checkpoint_step,
)
from tests.kit.cli import assert_explains, assert_tells, run
from tests.kit.roots import content, make_mirrored


@pytest.mark.parametrize("step", ["abc", "-1", "1.5", "newest", "", "99999999999999999999"])
def test_a_step_that_is_none_is_a_usage_error(step: str, tmp_path: Path) -> None:
    ended = run("stage", "--step", step, "--mirror", f"file://{tmp_path}/m", "--dest", tmp_path / "e")
    assert_tells(ended, 2, "--step")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["status", "drain", "retry", "timeline", "rewind", "ls"])
def test_a_root_that_does_not_exist_is_named_and_not_made(verb: str, tmp_path: Path) -> None:
    root = tmp_path / "nowhere"
    more = {"ls": [str(root)], "rewind": ["--root", str(root), "--step", "1"]}.get(verb, ["--root", str(root)])
    ended = run(verb, *more)
    assert ended.returncode in (2, 3, 10), ended.stderr
    assert_tells(ended, ended.returncode, "nowhere")
    assert not root.exists()


def test_a_name_that_no_file_can_have_does_not_exist(tmp_path: Path) -> None:
    assert_tells(run("ls", str(tmp_path / ("x" * 300) / "y")), 3, "does not exist")
    assert_tells(run("ls", "x" * 300 + "/y"), 3, "does not exist")


URLS = ["gs://bucket/run", "s3://me:hush@bucket/run", "memory://run", "file:///nfs/run", "gs:/bucket/run"]


@pytest.mark.parametrize("url", URLS)
def test_a_url_for_a_directory_is_refused_and_nothing_is_made(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right = "/nfs/run" if url.startswith("file:") else "mirror"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("root", lambda: CheckpointManager(url)),
        ("root", lambda: CheckpointManager(Path(url))),
        ("state_dir", lambda: CheckpointManager("run", state_dir=url)),
        ("persistent_dir", lambda: CheckpointManager("run", persistent_dir=url)),
        ("dest", lambda: stage_checkpoint_step("memory://m", step=200, dest=url)),
        ("root", lambda: find_local_checkpoint_steps(url)),
        ("root", lambda: resolve_resume_path(url)),
        ("CKPTMIRROR_ROOT: root", lambda: load_settings(environ={"CKPTMIRROR_ROOT": url})),
    ]
    for name, call in calls:
        with pytest.raises(errors.ConfigError) as caught:
            call()
        assert_explains(caught.value, 10, f"{name} is a {url.partition(':')[0]}:// URL")
        assert right in caught.value.hint
        assert "hush" not in f"{caught.value} {caught.value.hint}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["status", "--root"],
        ["push", "--mirror", "memory://m", "--root"],
        ["push", "--mirror", "memory://m", "--state-dir"],
        ["verify", "--root"],
        ["stage", "--step", "1", "--mirror", "memory://m", "--dest"],
    ],
    ids=" ".join,
)
def test_a_url_for_an_option_that_takes_a_directory_is_a_usage_error(command: list[str], tmp_path: Path) -> None:
    ended = run(*command, "gs://bucket/run", cwd=tmp_path)
    assert_tells(ended, 2, command[-1], "it is a gs:// URL", "as a mirror")
    assert list(tmp_path.iterdir()) == []


def test_a_root_without_permission_is_told_with_the_user_who_lacks_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        (tmp_path / "run").mkdir(mode=0o500)
        with pytest.raises(errors.LocalStorageUnwritable) as caught:
            CheckpointManager(tmp_path / "run")
    else:  # nobody may write there, not even root
        with pytest.raises(errors.CkptMirrorError) as caught:  # type: ignore[assignment]
            CheckpointManager("/proc/ckptmirror/run")
    assert_explains(caught.value, 10)


def test_a_destination_inside_of_the_mirror_is_refused_and_one_inside_of_the_root_is_not_mistaken_for_it(
    tmp_path: Path,
) -> None:
    root, url, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    before = content(tmp_path / "mirror")
    for dest in (tmp_path / "mirror", tmp_path / "mirror" / "inside"):
        ended = run("stage", "--step", "200", "--mirror", url, "--dest", dest)
        assert_tells(ended, 10, "--dest")
    assert content(tmp_path / "mirror") == before
    listed = run("ls", root).stdout
    ended = run("stage", "--step", "200", "--mirror", url, "--dest", root / "inside")
    assert (ended.returncode, ended.stdout) == (0, f"{root}/inside/model_000200.pt\n"), ended.stderr
    assert run("ls", root).stdout == listed


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CKPTMIRROR_RETENTION_KEEP_LAST", "many", "CKPTMIRROR_RETENTION_KEEP_LAST"),
        ("CKPTMIRROR_RETENTION_KEEP_LAST", "0", "CKPTMIRROR_RETENTION_KEEP_LAST"),
        ("CKPTMIRROR_KINDS", "zip", "CKPTMIRROR_KINDS"),
        ("CKPTMIRROR_MIRRORS", "gs:/bucket", "CKPTMIRROR_MIRRORS"),
        ("CKPTMIRROR_TIMEOUT_S", "-1", "CKPTMIRROR_TIMEOUT_S"),
        ("CKPTMIRROR_MIROR", "gs://bucket", "CKPTMIRROR_MIRROR"),
    ],
)
def test_a_variable_with_nonsense_is_named(variable: str, value: str, words: str, tmp_path: Path) -> None:
    ended = run("config", env={variable: value}, cwd=tmp_path)
    assert_tells(ended, 10, words)
