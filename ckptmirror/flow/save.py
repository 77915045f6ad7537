"""Save: host copy now, everything else in the background, in step with the other ranks.

Rules:
* Only the capture and the host copy block the training thread. One save is in flight; the next waits for its commit.
* The background thread talks to the other ranks over a channel of its own, three times: what is saved under which
  name, what every rank wrote, whether it is committed. A rank that failed takes part with its error, so all ranks fail
  together.
* That holds for a rank on which ``save`` itself raises too: every call takes a number and an exchange, so the ranks
  stay in step and the next save works. Where the capture has collectives (the whole model of a sharded one), they agree
  before those as well.
* A save that fails leaves nothing behind: each rank removes its own temporaries, the leader the shared ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core import events, names
from ckptmirror.core.codec import finite_metrics, plain_values
from ckptmirror.core.errors import AttemptFenced, CkptMirrorError, LocalStorageUnwritable, RankFailed, StepBehind
from ckptmirror.core.model import Artifact, Attempt, Kind, Meta, new_id
from ckptmirror.flow.commit import commit_save, free_tag
from ckptmirror.flow.handle import SaveHandle
from ckptmirror.flow.save_parts import TABLE_BROKE, Copied, LeaderSide, Plan, SaveRequest
from ckptmirror.local import files
from ckptmirror.ranks.base import Ranks

if TYPE_CHECKING:
    from ckptmirror.formats.base import Snapshot, WriteContext
    from ckptmirror.formats.train_state import TrainState
    from ckptmirror.ranks.host_copy import HostCopier, Lease

__all__ = ["LeaderSide", "SaveRequest", "Saver"]

_ROOM_FOR_EXTRA_BYTES = 16 * 1024 * 1024
_log = logging.getLogger("ckptmirror.save")


class Saver:
    """Saves of one attempt, on one rank.

    Args:
        root: The local root.
        attempt: This attempt, decided.
        ranks: A channel that only this saver's background thread uses.
        leader: Set on the node's leader.

    Attributes:
        last_step: The newest step of this attempt, the one it resumed from included; -1 at a start from scratch.
    """

    def __init__(
        self, root: Path, run_id: str, attempt: Attempt, ranks: Ranks, bus: events.EventBus, leader: LeaderSide | None
    ) -> None:
        self.root = root
        self.run_id = run_id
        self.attempt = attempt
        self.last_step = -1
        self._number = 0
        self._ranks = ranks
        self._bus = bus
        self._leader = leader
        self._copier: HostCopier | None = None
        self._in_flight: SaveHandle | None = None
        self._previous: tuple[int, tuple[int, ...]] = (-1, ())  # step and sums of the last save's tensors

    # -- on the training thread -----------------------------------------------------------------------------

    def save(self, request: SaveRequest, state: TrainState) -> SaveHandle:
        """Copy ``state`` to host memory and start the save. Blocks for an earlier save in flight and for the copy.

        Raises:
            StepBehind: The step is lower than this attempt's last.
            BackgroundSaveFailed: An earlier save failed and nobody has been told.
            AttemptFenced: A newer attempt of this run has started.
        """
        self._wait_for_earlier()
        earlier = self._in_flight
        request = replace(request, number=self.next_number())
        handle = self._in_flight = SaveHandle(request.step, request.kinds)
        try:
            copied = self._prepare(request, state, earlier)
        except BaseException as error:
            handle.observed()
            self._start(handle, request, error)
            raise
        handle.reach("copied")
        self.last_step = request.step
        self._start(handle, request, copied)
        return handle

    def _prepare(self, request: SaveRequest, state: TrainState, earlier: SaveHandle | None) -> Copied:
        if earlier is not None:
            earlier.raise_unobserved()
        if request.step < self.last_step:
            raise StepBehind(
                f"Step {request.step} is behind step {self.last_step}, which this attempt saved already: that would be "
                "a rewind, and a rewind is a new attempt."
            )
        if self._leader is not None and (fenced := self._leader.fenced()) is not None:
            raise AttemptFenced(fenced)
        started = time.perf_counter()
        snapshot, lease = self._copy(request, state)
        self._bus.emit(
            events.HostCopied(
                step=request.step, kinds=request.kinds, rank=self._ranks.rank, duration_s=time.perf_counter() - started
            )
        )
        return Copied(snapshot, lease, dict(state.training_config or {}))

    def _start(self, handle: SaveHandle, request: SaveRequest, copied: Copied | BaseException) -> None:
        thread = threading.Thread(
            target=self._in_background,
            args=(handle, request, copied),
            name=f"ckptmirror-save-{request.step}",
            daemon=isinstance(copied, BaseException),  # what only says that it failed need not keep the process alive
        )
        try:
            thread.start()
        except RuntimeError as error:
            if isinstance(copied, Copied):
                copied.lease.release()
            handle.observed()
            handle.fail(error)
            raise

    def reserve(self, kinds: Sequence[Kind], state: TrainState) -> None:
        """Take now the host memory that a save of ``state`` needs: fresh pages cost far more than the copy into them.

        Talks to no other rank, and asks neither a data loader nor the user's objects, which may not like it now: room
        for their state is guessed. A failure is only logged: the save finds out again.
        """
        from ckptmirror.formats.capture import capture, capture_local, snapshot_tree

        rank, world_size = self._ranks.rank, self._ranks.world_size
        state = replace(state, scheduler=None, scaler=None, dataloader=None, extra=None)
        try:
            live = capture_local(state, step=0, rank=rank)
            if live.sharded and "model" in kinds:
                return  # how much rank 0 gathers shows when all ranks capture together
            if not live.sharded:
                live = capture(state, step=0, kinds=kinds, rank=rank, world_size=world_size)
            self._kept_copier().reserve(snapshot_tree(live), more_bytes=_ROOM_FOR_EXTRA_BYTES)
        except CkptMirrorError as error:
            _log.warning("the memory for the first save was not taken yet: %s", error)

    def next_number(self) -> int:
        """Take the number of the next save of this attempt."""
        self._number += 1
        return self._number

    def wait_over(self, timeout_s: float) -> None:
        """Wait until no save is in flight, and raise a failure that nobody has seen."""
        if self._in_flight is not None:
            self._in_flight.wait_over(timeout_s)
            self._in_flight.raise_unobserved()

    def settle(self, timeout_s: float) -> None:
        """Wait until no save is in flight and free the kept buffers; a failure is in the log.

        It is not raised: it may be news to some of the ranks only, and all of them are about to act together.
        """
        if self._in_flight is not None:
            self._in_flight.wait_over(timeout_s)
        self.release()

    def release(self) -> None:
        """Free the kept buffers."""
        if self._copier is not None:
            self._copier.release()

    def _wait_for_earlier(self) -> None:
        earlier = self._in_flight
        if earlier is None:
            return
        if not earlier.done() and earlier._error is None:
            _log.warning(
                "step %d is still being written: the next save waits. Save less often, or give the root a faster disk.",
                earlier.step,
            )
        earlier.wait_over()

    def _copy(self, request: SaveRequest, state: TrainState) -> tuple[Snapshot, Lease]:
        from ckptmirror.formats.capture import capture, snapshot_from_tree, snapshot_tree

        def agree(failure: BaseException | None) -> None:
            self._ranks.exchange(None, what=f"capture step {request.step}", error=failure)

        live = capture(
            state,
            step=request.step,
            kinds=request.kinds,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            before_collectives=agree,
        )
        lease = self._kept_copier().copy(snapshot_tree(live))
        try:
            return snapshot_from_tree(lease.tree), lease
        except BaseException:
            lease.release()
            raise

    def _kept_copier(self) -> HostCopier:
        if self._copier is None:
            from ckptmirror.ranks.host_copy import HostCopier

            self._copier = HostCopier()
        return self._copier

    # -- on the background thread ---------------------------------------------------------------------------

    def _in_background(self, handle: SaveHandle, request: SaveRequest, copied: Copied | BaseException) -> None:
        started = time.perf_counter()
        context: WriteContext | None = None
        try:
            try:
                context, copied = self._agree(request, copied)
                handle.save_id = context.save_id
                artifacts = self._write_all(copied.snapshot, context)
                meta = self._commit(request, copied, context, artifacts)
            finally:
                if isinstance(copied, Copied):
                    copied.lease.release()
        except BaseException as error:  # noqa: BLE001 - every failure, of any kind, must reach the caller of save()
            if context is not None:
                self._remove_own_temporaries(context)
            _log.error("the save of step %d failed: %s", request.step, error)
            self._bus.emit(
                events.SaveFailed(step=request.step, kinds=request.kinds, rank=self._ranks.rank, reason=str(error))
            )
            handle.fail(error)
            return
        try:
            if meta is not None and self._leader is not None:
                self._leader.on_commit(meta)  # before close() can go on: it changes the root
        finally:
            handle.reach("committed")
        self._bus.emit(
            events.SaveCommitted(
                step=request.step,
                kinds=request.kinds,
                rank=self._ranks.rank,
                save_id=context.save_id,
                size_bytes=sum(artifact.digest.size_bytes for artifact in artifacts),
                duration_s=time.perf_counter() - started,
            )
        )

    def _agree(self, request: SaveRequest, copied: Copied | BaseException) -> tuple[WriteContext, Copied]:
        """First exchange: every rank has its copy, the same request on each, the save id of rank 0, the node's tag."""
        from ckptmirror.formats.base import WriteContext

        save_id = new_id()
        free = True
        failure = copied if isinstance(copied, BaseException) else None
        try:
            if self._ranks.is_leader and failure is None:
                free = not free_tag(self.root, request.step, save_id)
        except OSError as error:
            failure = LocalStorageUnwritable(f"{self.root} cannot be listed: {error.strerror}.")
        plans = self._ranks.exchange(
            Plan(request, save_id, free), what=f"agree on a save (number {request.number})", error=failure
        )
        assert isinstance(copied, Copied)
        for rank, plan in enumerate(plans):
            theirs, ours = plan.request, request
            if (theirs.step, theirs.kinds, theirs.number) != (ours.step, ours.kinds, ours.number):
                raise RankFailed(
                    f"Rank {rank} saves step {theirs.step} {theirs.kinds} as its save {theirs.number}, while rank "
                    f"{self._ranks.rank} saves step {ours.step} {ours.kinds} as its save {ours.number}.",
                    hint="Call save() with the same step and kinds on every rank.",
                )
        chosen = plans[0]
        leader_of_node = self._ranks.rank - self._ranks.local_rank
        tag = "" if plans[leader_of_node].free else chosen.save_id[:8]
        context = WriteContext(
            root=self.root,
            name=names.SaveName(request.step, tag),
            save_id=chosen.save_id,
            kinds=request.kinds,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            is_leader=self._ranks.is_leader,
            torch_group=self._ranks.torch_group,
        )
        return context, copied

    def _write_all(self, snapshot: Snapshot, context: WriteContext) -> list[Artifact]:
        """Write and seal this rank's files; second exchange: every rank's report."""
        from ckptmirror.formats import get_format
        from ckptmirror.formats.sidecars import write_sidecars

        mine: list[Artifact] = []
        failure: BaseException | None = None
        try:
            for kind in context.kinds:
                mine += get_format(kind).write(snapshot, context)
            mine += write_sidecars(snapshot, context)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
        reports = self._ranks.exchange(mine, what=f"report the files of step {context.name.step}", error=failure)
        return [artifact for report in reports for artifact in report]

    def _commit(
        self,
        request: SaveRequest,
        copied: Copied,
        context: WriteContext,
        artifacts: list[Artifact],
    ) -> Meta | None:
        """The leader commits; third exchange: all ranks learn whether it did."""
        meta: Meta | None = None
        failure: BaseException | None = None
        if self._leader is not None:
            try:
                meta = self._lead(self._leader, request, copied, context, artifacts)
            except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
                failure = error
        self._ranks.exchange(None, what=f"commit step {request.step}", error=failure)
        return meta

    def _lead(
        self,
        leader: LeaderSide,
        request: SaveRequest,
        copied: Copied,
        context: WriteContext,
        artifacts: list[Artifact],
    ) -> Meta:
        from ckptmirror.formats import get_format
        from ckptmirror.formats.capture import architecture_hash

        for kind in context.kinds:
            get_format(kind).check(context, artifacts)
        metrics, dropped = finite_metrics(request.metrics)
        if dropped:
            _log.warning("step %d: the metrics %s are not finite and are left out", request.step, ", ".join(dropped))
        meta = Meta(
            run_id=self.run_id,
            attempt=self.attempt,
            step=request.step,
            save_id=context.save_id,
            save_number=request.number,
            kinds=request.kinds,
            world_size=self._ranks.world_size,
            nodes=self._ranks.nodes,
            node=self._ranks.node,
            artifacts=tuple(sorted(artifacts, key=lambda artifact: artifact.path)),
            tag=context.name.tag,
            training_config=plain_values(copied.config),
            architecture_hash=architecture_hash(copied.snapshot),
            metrics=metrics,
            fields=plain_values(request.fields),
            created_at_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if (fenced := leader.fenced()) is not None:
            raise AttemptFenced(fenced)
        try:
            commit_save(self.root, leader.table, leader.mirrors, meta)
        except TABLE_BROKE as error:  # before anything got its name: the table is made anew, once
            leader.renew_table(error)
            commit_save(self.root, leader.table, leader.mirrors, meta)
        self._warn_if_identical(meta)
        return meta

    def _warn_if_identical(self, meta: Meta) -> None:
        """Two saves with the same tensors at different steps mean that training stands still."""
        fingerprint = tuple(
            artifact.digest.crc32c
            for artifact in meta.artifacts
            if (parsed := names.parse_name(artifact.path)) is not None and parsed.role == "tensors"
        )
        earlier, self._previous = self._previous, (meta.step, fingerprint)
        if fingerprint and earlier[1] == fingerprint and earlier[0] != meta.step:
            _log.warning(
                "step %d holds exactly the tensors of the save before it: is the optimizer stepping?", meta.step
            )

    def _remove_own_temporaries(self, context: WriteContext) -> None:
        """Remove this rank's temporaries (the leader's shared ones too); the first error stays the one reported."""
        try:
            files.remove_temporaries(self.root, context.save_id, rank=context.rank, shared=context.is_leader)
        except (OSError, CkptMirrorError) as error:
            _log.warning("temporaries of step %d stay until the next start: %s", context.name.step, error)
