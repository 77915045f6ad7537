"""Proves of a training that a run which was killed and resumed equals one that was not.

Rules:
* Each rank is a process of its own, and the kill is a SIGKILL from outside: nothing is left but what is on the disk.
* The undisturbed run has no manager, so a save that changes the training is found too.
* Every rank records the whole state after every step, and after the load. The records are compared in the order in
  which they can go wrong, and the error names the first: the training itself, the save, the load, the trajectory.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from ckptmirror import CheckpointManager, TrainState, errors
from ckptmirror.testing.training_trace import RETURNED, Record, differences, record_of

__all__ = ["assert_exact_resume"]

_Run = Literal["undisturbed", "killed", "resumed"]
_RUNS: tuple[_Run, ...] = ("undisturbed", "killed", "resumed")
_LOADED = 0  # the step under which the record after the load is kept


def assert_exact_resume(
    make_state: Callable[[], TrainState],
    train_step: Callable[[TrainState], object],
    *,
    steps: int = 6,
    world_size: int = 1,
    kinds: Sequence[str] = ("dcp", "model"),
    ignore: Sequence[str] = (),
    backend: str | None = None,
    timeout_s: float = 300.0,
) -> None:
    """Assert that training ``steps`` steps equals training half of them, a kill, a resume, and the other half.

    Compares, bit for bit, after every step and on every rank: parameters, buffers (also those that are not saved),
    optimizer, schedule, scaler, averages, position in the data, ``extra``, the random number generators, and what
    ``train_step`` returned. Two whole runs and one half are trained, so use a small model.

    Args:
        make_state: Builds the state as your script does at every start. A function of a module: it runs in other
            processes. Torch, NumPy and ``random`` are seeded before, each rank by its own number.
        train_step: Does one step. Return what has to be equal too, such as the loss and the indices of the batch.
        steps: Steps of the undisturbed run, at least 2; the save is at half of them.
        world_size: Number of ranks. This process starts them; do not call it under ``torchrun``.
        kinds: What the save before the kill has: ``"dcp"``, ``"model"`` or both, or ``("emergency",)``.
        ignore: Patterns of names that may differ, as the error writes them: ``("extra.seconds*",)``.
        backend: For ``init_process_group`` before ``make_state``: by default "gloo" for several ranks, none for one.
        timeout_s: Limit for each of the three runs, in seconds.

    Raises:
        AssertionError: Something differs. Says whether the training is not deterministic, the load is not exact, or
            only the steps after it are not; after which step and on which rank; and names the values.
        UsageError: An argument is wrong.
    """
    if steps < 2 or world_size < 1:
        raise errors.UsageError(f"steps={steps} and world_size={world_size} must be at least 2 and 1.")
    if dist.is_available() and dist.is_initialized():
        raise errors.UsageError(
            "assert_exact_resume was called in a process that is a rank already.",
            hint="Call it in one process, such as a test; it starts world_size ranks itself.",
        )
    backend = backend or ("gloo" if world_size > 1 else None)
    work = Path(tempfile.mkdtemp(prefix="exact-resume-"))
    try:
        plan = _Plan(make_state, train_step, steps, world_size, tuple(kinds), tuple(ignore), backend, work)
        _check_can_travel(plan)
        for run in _RUNS:
            _run_ranks(plan, run, timeout_s)
            _compare(plan, run)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class _Plan:
    make_state: Callable[[], TrainState]
    train_step: Callable[[TrainState], object]
    steps: int
    world_size: int
    kinds: tuple[str, ...]
    ignore: tuple[str, ...]
    backend: str | None
    work: Path

    @property
    def half(self) -> int:
        return self.steps // 2

    def record(self, run: _Run, rank: int, step: int) -> Path:
        return self.work / f"{run}-rank{rank}-{step}.pt"


def _check_can_travel(plan: _Plan) -> None:
    try:
        pickle.dumps(plan)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise errors.UsageError(
            f"make_state and train_step run in other processes, and cannot be sent there: {error}.",
            hint="Define both at the top level of a module, without lambda; functools.partial may add arguments.",
        ) from error


# -- this process -------------------------------------------------------------------------------------------------


def _run_ranks(plan: _Plan, run: _Run, timeout_s: float) -> None:
    """Start all ranks of a run, and wait until each has said that it is done; then end them: the killed run by SIGKILL.

    Raises:
        AssertionError: A rank raised, died, or took longer than ``timeout_s``.
    """
    context = multiprocessing.get_context("forkserver")  # no fork of a process that has threads, or has used a GPU
    ranks: dict[Connection, tuple[int, BaseProcess]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for rank in range(plan.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(plan, run, rank, theirs))
            process.start()
            theirs.close()
            ranks[mine] = rank, process
        waiting = set(ranks)
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(ranks[one][0]) for one in waiting)
                raise AssertionError(f"The {run} run took longer than {timeout_s:g} s; waiting for rank {late}.")
            for one in cast("list[Connection]", ready):
                waiting.discard(one)
                try:
                    failure = one.recv()
                except EOFError:
                    failure = "the process ended without a word; its output may say why"
                if failure is not None:
                    raise AssertionError(f"Rank {ranks[one][0]} failed in the {run} run:\n{failure}")
        if run != "killed":
            for one, (_, started) in ranks.items():
                with suppress(BrokenPipeError):
                    one.send("all done")
                started.join(max(0.0, deadline - time.monotonic()))
    finally:
        for one, (_, started) in ranks.items():
            started.kill()
            started.join()
            one.close()


def _compare(plan: _Plan, run: _Run) -> None:
    """Compare the records of a run with those of the undisturbed one, step by step.

    Raises:
        AssertionError: Something differs.
    """
    saved_at = f"step {plan.half}"
    if run == "killed":
        for step in range(1, plan.half + 1):
            _compare_step(plan, run, step, step, "The training is not deterministic: two runs that nothing interrupted")
        what = f"The save of {saved_at} changes the training: the undisturbed run and the one that saved"
        _compare_step(plan, run, plan.half + 1, plan.half + 1, what)
    elif run == "resumed":
        _compare_step(
            plan, run, plan.half, _LOADED, f"The load is not exact: what was saved at {saved_at} and the load"
        )
        for step in range(plan.half + 1, plan.steps + 1):
            what = f"The load of {saved_at} is exact and the trajectory is not: the undisturbed and the resumed run"
            _compare_step(plan, run, step, step, what)


def _compare_step(plan: _Plan, run: _Run, expected: int, found: int, what: str) -> None:
    for rank in range(plan.world_size):
        paths = plan.record("undisturbed", rank, expected), plan.record(run, rank, found)
        records: list[Record] = [torch.load(path, weights_only=True) for path in paths]
        ignore = [*plan.ignore, *([f"*{RETURNED}*"] if found == _LOADED else [])]
        records = [
            {name: one[name] for name in one if not any(fnmatchcase(name, it) for it in ignore)} for one in records
        ]
        if lines := differences(*records):
            place = f"after step {expected}" if found != _LOADED else "right after resume()"
            raise AssertionError("\n  ".join([f"{what} differ, {place}, on rank {rank}:", *lines, *_advice(what)]))


def _advice(what: str) -> list[str]:
    if "trajectory" not in what:
        return []
    return [
        "What the next step depends on and the state does not hold is at its initial value. Under DDP on three or more "
        "ranks, see ckptmirror.integrations.ddp."
    ]


# -- a rank -------------------------------------------------------------------------------------------------------


def _rank(plan: _Plan, run: _Run, rank: int, parent: Connection) -> None:
    """What a rank's process does: its part of ``run``; then it says so, and waits for leave to end, or for its end."""
    try:
        _join(plan, run, rank)
        _train(plan, run, rank)
    except BaseException:  # noqa: BLE001 - told to the caller, whose error it becomes
        parent.send(traceback.format_exc())
        return
    parent.send(None)
    with suppress(EOFError):  # the caller is gone
        parent.recv()
    if plan.backend is not None and dist.is_initialized():
        dist.destroy_process_group()


def _join(plan: _Plan, run: _Run, rank: int) -> None:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)  # the generator that libraries share
    if plan.backend is None:
        return
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(plan.world_size), "LOCAL_WORLD_SIZE": str(plan.world_size)}
    if plan.world_size > 1:
        torch.set_num_threads(1)  # as torchrun does
    if "nccl" in plan.backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        plan.backend, init_method=f"file://{plan.work}/ranks-{run}", rank=rank, world_size=plan.world_size
    )


def _train(plan: _Plan, run: _Run, rank: int) -> None:
    state = plan.make_state()

    def train_to(last: int, first: int = 1) -> None:
        for step in range(first, last + 1):
            note(step, plan.train_step(state))

    def note(step: int, outcome: object = None) -> None:
        torch.save(record_of(state, outcome), plan.record(run, rank, step))

    if run == "undisturbed":
        train_to(plan.steps)
        return
    emergency = plan.kinds == ("emergency",)
    manager = CheckpointManager(plan.work / "root", kinds=cast(Any, ("dcp",) if emergency else plan.kinds))
    start = manager.resume(state)
    if run == "killed":
        train_to(plan.half)
        if emergency:
            manager.save_emergency_checkpoint(plan.half, state)
        else:
            manager.save(plan.half, state).wait("committed")
        if plan.world_size > 1:
            dist.barrier()  # so that no rank is killed while another still writes
        train_to(plan.half + 1, plan.half + 1)  # what is lost by the kill
        return
    assert start is not None, "resume() found no save"
    assert start.step == plan.half, f"resume() returned {start}, not step {plan.half}"
    note(_LOADED)
    train_to(plan.steps, plan.half + 1)
    manager.close()
