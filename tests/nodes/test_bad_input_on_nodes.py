"""Nodes that were started wrongly, or on machines that differ: every rank says the same, in time."""

from __future__ import annotations

import ctypes
import datetime as clock
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ckptmirror.flow.places.mirrors
import ckptmirror.manager
from ckptmirror import CheckpointManager, MirrorSpec, list_checkpoints
from ckptmirror.core.errors import CkptMirrorError, ConfigError, RankFailed, RootLocked, StoreTemporary, WaitTimeout
from ckptmirror.core.sealed_json import seal
from ckptmirror.flow.drain import drain
from ckptmirror.local.lock import RootLock
from ckptmirror.stores.base import Store
from ckptmirror.stores.file_place import LOCK_FILE
from ckptmirror.stores.same_place import identity_now
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import ALONE_S, WAIT_S, Job, built, expect, take_part, train

pytestmark = pytest.mark.long

SHORT_S = 4.0
DAY_S = 86_400.0
CLONE_NEWNS = 0x20000  # <sched.h>: mounts of its own


def open_as(rank: int, base: str, versions: list[str], mirrors: list[list[tuple[str, bool]]]) -> tuple[str, str, int]:

    def job() -> None:
        ckptmirror.manager.__version__ = versions[rank]
        specs = [MirrorSpec(url, required=required) for url, required in mirrors[rank]]
        CheckpointManager(Path(base) / "abcd"[rank], specs, timeout_s=WAIT_S).close()

    return outcome(job)


def test_nodes_of_which_half_have_an_older_release_are_refused_on_every_rank(tmp_path: Path) -> None:
    for kind, message, code in run_ranks(4, open_as, str(tmp_path), ["0.2.0", "0.2.0", "0.1.0", "0.1.0"], [[]] * 4):
        assert (kind, code) == (ConfigError.__name__, 10)
        assert "node 0 has 0.2.0" in message
        assert "node 2 has 0.1.0" in message
    assert list(tmp_path.glob("*/meta_*")) == []


@pytest.mark.parametrize(
    ("mirrors", "values"),
    [
        ([[("one", True), ("two", True)], [("two", True), ("one", True)]], ("one, file://", "two, file://")),
        ([[("one", True)], [("one", False)]], ("node 0 has file://", "one (optional)")),
        ([[("one", True)], []], ("node 0 has file://", "node 1 has none")),
    ],
)
def test_nodes_whose_mirrors_differ_in_any_way_are_refused_on_every_rank(
    mirrors: list[list[tuple[str, bool]]], values: tuple[str, ...], tmp_path: Path
) -> None:
    given = [[(f"file://{tmp_path}/{name}", required) for name, required in of_rank] for of_rank in mirrors]
    for kind, message, code in run_ranks(2, open_as, str(tmp_path), ["0.2.0"] * 2, given):
        assert (kind, code) == (ConfigError.__name__, 10)
        assert all(value in message.replace(f"{tmp_path}/", "") for value in ("mirrors", *values))


def resume_without(rank: int, base: str, missing: int, opens: bool) -> tuple[str, str, int, float]:
    """Resume on every rank but one, which opens the manager at most; return the error, and after how long it came."""
    began = time.monotonic()

    def job() -> None:
        if rank == missing and not opens:
            return
        state = built("ddp")
        manager = CheckpointManager(Path(base) / "abb"[rank], timeout_s=SHORT_S)
        if rank == missing:
            return
        manager.resume(state)

    return *outcome(job), time.monotonic() - began


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_ranks_do_not_wait_for_one_that_never_resumes_and_name_it(missing: int, tmp_path: Path) -> None:
    found = run_ranks(3, resume_without, str(tmp_path), missing, True)
    others = [one for rank, one in enumerate(found) if rank != missing]
    for kind, message, code, took_s in others:
        assert (kind, code) == (WaitTimeout.__name__, 5)
        node = "abb".index("abb"[missing])
        word = f"rank {missing} on node {node} did not {'answer' if missing == 0 else 'take part'}"
        assert f"{word} within {SHORT_S:g} s" in message
        assert took_s < 4 * SHORT_S + WAIT_S / 4
    assert len({message for _, message, _, _ in others}) == 1
    assert list(tmp_path.glob("*/meta_*")) == []


def test_a_verb_that_holds_the_root_of_one_node_is_named_to_every_rank_before_they_stop_waiting(tmp_path: Path) -> None:
    lock = RootLock(tmp_path / "b")
    lock.acquire({"verb": "drain"})
    try:
        found = run_ranks(3, resume_without, str(tmp_path), -1, True)
    finally:
        lock.release()
    for kind, message, code, _ in found:
        assert (kind in (RootLocked.__name__, RankFailed.__name__), code) == (True, 11)
        assert str(tmp_path / "b") in message
        assert "drain" in message


def wrong_clock(rank: int, job: Job, ahead_s: list[float]) -> Any:
    """Take part on a machine whose clock, as people read it, is wrong."""
    real, shift_s = time.time, ahead_s[rank]
    time.time = lambda: real() + shift_s

    class Shifted(clock.datetime):
        @classmethod
        def now(cls, tz: clock.tzinfo | None = None) -> Shifted:
            return cls.fromtimestamp(time.time(), tz)

    for name, module in list(sys.modules.items()):
        if name.startswith("ckptmirror") and getattr(module, "datetime", None) is clock.datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]
    return take_part(rank, job)


@pytest.mark.parametrize("ahead_s", [(0.0, DAY_S), (DAY_S, 0.0), (0.0, -DAY_S)])
def test_a_node_whose_clock_is_a_day_off_saves_mirrors_rotates_and_resumes_like_the_others(
    ahead_s: tuple[float, float], tmp_path: Path
) -> None:
    job = Job(tmp_path, "ab", (1, 2, 3, 4))
    first = run_ranks(2, wrong_clock, job, list(ahead_s), limit_s=WAIT_S)
    assert [one.failed for one in first] == ["", ""]
    assert [(line.step, line.standing) for line in list_checkpoints(job.url)] == [
        (step, "current") for step in job.steps
    ]
    second = run_ranks(2, wrong_clock, Job(tmp_path, "ab", (5,), keep_last=1), list(reversed(ahead_s)), limit_s=WAIT_S)
    expect(second, 4, "disk", first[0])
    expect(Job(tmp_path, "ac").run(), 5, job.url, second[0])


def put_in_place_of(place: Path, other: str = "empty") -> None:
    """Let this process see another directory in the place of one: an empty one is what is there without a mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    for arguments in (["--make-rprivate", "/"], ["--bind", f"{place.parent}/{other}", str(place)]):
        subprocess.run(["mount", *arguments], check=True)


def without_mount(rank: int, base: str, nodes: str, lacking: int) -> list[str]:
    """Save once, where on the node of one rank something empty is in the mirror's place; return what went wrong."""
    root, mirror = Path(base) / nodes[rank], Path(base) / "mirror"
    if rank == lacking:
        put_in_place_of(mirror)
    wrong: list[str] = []
    manager = CheckpointManager(root, [f"file://{mirror}"], kinds=("dcp",), timeout_s=WAIT_S)
    try:
        state = built("fsdp")
        manager.resume(state)
        train(state, rank, 9)
        manager.save(9, state).wait("committed", timeout_s=WAIT_S)
        waits_for, deadline = "is it mounted?" if rank == lacking else "has still to upload", time.monotonic() + WAIT_S
        while not any(waits_for in why for why in wrong) and time.monotonic() < deadline:
            with suppress(WaitTimeout):
                manager.wait("mirrored", timeout_s=ALONE_S)
            wrong = [why for line in manager.status().saves for why in line.waiting.values()]
    except CkptMirrorError as error:
        wrong.append(str(error))
    with suppress(CkptMirrorError):
        manager.close(timeout_s=0.0)
    return wrong


@pytest.fixture
def may_mount(mounted: Callable[..., Path]) -> None:
    """Skip where nothing can be mounted."""
    mounted("size=1m")


@pytest.mark.usefixtures("may_mount")
def test_a_node_on_which_the_mirror_is_not_mounted_sends_nothing_to_what_is_in_its_place(tmp_path: Path) -> None:
    for name in ("mirror", "empty"):
        (tmp_path / name).mkdir()
    first, second = run_ranks(2, without_mount, str(tmp_path), "ab", 1, limit_s=WAIT_S)
    assert "node 1 of 2 (from 0) has still to upload" in first[0]
    assert "is it mounted?" in second[0]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.usefixtures("may_mount")
def test_a_new_first_node_on_which_the_mirror_is_not_mounted_does_not_take_what_is_there_for_the_mirror(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    Job(tmp_path, "ab", (1,)).run()
    for wrong in run_ranks(2, without_mount, str(tmp_path), "cb", 0, limit_s=WAIT_S):
        assert "is it mounted?" in wrong[0]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.usefixtures("may_mount")
def test_nor_do_nodes_that_are_all_new(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    job = Job(tmp_path, "ab", (1,))
    saved = job.run()
    for wrong in run_ranks(2, without_mount, str(tmp_path), "cd", 0, limit_s=WAIT_S):
        assert "is not the place here that node 1 saw under this URL: is it mounted?" in wrong[0]
    assert list((tmp_path / "empty").iterdir()) == []
    expect(Job(tmp_path, "ef").run(), 1, job.url, saved[0])


def save_beside_optional(rank: int, base: str, nodes: str, there: Sequence[str]) -> int:
    """Save once, where another directory is in the place of an optional mirror on some nodes; return the step."""
    if there[rank] != "optional":
        put_in_place_of(Path(base) / "optional", there[rank])
    mirrors = [f"file://{base}/mirror", MirrorSpec(f"file://{base}/optional", required=False)]
    state = built("fsdp")
    with CheckpointManager(Path(base) / nodes[rank], mirrors, kinds=("dcp",), timeout_s=WAIT_S) as manager:
        info = manager.resume(state)
        step = 1 + (info.step if info is not None else 0)
        train(state, rank, step)
        manager.save(step, state).wait("mirrored", timeout_s=WAIT_S)
    return step


def drain_without_mount(rank: int, base: str) -> int:
    """Drain node d, on which the optional mirror is not mounted; return how many files wait."""
    del rank
    put_in_place_of(Path(base) / "optional")
    return drain(Path(base) / "d", timeout_s=1.0).pending


@pytest.mark.usefixtures("may_mount")
def test_new_nodes_take_nothing_for_an_optional_mirror_that_one_of_them_sees(tmp_path: Path) -> None:
    for name in ("optional", "empty"):
        (tmp_path / name).mkdir()
    all_see, few_see = ["optional"] * 3, ["empty", "optional", "empty"]
    for step, (nodes, there) in enumerate([("abc", all_see), ("def", few_see), ("def", all_see)], 1):
        assert run_ranks(3, save_beside_optional, str(tmp_path), nodes, there, limit_s=WAIT_S) == [step] * 3
        assert list((tmp_path / "empty").iterdir()) == []
        if there == few_see:  # nor does a verb there, after the trainer has ended
            assert run_ranks(1, drain_without_mount, str(tmp_path), limit_s=WAIT_S) != [0]
            assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.usefixtures("may_mount")
def test_no_other_node_makes_the_mirror_that_the_first_node_cannot_read_now(tmp_path: Path) -> None:
    for name in ("optional", "empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / LOCK_FILE).write_text("no id")
    all_see = ["optional"] * 2
    for step, (nodes, there) in enumerate([("ab", all_see), ("cd", ["broken", "empty"]), ("cd", all_see)], 1):
        assert run_ranks(2, save_beside_optional, str(tmp_path), nodes, there, limit_s=WAIT_S) == [step] * 2
        assert list((tmp_path / "empty").iterdir()) == []


def resume_from_read_only(rank: int, base: str) -> int | None:
    """Return the step from which new nodes go on, where a copy of the optional mirror, read-only, is in its place."""
    put_in_place_of(Path(base) / "optional", "copy")
    subprocess.run(["mount", "-o", "remount,bind,ro", f"{base}/optional"], check=True)
    mirrors = [f"file://{base}/mirror", MirrorSpec(f"file://{base}/optional", required=False)]
    manager = CheckpointManager(Path(base) / "cd"[rank], mirrors, kinds=("dcp",), timeout_s=WAIT_S)
    info = manager.resume(built("fsdp"))
    manager.close(timeout_s=0.0)
    return info.step if info is not None else None


@pytest.mark.usefixtures("may_mount")
def test_new_nodes_go_on_from_a_read_only_copy_of_a_mirror_that_has_no_identity(tmp_path: Path) -> None:
    assert run_ranks(2, save_beside_optional, str(tmp_path), "ab", ["optional"] * 2, limit_s=WAIT_S) == [1, 1]
    shutil.copytree(tmp_path / "optional", tmp_path / "copy", ignore=shutil.ignore_patterns(LOCK_FILE))
    shutil.rmtree(tmp_path / "mirror/dcp_000001")
    assert run_ranks(2, resume_from_read_only, str(tmp_path), limit_s=WAIT_S) == [1, 1]


def save_on_new_mirror(rank: int, base: str) -> bool:
    """Save once, where the first look of node 1 at a mirror that is not there yet fails; return whether it did."""
    has_failed = False

    def look(store: Store) -> str | None:
        nonlocal has_failed
        if rank == 1 and not has_failed:
            has_failed = True
            raise StoreTemporary("Stale file handle.")
        return identity_now(store)

    ckptmirror.flow.places.mirrors.identity_now = look
    state = built("fsdp")
    with CheckpointManager(
        Path(base) / "ab"[rank], [f"file://{base}/new"], kinds=("dcp",), timeout_s=WAIT_S
    ) as manager:
        assert manager.resume(state) is None
        train(state, rank, 1)
        manager.save(1, state).wait("mirrored", timeout_s=WAIT_S)
    return has_failed


def test_a_first_look_that_fails_once_keeps_no_job_from_a_new_mirror(tmp_path: Path) -> None:
    assert run_ranks(2, save_on_new_mirror, str(tmp_path), limit_s=WAIT_S) == [False, True]


def resume_beside(rank: int, base: str, lacking: int) -> tuple[str, ...]:
    """Resume where the persistent directory is not mounted on the node of one rank; return what was said."""
    if rank == lacking:
        put_in_place_of(Path(base) / "nfs")
    manager = CheckpointManager(Path(base) / "ab"[rank], persistent_dir=Path(base) / "nfs" / "kept", timeout_s=WAIT_S)
    with manager:
        info = manager.resume(built("fsdp"))
    assert info is not None
    return info.passed_over


@pytest.mark.usefixtures("may_mount")
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_node_on_which_the_persistent_directory_is_not_mounted_is_named(lacking: int, tmp_path: Path) -> None:
    for name in ("empty", "nfs/kept"):
        (tmp_path / name).mkdir(parents=True)
    Job(tmp_path, "ab", (1,), mirrored=False).run()
    for said in run_ranks(2, resume_beside, str(tmp_path), lacking, limit_s=WAIT_S):
        assert said == (
            f"{tmp_path}/nfs/kept, which did not exist on node {lacking}, was created: is a mount missing?",
        )


def test_nodes_that_know_two_places_under_one_url_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1,))
    job.run()
    (note,) = (tmp_path / "b/.ckptmirror").glob("mirror-*.json")
    note.write_bytes(seal("ckptmirror-mirror", {"url": job.url, "identity": "another"}))
    for one in Job(tmp_path, "ab", (2,)).run():
        assert f"{job.url} is not the place that another node of this job knows under this URL" in one.failed
