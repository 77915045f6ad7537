"""Child processes that begin with everything imported and none of it used: one, one that is killed, the ranks of a job.

They are forked by a process that does nothing else: torch takes seconds to import, and what it has started (threads,
pools, connections) outlives no fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.local import crashpoints

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "pytest", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch._dynamo",  # fully_shard imports it
    "ckptmirror.manager", "ckptmirror.flow.start.leader", "tests.kit.processes", "tests.kit.roots",
    "ckptmirror.formats.dcp", "ckptmirror.formats.emergency", "ckptmirror.formats.model", "ckptmirror.formats.restore",
    "ckptmirror.ranks.gloo", "ckptmirror.stores.file", "ckptmirror.stores.gs_client", "google.cloud.storage",
])  # fmt: skip
Pipe = _CONTEXT.Pipe
LIMIT_S = 60.0
Job = Callable[..., Any]


def clean_process(work: Callable[..., object], *arguments: Any, **more: Any) -> ForkServerProcess:
    """A process that will do ``work``, a function of a module, in today's environment; it dies with this one."""
    return _CONTEXT.Process(target=_begin, args=(dict(os.environ), work, arguments, more), daemon=True)


def _begin(environment: dict[str, str], work: Callable[..., object], arguments: Any, more: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments, **more)


@dataclass(frozen=True)
class _Raised:
    """What a rank sends that has nothing to return."""

    traceback: str


def _process(
    job: Job, rank: int, size: int, port: int, store_in_rank_0: bool, pipe: Any, args: tuple[Any, ...]
) -> None:
    first = rank == 0 and store_in_rank_0
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=first, wait_for_workers=False, timeout=timedelta(seconds=30))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        pipe.send(job(rank, *args))
    except BaseException:
        pipe.send(_Raised(traceback.format_exc()))
        raise
    assert pipe.recv() == "all done"  # a rank that leaves early would look like a dead one
    dist.destroy_process_group()


def run_ranks(
    size: int,
    job: Job,
    *args: Any,
    dead: tuple[int, ...] = (),
    store_in_rank_0: bool = False,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """Run ``job(rank, *args)`` in ``size`` processes; return what each returned, None for those expected to die."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if store_in_rank_0:
        store = None  # frees the port for rank 0
    pipes = [Pipe() for _ in range(size)]
    processes = [
        clean_process(_process, job, rank, size, port, store_in_rank_0, pipes[rank][1], args) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        results = []
        for rank, (mine, _) in enumerate(pipes):
            if rank in dead:
                results.append(None)
                continue
            assert mine.poll(limit_s), f"rank {rank} said nothing within {limit_s} s"
            results.append(mine.recv())
            assert not isinstance(results[-1], _Raised), f"rank {rank}: {results[-1].traceback}"
        for rank, (mine, _) in enumerate(pipes):
            if rank not in dead:
                mine.send("all done")
        for rank, process in enumerate(processes):
            process.join(limit_s)
            assert process.exitcode == (-signal.SIGKILL if rank in dead else 0), f"rank {rank}: {process.exitcode}"
        return results
    finally:
        for process in processes:
            process.kill()


def outcome(call: Callable[[], Any]) -> tuple[str, str, int]:
    """Return the kind of the error of ``call``, its message and its exit code."""
    try:
        value = call()
    except (CkptMirrorError, OSError) as error:
        return type(error).__name__, str(error), getattr(error, "exit_code", -1)
    return "value", repr(value), 0


def killed_at(crash_at: str | None, job: Callable[..., object], *arguments: Any, **more: Any) -> bool:
    """Run ``job`` in a child that dies by SIGKILL at a crash point; whether it did (else it ended in order)."""
    child = clean_process(_until_killed, crash_at, job, arguments, more)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), "the child failed in another way"
    return child.exitcode != 0


def _until_killed(crash_at: str | None, job: Callable[..., object], arguments: Any, more: dict[str, Any]) -> None:
    crashpoints.arm(crash_at)
    job(*arguments, **more)


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child; return its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]
