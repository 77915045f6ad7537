"""Runs a function in several real processes that form a gloo job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptmirror.core.errors import CkptMirrorError
from tests import clean_processes

LIMIT_S = 60.0
Job = Callable[..., Any]


def _process(
    job: Job, rank: int, size: int, port: int, store_in_rank_0: bool, pipe: Any, args: tuple[Any, ...]
) -> None:
    first = rank == 0 and store_in_rank_0
    store = dist.TCPStore("127.0.0.1", port, is_master=first, wait_for_workers=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    pipe.send(job(rank, *args))
    assert pipe.recv() == "all done"  # a rank that leaves early would look like a dead one
    dist.destroy_process_group()


def run_ranks(size: int, job: Job, *args: Any, dead: tuple[int, ...] = (), store_in_rank_0: bool = False) -> list[Any]:
    """Run ``job(rank, *args)`` in ``size`` processes; return what each returned, None for those expected to die."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if store_in_rank_0:
        store = None  # frees the port for rank 0
    pipes = [clean_processes.Pipe() for _ in range(size)]
    processes = [
        clean_processes.process(_process, job, rank, size, port, store_in_rank_0, pipes[rank][1], args)
        for rank in range(size)
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
            assert mine.poll(LIMIT_S), f"rank {rank} said nothing within {LIMIT_S} s"
            results.append(mine.recv())
        for rank, (mine, _) in enumerate(pipes):
            if rank not in dead:
                mine.send("all done")
        for rank, process in enumerate(processes):
            process.join(LIMIT_S)
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
