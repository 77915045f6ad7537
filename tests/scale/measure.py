"""What a save and a start of a job cost, measured for one size of job."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptmirror.core.codec import meta_from_bytes, meta_to_bytes
from ckptmirror.core.meta_merging import merge_parts
from ckptmirror.core.model import Attempt, new_id
from ckptmirror.flow.upload import meta as meta_module
from tests.scale.channel import Exchange, Traffic, traffic_of, whole_traffic
from tests.scale.job import Job, Shape, artifacts_of, part_of, peak_bytes
from tests.scale.service import Asked

_SAMPLE_NODES = 8
_OF_SAVE = ("agree on a save", "report the files", "learn whether", "prepare the commit", "commit step")


@dataclass(frozen=True)
class Start:
    """What a start costs.

    Attributes:
        asked: Of the mirror, by all nodes, without what they bring.
        leader: The share of the job's leader: the lists, the listing, the metas.
        brought: What the nodes ask for to bring what their ranks read.
        peak_bytes: The memory that the leader needs for the survey and the choice.
        choice_s: The CPU time that they take it.
    """

    asked: Asked
    leader: Asked
    brought: Asked
    peak_bytes: int
    choice_s: float


@dataclass(frozen=True)
class Documents:
    """The metas of one save.

    Attributes:
        nodes: How many save.
        ranks: All of theirs.
        part_bytes: Of one node.
        meta_bytes: Of all.
        merge_s: CPU time to read all parts, to merge them, and to write the meta.
        memory_bytes: What that needs at most.
        read_s: CPU time to read the meta.
    """

    nodes: int
    ranks: int
    part_bytes: int
    meta_bytes: int
    merge_s: float
    memory_bytes: int
    read_s: float


@dataclass(frozen=True)
class Measured:
    """Everything that is measured for one size of job."""

    nodes: int
    ranks: int
    save: Asked
    save_writes_at_second: int
    save_reads_at_second: int
    fastest_change: tuple[str, int]
    documents: Documents
    from_disks: Start
    from_mirror: Start
    save_traffic: Traffic
    start_traffic: Traffic
    traffic: list[Traffic]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def measure(shape: Shape, base: Path, heard: Sequence[Exchange]) -> Measured:
    """Run a job: start, save twice (so that a rotation deletes), restart from the disks, and from the mirror.

    Args:
        shape: The job.
        base: An empty directory for its roots.
        heard: The exchanges of the small job, at a start that resumes and a save.
    """
    job = Job(shape, base)
    with _each_meta_read_once():
        job.start(job.open())
        job.save()
        job.service.forget_times()
        save = job.save()
        second = job.service.most_at_second("write"), job.service.most_at_second("read")
        hottest = job.service.fastest_change()
        job.close()
        others = job.open()
        peak = job.facts_peak_bytes(others)
        for place in job.places:
            place.client.asked = Asked()
        started = job.start(others)
        brought = job.gather(started.proposal, nodes=min(_SAMPLE_NODES, shape.nodes))
        from_disks = Start(started.asked, started.leader, brought, peak, started.choice_s)
        sizes = _sizes(shape, started.facts_bytes, started.proposal_bytes)
        from_mirror = _from_mirror(job)
        job.lose_disks()
    traffic = [traffic_of(one, shape, sizes) for one in heard]
    of_save = [one for one in traffic if one.what.startswith(_OF_SAVE)]
    of_start = [one for one in traffic if one not in of_save]
    return Measured(
        shape.nodes,
        shape.ranks,
        save,
        *second,
        hottest,
        measure_documents(shape),
        from_disks,
        from_mirror,
        whole_traffic(of_save),
        whole_traffic(of_start),
        traffic,
    )


def _from_mirror(job: Job) -> Start:
    """Start on new disks."""
    job.lose_disks()
    if job.shape.nodes == 1:  # one node stages the save at once, all of its bytes
        return Start(Asked(), Asked(), Asked(), 0, 0.0)
    others = job.open()
    peak = job.facts_peak_bytes(others)
    for place in job.places:
        place.client.asked = Asked()
    started = job.start(others)
    brought = job.gather(started.proposal, nodes=min(_SAMPLE_NODES, job.shape.nodes))
    return Start(started.asked, started.leader, brought, peak, started.choice_s)


def _sizes(shape: Shape, facts_bytes: Sequence[int], proposal_bytes: int) -> dict[str, Any]:
    """How large the values are that grow with the job, or with the files of a rank."""
    of_node = artifacts_of(shape, 0, 100)
    of_rank = [artifact for artifact in of_node if artifact.rank == 0]
    report = len(pickle.dumps((of_rank, 0xFFFFFFFF, {"": ("0" * 32, "0" * 32), "shards": ("0" * 32, "0" * 32)})))

    def facts(rank: int) -> int:
        is_leader = rank % shape.ranks_per_node == 0 and rank > 0
        return facts_bytes[shape.node_of(rank) - 1] if is_leader else 4

    return {
        "look at the disks": facts,
        "propose a save": lambda rank: proposal_bytes if rank == 0 else 16,
        "report the files": lambda _rank: report,
    }


def measure_documents(shape: Shape) -> Documents:
    """Encode, merge and decode the parts of a save. For that, no job has to run."""
    run_id, attempt, save_id = new_id(), Attempt(new_id(), 0, None), new_id()
    data = [meta_to_bytes(part_of(shape, node, 100, run_id, attempt, save_id)) for node in range(shape.nodes)]

    def merge() -> bytes:
        return meta_to_bytes(merge_parts([meta_from_bytes(one) for one in data]))

    memory_bytes = peak_bytes(merge)
    started = time.process_time()
    merged = merge()
    ended = time.process_time()
    meta_from_bytes(merged)
    read_s = time.process_time() - ended
    return Documents(shape.nodes, shape.ranks, max(map(len, data)), len(merged), ended - started, memory_bytes, read_s)


@contextmanager
def _each_meta_read_once() -> Iterator[None]:
    """Let the nodes, which are one process here, parse the meta of all nodes once. Each is still sent its bytes."""
    honest = meta_module.meta_or_tombstone_from_bytes
    meta_module.meta_or_tombstone_from_bytes = lru_cache(2)(honest)
    try:
        yield
    finally:
        meta_module.meta_or_tombstone_from_bytes = honest
