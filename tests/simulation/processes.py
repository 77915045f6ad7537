"""Simulated processes: a trainer with its node, and a drain beside it. Each of their moves is one call.

Rules:
* A trainer is the package's own ``Node``, bringer, claim and commit, with its threads left out: a history decides when
  a record is uploaded, when rotation runs.
* A process that died is let go without any of its orderly endings; only what the kernel frees is freed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from ckptmirror.core import events, names
from ckptmirror.core.errors import AttemptFenced, IntegrityError, NoTable, Temporary
from ckptmirror.core.model import Artifact, Attempt, Kind, Meta, new_id
from ckptmirror.core.retention import Retention
from ckptmirror.core.start.decide import Result, Wish
from ckptmirror.core.tensor_lists import is_list
from ckptmirror.flow.drain import _reconcile_if_free
from ckptmirror.flow.places.attempt_lists import met_here, read_mirror_attempts
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.retention.mirror_audit import MirrorAudit
from ckptmirror.flow.retention.reconcile import carry_on, forget_brought
from ckptmirror.flow.retention.rotation import RotationReport, rotate
from ckptmirror.flow.save.commit import commit_save, free_tag
from ckptmirror.flow.start.bring import Bringer, Proposal
from ckptmirror.flow.start.claim import DrainConfirmation, RunClaim, StartOver
from ckptmirror.flow.start.gather import Gathered, View, ask_mirror
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.resume_policy import Policy
from ckptmirror.flow.upload.record import upload_claimed
from ckptmirror.flow.upload.sending import UploadContext
from ckptmirror.local import checksummed_writer, directories, trash
from ckptmirror.local.checksums import verify_file
from ckptmirror.local.uploads import UploadsTable
from tests.kit.saves import plan_files
from tests.simulation.sight import look_at_disk, look_at_mirror, objects_of
from tests.simulation.world import Host, MirrorPlace, World

LEASE_S = 300.0
STARTS_LIMIT = 5


class HandNode(Node):
    """A node whose threads are the test's own hands."""

    def _start_services(self, claim: RunClaim) -> None:
        """Nothing runs by itself."""


class Uploader:
    """What trainer and drain share: a table, and a context for each mirror."""

    def __init__(self, contexts: Sequence[UploadContext], worker: str) -> None:
        self.contexts = contexts
        self.worker = worker

    def upload_one(self, number: int) -> bool:
        """Carry one record of one mirror as far as it goes now; False if there is none to claim."""
        context = self.contexts[number % len(self.contexts)]
        claim = context.table.claim(self.worker, context.mirror.url, lease_s=LEASE_S)
        if claim is None:
            return False
        upload_claimed(context, claim)
        return True


class Trainer:
    """An attempt at the run, on one host."""

    def __init__(self, world: World, host: Host) -> None:
        """Open the node: lock, table, reconcile."""
        self.world = world
        self.host = host
        self.number = 0
        self.last_step = -1
        self.uploads_ended = False
        self.starts_over = 0
        self.known_at_claim: set[str] = set()
        self.met_at_begin: dict[str, bool] = {}
        host.root.mkdir(exist_ok=True)
        self.node = HandNode(host.root, world.specs, Retention(), events.EventBus(), clock=world.clock)
        self.node.mirrors = world.mirrors_for(self._check_write)
        self.uploader = Uploader([], "")

    def resume(self, policy: Policy, force: bool) -> tuple[Meta | None, Kind]:
        """Choose, verify, claim the run: what ``resume_run`` does, without loading."""
        self.known_at_claim = self._listed()
        self.node.prepare()
        bringer = Bringer(self.node, Wish(policy, force=force), events.EventBus())
        for _ in range(STARTS_LIMIT):
            proposal = self._first_sound(bringer)
            self.known_at_claim |= self._listed()
            try:
                claim = bringer.claim(proposal)
                break
            except StartOver as why:
                self.starts_over += 1
                bringer.start_over(why)
        else:
            raise Temporary("Others keep starting.")
        forget_brought(self.host.root)
        self.node.start(claim)
        met = met_here(self.host.root, claim.run_id).attempts
        self.known_at_claim |= {claim.attempt.id, *(attempt.id for attempt in met)}
        self.last_step = proposal.meta.step if proposal.meta is not None else -1
        table = self.node.table
        contexts = [
            UploadContext(self.host.root, table, mirror, events.EventBus(), claim.confirm)
            for mirror in self.node.mirrors
        ]
        self.uploader = Uploader(contexts, f"elsewhere:{self.host.number}:{claim.attempt.id[:8]}")
        return proposal.meta, proposal.kind

    def _first_sound(self, bringer: Bringer) -> Proposal:
        while True:
            proposal = bringer.next()
            if proposal.meta is None:
                return proposal
            found = Gathered()
            try:
                place, found = self._gather(proposal, proposal.meta) if proposal.gathered else (self.host.root, found)
                for artifact in proposal.meta.artifacts_of(proposal.kind):
                    if not is_list(artifact.path):  # it is compared when it is read, and may be lost
                        verify_file(place / artifact.path, artifact.digest)
            except (IntegrityError, FileNotFoundError) as error:
                bringer.reject(proposal, str(error), found.result or Result.BROKEN, found.error)
                continue
            return proposal

    def _gather(self, proposal: Proposal, meta: Meta) -> tuple[Path, Gathered]:
        """Put a save together that no place has whole; return where, and what hindered it."""
        view = View(self.host.root, meta, proposal.kind, {0}, (), trusted=proposal.trusted, sends=True)
        view.begin()
        view.need(None)
        lacks = set(view.look().lacks)
        hindered = Gathered()
        for url, at_place in proposal.sources:
            mirror = next(one for one in self.node.mirrors if one.url == url)
            paths = sorted(lacks & {names.plain(artifact.path) for artifact in at_place.artifacts})
            asked = ask_mirror(mirror, at_place, paths)
            found = (
                view.fetch(mirror, at_place, paths, asked, singly=True) if asked.failed.error is None else asked.failed
            )
            lacks -= found.got
            hindered = found if found.result not in (None, Result.BROKEN) else hindered
        return view.path, hindered

    def _listed(self) -> set[str]:
        """Every attempt that can be known from this host now: of lists, and of metas."""
        seen = [look_at_disk(self.world, self.host.root)]
        seen += [look_at_mirror(self.world, objects_of(place)) for place in self.world.mirrors if not place.down]
        lists = [attempt.id for one in seen if one.attempts is not None for attempt in one.attempts.attempts]
        return {*lists, *(meta.attempt.id for one in seen for meta in one.every)}

    @property
    def claim(self) -> RunClaim:
        assert self.node.claim is not None
        return self.node.claim

    @property
    def attempt(self) -> Attempt:
        return self.claim.attempt

    def save(self, step: int, kinds: tuple[Kind, ...], loss: float) -> Meta | None:
        """Write, seal and commit; None if the attempt is fenced."""
        if self.node.fenced() is not None:
            return None
        self.number += 1
        self.last_step = step
        root, save_id = self.host.root, new_id()
        tag = free_tag(root, step, save_id)
        content = {
            path: random.Random(f"{save_id} {path}").randbytes(40 + len(path) % 7) for path in plan_files(step, kinds)
        }
        truth = self.world.note(save_id, self._meta(step, save_id, kinds, (), tag, loss), content)
        truth.made_on = (self.host.number, self.host.disks_lost)
        try:
            artifacts = [
                self._seal(path, content[names.untagged(path)], needed_by, rank, save_id)
                for path, (needed_by, rank) in plan_files(step, kinds, tag=tag).items()
            ]
            meta = self._meta(step, save_id, kinds, sorted(artifacts, key=lambda artifact: artifact.path), tag, loss)
            truth.meta = meta
            commit_save(root, self.node.table, self.node.specs, meta)
        except Exception:
            trash.remove_temporaries(root, save_id, rank=0, shared=True)
            raise
        truth.acknowledged = True
        self.world.just_acknowledged.append((self.host, save_id))
        return meta

    def _seal(self, path: str, data: bytes, kinds: tuple[Kind, ...], rank: int | None, save_id: str) -> Artifact:
        root = self.host.root
        top, _, below = path.partition("/")
        if below:
            directory = root / names.tmp_name(top, save_id)
            directories.make_dirs(directory)
            with checksummed_writer.ArtifactWriter(directory / below, save_id) as writer:
                writer.write(data)
                digest = writer.publish()
        else:
            with checksummed_writer.ArtifactWriter(root / top, save_id) as writer:
                writer.write(data)
                digest = writer.seal()
        return Artifact(path=path, kinds=kinds, rank=rank, digest=digest)

    def _meta(
        self, step: int, save_id: str, kinds: tuple[Kind, ...], artifacts: Sequence[Artifact], tag: str, loss: float
    ) -> Meta:
        return Meta(
            run_id=self.claim.run_id,
            attempt=self.attempt,
            step=step,
            save_id=save_id,
            save_number=self.number,
            kinds=kinds,
            world_size=1,
            nodes=1,
            node=0,
            artifacts=tuple(artifacts),
            tag=tag,
            metrics={"loss": loss},
        )

    def upload_one(self, number: int) -> bool:
        if self.uploads_ended:
            return False
        self.met_at_begin = {place.url: self._successor_is_listed(place) for place in self.world.mirrors}
        try:
            return self.uploader.upload_one(number)
        except AttemptFenced:
            self.uploads_ended = True
            return True

    def _successor_is_listed(self, place: MirrorPlace) -> bool:
        there, _ = read_mirror_attempts(Mirror(place.url, True, place.behind))
        return there is not None and any(attempt.id not in self.known_at_claim for attempt in there.attempts)

    def _check_write(self, place: MirrorPlace, name: str) -> None:
        """A fenced attempt commits nothing: not once it knows, nor where it had only to ask."""
        parsed = names.parse_name(name)
        if parsed is None or parsed.role != "meta":
            return
        if self.claim.fenced is not None or self.met_at_begin.get(place.url, False):
            # Noted, not raised: an uploader takes any error for a fault of its own.
            self.world.noted.append(f"e: the fenced attempt {self.attempt.number} commits {name} on {place.url}")

    def rotate(self, retention: Retention) -> RotationReport:
        self.node.retention = retention
        return self.node.rotate()

    def carry_on(self) -> None:
        self.node.table.retry_failed()
        carry_on(self.host.root, self.node.table, self.node.mirrors)

    def die(self) -> None:
        """What the kernel frees when a process is killed, and nothing else."""
        self.node.table.close()
        self.node.lock.release()


class Drainer:
    """A drain: another process at the same root, no attempt of its own."""

    def __init__(self, world: World, host: Host) -> None:
        self.host = host
        path = host.root / names.TABLE_NAME
        if not path.exists():
            raise NoTable
        self.table = UploadsTable.open(path, clock=world.clock)
        try:
            self.mirrors = world.mirrors_for(lambda _place, _name: None)
            _reconcile_if_free(host.root, self.table, world.specs, self.mirrors, MirrorAudit(self.table, self.mirrors))
            self.table.retry_failed()
        except BaseException:
            self.table.close()
            raise
        root = host.root
        confirm = DrainConfirmation(root, self.table, self.mirrors)
        contexts = [UploadContext(root, self.table, mirror, events.EventBus(), confirm) for mirror in self.mirrors]
        self.uploader = Uploader(contexts, f"elsewhere:{host.number}:drain")

    def upload_one(self, number: int) -> bool:
        return self.uploader.upload_one(number)

    def rotate(self, retention: Retention) -> RotationReport:
        return rotate(self.host.root, self.table, self.mirrors, retention)

    def die(self) -> None:
        self.table.close()
