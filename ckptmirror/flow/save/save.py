"""Save: makes the host copy at once, and does everything else in the background together with the other ranks.

Rules:
* Only the capture and the host copy block the caller, and callers take turns. One save is in flight; the next waits.
* The background thread exchanges with the other ranks three times, over a channel of its own: what is saved under which
  name, what every rank wrote and holds, and whether the leader committed it. Where there are several nodes, they do so
  twice more: rank 0 says whether ranks hold different values, and all learn whether every node is ready to commit. If
  ranks hold different values, they exchange once more; and if a node that was ready could not commit, so that the
  others take back their parts. A rank that failed takes part with its error, so all ranks fail together.
* The same applies to a rank on which ``save`` itself raises: every call takes a number and an exchange, so the next
  save works. If the capture has collectives (gathering a sharded model), all ranks agree before those as well.
* If a rank left out a call, the others' calls meet its next ones, and none is saved any more. They are not brought
  together again: a rank whose own count of steps is ahead by one save looks the same, and would mix two steps.
* A save that fails leaves nothing behind: each rank removes its own temporaries, the leader the shared ones. Only if
  a rank is gone, or silent, in the exchange after the commit, what was committed stays, since the rest may be there
  too; the next start decides.
* A save that finds the disk full does not stop the training: it is skipped, and the event, the log and the status
  report it at once.
* A save in flight is finished even if the training thread ends: its thread keeps the process alive, and needs no new
  thread and no new import on the way.
* After Ctrl-C anywhere in ``save``, the save either continues in the background or has ended, never in between.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmirror.core import events
from ckptmirror.core.errors import (
    AttemptFenced,
    CkptMirrorError,
    LocalStorageFull,
    LocalStorageUnwritable,
    RanksDiffer,
    StepBehind,
)
from ckptmirror.core.model import Artifact, Attempt, Kind, Meta, new_id
from ckptmirror.core.name_rules import marked
from ckptmirror.core.replica_agreement import digests_of
from ckptmirror.core.save_numbers import number_of_save, number_of_snapshot
from ckptmirror.core.stages import NO_STAGES, Stages
from ckptmirror.core.start.quarantine import is_of_training
from ckptmirror.flow.save.commit import SaveCommit, free_tag, may_be_meta_of
from ckptmirror.flow.save.handle import SaveHandle, TurnLock, follow
from ckptmirror.flow.save.save_parts import (
    TABLE_BROKE,
    Copied,
    LeaderSide,
    NotFiniteDetector,
    Plan,
    ReplicaCheck,
    SaveMetadata,
    SaveRequest,
    StallDetector,
    Written,
    agreed_context,
    holdings_of,
    import_formats,
    reserve_for,
    write_files,
)
from ckptmirror.flow.save.unsaved import UnsavedDetector
from ckptmirror.local import trash
from ckptmirror.local.save_logger import save_logger
from ckptmirror.ranks.base import Ranks, exchange_result

if TYPE_CHECKING:
    from ckptmirror.formats.base import Snapshot, WriteContext
    from ckptmirror.formats.train_state import TrainState
    from ckptmirror.ranks.host_copy import HostCopier

__all__ = ["LeaderSide", "SaveRequest", "Saver"]

_log = logging.getLogger("ckptmirror.save")


class Saver:
    """Saves of one attempt, on one rank.

    Args:
        root: The local root.
        attempt: The attempt that the start claimed.
        ranks: A channel that only this saver's background thread uses.
        leader: Set on the node's leader.
        skipped: A list to which the saver adds saves that find the disk full.
        stages: The stage of each rank.
        renamed: The mark of the ``rename`` that the attempt began with.
        before_each: What this rank has to do before each save; if it fails, the save fails on all ranks.

    Attributes:
        last_step: The newest committed step, including the one resumed from; -1 at a start from scratch.
        before_first: Called with the state of a save until it has not raised once.
    """

    def __init__(
        self,
        root: Path,
        run_id: str,
        attempt: Attempt,
        ranks: Ranks,
        bus: events.EventBus,
        leader: LeaderSide | None,
        skipped: list[SaveHandle],
        stages: Stages = NO_STAGES,
        *,
        renamed: str = "",
        before_each: Callable[[], None] | None = None,
    ) -> None:
        self.root = root
        self.run_id = run_id
        self.attempt = attempt
        self.renamed = renamed
        self.last_step = -1
        self.before_first: Callable[[TrainState], None] | None = None
        self._begun = 0  # the number of the last save that all ranks began
        self._given = 0  # the greatest number of such a save, and of this rank's snapshots
        self._ranks = ranks
        self._bus = bus
        self._leader = leader
        self._skipped = skipped
        self._stages = stages
        self._before_each = before_each
        self._copier: HostCopier | None = None
        self._in_flight: SaveHandle | None = None
        self._turn_lock = TurnLock()
        self._stall_detector = StallDetector()
        self._not_finite = NotFiniteDetector()
        self._unsaved = UnsavedDetector()
        self.replicas = ReplicaCheck()

    # -- on the training thread -----------------------------------------------------------------------------

    def save(self, request: SaveRequest, state: TrainState) -> SaveHandle:
        """Copy ``state`` to host memory and start the save. Blocks for an earlier save in flight and for the copy.

        Raises:
            StepBehind: The step is lower than this attempt's last.
            BackgroundSaveFailed: An earlier save failed, not because the disk was full, and no caller has seen it yet.
            AttemptFenced: A newer attempt of this run has started.
            LoadDiffers: ``before_first`` found that memory no longer held what was loaded.
        """
        return self._turn_lock.run(f"save() of step {request.step}", functools.partial(self._save, request, state))

    def _save(self, request: SaveRequest, state: TrainState) -> SaveHandle:
        self._wait_for_earlier()
        handle = SaveHandle(request.step, request.kinds)
        request = replace(request, number=number_of_save(request.step, self._given))
        # Python raises KeyboardInterrupt at calls: there is none between this and the try.
        earlier, self._in_flight = self._in_flight, handle
        try:
            copied = self._prepare(request, state, earlier)
            handle.copied()
            self._start(functools.partial(self._go_on, handle, request, copied), request, daemon=False)
        except BaseException as error:
            if handle.take():  # else the background has it, and finishes it
                self._give_up(handle, request, error)
            raise
        return handle

    def _prepare(self, request: SaveRequest, state: TrainState, earlier: SaveHandle | None) -> Copied:
        started = time.perf_counter()
        said: SaveMetadata | None = None
        failure: BaseException | None = None
        try:
            self._refuse(request, earlier)
            if self.before_first is not None:
                self.before_first(state)
                self.before_first = None
            import_formats(request.kinds)
            if self._leader is not None:
                said = SaveMetadata.of(request, state)
        except BaseException as error:  # noqa: BLE001 - _capture() raises it again, once the other ranks know
            failure = error
        live = self._capture(request, state, failure)
        try:
            copied = Copied.of(live, self._kept_copier(), said)
        except RecursionError as error:
            from ckptmirror.untrusted.read_limits import too_deep

            raise too_deep({"extra": state.extra}, "") from error
        if self._ranks.rank == 0:
            self._unsaved.look_at(state)
        self._bus.emit(
            events.HostCopied(
                step=request.step, kinds=request.kinds, rank=self._ranks.rank, duration_s=time.perf_counter() - started
            )
        )
        return copied

    def _refuse(self, request: SaveRequest, earlier: SaveHandle | None) -> None:
        if earlier is not None and not earlier.is_told_elsewhere:
            earlier.raise_unobserved()
        if self._before_each is not None:
            self._before_each()
        if request.step < self.last_step:
            raise StepBehind(
                f"Step {request.step} is before step {self.last_step}, which is already saved: steps must increase.",
                hint=f"To go back, start again with manager.resume(state, policy={request.step}).",
            )
        if self._leader is not None and (fenced := self._leader.fenced()) is not None:
            raise AttemptFenced(fenced)

    def _capture(self, request: SaveRequest, state: TrainState, failure: BaseException | None) -> Snapshot:
        """Capture, or raise ``failure``. The other ranks learn of it first: they may be about to begin collectives."""
        from ckptmirror.formats.capture import capture

        def agree(found: BaseException | None) -> None:
            what = f"capture {'+'.join(request.kinds)} for a save"
            self._ranks.exchange(None, what=what, error=failure or found)

        try:
            return capture(
                state,
                step=request.step,
                kinds=request.kinds,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                stages=self._stages,
                before_collectives=agree,
            )
        finally:
            if failure is not None:
                raise failure

    def _start(self, work: Callable[[], object], request: SaveRequest, *, daemon: bool) -> None:
        try:
            threading.Thread(target=work, name=f"ckptmirror-save-{request.step}", daemon=daemon).start()
        except RuntimeError as error:
            save_logger(_log, request).warning(
                "saving step %d in the foreground, while the caller waits: %s", request.step, error
            )
        else:
            return
        work()

    def _give_up(self, handle: SaveHandle, request: SaveRequest, error: BaseException) -> None:
        """End a save that raised: free its buffers, and let the background thread report the error to other ranks."""
        handle.observed()
        self._note_failure(error)
        try:
            if self._copier is not None:
                self._copier.reclaim()
            # A thread that only reports a failure need not keep the process alive.
            self._start(functools.partial(self._in_background, handle, request, error), request, daemon=True)
        except BaseException as second:
            handle.fail(second)
            raise

    def reserve(self, kinds: Sequence[Kind], state: TrainState) -> None:
        """Allocate the host memory for a save of ``state`` now: fresh pages cost far more than the copy into them.

        A thread faults them in while training begins. Calls no other rank, and no method of the user's objects, which
        may not be ready. A failure is only logged.
        """
        try:
            reserve_for(self._kept_copier(), kinds, state, self._ranks, self._stages)
        except CkptMirrorError as error:
            _log.warning("the memory for the first save was not allocated in advance: %s", error)

    def take_number_of_snapshot(self, step: int) -> int:
        """Return the number of an emergency snapshot; the saves after it get greater ones."""
        number = number_of_snapshot(step, self._begun)
        self._given = max(self._given, number)
        return number

    def wait_over(self, timeout_s: float) -> None:
        """Wait until no save is in flight, and raise a failure that no caller has seen."""
        if (last := self._in_flight) is not None:
            last.wait_over(timeout_s)
            last.raise_unobserved()

    @property
    def in_flight(self) -> SaveHandle | None:
        """The save in flight, if there is one."""
        return self._in_flight if self._in_flight is not None and not self._in_flight.is_over else None

    @property
    def last(self) -> SaveHandle | None:
        """The last save that was called, in flight or over; perhaps the one that :meth:`follow` was given."""
        return self._in_flight

    def end(self, timeout_s: float) -> None:
        """Take no more saves, and wait for the last one as :meth:`wait_over` does."""
        self._turn_lock.end(timeout_s)
        self.wait_over(timeout_s)

    def settle(self, timeout_s: float) -> SaveHandle | None:
        """End, and free the kept buffers. Return the last save: its failure may be known to some ranks only."""
        self._turn_lock.end(timeout_s)
        if self._in_flight is not None:
            self._in_flight.wait_over(timeout_s)
        self.release()
        return self._in_flight

    def follow(self, earlier: SaveHandle | None) -> None:
        """Continue after the last save of the previous attempt. If it failed and no caller saw it, raise that later."""
        self._in_flight = earlier

    def release(self) -> None:
        """Free the kept buffers."""
        if self._copier is not None:
            self._copier.release()

    def _wait_for_earlier(self) -> None:
        earlier = self._in_flight
        if earlier is None:
            return
        if not earlier.is_over and not earlier._observed:  # a save that raised in its caller is not being written
            save_logger(_log, earlier).warning(
                "step %d is still being written: the next save waits. Save less often, or give the root a faster disk.",
                earlier.step,
            )
        earlier.wait_over()

    def _kept_copier(self) -> HostCopier:
        if self._copier is None:
            from ckptmirror.ranks.host_copy import HostCopier

            self._copier = HostCopier()
        return self._copier

    # -- on the background thread ---------------------------------------------------------------------------

    def _go_on(self, handle: SaveHandle, request: SaveRequest, copied: Copied) -> None:
        if handle.take():  # otherwise Ctrl-C hit the training thread, which gave the save up
            self._in_background(handle, request, copied)

    def _in_background(self, handle: SaveHandle, request: SaveRequest, copied: Copied | BaseException) -> None:
        started = time.perf_counter()
        context: WriteContext | None = None
        try:
            try:
                context, copied, request = self._agree(request, copied)
                handle.save_id = context.save_id
                artifacts = self._write_all(copied, context)
                meta = self._commit(handle, request, copied, context, artifacts)
            finally:
                if isinstance(copied, Copied):
                    copied.lease.release()
        except BaseException as error:  # noqa: BLE001 - every failure, of any kind, must reach the caller of save()
            if context is not None:
                self._remove_own_temporaries(context)
            self._fail(handle, request, error)
            return
        try:
            self.last_step = request.step
            follow(self._skipped)
            if meta is not None and self._leader is not None:
                self._leader.on_commit(meta)  # before close() can continue: it changes the root
        finally:
            handle.reach("committed")
        if names := self._not_finite.committed():
            self._bus.emit(events.NotFinite(step=request.step, rank=self._ranks.rank, path=names))
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

    def _fail(self, handle: SaveHandle, request: SaveRequest, error: BaseException) -> None:
        is_skipped = isinstance(error, CkptMirrorError) and error.lacks_room
        event = events.SaveSkipped if is_skipped else events.SaveFailed
        reason = str(error) if is_skipped else handle.why_failed(error)
        self._bus.emit(event(step=request.step, kinds=request.kinds, rank=self._ranks.rank, reason=reason))
        try:
            self._note_failure(error)
            if is_skipped and self._leader is not None:
                self._leader.on_skipped(request.step, str(error))
        finally:
            if is_skipped:  # a new error: the frames of this one hold the host copy, and skipped saves are kept
                error = LocalStorageFull(str(error), hint=getattr(error, "hint", None))
                self._skipped.append(handle)
            handle.fail(error)

    def _note_failure(self, error: BaseException) -> None:
        if self._leader is not None and isinstance(error, CkptMirrorError) and not is_of_training(error):
            self._leader.on_failed()

    def _agree(self, request: SaveRequest, copied: Copied | BaseException) -> tuple[WriteContext, Copied, SaveRequest]:
        """Do the first exchange: ranks check that they save the same, and share rank 0's save id and the node's tag.

        The save gets the greatest number of all.
        """
        save_id = new_id()
        free = True
        failure = copied if isinstance(copied, BaseException) else None
        try:
            if self._ranks.is_leader and failure is None:
                is_taken = self._leader is not None and request.step in self._leader.taken_steps
                free = not (is_taken or free_tag(self.root, request.step, save_id))
        except OSError as error:
            failure = LocalStorageUnwritable(f"{self.root} cannot be listed: {error.strerror}.")
        plan = Plan(
            request.step,
            request.kinds,
            request.number,
            save_id if self._ranks.rank == 0 else "",
            free,
            holdings_of(copied),
            self._said(copied),
            "dcp" in request.kinds and self._ranks.lost_torch_group,
        )
        plans = self._ranks.exchange(plan, what="agree on a save", error=failure)
        assert isinstance(copied, Copied)
        request = replace(request, number=max(plan.number for plan in plans))
        self._begun, self._given = request.number, max(self._given, request.number)
        if any(plan.is_cut for plan in plans):
            exchange_result(self._ranks, self._ranks.renew_torch_group, what="connect the ranks again for a save")
        if self._ranks.is_leader and plans[0].said is not None:
            copied = replace(copied, said=plans[0].said)
        try:
            context = agreed_context(plans, self.root, self._ranks, self._stages)
        except RanksDiffer:
            self.replicas.differ = True
            raise
        return context, copied, request

    def _said(self, copied: Copied | BaseException) -> SaveMetadata | None:
        is_for_all = self._ranks.nodes > 1 and self._ranks.rank == 0
        return copied.said if is_for_all and isinstance(copied, Copied) else None

    def _write_all(self, copied: Copied, context: WriteContext) -> list[Artifact]:
        """Write and seal this rank's files, and return this node's.

        Second exchange: ranks report their files to those of their node, and what they hold to rank 0.
        """
        mine = Written()
        failure: BaseException | None = None
        try:
            mine = write_files(copied, context)
            self._not_finite.look_at(copied.snapshot)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
        what = f"report the files of step {context.name.step}"
        report = (mine.artifacts, mine.listed, digests_of(mine.held))
        reports = self._ranks.gather(report, what=what, to="node", error=failure)
        self.replicas.compare(self._ranks, mine.held, [digests for *_, digests in reports.values()], context)
        of_node = [reports[rank] for rank in self._ranks.node_ranks]
        self._stall_detector.look_at(listed for _, listed, _ in of_node)
        return [artifact for artifacts, *_ in of_node for artifact in artifacts]

    def _commit(
        self,
        handle: SaveHandle,
        request: SaveRequest,
        copied: Copied,
        context: WriteContext,
        artifacts: list[Artifact],
    ) -> Meta | None:
        """Commit, on each node's leader. Third exchange: all ranks learn whether they did.

        Where there are several nodes, all learn before it whether every node is ready to. If the exchange fails, the
        handle learns whether this node's part stays.
        """
        commit: SaveCommit | None = None
        meta: Meta | None = None
        failure: BaseException | None = None
        if self._leader is not None:
            try:
                commit = self._prepared(self._leader, request, copied, context, artifacts)
            except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
                failure = error
        if self._ranks.nodes > 1:
            try:
                self._ranks.exchange(None, what=f"prepare the commit of step {request.step}", error=failure)
            except BaseException:
                if commit is not None:
                    commit.take_back()
                raise
        if commit is not None:
            try:
                commit.publish()
                meta = commit.meta
                self._stall_detector.committed(meta)
            except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
                failure = error
        leads, meta_path = self._leader is not None, self.root / context.name.meta
        has_part = meta is not None or (leads and may_be_meta_of(meta_path, context.save_id))
        if has_part:
            self.last_step = request.step  # even if the exchange fails
        try:
            self._ranks.exchange(None, what=f"commit step {request.step}", error=failure)
        except BaseException:
            is_torn = self._is_torn(request.step, has_part=has_part or not leads)
            if commit is not None and meta is not None:
                if is_torn:
                    commit.withdraw()
                else:
                    commit.release()
            may_follow = not (leads or is_torn or self._ranks.nodes == 1)  # this node's leader may yet publish
            handle.stays = may_follow or may_be_meta_of(meta_path, context.save_id)
            raise
        if commit is not None:
            commit.release()
        return meta

    def _is_torn(self, step: int, *, has_part: bool) -> bool:
        """Whether a node certainly has no part of a save that failed, so that the save can never be whole."""
        if self._ranks.nodes == 1:
            return False
        try:
            return not all(self._ranks.exchange(has_part, what=f"learn which nodes committed step {step}"))
        except CkptMirrorError:  # a rank is gone: what its node has is not known
            return False

    def _prepared(
        self,
        leader: LeaderSide,
        request: SaveRequest,
        copied: Copied,
        context: WriteContext,
        artifacts: list[Artifact],
    ) -> SaveCommit:
        from ckptmirror.formats import get_format

        for kind in context.kinds:
            get_format(kind).check(context, artifacts)
        assert copied.said is not None
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
            training_config=copied.said.config,
            architecture_hash=marked(copied.snapshot.architecture if context.stage is None else None, self.renamed),
            metrics=copied.said.metrics,
            fields=copied.said.fields,
            created_at_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if (fenced := leader.fenced()) is not None:
            raise AttemptFenced(fenced)
        commit = SaveCommit(self.root, leader.table, leader.mirrors, meta)
        try:
            commit.prepare()
        except TABLE_BROKE as error:  # no file has its final name yet: rebuild the table, once
            leader.recreate_table(error)
            commit.prepare()
        return commit

    def _remove_own_temporaries(self, context: WriteContext) -> None:
        """Remove this rank's temporaries, on the leader also the shared ones. An error here is only logged."""
        try:
            trash.remove_temporaries(self.root, context.save_id, rank=context.rank, shared=context.is_leader)
        except (OSError, CkptMirrorError) as error:
            save_logger(_log, context.name).warning(
                "temporaries of step %d stay until the next start: %s", context.name.step, error
            )
