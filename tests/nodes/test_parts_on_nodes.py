"""A node's part of a save is not taken for the whole of it, and gives way only to the whole."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmirror import CheckpointManager, Retention, TrainState, load_checkpoint, stage_checkpoint_step
from ckptmirror.core import events
from ckptmirror.core.errors import CheckpointNotFound, CkptMirrorError, DeadlinePassed, RefusedOnlyCopy, WaitTimeout
from ckptmirror.core.model import Meta
from ckptmirror.flow.drain import drain
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention import rotation
from ckptmirror.flow.retention.rotation import rotate_root
from ckptmirror.flow.start.rewind import plan_rewind
from ckptmirror.flow.status import read_status
from ckptmirror.local import crashpoints, directories
from ckptmirror.local.table_place import open_known_table
from ckptmirror.local.uploads import UploadsTable
from tests.kit.cli import run
from tests.kit.faults import faulty, flip_bit
from tests.kit.faulty_store import StoreFault
from tests.kit.processes import run_ranks
from tests.kit.training import same
from tests.nodes.jobs import WAIT_S, Job, built, whole

pytestmark = pytest.mark.long


def meta_at(place: Path, step: int = 2) -> Meta:
    (meta,) = (one for one in local_catalog(place).metas() if one.step == step)
    return meta


def of_one_rank() -> TrainState:
    """What a job of :class:`Job` trains, on one rank."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5))
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), extra={})


@pytest.mark.short
def test_a_save_that_is_staged_into_the_root_of_a_node_is_whole_there(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    mirror, root = tmp_path / "mirror", tmp_path / "a"
    stage_checkpoint_step(f"file://{mirror}", dest=root, step=2, require_kind="dcp")
    staged = meta_at(root)
    assert staged.is_whole
    assert {one.path for one in staged.artifacts} == {one.path for one in meta_at(mirror).artifacts}
    again = Job(tmp_path, "ab", (), also=f"file://{tmp_path}/other").run()
    for rank, found in enumerate(again):
        assert (found.step, found.failed, found.extra) == (2, "", {"seen": (rank, 2)})
    assert {one.path for one in meta_at(tmp_path / "other").artifacts} == {one.path for one in staged.artifacts}


def test_a_part_of_which_the_rest_is_staged_while_a_rotation_asks_the_mirrors_goes_whole_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation deleted what the part names, and what was staged beside it stayed for ever, without a meta."""
    job = Job(tmp_path, "ab", (2, 3))
    job.run()
    root, honest = tmp_path / "a", rotation._why_not_elsewhere

    def stage_first(table: UploadsTable, mirrors: Sequence[Mirror], meta: Meta) -> str | None:
        if meta.step == 2 and not meta_at(root).is_whole:
            stage_checkpoint_step(job.url, dest=root, step=2, full=True)
        return honest(table, mirrors, meta)

    monkeypatch.setattr(rotation, "_why_not_elsewhere", stage_first)
    first = rotate_root(root, Retention(keep_last=1))
    (why,) = first.refused.values()
    assert "staged into this directory meanwhile" in why
    assert (root / "optim_000002_rank1.pt").exists()
    assert drain(root, timeout_s=WAIT_S).is_verified  # which records that the mirror has the rest, too
    second = rotate_root(root, Retention(keep_last=1))
    assert [step for step, _ in second.deleted] == [2], second.refused
    assert [path for path in root.rglob("*000002*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_refused_start_without_the_mirror_of_a_staged_copy_does_not_make_the_table_forget_it(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2))
    job.run()
    root, other = tmp_path / "b", [f"file://{tmp_path}/other"]
    stage_checkpoint_step(job.url, dest=root, step=2, full=True)
    manager = CheckpointManager(root, other)
    with pytest.raises(CkptMirrorError):
        manager.resume(TrainState(model=torch.nn.Linear(2, 2)), policy="scratch")
    with pytest.raises(DeadlinePassed) as unsent:
        manager.close()
    assert "no sound record" not in str(unsent.value)
    with open_known_table(root, read_only=True) as table:
        paths = {one.path for one in table.records(save_id=meta_at(root).save_id, mirror=job.url)}
    assert paths >= {one.path for one in meta_at(root).artifacts}
    assert run("drain", "--root", root).returncode == 0
    assert read_status(root).is_mirrored(None)


def test_i1_a_node_that_sent_metadata_under_another_name_deletes_its_part_once_the_one_in_the_meta_is_right(
    tmp_path: Path,
) -> None:
    root, mirror = tmp_path / "b", tmp_path / "mirror"
    Job(tmp_path, "ab", (1,)).run()
    (root / "extra_000002_rank9.pt").touch()  # so that only this node's names of step 2 have a tag
    Job(tmp_path, "ab", (2, 3), keep_last=9).run()
    part = meta_at(root)
    assert part.tag
    (sent,) = mirror.glob(f"dcp_*-{part.tag}/.metadata")
    named, away = mirror / "dcp_000002" / ".metadata", tmp_path / "away"
    assert named.read_bytes() == sent.read_bytes()
    named.rename(away)
    ended = run("rotate", "--root", root, "--keep-last", "1")
    assert ended.returncode == 7
    assert "its meta there names dcp_000002/.metadata, but the verified object is" in ended.stderr
    assert meta_at(root) == part
    away.rename(named)
    assert run("rotate", "--root", root, "--keep-last", "1").returncode == 0
    assert {one.step for one in local_catalog(root).parts.values()} == {3}


def test_one_node_that_goes_on_alone_gives_a_new_mirror_the_whole_save(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    (alone,) = Job(tmp_path, "a", (3,)).run()
    assert (alone.step, alone.failed) == (2, "")
    (again,) = Job(tmp_path, "a", (), also=f"file://{tmp_path}/other").run()
    assert (again.step, again.failed) == (3, "")
    there = {one.path for one in meta_at(tmp_path / "other").artifacts}
    assert there == {one.path for one in meta_at(tmp_path / "mirror").artifacts}


def test_a_part_that_comes_after_the_last_commit_to_a_mirror_which_cannot_have_its_save_keeps_no_close_waiting(
    tmp_path: Path,
) -> None:
    """The rotation looks at each commit, and none comes any more."""
    Job(tmp_path, "ab", (1, 2)).run()
    other, hold, committed, tick = tmp_path / "other", threading.Event(), threading.Event(), threading.Event()
    manager = CheckpointManager(tmp_path / "a", [f"file://{tmp_path}/mirror", f"file://{other}"])
    _, slow = faulty(manager)
    slow.script(StoreFault("write", "parts/meta_000001", times=0, hold=hold, hold_limit_s=WAIT_S))
    manager.events.subscribe(
        lambda event: isinstance(event, events.MirrorCommitted) and str(other) in event.mirror and committed.set()
    )
    assert manager.resume(of_one_rank()) is not None
    assert committed.wait(WAIT_S)
    assert manager._node is not None
    rotation = manager._node._rotation_thread
    assert rotation is not None
    while rotation.is_busy or rotation._wake.is_set():
        tick.wait(0.05)
    hold.set()
    manager.close(timeout_s=WAIT_S)
    assert {one.step for one in local_catalog(other).metas()} == {2}


def test_a_node_that_goes_on_alone_waits_until_a_new_mirror_has_the_save_that_it_brought(tmp_path: Path) -> None:
    """When the start looked, this disk had only a part of it."""
    Job(tmp_path, "ab", (1, 2)).run()
    other, hold = tmp_path / "other", threading.Event()
    manager = CheckpointManager(tmp_path / "a", [f"file://{tmp_path}/mirror", f"file://{other}"])
    _, slow = faulty(manager)
    slow.script(StoreFault("upload", times=0, hold=hold, hold_limit_s=WAIT_S))
    start = manager.resume(of_one_rank())
    assert start is not None
    assert start.step == 2
    with pytest.raises(WaitTimeout):
        manager.wait("mirrored", timeout_s=0.5)
    hold.set()
    manager.close(timeout_s=WAIT_S)
    assert meta_at(other).is_whole


def go_on_alone(rank: int, base: str, crash_at: str, exchanges: bool) -> None:
    """Bring the save in the place of the part, and die there; maybe on a file system that cannot exchange names."""
    crashpoints.arm(crash_at)
    if not exchanges:
        directories.exchange_dirs = lambda _temporary, _final: False
    state = TrainState(model=torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 5)), extra={})
    with CheckpointManager(Path(base) / "a", [f"file://{base}/mirror", f"file://{base}/other"]) as manager:
        manager.resume(state)


@pytest.mark.parametrize(
    ("crash_at", "exchanges"),
    [
        ("dir.exchange:before", True),
        ("dir.exchange:after", True),
        ("trash.rename:after", True),
        ("trash.rename:before", False),
        ("trash.rename:after", False),
    ],
)
def test_i1_a_part_that_gives_way_to_the_whole_save_is_here_or_the_whole_is_whenever_the_process_dies(
    crash_at: str, exchanges: bool, tmp_path: Path
) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    run_ranks(1, go_on_alone, str(tmp_path), crash_at, exchanges, dead=(0,), limit_s=WAIT_S)
    verbs = ("rotate", "--keep-last", "3"), ("stage", f"file://{tmp_path}/mirror", "--step", "1", "--full", "--refresh")
    for verb, into in zip(verbs, ("--root", "--dest"), strict=True):  # they empty the trash, and put nothing back
        ended = run(*verb, into, tmp_path / "a")
        assert ended.returncode == 0, ended.stderr
    run("drain", "--root", tmp_path / "a", "--timeout", "60")  # it reconciles, and empties the trash
    assert not list((tmp_path / "a/.ckptmirror/trash").iterdir())
    assert run("verify", "--deep", tmp_path / "a").returncode == 0
    here = local_catalog(tmp_path / "a").with_parts()
    assert {meta.step for meta in here.whole.values()} >= {2}


def test_the_parts_of_a_healthy_save_are_whole_when_every_byte_is_read_and_one_that_lost_a_bit_is_not(
    tmp_path: Path,
) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    for node, root in enumerate((tmp_path / "a", tmp_path / "b")):
        ended = run("verify", "--deep", "--tensors", "--root", root, "--mirror", f"file://{tmp_path}/mirror")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "are compared on a mirror" in ended.stdout + ended.stderr
        (on_disk, *_) = [line for line in ended.stdout.splitlines() if "whole" in line]
        assert f"whole (node {node}'s part), every byte" in on_disk
        assert "tensors" not in on_disk
        assert "4 of 4 saves and parts of saves are whole" in ended.stderr
    (shard,) = (tmp_path / "b" / "dcp_000002").glob("__1_0.distcp")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run("verify", "--deep", tmp_path / "b").returncode == 6


@pytest.mark.parametrize("lost", [False, True])
def test_verify_sends_to_the_node_that_wrote_what_a_mirror_damaged(lost: bool, tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    mirror = tmp_path / "mirror"
    (written_by_b,) = (mirror / "dcp_000002").glob("__1_0.distcp")
    if lost:
        written_by_b.unlink()
    else:
        flip_bit(written_by_b)
    where = ("--mirror", f"file://{mirror}", "--deep")
    ended = run("verify", "--root", tmp_path / "a", *where)
    assert ended.returncode == 6
    said = " ".join((ended.stdout + ended.stderr).split())
    assert f"ckptmirror drain --root {tmp_path}/a" not in said
    assert "then `ckptmirror drain` on that node" in said
    assert f"ckptmirror drain --root {tmp_path}/b" in run("verify", "--root", tmp_path / "b", *where).stdout
    assert run("drain", "--root", tmp_path / "b").returncode == 0
    assert run("verify", "--root", tmp_path / "a", *where).returncode == 0


def test_a_node_that_left_before_a_mirror_was_added_pushes_what_is_waited_for_there(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    other = f"file://{tmp_path}/other"
    Job(tmp_path, "ac", (3,), also=other, keep_last=9).run()
    (line,) = {line for line in run("ls", other).stdout.splitlines() if "step 2" in line or line.split()[:1] == ["2"]}
    assert "waits for node 1" in line
    said = [line for line in run("status", tmp_path / "b", "--mirror", other).stdout.splitlines() if "waiting" in line]
    push = f"ckptmirror push --mirror {other} --root {tmp_path}/b"
    assert said
    assert all("this is node 1, and " in line and f"`{push}` sends them" in line for line in said), said
    assert run(*push.split()[1:]).returncode == 0
    assert {meta.step for meta in local_catalog(tmp_path / "other").saves.values()} >= {2, 3}


def test_who_wants_the_save_of_a_part_is_told_who_has_it(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2), mirrored=False, snapshot=3).run()
    root = tmp_path / "a"
    with pytest.raises(CheckpointNotFound, match="only one node's part of step 1") as refused:
        plan_rewind(root, 1)
    assert "manager.resume(state, policy=1)" in refused.value.hint
    save = meta_at(root, 1).save_id[:8]
    with pytest.raises(CheckpointNotFound, match="only one node's part of step 1") as refused:
        plan_rewind(root, save)
    assert f"manager.resume(state, policy='{save}')" in refused.value.hint
    with pytest.raises(CheckpointNotFound, match="only a part of step 1: node 0 of 2 nodes") as refused:
        load_checkpoint(root / "dcp_000001")
    assert "ckptmirror stage --step 1" in refused.value.hint
    with pytest.raises(
        CheckpointNotFound, match="only a part of step 3: 1 of 2 ranks left nothing of it here"
    ) as refused:
        load_checkpoint(root / "latest")
    assert "on no mirror" in refused.value.hint


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("lost", ["dcp", "model"])
def test_a_rewind_of_one_node_to_a_save_that_lost_a_kind_on_its_mirror_leaves_it_to_all_nodes(
    lost: str, dry_run: bool, tmp_path: Path
) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    for path in (tmp_path / "mirror").glob(f"{lost}_000001*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = meta_at(tmp_path / "a", 1)
    ended = run("rewind", "--root", tmp_path / "a", "--step", "1", *["--dry-run"] * dry_run)
    assert ended.returncode == CheckpointNotFound.exit_code
    assert "only one node's part of step 1, and no mirror has all kinds of it" in ended.stderr
    assert "manager.resume(state, policy=1)" in ended.stderr
    assert "continue from" not in ended.stdout + ended.stderr
    assert meta_at(tmp_path / "a", 1) == before


def test_a_part_does_not_give_way_to_what_is_left_of_a_save(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    (tmp_path / "mirror" / "model_000002.pt").unlink()
    before = meta_at(tmp_path / "a")
    with pytest.raises(RefusedOnlyCopy, match="holds node 0's part of save"):
        stage_checkpoint_step(f"file://{tmp_path}/mirror", dest=tmp_path / "a", step=2, require_kind="dcp")
    assert meta_at(tmp_path / "a") == before


@pytest.mark.parametrize("steps", [(1,), (1, 2)])
@pytest.mark.parametrize(("node", "lost"), [("a", "dcp"), ("b", "model")])
def test_a_node_that_goes_on_alone_with_a_part_takes_a_kind_that_its_mirror_has_left(
    steps: tuple[int, ...], node: str, lost: str, tmp_path: Path
) -> None:
    """The part stays: it may be all that is left of the other kind."""
    first = Job(tmp_path, "ab", steps).run()
    last = steps[-1]
    for path in (tmp_path / "mirror").glob(f"{lost}_{last:06d}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = meta_at(tmp_path / node, last)
    (alone,) = Job(tmp_path, node, (last + 1,)).run()
    assert (alone.step, alone.place, alone.failed) == (last, f"file://{tmp_path}/mirror", "")
    assert same(alone.began, first[0].saved[last])
    assert meta_at(tmp_path / node, last) == before
    assert all((tmp_path / node / artifact.path).exists() for artifact in before.artifacts)
    (again,) = Job(tmp_path, node).run()
    assert (again.step, again.failed) == (last + 1, "")


def test_a_save_that_lost_one_kind_on_each_node_is_passed_over_for_what_both_lost(tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", (1, 2), mirrored=False).run()
    (tmp_path / "a" / "dcp_000002" / "__0_0.distcp").unlink()
    (tmp_path / "b" / "optim_000002_rank1.pt").unlink()
    for one in Job(tmp_path, "ab", mirrored=False).run():
        assert (one.step, one.place) == (1, "disk")
        assert same(one.began, first[0].saved[1])
        lost_dcp, lost_model = one.passed_over.split("; step 2")
        assert "node 0" in lost_dcp
        assert "__0_0.distcp is missing; so kind dcp is not whole" in lost_dcp
        assert "node 1" in lost_model
        assert "optim_000002_rank1.pt is missing; so kind model is not whole" in lost_model


@dataclass
class Resumed:
    step: int | None
    kind: str
    missing: tuple[str, ...]
    model: dict[str, Any]
    passed_over: str
    refused: str = ""


def resumed(policy: str | int, exclude: tuple[str, ...], rank: int, job: Job) -> Resumed:
    """What a rank finds that only resumes."""
    state = built(job.wrapped, job.hidden)
    mirrors = [job.url] if job.mirrored else []
    with CheckpointManager(job.base / job.nodes[rank], mirrors, kinds=job.kinds, timeout_s=60.0) as manager:
        try:
            info = manager.resume(state, policy=policy, exclude=exclude, force=True)
        except CkptMirrorError as error:
            return Resumed(None, "", (), {}, "", f"{error} {error.hint}")
    assert info is not None
    return Resumed(info.step, info.kind, info.missing, whole(state), "; ".join(info.passed_over))


def lose(tmp_path: Path, *lost: str) -> None:
    for path in lost:
        (tmp_path / path).unlink()


LOST_ON_NODES = [
    (("b/optim_000002_rank1.pt",), "dcp"),
    (("a/optim_000002_rank0.pt", "b/optim_000002_rank1.pt"), "dcp"),
    (("a/model_000002.pt",), "dcp"),
    (("b/dcp_000002/__1_0.distcp",), "model"),
    (("a/dcp_000002/.metadata",), "dcp"),  # both nodes have it
    (("a/dcp_000002/.metadata", "b/dcp_000002/.metadata"), "model"),
    (("b/tensors_000002_rank1.json",), "dcp"),
    (("a/tensors_000002_rank0.json", "b/tensors_000002_rank1.json", "b/optim_000002_rank1.pt"), "dcp"),
    (("a/tensors_000002_rank0.json", "b/dcp_000002/__1_0.distcp"), "model"),
]


@pytest.mark.parametrize(("lost", "kind"), LOST_ON_NODES, ids=lambda one: "+".join(one) if type(one) is tuple else one)
def test_a_save_that_lost_a_file_on_a_node_resumes_from_its_intact_kind(
    tmp_path: Path, lost: tuple[str, ...], kind: str
) -> None:
    first = Job(tmp_path, "ab", (1, 2), mirrored=False).run()
    save_id = meta_at(tmp_path / "a").save_id
    lose(tmp_path, *lost)
    for policy in ("auto", 2, save_id[:8]):
        for one in Job(tmp_path, "ab", mirrored=False).run(partial(resumed, policy, ())):
            assert (one.step, one.kind) == (2, kind), (policy, one)
            assert same(one.model, first[0].saved[2])
            assert any("tensors" in line for line in one.missing) == any("tensors" in path for path in lost)


@pytest.mark.parametrize(("lost", "kind"), LOST_ON_NODES[1:7:2], ids=str)
def test_a_mirror_that_lost_it_too_has_the_intact_kind(tmp_path: Path, lost: tuple[str, ...], kind: str) -> None:
    first = Job(tmp_path, "ab", (1, 2)).run()
    save_id = meta_at(tmp_path / "a").save_id
    lose(tmp_path, *lost, *dict.fromkeys(f"mirror/{path.partition('/')[2]}" for path in lost))
    shutil.rmtree(tmp_path / "b")
    for policy in ("auto", save_id[:8]):
        for one in Job(tmp_path, "ab").run(partial(resumed, policy, ())):
            assert (one.step, one.kind) == (2, kind), (policy, one)
            assert same(one.model, first[0].saved[2])


def first_step(rank: int, job: Job) -> int | None:
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], timeout_s=WAIT_S)
    start = manager.resume(built(job.wrapped))
    with contextlib.suppress(DeadlinePassed):
        manager.close(timeout_s=0.0)
    return start.step if start is not None else None


@pytest.mark.parametrize("steps", [(1, 2), (1,)])
def test_a_save_that_is_staged_in_the_place_of_a_part_is_still_its_jobs_own_while_the_mirror_is_silent(
    steps: tuple[int, ...], tmp_path: Path
) -> None:
    job, mirror = Job(tmp_path, "ab", steps), tmp_path / "mirror"
    job.run()
    stage_checkpoint_step(job.url, dest=tmp_path / "a", step=steps[-1], full=True)
    mirror.rename(tmp_path / "away")
    assert Job(tmp_path, "ab").run(first_step) == [steps[-1]] * 2
