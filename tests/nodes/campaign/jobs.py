"""A job of the campaign: its ranks as processes, what they say, and their end.

Rules:
* Ranks are forked by a process that has imported everything and started nothing (``tests.kit.processes``).
* A job that says nothing new for longer than its limit hangs: its ranks leave their stacks, and are killed.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from tests.kit.processes import Pipe, clean_process
from tests.nodes.campaign.plans import Plan
from tests.nodes.campaign.rank import ALL_DONE, STACKS_SIGNAL, Asked, Broke, Ended, Stopped, take_part

__all__ = ["Hung", "Job", "run_together"]

LIMIT_S = 240.0  # no job takes a tenth of it, but on a machine with much else to do
_LEAVES_S = 60.0
_TICK_S = 0.5
T = TypeVar("T")


class Hung(AssertionError):
    """A job did not end; the text has the stacks of its ranks."""


class Job:
    """A running job."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.said: list[list[object]] = [[] for _ in range(plan.size)]
        self.is_asleep = False
        self._slept = False
        self._answered = 0
        plan.log_of(0).parent.mkdir(exist_ok=True)
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [Pipe() for _ in range(plan.size)]
        self._pipes = [mine for mine, _ in pipes]
        self.processes = [
            clean_process(take_part, rank, plan, self._store.port, theirs) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        pids = [process.pid for process in self.processes]
        for pipe in self._pipes:
            pipe.send(pids)

    def all_said(self, kind: type[T]) -> list[T]:
        return [one for said in self.said for one in said if isinstance(one, kind)]

    def of_rank(self, rank: int, kind: type[T]) -> list[T]:
        return [one for one in self.said[rank] if isinstance(one, kind)]

    def listen(self, until_s: float) -> None:
        """Take in what ranks say until somebody said something, or the time is over."""
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if not pipe.closed}
        for pipe in multiprocessing.connection.wait(list(open_pipes), timeout=max(0.0, until_s - time.monotonic())):
            assert isinstance(pipe, multiprocessing.connection.Connection)
            try:
                self.said[open_pipes[pipe]].append(pipe.recv())
            except (EOFError, ConnectionResetError):
                pipe.close()

    def is_over(self, rank: int) -> bool:
        """Whether a rank has come to its end: it said so, or it is gone."""
        return self._pipes[rank].closed or bool(self.of_rank(rank, Ended) or self.of_rank(rank, Broke))

    @property
    def is_ending(self) -> bool:
        """Whether there is nothing more to wait for."""
        return all(self.is_over(rank) for rank in range(self.plan.size))

    @property
    def asks(self) -> bool:
        return len(self.all_said(Asked)) > self._answered

    def answer(self) -> None:
        self._answered += 1
        self._pipes[0].send("go on")

    @property
    def falls_asleep(self) -> bool:
        return not self._slept and bool(self.all_said(Stopped))

    def sleeps(self) -> None:
        """Wait until the ranks that were stopped are."""
        assert self.plan.ambush is not None
        deadline = time.monotonic() + LIMIT_S
        while not all(_is_stopped(self.processes[rank].pid) for rank in self.plan.ambush.struck):
            if time.monotonic() > deadline:
                raise Hung(f"job {self.plan.number} does not stop\n{self.stacks()}")
            self.listen(time.monotonic() + 0.01)
        self._slept = self.is_asleep = True

    def wake(self) -> None:
        assert self.plan.ambush is not None
        self.is_asleep = False
        self.signal(self.plan.ambush.struck, signal.SIGCONT)

    def signal(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, number)

    def leave(self) -> None:
        """Let the ranks that have ended go home."""
        for rank, pipe in enumerate(self._pipes):
            if not pipe.closed and self.is_over(rank):
                try:
                    pipe.send(ALL_DONE)
                except BrokenPipeError:
                    continue
        for process in self.processes:
            process.join(_LEAVES_S)
            if process.is_alive():
                raise Hung(f"job {self.plan.number} does not leave\n{self.stacks()}")
        self.kill()

    def kill(self) -> None:
        """End it now, whatever it does."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            if not pipe.closed:
                pipe.close()
        self._store = None

    def stacks(self) -> str:
        """Let every rank write its stacks, and return the ends of all logs."""
        self.signal(range(self.plan.size), signal.SIGCONT)
        self.signal(range(self.plan.size), STACKS_SIGNAL)
        for process in self.processes:
            process.join(2.0)
        return "\n".join(_end_of(self.plan.log_of(rank)) for rank in range(self.plan.size))


def _end_of(log: Path) -> str:
    return f"--- {log}\n{log.read_text(errors='replace')[-6000:]}" if log.exists() else f"--- no {log}"


def _is_stopped(pid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in ("T", "Z", "X")
    except FileNotFoundError:
        return True


def run_together(jobs: Iterable[Job], on_tick: Callable[[Job], None] = lambda _: None) -> None:
    """Run jobs side by side until each is over or asleep. ``on_tick`` is called whenever one may have said something.

    Raises:
        Hung: One goes on for longer than the limit.
    """
    going, deadline = list(jobs), time.monotonic() + LIMIT_S
    while going:
        for job in list(going):
            job.listen(time.monotonic() + (_TICK_S if len(going) == 1 else 0.05))
            on_tick(job)
            if job.is_asleep:
                going.remove(job)
            elif job.is_ending:
                going.remove(job)
                job.leave()
        if time.monotonic() > deadline:
            stacks = "\n".join(job.stacks() for job in going)
            for job in going:
                job.kill()
            raise Hung(f"jobs {[job.plan.number for job in going]} hang\n{stacks}")
