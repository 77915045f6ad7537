"""A job of several nodes, each a directory and an uploads table of its own: what its ranks do, and what they find."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import CheckpointManager, Retention, TrainState
from ckptmirror.core.errors import CkptMirrorError, LocalStorageFull
from ckptmirror.core.model import Kind
from ckptmirror.flow.save.commit import SaveCommit
from ckptmirror.flow.start import gather, resume
from ckptmirror.local import crashpoints, directories
from tests.kit.processes import run_ranks
from tests.kit.training import same

WAIT_S = 120.0  # nothing takes so long, but on a machine with much else to do
ALONE_S = 2.0  # for the parts of a node that died the others would wait in vain


def built(wrapped: str, hidden: int = 12) -> TrainState:
    """A fresh model, equal on all ranks, and its optimizer."""
    torch.manual_seed(7)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.Linear(hidden, 5))
    if wrapped == "fsdp":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), extra={})


def train(state: TrainState, rank: int, step: int) -> None:
    """One step, on data that differs by rank and step."""
    torch.manual_seed(1000 * step + rank)
    state.model(torch.rand(2, 8)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.extra = {"seen": (rank, step)}


def whole(state: TrainState) -> dict[str, torch.Tensor]:
    """The model's values, as each rank sees them."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.model.state_dict().items()
    }


@dataclass(frozen=True)
class Job:
    """What a job does.

    Attributes:
        base: The directory that has a root for each node, and the mirror.
        nodes: The node of each rank, a letter each.
        steps: The steps that are trained and saved.
        mirrored: Whether there is a mirror.
        bucket: Its URL, if it is not a directory in ``base``.
        also: The URL of another mirror; "": none.
        kinds: What is saved.
        shares: Whether what several nodes need is fetched by one.
        hidden: The width of the model.
        snapshot: The step of an emergency snapshot after that; 0: none.
        dies: The rank that is killed in the last save; -1: none.
        crash_at: The point at which it dies, from that save on; "0": none, but the points are counted.
        full: The rank whose node has no room for the last save; -1: none.
        full_at: What it has no room for: "records", or "names", when it was ready to commit.
        kept: Whether snapshots are also kept in a directory that all nodes see.
        crowded: Whether a node has no room for what it lacks while its disk has more than one save.
        keep_last: How many saves a rotation keeps.
        waits: Whether ranks wait, before the last save, until somebody has opened and closed their FIFOs.
    """

    base: Path
    nodes: str
    steps: tuple[int, ...] = ()
    wrapped: str = "fsdp"
    mirrored: bool = True
    snapshot: int = 0
    dies: int = -1
    crash_at: str = "save.publish:before"
    full: int = -1
    full_at: str = "records"
    waits: bool = False
    kept: bool = False
    crowded: bool = False
    keep_last: int = 2
    bucket: str = ""
    also: str = ""
    kinds: tuple[Kind, ...] = ("dcp", "model")
    shares: bool = False
    hidden: int = 12

    def fifo(self, rank: int) -> Path:
        return self.base / f"go-{rank}"

    def run(self, part: Callable[[int, Job], Any] | None = None, dead: tuple[int, ...] = ()) -> list[Any]:
        """Run the job; return what each rank's ``part`` (by default ``take_part``) returns."""
        dead = (self.dies,) if self.dies >= 0 and self.crash_at != "0" else dead
        return run_ranks(len(self.nodes), part or take_part, self, dead=dead, limit_s=3 * WAIT_S)

    def lock(self) -> IO[str]:
        """Wait for the lock that the rank which dies has while it is alive, and take it."""
        file = (self.base / "alive").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    @property
    def url(self) -> str:
        return self.bucket or f"file://{self.base}/mirror"


@dataclass
class Found:
    """What a rank found: where it began, with what and from which files, what it saved, and what it ended with."""

    step: int | None
    place: str
    began: dict[str, torch.Tensor]
    extra: dict[str, Any]
    passed_over: str
    ended: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    failed: str = ""
    points: int = 0
    gathered: set[str] = field(default_factory=set)


def take_part(rank: int, job: Job) -> Found:
    """Resume, then train and save."""
    with job.lock() if rank == job.dies else nullcontext():
        return _take_part(rank, job)


def _take_part(rank: int, job: Job) -> Found:
    gathered: set[str] = set()
    vote = resume._vote_on_bytes

    def noted(view: Path, *rest: Any) -> None:
        gathered.update(file.name for file in view.rglob("*.distcp"))
        vote(view, *rest)

    resume._vote_on_bytes = noted
    if job.crowded:
        gather.check_space = _check_crowded
    state = built(job.wrapped, job.hidden)
    manager: CheckpointManager | None = None
    try:
        manager = CheckpointManager(
            job.base / job.nodes[rank],
            [url for url in (job.url, job.also) if url] if job.mirrored else [],
            kinds=job.kinds,
            retention=Retention(keep_last=job.keep_last),
            share_downloads=job.shares,
            persistent_dir=job.base / "kept" if job.kept else None,
            timeout_s=WAIT_S,
        )
        info = manager.resume(state)
    except CkptMirrorError as error:
        if manager is not None:
            manager.close(timeout_s=0.0)
        return Found(None, "", {}, {}, "", failed=str(error))
    found = Found(None, "", whole(state), state.extra, "")
    if info is not None:
        found = Found(info.step, info.place, whole(state), state.extra, "; ".join(info.passed_over))
    found.gathered = gathered
    try:
        for step in job.steps:
            train(state, rank, step)
            found.saved[step] = whole(state)
            if step == job.steps[-1]:
                _before_last(manager, job, rank)
            manager.save(step, state)
        if job.steps:
            limit_s = WAIT_S
            if job.dies not in (-1, rank) and job.crash_at != "0":
                job.lock().close()
                limit_s = ALONE_S
            manager.wait("mirrored" if job.mirrored else "committed", timeout_s=limit_s)
        found.ended = whole(state)
        if job.snapshot:
            train(state, rank, job.snapshot)
            manager.save_emergency_checkpoint(job.snapshot, state)
            found.ended = whole(state)
    except CkptMirrorError as error:
        found.failed = str(error)
    found.points = len(crashpoints.passed())
    try:
        manager.close(timeout_s=0.0 if found.failed else WAIT_S)
    except CkptMirrorError as error:
        found.failed = found.failed or str(error)
    return found


def _before_last(manager: CheckpointManager, job: Job, rank: int) -> None:
    if job.dies >= 0 or job.full >= 0 or job.waits:
        manager.wait("mirrored", timeout_s=WAIT_S)
    if rank == job.dies:
        crashpoints.arm(job.crash_at if job.crash_at != "0" else None)
    if rank == job.full:
        place, name = (SaveCommit, "prepare") if job.full_at == "records" else (directories, "rename_noreplace")
        setattr(place, name, partial(_no_room, job.full_at))
    if job.waits:
        job.fifo(rank).read_text()


def _check_crowded(view: Path, _incoming: Any) -> None:
    if len(list(view.parent.parent.glob("meta_*.json"))) > 1:
        raise LocalStorageFull("this disk has no room for a save")


def _no_room(what: str, *_: Any, **__: Any) -> None:
    raise LocalStorageFull(f"this disk has no room for {what}")


def expect(found: Sequence[Found], step: int, place: str, like: Found) -> None:
    """Check that all ranks began at a step, with the values that a rank ended with."""
    for one in found:
        assert (one.step, one.place) == (step, place), one.passed_over
        assert same(one.began, like.ended)
