"""What nodes must agree on, and what one of them cannot do to the others or to the run."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager, list_checkpoints, stage_checkpoint_step
from ckptmirror.core import events
from ckptmirror.core.errors import (
    CheckpointNotFound,
    CkptMirrorError,
    ConfigError,
    LocalStorageFull,
    LocalStorageUnwritable,
    NotAuthorised,
    UsageError,
)
from ckptmirror.core.model import Kind
from ckptmirror.flow.drain import drain, push
from ckptmirror.flow.start import gather, resume
from ckptmirror.flow.start.rewind import rewind
from ckptmirror.flow.status import read_status
from ckptmirror.local import crashpoints
from tests.integration.test_signed_runs import make_key
from tests.kit.cli import run
from tests.kit.faults import faulty, flip_bit
from tests.kit.faulty_store import StoreFault
from tests.kit.processes import outcome, run_ranks
from tests.kit.roots import leftovers
from tests.kit.training import same
from tests.nodes.jobs import WAIT_S, Found, Job, built, expect, take_part, whole

pytestmark = pytest.mark.long


def open_with(rank: int, base: str, mirrors: list[list[str]], kinds: list[tuple[Kind, ...]]) -> tuple[str, str, int]:

    def job() -> None:
        root = Path(base) / "ab"[rank]
        CheckpointManager(root, mirrors[rank], kinds=kinds[rank], timeout_s=WAIT_S).close()

    return outcome(job)


@pytest.mark.parametrize(
    ("mirrors", "kinds", "both"),
    [
        (["file:///one", "file:///two"], [("dcp",)] * 2, ("mirrors", "file:///one", "file:///two")),
        (["file:///one", ""], [("dcp",)] * 2, ("mirrors", "file:///one", "none")),
        (["", ""], [("dcp",), ("dcp", "model")], ("kinds", "node 0 has dcp,", "node 1 has dcp, model")),
    ],
)
def test_nodes_with_other_settings_are_refused_with_both_values(
    mirrors: list[str], kinds: list[tuple[Kind, ...]], both: tuple[str, ...], tmp_path: Path
) -> None:
    given = [[one.replace("file://", f"file://{tmp_path}")] if one else [] for one in mirrors]
    for kind, message, _ in run_ranks(2, open_with, str(tmp_path), given, kinds):
        assert kind == ConfigError.__name__
        assert all(one.replace("file://", f"file://{tmp_path}") in message for one in both)


def open_with_more(rank: int, base: str, more: list[dict[str, Any]]) -> tuple[str, str, int]:
    def job() -> None:
        CheckpointManager(Path(base) / "ab"[rank], timeout_s=WAIT_S, **more[rank]).close()

    return outcome(job)


def test_nodes_that_do_not_demand_the_same_signatures_are_refused(tmp_path: Path) -> None:
    """What a node without keys says of its disk would be believed by the others."""
    key = make_key(tmp_path / "keys")
    keys = [key, {"signing_key": key["signing_key"]}]
    for given in (keys, keys[::-1]):
        for kind, message, _ in run_ranks(2, open_with_more, str(tmp_path), given):
            assert kind == ConfigError.__name__
            assert "The nodes of this job differ in verify_keys" in message
            assert "none" in message
    assert [message for _, message, _ in run_ranks(2, open_with_more, str(tmp_path), [key, key])] == ["None", "None"]


@pytest.mark.parametrize("other", [False, True])
def test_nodes_that_sign_with_other_keys_or_none_are_refused(other: bool, tmp_path: Path) -> None:
    """Without verify_keys, neither would finish what the other has begun."""
    key = make_key(tmp_path / "keys")["signing_key"]
    more = {"signing_key": make_key(tmp_path / "other")["signing_key"]} if other else {}
    for kind, message, _ in run_ranks(2, open_with_more, str(tmp_path), [{"signing_key": key}, more]):
        assert kind == ConfigError.__name__
        assert "differ in signing_key: node 0 has a key with the mark " in message
        assert f"node 1 has {'a key with the mark ' if other else 'none'}" in message
    both = make_key(tmp_path / "both", "a"), make_key(tmp_path / "both", "b")
    believed = [one["verify_keys"][0] for one in both]
    given = [{"signing_key": one["signing_key"], "verify_keys": believed} for one in both]
    assert [message for _, message, _ in run_ranks(2, open_with_more, str(tmp_path), given)] == ["None", "None"]


def test_nodes_that_keep_snapshots_in_other_directories_are_refused(tmp_path: Path) -> None:
    """A start looks for a snapshot in one directory: that of the first node."""
    kept = tmp_path / "kept"
    for kind, message, _ in run_ranks(2, open_with_more, str(tmp_path), [{}, {"persistent_dir": kept}]):
        assert kind == ConfigError.__name__
        assert f"differ in persistent_dir: node 0 has none, node 1 has {kept}" in message


def test_a_node_whose_root_is_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    for node in "ab":
        Job(tmp_path, node, (1,), "ddp", mirrored=False).run()
    for one in Job(tmp_path, "ab", (2,), mirrored=False).run():
        assert "node 0 holds run" in one.failed
        assert "node 1 holds run" in one.failed
    assert list(tmp_path.glob("[ab]/meta_000002.json")) == []
    Job(tmp_path, "c", (1,), "ddp").run()  # on the mirror is a third run; node 0 of the next job is new
    for one in Job(tmp_path, "da", (2,)).run():
        assert "the disk of node 1 holds run" in one.failed


def test_a_root_that_was_copied_to_another_node_is_not_that_nodes_part(tmp_path: Path) -> None:
    first = Job(tmp_path, "ac", (1,)).run()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for one in Job(tmp_path, "ab", (2,)).run():
        assert f"{tmp_path / 'b'}/.ckptmirror/uploads.db is the table of {tmp_path / 'a'}" in one.failed
    for path in (tmp_path / "b/.ckptmirror").glob("uploads.db*"):
        path.unlink()
    job = Job(tmp_path, "ab", (2,))
    second = job.run()
    expect(second, 1, job.url, first[0])
    expect(Job(tmp_path, "ab").run(), 2, "disk", second[0])


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("what", ["records", "names"])
def test_a_node_that_cannot_commit_leaves_no_part_on_any(what: str, full: int, tmp_path: Path) -> None:
    """Nor where it was ready to, and the other node has committed: it would wait for that part without end."""
    found = Job(tmp_path, "ab", (1, 2), full=full, full_at=what).run()
    for one in found:
        assert f"no room for {what}" in one.failed
    assert f"rank {full} on node {full} failed" in found[1 - full].failed
    for node in "ab":
        assert list((tmp_path / node).glob("*_000002*")) == []
        assert leftovers(tmp_path / node) == []
        assert drain(tmp_path / node, timeout_s=WAIT_S).is_verified
    assert list((tmp_path / "mirror").rglob("*_000002*")) == []
    assert [one.step for one in Job(tmp_path, "ab").run()] == [1, 1]


def save_until_one_dies(rank: int, job: Job) -> tuple[list[str], bool]:
    """Save twice; the second time a rank dies. Return why saves failed, and whether the second meta is here."""
    root, why = job.base / job.nodes[rank], []
    state = built(job.wrapped)
    manager = CheckpointManager(root, [], kinds=("dcp",), timeout_s=WAIT_S)
    manager.events.subscribe(lambda event: why.append(event.reason) if isinstance(event, events.SaveFailed) else None)
    manager.resume(state)
    manager.save(1, state).wait("committed", WAIT_S)
    if rank == job.dies:
        crashpoints.arm(job.crash_at)
    with pytest.raises(CkptMirrorError, match=f"rank {job.dies} on node 1 is gone"):
        manager.save(2, state).wait("committed", WAIT_S)
    manager.close(timeout_s=0.0)
    return why, (root / "meta_000002.json").exists()


@pytest.mark.parametrize(
    ("crash_at", "stays", "says"),
    [
        ("file.create:before", False, "; it left nothing behind"),
        ("save.publish:before", True, "; what was committed of it stays, and the next start decides whether it counts"),
    ],
)
def test_a_save_in_which_a_rank_dies_says_whether_anything_of_it_stays(
    crash_at: str, stays: bool, says: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, "aab", dies=2, crash_at=crash_at)
    *others, _ = job.run(save_until_one_dies)
    for (why,), is_here in others:
        assert "rank 2 on node 1 is gone" in why
        assert why.endswith(says)
        assert is_here is stays


def resume_with_a_broken_disk(rank: int, job: Job) -> Found:

    def cannot_discard(root: Path, _meta: object) -> None:
        raise LocalStorageUnwritable(f"{root} cannot be changed")

    if rank == 1:
        resume.discard_view = cannot_discard
    return take_part(rank, job)


def test_a_node_that_cannot_discard_what_it_gathered_keeps_no_rank_waiting(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1,), mirrored=False)
    job.run()
    flip_bit(tmp_path / "b/dcp_000001/__1_0.distcp")
    for one in Job(tmp_path, "ab", mirrored=False).run(resume_with_a_broken_disk):
        assert f"{tmp_path / 'b'} cannot be changed" in one.failed


def resume_where_downloads_fail(rank: int, job: Job, cause: CkptMirrorError) -> tuple[str, str, str, int, bool, bool]:
    """Resume; on node b, no download gets through."""
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], kinds=("dcp",), timeout_s=WAIT_S)
    if job.nodes[rank] == "b" and manager.ranks.is_leader:
        faulty(manager, StoreFault("download", when="before", times=0, error=lambda: cause))
    try:
        manager.resume(built("fsdp"))
    except CkptMirrorError as error:
        return type(error).__name__, str(error), error.hint, error.exit_code, error.temporary, error.lacks_room
    finally:
        manager.close(timeout_s=0.0)
    raise AssertionError("it went on")


@pytest.mark.parametrize(
    "cause",
    [LocalStorageFull("this disk is full"), NotAuthorised("it refuses these credentials", hint="Log in on that node.")],
)
def test_what_hinders_one_node_is_what_all_ranks_say_as_on_a_node_alone(cause: CkptMirrorError, tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2), kinds=("dcp",)).run()
    shutil.rmtree(tmp_path / "b")
    (alone, *_), (first, second) = (
        Job(tmp_path, nodes).run(partial(resume_where_downloads_fail, cause=cause)) for nodes in ("bb", "ab")
    )
    kind, message, *known = alone
    assert first == (kind, f"rank 1 on node 1: {message}", *known)
    assert (kind, known) == (
        type(cause).__name__,
        [cause.hint, cause.exit_code, cause.temporary, cause.lacks_room],
    )
    assert f"rank 1 on node 1: {message}" in second[1]
    assert second[2:] == first[2:]


def test_nodes_that_wake_after_the_run_went_on_elsewhere_commit_nothing(tmp_path: Path) -> None:
    old = Job(tmp_path, "ab", (1, 2), waits=True)
    for rank in (0, 1):
        os.mkfifo(old.fifo(rank))
    with ThreadPoolExecutor(1) as pool:
        slept = pool.submit(old.run)
        gates = [old.fifo(rank).open("w") for rank in (0, 1)]  # both have saved step 1, and wait
        second = Job(tmp_path, "cd", (2, 3)).run()
        for gate in gates:
            gate.close()
        for one in slept.result():
            assert "has started and is listed" in one.failed
    new = Job(tmp_path, "ce")
    expect(new.run(), 3, new.url, second[0])
    names = sorted(path.name for path in (tmp_path / "mirror").glob("meta_*"))
    assert names == ["meta_000001.json", "meta_000002.json", "meta_000003.json"]
    assert len(list((tmp_path / "mirror/parts").iterdir())) == 6


def load_on(rank: int, base: str, places: list[str]) -> tuple[str, str, int]:
    state = built("fsdp")

    def job() -> tuple[int, float]:
        with CheckpointManager(Path(base) / "fresh" / "ab"[rank], timeout_s=WAIT_S) as manager:
            info = manager.load(state, places[rank])
            return info.step, float(whole(state)["1.weight"].sum())

    return outcome(job)


def test_each_node_loads_the_same_save_from_a_copy_of_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2))
    first = job.run()
    for node, step in (("a", 1), ("b", 1), ("c", 2)):
        stage_checkpoint_step(job.url, step=step, dest=tmp_path / "staged" / node, full=True)
    expected = repr((2, float(first[0].ended["1.weight"].sum())))
    same = [str(tmp_path / "staged" / "c")] * 2
    assert [value for _, value, _ in run_ranks(2, load_on, str(tmp_path), same)] == [expected] * 2
    others = [str(tmp_path / "staged" / node) for node in "ac"]
    for kind, message, _ in run_ranks(2, load_on, str(tmp_path), others):
        assert kind == UsageError.__name__
        assert "dcp of step 1" in message
        assert "on node 1" in message


def test_a_person_goes_back_on_one_node_and_all_follow(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2))
    first = job.run()
    rewound = rewind(tmp_path / "a", 1)
    assert (rewound.step, rewound.place) == (1, job.url)
    for node in "ab":  # whole on the mirror, of which each disk has a part
        with pytest.raises(CheckpointNotFound, match="Step 2 is off the lineage") as refused:
            rewind(tmp_path / node, 2)
        assert f"`ckptmirror rewind --root {tmp_path / node}` with --save " in refused.value.hint
    second = Job(tmp_path, "ab", (2, 3)).run()
    for one in second:
        assert (one.step, one.place) == (1, "disk")
        assert same(one.began, first[0].saved[1])
    expect(Job(tmp_path, "ab").run(), 3, "disk", second[0])


def test_nodes_that_never_had_a_mirror_push_their_parts_to_one(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1,), mirrored=False)
    first = job.run()
    with ThreadPoolExecutor() as nodes:  # each returns only when the save is whole there
        for report in nodes.map(lambda node: push(tmp_path / node, job.url), "ab"):
            assert report.is_verified
    assert [line.standing for line in list_checkpoints(job.url)] == ["current"]
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    expect(Job(tmp_path, "ab").run(), 1, job.url, first[0])


def test_a_node_that_has_pushed_its_part_is_told_to_wait_and_not_to_drain(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1,)).run()
    root, other = tmp_path / "b", f"file://{tmp_path}/other"
    while not read_status(root).pushed_awaited:
        push(root, other, timeout_s=2.0)
    said = run("status", "--root", root).stdout
    assert f"pushed: {other} lacks 1 of 1 saves; this node has sent all that it may: step 1: node 0 of 2" in said
    assert push(tmp_path / "a", other).is_verified
    assert run("drain", "--root", root).returncode == 0
    assert f"pushed: {other} has every save that is here" in run("status", "--root", root).stdout


@pytest.mark.short
def test_a_node_whose_disk_turns_read_only_still_takes_part_in_sending_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []

    class Channel:
        def receive(self, into: memoryview, source: int) -> None:
            received.append(source + len(into))

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", read_only)
    channel: Any = Channel()
    (failed,) = gather._receive(channel, tmp_path / "shard", 0, None, [memoryview(bytearray(4))] * 3)
    assert isinstance(failed, LocalStorageUnwritable)
    assert received == [4, 4, 4]
