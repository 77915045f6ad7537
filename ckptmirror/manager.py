"""CheckpointManager: the object that a training loop uses.

Every rank creates one with the same arguments. It connects the parts and decides nothing itself: ``flow/save/save.py``
saves, ``flow/start/resume.py`` resumes, and ``flow/start/leader.py`` does what only the node's leader does.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from ckptmirror import __version__
from ckptmirror.arguments import (
    agreed_options,
    check_alike,
    check_kinds_of_stages,
    checked_kinds,
    checked_loss,
    checked_settings,
    checked_step,
    node_key,
    refuse,
    stop_event,
)
from ckptmirror.core import events, signing
from ckptmirror.core.command_changes import checked_wins
from ckptmirror.core.errors import (
    BackgroundSaveFailed,
    CkptMirrorError,
    DeadlinePassed,
    UsageError,
    WaitTimeout,
)
from ckptmirror.core.load_options import LoadOptions, checked_parts
from ckptmirror.core.model import SAVED_KINDS, Kind
from ckptmirror.core.name_rules import Rename, name_rules, parts_alone
from ckptmirror.core.per_rank import check_patterns
from ckptmirror.core.retention import Retention
from ckptmirror.core.setting_checks import checked_seconds
from ckptmirror.core.stages import stages_of
from ckptmirror.core.start.quarantine import is_of_training
from ckptmirror.flow.fetch.load_state import Reference, ResumeInfo, load_state
from ckptmirror.flow.mirror_wait import MirrorWait
from ckptmirror.flow.places.mirrors import MirrorSpec
from ckptmirror.flow.save.emergency import save_emergency
from ckptmirror.flow.save.handle import DEFAULT_WAIT_S, SaveHandle, follow, raise_skipped
from ckptmirror.flow.save.save import LeaderSide, Saver, SaveRequest
from ckptmirror.flow.save.save_parts import import_formats
from ckptmirror.flow.start.disk_room import say_if_disk_is_small
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.resume import resume_run
from ckptmirror.flow.start.resume_policy import Policy, policy_text
from ckptmirror.flow.status import Status, read_status
from ckptmirror.formats.train_state import check_is_state, check_state
from ckptmirror.local.lock import RankLock
from ckptmirror.local.root_probe import RootProbe
from ckptmirror.local.save_logger import save_logger
from ckptmirror.observe.journal import Journal
from ckptmirror.observe.log import LogListener, log_failure
from ckptmirror.ranks import Ranks, StopRequest, open_ranks

if TYPE_CHECKING:
    from ckptmirror.flow.fetch.unchanged_check import UnchangedCheck
    from ckptmirror.flow.retention.rotation import RotationReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["CheckpointManager"]

_log = logging.getLogger("ckptmirror")
_LEAVING_SAVE_S, _LEAVING_TELL_S = 60.0, 10.0


class CheckpointManager:
    """Saves to fast local disk with almost no stall, mirrors every save, deletes only what is safe, resumes exactly.

    Args:
        root: Directory on local disk that this run saves to; one root per run. All ranks of a node pass the same one;
            on several nodes each has its own.
        mirrors: URLs (``gs://bucket/prefix``, ``file:///nfs/…``), or :class:`MirrorSpec`.
        kinds: What ``save`` writes: ``"dcp"``, ``"model"`` or both.
        retention: What to keep locally. A save is deleted only when it is provably on every required mirror.
        process_group: The ranks that save together; by default all. The manager creates its own groups from these ranks
            and never uses collectives of this group.
        pp_rank: The number of the part of the model that this rank holds, if ranks hold different parts of it, as
            pipeline stages do. Ranks with one number hold the same part. All parts are one save, of kind ``"dcp"``.
        mode: ``"async"`` returns after the host copy; ``"blocking"`` after the commit.
        state_dir: Node-local directory for the uploads table, if root is on a network file system.
        persistent_dir: Directory that outlives this machine, one per run. Emergency snapshots are also copied there,
            and brought back from there.
        workers_per_mirror: Upload threads for each mirror.
        share_downloads: At a start of several nodes, let one node fetch what several need, and the others get it from
            there. What rank 0 passes counts for all.
        timeout_s: Limit of every wait for another rank, in seconds.
        signing_key: PEM file with the Ed25519 private key of the run. Every save, and the list of attempts, is signed.
        verify_keys: PEM files with public keys. Only what one of them signed is believed, by the whole process: see
            :func:`ckptmirror.use_keys`.

    Raises:
        ConfigError: A setting is wrong, the root cannot be written, a mirror URL is not understood.
        RootLocked: Another live process writes to this root.
    """

    def __init__(
        self,
        root: str | Path,
        mirrors: Iterable[str | MirrorSpec] = (),
        *,
        kinds: Sequence[Kind] = SAVED_KINDS,
        retention: Retention | None = None,
        process_group: Any = None,
        pp_rank: int | None = None,
        mode: Literal["async", "blocking"] = "async",
        state_dir: str | Path | None = None,
        persistent_dir: str | Path | None = None,
        workers_per_mirror: int = 2,
        share_downloads: bool = False,
        timeout_s: float = 600.0,
        signing_key: str | Path | None = None,
        verify_keys: Iterable[str | Path] = (),
    ) -> None:
        try:
            given = checked_settings(
                root,
                mirrors,
                kinds=kinds,
                retention=retention,
                pp_rank=pp_rank,
                mode=mode,
                state_dir=state_dir,
                persistent_dir=persistent_dir,
                workers_per_mirror=workers_per_mirror,
                timeout_s=timeout_s,
                signing_key=signing_key,
                verify_keys=verify_keys,
            )
        except Exception as error:
            refuse(error, process_group, timeout_s)
            raise
        self.root, self.kinds, self.mode = given.root, given.kinds, given.mode
        self.events = events.EventBus(on_failure=log_failure)
        self.events.subscribe(LogListener(self.root))
        self.events.subscribe(Journal(self.root, "trainer"))
        self._specs, self._urls = given.specs, [spec.url for spec in given.specs]
        self._state_dir, self._persistent_dir = given.state_dir, given.persistent_dir
        self._node: Node | None = None
        self._rank_lock: RankLock | None = None
        self._saver: Saver | None = None
        self._last_before: SaveHandle | None = None  # last save of the previous attempt of this process
        self._pid = os.getpid()
        self._skipped: list[SaveHandle] = []  # for lack of room
        self._snapshot_step = -1
        self._mirror_wait = MirrorWait(self.root, self._specs, self._state_dir)
        self._unchanged: UnchangedCheck | None = None
        self._closed = False
        self._freed = False
        self._left_pending: DeadlinePassed | None = None  # what close() raised, to raise again
        own_key, failure = node_key(self.root)
        self.ranks: Ranks = open_ranks(
            process_group, node_key=own_key, probe=RootProbe(self.root), timeout_s=given.timeout_s
        )
        self._save_ranks = self.ranks.channel("save")
        try:
            if self.ranks.is_leader and failure is None:
                self._node = Node(
                    self.root,
                    self._specs,
                    given.retention,
                    self.events,
                    state_dir=self._state_dir,
                    persistent_dir=self._persistent_dir,
                    workers_per_mirror=workers_per_mirror,
                    share_downloads=share_downloads,
                    wait_s=self.ranks.timeout_s / 2,  # the other ranks wait meanwhile, and shall hear its error
                )
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
        try:
            said = {
                "version": __version__,
                "mirrors": ", ".join(f"{one.url}{'' if one.required else ' (optional)'}" for one in self._specs),
                "kinds": ", ".join(self.kinds),
                "verify_keys": ", ".join(signing.current().verify_keys),
                "persistent_dir": str(self._persistent_dir or ""),
                "signing_key": signing.signer(),
            }
            mine = said if self.ranks.is_leader else None
            met = self.ranks.exchange((mine, given.stage), what="open the root", error=failure)
            check_alike([settings for settings, _ in met])
            self._stages = stages_of([stage for _, stage in met])
            if self._node is None:
                self._rank_lock = RankLock(self.root)
                self._rank_lock.acquire()
        except BaseException:
            if self._node is not None:
                self._node.close()
            self._save_ranks.close()
            self.ranks.close()
            raise
        atexit.register(self._warn_that_it_was_not_closed)

    # -- start ----------------------------------------------------------------------------------------------

    def resume(
        self,
        state: TrainState,
        policy: Policy = "auto",
        *,
        force: bool = False,
        exclude: Collection[str] = (),
        rename: Rename | None = None,
        strict: bool = True,
        command_wins: Collection[str] = (),
        allow_cold_optimizer: bool = False,
        verify_loaded: bool = True,
    ) -> ResumeInfo | None:
        """Load the newest whole save of the lineage into ``state``; None means that training starts at step 0.

        Call it once at every start, before the first save. The same command then starts a run and resumes it. If the
        disk cannot hold ``keep_last`` saves of this state and one more, it logs a warning.

        Args:
            state: What to load into.
            policy: ``"auto"``; a step, ``"latest"``, a save id or the path of a save in ``root`` (going back to an
                older save is a rewind: it takes the later saves off the lineage); or ``"scratch"``, with ``force=True``
                if there are saves. Where training began there before by such a decision, and has saved since, the same
                command was started again, and continues from the newest save.
            force: Start from scratch although there are saves; go back to a save although training began there before.
            exclude: Parts of the state to leave unchanged, with a warning: names of ``TrainState``, ``"rng"``, and
                patterns of the model's tensors such as ``"model.head.*"``.
            rename: The names that tensors of the save have in the model: patterns, ``{"old.*": "new.*"}``, or a
                function of a saved name. The optimizer's state follows.
            strict: Whether every tensor of save and model has to be in the other, as in ``load_state_dict``.
            command_wins: Settings of optimizers and schedulers, such as ``"lr"``, that are this command's after the
                load; all others are the save's. A rate goes on from its place in the schedule, with the new base.
            allow_cold_optimizer: Whether to go on if only the save has state of an optimizer, or only ``state`` has an
                optimizer, which then starts without history.
            verify_loaded: Whether to compare each tensor in memory with what was saved, after the load, and the
                parameters and the optimizer's state with what was loaded, before the first step or in the first save.
                Turn it off if a ``load_state_dict`` of yours, or what follows, changes values on purpose.

        Raises:
            CheckpointNotFound: The requested save does not exist.
            LoadDiffers: A value in memory is not what was saved, although the files are whole.
            RefusedOnlyCopy: There are saves, but none can be resumed.
            StoreTemporary: A required mirror does not answer and there is nothing on the disk.
        """
        self._check_open()

        def checked() -> LoadOptions:
            check_state(state)
            if state.per_rank and not self._stages.of_ranks:
                from ckptmirror.formats.names import live_values

                check_patterns(state.per_rank, live_values(state.model))
            return LoadOptions(
                checked_parts(parts_alone(exclude)),
                checked_wins(command_wins),
                allow_cold_optimizer,
                verify_loaded,
                name_rules(exclude, rename, strict=strict),
            )

        options = agreed_options(
            self.ranks,
            checked,
            what="begin to resume",
            stages=self._stages,
            policy=policy_text(self.root, policy),
            force=bool(force),
        )
        if self._saver is not None:
            self._last_before = self._saver.settle(DEFAULT_WAIT_S)
            follow(self._skipped, up_to=self._snapshot_step)  # also what was skipped while it was written
            self._saver = None  # its attempt is over, even if this resume fails
            if (last := self._last_before) and not last.skipped and (failure := last.unobserved) is not None:
                save_logger(_log, last).error(
                    "step %d was not saved; the next save() or close() will raise the error: %s", last.step, failure
                )
        if self._unchanged is not None:
            self._unchanged.end()
        info, run_id, attempt, torn, renamed, self._unchanged = resume_run(
            self.root,
            self.ranks,
            self._node,
            state,
            policy=policy,
            force=force,
            options=options,
            stages=self._stages,
            bus=self.events,
        )
        self._mirror_wait.torn, self._mirror_wait.attempt = torn, attempt.number
        leader: LeaderSide | None = None
        if self._node is not None:
            leader = LeaderSide(
                self._node.table,
                self._specs,
                self._node.fenced,
                self._node.on_commit,
                self._node.recreate_table,
                self._node.on_skipped,
                self._node.on_failed,
                self._node.taken.steps,
            )
        import_formats(self.kinds)
        self._saver = Saver(
            self.root,
            run_id,
            attempt,
            self._save_ranks,
            self.events,
            leader,
            self._skipped,
            self._stages,
            renamed=renamed,
            before_each=self._rank_lock.retake if self._rank_lock is not None else None,
        )
        self._saver.follow(self._last_before)
        self._snapshot_step = -1  # of this attempt
        if info is not None:
            follow(self._skipped, up_to=info.step)
        if self._unchanged is not None:
            self._saver.before_first = self._unchanged.before_save
        if info is None:
            _log.info("run %s attempt %d starts at step 0", run_id[:8], attempt.number)
        else:
            save_logger(_log, info, event="AttemptDecided").info(
                "run %s attempt %d continues from step %d (%s, %s)",
                run_id[:8],
                attempt.number,
                info.step,
                info.kind,
                info.place,
            )
            self._saver.last_step = info.step
            self._saver.reserve(self.kinds, state)
        say_if_disk_is_small(self.ranks, self._node, state, self.kinds)
        return info

    def load(
        self,
        state: TrainState,
        reference: Reference = "latest",
        *,
        exclude: Collection[str] = (),
        verify_loaded: bool = True,
        rename: Rename | None = None,
        strict: bool = True,
    ) -> ResumeInfo:
        """Load a checkpoint of this root or any other into ``state``; the run does not change. Every rank calls this.

        Args:
            state: What to load into.
            reference: A step of ``root``, ``"latest"``, or what :func:`resolve_checkpoint_reference` takes, on this
                disk: also a legacy checkpoint, for which the log warns that it has no checksums.
            exclude: Parts of the state and patterns of tensors to leave unchanged, as in :meth:`resume`.
            verify_loaded: As in :meth:`resume`.
            rename: The names that tensors of the save have in the model, as in :meth:`resume`.
            strict: Whether every tensor of save and model has to be in the other.

        Raises:
            CheckpointNotFound: It does not exist.
            IntegrityError: A file differs from what was saved.
            LoadDiffers: A value in memory is not what was saved, although the files are whole.
        """
        self._check_open()

        def checked() -> LoadOptions:
            check_state(state)
            parts = checked_parts(parts_alone(exclude))
            rules = name_rules(exclude, rename, strict=strict)
            return LoadOptions(parts, verify_loaded=verify_loaded, rules=rules)

        options = agreed_options(self.ranks, checked, what="begin to load", stages=self._stages)
        return load_state(self.root, self.ranks, state, reference, options, self._stages)

    # -- save -----------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        kinds: Sequence[Kind] | None = None,
        metrics: Mapping[str, float] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as ``step``. Every rank calls this.

        Blocks only for the host copy, and for the commit of an earlier save still in flight. Everything else happens in
        the background; ``SaveHandle.wait`` and the next ``save`` raise a failure there. If the disk has no room, the
        save is skipped instead: training continues, and the save's handle and :meth:`close` raise.

        Raises:
            StepBehind: ``step`` is lower than the last one saved.
            BackgroundSaveFailed: The save before this one failed.
            AttemptFenced: A newer attempt of this run has started elsewhere.
            LoadDiffers: The model or the optimizer was made or filled anew after :meth:`resume`.
        """
        saver = self._started()
        check_is_state(state)
        for name, given in (("metrics", metrics), ("fields", fields)):
            if given is not None and not isinstance(given, Mapping):
                raise UsageError(f"{name} is {given!r}; it must be a dict.", hint=f'Write {name}={{"loss": 0.5}}.')
        chosen = self.kinds if kinds is None else checked_kinds(kinds)
        if self._stages.of_ranks:
            check_kinds_of_stages(chosen)
        handle = saver.save(SaveRequest(checked_step(step), chosen, dict(metrics or {}), dict(fields or {})), state)
        handle.on_mirrored(self._wait_mirrored)
        if self.mode == "blocking":
            handle.wait_over()
            handle.raise_unobserved()
        return handle

    def save_emergency_checkpoint(self, step: int, state: TrainState) -> Path:
        """Write this rank's part of an emergency snapshot to local disk, durable on return, without any collective.

        Every rank calls it at the same step, after :meth:`StopRequest.check` returned True on all of them. If the disk
        has no room, or fails, the snapshot goes only to ``persistent_dir``. A rank for which it raised may call it once
        more for the same step; on the others, a second call for one step changes nothing.

        Raises:
            LocalStorageFull: There is no room, and no ``persistent_dir``; earlier saves are unchanged.
            LocalStorageUnwritable: The disk is read-only or gone, and there is no ``persistent_dir``.
            IntegrityError: It reported an I/O error, and there is no ``persistent_dir``.
        """
        saver, step = self._started(), checked_step(step)
        check_is_state(state)
        path = save_emergency(
            self.root,
            state,
            run_id=saver.run_id,
            attempt=saver.attempt,
            number=saver.take_number_of_snapshot(step),
            step=step,
            ranks=self.ranks,
            bus=self.events,
            persistent_dir=self._persistent_dir,
            apart=saver.replicas.differ,
            stage=self._stages.of(self.ranks.rank),
            renamed=saver.renamed,
            in_flight=saver.in_flight,
        )
        self._snapshot_step = step
        follow(self._skipped)
        return path

    def report(self, step: int, loss: float) -> None:
        """Tell that training has reached ``step``, and its loss there. Call it often, for example at each logged step.

        From this the next starts know whether a save is good. If training reported a step, and then it diverged or died
        before its next save, three times in a row from one save, that save is *quarantined*: ``resume`` goes back to
        the save before it, once, and says so. Without reports no save is ever quarantined.

        It never waits: what is new is written in the background. Only what the first rank of each node reports counts.

        Args:
            step: The step of training that was done.
            loss: The loss, as a number that is on the host already: of a tensor, ``float`` waits for the device. If it
                is NaN or infinite, this start has diverged, unless it saves all the same: better raise an error.

        Raises:
            UsageError: ``resume`` was not called, ``step`` is not a step, or ``loss`` is not a number.
        """
        self._started()
        step, value = checked_step(step), checked_loss(loss)
        if self._node is not None:
            self._node.report(step, value)

    # -- look -----------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return what is saved and what is not yet safe. Asks no mirror.

        Reads only this node's disk, and the persistent directory: if that hangs, it takes up to 20 s.

        Raises:
            NoTable: Several hosts mount the root, and the pending-uploads table is on another one, that of the leader.
        """
        return read_status(self.root, state_dir=self._state_dir)

    def wait(self, until: Literal["committed", "mirrored"] = "mirrored", timeout_s: float = DEFAULT_WAIT_S) -> None:
        """Wait until every save so far is committed on local disk, or verified on every required mirror.

        A stop request does not end it; it ends :meth:`close`, which waits for the uploads too.

        Raises:
            UsageError: ``until`` is neither.
            WaitTimeout: ``timeout_s`` seconds passed.
            DeadlinePassed: Uploads failed for good, so waiting longer does not help.
            BackgroundSaveFailed: A save failed or was skipped, and no call has raised that yet.
            AttemptFenced: A newer attempt has started, so nothing more is sent.
        """
        if until not in ("committed", "mirrored"):
            raise UsageError(f"Saves are never {until!r}.", hint="Wait for 'committed' or 'mirrored'.")
        timeout_s = checked_seconds(timeout_s)
        deadline = time.monotonic() + timeout_s
        self._started().wait_over(timeout_s)
        raise_skipped(self._skipped)
        if until == "mirrored" and not self._wait_mirrored(None, max(0.0, deadline - time.monotonic())):
            why = f"Not everything is mirrored after {timeout_s:g} s."
            raise WaitTimeout(why, hint=f"Uploads continue; see `ckptmirror status --root {quote(str(self.root))}`.")

    def rotate(self, timeout_s: float = 300.0) -> RotationReport | None:
        """Rotate now, waiting up to ``timeout_s`` seconds for pending uploads. Returns None except on the leader.

        Before each deletion it asks the mirrors, whose answers have limits of their own: a hanging one costs minutes.
        """
        self._check_open()
        timeout_s = checked_seconds(timeout_s)
        return self._node.rotate_now(timeout_s) if self._node is not None else None

    # -- end ------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 600.0, *, stop: StopRequest | None = None) -> None:
        """Finish: wait up to ``timeout_s`` seconds for the save in flight and the uploads, then release everything.

        The limit holds whatever a mirror does: a few seconds later, a thread that a mirror blocks is left behind.

        Needs no other rank. After a stop request (``stop.requested``), also one that comes meanwhile, it does not wait
        for uploads: what is pending stays in the table, and the next start or ``ckptmirror drain`` finishes it.

        Raises:
            BackgroundSaveFailed: The last save failed, or the disk had no room for some saves. After a stop request, a
                failure does not count if a newer save or an emergency snapshot followed.
            DeadlinePassed: The run finished with something not verified on a required mirror (exit code 8). Every call
                raises this until ``ckptmirror drain`` has verified it.
        """
        if self._is_inherited:
            return
        if self._freed:
            if self._left_pending is not None and not self._mirror_wait.is_mirrored(None, leads=self._node is not None):
                raise self._left_pending
            return
        if stop is not None and not isinstance(stop, StopRequest):
            raise UsageError(
                f"stop={stop!r} is not a StopRequest.",
                hint="Pass the one that the training loop asks: stop = StopRequest().install().",
            )
        timeout_s = checked_seconds(timeout_s)
        self._closed = True
        stopped = False

        def is_stopped() -> bool:
            nonlocal stopped
            if not stopped and stop is not None and stop.requested:
                stopped = True
                self.events.emit(stop_event(stop, self.ranks.rank))
            return stopped

        failed = is_of_training(sys.exc_info()[1])  # which is handled just now; torchrun stops the other ranks
        deadline = time.monotonic() + timeout_s
        try:
            if self._saver is not None:
                self._end_saves(self._saver, timeout_s, is_stopped)
            elif self._last_before is not None:
                self._last_before.raise_unobserved()
            follow(self._skipped, up_to=self._snapshot_step)
            raise_skipped(self._skipped if not is_stopped() else [one for one in self._skipped if not one.is_followed])
        except (KeyboardInterrupt, SystemExit):
            stopped = True  # no waiting for uploads now, and pending uploads must not hide this error
            raise
        finally:
            # However the wait ended, even by Ctrl-C, a save in flight needs all this until the process ends.
            saving = self._saver is not None and self._saver.in_flight is not None
            try:
                if self._node is not None:
                    left_s = max(0.0, deadline - time.monotonic())
                    self._node.finish(left_s, is_stopped=is_stopped, saving=saving, failed=failed)
            except DeadlinePassed as error:
                self._left_pending = error
                raise
            finally:
                if not saving:
                    self._free()

    def _end_saves(self, saver: Saver, timeout_s: float, is_stopped: Callable[[], bool]) -> None:
        try:
            saver.end(timeout_s)
        except BackgroundSaveFailed as error:
            if not is_stopped() or not self._is_followed(saver):
                raise
            newest = max(self._snapshot_step, saver.last_step)
            save_logger(_log, saver.last, rank=self.ranks.rank).error(
                "%s; step %d followed, and the run was asked to stop", error.message.rstrip("."), newest
            )
        saver.release()

    def _is_followed(self, saver: Saver) -> bool:
        """Whether an emergency snapshot, or what the attempt continued from, came after the last call of ``save``."""
        last = saver.last
        if last is None or last is not self._last_before:
            return last is not None and self._snapshot_step >= last.step
        return self._snapshot_step >= 0 or saver.last_step > last.step

    def _free(self) -> None:
        self._freed = True
        if self._unchanged is not None:
            self._unchanged.end()
        atexit.unregister(self._warn_that_it_was_not_closed)
        if self._rank_lock is not None:
            self._rank_lock.release()
        self._save_ranks.close()
        self.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._is_inherited:
            self.close()
            return
        try:
            if self._saver is not None and not self._closed:
                self._saver.wait_over(_LEAVING_SAVE_S)  # the save in flight may be the only result of this training
        except CkptMirrorError as first:
            _log.error("The with block ended with %s. %s", type(error).__name__, first)
        try:
            self.close(timeout_s=0.0)
        except CkptMirrorError as second:
            _log.error("The with block ended with %s. %s", type(error).__name__, second)

    # -- inside ---------------------------------------------------------------------------------------------

    def _warn_that_it_was_not_closed(self) -> None:
        """At the end of a process that never called ``close``: what is not safe does not go unseen (I8)."""
        if self._is_inherited:
            return
        if self._saver is not None:
            with suppress(CkptMirrorError):  # a thread that still tells other ranks would abort the process at its end
                self._saver.wait_over(_LEAVING_TELL_S)
        if self._node is None:
            return
        self._node.end_attempt(failed=is_of_training(getattr(sys, "last_value", None)))
        try:
            pending = self._node.durability().files
        except CkptMirrorError as error:
            _log.error("%s: close() was not called, and what is not safe yet is unknown: %s", self.root, error)
            return
        if pending:
            _log.error(
                "%s: close() was not called, and %d files are not verified on their mirrors. `ckptmirror drain --root "
                "%s`, or the next start, finishes them.",
                self.root,
                pending,
                quote(str(self.root)),
            )
        elif self._saver is not None and self._saver.last_step >= 0:
            safe = "Every save is verified on its mirrors."
            none = "This run has no mirror: the local disk holds the only copy."
            _log.warning("%s: close() was not called. %s", self.root, safe if self._urls else none)

    def _wait_mirrored(self, save_id: str | None, timeout_s: float) -> bool:
        return self._mirror_wait.wait(self._node, save_id, timeout_s)

    def _started(self) -> Saver:
        self._check_open()
        if self._saver is None:
            raise UsageError("resume() was not called.", hint="Call manager.resume(state) once, before the first save.")
        return self._saver

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child: it has none of the threads, and what they do is not its to wait for."""
        return os.getpid() != self._pid

    def _check_open(self) -> None:
        if self._is_inherited:
            raise UsageError(
                f"This manager belongs to process {self._pid}; this one was forked from it.",
                hint="Save and resume in the process that made the manager.",
            )
        if self._closed:
            raise UsageError(
                "This manager is closed.", hint="Create a CheckpointManager again, and call resume() before save()."
            )
