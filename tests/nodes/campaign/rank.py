"""What a rank does: resume, say what it found, train and save, and say what was acknowledged.

Rules:
* Everything that the campaign learns comes through a pipe, and what was sent before a SIGKILL arrives.
* A number of a crash point means the same in each run of one plan, as far as threads allow.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptmirror import CheckpointManager, Retention, SaveHandle, StopRequest
from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local import crashpoints
from tests.nodes.campaign.plans import Ambush, Plan
from tests.nodes.campaign.trained_values import Trained, code_of

__all__ = [
    "ALL_DONE",
    "Asked",
    "Broke",
    "Committed",
    "Ended",
    "Failed",
    "Mirrored",
    "Resumed",
    "Snapshot",
    "Stopped",
    "take_part",
]

ALL_DONE = "all done"
STACKS_SIGNAL = signal.SIGUSR2
_STOP_WAIT_S = 30.0


@dataclass(frozen=True)
class Resumed:
    """Where training continues, and with what: None for step 0."""

    attempt: str
    step: int | None
    save_id: str
    kind: str
    place: str
    codes: dict[str, list[float]]
    extra: dict[str, Any]
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Committed:
    step: int
    save_id: str


@dataclass(frozen=True)
class Mirrored:
    """Everything that was committed so far is on all mirrors."""


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of an emergency snapshot is durable."""

    step: int


@dataclass(frozen=True)
class Asked:
    """Rank 0 waits until the campaign has let something happen."""


@dataclass(frozen=True)
class Stopped:
    """The ranks of the ambush are being stopped."""


@dataclass(frozen=True)
class Failed:
    """An error that a user may see. ``when``: start, train or close."""

    when: str
    kind: str
    message: str
    exit_code: int


@dataclass(frozen=True)
class Broke:
    """An error that nobody should see."""

    trace: str


@dataclass(frozen=True)
class Ended:
    """The manager is closed. ``timings``: seconds since the rank began, for the curious."""

    timings: dict[str, float] = field(default_factory=dict)


class _Voice:
    """The way to the campaign; an ambush may strike in any thread, so only one thread sends at a time."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, message: object) -> None:
        with self._lock:
            self._pipe.send(message)

    def wait(self) -> object:
        return self._pipe.recv()


def take_part(rank: int, plan: Plan, port: int, pipe: Any) -> None:
    """The whole life of a rank."""
    log = os.open(plan.log_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True)
    voice = _Voice(pipe)
    pids = voice.wait()
    assert isinstance(pids, list)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.size, timeout=timedelta(seconds=60))
    try:
        voice.say(Ended(_Life(rank, plan, voice, pids).run()))
    except BaseException:  # noqa: BLE001 - a finding, with all that is known of it
        voice.say(Broke(traceback.format_exc()))
    assert voice.wait() == ALL_DONE  # a rank that leaves early would look like a dead one
    crashpoints.disarm()
    dist.destroy_process_group()


class _Life:
    def __init__(self, rank: int, plan: Plan, voice: _Voice, pids: Sequence[int]) -> None:
        self._rank, self._plan, self._voice, self._pids = rank, plan, voice, pids
        self._timings: dict[str, float] = {}
        self._began = time.monotonic()

    def _note(self, what: str) -> None:
        self._timings[what] = round(time.monotonic() - self._began, 2)
        self._timings[f"cpu when {what}"] = round(time.process_time(), 2)

    def run(self) -> dict[str, float]:
        plan, when = self._plan, "start"
        manager: CheckpointManager | None = None
        asked, trained = threading.Event(), Trained.build(plan.wrapped, plan.number)
        dist.barrier()  # from here on only what is tested notices that a rank is gone
        self._note("built")
        with StopRequest(on_request=[lambda _: asked.set()]) as stop:
            try:
                self._lie_in_wait(in_training=False)
                manager = CheckpointManager(
                    plan.root_of(self._rank),
                    plan.urls,
                    kinds=plan.kinds,
                    retention=Retention(keep_last=2),
                    timeout_s=plan.timeout_s,
                    persistent_dir=plan.persistent_dir,
                    share_downloads=plan.share_downloads,
                )
                self._note("opened")
                info = manager.resume(trained.state, policy=plan.policy, force=plan.policy == "scratch")
                self._note("resumed")
                self._voice.say(_resumed(manager, info, trained))
                when = "train"
                self._lie_in_wait(in_training=True)
                self._train(manager, trained, info.step if info is not None else 0, stop, asked)
                self._note("trained")
            except CkptMirrorError as error:
                self._voice.say(_failed(when, error))
            if manager is not None:
                failed = "trained" not in self._timings
                try:
                    manager.close(60.0 if (plan.ends_mirrored or stop.requested) and not failed else 0.0, stop=stop)
                except CkptMirrorError as error:
                    self._voice.say(_failed("close", error))
        self._note("closed")
        return self._timings

    def _train(
        self, manager: CheckpointManager, trained: Trained, before: int, stop: StopRequest, asked: threading.Event
    ) -> None:
        plan, handles, told = self._plan, [], set[int]()

        def tell(is_told: Callable[[SaveHandle], bool]) -> None:
            for handle in handles:
                if handle.step not in told and is_told(handle):
                    told.add(handle.step)
                    assert handle.save_id is not None
                    self._voice.say(Committed(handle.step, handle.save_id))

        for number in range(1, plan.steps + 1):
            step = before + number
            if number == plan.asks_at and self._rank == 0:
                self._voice.say(Asked())
                self._voice.wait()
            ranks, at = plan.asked_to_stop
            if number == at and self._rank in ranks:
                os.kill(os.getpid(), signal.SIGTERM)
                asked.wait(_STOP_WAIT_S)
            trained.train(code_of(plan.number, step), self._rank)
            if at and stop.check(manager.ranks):
                manager.save_emergency_checkpoint(step, trained.state)
                self._voice.say(Snapshot(step))
                return
            handles.append(manager.save(step, trained.state))
            tell(lambda handle: handle.done("committed"))
        tell(lambda handle: bool(handle.wait("committed", timeout_s=2 * plan.timeout_s)))
        self._note("committed")
        if plan.ends_mirrored:
            manager.wait("mirrored", timeout_s=plan.timeout_s)
            self._voice.say(Mirrored())

    def _lie_in_wait(self, *, in_training: bool) -> None:
        ambush = self._plan.ambush
        if ambush is not None and (ambush.rank, ambush.in_training) == (self._rank, in_training):
            crashpoints.arm(ambush.point, die=self._strike(ambush))

    def _strike(self, ambush: Ambush) -> Callable[[], None]:
        struck = threading.Lock()

        def strike() -> None:
            if not struck.acquire(blocking=False):
                return  # it was stopped once, and has been woken
            if ambush.signal == signal.SIGSTOP:
                self._voice.say(Stopped())
            own = os.getpid()
            for rank in sorted(ambush.struck, key=lambda rank: self._pids[rank] == own):
                os.kill(self._pids[rank], ambush.signal)

        return strike


def _failed(when: str, error: CkptMirrorError) -> Failed:
    return Failed(when, type(error).__name__, str(error), error.exit_code)


def _resumed(manager: CheckpointManager, info: Any, trained: Trained) -> Resumed:
    assert manager._saver is not None
    attempt = manager._saver.attempt.id
    if info is None:
        return Resumed(attempt, None, "", "", "", {}, {})
    found = trained.state.extra
    return Resumed(attempt, info.step, info.save_id, info.kind, info.place, trained.codes(), found, info.passed_over)
