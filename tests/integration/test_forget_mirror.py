"""``ckptmirror forget-mirror``: a required mirror that is gone for good is taken out of the run by a person."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, MirrorSpec
from ckptmirror.core.errors import StoreTemporary
from ckptmirror.flow.status import read_status
from tests.kit.cli import assert_tells, run
from tests.kit.faults import faulty
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
    assert f"If the trainer's `mirrors` still have {gone}" in planned.stderr
    done = run("forget-mirror", "--root", tmp_path / "first", "--url", gone, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["left"], said["told"], said["configured"]) == ([left], [left], True)
    with running(fresh, left) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_the_root_that_sent_to_it_goes_back_and_drains_without_it(tmp_path: Path) -> None:
    """Its own table listed the mirror: what only waits for the lists of the run is not enough."""
    gone, left = f"file://{tmp_path}/nfs/gone", f"file://{tmp_path}/nfs/left"
    (tmp_path / "nfs").mkdir()
    roots = [tmp_path / "root", tmp_path / "other"]
    saved_run(roots[0], (1, 2), gone, left)
    with running(roots[1], gone, left) as manager:
        assert manager.resume(new_state()) is not None
    shutil.rmtree(tmp_path / "nfs" / "gone")
    with running(roots[0], left) as manager, pytest.raises(StoreTemporary, match="no longer configured"):
        manager.resume(new_state(), policy=1)
    for root in roots:  # after the first, no list of the run requires it, but the table of the second root does
        done = run("forget-mirror", "--root", root, "--url", gone)
        assert done.returncode == 0, done.stderr
    for root in roots:
        drained = run("drain", "--root", root)
        assert drained.returncode == 0, drained.stderr
        rewound = run("rewind", "--root", root, "--step", "1")
        assert rewound.returncode == 0, rewound.stderr


def test_a_root_whose_table_requires_it_learns_from_the_lists_that_it_was_removed(tmp_path: Path) -> None:
    gone, left = f"file://{tmp_path}/nfs/gone", f"file://{tmp_path}/nfs/left"
    (tmp_path / "nfs").mkdir()
    root, other = tmp_path / "root", tmp_path / "other"
    saved_run(root, (1, 2), gone, left)
    with running(other, gone, left) as manager:
        assert manager.resume(new_state()) is not None
    shutil.rmtree(tmp_path / "nfs" / "gone")
    assert run("forget-mirror", "--root", other, "--url", gone).returncode == 0
    with running(root, left) as manager:
        assert manager.resume(new_state(), policy=1) is not None


def test_a_first_start_that_was_refused_goes_on_without_the_mirror_that_does_not_answer(tmp_path: Path) -> None:
    """There is no list of attempts yet."""
    gone, left = f"file://{tmp_path}/nfs/gone", f"file://{tmp_path}/left"
    (tmp_path / "nfs").mkdir()
    with running(tmp_path / "root", left, gone) as manager:
        faulty(manager)[1].go_down()
        with pytest.raises(StoreTemporary, match="forget-mirror"):
            manager.resume(new_state())
    done = run("forget-mirror", "--root", tmp_path / "root", "--url", gone)
    assert done.returncode == 0, done.stderr
    with running(tmp_path / "root", left) as manager:
        assert manager.resume(new_state()) is None


def test_a_mirror_that_a_later_start_requires_is_missed_again(tmp_path: Path) -> None:
    away, left = f"file://{tmp_path}/nfs/away", f"file://{tmp_path}/nfs/left"
    (tmp_path / "nfs").mkdir()
    root = tmp_path / "root"
    saved_run(root, (1, 2), away, left)
    for _ in range(2):
        assert run("forget-mirror", "--root", root, "--url", away).returncode == 0
        with running(tmp_path / "a new disk", left) as manager:
            assert manager.resume(new_state()) is not None
        with running(root, away, left) as manager:
            assert manager.resume(new_state()) is not None
        shutil.rmtree(tmp_path / "a new disk")
        with (
            running(tmp_path / "a new disk", left) as manager,
            pytest.raises(StoreTemporary, match="no longer configured"),
        ):
            manager.resume(new_state())


def test_the_last_mirror_stays_in_the_table(tmp_path: Path) -> None:
    """Without a mirror, rotation would ask none before it deletes."""
    url = f"file://{tmp_path}/mirror"
    saved_run(tmp_path / "root", (1, 2), url)
    shutil.rmtree(tmp_path / "mirror")
    forgotten = run("forget-mirror", "--root", tmp_path / "root", "--url", url)
    assert forgotten.returncode == 0
    assert "drains wait for it until the trainer starts with another mirror, or with none" in forgotten.stderr
    assert read_status(tmp_path / "root").mirrors == ((url, False),)
    for back_to in (["--step", "1"], ["--scratch"]):
        rewound = run("rewind", "--root", tmp_path / "root", *back_to)
        assert rewound.returncode == 0, rewound.stderr


def test_a_mirror_that_the_run_does_not_name_is_an_error_that_lists_those_it_names(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    saved_run(tmp_path / "root", (1,), url)
    ended = run("forget-mirror", "--root", tmp_path / "root", "--url", "gs://mistyped/run")
    assert_tells(ended, 3, "does not name gs://mistyped/run", url)


def test_of_an_optional_mirror_it_is_not_said_that_the_run_required_it(tmp_path: Path) -> None:
    root, kept, gone = tmp_path / "root", f"file://{tmp_path}/kept", f"file://{tmp_path}/gone"
    with CheckpointManager(root, [kept, MirrorSpec(gone, required=False)], kinds=("model",)) as manager:
        manager.resume(new_state())
        manager.save(1, new_state())
    forgotten = run("forget-mirror", "--root", root, "--url", gone)
    assert forgotten.stdout == f"The run does not require {gone}; nothing more is sent there. It now requires {kept}.\n"


def test_a_mirror_that_was_pushed_to_is_sent_nothing_more(tmp_path: Path) -> None:
    root, kept, pushed = tmp_path / "root", f"file://{tmp_path}/kept", f"file://{tmp_path}/usb/pushed"
    saved_run(root, (1,), kept)
    (tmp_path / "usb").mkdir()
    assert run("push", "--root", root, "--mirror", pushed).returncode == 0
    saved_run(root, (2,), kept)
    shutil.rmtree(tmp_path / "usb")
    assert run("drain", "--root", root, "--timeout", "1").returncode == 8
    forgotten = run("forget-mirror", "--root", root, "--url", pushed)
    assert forgotten.stdout == (
        f"The run does not require {pushed}; nothing more is sent there. It now requires {kept}.\n"
    )
    assert not forgotten.stderr
    assert [url for url, _ in read_status(root).mirrors] == [kept]
    assert run("drain", "--root", root).returncode == 0


def test_a_mirror_that_comes_back_into_the_run_is_not_said_to_show_an_older_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, kept, away = tmp_path / "root", f"file://{tmp_path}/kept", f"file://{tmp_path}/away"
    saved_run(root, (1,), kept, away)
    assert run("forget-mirror", "--root", root, "--url", away).returncode == 0
    saved_run(root, (2,), kept)
    saved_run(root, (3,), kept, away)
    assert "older state" not in caplog.text


def test_i1_a_table_that_knows_only_a_mirror_that_was_pushed_to_keeps_it(tmp_path: Path) -> None:
    """A new table: the trainer's own mirrors, which rotation has to ask, are not in it yet."""
    root, kept, pushed = tmp_path / "root", f"file://{tmp_path}/kept", f"file://{tmp_path}/pushed"
    saved_run(root, (1, 2), kept)
    for part in (root / ".ckptmirror").glob("uploads.db*"):
        part.unlink()
    shutil.rmtree(tmp_path / "kept")
    assert run("push", "--root", root, "--mirror", pushed).returncode == 0
    assert_tells(run("forget-mirror", "--root", root, "--url", pushed), 10, "is the only mirror that the table")
    assert [url for url, _ in read_status(root).mirrors] == [pushed]
