"""Retry: uploads that failed for good are pending again, and somebody sends them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptmirror.core.errors import CheckpointNotFound, ConfigError, NoTable
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.flow.upload.retry_failed import retry
from ckptmirror.local.lock import RootLock
from ckptmirror.local.table_place import table_path
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import assert_tells, run
from tests.kit.mirrors import memory_url
from tests.kit.roots import MirroredRoot, fail_uploads, make_pending, require

BUCKET = "retry"


def states(root: Path) -> list[str]:
    with UploadsTable.open(table_path(root), read_only=True) as table:
        return sorted(record.state.value for record in table.records())


def test_what_failed_is_pending_again_with_the_reason_and_a_drain_sends_it(
    server: GcsServerProcess, tmp_path: Path
) -> None:
    root, _ = make_pending(tmp_path, f"gs://{BUCKET}/a", 100, kinds=("model",), sidecars=False)
    server.faults([Fault(operation="upload.*", object="model_000100", times=0, status=400)])
    assert run("drain", "--root", root, env=server.environment).returncode == 8
    assert "failed" in states(root)
    server.clear_faults()
    ended = run("retry", "--root", root)
    assert ended.returncode == 0
    assert ended.stdout == f"gs://{BUCKET}/a: 1 files pending again (2.9 KiB, step 100)\n"
    assert "had failed: " in ended.stderr
    assert "400" in ended.stderr
    assert f"`ckptmirror drain --root {root}` sends them now" in ended.stderr
    assert states(root) == ["pending", "pending"]
    assert run("drain", "--root", root, env=server.environment).returncode == 0
    assert states(root) == ["verified", "verified"]


def test_that_nothing_had_failed_is_no_error(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    before = states(root)
    ended = run("retry", "--root", root)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "nothing had failed\n")
    assert states(root) == before
    assert json.loads(run("retry", "--root", root, "--json").stdout)["retried"] == 0


def test_a_mirror_and_a_step_choose_what_is_tried_again(tmp_path: Path) -> None:
    place = MirroredRoot(tmp_path / "root", [memory_url(), memory_url()])
    for step in (100, 200):
        place.commit(step)
    one, other = (mirror.url for mirror in place.mirrors)
    place.table.close()
    count = fail_uploads(place.root)
    assert count > 4
    found = retry(place.root, mirrors=[one], step=100).files
    assert {(file.mirror, file.step, file.reason) for file in found} == {(one, 100, "the bucket said 400")}
    assert {file.step for file in retry(place.root, mirrors=[one]).files} == {200}
    assert {file.mirror for file in retry(place.root).files} == {other}
    assert retry(place.root).files == ()
    for store in place.stores.values():
        store.close()


def test_a_live_trainer_is_named_as_the_one_that_sends(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    fail_uploads(root)
    lock = RootLock(root)
    lock.acquire({"pid": os.getpid(), "host": "here", "since": "now"})
    try:
        ended = run("retry", "--root", root)
    finally:
        lock.release()
    assert ended.returncode == 0
    assert "the running trainer sends them within seconds" in ended.stderr


def test_of_a_mirror_that_is_none_any_more_it_says_that_nobody_sends(tmp_path: Path) -> None:
    gone, kept = f"file://{tmp_path}/gone", f"file://{tmp_path}/kept"
    root, _ = make_pending(tmp_path, gone, 100, kinds=("model",), sidecars=False)
    fail_uploads(root)
    require(root, kept)
    ended = run("retry", "--root", root, "--mirror", gone)
    assert ended.returncode == 0
    assert f"{gone} is no longer a mirror of {root}: they are not sent" in ended.stderr
    with UploadsTable.open(table_path(root), read_only=True) as table:
        assert not table.records(state=RecordState.FAILED)


def test_bad_input_is_a_sentence_a_hint_and_an_exit_code(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, 200, kinds=("model",))
    assert_tells(run("retry", "--root", root, "--step", "150"), 3, "knows no save of step 150", "100, 200")
    assert_tells(
        run("retry", "--root", root, "--mirror", "gs://other/run"), 10, "is not a mirror of", "Its mirrors: file:"
    )
    assert_tells(run("retry", "--root", root, "--mirror", "nothing"), 10, "URL")
    assert_tells(run("retry", "--root", tmp_path / "none"), 10, "does not exist")
    with pytest.raises(CheckpointNotFound):
        retry(root, step=1)
    with pytest.raises(ConfigError):
        retry(root, mirrors=["gs://other/run"])
    with pytest.raises(NoTable):
        retry(tmp_path)
