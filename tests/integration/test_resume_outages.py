"""Resume while a mirror is silent, takes nothing or is no longer configured: nothing newer is left behind unseen."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptmirror import CheckpointManager, stage_checkpoint_step
from ckptmirror.core import names, retry_delay
from ckptmirror.core.codec import attempts_from_bytes, attempts_to_bytes
from ckptmirror.core.errors import ObjectNotFound, StoreTemporary
from ckptmirror.core.events import Fenced, MirrorCommitted
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec
from ckptmirror.stores import memory
from tests.kit.faults import faulty, flip_bit
from tests.kit.faulty_store import FaultyStore, StoreFault
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "nfs").mkdir()
    return f"file://{tmp_path}/nfs/run"


def test_a_copy_that_somebody_staged_is_not_gone_on_from_while_the_mirror_is_silent(tmp_path: Path, url: str) -> None:
    states = saved_run(tmp_path / "first", (2, 3, 4), url)
    root = tmp_path / "second"
    stage_checkpoint_step(url, step=3, dest=root, require_kind="dcp", full=True)
    with running(root, url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        with pytest.raises(StoreTemporary, match="the newest that can be seen"):
            manager.resume(new_state())
    state = new_state()
    with running(root, url) as manager:
        start = manager.resume(state)
    assert start is not None
    assert start.step == 4
    assert same(everything(state), states[4])


def test_a_save_made_elsewhere_is_not_continued_from_while_the_mirror_is_silent_until_this_root_saved(
    tmp_path: Path, url: str
) -> None:
    """Where it was made a later save may have been drained meanwhile."""
    saved_run(tmp_path / "first", (2,), url)
    root = tmp_path / "second"
    with running(root, url) as manager:
        manager.resume(new_state())
    with running(root, url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        with pytest.raises(StoreTemporary, match=r"The run was started elsewhere \(attempt 0 "):
            manager.resume(new_state())
    saved_run(root, (3,), url)
    with running(root, url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3


def test_i7_a_start_asks_a_mirror_that_is_busy_for_longer_than_a_few_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://busy-{tmp_path.name}/run"
    busy = FaultyStore(memory.open(url))
    monkeypatch.setattr(memory, "open", lambda _url: busy)
    saved_run(tmp_path / "first", (2,), url)
    monkeypatch.delenv("CKPTMIRROR_RETRY_S")
    monkeypatch.setattr(retry_delay, "_random", SimpleNamespace(uniform=lambda *_: 0.0))
    with running(tmp_path / "second", url) as manager:
        busy.script(StoreFault(when="before", times=40))
        start = manager.resume(new_state())
    assert start is not None
    assert start.step == 2
    assert f"waiting for {url}" in caplog.text


@pytest.mark.parametrize("required", [True, False])
def test_nothing_older_is_brought_while_a_mirror_that_counts_is_silent(tmp_path: Path, required: bool) -> None:
    ahead, behind = f"memory://m-{tmp_path.name}-a/run", f"memory://m-{tmp_path.name}-b/run"
    saved_run(tmp_path / "first", (2,), ahead, behind)
    saved_run(tmp_path / "first", (4,), ahead)
    mirrors = [MirrorSpec(ahead, required), MirrorSpec(behind, required)]
    with running(tmp_path / "second", *mirrors) as manager:
        silent, _ = faulty(manager)
        silent.go_down()
        with pytest.raises(StoreTemporary, match="not on this disk"):
            manager.resume(new_state())
    with running(tmp_path / "second", *mirrors) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 4


def test_a_mirror_that_answers_and_takes_nothing_does_not_let_a_run_fork_from_an_old_save(
    tmp_path: Path, url: str
) -> None:
    """It lists the attempt that went on elsewhere, so nothing would fence this one later."""
    saved_run(tmp_path / "first", (1, 2), url)
    saved_run(tmp_path / "second", (3, 4), url)
    with running(tmp_path / "first", url) as manager:
        faulty(manager, StoreFault("write", when="before", times=0))
        with pytest.raises(StoreTemporary, match="must record where training continues, but does not"):
            manager.resume(new_state())
    with running(tmp_path / "third", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 4


def test_an_attempt_that_is_known_as_undecided_alone_may_have_gone_on_where_nobody_answers(tmp_path: Path) -> None:
    """It was decided on the one mirror while the other took nothing; then the one is silent and the other is back."""
    urls = [f"file://{tmp_path}/{name}/run" for name in ("one", "other")]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    saved_run(tmp_path / "first", (1, 2), *urls)
    is_there = threading.Event()
    with running(tmp_path / "second", *urls) as manager:
        one, other = manager._node.mirrors  # type: ignore[union-attr]
        takes_the_claim_alone = StoreFault("write", name=names.WRITER_NAME, nth=2, times=0, when="before")
        manager._node.mirrors = [one, Mirror(other.url, True, FaultyStore(other.store, [takes_the_claim_alone]))]  # type: ignore[union-attr, arg-type]
        manager.events.subscribe(
            lambda event: is_there.set() if isinstance(event, MirrorCommitted) and event.step == 4 else None
        )
        state = new_state()
        manager.resume(state)
        manager.save(4, state).wait()
        assert is_there.wait(60.0)
    with running(tmp_path / "first", *urls) as manager:
        faulty(manager)[0].go_down()
        with pytest.raises(StoreTemporary, match="the newest that can be seen"):
            manager.resume(new_state())
    with running(tmp_path / "first", *urls) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 4


def test_saves_that_somebody_copied_here_are_not_gone_on_from_while_the_mirror_is_silent(
    tmp_path: Path, url: str
) -> None:
    saved_run(tmp_path / "first", (2, 4), url)
    root = tmp_path / "second"
    root.mkdir()
    for path in (tmp_path / "nfs" / "run").glob("*000002*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, root / path.name)
    for _ in range(2):  # nor by a second start, after the first has left a list of its own
        with running(root, url) as manager:
            faulty(manager, StoreFault(when="before", times=0))
            with pytest.raises(StoreTemporary, match="the newest that can be seen"):
                manager.resume(new_state())
    with running(root, url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 4


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_named_step_whose_newer_save_is_not_whole_is_not_given_the_older_in_silence(
    tmp_path: Path, url: str, is_silent: bool
) -> None:
    root = tmp_path / "root"
    with CheckpointManager(root, [url]) as manager:
        state = new_state()
        manager.resume(state)
        manager.save(2, state).wait()
        newer = manager.save(2, state).wait().save_id
        manager.save(3, state).wait()
    (root / f"extra_000002-{str(newer)[:8]}_rank0.pt").unlink()
    for path in (tmp_path / "nfs" / "run").glob(f"extra_000002-{str(newer)[:8]}*"):
        path.unlink()
    with running(root, url) as manager:
        if is_silent:
            faulty(manager, StoreFault(when="before", times=0))
            with pytest.raises(StoreTemporary, match="may be there"):
                manager.resume(new_state(), 2)
            return
        start = manager.resume(new_state(), 2)
        assert start is not None
        assert any(str(newer)[:8] in line for line in start.passed_over)


def test_a_save_brought_from_elsewhere_keeps_an_older_one_from_being_gone_on_from(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "first", (1, 2), url)
    saved_run(tmp_path / "second", (4,), url)
    stage_checkpoint_step(url, step="latest", dest=tmp_path / "first", full=True)
    with running(tmp_path / "first", url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        with pytest.raises(StoreTemporary, match=r"started elsewhere \(attempt 1 "):
            manager.resume(new_state())


def without_required(*lists: Path) -> None:
    """Leave lists of attempts as an older version wrote them: they do not name the required mirrors."""
    for path in lists:
        path.write_bytes(attempts_to_bytes(replace(attempts_from_bytes(path.read_bytes()), requirements=())))


@pytest.mark.parametrize("named_by", ["lists", "table"])
def test_a_mirror_that_is_taken_out_of_the_list_is_missed_like_one_that_is_silent(
    tmp_path: Path, url: str, named_by: str
) -> None:
    other = f"file://{tmp_path}/nfs/other"
    saved_run(tmp_path / "first", (1, 2), url, other)
    with running(tmp_path / "second", url, other) as manager:
        _, behind = faulty(manager)
        state = new_state()
        manager.resume(state)
        behind.script(StoreFault("upload", when="before", times=0))
        train(state)
        handle = manager.save(4, state).wait()
        assert manager._node is not None
        manager._node.wait_mirrored(handle.save_id, 2.0)
    if named_by == "table":
        without_required(tmp_path / "first" / names.ATTEMPTS_NAME, tmp_path / "nfs" / "other" / names.WRITER_NAME)
    with running(tmp_path / "first", other) as manager, pytest.raises(StoreTemporary, match="no longer configured"):
        manager.resume(new_state())


def test_a_mirror_that_is_taken_out_of_the_list_is_named_where_this_root_goes_on(tmp_path: Path, url: str) -> None:
    saved_run(tmp_path / "root", (1, 2), url)
    with running(tmp_path / "root", f"file://{tmp_path}/nfs/other") as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2
        assert any(url in line and "is no longer configured" in line for line in start.passed_over)


@pytest.mark.parametrize("now", ["removed", "replaced", "demoted"])
def test_a_mirror_that_counts_no_more_is_missed_where_it_may_have_what_is_broken_here(tmp_path: Path, now: str) -> None:
    """Demoted: it was required and is not, and does not answer. Else: it was the only one, and never required."""
    place, other = (f"file://{tmp_path}/nfs/{name}" for name in ("run", "other"))
    (tmp_path / "nfs").mkdir()
    root = tmp_path / "root"
    saved_run(root, (1, 2), MirrorSpec(place, required=now == "demoted"))
    flip_bit(next(root.glob("dcp_000002/__0_0.distcp")))
    flip_bit(root / "model_000002.pt")
    if now == "demoted":
        (tmp_path / "nfs" / "run").rename(tmp_path / "aside")
    mirrors = {"removed": [], "replaced": [other], "demoted": [MirrorSpec(place, required=False), other]}[now]
    for _ in range(2):  # nor does the start that is refused change what the next one goes by
        with running(root, *mirrors) as manager, pytest.raises(StoreTemporary, match="The copy of step 2 is broken"):
            manager.resume(new_state())
    if now == "demoted":
        (tmp_path / "aside").rename(tmp_path / "nfs" / "run")
    with running(root, MirrorSpec(place, required=False)) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_what_ended_an_attempt_here_is_known_to_the_next_start_though_the_mirror_is_silent(
    tmp_path: Path, url: str
) -> None:
    is_fenced = threading.Event()
    with running(tmp_path / "first", url) as manager:
        manager.events.subscribe(lambda event: is_fenced.set() if isinstance(event, Fenced) else None)
        state = new_state()
        manager.resume(state)
        manager.save(1, state).wait("mirrored", timeout_s=60.0)
        saved_run(tmp_path / "second", (3,), url)
        manager.save(2, state).wait()
        assert is_fenced.wait(60.0)
    with running(tmp_path / "first", url) as manager:
        faulty(manager, StoreFault(when="before", times=0))
        with pytest.raises(StoreTemporary, match=r"started elsewhere \(attempt 1 "):
            manager.resume(new_state())
    with running(tmp_path / "first", url) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3


@pytest.mark.parametrize("times", [1, 2])
def test_a_meta_that_is_listed_and_then_not_found_is_asked_for_again(tmp_path: Path, url: str, times: int) -> None:
    saved_run(tmp_path / "first", (1, 2), url)
    lost = StoreFault("read", name="meta_000002", times=times, when="before", error=lambda: ObjectNotFound("not there"))
    with running(tmp_path / "second", url) as manager:
        faulty(manager, lost)
        if times == 2:
            with pytest.raises(StoreTemporary, match="appears and disappears"):
                manager.resume(new_state())
            return
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.passed_over) == (2, ())
