"""A job of several nodes stops, or is killed, and starts again: from the disks, from the mirror, or from both."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import DeadlinePassed
from ckptmirror.core.names import EVENTS_NAME
from ckptmirror.flow.drain import drain
from ckptmirror.flow.start import gather, resume
from tests.kit.cli import run
from tests.kit.faults import flip_bit
from tests.kit.roots import leftovers
from tests.kit.training import same
from tests.nodes.jobs import ALONE_S, WAIT_S, Found, Job, built, expect, take_part, train

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("wrapped", "lost"), [("fsdp", ""), ("fsdp", "a"), ("ddp", "b"), ("ddp", "ab")])
def test_a_job_goes_on_from_what_its_nodes_and_the_mirror_have(wrapped: str, lost: str, tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", (1, 2), wrapped).run()
    assert [one.step for one in first] == [None, None]
    for node in lost:
        shutil.rmtree(tmp_path / node)
    job = Job(tmp_path, "ab", (3,), wrapped)
    second = job.run()
    expect(second, 2, "disk" if not lost else job.url, first[0])
    assert [one.extra for one in second] == [{"seen": (rank, 2)} for rank in (0, 1)]
    expect(Job(tmp_path, "ab", wrapped=wrapped).run(), 3, "disk", second[0])
    for node in "ab":
        assert leftovers(tmp_path / node) == []


def test_a_node_gets_only_the_files_that_its_ranks_read(tmp_path: Path) -> None:
    first = Job(tmp_path, "abc", (1,)).run()
    shutil.rmtree(tmp_path / "b")
    job = Job(tmp_path, "abc")
    second = job.run()
    expect(second, 1, job.url, first[0])
    of_all = "__0_small0.distcp"  # the first rank wrote what is small and alike everywhere
    assert [one.gathered for one in second] == [{of_all, f"__{rank}_0.distcp"} for rank in range(3)]


@pytest.mark.parametrize("wrapped", ["fsdp", "ddp"])
def test_without_a_mirror_nodes_send_one_another_what_they_read(wrapped: str, tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", (1, 2), wrapped, mirrored=False).run()
    second = Job(tmp_path, "ab", (), wrapped, mirrored=False).run()
    expect(second, 2, "disk", first[0])
    assert [one.extra for one in second] == [{"seen": (rank, 2)} for rank in (0, 1)]


@pytest.mark.parametrize("damaged", ["a", "b"])
@pytest.mark.parametrize("damage", [flip_bit, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_taken_from_another_node_that_has_it_whole(
    damage: Callable[[Path], object], damaged: str, tmp_path: Path
) -> None:
    first = Job(tmp_path, "ab", (1, 2), mirrored=False, kinds=("dcp",)).run()
    damage(tmp_path / damaged / "dcp_000002" / ".metadata")
    expect(Job(tmp_path, "ab", (), mirrored=False, kinds=("dcp",)).run(), 2, "anywhere", first[0])


def resume_denied(name: str, rank: int, job: Job) -> Found:
    """Take part where node b may not open a file of rank 1, as the kernel has it for files of another user."""
    really_open, really_link = os.open, os.link
    theirs = {path.stat().st_ino for path in (job.base / "b").glob(name)}

    def deny(path: object) -> None:
        if isinstance(path, str | Path) and os.path.lexists(path) and os.lstat(path).st_ino in theirs:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def denied_open(path: Any, *rest: Any, **given: Any) -> int:
        deny(path)
        return really_open(path, *rest, **given)

    def denied_link(source: Any, *rest: Any, **given: Any) -> None:
        deny(source)
        really_link(source, *rest, **given)

    os.open, os.link = denied_open, denied_link
    return take_part(rank, job)


@pytest.mark.parametrize("name", ["dcp_000002/__1_0.distcp", "extra_000002_rank1.pt"])
@pytest.mark.parametrize("mirrored", [True, False])
def test_a_file_that_a_node_may_not_open_comes_from_the_mirror_or_is_named(
    mirrored: bool, name: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, "ab", (1, 2), mirrored=mirrored, kinds=("dcp",))
    first = job.run()
    found = replace(job, steps=()).run(functools.partial(resume_denied, name))
    if mirrored:
        expect(found, 2, "disk", first[0])
    else:
        path = tmp_path / "b" / name
        assert f"rank 1 on node 1: {path} cannot be opened: Permission denied. It may be whole" in found[0].failed
        expect(replace(job, steps=()).run(), 2, "disk", first[0])


def resume_with_errors_once(rank: int, job: Job) -> Found:
    """Take part where the first read of a file that is sent to another node fails."""
    fails = [OSError(errno.EIO, os.strerror(errno.EIO))]

    class Failing(FileIO):
        def readinto(self, buffer: Any, /) -> int | None:
            if fails and rank == 0:
                raise fails.pop()
            return super().readinto(buffer)

    gather.FileIO = Failing  # type: ignore[misc]
    return take_part(rank, job)


@pytest.mark.parametrize("shares", [False, True])
def test_a_file_that_cannot_be_read_once_while_it_is_sent_costs_no_save(shares: bool, tmp_path: Path) -> None:
    """From the disks; and where one node fetches for all from the mirror."""
    job = Job(tmp_path, "ab", (1, 2), mirrored=shares, kinds=("dcp",), shares=shares)
    first = job.run()
    nodes = "cd" if shares else "ab"
    expect(replace(job, nodes=nodes, steps=()).run(resume_with_errors_once), 2, "anywhere", first[0])


def test_a_part_of_a_snapshot_that_cannot_be_read_once_while_it_is_sent_costs_no_snapshot(tmp_path: Path) -> None:
    """It came back from the persistent directory to other nodes than read it."""
    first = Job(tmp_path, "ab", (1,), "ddp", snapshot=2, kept=True).run()
    for node in "ab":
        for gone in (tmp_path / node).glob("emergency_*"):
            shutil.rmtree(gone)
    found = Job(tmp_path, "abc", (), "ddp", kept=True).run(resume_with_errors_once)
    assert [(one.step, one.failed) for one in found] == [(2, "")] * 3
    assert all(same(one.began, first[0].ended) for one in found)


def test_of_a_damaged_file_and_one_that_cannot_be_read_now_the_second_decides(tmp_path: Path) -> None:
    """The first is whole on the other node."""
    job = Job(tmp_path, "ab", (1, 2), mirrored=False, kinds=("dcp",))
    first = job.run()
    flip_bit(tmp_path / "a/dcp_000002/.metadata")
    for found in replace(job, steps=()).run(functools.partial(resume_denied, "dcp_000002/__1_0.distcp")):
        assert "b/dcp_000002/__1_0.distcp cannot be opened: Permission denied. It may be whole" in found.failed
    expect(replace(job, steps=()).run(), 2, "anywhere", first[0])


def fail_to_load(rank: int, job: Job) -> str:
    """A start that fails in the load, for a reason of its own."""

    def load(*_: Any) -> Any:
        raise RuntimeError("the load failed")

    if rank == 1:
        resume.load_kind = load
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], kinds=job.kinds, timeout_s=WAIT_S)
    try:
        manager.resume(built(job.wrapped))
    except Exception as error:  # noqa: BLE001
        return str(error)
    finally:
        manager.close(timeout_s=0.0)
    return ""


def test_after_a_start_that_failed_the_copy_on_the_disk_comes_first_again(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2), kinds=("dcp",))
    first = job.run()
    assert all("the load failed" in said for said in replace(job, steps=()).run(fail_to_load))
    expect(replace(job, steps=()).run(), 2, "disk", first[0])


@pytest.mark.parametrize("shares", [False, True])
def test_a_file_that_is_damaged_on_a_node_and_on_the_mirror_is_taken_from_another_node(
    shares: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, "ab", (1, 2), kinds=("dcp",), shares=shares)
    first = job.run()
    for place in ("a", "mirror"):
        flip_bit(tmp_path / place / "dcp_000002" / ".metadata")
    expect(replace(job, steps=()).run(), 2, job.url if shares else "anywhere", first[0])


def test_of_two_damaged_files_each_is_taken_from_where_it_is_whole(tmp_path: Path) -> None:
    job = Job(tmp_path, "ab", (1, 2), kinds=("model",))
    first = job.run()
    flip_bit(tmp_path / "a" / "optim_000002_rank0.pt")
    flip_bit(tmp_path / "mirror" / "model_000002.pt")
    expect(replace(job, steps=()).run(), 2, "anywhere", first[0])


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("nodes", "lost"), [("ab", "b"), ("ab", "ab"), ("a", "a")])
def test_a_list_of_tensors_that_is_damaged_on_the_mirror_costs_the_proof_alone(
    nodes: str, lost: str, shares: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, nodes, (1, 2), kinds=("dcp",), shares=shares)
    first = job.run()
    flip_bit(tmp_path / "mirror" / f"tensors_000002_rank{len(nodes) - 1}.json")
    for node in lost:
        shutil.rmtree(tmp_path / node)
    found = replace(job, steps=()).run()
    expect(found, 2, "disk" if lost == "" else job.url, first[0])


def test_what_is_damaged_on_the_only_node_that_has_it_is_named_as_it_is_there(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2), mirrored=False, kinds=("dcp",)).run()
    flip_bit(tmp_path / "b/dcp_000002/__1_0.distcp")
    for one in Job(tmp_path, "ab", (), mirrored=False, kinds=("dcp",)).run():
        assert one.step == 1
        assert f"rank 1 on node 1: {tmp_path}/b/dcp_000002/__1_0.distcp: the crc32c" in one.passed_over


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        ("ab", "ba", "disk"),
        ("ab", "abc", "disk"),
        ("aab", "ab", "disk"),
        ("ab", "a", ""),
        ("ab", "cd", ""),
        ("a", "ab", "disk"),
    ],
)
def test_other_nodes_and_ranks_go_on(before: str, after: str, place: str, tmp_path: Path) -> None:
    first = Job(tmp_path, before, (1, 2)).run()
    job = Job(tmp_path, after, (3,))
    second = job.run()
    expect(second, 2, place or job.url, first[0])
    expect(Job(tmp_path, after).run(), 3, "disk", second[0])


def test_eight_nodes_go_on_after_one_lost_its_disk(tmp_path: Path) -> None:
    first = Job(tmp_path, "abcdefgh", (1,)).run()
    shutil.rmtree(tmp_path / "d")
    job = Job(tmp_path, "abcdefgh", (2,))
    second = job.run()
    expect(second, 1, job.url, first[0])
    assert [one.failed for one in second] == [""] * 8
    for node in "abcdefgh":
        assert leftovers(tmp_path / node) == []


def test_a_node_that_returns_with_an_old_disk_goes_on_with_the_others(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1,)).run()
    second = Job(tmp_path, "ac", (2, 3)).run()
    job = Job(tmp_path, "ab", (4,))
    third = job.run()
    expect(third, 3, job.url, second[0])
    expect(Job(tmp_path, "ab").run(), 4, "disk", third[0])


def test_a_node_that_has_no_room_for_what_it_lacks_rotates_first(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2)).run()
    second = Job(tmp_path, "ac", (3,)).run()
    crowded = Job(tmp_path, "ab", crowded=True)
    for one in crowded.run():
        assert "this disk has no room for a save" in one.failed  # two saves are to be kept
    expect(Job(tmp_path, "ab", crowded=True, keep_last=1).run(), 3, crowded.url, second[0])


@pytest.mark.parametrize("wrapped", ["fsdp", "ddp"])
def test_an_emergency_snapshot_of_several_nodes_is_resumed_from(wrapped: str, tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", (1,), wrapped, snapshot=2).run()
    job = Job(tmp_path, "ab", (3,), wrapped)
    second = job.run()
    expect(second, 2, "disk", first[0])
    assert [one.extra for one in second] == [{"seen": (rank, 2)} for rank in (0, 1)]
    assert list(tmp_path.glob("[ab]/emergency_*")) == []  # a newer save is on the mirror


def test_an_emergency_snapshot_of_which_a_node_is_lost_is_passed_over(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1,), snapshot=2).run()
    shutil.rmtree(tmp_path / "b")
    job = Job(tmp_path, "ab")
    for one in job.run():
        assert (one.step, one.place) == (1, job.url)
        assert "no disk of this job has what rank 1 of those wrote" in one.passed_over


@pytest.mark.parametrize(("killed", "left"), [(0, "[ab]/emergency_*/*rank0*"), (1, "[ab]/emergency_*/*")])
def test_a_copy_that_was_not_finished_and_a_part_on_no_disk_go_too(killed: int, left: str, tmp_path: Path) -> None:
    """Rank 0 was killed before it wrote, rank 1 while it copied; or the disks were full, and rank 1 was killed."""
    Job(tmp_path, "ab", (1,), snapshot=2, kept=True).run()
    for gone in (*tmp_path.glob(left), *tmp_path.glob("kept/emergency_*/meta_rank1.json")):
        gone.unlink()
    for gone in tmp_path.glob("kept/emergency_*/*rank0*") if killed == 0 else ():
        gone.unlink()
    assert [one.step for one in Job(tmp_path, "ab", (3,), kept=True).run()] == [1, 1]
    assert list(tmp_path.glob("*/emergency_*")) == []


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_a_part_of_a_snapshot_whose_rest_is_gone_goes_once_a_later_save_is_mirrored(
    nodes: str, kept: bool, tmp_path: Path
) -> None:
    """Rank 1 was killed while it wrote, before its meta: on its disk, or also in the persistent directory."""
    Job(tmp_path, nodes, (1,), snapshot=2, kept=kept).run()
    for meta in tmp_path.glob("*/emergency_*/meta_rank1.json"):
        meta.unlink()
    for began in tmp_path.glob("kept/emergency_*/rank1.pt"):
        began.rename(began.with_name("rank1.pt.1f0c9a2e.tmp"))
    for one in Job(tmp_path, nodes, (3,), kept=kept).run():
        assert (one.step, one.failed) == (1, "")
        assert "no disk of this job has what rank 1 of those wrote" in one.passed_over
    assert list(tmp_path.glob("[a]/emergency_*")) + list(tmp_path.glob("kept/emergency_*")) == []
    found = [json.loads(line) for line in (tmp_path / "a" / EVENTS_NAME).read_text().splitlines()]
    reasons = [line["facts"]["reason"] for line in found if line["event"] in ("RotationRefused", "SaveRotated")]
    assert all("uploaded files" not in reason for reason in reasons)
    assert any("it is abandoned: superseded, whole nowhere, and a newer save, of step 3" in why for why in reasons)


def test_a_part_of_a_snapshot_stays_while_the_rest_may_be_in_a_directory_that_nobody_looks_at(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1,), snapshot=2, kept=True).run()
    (gone,) = tmp_path.glob("b/emergency_*")
    shutil.rmtree(gone)
    assert [one.step for one in Job(tmp_path, "ab", (3,)).run()] == [1, 1]
    assert len(list(tmp_path.glob("a/emergency_*"))) == 1


@pytest.mark.parametrize("lost", ["b", "ab"])
def test_a_snapshot_that_all_nodes_kept_elsewhere_comes_back_to_each(lost: str, tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", (1,), snapshot=2, kept=True).run()
    assert len(list((tmp_path / "kept").glob("emergency_*/meta_rank*.json"))) == 2
    for node in lost:
        shutil.rmtree(tmp_path / node)
    second = Job(tmp_path, "ab", (3,), kept=True).run()
    expect(second, 2, str(tmp_path / "kept"), first[0])
    assert list(tmp_path.glob("*/emergency_*")) == []  # a newer save is on the mirror
    expect(Job(tmp_path, "ab", kept=True).run(), 3, "disk", second[0])


@pytest.mark.parametrize("wrapped", ["fsdp", "ddp"])
def test_a_node_brings_only_its_part_of_a_snapshot_that_was_kept_elsewhere(wrapped: str, tmp_path: Path) -> None:
    first = Job(tmp_path, "abc", wrapped=wrapped, snapshot=2, kept=True).run()
    shutil.rmtree(tmp_path / "c")
    before = parts_here(tmp_path)
    expect(Job(tmp_path, "abc", wrapped=wrapped, kept=True).run(), 2, str(tmp_path / "kept"), first[0])
    after = parts_here(tmp_path)
    assert {where: after[where] for where in before} == before  # what was whole is the same file
    assert after.keys() - before.keys() == {("c", "meta_rank2.json"), ("c", "rank2.pt"), ("c", "tensors_rank2.json")}
    expect(Job(tmp_path, "abc", wrapped=wrapped, kept=True).run(), 2, "disk", first[0])


def test_a_snapshot_comes_back_to_fewer_nodes_in_parts(tmp_path: Path) -> None:
    first = Job(tmp_path, "abc", snapshot=2, kept=True).run()
    shutil.rmtree(tmp_path / "c")
    expect(Job(tmp_path, "ab", kept=True).run(), 2, str(tmp_path / "kept"), first[0])
    here = parts_here(tmp_path)
    assert sorted(one for one in here if one[1].endswith(".pt")) == [
        ("a", "rank0.pt"),
        ("a", "rank2.pt"),
        ("b", "rank1.pt"),
    ]
    shutil.rmtree(tmp_path / "kept")
    expect(Job(tmp_path, "ab").run(), 2, "disk", first[0])  # in other parts than three nodes wrote
    assert parts_here(tmp_path) == here


@pytest.mark.parametrize(("before", "after", "lost"), [("aa", "ab", "a"), ("aab", "abb", "b"), ("ab", "aa", "ab")])
def test_a_snapshot_that_came_back_in_other_parts_goes_once_a_later_save_is_mirrored(
    before: str, after: str, lost: str, tmp_path: Path
) -> None:
    first = Job(tmp_path, before, (1,), snapshot=2, kept=True).run()
    for node in lost:
        shutil.rmtree(tmp_path / node)
    expect(Job(tmp_path, after, kept=True).run(), 2, str(tmp_path / "kept"), first[0])
    expect(Job(tmp_path, after, (3,), kept=True).run(), 2, "disk", first[0])
    assert list(tmp_path.glob("*/emergency_*")) == []


@pytest.mark.parametrize(("nodes", "is_cut"), [("ab", False), ("ba", False), ("aa", False), ("aa", True)])
def test_a_snapshot_is_whole_if_its_parts_are_on_disks_and_in_the_persistent_directory(
    nodes: str, is_cut: bool, tmp_path: Path
) -> None:
    """A full disk sent one rank's part there alone; the grace period ended before the other was copied."""
    first = Job(tmp_path, "ab" if "b" in nodes else "aa", (1,), snapshot=2, kept=True).run()
    for gone in (*tmp_path.glob("kept/emergency_*/*rank0*"), *tmp_path.glob("[ab]/emergency_*/*rank1*")):
        if not is_cut:
            gone.unlink()
        elif gone.suffix == ".pt":
            os.truncate(gone, 100)
    expect(Job(tmp_path, nodes, kept=True).run(), 2, str(tmp_path / "kept"), first[0])
    expect(Job(tmp_path, nodes, (3,), kept=True).run(), 2, "disk", first[0])
    assert list(tmp_path.glob("*/emergency_*")) == []


def test_a_part_of_a_snapshot_that_rotted_comes_back_alone(tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", snapshot=2, kept=True).run()
    (rotten,) = (tmp_path / "b").glob("emergency_*/rank1.pt")
    flip_bit(rotten)
    before = parts_here(tmp_path)
    expect(Job(tmp_path, "ab", kept=True).run(), 2, str(tmp_path / "kept"), first[0])
    after = parts_here(tmp_path)
    assert after.keys() == before.keys()
    assert {one for one in before if one[0] == "a" and after[one] != before[one]} == set()


@pytest.mark.parametrize(("lost", "damaged"), [("b", 0), ("a", 1)])
@pytest.mark.parametrize("nodes", ["ab", "ba"])
def test_what_is_damaged_in_the_persistent_directory_may_be_whole_on_another_node(
    nodes: str, lost: str, damaged: int, tmp_path: Path
) -> None:
    first = Job(tmp_path, "ab", snapshot=2, kept=True).run()
    (there,) = tmp_path.glob(f"kept/emergency_*/rank{damaged}.pt")
    flip_bit(there)
    shutil.rmtree(tmp_path / lost)
    expect(Job(tmp_path, nodes, kept=True).run(), 2, str(tmp_path / "kept"), first[0])


def test_a_snapshot_that_is_damaged_everywhere_is_passed_over(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1,), snapshot=2, kept=True).run()
    (there,) = tmp_path.glob("kept/emergency_*/rank1.pt")
    flip_bit(there)
    shutil.rmtree(tmp_path / "b")
    for one in Job(tmp_path, "ab", kept=True).run():
        assert (one.step, one.failed) == (1, "")
        found = re.search(r"rank 1 on node 1: \S*/kept/emergency_step_000002\S*/rank1.pt has crc32c", one.passed_over)
        assert found is not None, one.passed_over


def parts_here(base: Path) -> dict[tuple[str, str], int]:
    """The inode of each file of a snapshot, by node and name."""
    return {(path.parent.parent.name, path.name): path.stat().st_ino for path in base.glob("[a-d]/emergency_*/*")}


def test_nobody_waits_for_the_part_of_a_node_that_is_gone(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2), dies=1).run()
    third = Job(tmp_path, "ac", (3,)).run()
    assert [(one.step, one.failed) for one in third] == [(1, ""), (1, "")]
    drain(tmp_path / "a", timeout_s=ALONE_S)  # the job may have ended before it asked again
    assert len(list((tmp_path / "mirror").glob("parts/meta_000002-*"))) == 1  # the disk of b may come back


@pytest.mark.parametrize("dies", [0, 1])
def test_a_save_that_a_crash_left_on_some_nodes_is_passed_over_and_goes(dies: int, tmp_path: Path) -> None:
    first = Job(tmp_path, "ab", (1, 2), dies=dies).run()
    assert "gone" in first[1 - dies].failed
    (left,) = tmp_path.glob("[ab]/meta_000002.json")
    assert left.parent.name == "ab"[1 - dies]
    second = Job(tmp_path, "ab", (3, 4)).run()
    for one in second:
        assert one.step == 1
        assert f"no disk of this job has what node {dies} of those wrote" in one.passed_over
        assert one.failed == ""
    assert not left.exists()
    expect(Job(tmp_path, "ab").run(), 4, "disk", second[0])


def test_no_rank_waits_for_the_part_of_a_node_that_is_gone(tmp_path: Path) -> None:
    """Neither one that leads its node, nor another."""
    Job(tmp_path, "ab", (1, 2), dies=1).run()
    for one in Job(tmp_path, "aac", (3,)).run():
        assert (one.step, one.failed) == (1, "")


def test_a_rewind_on_one_node_says_what_it_leaves_behind_of_which_that_disk_has_a_part(tmp_path: Path) -> None:
    Job(tmp_path, "ab", (1, 2), mirrored=False, kinds=("dcp",)).run()
    (tmp_path / "empty").mkdir()
    said = run(
        "rewind", "--root", tmp_path / "b", "--mirror", f"file://{tmp_path}/empty", "--scratch", "--dry-run"
    ).stdout
    superseded = [line.split() for line in said.splitlines() if "supersede" in line]
    assert [words[:3] for words in superseded] == [["supersede", "step", "1"], ["supersede", "step", "2"]]
    done = run("rewind", "--root", tmp_path / "b", "--mirror", f"file://{tmp_path}/empty", "--scratch").stderr
    undo = f"to undo it, start all nodes once with manager.resume(state, policy='{superseded[1][3][1:9]}')"
    assert undo in done


def test_nobody_waits_until_a_new_mirror_has_the_part_of_a_node_that_is_gone(tmp_path: Path) -> None:
    """The save that all began from is whole on the mirror that was there before."""
    Job(tmp_path, "ab", (1,)).run()
    second = Job(tmp_path, "bc", (2,), also=f"file://{tmp_path}/other").run()
    assert [(one.step, one.failed) for one in second] == [(1, ""), (1, "")]
    assert (tmp_path / "other" / "meta_000002.json").exists()
    assert not (tmp_path / "other" / "meta_000001.json").exists()
    drain(tmp_path / "a", timeout_s=ALONE_S)
    assert "NOT SAFE" not in run("status", "--root", tmp_path / "b").stdout


def test_a_job_does_not_complete_a_save_that_it_left_behind_before_its_own_first(tmp_path: Path) -> None:
    """It would fence itself: node a sends its part of step 2 late, and b, which died before that, now could."""
    Job(tmp_path, "ab", (1, 2), dies=1, crash_at="link.replace:before").run()
    for sent in (tmp_path / "mirror/parts").glob("meta_000002-*"):
        sent.unlink()
    job = Job(tmp_path, "bc", (3,), waits=True)
    for rank in (0, 1):
        os.mkfifo(job.fifo(rank))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(job.run)
        with job.fifo(0).open("w"), job.fifo(1).open("w"):  # both have resumed, and b sends what it has
            waiting = drain(tmp_path / "a", timeout_s=ALONE_S)  # for the part of b, as long as it may
        second = running.result()
    assert waiting.pending > 0
    assert [(one.step, one.failed) for one in second] == [(1, ""), (1, "")]
    expect(Job(tmp_path, "bc").run(), 3, "disk", second[0])


def save_while_the_mirror_is_away(rank: int, job: Job) -> int | None:
    """Resume and save; the mirror goes away after the resume, and is back at the end."""
    mirror, away = job.base / "mirror", job.base / "away"
    state = built(job.wrapped)
    manager = CheckpointManager(job.base / job.nodes[rank], [job.url], kinds=("dcp",), timeout_s=WAIT_S)
    start = manager.resume(state)
    if rank == 0:
        mirror.rename(away)
    manager.ranks.exchange(None, what="the mirror goes away")
    for step in job.steps:
        train(state, rank, step)
        manager.save(step, state).wait("committed", timeout_s=WAIT_S)
    with suppress(DeadlinePassed):
        manager.close(timeout_s=0.0)
    dist.barrier()
    if rank == 0:
        away.rename(mirror)
    return start.step if start is not None else None


@pytest.mark.parametrize("drained", ["", "abc", "cab"])
def test_a_node_that_returns_with_a_save_that_the_others_left_behind_does_not_take_the_run_back(
    drained: str, tmp_path: Path
) -> None:
    Job(tmp_path, "ab", (1,), kinds=("dcp",)).run()
    assert Job(tmp_path, "ab", (2,)).run(save_while_the_mirror_is_away) == [1, 1]
    assert Job(tmp_path, "bc", (2, 3)).run(save_while_the_mirror_is_away) == [1, 1]
    for node in drained:
        drain(tmp_path / node, timeout_s=ALONE_S)
    assert [one.step for one in Job(tmp_path, "abc", (4,), kinds=("dcp",)).run()] == [3, 3, 3]
    assert (tmp_path / "mirror/meta_000004.json").exists()


def hold_step_2_back(base: Path) -> str:
    """Of step 2, a and b have all, and c, which did not see it, died while it saved with a.

    Returns:
        What a drain of a says.
    """
    Job(base, "ab", (1,), kinds=("dcp",)).run()
    assert Job(base, "ab", (2,)).run(save_while_the_mirror_is_away) == [1, 1]
    Job(base, "ac", (2,), kinds=("dcp",), dies=1).run()
    for node in "bca":
        held = drain(base / node, timeout_s=ALONE_S)
    (why,) = (one for one in held.awaited if "is held back" in one)
    return why


def test_a_drain_says_what_decides_about_a_save_that_a_part_of_a_newer_attempt_holds_back(tmp_path: Path) -> None:
    why = hold_step_2_back(tmp_path)
    assert "Step 2 is held back until" in why
    assert "The next start decides between them" in why
    ended = run("drain", "--root", tmp_path / "a", "--timeout", "0")
    assert ended.returncode == DeadlinePassed.exit_code
    assert "Waiting: step 2: Step 2 is held back until" in ended.stderr
    assert "held back until" in " ".join(
        json.loads(run("status", "--root", tmp_path / "a", "--json").stdout)["awaited"]
    )
    assert [one.step for one in Job(tmp_path, "ab", (3,), kinds=("dcp",)).run()] == [2, 2]
    assert drain(tmp_path / "b", timeout_s=WAIT_S).is_verified
    assert (tmp_path / "mirror/meta_000002.json").exists()


def test_a_part_that_nothing_can_make_whole_holds_no_save_back(tmp_path: Path) -> None:
    """Of step 2, a has one part and b had sent the other; of the step 2 of the newer attempt, a has a part alone."""
    hold_step_2_back(tmp_path)
    assert [(one.step, one.place) for one in Job(tmp_path, "ac").run()] == [(2, "anywhere")] * 2
    assert drain(tmp_path / "a", timeout_s=WAIT_S).is_verified
    assert (tmp_path / "mirror/meta_000002.json").exists()
