"""A disk that is full at any step of save, start, upload and stage: an error with a next command, and nothing lost.

Every change of the disk is refused, alone or with all later ones (``tests/kit/faults``): each of them in the full
campaign, else a slice.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckptmirror import CheckpointManager, errors, stage_checkpoint_step
from ckptmirror.core import names
from ckptmirror.core.retention import Retention
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.status import is_mirrored
from ckptmirror.flow.upload import workers
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.inventory import read_inventory
from ckptmirror.local.status_file import read_status_file, write_status_file
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from tests.kit.cli import run
from tests.kit.faults import DiskFault, failing, flip_bit
from tests.kit.quota import quota_of_tables
from tests.kit.roots import content, leftovers, make_mirrored, make_pending, whole
from tests.kit.training import everything, new_state, running, same, saved_run, train, without_workers

pytestmark = pytest.mark.long

EVERY = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
FULL, QUOTA, BROKEN = errno.ENOSPC, errno.EDQUOT, errno.EIO


def cases(changes: int, about: int) -> range:
    """The changes to refuse: all of them, or a slice of about so many."""
    return range(1, changes + 1, 1 if EVERY else max(1, changes // about))


def fill(place: Path) -> None:
    """Leave no free byte on a small disk."""
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def assert_sound(root: Path) -> None:
    """Nothing is advertised that is not whole, and no temporary is left."""
    inventory = read_inventory(root)
    assert not inventory.incomplete
    assert not inventory.broken
    assert leftovers(root) == []


def assert_says(error: BaseException | None, code: int) -> None:
    """It says what, why and what to do."""
    assert isinstance(error, errors.CkptMirrorError)
    assert error.hint
    if code == BROKEN:
        assert error.exit_code in (6, 10)
    else:
        assert isinstance(error, errors.LocalStorageFull)
        assert error.exit_code == 5
        assert "ckptmirror rotate --dry-run" in error.hint
        assert any(words in str(error) for words in ("bytes free)", "quota is used up", "no space for a change of"))


def outcome(call: Callable[[], object]) -> errors.CkptMirrorError | None:
    """The error that a call ended with, if it did."""
    try:
        call()
    except errors.CkptMirrorError as error:
        return error
    return None


# -- save --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lasting", "code"),
    [(False, FULL), (True, FULL), (True, QUOTA), (False, BROKEN)],
    ids=["full once", "full", "no quota", "an I/O error"],
)
def test_i12_a_disk_that_is_full_at_any_step_of_a_save_costs_that_save_at_most(
    lasting: bool, code: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    manager = without_workers(CheckpointManager(root, [f"file://{tmp_path}/mirror"]))
    state = new_state()
    manager.resume(state)
    train(state)
    manager.save(1, state).wait()
    counted = DiskFault(code=code)
    with failing(counted):
        manager.save(2, state).wait()
    assert len(counted.labels) > 35
    step, committed, refused = 2, {1, 2}, 0
    for at in cases(len(counted.labels), 8 if lasting or code == BROKEN else 20):
        step += 1
        with failing(DiskFault(at, lasting, code)) as fault:
            handle = manager.save(step, state)
            failure = outcome(functools.partial(handle.wait, timeout_s=60))
        if failure is None:
            committed.add(step)
        else:
            refused += 1
            assert_says(failure.__cause__, code)
            assert str(failure.__cause__) in str(failure)
        assert fault.struck
        assert_sound(root)
        assert committed <= set(whole(root))
        step += 1
        train(state)
        manager.save(step, state).wait(timeout_s=60)  # there is room again
        committed.add(step)
    assert refused > 2
    expected = everything(state)
    with suppress(errors.DeadlinePassed):
        manager.close(timeout_s=0)
    assert set(whole(root)) - committed <= set(range(step)) if code == BROKEN else set(whole(root)) == committed
    again = CheckpointManager(root, [f"file://{tmp_path}/mirror"])
    found = new_state(1)
    start = again.resume(found)
    assert start is not None
    assert start.step == step
    assert same(everything(found), expected)
    again.wait("mirrored", timeout_s=60)
    again.close(timeout_s=60)
    assert not [item for item in read_inventory(root).foreign]
    assert set(whole(root)) == {meta.step for meta in mirror_catalog(mirror_at(tmp_path / "mirror")).saves.values()}


def mirror_at(folder: Path) -> Mirror:
    store = open_store(f"file://{folder}")
    return Mirror(store.url, True, store)


def test_a_save_that_fails_half_published_on_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """Not even in a root whose trash was never needed: it is made while there is room."""
    counted = DiskFault()
    for name in ("counted", "full"):
        manager = CheckpointManager(tmp_path / name)
        state = new_state()
        manager.resume(state)
        if name == "counted":
            with failing(counted):
                manager.save(1, state).wait()
            manager.close()
    at = [number for number, label in enumerate(counted.labels, 1) if label == "save.publish"][2]
    with failing(DiskFault(at, lasting=True)), pytest.raises(errors.BackgroundSaveFailed, match="publish"):
        manager.save(1, state).wait()
    assert content(tmp_path / "full") == {}
    manager.save(1, state).wait()
    manager.close()


def test_i8_a_training_whose_disk_stays_full_goes_on_and_hears_of_each_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", kinds=("model",))
    state = new_state()
    manager.resume(state)
    manager.save(1, state).wait()
    with failing(DiskFault(1, lasting=True)):
        for step in (2, 3):
            train(state)
            with pytest.raises(errors.BackgroundSaveFailed, match=f"step {step}"):
                manager.save(step, state).wait()
        with pytest.raises(errors.LocalStorageFull):
            manager.save_emergency_checkpoint(4, state)
        assert manager.status().newest_step == 1
    assert_sound(tmp_path / "run")
    manager.save_emergency_checkpoint(4, state)
    manager.close()


# -- start, upload, rotate ---------------------------------------------------------------------------------------


def started(root: Path, *mirrors: str) -> int | None:
    """Start and end; return the step from which it began."""
    with running(root, *mirrors, kinds=("model",)) as manager:
        found = manager.resume(new_state())
        return found.step if found is not None else None


@pytest.mark.parametrize("lasting", [False, True], ids=["full once", "full"])
def test_i12_a_disk_that_is_full_at_any_step_of_a_start_costs_no_save(lasting: bool, tmp_path: Path) -> None:
    prepared, root = tmp_path / "prepared", tmp_path / "run"
    saved_run(root, (1, 2), kinds=("model",))
    root.rename(prepared)

    shutil.copytree(prepared, root, symlinks=True)
    with failing(DiskFault()) as counted:
        assert started(root) == 2
    for at in cases(len(counted.labels), 6):
        shutil.rmtree(root)
        shutil.copytree(prepared, root, symlinks=True)
        with failing(DiskFault(at, lasting)):
            failure = outcome(lambda: started(root))
        if failure is not None:
            assert_says(failure, FULL)
        assert sorted(whole(root)) == [1, 2]
        assert started(root) == 2
        assert_sound(root)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_i12_an_io_error_at_any_step_of_a_start_that_fetches_costs_no_save(lasting: bool, tmp_path: Path) -> None:
    """It is this disk's: the mirror's copy is whole, and no older one takes its place."""
    root, url = tmp_path / "run", f"file://{tmp_path}/mirror"
    saved_run(root, (1, 2), url, kinds=("model",))

    shutil.rmtree(root)
    with failing(DiskFault(code=BROKEN, other_than="mirror.")) as counted:
        assert started(root, url) == 2
    for at in cases(len(counted.labels), 4):
        shutil.rmtree(root)
        with failing(DiskFault(at, lasting, BROKEN, other_than="mirror.")) as fault:
            began: list[int | None] = []
            failure = outcome(lambda began=began: began.append(started(root, url)))
        if failure is None:
            assert began == [2], fault.struck
        else:
            assert failure.hint
            assert failure.exit_code in (5, 6, 10), fault.struck
        assert started(root, url) == 2


@pytest.mark.parametrize("lasting", [False, True], ids=["full once", "full"])
@pytest.mark.parametrize("where", ["the root", "the mirror"])
def test_i12_a_disk_that_is_full_at_any_step_of_a_drain_or_a_rotation_costs_no_save(
    where: str, lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LEASE_S", 1.0)  # a claim that could not be put back is free only then
    monkeypatch.setenv("CKPTMIRROR_RETRY_S", "1")
    place, prepared = tmp_path / "place", tmp_path / "prepared"
    make_pending(place, f"file://{place}/mirror", 100, 200, kinds=("model",))
    open_store(f"file://{place}/mirror").identity()  # the first contact, at which a directory is made
    place.rename(prepared)
    root = place / "root"

    def go(timeout_s: float) -> None:
        drain(root, timeout_s=timeout_s)
        rotate_root(root, Retention(keep_last=1))

    def counts(prefix: str) -> int:
        shutil.copytree(prepared, place, symlinks=True)
        with failing(DiskFault(prefix=prefix)) as counted:
            go(60.0)
        return len(counted.labels)

    prefix = "mirror." if where == "the mirror" else ""
    for at in cases(counts(prefix), 2 if lasting else 5):
        shutil.rmtree(place)
        shutil.copytree(prepared, place, symlinks=True)
        with failing(DiskFault(at, lasting, prefix=prefix)):
            failure = outcome(functools.partial(go, 0.5))
        if failure is not None:
            assert failure.hint
            assert failure.exit_code in (5, 7, 8)
        here = set(whole(root))
        there = {meta.step for meta in mirror_catalog(mirror_at(place / "mirror")).saves.values()}
        assert here | there == {100, 200}
        go(60.0)
        assert is_mirrored(root, None)
        assert sorted(whole(root)) == [200]
        assert {meta.step for meta in mirror_catalog(mirror_at(place / "mirror")).saves.values()} == {100, 200}
        assert not list(place.rglob("*.tmp"))


# -- stage -------------------------------------------------------------------------------------------------------


def a_fresh_copy(folder: Path) -> tuple[str, Path, bool]:
    _, url, _ = make_mirrored(folder, 200)
    (folder / "eval").mkdir()
    return url, folder / "eval", False


def another_kind_joins(folder: Path) -> tuple[str, Path, bool]:
    _, url, _ = make_mirrored(folder, 200)
    stage_checkpoint_step(url, step=200, dest=folder / "eval", require_kind="model")
    return url, folder / "eval", False


def a_refresh(folder: Path) -> tuple[str, Path, bool]:
    _, url, _ = make_mirrored(folder, 200)
    staged = stage_checkpoint_step(url, step=200, dest=folder / "eval", full=True)
    flip_bit(next(staged.path.glob("*.distcp")))
    return url, folder / "eval", True


@pytest.mark.parametrize(
    ("lasting", "code"), [(False, FULL), (True, FULL), (False, BROKEN)], ids=["full once", "full", "an I/O error"]
)
@pytest.mark.parametrize("scene", [a_fresh_copy, another_kind_joins, a_refresh], ids=lambda scene: scene.__name__)
def test_i2_a_disk_that_is_full_at_any_step_of_a_stage_shows_nothing_half_and_the_same_call_completes(
    scene: Callable[[Path], tuple[str, Path, bool]], lasting: bool, code: int, tmp_path: Path
) -> None:
    url, dest, refresh = scene(tmp_path)
    prepared = tmp_path / "prepared"
    shutil.copytree(dest, prepared, symlinks=True)

    def stage() -> Path:
        return stage_checkpoint_step(url, step=200, dest=dest, refresh=refresh, full=True, require_kind="dcp").path

    with failing(DiskFault(code=code, other_than="mirror.")) as counted:
        stage()
    wanted = content(dest)
    for at in cases(len(counted.labels), 8):
        shutil.rmtree(dest)
        shutil.copytree(prepared, dest, symlinks=True)
        before = set(whole(dest))
        with failing(DiskFault(at, lasting, code, other_than="mirror.")):
            failure = outcome(stage)
        if failure is not None:
            assert_says(failure, code)
        if not refresh:  # of a damaged copy that is being replaced the meta may stand alone: that is incomplete
            for save in read_inventory(dest).saves:
                for artifact in save.meta.artifacts:
                    verify_file(dest / artifact.path, artifact.digest)
            assert not read_inventory(dest).incomplete
            assert before <= set(whole(dest))
        assert not read_inventory(dest).broken
        stage()
        assert content(dest) == wanted
        assert leftovers(dest) == []


def test_i8_a_full_disk_does_not_keep_the_table_from_what_the_uploads_tell_it(
    mounted: Callable[..., Path],
) -> None:
    """Else nothing could be verified there, so nothing deleted, and the disk would stay full for ever."""
    place, url = mounted("size=4m"), "file:///nfs/run"
    root, _ = make_pending(place, url, 100, 200)
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        for number in range(400):
            table.set_unasked([url] if number % 2 else [])
        log_bytes = (root / f"{names.TABLE_NAME}-wal").stat().st_size
        assert log_bytes < 500_000  # it is written over and over, and as long as that it needs no room
        fill(place)
        refused = 0
        for number in range(400):
            try:
                table.set_unasked([url] if number % 2 else [])
            except errors.LocalStorageFull:
                refused += 1
        assert refused < 3
        for _ in range(3):
            with suppress(errors.LocalStorageFull):
                claim = table.claim("worker", url, lease_s=60.0)
                assert claim is not None
                table.fail(claim, "as good as verified")
                break
        else:
            pytest.fail("no change is possible any more")


def test_i8_a_full_disk_does_not_keep_the_trainer_from_saying_what_it_skipped(mounted: Callable[..., Path]) -> None:
    place = mounted("size=4m")
    (place / names.CONTROL_DIR).mkdir()
    write_status_file(place, {"status": "running"})
    fill(place)
    facts = {"status": "stopped", "skipped": [{"step": step, "reason": "no room " * 20} for step in range(20)]}
    write_status_file(place, facts)
    assert read_status_file(place)["skipped"] == facts["skipped"]
    write_status_file(place, {"status": "ended"})
    assert read_status_file(place)["status"] == "ended"
    assert leftovers(place) == []


def try_in_vain(table: UploadsTable, url: str, tries: int) -> None:
    """Claim and put back, so often; now and then, a change may find no room."""
    in_a_row = 0
    for number in range(tries):
        try:
            claim = table.claim("worker", url, lease_s=60.0)
            assert claim is not None
            table.put_back(claim, f"try {number}: {'it is away ' * 20}", not_before_s=0.0)
            in_a_row = 0
        except errors.LocalStorageFull:
            in_a_row += 1
            assert in_a_row < 5, f"no change is possible any more, after {number}"


def test_i8_a_table_on_a_disk_without_a_free_byte_takes_changes_without_end(
    mounted: Callable[..., Path],
) -> None:
    """A mirror is away for days, and each try is a change; then it comes back, and what is uploaded is noted."""
    place, url = mounted("size=3m"), "file:///nfs/run"
    root, _ = make_pending(place, url, 100, 200, 300)
    with UploadsTable.open(root / names.TABLE_NAME) as table:
        fill(place)
        try_in_vain(table, url, 1500)
        assert [save.step for save in table.saves()] == [100, 200, 300]
        (place / "filler").unlink()
        table.set_unasked([url])
        assert (root / f"{names.TABLE_NAME}-reserve").stat().st_blocks * 512 >= 256 * 1024


def test_i8_a_quota_that_is_used_up_does_not_keep_the_table_from_what_the_uploads_tell_it(tmp_path: Path) -> None:
    url = "file:///nfs/run"
    root, _ = make_pending(tmp_path, url, 100, 200, 300)
    with quota_of_tables() as quota, UploadsTable.open(root / names.TABLE_NAME) as table:
        table.set_unasked([url])
        quota.used_up = True
        try_in_vain(table, url, 300)
        assert quota.refused
        assert (root / f"{names.TABLE_NAME}-reserve").stat().st_size == 0
        quota.used_up = False
        table.set_unasked([])
        assert (root / f"{names.TABLE_NAME}-reserve").stat().st_size


@pytest.mark.parametrize("verb", ["status", "drain", "rotate", "start"])
def test_i8_a_root_whose_disk_was_filled_while_no_trainer_ran_still_works(
    verb: str, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    """The last process that closed the table deleted its log and its shared memory: opening it takes room again."""
    place, url = mounted("size=4m"), f"file://{tmp_path}/mirror"
    root = place / "root"
    saved_run(root, (1, 2), url, kinds=("model",))
    fill(place)
    if verb == "start":
        with CheckpointManager(root, [url], kinds=("model",)) as manager:
            start = manager.resume(new_state())
            assert start is not None
            assert start.step == 2
    else:
        ended = run(verb, "--root", root, *(("--keep-last", "1") if verb == "rotate" else ()))
        assert ended.returncode == 0, ended.stderr
        assert "full" not in ended.stderr
    assert sorted(whole(root)) == ([2] if verb == "rotate" else [1, 2])
    reserve = root / f"{names.TABLE_NAME}-reserve"
    assert reserve.stat().st_blocks * 512 >= 256 * 1024  # for the next process


@pytest.mark.parametrize("left_kib", range(0, 100, 8))
def test_a_full_disk_with_small_blocks_kills_nobody(
    left_kib: int, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    """Where a block is smaller than a page, a store into the table's shared memory may need one that is not there."""
    place, url = mounted(ext4_kib=8192), f"file://{tmp_path}/mirror"
    root = place / "root"
    saved_run(root, (1, 2), url, kinds=("model",))
    fill(place)
    os.truncate(place / "filler", (place / "filler").stat().st_size - left_kib * 1024)
    for verb in ("status", "drain", "rotate"):
        ended = run(verb, "--root", root, *(("--keep-last", "1") if verb == "rotate" else ()))
        assert ended.returncode in (0, 5), ended.stderr
        assert ended.returncode == 0 or "bytes free" in ended.stderr


def test_a_table_that_a_full_disk_does_not_let_open_says_so(mounted: Callable[..., Path]) -> None:
    path = mounted("size=1m,nr_inodes=20") / "uploads.db"
    UploadsTable.open(path, create=True).close()
    fill(path.parent)
    for read_only in (True, False):
        with pytest.raises(errors.LocalStorageFull, match=r"no space to open .*\(0 bytes free\)"):
            UploadsTable.open(path, read_only=read_only)
    for left in path.parent.iterdir():
        if left != path:
            left.unlink()
    with suppress(OSError):
        for number in range(20):
            (path.parent / str(number)).touch()
    with pytest.raises(errors.LocalStorageFull, match=r"no space to open .* no inodes are left"):
        UploadsTable.open(path)
    UploadsTable.open(path, read_only=True).close()  # without a log, it needs none to be read


# -- a small disk, for real --------------------------------------------------------------------------------------


def test_a_whole_life_on_a_disk_that_is_too_small_for_it(
    mounted: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Save until it is full, upload, rotate as the message says, save again, verify, stage: nothing lost on the way."""
    root, url = mounted("size=3m") / "run", f"file://{tmp_path}/mirror"
    manager = CheckpointManager(root, [url], kinds=("model",))
    state = new_state()
    manager.resume(state)
    state.extra["large"] = "x" * 400_000
    steps = iter(range(1, 100))
    last = 0

    def save_until_full() -> None:
        nonlocal last
        for step in steps:
            manager.save(step, state).wait(timeout_s=60)
            last = step

    with pytest.raises(errors.BackgroundSaveFailed) as caught:
        save_until_full()
    assert_says(caught.value.__cause__, FULL)
    assert 1 < last < 20
    manager.wait("mirrored", timeout_s=60)
    with suppress(errors.BackgroundSaveFailed):
        manager.close(timeout_s=60)
    assert leftovers(root) == []
    ended = run("push", "--root", root, "--mirror", f"file://{tmp_path}/second")
    assert ended.returncode == 0, ended.stderr
    ended = run("rotate", "--root", root, "--keep-last", "1", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    ended = run("rotate", "--root", root, "--keep-last", "1")
    assert ended.returncode == 0, ended.stderr
    assert sorted(whole(root)) == [last]
    with CheckpointManager(root, [url], kinds=("model",)) as manager:
        start = manager.resume(state)
        assert start is not None
        assert start.step == last
        manager.save(last + 5, state).wait(timeout_s=60)
    assert run("verify", url, "--deep").returncode == 0
    assert {meta.step for meta in mirror_catalog(mirror_at(tmp_path / "mirror")).saves.values()} == {
        *range(1, last + 1),
        last + 5,
    }
