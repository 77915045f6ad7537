"""What several nodes cost: saves, the messages between nodes, the commit on the mirror, starts, and requests.

A node is a process with a root of its own; all are on this machine and share its cores, its memory and its disk. So a
job of N nodes is measured beside N jobs of one node at once, whose ranks hold and write as many bytes: what is left is
what the nodes cost one another. Each run has processes of its own, and its first save does not count.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core import events
from ckptmirror.testing import GcsServerProcess
from tests.bench.contest import Contestant, Measured, Role, measure
from tests.bench.places import BUCKET, cold, fresh_name, server
from tests.kit.processes import run_ranks

__all__ = ["measure_nodes"]

_COUNTS = (2, 4)
_SAVES = 3  # of a run, of which the median counts
_LIMIT_S = 600.0
_TENSORS = 48
_WIDTH = 256
_TCP_INFO_BYTES, _RECEIVED_AT = 256, 128  # struct tcp_info: tcpi_bytes_received
_Numbers = Mapping[str, float]


@dataclass(frozen=True)
class _Run:
    """What the processes of one run do.

    Attributes:
        base: The directory with a root for each rank.
        nodes: The number of processes, each a node.
        size_bytes: What each rank holds; if ``replicated``, all ranks the same.
        apart: Whether each process is a job of its own.
        url: The mirror.
    """

    base: Path
    nodes: int
    size_bytes: int
    apart: bool = False
    replicated: bool = False
    url: str = ""
    shares: bool = False

    def manager(self, rank: int, group: Any) -> CheckpointManager:
        """Open the root of a rank."""
        url = f"{self.url}/{rank}" if self.apart else self.url
        return CheckpointManager(
            self.base / f"node-{rank}",
            [url] if self.url else [],
            kinds=("dcp",),
            process_group=group,
            share_downloads=self.shares,
            timeout_s=_LIMIT_S,
        )

    def each(self, part: Callable[[int, _Run], _Numbers]) -> list[_Numbers]:
        """Let each process do its part; return what each says."""
        return run_ranks(self.nodes, part, self, limit_s=_LIMIT_S)


class _Model(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((rows, _WIDTH), 0.5) for _ in range(_TENSORS))


def _state(run: _Run, group: Any) -> TrainState:
    """Return a model and its AdamW, of which this rank holds so many bytes; sharded, but for what is replicated."""
    shards = 1 if run.replicated else group.size()
    model = _Model(run.size_bytes // (12 * _TENSORS * _WIDTH) * shards)
    if not run.replicated:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return TrainState(model=model, optimizer=optimizer)


def _group_of(run: _Run) -> Any:
    groups = [dist.new_group([rank]) for rank in range(run.nodes)] if run.apart else [dist.group.WORLD]
    return groups[dist.get_rank() % len(groups)]


# -- saves --------------------------------------------------------------------------------------------------------


class _CountedGroup:
    """A channel's group that counts what this rank sends."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.messages = self.size_bytes = 0

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self.messages += len(tensors)
        self.size_bytes += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextlib.contextmanager
def _counted(manager: CheckpointManager) -> Iterator[_CountedGroup]:
    """Count what the channel of the saves sends; in a job of one process it sends nothing."""
    ranks: Any = manager._save_ranks
    group = ranks._group
    ranks._group = counted = _CountedGroup(group)
    try:
        yield counted
    finally:
        ranks._group = group


def _received_bytes() -> int:
    """Return what all TCP connections of this process have received, as the kernel counts it."""
    received = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory's own, which is closed by now
            if not entry.readlink().name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    received += struct.unpack_from("=Q", info, _RECEIVED_AT)[0]
    return received


def _save(rank: int, run: _Run) -> _Numbers:
    """Save some times; return the medians of what this rank saw of them."""
    group = _group_of(run)
    state = _state(run, group)
    samples: list[tuple[float, ...]] = []
    with run.manager(rank, group) as manager, _counted(manager) as counted:
        manager.resume(state)
        for step in range(_SAVES + 1):
            with torch.no_grad():
                next(state.model.parameters()).add_(1e-3)
            messages, size_bytes, received = counted.messages, counted.size_bytes, _received_bytes()
            dist.barrier()
            started = time.perf_counter()
            handle = manager.save(step, state)
            blocked = time.perf_counter()
            handle.wait("committed")
            ended = time.perf_counter()
            samples.append(
                (
                    blocked - started,
                    ended - started,
                    counted.messages - messages,
                    counted.size_bytes - size_bytes,
                    _received_bytes() - received,
                )
            )
            dist.barrier()
    medians = [statistics.median(values) for values in zip(*samples[1:], strict=True)]
    return dict(zip(("blocked", "durable", "messages", "bytes", "received"), medians, strict=True))


def _measure_saves(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure saves of jobs of several nodes beside as many jobs of one node, and what the nodes say to one another."""
    notes = _Notes()
    runs = {"1 node alone": _Run(directory, 1, size_bytes)}
    for nodes in _COUNTS:
        runs[f"{nodes} jobs of 1 node at once"] = _Run(directory, nodes, size_bytes, apart=True)
        runs[f"1 job of {nodes} nodes"] = _Run(directory, nodes, size_bytes)

    def save(name: str, run: _Run) -> _Numbers:
        found = run.each(_save)
        if run.nodes > 1 and not run.apart:
            for what, number, unit in (
                ("a save's own messages between nodes", "messages", "messages"),
                ("a save's own messages between nodes, in bytes", "bytes", "bytes"),
                ("a save, all that nodes receive by TCP", "received", "bytes"),
            ):
                notes.add(what, name, sum(one[number] for one in found), unit)
        return {
            f"a save on {nodes} nodes: {what}": max(one[number] for one in found)
            for nodes in ((run.nodes,) if run.nodes > 1 else _COUNTS)
            for what, number in (("blocking of the slowest rank", "blocked"), ("until committed on all", "durable"))
        }

    contestants = [
        Contestant(
            name,
            "limit" if run.apart else "ours" if run.nodes > 1 else "peer",
            partial(save, name, run),
            after=partial(_remove, directory),
        )
        for name, run in runs.items()
    ]
    return [*measure(contestants, rounds, warm_up=False), *notes.measured()]


class _Notes:
    """What was counted beside the time, by what it is and who it is of; one node is what others are compared with."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Measured] = {}

    def add(self, what: str, name: str, value: float, unit: str) -> None:
        role: Role = "limit" if name.startswith("1 node") else "peer"
        self._found.setdefault((what, name), Measured(what, name, role, unit)).samples.append(value)

    def measured(self) -> list[Measured]:
        return list(self._found.values())


def _remove(directory: Path) -> None:
    for place in directory.glob("node-*"):
        shutil.rmtree(place)


# -- the commit on the mirror -------------------------------------------------------------------------------------


def _upload(rank: int, run: _Run) -> _Numbers:
    """Save and upload once; return when this node saw its last file verified, and the save committed."""
    group = _group_of(run)
    state = _state(run, group)
    at: dict[str, float] = {}

    def note(event: object) -> None:
        if isinstance(event, events.RecordVerified):
            at["verified"] = time.time()
        if isinstance(event, events.MirrorCommitted):
            at["committed"] = time.time()

    with run.manager(rank, group) as manager:
        manager.events.subscribe(note)
        manager.resume(state)
        dist.barrier()
        manager.save(1, state)
        manager.wait("mirrored", timeout_s=_LIMIT_S)
        dist.barrier()
    return at


def _measure_commits(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure the time from the last byte that the mirror confirmed to the commit, on one node and on several."""

    def commit(nodes: int) -> _Numbers:
        found = _Run(directory, nodes, size_bytes, url=_url()).each(_upload)
        verified = max(one["verified"] for one in found)
        seen = [one["committed"] for one in found]
        return {
            "from the last byte verified to the commit": min(seen) - verified,
            "from the last byte verified until every node knows of the commit": max(seen) - verified,
        }

    contestants = [
        Contestant(
            _named(nodes), "limit" if nodes == 1 else "peer", partial(commit, nodes), after=partial(_remove, directory)
        )
        for nodes in (1, *_COUNTS)
    ]
    with server(directory / "server"):
        return measure(contestants, rounds, warm_up=False)


def _named(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)}"


def _url() -> str:
    return f"gs://{BUCKET}/{fresh_name('nodes')}"


# -- starts -------------------------------------------------------------------------------------------------------


def _start(rank: int, run: _Run) -> _Numbers:
    """Start, and return how long that took on this rank."""
    group = _group_of(run)
    state = _state(run, group)
    dist.barrier()
    started = time.perf_counter()
    with run.manager(rank, group) as manager:
        info = manager.resume(state)
        took = time.perf_counter() - started
        assert info is not None
        dist.barrier()
    return {"took": took}


def _measure_starts(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure starts from the disks and from the mirror, and count their requests in the log of the strict server."""
    notes = _Notes()
    contestants: list[Contestant] = []
    with server(directory / "server") as process:
        for nodes in (1, *_COUNTS):
            for replicated in (False, True):
                run = _Run(directory / f"{nodes}-{replicated}", nodes, size_bytes, replicated=replicated, url=_url())
                run.each(_upload)
                contestants += _starts(run, process, notes)
        found = measure(contestants, rounds, warm_up=False)
    return [*found, *notes.measured()]


def _starts(run: _Run, process: GcsServerProcess, notes: _Notes) -> list[Contestant]:
    name = _named(run.nodes)
    sort = "each node has all of the state" if run.replicated else "each node has a part of the state"

    def start(what: str, name: str, run: _Run) -> _Numbers:
        process.clear_log()
        took = max(one["took"] for one in run.each(_start))
        log = process.log()
        downloaded = [entry for entry in log if entry["operation"] == "object.media"]
        notes.add(f"{what}: requests", name, len(log), "requests")
        notes.add(f"{what}: listings", name, sum(entry["operation"] == "object.list" for entry in log), "requests")
        notes.add(f"{what}: from the mirror", name, sum(entry["response_bytes"] for entry in downloaded), "bytes")
        return {what: took}

    def forget() -> None:
        for path in run.base.rglob("*"):
            if path.is_file():
                cold(path)

    def contestant(what: str, name: str, run: _Run, before: Callable[[], None]) -> Contestant:
        role: Role = "limit" if run.nodes == 1 else "peer"
        return Contestant(name, role, partial(start, what, name, run), before=before)

    from_disk, from_mirror = f"start from the disks, {sort}", f"start from the mirror, {sort}"
    found = [contestant(from_disk, name, run, forget)]
    elsewhere = replace(run, base=run.base / "lost")  # roots that are empty at each start; the others stay
    empty = partial(shutil.rmtree, elsewhere.base, ignore_errors=True)
    found.append(contestant(from_mirror, name, elsewhere, empty))
    if run.replicated and run.nodes > 1:
        found.append(contestant(from_disk, f"{name}, share_downloads", replace(run, shares=True), forget))
        found.append(contestant(from_mirror, f"{name}, share_downloads", replace(elsewhere, shares=True), empty))
    return found


def measure_nodes(directory: Path, size_bytes: int, rounds: int) -> list[Measured]:
    """Measure jobs of several nodes, whose ranks hold a quarter of ``size_bytes`` each."""
    part_bytes = size_bytes // max(_COUNTS)
    return [
        *_measure_saves(directory / "saves", part_bytes, rounds),
        *_measure_commits(directory / "commits", part_bytes, rounds),
        *_measure_starts(directory / "starts", part_bytes, rounds),
    ]
