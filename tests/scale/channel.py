"""What the ranks of a job send one another: recorded from a small job, and encoded anew for a large one.

Rules:
* The small job is three nodes of two ranks, each a thread with a manager of its own, that meet in this process in place
  of gloo. They open, resume, save and close as any job does, so no exchange is listed here by hand.
* For a large job each rank sends what the rank in its place sent in the small one: the first rank, the leader of
  another node, another rank. What two nodes sent alike, all send alike. What grows with the job has its true size.
* Reports and answers are made by ``ranks/messages.py`` and cut as ``ranks/gloo.py`` cuts them.
* What torch itself sends is not here: the collectives of DCP, and the store through which gloo's connections are made.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckptmirror import CheckpointManager, TrainState
from ckptmirror import manager as manager_module
from ckptmirror.ranks.base import Readers
from ckptmirror.ranks.gloo import frame_bytes
from ckptmirror.ranks.messages import Answer, Report, decide, failure_of, pack_value, refusal
from tests.scale.job import Shape

RECORDED = Shape(nodes=3, ranks_per_node=2)
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Exchange:
    """One exchange of the small job: what it is for, who reads it, and what each rank sent, pickled."""

    what: str
    to: Readers | str
    values: tuple[bytes, ...]


@dataclass
class Channel:
    """Where the ranks of a job meet."""

    size: int
    heard: list[Exchange]
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reports = [Report(0, "", b"", None)] * self.size
        self.answer = Answer("values")
        self.to: Readers | str = "all"
        self.barrier = threading.Barrier(self.size, self._decide)

    def _decide(self) -> None:
        self.answer = decide(self.reports)
        what = re.sub(r" *(\(number [0-9]+\)|(of step)? [0-9]+)", "", self.reports[0].what)
        self.heard.append(Exchange(what, self.to, tuple(report.value for report in self.reports)))

    def exchange(self, rank: int, report: Report, to: Readers | str) -> Answer:
        """Meet all others; return the answer with every value."""
        self.reports[rank], self.to = report, to
        self.barrier.wait(_LIMIT_S)
        return self.answer  # until all have come to the next exchange


class Meeting:
    """One rank of the small job, as ``Ranks`` is."""

    timeout_s = _LIMIT_S
    torch_group = None
    lost_torch_group = False

    def __init__(self, job: SmallJob, rank: int, name: str = "first") -> None:
        self._job, self._channel = job, job.channel_of(name)
        self._number = 0
        self.rank, self.world_size = rank, job.shape.ranks
        self.node, self.nodes = job.shape.node_of(rank), job.shape.nodes
        self.node_ranks = tuple(one for one in range(job.shape.ranks) if job.shape.node_of(one) == self.node)
        self.local_rank, self.local_world_size = self.node_ranks.index(rank), len(self.node_ranks)
        self.is_leader = self.local_rank == 0
        self.nodes_of_ranks = tuple(job.shape.node_of(one) for one in range(job.shape.ranks))

    def exchange(self, value: Any, *, what: str, error: BaseException | None = None) -> list[Any]:
        return list(self._values(value, what, "all", error).values())

    def gather(self, value: Any, *, what: str, to: Readers, error: BaseException | None = None) -> dict[int, Any]:
        found = self._values(value, what, to, error)
        if self.rank == 0:
            return found
        return {rank: found[rank] for rank in self.node_ranks} if to == "node" else {}

    def _values(self, value: Any, what: str, to: Readers | str, error: BaseException | None) -> dict[int, Any]:
        self._number += 1
        failure = failure_of(error) if error is not None else None
        data = b"" if error is not None else pack_value(value)
        answer = self._channel.exchange(self.rank, Report(self._number, what, data, failure), to)
        if answer.outcome == "values":
            return answer.values()
        raise error if error is not None else refusal(answer, what)

    def send(self, data: memoryview, to: int) -> None:
        raise NotImplementedError("no file goes from node to node here")

    def receive(self, into: memoryview, source: int) -> None:
        raise NotImplementedError("no file goes from node to node here")

    def channel(self, name: str, *, more_s: float = 0.0) -> Meeting:  # noqa: ARG002  no wait here has a limit
        return Meeting(self._job, self.rank, name)

    def close(self) -> None:
        """Nothing to free."""


class SmallJob:
    """The ranks of the small job, as threads."""

    def __init__(self, base: Path, shape: Shape = RECORDED) -> None:
        self.base, self.shape = base, shape
        self.heard: list[Exchange] = []
        self._channels: dict[str, Channel] = {}
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}

    def channel_of(self, name: str) -> Channel:
        """The channel of this name, which the first rank that asks makes."""
        with self._lock:
            return self._channels.setdefault(name, Channel(self.shape.ranks, self.heard))

    def run(self, step: int) -> list[Exchange]:
        """Open, resume, save once and close; return the exchanges."""
        self.heard, self._channels = [], {}
        failures: list[BaseException] = []

        def work(rank: int) -> None:
            self._threads[threading.get_ident()] = rank
            try:
                self._take_part(rank, step)
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)
                for channel in self._channels.values():
                    channel.barrier.abort()

        opened = manager_module.open_ranks
        manager_module.open_ranks = lambda *_, **__: Meeting(self, self._threads[threading.get_ident()])  # type: ignore[assignment]
        try:
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.shape.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            manager_module.open_ranks = opened
        if failures:
            raise failures[0]
        return self.heard

    def _take_part(self, rank: int, step: int) -> None:
        state = _state()
        root = self.base / f"node-{self.shape.node_of(rank)}"
        root.mkdir(parents=True, exist_ok=True)
        with CheckpointManager(root, ["memory://small/run"], kinds=("model",)) as manager:
            manager.resume(state)
            manager.save(step, state).wait("mirrored", timeout_s=_LIMIT_S)


_building = threading.Lock()


def _state() -> TrainState:
    with _building:
        torch.manual_seed(7)
        model = torch.nn.Linear(8, 8)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))


# -- for a job of any size ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What one exchange costs a large job.

    Attributes:
        messages: Between ranks.
        received_bytes: By rank 0.
        sent_bytes: By rank 0.
        answer_bytes: The largest answer that a rank gets.
        cpu_s: What rank 0 needs to read the reports, decide, and encode the answers.
    """

    what: str
    messages: int
    received_bytes: int
    sent_bytes: int
    answer_bytes: int
    cpu_s: float


def traffic_of(exchange: Exchange, shape: Shape, sizes: Mapping[str, Callable[[int], int]]) -> Traffic:
    """Encode an exchange for a job of another shape.

    Args:
        exchange: Of the small job.
        shape: The large one.
        sizes: How many bytes the value of a rank has, for the exchanges in which that follows from the job's size.
    """
    values = values_for(exchange, shape, sizes.get(exchange.what))
    sent = [pickle.dumps(Report(1, exchange.what, value, None)) for value in values]
    started = time.process_time()
    reports = [pickle.loads(one) for one in sent]
    whole = decide(reports)
    answers: list[tuple[int, int]] = []  # how many ranks get an answer of how many bytes
    if exchange.to == "all":
        answers.append((shape.ranks - 1, len(pickle.dumps(whole, protocol=pickle.HIGHEST_PROTOCOL))))
    elif exchange.to == "first":
        answers.append((shape.ranks - 1, len(pickle.dumps(Answer("values"), protocol=pickle.HIGHEST_PROTOCOL))))
    else:
        for node in range(shape.nodes):
            ranks = range(node * shape.ranks_per_node, (node + 1) * shape.ranks_per_node)
            answer = Answer.with_values(reports, ranks)
            size = len(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))
            answers.append((shape.ranks_per_node - (node == 0), size))
    cpu_s = time.process_time() - started
    return Traffic(
        exchange.what,
        2 * (shape.ranks - 1),
        sum(frame_bytes(len(one)) for one in sent[1:]),
        sum(count * frame_bytes(size) for count, size in answers),
        max(size for _, size in answers),
        cpu_s,
    )


def values_for(exchange: Exchange, shape: Shape, size_of: Callable[[int], int] | None = None) -> list[bytes]:
    """What each rank of a job of another shape sends."""
    values, per_node = exchange.values, RECORDED.ranks_per_node
    found = []
    for rank in range(shape.ranks):
        node, local = shape.node_of(rank), min(rank % shape.ranks_per_node, 1)
        recorded = values[local] if node == 0 else values[per_node + local]
        is_alike = values[per_node + local] == values[2 * per_node + local]
        if size_of is not None:
            recorded = bytes(size_of(rank))
            is_alike = not recorded
        if not is_alike and (node > 0 or size_of is not None):
            recorded = rank.to_bytes(4, "big") + recorded[4:]
        found.append(recorded)
    return found


def whole_traffic(traffic: Sequence[Traffic]) -> Traffic:
    """All exchanges of a save, or of a start, together."""
    return Traffic(
        f"{len(traffic)} exchanges",
        sum(one.messages for one in traffic),
        sum(one.received_bytes for one in traffic),
        sum(one.sent_bytes for one in traffic),
        max(one.answer_bytes for one in traffic),
        sum(one.cpu_s for one in traffic),
    )
