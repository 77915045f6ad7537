"""What can happen in a history: one function a rule. Each draws its choices from its own number.

Rules:
* A rule does nothing where it cannot, so any step of a history can be left out.
* Only errors that the situation explains are swallowed; every other error is a finding.
* A start is compared with the reference; a job that nothing befell must end without an error.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptmirror.core import names
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.model import Kind
from ckptmirror.flow.drain import drain as drain_root
from ckptmirror.flow.fetch.stage import stage_checkpoint_step
from ckptmirror.flow.start.rewind import rewind as rewind_root
from ckptmirror.testing import Fault
from tests.kit.processes import Pipe, clean_process
from tests.nodes.campaign.checks import Watch
from tests.nodes.campaign.expected import allowed_starts, apart_on, view_of
from tests.nodes.campaign.jobs import LIMIT_S, Hung, Job, run_together
from tests.nodes.campaign.plans import Ambush, Plan
from tests.nodes.campaign.rank import Broke, Committed, Ended, Failed, Mirrored, Resumed, Snapshot
from tests.nodes.campaign.sight import look_at_mirror
from tests.nodes.campaign.world import NODES, Broken, GcsMirror, Mixed, World
from tests.simulation.reference import Allowed, in_order

__all__ = ["RULES", "Rule", "drain_all", "in_process", "rewind_to", "run_job", "run_jobs", "wake_all"]

Rule = Callable[[World, Watch, random.Random], None]
_LAYOUTS = ("aa", "ab", "ab", "ab", "aab", "abb", "aba", "abc", "abc", "ba", "aabb", "abcd", "a")
_EXIT_CODES = {"wait": (5,), "refuse": (7,)}
_NOT_MOUNTED = 10  # a node that never saw the mirror takes a missing mount for a mistake
_DRAIN_S = 2.0
_OF_SAVES = ("meta", "part", "dcp", "model", "optim", "extra", "tensors")


# -- jobs ------------------------------------------------------------------------------------------------------


def job(world: World, watch: Watch, draw: random.Random) -> None:
    """A job, and whatever befalls it."""
    if not world.free:
        return
    nodes = _nodes(world, draw)
    befalls = draw.choices(
        [
            "nothing",
            "a node dies",
            "all die",
            "a node sleeps",
            "all sleep",
            "a mirror falls silent",
            "a stop",
            "a stop, and a node dies",
            "a waking",
        ],
        [30, 20, 8, 8, 8, 8, 10, 8, 8],
    )[0]
    plan = _plan(world, draw, nodes)
    in_training, point, at = draw.random() < 0.8, draw.choice([draw.randrange(1, 60), draw.randrange(1, 400)]), 0
    leader, silenced = draw.choice(sorted(set(nodes))), draw.choice(world.mirrors)
    peers_wait, early, faults = draw.random() < 0.25, draw.random() < 0.3, _faults(draw)
    at = draw.randrange(1, plan.steps + 1)
    rank = draw.choice(plan.ranks_of(leader))
    if befalls in ("a node dies", "all die", "a node sleeps", "all sleep", "a stop, and a node dies"):
        struck = tuple(range(plan.size)) if befalls.startswith("all") else plan.ranks_of(leader)
        number = signal.SIGKILL if befalls.endswith(("die", "dies")) else signal.SIGSTOP
        plan = replace(plan, ambush=Ambush(rank, str(point), in_training, struck, number))
        if befalls == "a node sleeps" and peers_wait:
            plan = replace(plan, timeout_s=4.0)
    if befalls.startswith("a stop"):
        asked = plan.ranks_of(leader) if early else (rank,)
        plan = replace(plan, asked_to_stop=(asked, at), ends_mirrored=draw.random() < 0.5)
    elif befalls in ("a mirror falls silent", "a waking"):
        plan = replace(plan, asks_at=at, ends_mirrored=befalls == "a waking")
    elif befalls == "nothing":
        plan = replace(plan, ends_mirrored=not early)
    woken: list[Job] = []

    def happens() -> None:
        if befalls == "a mirror falls silent":
            silenced.fall_silent()
        else:
            woken.extend(_wake(world))

    _tell(world, plan, befalls)
    run_job(world, plan, happens=happens, peers_wait=peers_wait, faults=faults)
    _see_off(world, woken)


def two_at_once(world: World, watch: Watch, draw: random.Random) -> None:
    """Two jobs start at once, on nodes of their own. Each may find on a mirror what the other has just sent there.

    Where both begin a run, one may find files of the other's first save before its meta, and refuses.
    """
    free = world.free
    if len(free) < 2:
        return
    draw.shuffle(free)
    cut = draw.randrange(1, len(free))
    first, second = free[:cut][:2], free[cut:][:2]
    plans = [_plan(world, draw, "".join(nodes), after=number) for number, nodes in enumerate((first, second))]
    everywhere = "".join(plan.nodes for plan in plans)
    allowed = [
        [one for nodes in (plan.nodes, everywhere) for one in allowed_starts(world, nodes, str(plan.policy))]
        for plan in plans
    ]
    for plan in plans:
        _tell(world, plan, "another starts at once")
    jobs = [world.begin(plan) for plan in plans]
    run_jobs(world, jobs)
    own = {one.save_id for job in jobs for one in job.all_said(Committed)}
    for job, expected in zip(jobs, allowed, strict=True):
        if own and any(one.does == "step 0" for one in expected):
            expected.append(Allowed("refuse", "there are files of the other's first save, and no meta yet"))
        _check_start(world, job, expected, disturbed=True, also=own)
    world.refused &= not own


def run_job(
    world: World,
    plan: Plan,
    *,
    happens: Callable[[], None] = lambda: None,
    peers_wait: bool = False,
    faults: Sequence[Fault] = (),
) -> Job:
    """Run a job until it is over or sleeps, and check where it began and how it ended.

    Args:
        happens: Called when rank 0 asks.
        peers_wait: Whether the ranks beside those that sleep run into their limit; else they are killed.
        faults: What befalls requests to mirrors meanwhile.
    """
    allowed = allowed_starts(world, plan.nodes, str(plan.policy))
    quiet = not (world.silent or faults or plan.ambush or plan.asks_at or plan.asked_to_stop[1])
    for mirror in world.mirrors:
        if isinstance(mirror, GcsMirror) and faults:
            mirror.suffer(list(faults))
    job = world.begin(plan)
    run_jobs(world, [job], happens, peers_wait=peers_wait)
    for mirror in world.mirrors:
        if isinstance(mirror, GcsMirror):
            mirror.recover()
    _check_start(world, job, allowed, disturbed=not quiet)
    if quiet and not world.refused and not apart_on(world, plan.nodes):
        _check_end(job)
    return job


def run_jobs(
    world: World, jobs: list[Job], happens: Callable[[], None] = lambda: None, *, peers_wait: bool = False
) -> None:
    """Run jobs side by side until each is over or sleeps; see :func:`run_job`."""

    def tick(job: Job) -> None:
        if job.asks:
            happens()
            job.answer()
        if job.falls_asleep:
            job.sleeps()
            assert job.plan.ambush is not None
            peers = set(range(job.plan.size)) - set(job.plan.ambush.struck)
            if not peers_wait:
                job.signal(peers, signal.SIGKILL)
            while not all(job.is_over(rank) for rank in peers):
                job.listen(time.monotonic() + LIMIT_S)
            for rank in peers:  # they are over; one whose last save is in flight would keep its root locked
                job.processes[rank].kill()
                job.processes[rank].join()
            world.asleep.append(job)

    try:
        run_together(jobs, tick)
    finally:
        for one in jobs:
            world.note(one)
    for one in jobs:
        for broke in one.all_said(Broke):
            raise Broken(f"a rank of job {one.plan.number} broke:\n{broke.trace}")
        world.told.append(f"    job {one.plan.number} {_said(one)}")


def _said(job: Job) -> str:
    resumed = job.all_said(Resumed)
    words = ["slept" if job.is_asleep else "ended", f"from {resumed[0].step} ({resumed[0].place})" if resumed else ""]
    words.append(f"committed {sorted({one.step for one in job.all_said(Committed)})}")
    words += sorted({f"snapshot {one.step}" for one in job.all_said(Snapshot)})
    words += sorted({f"{one.when}: {one.kind}: {one.message[:300]}" for one in job.all_said(Failed)})
    words += [f"{job.plan.wrapped} {one.timings}" for one in job.of_rank(0, Ended)]
    return "; ".join(filter(None, words))


def _check_start(
    world: World,
    job: Job,
    allowed: Sequence[Allowed],
    *,
    disturbed: bool,
    also: set[str] = frozenset(),  # type: ignore[assignment]
) -> None:
    plan, resumed = job.plan, job.all_said(Resumed)
    for rank, found in [(rank, one) for rank, said in enumerate(job.said) for one in said if isinstance(one, Resumed)]:
        _check_values(world, plan, rank, found)
    where = {(one.attempt, one.step, one.save_id, one.kind) for one in resumed}
    if len(where) > 1:
        raise Mixed(f"ranks of job {plan.number} continue from different saves: {sorted(map(str, where))}")
    if resumed:
        found = resumed[0]
        fits = {
            (one.save.save_id, one.kind) if one.save else None for one in allowed if one.does in ("resume", "step 0")
        }
        if found.save_id not in also and ((found.save_id, found.kind) if found.step is not None else None) not in fits:
            raise Broken(f"job {plan.number} on {plan.nodes} continues from {found}, expected {allowed}")
        world.refused = False
        return
    failures = [one for one in job.all_said(Failed) if one.when == "start"]
    world.refused = any(one.kind == "RefusedOnlyCopy" for one in failures)
    if disturbed and not world.refused:
        return
    codes = {code for one in allowed for code in _EXIT_CODES.get(one.does, ())}
    if world.silent:
        codes.add(_NOT_MOUNTED)
    for failure in failures:
        if failure.exit_code not in codes:
            raise Broken(f"job {plan.number} on {plan.nodes} fails to start, expected {allowed}: {failure}")
    if len(failures) != plan.size and not disturbed:
        raise Broken(f"of job {plan.number} only {len(failures)} ranks say why it does not start: {failures}")


def _check_values(world: World, plan: Plan, rank: int, found: Resumed) -> None:
    if found.step is None:
        return
    truth = world.truths.get(found.save_id)
    if truth is None:  # an emergency snapshot, of which only the ranks' metas told
        raise Broken(f"job {plan.number} continues from a save that nobody knows: {found}")
    for name, codes in found.codes.items():
        if codes not in ([], [float(truth.code)]):
            raise Mixed(f"rank {rank} of job {plan.number} has {codes} in {name}, not {truth.code}: {found}")
    if world.plans[truth.job].size == plan.size and found.extra != {"code": truth.code, "rank": rank}:
        raise Mixed(f"rank {rank} of job {plan.number} has the extra {found.extra}, not of code {truth.code}")


def _check_end(job: Job) -> None:
    """A job that nothing befell has done everything."""
    plan = job.plan
    for rank in range(plan.size):
        done = len(job.of_rank(rank, Committed)), len(job.of_rank(rank, Mirrored)), len(job.of_rank(rank, Ended))
        failed = [one for one in job.of_rank(rank, Failed) if plan.ends_mirrored or one.kind != "DeadlinePassed"]
        if done != (plan.steps, int(plan.ends_mirrored), 1) or failed:
            raise Broken(f"nothing befell job {plan.number}, and rank {rank} did {done} of {plan.steps}: {failed}")


def _nodes(world: World, draw: random.Random) -> str:
    layout = draw.choice(_LAYOUTS)
    letters = draw.sample(NODES, len(NODES)) if draw.random() < 0.5 else list(NODES)
    free = [letter for letter in letters if letter in world.free] or world.free
    return "".join(free[NODES.index(letter) % len(free)] for letter in layout)


def _plan(world: World, draw: random.Random, nodes: str, after: int = 0) -> Plan:
    kinds: tuple[Kind, ...] = draw.choice([("dcp",), ("dcp",), ("dcp", "model")])
    return Plan(
        number=len(world.plans) + 1 + after,
        base=world.base,
        nodes=nodes,
        wrapped=draw.choice(["fsdp", "ddp"]),
        urls=world.urls,
        kinds=kinds,
        steps=draw.choice([1, 2, 3, 4]),
        policy="scratch" if world.refused else "auto",
    )


def _faults(draw: random.Random) -> list[Fault]:
    """What befalls single requests to the server."""
    if draw.random() < 0.7:
        return []
    nth = draw.choice([1, 2, 3, 5, 9, 14])
    upload = draw.choice(["upload.*", "upload.multipart", "upload.start", "upload.put"])
    return draw.choice(
        [
            [Fault(operation=upload, nth=nth, status=503)],
            [Fault(operation=upload, nth=nth, status=429, retry_after_s=1)],
            [Fault(operation=upload, nth=nth, lose_answer=True)],
            [Fault(operation="upload.*", nth=nth, reset_after_bytes=100)],
            [Fault(operation="upload.*", nth=nth, corrupt_received_byte_at=0)],
            [Fault(operation="object.get", nth=nth, status=503)],
            [Fault(operation="object.list", nth=nth, status=500)],
            [Fault(operation="object.list", nth=nth, lose_answer=True)],
            [Fault(operation="object.media", nth=nth, truncate_after_bytes=20)],
            [Fault(operation="object.media", nth=nth, corrupt_byte_at=5)],
        ]
    )


def _tell(world: World, plan: Plan, what: str) -> None:
    short = f"{plan.wrapped}, {'+'.join(plan.kinds)}, {plan.steps} steps, {plan.policy}"
    struck = f", {plan.ambush}" if plan.ambush else ""
    world.told.append(f"  job {plan.number} on {plan.nodes} ({short}{struck}): {what}")


# -- jobs that sleep -------------------------------------------------------------------------------------------


def wake(world: World, watch: Watch, draw: random.Random) -> None:
    """Nodes that were stopped go on, whatever has happened since."""
    wake_all(world)


def wake_all(world: World) -> None:
    _see_off(world, _wake(world))


def _wake(world: World) -> list[Job]:
    woken, world.asleep = world.asleep, []
    for one in woken:
        world.told.append(f"  job {one.plan.number} wakes")
        one.wake()
    return woken


def _see_off(world: World, woken: list[Job]) -> None:
    if woken:
        run_jobs(world, woken)


# -- disks, mirrors, people ------------------------------------------------------------------------------------


def lose_disk(world: World, watch: Watch, draw: random.Random) -> None:
    """A node loses its disk, or all do."""
    node = draw.choice(world.free or [""])
    for lost in world.free if draw.random() < 0.25 else [node]:
        if lost and world.root(lost).exists():
            world.told.append(f"  node {lost} loses its disk")
            world.lose_disk(lost)


def keep_copy(world: World, watch: Watch, draw: random.Random) -> None:
    """Somebody copies a disk away."""
    node = draw.choice(world.free or [""])
    if node and world.root(node).exists():
        world.told.append(f"  somebody copies the disk of node {node}")
        shutil.rmtree(_copy_of(world, node), ignore_errors=True)
        shutil.copytree(world.root(node), _copy_of(world, node), symlinks=True)


def restore(world: World, watch: Watch, draw: random.Random) -> None:
    """A disk is what it was when it was copied."""
    node = draw.choice(world.free or [""])
    if node and _copy_of(world, node).exists():
        world.told.append(f"  node {node} gets the copy of its disk back")
        world.lose_disk(node)
        shutil.copytree(_copy_of(world, node), world.root(node), symlinks=True)


def _copy_of(world: World, node: str) -> Path:
    return world.base / f"copy-of-{node}"


def lose_kept(world: World, watch: Watch, draw: random.Random) -> None:
    """Somebody empties the persistent directory."""
    for path in world.kept.iterdir() if world.kept.exists() else ():
        world.told.append(f"  {path.name} is gone from the persistent directory")
        shutil.rmtree(path)


def silence(world: World, watch: Watch, draw: random.Random) -> None:
    mirror = draw.choice(world.mirrors)
    world.told.append(f"  {mirror.url} falls silent")
    mirror.fall_silent()


def lose_object(world: World, watch: Watch, draw: random.Random) -> None:
    """A mirror loses an object of a save, more often of a late one."""
    mirror = draw.choice(world.mirrors)
    parsed = {name: names.parse_name(name) or names.parse_name(name.partition("/")[0]) for name in mirror.objects()}
    there = sorted((one.step or 0, name) for name, one in parsed.items() if one and one.role in _OF_SAVES)
    if there:
        _, name = draw.choice(there[-draw.choice([8, len(there)]) :])
        world.told.append(f"  {mirror.url} loses {name}")
        watch.lose(mirror, name)


def come_back(world: World, watch: Watch, draw: random.Random) -> None:
    world.told.append("  all mirrors answer again")
    for mirror in world.mirrors:
        mirror.come_back()


def drain(world: World, watch: Watch, draw: random.Random) -> None:
    """Somebody drains a node on which no job runs."""
    node = draw.choice(world.free or [""])
    if node and world.root(node).exists():
        outcome = in_process(_drain, world.root(node), _DRAIN_S)
        world.told.append(f"  a drain on node {node}: {outcome}")


def drain_all(world: World, timeout_s: float) -> None:
    """Drain every node at once: each may wait for another's part."""
    nodes = [node for node in world.disk if world.root(node).exists()]
    outcomes = in_processes(_drain, [(world.root(node), timeout_s) for node in nodes])
    world.told += [f"  a drain on node {node}: {outcome}" for node, outcome in zip(nodes, outcomes, strict=True)]


def _drain(root: Path, timeout_s: float) -> str:
    report = drain_root(root, timeout_s=timeout_s)
    return f"{report.pending} pending, {len(report.failed)} failed {'; '.join(report.failed)[:300]}"


def rewind(world: World, watch: Watch, draw: random.Random) -> None:
    """A person goes back to a save that is on the mirrors."""
    node = draw.choice(world.free or [""])
    view = view_of(world, "", mirrors=True)
    on_lineage = in_order(view.attempts, view.saves, view.counting)
    steps = sorted({save.step for save in on_lineage if save.kinds != {"emergency"}})  # a verb reads no persistent_dir
    if not node or len(steps) < 2:
        return
    step = draw.choice(steps[:-1][-3:])
    outcome = in_process(rewind_to, world.root(node), step, world.urls)
    world.told.append(f"  a person rewinds to step {step} on node {node}: {outcome}")
    if world.silent or world.asleep:
        return
    if not outcome.startswith("rewound"):
        raise Broken(f"a rewind to step {step} on node {node} fails: {outcome}")
    (newest, *_) = allowed_starts(world, node, "auto")
    if newest.save is None or newest.save.step != step:
        raise Broken(f"after a rewind to step {step}, a start is expected to {newest}")


def stage(world: World, watch: Watch, draw: random.Random) -> None:
    """A person brings a save into the root of a node, in the place of the node's own part of it if that has one."""
    node, mirror = draw.choice(world.free or [""]), draw.choice(world.mirrors)
    seen = look_at_mirror(world, mirror.url, mirror.objects())
    damaged = {share.meta.step for share in seen.shares if set(share.kinds) != set(share.meta.kinds)}
    there = sorted({meta.step for meta in seen.metas} - damaged)
    if not node or not world.root(node).exists() or not there:
        return
    step = draw.choice(there[-2:])
    outcome = in_process(stage_to, world.root(node), step, mirror.url)
    world.told.append(f"  a person stages step {step} from {mirror.url} on node {node}: {outcome}")
    if not (outcome.startswith("staged") or world.silent or world.asleep):
        raise Broken(f"step {step} cannot be staged on node {node}: {outcome}")


def stage_to(root: Path, step: int, url: str) -> str:
    return f"staged kind {stage_checkpoint_step(url, dest=root, step=step, full=True, superseded=True).kind}"


def rewind_to(root: Path, step: int, urls: Sequence[str]) -> str:
    return f"rewound to the copy in {rewind_root(root, step, mirrors=urls).place}"


def in_process(work: Callable[..., str], *arguments: Any) -> str:
    """Do something in a process of its own; return what it says, or its error."""
    return in_processes(work, [arguments])[0]


def in_processes(work: Callable[..., str], calls: Sequence[tuple[Any, ...]]) -> list[str]:
    """Do something several times at once, each in a process of its own; return what each says, or its error.

    Raises:
        Hung: One does not end.
        Broken: One broke.
    """
    pipes = [Pipe() for _ in calls]
    processes = [clean_process(_answering, theirs, work, call) for call, (_, theirs) in zip(calls, pipes, strict=True)]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        said = []
        for call, (mine, _) in zip(calls, pipes, strict=True):
            if not mine.poll(LIMIT_S):
                raise Hung(f"{work.__name__}{call} does not end")
            try:
                said.append(str(mine.recv()))
            except EOFError as error:
                raise Broken(f"{work.__name__}{call} broke; see above") from error
        return said
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answering(pipe: Any, work: Callable[..., str], arguments: Sequence[Any]) -> None:
    try:
        pipe.send(work(*arguments))
    except CkptMirrorError as error:
        pipe.send(f"{type(error).__name__}: {error}")


RULES: dict[str, tuple[Rule, int]] = {
    "job": (job, 40),
    "two_at_once": (two_at_once, 5),
    "wake": (wake, 8),
    "lose_disk": (lose_disk, 10),
    "keep_copy": (keep_copy, 4),
    "restore": (restore, 5),
    "lose_kept": (lose_kept, 3),
    "silence": (silence, 4),
    "lose_object": (lose_object, 8),
    "come_back": (come_back, 10),
    "drain": (drain, 8),
    "rewind": (rewind, 4),
    "stage": (stage, 6),
}
