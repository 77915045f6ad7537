"""Who may go on with a run of several nodes: jobs that start at once, nodes that wake, mirrors that were down."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import FULL
from tests.nodes.campaign.checks import Watch
from tests.nodes.campaign.happenings import in_process, rewind_to, run_job, run_jobs, wake_all
from tests.nodes.campaign.jobs import Job
from tests.nodes.campaign.plans import Ambush, Plan
from tests.nodes.campaign.rank import Committed, Failed, Mirrored, Resumed
from tests.nodes.campaign.world import FileMirror, World

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STARTED = "is listed on"
WHY_NOT = (STARTED, "at the same time", "has committed, and did not start from it")  # of two jobs that start at once


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, [FileMirror(tmp_path / "one"), FileMirror(tmp_path / "two")])
    yield world
    world.close()


def plan(world: World, nodes: str, steps: int = 2, **more: object) -> Plan:
    number = len(world.plans) + 1
    return Plan(number, world.base, nodes, "fsdp", world.urls, steps=steps, **more)  # type: ignore[arg-type]


def failures(job: Job) -> list[list[str]]:
    """What each rank says of its failure, without which rank told it."""
    return [[one.message for one in job.of_rank(rank, Failed)] for rank in range(job.plan.size)]


def end_of(job: Job) -> int:
    """The step that all ranks were told is on all mirrors last."""
    assert len(job.all_said(Mirrored)) == job.plan.size, failures(job)
    return max(one.step for one in job.all_said(Committed))


@pytest.mark.parametrize("has_begun", [False, True])
def test_of_two_jobs_that_start_at_once_one_goes_on_and_the_other_says_why_not_on_every_rank(
    has_begun: bool, world: World
) -> None:
    watch = Watch(world)
    if has_begun:
        run_job(world, plan(world, "ab"))
    jobs = [world.begin(plan(world, nodes, 3)) for nodes in ("ab", "cd")]
    run_jobs(world, jobs)
    watch.look()
    began = [{(one.step, one.save_id) for one in job.all_said(Resumed)} for job in jobs]
    for job, where in zip(jobs, began, strict=True):
        assert len(where) <= 1
        if len(job.all_said(Mirrored)) != job.plan.size:  # then both say so, and why
            assert all(said for said in failures(job)), failures(job)
            assert all(any(why in said[0] for why in WHY_NOT) for said in failures(job)), failures(job)
    ended = [job for job in jobs if len(job.all_said(Mirrored)) == job.plan.size]
    assert ended, [failures(job) for job in jobs]
    if len(ended) == 2:
        own = [{one.save_id for one in job.all_said(Committed)} for job in jobs]
        assert any(save_id in own[1 - number] for number in (0, 1) for _, save_id in began[number])
    world.disk |= {"x": 0, "y": 0}
    run_job(world, plan(world, "xy"))  # compared with the reference
    watch.look()


@pytest.mark.parametrize(
    ("struck", "point"),
    [((1,), "save.publish:before"), ((0, 1), "40"), *([((1,), "90"), ((0, 1), "150")] if FULL else [])],
)
def test_nodes_that_were_stopped_and_wake_commit_nothing_and_begin_no_upload_and_no_rotation(
    struck: tuple[int, ...], point: str, world: World
) -> None:
    watch = Watch(world)
    run_job(world, plan(world, "ab", 3))
    old = run_job(world, plan(world, "ab", 3, ambush=Ambush(1, point, True, struck, signal.SIGSTOP)))
    assert old.is_asleep
    new = run_job(world, plan(world, "cd", 3))
    watch.look()
    committed = [mirror.objects() for mirror in world.mirrors]
    kept = [path for node in "ab" for path in world.root(node).glob("meta_*.json")]
    wake_all(world)
    watch.look()
    for before, mirror in zip(committed, world.mirrors, strict=True):
        added = mirror.objects().keys() - before.keys()
        assert not [name for name in added if "meta_" in name]
        on_its_way = {name.partition("_")[2][:6] for name in added}  # its first file had asked for all of the save
        assert len(on_its_way) <= 1
    assert len({path.name for path in kept if not path.exists()}) <= 1  # as is a save that was being deleted
    for rank in struck:
        said = " ".join(one.message for one in old.of_rank(rank, Failed))
        assert STARTED in said or "is gone" in said
    last = run_job(world, plan(world, "ab", 1))
    assert {one.step for one in last.all_said(Resumed)} == {end_of(new)}
    watch.look()


def test_a_mirror_that_was_down_at_the_start_keeps_others_waiting_and_gets_everything_later(world: World) -> None:
    watch = Watch(world)
    run_job(world, plan(world, "ab"))
    one, other = world.mirrors
    other.fall_silent()
    strangers = run_job(world, plan(world, "cd"))
    for rank in (0, 1):
        (failed,) = strangers.of_rank(rank, Failed)
        assert other.url.removeprefix("file://") in failed.message
    assert strangers.all_said(Resumed) == []
    own = run_job(world, plan(world, "ab", ends_mirrored=False))
    assert {(found.step, found.place) for found in own.all_said(Resumed)} == {(2, "disk")}
    assert {said.step for said in own.all_said(Committed)} == {3, 4}
    other.come_back()
    later = run_job(world, plan(world, "ab", 1))
    assert end_of(later) == 5
    assert one.objects().keys() == other.objects().keys()
    run_job(world, plan(world, "cd"))
    other.fall_silent()
    returned = run_job(world, plan(world, "ab"))
    for rank in (0, 1):
        (failed,) = returned.of_rank(rank, Failed)
        why = ("was started elsewhere", "may have come from elsewhere", "is not on this disk")
        assert any(reason in failed.message for reason in why)
    other.come_back()
    assert {found.step for found in run_job(world, plan(world, "ab")).all_said(Resumed)} == {7}
    watch.look()


def test_a_run_that_a_person_set_back_stays_there_though_the_next_job_dies_before_its_first_save(world: World) -> None:
    watch = Watch(world)
    run_job(world, plan(world, "ab", 3))
    assert in_process(rewind_to, world.root("a"), 1, world.urls).startswith("rewound")
    dies = run_job(world, plan(world, "ab", 3, ambush=Ambush(0, "save.publish:before", True, (0, 1), signal.SIGKILL)))
    assert {found.step for found in dies.all_said(Resumed)} == {1}
    assert dies.all_said(Committed) == []
    for nodes, step in (("ab", 1), ("cd", 3), ("ab", 5)):
        assert {found.step for found in run_job(world, plan(world, nodes)).all_said(Resumed)} == {step}
        watch.look()
