"""``ckptmirror forget-mirror``: a required mirror that is gone for good is taken out of the run by a person."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptmirror.core.errors import StoreTemporary
from tests.kit.cli import assert_tells, run
from tests.kit.training import new_state, running, saved_run


def test_no_start_waits_for_it_any_more(tmp_path: Path) -> None:
    gone, left = f"file://{tmp_path}/nfs/gone", f"file://{tmp_path}/nfs/left"
    (tmp_path / "nfs").mkdir()
    saved_run(tmp_path / "first", (1, 2), gone, left)
    fresh = tmp_path / "fresh"
    with running(fresh, left) as manager, pytest.raises(StoreTemporary, match="no longer configured") as waits:
        manager.resume(new_state())
    assert f"`ckptmirror forget-mirror --root {fresh} --url {gone}`" in waits.value.hint
    shutil.rmtree(tmp_path / "nfs" / "gone")
    planned = run("forget-mirror", "--root", tmp_path / "first", "--url", gone, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    would = f"The run would no longer require {gone}. It would require {left}.\n"
    assert planned.stdout == would
    assert f"still uploads to {gone}" in planned.stderr
    done = run("forget-mirror", "--root", tmp_path / "first", "--url", gone, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["left"], said["told"], said["configured"]) == ([left], [left], True)
    with running(fresh, left) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_a_mirror_that_the_run_does_not_name_is_an_error_that_lists_those_it_names(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    saved_run(tmp_path / "root", (1,), url)
    ended = run("forget-mirror", "--root", tmp_path / "root", "--url", "gs://mistyped/run")
    assert_tells(ended, 3, "does not name gs://mistyped/run", url)
