"""A mirror's URL that is written wrong: a sentence, the nearest right thing, exit code 10, and nothing is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, errors
from ckptmirror.stores import normalise_url
from tests.kit.cli import assert_explains, assert_tells, run
from tests.kit.roots import make_mirrored

WRITTEN = {
    "gs:/bucket/run": "gs://bucket/run",
    "gs:bucket/run": "gs://bucket/run",
    "gs//bucket/run": "gs://bucket/run",
    "gs:///bucket/run": "gs://bucket/run",
    "gs://bucket//run": "gs://bucket/run",
    "gs://Bucket/Run": "gs://bucket/Run",
    " gs://bucket/run": "gs://bucket/run",
    "gs://bucket/run\n": "gs://bucket/run",
    "gs://bucket/run?generation=3": "gs://bucket/run",
    "gs://bucket/run#17": "gs://bucket/run",
    "gs://me:hush@bucket/run": "gs://bucket/run",
    "https://storage.googleapis.com/bucket/run": "gs://bucket/run",
    "https://storage.cloud.google.com/bucket/a%20run?hush=1": "gs://bucket/a run",
    "https://console.cloud.google.com/storage/browser/bucket/run": "gs://bucket/run",
    "https://bucket.storage.googleapis.com/run": "gs://bucket/run",
    "https://storage.googleapis.com/storage/v1/b/bucket/o/run%2F17": "gs://bucket/run/17",
    "https://storage.googleapis.com/download/storage/v1/b/bucket/o/run?alt=media": "gs://bucket/run",
    "https://storage.googleapis.com/storage/v1/b/bucket/o": "gs://bucket",
    "https://www.googleapis.com/storage/v1/b/bucket": "gs://bucket",
    "file:/nfs/run": "file:///nfs/run",
    "file://nfs/run": "file:///nfs/run",
    "s3:/bucket/run": "s3://bucket/run",
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_url_that_is_written_wrong_is_refused_with_the_nearest_right_one(written: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", mirrors=[written])
    assert_explains(caught.value, 10)
    assert caught.value.hint == f"Write {WRITTEN[written]}."
    assert "hush" not in str(caught.value)
    assert normalise_url(WRITTEN[written])
    assert not (tmp_path / "run").exists()


def test_a_path_that_is_not_absolute_is_refused_with_the_bucket_and_the_directory_it_may_mean(tmp_path: Path) -> None:
    ended = run("stage", "--step", "1", "--mirror", "bucket/run", "--dest", tmp_path / "e", cwd=tmp_path)
    assert_tells(ended, 10, "Write gs://bucket/run or file://", f"{tmp_path}/bucket/run.")
    assert_tells(run("push", "--root", tmp_path, "--mirror", "./mirror", cwd=tmp_path), 10, f"{tmp_path}/mirror.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        *("", "gs://", "gs://a", "gs://bucket/../other", "gs://bucket/a/./b", "C:\\run", "gs://b!/x"),
        *("https://[", "https://[.storage.googleapis.com/x", "https://hush@[::1.storage.googleapis.com/x"),
    ],
)
def test_where_nothing_right_is_near_the_form_is_shown(url: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        normalise_url(url)
    assert_explains(caught.value, 10)
    assert "hush" not in caught.value.hint


def test_a_trailing_slash_and_a_scheme_in_capitals_are_no_mistakes() -> None:
    assert normalise_url("GS://bucket/run/") == normalise_url("gs://bucket/run")


def test_a_store_whose_library_is_missing_says_which_to_install(tmp_path: Path) -> None:
    _, _, _ = make_mirrored(tmp_path, 200, kinds=("model",))
    without = "import sys; sys.modules['s3fs'] = None\nfrom ckptmirror.cli import main\n"
    script = tmp_path / "without.py"
    script.write_text(f"{without}sys.argv[1:] = ['ls', 's3://bucket/run']\nsys.exit(main())\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert_tells(ended, 10, "s3fs")


def test_one_mirror_given_twice_is_refused(tmp_path: Path) -> None:
    for second in ("gs://bucket/run/", "GS://bucket/run"):
        with pytest.raises(errors.ConfigError) as caught:
            CheckpointManager(tmp_path / "run", mirrors=["gs://bucket/run", second])
        assert_explains(caught.value, 10, "gs://bucket/run")
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", mirrors=[f"file://{tmp_path}/m", f"{tmp_path}/m"])
    assert_explains(caught.value, 10, str(tmp_path / "m"))


@pytest.mark.parametrize("where", ["run", "run/mirror", ""])
def test_a_mirror_that_is_the_root_or_lies_in_it_or_around_it_is_refused(where: str, tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path / "made", 200, kinds=("model",))
    (tmp_path / "run").mkdir()
    with pytest.raises(errors.ConfigError) as caught:
        CheckpointManager(tmp_path / "run", mirrors=[f"file://{tmp_path}/{where}"])
    assert_explains(caught.value, 10)
    mirror = {"run": root, "run/mirror": root / "mirror", "": root.parent}[where]
    ended = run("push", "--root", root, "--mirror", f"file://{mirror}")
    assert_tells(ended, 10)
    assert sorted(path.name for path in root.iterdir())[-1].startswith("tensors")
