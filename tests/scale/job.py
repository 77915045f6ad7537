"""A job of many nodes on one machine: every node has a root, a table and an uploader, and the real code runs.

Rules:
* What runs is the package: ``Node``, ``Bringer`` and ``RunClaim`` for a start; ``upload_claimed`` for every record; the
  audit and the rotation that follow. Only threads are missing: an event of the simulation does what a thread would.
* The files of ranks are holes of the true size, with the number of block checksums that such files have.
* Time passes in the simulation alone: a node's turn lasts as long as its requests, and as its bytes take on the wire. A
  node's turn is one event, so two nodes never look at the mirror within one request: who does that is the matter of
  ``tests/simulation``, which plays out every order.
"""

from __future__ import annotations

import heapq
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ckptmirror.core import names, retry_delay
from ckptmirror.core.codec import meta_to_bytes
from ckptmirror.core.crc import combine_blocks
from ckptmirror.core.events import EventBus
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.core.model import MIN_BLOCK_SIZE_BYTES, Artifact, Attempt, Digest, Meta, new_id
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.decide import Wish
from ckptmirror.core.start.evidence import DISK
from ckptmirror.flow.fetch.blocks import RANGE_BYTES
from ckptmirror.flow.places.mirrors import Mirror, MirrorSpec, set_mirrors
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.reconcile import add_missing_records, carry_on, forget_brought
from ckptmirror.flow.save.commit import in_order_of_upload
from ckptmirror.flow.start.bring import Bringer, Proposal
from ckptmirror.flow.start.claim import RunClaim
from ckptmirror.flow.start.disk_facts import DiskFacts
from ckptmirror.flow.start.gather import View, discard_view
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.upload import meta as meta_module
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.flow.upload.sending import LEASE_S, UploadContext
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.uploads import RootIdentity
from tests.kit.clock import HandClock
from tests.kit.saves import plan_files
from tests.scale.service import Asked, Client, Service

GIB = 1 << 30
SHARD_BYTES = GIB
"""Of each rank's file: a model of a trillion parameters with AdamW has 2 GiB for each of 8,000 ranks."""

_METADATA_BYTES = 64 << 20
_SIDECAR_BYTES = 64 << 10
_NODE_BYTES_PER_S = 2e9
_URL = "memory://scale/run"
_KEEP_LAST = 1


@dataclass(frozen=True)
class Shape:
    """How large a job is."""

    nodes: int
    ranks_per_node: int = 8
    shard_bytes: int = SHARD_BYTES

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """A rank's node."""
        return rank // self.ranks_per_node


@cache
def digest_of_hole(size_bytes: int) -> Digest:
    """The digest of a file that is one hole: it has as many blocks as any file of this size."""
    whole, rest = divmod(size_bytes, MIN_BLOCK_SIZE_BYTES)
    blocks = (crc32c(bytes(MIN_BLOCK_SIZE_BYTES)),) * whole + ((crc32c(bytes(rest)),) if rest else ())
    return Digest(size_bytes, combine_blocks(blocks, MIN_BLOCK_SIZE_BYTES, size_bytes), MIN_BLOCK_SIZE_BYTES, blocks)


def artifacts_of(shape: Shape, node: int, step: int, tag: str = "") -> tuple[Artifact, ...]:
    """What one node has of a save of kind ``dcp``."""
    shard, metadata, sidecar = map(digest_of_hole, (shape.shard_bytes, _METADATA_BYTES, _SIDECAR_BYTES))
    ranks = range(node * shape.ranks_per_node, (node + 1) * shape.ranks_per_node)
    files = plan_files(step, ("dcp",), ranks=shape.ranks_per_node, tag=tag)
    first = names.SaveName(step, tag)
    found = []
    for path, (kinds, local) in files.items():
        if local is None:
            found.append(Artifact(path, kinds, None, metadata))
            continue
        rank = ranks[local]
        if path.endswith(".distcp"):
            found.append(Artifact(f"{first.dcp_dir}/__{rank}_0.distcp", kinds, rank, shard))
        else:
            moved = first.extra(rank) if path == first.extra(local) else first.tensors(rank)
            found.append(Artifact(moved, kinds, rank, sidecar))
    return tuple(sorted(found, key=lambda one: one.path))


def part_of(shape: Shape, node: int, step: int, run_id: str, attempt: Attempt, save_id: str) -> Meta:
    """Return one node's meta of a save of kind ``dcp``."""
    return Meta(
        run_id=run_id,
        attempt=attempt,
        step=step,
        save_id=save_id,
        save_number=step,
        kinds=("dcp",),
        world_size=shape.ranks,
        nodes=shape.nodes,
        node=node,
        artifacts=artifacts_of(shape, node, step),
        training_config={"lr": 3e-4, "layers": 96},
        architecture_hash="a0" * 16,
    )


@dataclass
class Place:
    """One node.

    Attributes:
        node: Its leader's side, without threads.
        client: What it asks of the mirror.
    """

    node: Node
    client: Client
    context: UploadContext
    audit: MirrorAudit | None = None

    @property
    def mirror(self) -> Mirror:
        """Its mirror."""
        return self.context.mirror


@dataclass
class Started:
    """What came of a start.

    Attributes:
        asked: Of all nodes together.
        leader: Of the job's leader alone.
        facts_bytes: What each node tells the leader of its disk, pickled.
        proposal: What all ranks are sent.
        proposal_bytes: The same, pickled.
        choice_s: CPU time of the leader for its survey and its choice.
    """

    asked: Asked
    leader: Asked
    facts_bytes: Sequence[int]
    proposal: Proposal
    proposal_bytes: int
    choice_s: float


@dataclass
class Job:
    """The nodes of a job, and the service that they share.

    Attributes:
        shape: How large it is.
        base: The directory of the roots.
    """

    shape: Shape
    base: Path
    seed: int = 7
    clock: HandClock = field(default_factory=HandClock)
    places: list[Place] = field(default_factory=list)
    started: int = 0
    saved: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for module in (retry_delay, meta_module):  # so that a job makes the same requests each time
            module._random.seed(self.seed)
        self.service = Service(self.now_s)

    def now_s(self) -> float:
        """The time of the simulation."""
        return self.clock.time_ms / 1000

    @property
    def asked(self) -> Asked:
        """What all nodes have asked so far."""
        return sum((place.client.asked for place in self.places), Asked())

    def close(self) -> None:
        """End the attempt, as processes that are killed."""
        for place in self.places:
            place.node.table.close()
            place.node.lock.release()
        self.places = []

    def lose_disks(self) -> None:
        """Close, and remove everything on the nodes."""
        self.close()
        for root in self.base.glob("node-*"):
            shutil.rmtree(root)

    def _pass(self, *places: Place) -> None:
        """Let the time pass that these nodes took, all at once."""
        self.clock.pass_s(max(place.client.busy_s for place in places))
        for place in places:
            place.client.busy_s = 0.0

    # -- a start --------------------------------------------------------------------------------------------------

    def open(self) -> list[DiskFacts]:
        """Open every node, and return what the nodes but the first know of their disks."""
        for number in range(self.shape.nodes):
            root = self.base / f"node-{number}"
            root.mkdir(exist_ok=True)
            bus = EventBus()
            retention = Retention(keep_last=_KEEP_LAST)
            node = Node(root, [MirrorSpec(_URL)], retention, bus, workers_per_mirror=0, clock=self.clock)
            client = Client(self.service, _URL, _NODE_BYTES_PER_S * self.random.uniform(0.9, 1.1))
            node.mirrors = [Mirror(_URL, True, client)]
            context = UploadContext(root, node.table, node.mirrors[0], bus, _not_yet)
            self.places.append(Place(node, client, context))
        facts = []
        for place in self.places[1:]:
            place.node.prepare()
            facts.append(place.node.look_at_disk())
        return facts

    def start(self, others: Sequence[DiskFacts]) -> Started:
        """Find the save, claim the run, and begin what follows on every node."""
        self.started += 1
        first = self.places[0]
        began = time.process_time()
        bringer, proposal = self.choose(others)
        choice_s = time.process_time() - began
        claim = bringer.claim(proposal)
        leader = replace(first.client.asked)
        self._pass(first)
        for number, place in enumerate(self.places):
            joined = claim
            if number:
                joined = RunClaim(place.node.root, place.node.table, place.node.mirrors, claim.record, {})
                joined.join(claim.unclaimed)
            forget_brought(place.node.root)
            self._begin(place, joined, bringer)
        self._pass(*self.places)
        facts_bytes = [len(pickle.dumps(one, protocol=pickle.HIGHEST_PROTOCOL)) for one in others]
        size = len(pickle.dumps(proposal, protocol=pickle.HIGHEST_PROTOCOL))
        return Started(self.asked, leader, facts_bytes, proposal, size, choice_s)

    def choose(self, others: Sequence[DiskFacts]) -> tuple[Bringer, Proposal]:
        """Survey every place, and choose what the ranks vote on; this is the leader's part of a start."""
        wish = Wish("auto", None, False, self.shape.ranks)
        bringer = Bringer(self.places[0].node, wish, EventBus(), others)
        return bringer, bringer.next()

    def _begin(self, place: Place, claim: RunClaim, bringer: Bringer) -> None:
        """Do once what ``Node.start`` leaves to its threads."""
        node = place.node
        node.claim = claim
        for save_id, reason in bringer.abandoned.items():
            node.table.skip(save_id, reason)
        node.table.claim_identity(RootIdentity.of(node.root, claim.run_id))
        set_mirrors(node.table, node.specs)
        add_missing_records(node.table, node.specs, node._whole())
        place.context = replace(place.context, confirm=claim.confirm)
        place.audit = MirrorAudit(node.table, node.mirrors, EventBus(), notes=lambda: True)
        carry_on(node.root, node.table, node.mirrors, place.audit)

    def gather(self, proposal: Proposal, *, nodes: int | None = None) -> Asked:
        """Let each node bring what its ranks read; return what that asks of the mirror.

        Args:
            proposal: What the ranks voted for.
            nodes: Only so many nodes do so, and the answer is for all as if they had: they are all alike.
        """
        meta = proposal.meta
        assert meta is not None
        asked = Asked()
        some = self.places[: nodes or len(self.places)]
        for place in some:
            ranks = _Ranks(self.shape, self.places.index(place))
            own_ranks = ranks.node_ranks
            view = View(
                place.node.root, meta, proposal.kind, own_ranks, own_ranks, trusted=proposal.place == DISK, sends=True
            )
            lacks = set(view.begin().lacks)
            own = {one.path for one in artifacts_of(self.shape, ranks.node, meta.step)}
            view.need({path for path in own if path.endswith(".distcp")})
            lacks.update(view.look().lacks)
            for artifact in meta.artifacts:
                if artifact.path in lacks:
                    asked.reads += max(1, -(-artifact.digest.size_bytes // RANGE_BYTES))
                    asked.artifact_bytes += artifact.digest.size_bytes
            discard_view(place.node.root, meta)
        return asked.times(len(self.places) / len(some))

    def facts_peak_bytes(self, facts: Sequence[DiskFacts]) -> int:
        """The memory that the job's leader needs to read what all nodes say, to survey the mirror, and to choose."""
        packed = [pickle.dumps(one, protocol=pickle.HIGHEST_PROTOCOL) for one in facts]

        def choose() -> None:
            _, proposal = self.choose([pickle.loads(one) for one in packed])
            pickle.dumps(proposal, protocol=pickle.HIGHEST_PROTOCOL)

        return peak_bytes(choose)

    # -- a save ---------------------------------------------------------------------------------------------------

    def save(self) -> Asked:
        """Save once on every node, upload it, and rotate; return what that asked of the mirror."""
        before = self.asked
        self.saved += 1
        save_id, step = new_id(), 100 * self.saved
        first = self.places[0].node.claim
        assert first is not None
        for node, place in enumerate(self.places):
            self._write(place, part_of(self.shape, node, step, first.run_id, first.attempt, save_id))
        for place in self.places:  # the rotation thread is woken by each commit
            self._rotate(place)
        self._pass(*self.places)
        self._upload_all()
        return self.asked - before

    def _write(self, place: Place, meta: Meta) -> None:
        node = place.node
        for artifact in meta.artifacts:
            path = node.root / artifact.path
            path.parent.mkdir(exist_ok=True)
            with path.open("xb") as file:
                file.truncate(artifact.digest.size_bytes)
        path = names.SaveName(meta.step).meta
        files = in_order_of_upload(meta)
        node.table.add_save(meta.save_id, meta.step, meta.kinds, files, [_URL], meta_path=path)
        (node.root / path).write_bytes(meta_to_bytes(meta))
        node.table.release_save(meta.save_id)

    def _upload_all(self) -> None:
        """Let every node upload, each at its own time, until all have verified everything."""
        # nodes that commit together do not end together
        queue = [(self.now_s() + self.random.uniform(0.0, 0.1), number) for number in range(len(self.places))]
        heapq.heapify(queue)
        while queue:
            at_s, number = heapq.heappop(queue)
            self.clock.time_ms = max(self.clock.time_ms, round(at_s * 1000))
            place = self.places[number]
            claim = place.node.table.claim("worker", _URL, lease_s=LEASE_S)
            if claim is None:
                waits = [record for record in place.node.table.records() if record.state is not RecordState.VERIFIED]
                if waits:
                    assert all(record.not_before_ms is not None for record in waits), waits
                    due = min(record.not_before_ms or 0 for record in waits)
                    heapq.heappush(queue, (max(due, self.clock.time_ms + 1) / 1000, number))
                continue
            place.client.busy_s = 0.0
            upload_claimed(place.context, claim)
            (record,) = [one for one in place.node.table.records() if one.id == claim.record.id]
            if record.role == "meta" and record.state is RecordState.VERIFIED:
                self._rotate(place)
            heapq.heappush(queue, (at_s + place.client.busy_s, number))
            place.client.busy_s = 0.0

    def _rotate(self, place: Place) -> None:
        """Do what the rotation thread of a node does when it is woken."""
        assert place.node.claim is not None
        place.node.claim.confirm(place.mirror)
        place.node.rotate()


def _not_yet(_mirror: Mirror, _meta: Meta | None = None, *, is_part: bool = False) -> None:
    raise AssertionError("nothing is sent before the claim")


@dataclass(frozen=True)
class _Ranks:
    """The ranks, as the leader of one node sees them."""

    shape: Shape
    node: int

    @property
    def node_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.rank, self.rank + self.shape.ranks_per_node))

    @property
    def rank(self) -> int:
        return self.node * self.shape.ranks_per_node

    @property
    def world_size(self) -> int:
        return self.shape.ranks


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much a forked copy of this process grows at most while it does ``work``."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
            before = _status_kib("VmRSS")
            work()
            os.write(writing, str((_status_kib("VmHWM") - before) * 1024).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child failed"
    return int(found)


def _status_kib(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


@contextmanager
def job_of(shape: Shape, base: Path) -> Iterator[Job]:
    """A job whose first attempt has started, at step 0."""
    job = Job(shape, base)
    try:
        job.start(job.open())
        yield job
    finally:
        job.close()
