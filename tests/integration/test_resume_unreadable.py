"""A newest save that cannot be seen or read at the moment is never passed by in silence."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import MirrorSpec
from ckptmirror.core import names
from ckptmirror.core.codec import attempts_to_bytes
from ckptmirror.core.errors import (
    CkptMirrorError,
    NotAuthorised,
    StorePermanent,
    StoreTemporary,
    Temporary,
)
from ckptmirror.core.model import AttemptList, Meta
from ckptmirror.flow.places.attempt_lists import read_local_attempts
from ckptmirror.local import listing
from ckptmirror.local.inventory import read_inventory
from ckptmirror.stores import open_store
from tests.kit.faults import dead, faulty, flip_bit, of_a_later_version
from tests.kit.faulty_store import StoreFault
from tests.kit.roots import artifact, whole
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "nfs").mkdir()
    return f"file://{tmp_path}/nfs/run"


def unlistable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The device fails whenever a directory of this name is listed."""
    scandir = os.scandir

    def fail(path: os.PathLike[str]) -> object:
        if str(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    monkeypatch.setattr(listing.os, "scandir", fail)


def saves_of(root: Path, step: int) -> list[Meta]:
    """Every whole save of a step on the disk."""
    return [save.meta for save in read_inventory(root).saves if save.meta.step == step]


def gone(root: Path, step: int) -> None:
    """Somebody deleted a save by hand."""
    for path in root.glob(f"*_{step:06d}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# -- on this disk -----------------------------------------------------------------------------------------------------


def test_an_io_error_while_the_newest_save_is_listed_is_an_error_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, (1, 2), kinds=("dcp",))
    with monkeypatch.context() as broken:
        unlistable(broken, "dcp_000002")
        with running(tmp_path) as manager:
            with pytest.raises(Temporary, match="meta_000002") as failed:
                manager.resume(new_state())
            assert "policy=<step>" in failed.value.hint
            with pytest.raises(Temporary, match="meta_000002"):
                manager.resume(new_state(), policy="latest")
            with pytest.raises(Temporary, match="meta_000002"):
                manager.resume(new_state(), policy=2)
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.passed_over) == (2, ())


def test_a_person_may_go_back_past_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, (1, 2))
    unlistable(monkeypatch, "dcp_000002")
    with running(tmp_path) as manager:
        start = manager.resume(new_state(), policy=1)
        assert start is not None
        assert start.step == 1
    with running(tmp_path) as manager:  # that was decided: what was left behind is in nobody's way
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
        assert all("is whole and superseded" in line for line in start.passed_over)


def test_an_io_error_of_an_older_save_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, (1, 2))
    unlistable(monkeypatch, "dcp_000001")
    with running(tmp_path) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.passed_over) == (2, ())


def test_a_meta_that_cannot_be_read_now_is_an_error_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, (1, 2))
    real = os.open

    def fail(path: str | os.PathLike[str], *more: object, **named: object) -> int:
        if str(path).endswith("meta_000002.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *more, **named)  # type: ignore[arg-type]

    with running(tmp_path) as manager:
        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(Temporary, match="meta_000002"):
            manager.resume(new_state())


def test_bytes_that_a_rank_cannot_read_now_do_not_set_training_back(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "root", (1, 2), kinds=("model",))
    real = os.preadv

    def fail(descriptor: int, *more: Any) -> int:
        if "/model_000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *more)

    monkeypatch.setattr(os, "preadv", fail)
    with running(tmp_path / "root") as manager:
        with pytest.raises(Temporary, match="step 2 cannot be read now"):
            manager.resume(new_state())
        start = manager.resume(new_state(), policy=1)
        assert start is not None
        assert start.step == 1


def test_a_save_that_a_newer_version_wrote_is_no_reason_to_go_back(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "one", (1, 2), url)
    for place in (tmp_path / "one", tmp_path / "nfs" / "run"):
        path = place / "meta_000002.json"
        path.write_bytes(of_a_later_version(path.read_bytes()))
    for root in ("one", "two"):
        with running(tmp_path / root, url) as manager, pytest.raises(Temporary, match=r"version is \d+; this"):
            manager.resume(new_state())


def test_a_save_that_a_hand_damaged_and_nobody_holds_whole_is_passed_over_loudly(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path / "root", (1, 2))
    artifact(tmp_path / "root", whole(tmp_path / "root")[2], "extra_").unlink()
    with running(tmp_path / "root") as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
        (line,) = start.passed_over
    assert "step 2" in line
    assert "extra_000002_rank0.pt is missing" in line
    assert any(one.levelno == logging.ERROR and line in one.message for one in caplog.records)
    with running(tmp_path / "root") as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.passed_over) == (1, (line,)), "until training went on without it"
        manager.save(2, new_state()).wait()
    with running(tmp_path / "root") as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.passed_over) == (2, ())


def test_an_incomplete_copy_of_what_an_answering_mirror_has_whole_is_brought_from_there(
    tmp_path: Path, url: str
) -> None:
    root = tmp_path / "root"
    states = saved_run(root, (1, 2), url)
    artifact(root, whole(root)[2], "extra_").unlink()
    with running(root, url) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.place, start.passed_over) == (2, url, ())
        assert same(everything(state), states[2])
    flip_bit(root / "meta_000002.json", offset=30)  # the table still knows whose it was
    with running(root, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place, start.passed_over) == (2, url, ())


@pytest.mark.parametrize("damage", ["cut short", "missing", "meta", "all of it"])
def test_a_save_that_is_not_whole_is_waited_for_while_a_required_mirror_is_silent(
    tmp_path: Path, url: str, damage: str
) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2), url)
    path = artifact(root, whole(root)[2], "extra_")
    match damage:
        case "cut short":
            os.truncate(path, 3)
        case "missing":
            path.unlink()
        case "meta":
            flip_bit(root / "meta_000002.json", offset=30)
        case _:
            gone(root, 2)
    with running(root, url) as manager:
        faulty(manager, dead())
        with pytest.raises(StoreTemporary, match=r"meta_000002.*does not answer"):
            manager.resume(new_state())
        with pytest.raises(StoreTemporary, match="A person's choice is recorded on every required mirror"):
            manager.resume(new_state(), policy=1)


def test_older_and_unfinished_things_are_in_nobodys_way_while_a_mirror_is_silent(tmp_path: Path, url: str) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2), url)
    artifact(root, whole(root)[1], "extra_").unlink()
    (root / "model_000009.pt").write_bytes(b"no meta names it")
    (root / names.tmp_name("model_000009.pt", "1f0c9a2e" * 4)).write_bytes(b"unfinished")
    with running(root, url) as manager:
        faulty(manager, dead())
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place) == (2, "disk")


def test_a_broken_emergency_snapshot_does_not_make_a_start_wait_for_a_mirror(tmp_path: Path, url: str) -> None:
    root = tmp_path / "root"
    with running(root, url) as manager:
        state = new_state()
        manager.resume(state)
        train(state, 1)
        manager.save(1, state).wait("mirrored", timeout_s=30)
        train(state, 1)
        manager.save_emergency_checkpoint(2, state)
    (snapshot,) = root.glob("emergency_step_000002_*")
    (snapshot / "rank0.pt").unlink()
    with running(root, url) as manager:
        faulty(manager, dead())
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
        assert any("step 2" in line for line in start.passed_over)


# -- on a mirror ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "expected"), [(NotAuthorised, NotAuthorised), (StorePermanent, Temporary)])
def test_a_mirrors_newest_meta_that_cannot_be_read_now_is_no_reason_to_go_back(
    tmp_path: Path, url: str, answer: type[CkptMirrorError], expected: type[CkptMirrorError]
) -> None:
    saved_run(tmp_path / "one", (1, 2), url)
    fault = StoreFault("read", name="meta_000002.json", when="before", times=0, error=lambda: answer("not now"))
    with running(tmp_path / "two", url) as manager:
        faulty(manager, fault)
        with pytest.raises(expected, match=r"meta_000002.*not now") as failed:
            manager.resume(new_state())
        assert "policy=<step>" in failed.value.hint
    with running(tmp_path / "one", url) as manager:  # whose disk has it whole
        faulty(manager, fault)
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.place) == (2, "disk")


def test_an_optional_mirrors_meta_that_cannot_be_read_is_passed_over_loudly(tmp_path: Path, url: str) -> None:
    extra = f"file://{tmp_path}/nfs/extra"
    both = (url, MirrorSpec(extra, required=False))
    saved_run(tmp_path / "one", (1,), *both)
    with running(tmp_path / "one", *both) as manager:
        stores = faulty(manager)
        stores[1].script(StoreFault("read", name="meta_*", when="before", times=0, error=lambda: StorePermanent("no")))
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1


@pytest.mark.parametrize("required", [True, False])
def test_training_does_not_fork_from_what_another_mirror_happens_to_hold(
    tmp_path: Path, url: str, required: bool
) -> None:
    """A required mirror is silent, and the other one has an older save."""
    other = f"file://{tmp_path}/nfs/other"
    both = (url, MirrorSpec(other, required=required))
    saved_run(tmp_path / "one", (1,), *both)
    with running(tmp_path / "one", *both) as manager:
        faulty(manager)[1].script(dead())
        state = new_state()
        manager.resume(state)
        train(state, 8)
        handle = manager.save(9, state)
        handle.wait()
        assert manager._node is not None
        manager._node.wait_mirrored(handle.save_id, 5.0 if not required else 2.0)
    assert open_store(url).stat("meta_000009.json") is not None
    with running(tmp_path / "two", *both) as manager:
        faulty(manager)[0].script(dead())
        for policy in ("auto", "latest"):
            with pytest.raises(StoreTemporary, match="not on this disk"):
                manager.resume(new_state(), policy)
    with running(tmp_path / "two", *both) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 9
    with running(tmp_path / "three", *both) as manager:
        faulty(manager)[0].script(dead())
        with pytest.raises(StoreTemporary, match="A person's choice is recorded on every required mirror"):
            manager.resume(new_state(), policy=1)


# -- replaced saves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "latest", 2])
def test_a_replaced_save_stands_in_for_a_broken_one_before_an_older_step_does(
    tmp_path: Path, policy: str | int
) -> None:
    states = saved_run(tmp_path, (1, 2))
    (first,) = [meta for step, meta in whole(tmp_path).items() if step == 2]
    saved_run(tmp_path, (2,))
    broken = next(meta for meta in saves_of(tmp_path, 2) if meta.save_id != first.save_id)
    flip_bit(artifact(tmp_path, broken, "extra_"))
    with running(tmp_path) as manager:
        state = new_state(seed=6)
        start = manager.resume(state, policy)
        assert start is not None
        assert (start.step, start.save_id) == (2, first.save_id)
        assert any(first.save_id[:8] in line and "replaced" in line for line in start.passed_over)
        assert same(everything(state), states[2])
        train(state, 1)
        manager.save(3, state).wait()
    with running(tmp_path) as manager:  # the lineage goes through the replaced save from now on
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.passed_over) == (3, ())
        start = manager.resume(new_state(), policy=2, force=True)
        assert start is not None
        assert (start.save_id, start.passed_over) == (first.save_id, ())


def test_a_replaced_save_does_not_stand_in_while_a_required_mirror_is_silent(tmp_path: Path, url: str) -> None:
    root = tmp_path / "root"
    saved_run(root, (1, 2), url)
    first = whole(root)[2]
    saved_run(root, (2,), url)
    broken = next(meta for meta in saves_of(root, 2) if meta.save_id != first.save_id)
    flip_bit(artifact(root, broken, "extra_"))
    with running(root, url) as manager:
        faulty(manager, dead())
        with pytest.raises(StoreTemporary, match="step 2 is broken"):
            manager.resume(new_state())
    with running(root, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.save_id, start.place) == (broken.save_id, url)


# -- lists ------------------------------------------------------------------------------------------------------------


def test_a_save_of_an_attempt_that_no_list_tells_of_is_reported(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An older list was restored everywhere, and another machine's later saves lie on the mirror."""
    saved_run(tmp_path / "one", (1,), url)
    listed = read_local_attempts(tmp_path / "one")
    assert listed is not None
    saved_run(tmp_path / "two", (5,), url)
    later = whole(tmp_path / "two")[5]
    store = open_store(url)
    info = store.stat(names.WRITER_NAME)
    assert info is not None
    store.write(
        names.WRITER_NAME, attempts_to_bytes(AttemptList(listed.run_id, listed.attempts)), if_generation=info.generation
    )
    with running(tmp_path / "one", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 1
        (line,) = [line for line in start.passed_over if later.save_id[:8] in line]
    assert "no list names" in line
    assert any(one.levelno == logging.ERROR and line in one.message for one in caplog.records)
