"""Rewind: a start goes on from the save that was chosen, nothing is lost, and a mistake leaves no trace."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import (
    AttemptFenced,
    CheckpointNotFound,
    ConfigError,
    IntegrityError,
    NoTable,
    NotAuthorised,
    RootLocked,
    UsageError,
)
from ckptmirror.flow.drain import confirm
from ckptmirror.flow.places.attempt_lists import read_local_attempts
from ckptmirror.flow.places.resolve import list_checkpoints
from ckptmirror.flow.start.rewind import plan_rewind, rewind
from ckptmirror.flow.status import read_status
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.lock import RootLock
from ckptmirror.local.table_place import table_path
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import assert_tells, run
from tests.kit.faults import faulty, flip_bit, refusing
from tests.kit.roots import content, drained, make_pending, whole
from tests.kit.saves import FIRST_ATTEMPT, make_save, put_attempts
from tests.kit.training import everything, new_state, running, same, saved_run

pytestmark = pytest.mark.long

BUCKET = "rewind"


def standings(place: Path | str) -> dict[int, str]:
    return {line.step: line.standing for line in list_checkpoints(place)}


# -- what a start does then -------------------------------------------------------------------------------------


@pytest.mark.short
def test_the_next_start_goes_on_from_there_and_so_do_all_after_it(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    states = saved_run(root, (3, 6, 9), url)
    before = content(root)
    rewound = rewind(root, 3)
    assert (rewound.step, rewound.place, rewound.recorded_on) == (3, "disk", (url,))
    assert [save.step for save in rewound.fork.superseded] == [6, 9]
    assert content(root).items() >= before.items()
    for _ in range(2):
        with running(root, url) as manager:
            state = new_state(seed=9)
            start = manager.resume(state)
            assert start is not None
            assert start.step == 3
            assert same(everything(state), states[3])
    saved_run(root, (5,), url)
    with running(tmp_path / "new-machine", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 5


def test_it_is_what_a_start_that_names_the_step_records(tmp_path: Path) -> None:
    """The same attempt, with the same parent, but for its id."""
    root = tmp_path / "root"
    saved_run(root, (3, 6))
    shutil.copytree(root, tmp_path / "other", symlinks=True, ignore=shutil.ignore_patterns("uploads.db*"))
    rewind(root, 3)
    with running(tmp_path / "other") as manager:
        manager.resume(new_state(), policy=3)
    one, other = (read_local_attempts(place) for place in (root, tmp_path / "other"))
    assert one is not None
    assert other is not None
    assert (one.attempts[-1].number, one.attempts[-1].parent) == (other.attempts[-1].number, other.attempts[-1].parent)
    assert one.attempts[-1].by_person


def test_later_saves_are_superseded_here_and_there_and_nothing_is_deleted(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, 300)
    before, there = content(root), content(tmp_path / "mirror")
    ended = run("rewind", "--root", root, "--step", "100")
    assert ended.returncode == 0
    assert [line.split()[:3] for line in ended.stdout.splitlines()] == [
        ["continue", "from", "step"],
        ["supersede", "step", "200"],
        ["supersede", "step", "300"],
    ]
    for place in (root, url):
        assert standings(place) == {100: "current", 200: "superseded", 300: "superseded"}
    assert content(root).items() >= before.items()
    del there[names.WRITER_NAME]
    assert content(tmp_path / "mirror").items() >= there.items()
    assert (root / "latest").readlink() == Path("model_000100.pt")


def test_it_is_undone_by_the_command_that_it_prints(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, 300)
    said = json.loads(run("rewind", "--root", root, "--step", "100", "--json").stdout)
    undone = run(*said["undo"].split()[1:])
    assert undone.returncode == 0, undone.stderr
    for place in (root, url):
        assert standings(place) == {100: "current", 200: "current", 300: "current"}


def test_the_command_that_undoes_it_goes_to_the_newest_save_that_is_whole(tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2, 3), kinds=("model",))
    (root / "model_000003.pt").unlink()
    rewound = run("rewind", "--root", root, "--step", "1")
    assert "supersede     step 3" in rewound.stdout
    newest = whole(root)[2].save_id[:8]
    assert f"to undo it: `ckptmirror rewind --root {root} --save {newest}`" in rewound.stderr


@pytest.mark.parametrize("then", ["start", "forget-mirror"])
def test_a_rewind_that_a_mirror_does_not_take_changes_nothing(
    then: str, server: GcsServerProcess, tmp_path: Path
) -> None:
    root, url = tmp_path / "root", f"gs://{BUCKET}/{then}"
    saved_run(root, (1, 2), url, kinds=("model",))
    server.faults([Fault(operation="upload.*", status=403, times=0)])
    ended = run("rewind", "--root", root, "--step", "1", env=server.environment)
    assert ended.returncode == 12
    assert f"{url} must record where training continues, but does not" in ended.stderr
    assert standings(root) == {1: "current", 2: "current"}
    assert read_status(root).newest_safe_step == 2
    server.clear_faults()
    if then == "forget-mirror":
        assert run("forget-mirror", "--root", root, "--url", url, env=server.environment).returncode == 0
        url = f"file://{tmp_path}/another"
    with running(root, url, kinds=("model",)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


@pytest.mark.parametrize("refused", [1, 2])
def test_a_rewind_that_the_second_mirror_does_not_take_stays_on_none(
    refused: int, server: GcsServerProcess, tmp_path: Path
) -> None:
    """The second one first takes its own list once more; if it then refuses the new one, nobody went back either."""
    root, first, second = tmp_path / "root", f"file://{tmp_path}/first", f"gs://{BUCKET}/second-{refused}"
    (tmp_path / "first").mkdir()
    saved_run(root, (1, 2), first, second, kinds=("model",))
    server.faults([Fault(operation="upload.*", status=403, nth=refused, times=0)])
    ended = run("rewind", "--root", root, "--step", "1", env=server.environment)
    assert ended.returncode == 12
    assert f"{second} must record where training continues, but does not" in ended.stderr
    server.clear_faults()
    assert standings(first) == {1: "current", 2: "current" if refused == 1 else "superseded"}
    forgotten = run("forget-mirror", "--root", root, "--url", second, env=server.environment)
    assert forgotten.returncode == 0
    assert ("the next start continues from step 1, not from step 2" in forgotten.stderr) == (refused == 2)
    with running(root, first, kinds=("model",)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == (2 if refused == 1 else 1)


def test_a_start_that_goes_back_with_a_new_mirror_that_takes_nothing_stays_on_none(
    server: GcsServerProcess, tmp_path: Path
) -> None:
    """The new mirror has no list to take once more: it takes the claim before the others do."""
    root, first, new = tmp_path / "root", f"file://{tmp_path}/first", f"gs://{BUCKET}/new"
    (tmp_path / "first").mkdir()
    saved_run(root, (1, 2), first, kinds=("model",))
    server.faults([Fault(operation="upload.*", status=403, times=0)])
    with running(root, first, new, kinds=("model",)) as manager, pytest.raises(NotAuthorised, match="must record"):
        manager.resume(new_state(), policy=1)
    server.clear_faults()
    assert standings(first) == {1: "current", 2: "current"}
    with running(root, first, new, kinds=("model",)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


@pytest.mark.parametrize("mirrored", [True, False])
def test_a_mirror_that_was_pushed_to_and_is_gone_hinders_nothing(mirrored: bool, tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/usb/pushed"
    saved_run(root, (1, 2), *([f"file://{tmp_path}/mirror"] if mirrored else []), kinds=("model",))
    (tmp_path / "usb").mkdir()
    assert run("push", "--root", root, "--mirror", url).returncode == 0
    (tmp_path / "usb").rename(tmp_path / "away")
    assert_tells(run("rewind", "--root", root, "--step", "7"), 5, "It may be there", url)
    rewound = run("rewind", "--root", root, "--scratch")
    assert rewound.returncode == 0, rewound.stderr
    assert f"warning: {url} does not answer" in rewound.stderr
    assert "has not recorded it yet" not in rewound.stderr


def test_a_trainer_elsewhere_is_fenced(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    saved_run(tmp_path / "root", (1, 2), url)
    with running(tmp_path / "elsewhere", url) as manager:
        state = new_state()
        manager.resume(state)
        rewind(tmp_path / "root", 1)
        assert manager._node is not None
        assert manager._node.claim is not None
        with pytest.raises(AttemptFenced):
            manager._node.claim.confirm(manager._node.mirrors[0])


def test_what_is_not_whole_is_left_behind_too(tmp_path: Path) -> None:
    """Else the next start would say that something newer is broken, for ever."""
    root, _, _ = drained(tmp_path, 100, 200)
    (root / "model_000200.pt").unlink()
    (tmp_path / "mirror" / "model_000200.pt").unlink()
    plan = plan_rewind(root, 100)
    assert [save.step for save in plan.fork.superseded] == [200]
    rewound = rewind(root, 100)
    assert rewound.before is None  # nothing whole to go back to
    assert plan_rewind(root, 100).fork.superseded == ()


def test_it_is_recorded_also_where_nothing_newer_is_seen(tmp_path: Path) -> None:
    """The newer save lies on another host's disk alone: that host learns of the decision by its mirror."""
    url = f"file://{tmp_path}/mirror"
    other = tmp_path / "other"
    saved_run(other, (1, 2), url)
    with running(other, url) as manager:
        faulty(manager, refusing())
        manager.resume(new_state())
        manager.save(3, new_state()).wait()
    with running(other, url) as manager:
        faulty(manager, refusing())
        assert manager.resume(new_state()).step == 3  # type: ignore[union-attr]
    ended = run("rewind", "--root", tmp_path / "here", "--step", "2", "--mirror", url, "--json")
    said = json.loads(ended.stdout)
    assert (said["recorded"], said["superseded"]) == (True, [])
    assert "step 2 was already the newest save seen" in ended.stderr
    with running(other, url) as manager:
        start = manager.resume(new_state())
    assert start is not None
    assert start.step == 2


# -- where the save is ------------------------------------------------------------------------------------------


def test_a_save_that_only_the_mirror_has_is_brought_and_verified(server: GcsServerProcess, tmp_path: Path) -> None:
    root, url, metas = drained(tmp_path, 100, 200, url=f"gs://{BUCKET}/brought")
    for artifact in metas[0].artifacts:
        (root / artifact.path).unlink()
    (root / "meta_000100.json").unlink()
    rewound = rewind(root, 100)
    assert rewound.place == url
    assert [save.meta.step for save in read_inventory(root).saves] == [100, 200]
    assert standings(url) == {100: "current", 200: "superseded"}


def test_a_new_disk_is_told_of_the_mirror(tmp_path: Path) -> None:
    _, url, _ = drained(tmp_path, 100, 200)
    new = tmp_path / "new"
    assert_tells(run("rewind", "--root", new, "--step", "100"), 10, "does not exist", "--mirror")
    assert not new.exists()
    ended = run("rewind", "--root", new, "--step", "100", "--mirror", url)
    assert ended.returncode == 0, ended.stderr
    assert [save.meta.step for save in read_inventory(new).saves] == [100]
    assert standings(url) == {100: "current", 200: "superseded"}
    assert run("ls", new).stdout.split()[0] == "100"


def test_a_broken_copy_falls_to_another_copy_of_the_same_save_and_else_nothing_is_recorded(tmp_path: Path) -> None:
    root, url, metas = drained(tmp_path, 100, 200)
    flip_bit(root / "model_000100.pt")
    assert rewind(root, 100).place == url
    flip_bit(root / "model_000100.pt")
    flip_bit(tmp_path / "mirror" / "model_000100.pt")
    rewind(root, metas[1].save_id)
    with pytest.raises(IntegrityError, match="No copy of 100 could be loaded"):
        rewind(root, 100)
    assert standings(root) == {100: "current", 200: "current"}


def test_nothing_is_recorded_before_every_required_mirror_answers(server: GcsServerProcess, tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, url=f"gs://{BUCKET}/silent")
    before = content(root / names.CONTROL_DIR).get("attempts.json")
    server.faults([Fault(operation="*", status=401, times=0)])
    ended = run("rewind", "--root", root, "--step", "100", env=server.environment)
    assert_tells(ended, 12, "A person's choice is recorded on every required mirror", url)
    assert content(root / names.CONTROL_DIR).get("attempts.json") == before
    server.clear_faults()
    assert standings(root) == {100: "current", 200: "current"}
    again = run("rewind", "--root", root, "--step", "100", "--json", env=server.environment)
    said = json.loads(again.stdout)
    assert (said["recorded"], said["told"], said["untold"]) == (True, [url], {})
    for place in (root, url):
        assert standings(place) == {100: "current", 200: "superseded"}


def test_a_step_that_may_be_on_a_silent_mirror_is_not_called_missing(server: GcsServerProcess, tmp_path: Path) -> None:
    root, _, _ = drained(tmp_path, 100, url=f"gs://{BUCKET}/maybe")
    server.faults([Fault(operation="*", status=401, times=0)])
    with pytest.raises(NotAuthorised, match="It may be there"):
        plan_rewind(root, 200)


# -- what is refused --------------------------------------------------------------------------------------------


def test_beside_a_trainer_it_is_refused_and_nothing_is_recorded(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200)
    lock = RootLock(root)
    lock.acquire({"pid": os.getpid(), "host": "here", "since": "now"})
    try:
        with pytest.raises(RootLocked):
            rewind(root, 100)
        assert_tells(run("rewind", "--root", root, "--step", "100"), 11, str(os.getpid()), stdout=None)
        assert run("rewind", "--root", root, "--step", "100", "--dry-run").returncode == 0
    finally:
        lock.release()
    assert standings(root) == standings(url) == {100: "current", 200: "current"}


def test_a_dry_run_prints_the_plan_and_records_nothing(tmp_path: Path) -> None:
    root, _, _ = drained(tmp_path, 100, 200)
    before, there = sorted(root.rglob("*")), content(tmp_path / "mirror")
    listed = (root / names.ATTEMPTS_NAME).read_bytes()
    ended = run("rewind", "--root", root, "--step", "100", "--dry-run")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "supersede     step 200" in ended.stdout
    assert (root / names.ATTEMPTS_NAME).read_bytes() == listed
    assert content(tmp_path / "mirror") == there
    assert [path for path in sorted(root.rglob("*")) if "uploads.db" not in path.name] == [
        path for path in before if "uploads.db" not in path.name
    ]


@pytest.mark.parametrize("reference", [150, "deadbeef"])
def test_a_save_that_is_not_there_leaves_no_trace(tmp_path: Path, reference: int | str) -> None:
    root, _, _ = drained(tmp_path, 100, 200)
    listed, there = (root / names.ATTEMPTS_NAME).read_bytes(), content(tmp_path / "mirror")
    with pytest.raises(CheckpointNotFound):
        rewind(root, reference)
    assert (root / names.ATTEMPTS_NAME).read_bytes() == listed
    assert content(tmp_path / "mirror") == there


def test_a_mistyped_mirror_or_root_makes_nothing(tmp_path: Path) -> None:
    new, url = tmp_path / "new", f"file://{tmp_path}/typo"
    assert_tells(run("rewind", "--root", new, "--step", "100", "--mirror", url), 10, "does not exist")
    (tmp_path / "typo").mkdir()
    with pytest.raises(CheckpointNotFound, match="names no run"):
        rewind(new, 100, mirrors=[url])
    assert not new.exists()
    assert list((tmp_path / "typo").iterdir()) == []


def test_a_mirror_of_another_run_is_refused(tmp_path: Path) -> None:
    root, _, _ = drained(tmp_path, 100, 200)
    other = tmp_path / "other"
    stranger = make_save(other / "root", 100, ("model",), run_id="ab" * 16)
    put_attempts(other / "root", [FIRST_ATTEMPT], run_id=stranger.run_id)
    assert run("push", "--root", other / "root", "--mirror", f"file://{other}/mirror").returncode == 0
    with pytest.raises(ConfigError, match="holds run"):
        rewind(root, 100, mirrors=[f"file://{other}/mirror"])
    assert standings(root) == {100: "current", 200: "current"}


def test_a_superseded_step_is_named_with_its_save_id(tmp_path: Path) -> None:
    root, url, metas = drained(tmp_path, 100, 200)
    rewind(root, 100)
    ended = run("rewind", "--root", root, "--step", "200")
    assert_tells(ended, 3, "off the lineage", f"--save {metas[1].save_id[:8]}")
    ended = run("rewind", "--root", tmp_path / "new", "--mirror", url, "--step", "200")
    assert f"`ckptmirror rewind --root {tmp_path}/new --mirror {url}` with --save " in ended.stderr
    assert rewind(root, metas[1].save_id[:8]).step == 200


def test_a_step_of_which_nothing_is_whole_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    root, _, _ = drained(tmp_path, 100, 200)
    (root / "model_000100.pt").unlink()
    (tmp_path / "mirror" / "model_000100.pt").unlink()
    with pytest.raises(CheckpointNotFound, match=r"no save of step 100.* Not whole: .*model_000100\.pt is missing"):
        rewind(root, 100)


def test_bad_input_is_a_sentence_a_hint_and_an_exit_code(tmp_path: Path) -> None:
    root, _, _ = drained(tmp_path, 100, 200)
    assert_tells(run("rewind", "--root", root), 2, "Give --step N, --save ID or --scratch.")
    assert_tells(run("rewind", "--root", root, "--step", "1", "--save", "12345678"), 2, "only one")
    assert_tells(run("rewind", "--root", root, "--save", "scratch"), 2, "'scratch' is not a save id")
    assert_tells(run("rewind", "--root", root, "--step", "150"), 3, "no save of step 150", "100, 200")
    with pytest.raises(UsageError):
        rewind(root, "12")
    with pytest.raises(NoTable):
        plan_rewind(tmp_path / "none", 100)


# -- a command that is started again ----------------------------------------------------------------------------


@pytest.mark.short
@pytest.mark.parametrize("form", ["step", "save id", "path", "scratch"])
def test_a_command_that_goes_back_does_so_once_however_often_it_is_started(tmp_path: Path, form: str) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (3, 6), url)
    three = next(line for line in list_checkpoints(root) if line.step == 3)
    forms = {"step": 3, "save id": three.save_id[:8], "path": root / "meta_000003.json", "scratch": "scratch"}
    asked = {"policy": forms[form], "force": form == "scratch"}
    began = None if form == "scratch" else 3

    def start(place: Path, *, save: int | None = None, **given: object) -> tuple[int | None, tuple[str, ...]]:
        with running(place, url) as manager:
            found = manager.resume(state := new_state(), **given)  # type: ignore[arg-type]
            if save is not None:
                manager.save(save, state).wait("mirrored")
            return (found.step, found.passed_over) if found is not None else (None, ())

    assert start(root, **asked) == (began, ())
    assert start(root, save=4, **asked)[0] == began  # it was killed before its first save
    for place in (root, tmp_path / "new-machine"):
        if place == root or form != "path":
            step, said = start(place, **asked)
            assert step == 4
            assert any("the run continues what it began" in line for line in said)
    if form == "scratch":
        assert_tells(run("rewind", "--root", root, "--scratch"), 0, "starts over at step 0", stdout=None)
    else:
        assert start(root, **{**asked, "force": True}) == (3, ())
    assert start(root, save=5)[0] == began
    assert start(root, **asked)[0] == 5


def test_the_first_command_of_a_run_may_say_that_it_starts_from_scratch(tmp_path: Path) -> None:
    for expected in (None, 2, 2):
        with running(tmp_path) as manager:
            state = new_state()
            found = manager.resume(state, policy="scratch", force=True)
            assert (found.step if found is not None else None) == expected
            if found is None:
                manager.save(2, state).wait()


def test_a_save_on_another_branch_is_gone_back_to_the_first_time(tmp_path: Path) -> None:
    saved_run(tmp_path, (3, 6, 9))
    for policy, expected in ((6, 6), (3, 3), (6, 3)):
        with running(tmp_path) as manager:
            if policy == 6 and expected == 3:  # the save of step 6 is off the lineage now
                with pytest.raises(CheckpointNotFound, match="Step 6 is off the lineage"):
                    manager.resume(new_state(), policy=6)
                continue
            start = manager.resume(new_state(), policy=policy)
            assert start is not None
            assert start.step == expected


def test_a_start_over_is_recorded_without_a_trainer_and_undone(tmp_path: Path) -> None:
    root, url = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (3, 6), url)
    planned = run("rewind", "--root", root, "--scratch", "--dry-run")
    assert planned.stdout.startswith("start over    at step 0\n")
    assert planned.stdout.count("supersede") == 2
    done = run("rewind", "--root", root, "--scratch", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["step"], facts["save_id"], facts["places"], facts["told"]) == (0, None, [], [url])
    with running(tmp_path / "elsewhere", url) as manager:
        assert manager.resume(new_state()) is None
    undone = run(*shlex.split(facts["undo"])[1:])
    assert undone.returncode == 0, undone.stderr
    with running(root, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 6


# -- the hint ---------------------------------------------------------------------------------------------------


def test_a_start_says_that_latest_was_re_pointed_and_names_the_verb(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path, (3, 6))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("dcp_000003")
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 6
    assert f"`ckptmirror rewind --root {tmp_path} --step 3`" in caplog.text
    caplog.clear()
    rewind(tmp_path, 3)
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3
    assert "is not followed" not in caplog.text


# -- what is said after it ---------------------------------------------------------------------------------------


def test_status_calls_a_save_safe_that_a_rewind_brought_from_the_mirror(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, kinds=("dcp", "model"))
    assert run("rotate", root, "--keep-last", "1").returncode == 0
    ended = run("rewind", root, "--step", "100")
    assert ended.returncode == 0, ended.stderr
    said = run("status", root).stdout.splitlines()
    assert said[0] == "safe: every save is verified on every required mirror"
    assert said[1] == "newest step 100, newest safe step 100"
    new = tmp_path / "new-disk"
    assert run("rewind", new, "--step", "100", "--mirror", url).returncode == 0
    assert run("status", new).stdout.startswith("safe: ")


HOLDS_THE_TABLE = """
import sqlite3, sys
table = sqlite3.connect(sys.argv[1], isolation_level=None)
table.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_table_that_another_holds_leaves_a_save_unconfirmed_and_the_log_says_of_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, (meta,) = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    command = [sys.executable, "-c", HOLDS_THE_TABLE, str(table_path(root))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        confirm(root, meta.save_id, [f"file://{tmp_path}/mirror"])
        other.communicate()
    (line,) = [record for record in caplog.records if "not confirmed" in record.getMessage()]
    assert (line.step, line.save_id, line.mirror) == (100, meta.save_id, f"file://{tmp_path}/mirror")  # type: ignore[attr-defined]
    confirm(root, meta.save_id, [f"file://{tmp_path}/mirror"])
    assert run("status", root).stdout.startswith("safe: ")


def test_a_save_that_was_brought_from_one_mirror_is_not_called_unsafe_for_the_other(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/{name}" for name in ("one", "two")]
    saved_run(tmp_path / "root", (1, 2), *urls)
    assert run("rotate", tmp_path / "root", "--keep-last", "1").returncode == 0
    ended = run("rewind", tmp_path / "root", "--step", "1")
    assert ended.returncode == 0, ended.stderr
    assert run("status", tmp_path / "root").stdout.startswith("safe: "), run("status", tmp_path / "root").stdout


def test_push_counts_no_part_of_a_superseded_save_as_failed(tmp_path: Path) -> None:
    root, _, _ = drained(tmp_path, 100, 150, 200, kinds=("dcp", "model"))
    second = f"file://{tmp_path}/second"
    assert run("rotate", root, "--keep-last", "1", "--keep-every", "100").returncode == 0
    assert run("rewind", root, "--step", "150").returncode == 0  # now a part of it is here ...
    assert run("rewind", root, "--step", "100").returncode == 0  # ... and it is superseded
    ended = run("push", root, second)
    assert (ended.returncode, ended.stderr) == (0, "")
    named = run("push", root, second, "--step", "150")
    assert_tells(named, 3, "only a part of a save of step 150", "ckptmirror stage --step 150")


def test_push_says_how_to_bring_the_rest_of_a_save(tmp_path: Path) -> None:
    root, url, _ = drained(tmp_path, 100, 200, kinds=("dcp", "model"))
    second = f"file://{tmp_path}/second"
    assert run("rotate", root, "--keep-last", "1").returncode == 0
    assert run("rewind", root, "--step", "100").returncode == 0
    ended = run("push", root, second)
    assert ended.returncode == 8
    (command,) = set(re.findall("`(ckptmirror stage [^`]*)`", ended.stderr))
    words = shlex.split(command)
    assert words[words.index("--mirror") + 1] == url
    for kind in ("dcp", "model"):
        assert run(*words[1:], "--kind", kind).returncode == 0
    assert run("push", root, second).returncode == 0
